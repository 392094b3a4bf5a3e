"""A save and its place: opened, written to and published, or discarded."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt.backends.zarr import ZarrBackend
from ckpt.errors import CheckpointError
from ckpt.format.manifest import MANIFEST_NAME, index_name
from ckpt.ranks.topology import Topology
from ckpt.saving import saver as planner_module
from ckpt.saving.manifest_writer import ManifestWriter
from ckpt.saving.prepared_save import ByteSource, Destination, PreparedSave, Written
from ckpt.saving.saver import Planner
from ckpt.saving.writing import RankWritePlan, Staged, WriteJob, WriteResult
from ckpt.state.collect import collect
from ckpt.state.sharing import StateComponent
from tests.support.ranks import run_threads
from tests.support.states import Held, cpu


class Noting(Destination):
    """Notes its calls."""

    what = "save of a test"

    def __init__(self, folder: Path) -> None:
        self._there = folder
        self.calls: list[str] = []

    def claim(self, topology: Topology) -> None:
        self.calls.append("claim")

    def open(self, topology: Topology) -> None:
        self.calls.append("open")
        self.folder = self._there
        self.folder.mkdir()

    def publish(self, save: PreparedSave[Any], written: Written, topology: Topology) -> None:
        assert (self.folder / index_name(0)).stat().st_size == written.results[0].index[0]  # type: ignore[index]
        assert written.results[0].write_s > 0
        ManifestWriter(save, written.results, topology).write("1", (self._there / MANIFEST_NAME).write_bytes)
        self.calls.append("publish")

    def discard(self, error: BaseException | None = None) -> None:
        self.calls.append(f"discard: {error}")


class Failing:
    """A source whose copy has failed."""

    def __init__(self, source: ByteSource) -> None:
        self._source = source

    def sends(self) -> dict[int, bytes]:
        return self._source.sends()

    def items(self) -> Iterator[Staged]:
        yield from self._source.items()

    def check(self) -> None:
        raise CheckpointError("it is not the state of the call")


def _prepared(place: Noting, topology: Topology) -> PreparedSave[Noting]:
    mine = collect([StateComponent("model", Held({"w": torch.arange(6.0), "step": 3}), "global")], topology)
    return Planner(topology, ZarrBackend(), cpu()).collect_and_prepare(place, mine)


def test_a_save_opens_its_place_and_publishes_what_all_have_written(tmp_path: Path) -> None:
    place, topology = Noting(tmp_path / "there"), Topology.alone()
    save = _prepared(place, topology)
    assert place.calls == [], "nothing is touched before it runs"
    save.run(topology, save.live_tensors(), RankWritePlan.write, started=time.perf_counter())
    assert place.calls == ["open", "publish"]


def test_partial_chunks_of_other_ranks_are_released_once_they_are_written(tmp_path: Path) -> None:
    topology = Topology.alone()
    save = _prepared(Noting(tmp_path / "there"), topology)
    save.received_parts = {0: b"partial chunks"}
    given = []

    def write(write_plan: RankWritePlan, job: WriteJob, *rest: Any) -> WriteResult:
        given.append(job.received_parts)
        return write_plan.write(job, *rest)

    save.run(topology, save.live_tensors(), write, started=time.perf_counter())
    assert given == [{0: b"partial chunks"}] and save.received_parts == {}


def test_a_save_that_fails_is_discarded_and_not_published(tmp_path: Path) -> None:
    place, topology = Noting(tmp_path / "there"), Topology.alone()
    save = _prepared(place, topology)
    with pytest.raises(CheckpointError) as caught:
        save.run(topology, Failing(save.live_tensors()), RankWritePlan.write, started=time.perf_counter())
    assert place.calls == ["open", f"discard: {caught.value}"]


def test_a_planner_makes_one_plan_for_saves_of_the_same_tensors(tmp_path: Path) -> None:
    topology = Topology.alone()
    planner = Planner(topology, ZarrBackend(), cpu())
    saves = []
    for step in (1, 2):
        state = Held({"w": torch.full((6,), float(step)), "step": step})
        mine = collect([StateComponent("model", state, "global")], topology)
        saves.append(planner.collect_and_prepare(Noting(tmp_path / str(step)), mine))
    assert saves[0].write_plan is saves[1].write_plan
    assert saves[0].plain != saves[1].plain


def test_no_rank_keeps_a_plan_that_one_has_failed_to_make(monkeypatch: pytest.MonkeyPatch) -> None:
    def plan_of_rank(plan: Any, tasks: Any, components: Any, topology: Topology, **settings: Any) -> RankWritePlan:
        if topology.rank == 1 and fails:
            raise MemoryError(fails.pop())
        return RankWritePlan(plan, tasks, components, topology, **settings)

    def prepare_twice(topology: Topology) -> list[str]:
        said, own = [], Planner(topology, ZarrBackend(), cpu())
        for step in range(2):
            mine = collect([StateComponent("model", Held({"w": torch.arange(6.0)}), "replicated")], topology)
            try:
                with topology.operation(f"save {step}"):
                    own.collect_and_prepare(Noting(Path("nowhere")), mine)
            except CheckpointError as error:
                said.append(str(error))
        return said

    fails = ["no memory for the plan of rank 1"]
    monkeypatch.setattr(planner_module, "RankWritePlan", plan_of_rank)
    said = run_threads(2, prepare_twice)
    assert said[0] == said[1] and len(said[0]) == 1, "both fail once, and both plan anew"
    assert "phase plan on rank 1: MemoryError: no memory for the plan of rank 1" in said[0][0]
