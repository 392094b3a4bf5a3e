"""Megatron-Core's zarr strategies, on this library's engine, and its functions for Zarr arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch

from ckpt.backends.base import Backend
from ckpt.backends.zarr import ZarrBackend
from ckpt.dist_checkpointing.mapping import ShardedStateDict
from ckpt.dist_checkpointing.strategies.base import StrategyAction, register_default_strategy
from ckpt.dist_checkpointing.strategies.sharded import LoadTensors, SaveTensors, uncut
from ckpt.errors import ConfigurationError, ShapeMismatchError, logger_of
from ckpt.format.dtypes import AS_INTEGERS, STORABLE, as_integers, zarr_name
from ckpt.format.manifest import MANIFEST_NAME, SHARDED
from ckpt.interop.megatron.layout import layout_of
from ckpt.state.sharded_tensor import ShardedTensor
from ckpt.storage.stored import read_manifest

logger = logger_of(__name__)

numpy_to_torch_dtype_dict: dict[np.dtype[Any], torch.dtype] = {
    np.dtype(getattr(ml_dtypes, zarr_name(dtype), zarr_name(dtype))): dtype
    for dtype in STORABLE
    if zarr_name(dtype) not in AS_INTEGERS
}
"""NumPy -> torch type, of every type of stored arrays. bfloat16 and float8 types are those of ml_dtypes, as in other Zarr libraries."""

torch_to_numpy_dtype_dict = {dtype: numpy_dtype for numpy_dtype, dtype in numpy_to_torch_dtype_dict.items()}

HAS_BFLOAT16 = True


def register_default_zarr_strategies() -> None:
    """Register the strategy that saves ("zarr", 1). `register_default_tensorstore_strategies` registers the one that loads it."""
    register_default_strategy(StrategyAction.SAVE_SHARDED, "zarr", 1, ZarrSaveShardedStrategy())


class ZarrSaveShardedStrategy(SaveTensors):
    """Saves into an ordinary Zarr v3 directory.

    Args:
        backend, version: recorded in metadata.json.
        compressors: see `ckpt.backends.zarr.ZarrBackend`.
        spread_replicas: see `ckpt.dist_checkpointing.strategies.sharded.SaveTensors`.
    """

    def __init__(
        self,
        backend: str = "zarr",
        version: int = 1,
        *,
        compressors: list[dict[str, Any]] | None = None,
        spread_replicas: bool = False,
    ) -> None:
        super().__init__(backend, version, spread_replicas=spread_replicas)
        self._compressors = compressors

    def _storage(self) -> Backend:
        return ZarrBackend(compressors=self._compressors)


class ZarrLoadShardedStrategy(LoadTensors):
    """Loads tensors; encoded chunks of Megatron-Core's arrays through zarr-python, all others straight from their files."""

    library = "zarr"


def flatten_range(sharded_tensor: ShardedTensor, x: torch.Tensor) -> torch.Tensor:
    """Return the flattened range of a shard.

    Args:
        x: the whole shard, of shape `sharded_tensor.local_shape`.
    """
    return x.flatten()[sharded_tensor.flattened_range]


def pad_to_expected_shape(
    x: torch.Tensor, expected_sharded_ten: ShardedTensor, *, replicate_last: bool = False
) -> torch.Tensor:
    """Return a tensor padded at the far end of each axis to the shape of a shard.

    Args:
        x: as many axes as `expected_sharded_ten.local_shape`, none of them longer.
        replicate_last: pad with copies of the last element along the axis, not with zeros.

    Raises:
        ShapeMismatchError: an axis is longer than expected, or there is another number of them.
    """
    key, expected = expected_sharded_ten.key, tuple(expected_sharded_ten.local_shape)
    if x.dim() != len(expected) or any(n > m for n, m in zip(x.shape, expected, strict=True)):
        raise ShapeMismatchError(f"{key}: shape {list(x.shape)} cannot be padded to the expected {list(expected)}")
    if tuple(x.shape) == expected:
        return x
    if replicate_last and x.numel() == 0:
        raise ShapeMismatchError(f"{key}: nothing of shape {list(x.shape)} can be replicated to {list(expected)}")
    widths = [(0, m - n) for n, m in zip(x.shape, expected, strict=True)]
    padded = np.pad(as_integers(x).cpu().numpy(), widths, mode="edge" if replicate_last else "constant")
    return torch.from_numpy(padded).view(x.dtype).to(x.device)


