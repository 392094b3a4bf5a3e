"""TensorStore strategies: another library for the same Zarr arrays, not another format. Each loads the checkpoints of the other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt.backends.base import Backend
from ckpt.dist_checkpointing.strategies.base import StrategyAction, register_default_strategy
from ckpt.dist_checkpointing.strategies.sharded import LoadTensors, SaveTensors
from ckpt.errors import ShapeMismatchError, importing, logger_of

if TYPE_CHECKING:
    import tensorstore as ts

logger = logger_of(__name__)


def register_default_tensorstore_strategies() -> None:
    """Register the strategies that load ("zarr", 1), and save and load ("tensorstore", 1), which is Zarr in an OCDBT store."""
    register_default_strategy(StrategyAction.LOAD_SHARDED, "zarr", 1, TensorStoreLoadShardedStrategy())
    register_default_strategy(StrategyAction.LOAD_SHARDED, "tensorstore", 1, TensorStoreLoadShardedStrategy())
    register_default_strategy(StrategyAction.SAVE_SHARDED, "tensorstore", 1, TensorStoreSaveShardedStrategy())


class TensorStoreSaveShardedStrategy(SaveTensors):
    """Saves Zarr v3 arrays through TensorStore: a handful of files however many tensors, or an ordinary directory.

    Args:
        backend, version: recorded in metadata.json.
        kvstore: "ocdbt" or "file"; see `ckpt.backends.tensorstore.TensorStoreBackend`.
        spread_replicas: see `ckpt.dist_checkpointing.strategies.sharded.SaveTensors`.
    """

    def __init__(
        self, backend: str = "tensorstore", version: int = 1, *, kvstore: str = "ocdbt", spread_replicas: bool = False
    ) -> None:
        super().__init__(backend, version, spread_replicas=spread_replicas)
        self._kvstore = kvstore

    def _storage(self) -> Backend:
        with importing("the strategy that saves by tensorstore"):
            from ckpt.backends.tensorstore import TensorStoreBackend
        return TensorStoreBackend(kvstore=self._kvstore)


class TensorStoreLoadShardedStrategy(LoadTensors):
    """Loads tensors; Megatron-Core's arrays through TensorStore, those of this library straight from their files."""

    library = "tensorstore"


def merge_global_slice_with_shape(
    global_slice: Sequence[int | slice], actual_shape: Sequence[int], key: str
) -> tuple[int | slice, ...]:
    """Cut a slice off where the stored array ends, for a tensor that is padded beyond the saved shape.

    Args:
        global_slice: the requested part, one index or slice with both ends per axis.
        actual_shape: of the stored array.

    Raises:
        ShapeMismatchError: the two differ in number of axes, or nothing is left of a slice.

    Example:
        >>> merge_global_slice_with_shape((3, slice(8, 16)), (4, 13), "wte")
        (3, slice(8, 13, None))
    """
    if len(global_slice) != len(actual_shape):
        raise ShapeMismatchError(
            f"{key}: a slice of {len(global_slice)} axes is asked for, the stored array has {len(actual_shape)}"
        )
    merged: list[int | slice] = []
    for asked, size in zip(global_slice, actual_shape, strict=True):
        if isinstance(asked, slice):
            asked = slice(asked.start, min(asked.stop, size))
            if asked.start >= asked.stop:
                raise ShapeMismatchError(
                    f"{key}: elements from {asked.start} on are asked for, and the stored axis ends at {size}: nothing is left to read"
                )
        merged.append(asked)
    return tuple(merged)


def open_ts_array(arr_path: Path) -> ts.TensorStore:
    """Open a Zarr array, of version 2 or 3, on a file system for reading. A missing chunk is an error, not zeros.

    Raises:
        CorruptCheckpointError: there is no such array, or TensorStore cannot read its metadata.
        ConfigurationError: TensorStore cannot be imported.
    """
    with importing(f"opening {arr_path} by tensorstore"):
        from ckpt.backends.tensorstore import folder_store, opened, refusing
    driver = "zarr3" if (Path(arr_path) / "zarr.json").is_file() else "zarr"
    with refusing(f"tensorstore cannot open {arr_path} as a Zarr array"):
        return opened(folder_store(Path(arr_path)), driver=driver)
