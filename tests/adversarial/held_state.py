"""What the campaign saves: a state that its id and the rank determine, so that a load can be compared bit for bit with no copy kept."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ckpt import CheckpointCoordinator, StateComponent
from ckpt.catalog.committed import Committed
from ckpt.catalog.ledger import Ledger
from ckpt.catalog.verify import verify_checkpoint
from ckpt.dist_checkpointing import ShardedTensor
from ckpt.errors import CheckpointError
from ckpt.format.dtypes import raw_bytes
from ckpt.loading.report import LoadReport
from ckpt.ranks.topology import Topology
from tests.support.states import Fitted, coordinator, random_bits

ROWS = 96
COLUMNS = 200
BACKENDS = {"zarr": "zarr", "tensorstore": "ocdbt", "kimi-engine": "safetensors"}
"""Name of `ckpt=` -> name in tests.support.states."""


def state_of(checkpoint_id: str, rank: int, world_size: int) -> dict[str, dict[str, Any]]:
    """Component -> its state dict: an array of its own, small ones that are packed, a sharded one, plain values, one state a rank."""
    seed = zlib.crc32(checkpoint_id.encode()) >> 4
    rows = ROWS // world_size
    sharded = random_bits((ROWS, COLUMNS), torch.float32, seed + 1)
    return {
        "model": {
            "large": random_bits((150, 120), torch.float32, seed),
            "small": random_bits((7,), torch.bfloat16, seed),
            "scalar": random_bits((), torch.float64, seed),
            "step": seed,
            "names": ("a", [1, 2.5], checkpoint_id),
        },
        "optimizer": {
            "moment": ShardedTensor.from_rank_offsets(
                "moment", sharded[rank * rows : (rank + 1) * rows].clone(), (0, rank, world_size)
            )
        },
        "rng": {"bits": random_bits((33,), torch.uint8, seed + 7 * rank), "rank": rank},
    }


def blank(state: Any) -> Any:
    """A state of the same form that holds something else."""
    if isinstance(state, dict):
        return {key: blank(value) for key, value in state.items()}
    if isinstance(state, ShardedTensor):
        other = copy.copy(state)
        other.data = torch.full_like(state.data, -1)
        return other
    return torch.zeros_like(state) if isinstance(state, torch.Tensor) else None


def components(state: dict[str, dict[str, Any]]) -> list[StateComponent]:
    patterns = {"model": "replicated", "optimizer": "sharded", "rng": "per_rank"}
    return [StateComponent(key, Fitted(state[key]), patterns[key]) for key in state]


def trainer(topology: Topology, root: Path, checkpoint_id: str, backend: str, **options: Any) -> CheckpointCoordinator:
    """A coordinator whose components hold the state of an id."""
    state = state_of(checkpoint_id, topology.rank, topology.world_size)
    return coordinator(topology, root, components(state), backend=BACKENDS[backend], pattern_check="off", **options)


class Run:
    """A trainer whose state changes between its saves. All ranks make one, and call all of it."""

    def __init__(self, root: Path, backend: str, topology: Topology | None = None, **options: Any) -> None:
        self._topology = topology or Topology.alone()
        self._components = components(state_of("", self._topology.rank, self._topology.world_size))
        self.coordinator = coordinator(
            self._topology, root, self._components, backend=BACKENDS[backend], pattern_check="off", **options
        )

    def resume(self) -> None:
        """Load the newest, as a run that goes on: what the runs before have saved is its own from then on."""
        self.coordinator.load_checkpoint()

    def save(self, checkpoint_id: str, state_id: str | None = None) -> None:
        """Let the components hold the state of an id, and save it under that, or under another."""
        state = state_of(state_id or checkpoint_id, self._topology.rank, self._topology.world_size)
        for component in self._components:
            held: Any = component.stateful
            held.state = state[component.key]
        self.coordinator.save_checkpoint(checkpoint_id=checkpoint_id)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.coordinator.close()


def difference(made: Sequence[StateComponent], checkpoint_id: str, topology: Topology) -> str:
    """What of loaded components is not as it was saved under this id; "" if all is, to the bit."""
    wanted = state_of(checkpoint_id, topology.rank, topology.world_size)
    for component in made:
        held: Any = component.stateful
        for key, value in wanted[component.key].items():
            found = held.loaded[key]
            if isinstance(value, ShardedTensor):
                found, value = found.data, value.data
            if isinstance(value, torch.Tensor):
                is_same = found.dtype == value.dtype and torch.equal(raw_bytes(found), raw_bytes(value))
            else:
                is_same = type(found) is type(value) and found == value
            if not is_same:
                return f"{component.key}.{key} is not what was saved under {checkpoint_id}"
    return ""


def loaded(
    path: Path | None, root: Path, topology: Topology, world_size: int, variants: Sequence[str] = (), **options: Any
) -> LoadReport:
    """Load a checkpoint that `world_size` ranks saved, or the newest one.

    Args:
        variants: the ids of the states that may have been saved under that id; none: the id itself.

    Raises:
        AssertionError: it gave other bits.
    """
    state = {key: blank(value) for key, value in state_of("", topology.rank, topology.world_size).items()}
    # Each rank has its own: it goes to as many ranks as have saved it.
    left_out = ["rng"] if world_size != topology.world_size else []
    made = components({key: value for key, value in state.items() if key not in left_out})
    with coordinator(topology, root, made, pattern_check="off", **options) as found:
        found.load_checkpoint(path, leave_out=left_out)
        report = found.last_load
    assert report is not None
    wrong = [difference(made, variant, topology) for variant in variants or [report.checkpoint_id]]
    assert not all(wrong), f"{report.checkpoint_id} was loaded, and {wrong[0]}"
    return report


def load(*args: Any, **options: Any) -> str:
    """The same; return the id."""
    return loaded(*args, **options).checkpoint_id


def committed(root: Path) -> list[Committed]:
    """The oldest commit first."""
    return Ledger(root, run_id="reader").committed()


def problems_of(path: Path) -> list[str]:
    """What `verify` says."""
    try:
        return verify_checkpoint(path)
    except CheckpointError as error:
        return [str(error)]
