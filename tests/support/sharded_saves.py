"""What tests of `ckpt.save` and `ckpt.load` share: strategies, ranks that are threads, and a small state in training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt import dist_checkpointing
from ckpt.backends.base import Backend
from ckpt.backends.kimi_engine import KimiEngineBackend
from ckpt.dist_checkpointing import ShardedObject, ShardedTensor
from ckpt.dist_checkpointing.strategies.base import LoadShardedStrategy
from ckpt.dist_checkpointing.strategies.sharded import SaveTensors
from ckpt.dist_checkpointing.strategies.tensorstore import (
    TensorStoreLoadShardedStrategy,
    TensorStoreSaveShardedStrategy,
)
from ckpt.dist_checkpointing.strategies.zarr import ZarrLoadShardedStrategy, ZarrSaveShardedStrategy
from ckpt.errors import CheckpointError
from ckpt.format.manifest_parsing import parse_index
from ckpt.ranks.default_topology import use_topology
from tests.support.ranks import Topology, run_threads
from tests.support.states import global_index, random_bits
from tests.support.values import same_values


class SafetensorsSaveShardedStrategy(SaveTensors):
    """Ours has no such strategy: `recipes.convert` makes safetensors of what another one saved. Whatever loads "zarr" loads it."""

    def __init__(self) -> None:
        super().__init__("zarr", 1)

    def _storage(self) -> Backend:
        return KimiEngineBackend(pool=False)


SAVES: dict[str, Any] = {
    "zarr": ZarrSaveShardedStrategy(),
    "tensorstore, files": TensorStoreSaveShardedStrategy(kvstore="file"),
    "tensorstore, ocdbt": TensorStoreSaveShardedStrategy(),
}
LOADS: tuple[LoadShardedStrategy, ...] = (ZarrLoadShardedStrategy(), TensorStoreLoadShardedStrategy())
both_formats = pytest.mark.parametrize("save", [SAVES["zarr"], SAVES["tensorstore, ocdbt"]], ids=["zarr", "ocdbt"])


def threads(world_size: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """`run_threads` whose ranks have `use_topology`, and time on a busy machine."""
    return run_threads(world_size, with_topology, fn, *args, agree_s=60.0, timeout_s=120.0)


def with_topology(topology: Topology, fn: Callable[..., Any], *args: Any) -> Any:
    with use_topology(topology):
        return fn(topology, *args)


def the_one(outcomes: Sequence[Any]) -> Any:
    """What all ranks have in common, which is everything."""
    assert all(outcome == outcomes[0] for outcome in outcomes), outcomes
    return outcomes[0]


def error_of(call: Callable[[], object]) -> tuple[type[CheckpointError], str]:
    with pytest.raises(CheckpointError) as caught:
        call()
    return type(caught.value), str(caught.value)


def blank(one: ShardedTensor) -> ShardedTensor:
    """The same place, with memory in which every element that nobody reads shows."""
    assert one.data is not None
    return replace(one, data=random_bits(tuple(one.data.shape), one.dtype, seed=99))


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def chunks_by_rank(folder: Path) -> dict[int, list[tuple[str, int]]]:
    """Rank -> (array, number) of the chunks that its index lists."""
    indexes = [parse_index(path.read_bytes()) for path in sorted(folder.glob("index-*.json"))]
    return {index.rank: [(path, number) for path in index.chunks for number in index.chunks[path]] for index in indexes}


def training_state(topology: Topology) -> dict[str, Any]:
    """Rows, a flattened run and a replica, each a view of memory that training writes to."""
    rank, ranks = topology.rank, topology.world_size
    buffer = global_index((6, 5)).flatten()
    run = slice(30 * rank // ranks, 30 * (rank + 1) // ranks)
    return {
        "w": ShardedTensor.from_rank_offsets("w", global_index((2, 4)) + 8 * rank, (0, rank, ranks)),
        "p": ShardedTensor.from_rank_offsets_flat("p", buffer[run], (6, 5), flattened_range=run),
        "step": ShardedTensor.from_rank_offsets("step", torch.tensor(7.0), replica_id=rank),
        "rng": ShardedObject("rng", {"seed": torch.tensor(rank)}, (ranks,), (rank,)),
    }


def train(state: dict[str, Any]) -> None:
    """Change every tensor in place."""
    for one in state.values():
        if isinstance(one, ShardedTensor):
            one.data.add_(1000.0)


def require_loads_as(topology: Topology, folder: Path, want: dict[str, Any]) -> None:
    """Load by either library, and compare every bit with what is wanted."""
    for load in LOADS:
        wanted = {key: blank(one) if isinstance(one, ShardedTensor) else one for key, one in want.items()}
        got = dist_checkpointing.load(wanted, folder, load)
        assert isinstance(got, dict)
        for key, one in want.items():
            assert same_values(got[key], one.data), key


def save_training_state(
    topology: Topology, folder: Path, save: Any = None, instead: dict[str, Any] | None = None
) -> None:
    dist_checkpointing.save(training_state(topology) | (instead or {}), folder, save)


def require_training_state(topology: Topology, folder: Path) -> None:
    require_loads_as(topology, folder, training_state(topology))