def postprocess_numpy_array(
    loaded_array: np.ndarray[Any, Any], sharded_tensor: ShardedTensor, apply_flattened_range: bool = True
) -> torch.Tensor:
    """Convert an array that a Zarr library has read to the tensor of a shard, bit for bit.

    Args:
        loaded_array: of the shard's local shape, or smaller where it allows a mismatch; bfloat16 and float8 as ml_dtypes.
        apply_flattened_range: cut the flattened range out, last.

    Raises:
        ShapeMismatchError: it has another shape, and the shard does not allow that.
        ConfigurationError: torch has no such data type.
    """
    x = _to_torch(loaded_array, sharded_tensor.key)
    if AS_INTEGERS.get(f"{sharded_tensor.dtype}".removeprefix("torch.")) == loaded_array.dtype.name:
        x = x.view(sharded_tensor.dtype)
    if tuple(x.shape) != tuple(sharded_tensor.local_shape):
        if not sharded_tensor.allow_shape_mismatch:
            raise ShapeMismatchError(
                f"{sharded_tensor.key}: an array of shape {list(x.shape)} was read, for a shard of local shape "
                f"{list(sharded_tensor.local_shape)}"
            )
        x = pad_to_expected_shape(x, sharded_tensor)
    if apply_flattened_range and sharded_tensor.flattened_range is not None:
        x = flatten_range(sharded_tensor, x)
    return x


def load_zarr_based_sharded_metadata(
    checkpoint_dir: Path, get_shape_dtype_fn: Callable[[str], tuple[Sequence[int], np.dtype[Any]]]
) -> ShardedStateDict:
    """Describe every Zarr array below a folder; folders without array metadata are ignored.

    Args:
        get_shape_dtype_fn: path of an array -> its global shape and data type, by any library.

    Returns:
        key -> ShardedTensor without data and uncut. In a checkpoint of this library the manifest maps keys to folders. In any other a
        key is the folder's path below `checkpoint_dir`, so a key with `/` is a nested folder.
    """
    found = {}
    for key, path in _arrays_in(Path(checkpoint_dir)).items():
        shape, dtype = get_shape_dtype_fn(str(Path(checkpoint_dir) / path))
        found[key] = uncut(key, _torch_dtype_of(np.dtype(dtype), key), tuple(shape))
    return found


def _arrays_in(checkpoint_dir: Path) -> dict[str, str]:
    """Key -> path of the array's folder."""
    if not (checkpoint_dir / MANIFEST_NAME).is_file():
        return {key: key for key in layout_of(checkpoint_dir).arrays}
    arrays = read_manifest(checkpoint_dir).arrays_of(SHARDED)
    return {key: array.path for key, array in arrays.items() if array.store == "zarr" and array.path is not None}


def _to_torch(array: np.ndarray[Any, Any], key: str) -> torch.Tensor:
    dtype = _torch_dtype_of(array.dtype, key)
    if array.dtype.kind == "V" or array.dtype.name.startswith(("bfloat", "float8")):
        bits = np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}").reshape(array.shape)
        return torch.from_numpy(np.array(bits)).view(dtype)
    # Zarr stores numbers in either byte order, torch knows the machine's own.
    return torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("="), order="C"))


def _torch_dtype_of(dtype: np.dtype[Any], key: str) -> torch.dtype:
    try:
        return numpy_to_torch_dtype_dict[dtype.newbyteorder("=")]
    except KeyError as error:
        raise ConfigurationError(f"{key}: torch has no data type for arrays of {dtype}") from error
