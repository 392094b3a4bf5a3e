"""Components are written side by side, in one plan: none waits for another, and more of them cost no more agreements."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt import StateComponent
from ckpt.backends.base import Previous, Writer
from ckpt.backends.zarr import ZarrBackend
from ckpt.dist_checkpointing import ShardedTensor
from ckpt.format.records import ArraySpec
from ckpt.ranks.topology import Phase, Topology
from tests.support.ranks import run_ranks, run_threads
from tests.support.states import Held, coordinator, global_index, same_bits

DEADLINE_S = 20.0
SHAPE = (64, 1000)


@dataclass(frozen=True)
class Write:
    """One write of one rank, in seconds of the machine's clock."""

    rank: int
    component: str
    begin: float
    end: float


class Traced(ZarrBackend):
    """Notes when each write begins and ends; a rank's first write into a component may wait for another rank's.

    Args:
        folder: where the ranks leave word for each other.
        waits: (rank, component) -> the (rank, component) whose first write must have begun before this one goes on.
    """

    def __init__(self, folder: Path, waits: dict[tuple[int, str], tuple[int, str]]) -> None:
        super().__init__()
        self.folder = folder
        self.waits = waits
        self.trace: list[Write] = []

    def writer(
        self, root: Path, rank: int, progress: Callable[[int], None], previous: Previous | None = None
    ) -> Writer:
        return _TracedWriter(self, super().writer(root, rank, progress, previous), rank)


@dataclass
class _TracedWriter:
    backend: Traced
    inner: Writer
    rank: int

    def write(self, array: ArraySpec, chunk: int, host: torch.Tensor, digests: tuple[int, ...] | None = None) -> None:
        component = array.path.partition("/")[0]
        begin = time.monotonic()
        self._word(self.rank, component).touch()
        if (other := self.backend.waits.get((self.rank, component))) is not None:
            while not self._word(*other).exists():
                if time.monotonic() > begin + DEADLINE_S:
                    raise TimeoutError(
                        f"rank {other[0]} did not begin to write {other[1]} while {component} is written"
                    )
                time.sleep(0.001)
        self.inner.write(array, chunk, host, digests)
        self.backend.trace.append(Write(self.rank, component, begin, time.monotonic()))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def _word(self, rank: int, component: str) -> Path:
        return self.backend.folder / f"{rank}-{component}"


def _rows(topology: Topology) -> dict[str, Any]:
    rows = SHAPE[0] // topology.world_size
    first = topology.rank * rows
    piece = global_index(SHAPE)[first : first + rows].clone()
    return {"w": ShardedTensor.at("w", piece, SHAPE, (first, 0))}


def _only_on(topology: Topology, rank: int) -> dict[str, Any]:
    return {"w": global_index(SHAPE)} if topology.rank == rank else {}


def _save_traced(
    topology: Topology, root: Path, kind: str, waits: dict[tuple[int, str], tuple[int, str]]
) -> list[Write]:
    backend = Traced(root, waits)
    if kind == "cut":
        states = {"model": _rows(topology), "optimizer": _rows(topology)}
    else:
        states = {"model": _only_on(topology, 0), "optimizer": _only_on(topology, 1)}
    components = [StateComponent(key, Held(state), "sharded") for key, state in states.items()]
    coordinator(topology, root / "checkpoints", components, backend=backend).save_checkpoint(checkpoint_id="1")
    blank = [StateComponent(key, Held({"w": torch.zeros(SHAPE)}), "replicated") for key in states]
    coordinator(topology, root / "checkpoints", blank).load_checkpoint()
    assert all(same_bits(component.stateful.state_dict()["w"], global_index(SHAPE)) for component in blank)
    return backend.trace


@pytest.mark.parametrize("kind", ["cut", "apart"])
def test_two_components_are_being_written_at_the_same_moment_by_two_ranks(tmp_path: Path, kind: str) -> None:
    """Were there an agreement between one component and the next, both ranks would wait for each other until the deadline."""
    waits = {(0, "model"): (1, "optimizer"), (1, "optimizer"): (0, "model")}
    of_rank_0, of_rank_1 = run_ranks(2, _save_traced, tmp_path, kind, waits)
    model = next(write for write in of_rank_0 if write.component == "model")
    optimizer = next(write for write in of_rank_1 if write.component == "optimizer")
    assert (model.rank, optimizer.rank) == (0, 1)
    assert max(model.begin, optimizer.begin) < min(model.end, optimizer.end)


def _phases_of_saves(topology: Topology, root: Path, patterns: tuple[str, ...]) -> list[list[str]]:
    """The names of the phases of a first and of a second save of one component per pattern."""
    enter = topology.phase
    names: list[str] = []

    def counted(name: str) -> AbstractContextManager[Phase]:
        names.append(name)
        return enter(name)

    components = [
        StateComponent(
            f"c{number}",
            Held(_rows(topology) if pattern == "sharded" else {"w": global_index(SHAPE), "b": torch.arange(5), "n": 1}),
            pattern,
            process_group_name="all" if pattern == "per_group" else None,
        )
        for number, pattern in enumerate(patterns)
    ]
    groups = {"all": list(range(topology.world_size))}
    made = coordinator(topology, root / str(len(patterns)), components, process_groups=groups)
    topology.phase = counted  # type: ignore[method-assign]
    found = []
    for checkpoint_id in ("1", "2"):
        names.clear()
        made.save_checkpoint(checkpoint_id=checkpoint_id)
        found.append(list(names))
    topology.phase = enter  # type: ignore[method-assign]
    return found


def test_six_components_take_as_many_agreements_as_one(tmp_path: Path) -> None:
    patterns = ("replicated", "global", "per_rank", "per_group", "per_node", "sharded")

    def both(topology: Topology) -> tuple[list[list[str]], list[list[str]]]:
        return _phases_of_saves(topology, tmp_path, patterns[:1]), _phases_of_saves(topology, tmp_path, patterns)

    for one, six in run_threads(4, both):
        assert one == six
        first, second = one
        examined = {"fingerprints", "digests", "diagnose"}
        assert set(first) - set(second) == {*examined, "tables", "pieces of tables", "plan", "reach"}
        assert second == ["collect", "open", "write", "commit", "publish"]
