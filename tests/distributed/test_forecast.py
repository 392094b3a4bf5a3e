"""What is foreseen of a load is what the load does: over patterns, policies, ranks, keys, shapes, strictness."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt import StateComponent
from ckpt.dist_checkpointing import ShardedTensor
from ckpt.errors import CheckpointError
from ckpt.loading.forecast import Forecast, Rank, forecast
from ckpt.loading.report import Status
from ckpt.ranks.topology import Topology
from ckpt.state.sharing import SharingPattern, elastic_choices
from tests.support.ranks import run_threads
from tests.support.states import Held, coordinator, cpu, global_index

PATTERNS = [pattern.value for pattern in SharingPattern]
SAVED_ON = (2, 2)
TOPOLOGIES = [(2, 2), (2, 1), (4,), (3, 3, 2)]
"""Ranks per node of the runs that load: the same ranks, fewer, other nodes, more."""
REPEATS = 200  # of a tensor that is too large to be packed
COPIES = ("equal", "different", "plain")
ALTERED = ("as saved", "other shape", "more keys", "fewer keys")


class Shared(Held):
    """May be shared out anew, unless it is told to refuse."""

    refuses = False

    def fits(self, saved: Mapping[str, Any]) -> bool:
        return not self.refuses

    def load_changed(self, saved: Sequence[Mapping[str, Any]]) -> None:
        if self.refuses:
            raise ValueError(f"{len(saved)} copies cannot be shared out")


@dataclass(frozen=True)
class Case:
    """One load, and of what. An object that `refuses` does so only where it gets no tensors: others are not foreseen."""

    saved: str
    copies: str
    declared: str
    elastic: str | None
    altered: str
    strict: bool
    required: bool
    refuses: bool
    alone: bool
    nodes: tuple[int, ...]

    @property
    def left_out(self) -> list[str]:
        """A strict load refuses what only the checkpoint has, unless it is left out on purpose; others report it."""
        return ["anchor"] if self.alone and self.strict else []

    @property
    def folder(self) -> str:
        return f"{self.saved} {self.copies}"


def hosts(nodes: Sequence[int]) -> list[str]:
    return [f"host-{node}" for node, ranks in enumerate(nodes) for _ in range(ranks)]


def pairs(world_size: int) -> list[list[int]]:
    """Neighbours in twos; a last one alone."""
    return [[r for r in (first, first + 1) if r < world_size] for first in range(0, world_size, 2)]


def state_of(topology: Topology, pattern: str, copies: str, altered: str) -> dict[str, Any]:
    whose = {"per_rank": topology.rank, "per_node": topology.node_rank, "per_group": topology.rank // 2}.get(pattern, 0)
    whole = global_index((24, 5 if altered == "other shape" else 4)) + 1000 * (0 if copies == "equal" else whose)
    state: dict[str, Any] = {"w": whole, "large": whole.repeat(REPEATS, 1), "n": 7 if copies == "equal" else whose}
    if copies == "plain":
        state = {"n": whose} if altered == "fewer keys" else {"n": whose, "large": altered}
    elif pattern == "sharded":
        rows = 24 // topology.world_size
        mine = whole[topology.rank * rows : (topology.rank + 1) * rows].clone()
        state["w"] = ShardedTensor.from_rank_offsets("w", mine, (0, topology.rank, topology.world_size))
    if altered == "more keys":
        state |= {"lr": 0.1} if copies == "plain" else {"bias": torch.zeros(3), "lr": 0.1}
    if altered == "fewer keys" and copies != "plain":
        del state["n"], state["large"]
    return state


def components(topology: Topology, case: Case) -> list[StateComponent]:
    held = Shared(state_of(topology, case.declared, case.copies, case.altered))
    held.refuses = case.refuses
    group = "dp" if case.declared == "per_group" else None
    x = StateComponent(
        "x", held, case.declared, elastic=case.elastic, required=case.required, process_group_name=group
    )  # fmt: skip
    anchor = StateComponent("anchor", Held({"a": torch.zeros(2)}), "replicated")
    return [x] if case.alone else [anchor, x]


def saved_case(pattern: str, copies: str) -> Case:
    return Case(pattern, copies, pattern, None, "as saved", True, True, False, False, SAVED_ON)


def groups(topology: Topology) -> dict[str, list[int]]:
    return {"dp": next(pair for pair in pairs(topology.world_size) if topology.rank in pair)}


def _save_all(topology: Topology, root: Path) -> None:
    for pattern, copies in itertools.product(PATTERNS, COPIES):
        case = saved_case(pattern, copies)
        made = coordinator(topology, root / case.folder, components(topology, case), process_groups=groups(topology))
        made.save_checkpoint(checkpoint_id="1")


def _load_all(topology: Topology, root: Path, cases: Sequence[Case]) -> list[tuple[str, list[str]]]:
    """What each load says: ("refused", [the sentence]) or ("loaded", a line per component)."""
    said = []
    for case in cases:
        made = coordinator(topology, root / case.folder, components(topology, case), process_groups=groups(topology))
        try:
            made.load_checkpoint(root / case.folder / "checkpoint-1", strict=case.strict, leave_out=case.left_out)
        except CheckpointError as error:
            said.append(("refused", [str(error)]))
        else:
            assert made.last_load is not None
            said.append(("loaded", [str(one) for one in made.last_load.components]))
    return said


def foreseen(root: Path, case: Case) -> Forecast:
    count = sum(case.nodes)
    topologies = [Topology.supposed(rank, hosts(case.nodes), {"dp": pairs(count)}) for rank in range(count)]
    ranks = [Rank(topology, components(topology, case)) for topology in topologies]
    return forecast(
        root / case.folder / "checkpoint-1",
        ranks,
        cpu(),
        strict=case.strict,
        allow_pickle=False,
        leave_out=case.left_out,
    )


def all_cases() -> list[Case]:
    policies = [(p, elastic) for p in PATTERNS for elastic in (None, *elastic_choices(SharingPattern(p)))]
    flags = itertools.product((True, False), repeat=4)
    return [
        Case(saved, copies, declared, elastic, altered, strict, required, refuses, alone, nodes)
        for saved, copies, (declared, elastic), altered, (strict, required, refuses, alone), nodes in itertools.product(
            PATTERNS, COPIES, policies, ALTERED, list(flags), TOPOLOGIES
        )
        if not refuses or (elastic in ("derive", "repartition") and copies == "plain")
    ]


def chosen(number: int) -> list[Case]:
    """A sample that leans to what is declared as it was saved, where policies make the difference."""
    cases = all_cases()
    alike = [case for case in cases if case.saved == case.declared]
    dice = random.Random(5)
    return [*dice.sample(alike, number * 2 // 3), *dice.sample(cases, number // 3)]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("saved")
    run_threads(sum(SAVED_ON), _save_all, root, nodes=SAVED_ON)
    return root


KINDS = ("rebuilt", "adapted to these ranks", "elastic=replica", "elastic=refuse", "partly restored", "failed: ")
"""Words of what loads say, each of which a sample must have met."""


def check(root: Path, cases: Sequence[Case]) -> dict[str, int]:
    """Compare every case; return how many loads did what."""
    did = dict.fromkeys(("loaded", "refused", *KINDS), 0)
    for nodes in TOPOLOGIES:
        here = [case for case in cases if case.nodes == nodes]
        by_rank = run_threads(sum(nodes), _load_all, root, here, nodes=nodes, timeout_s=600.0)
        assert all(said == by_rank[0] for said in by_rank)
        for case, (outcome, said) in zip(here, by_rank[0], strict=True):
            found = foreseen(root, case)
            assert found.loads == (outcome == "loaded"), (case, said, found)
            if outcome == "loaded":
                others = ["anchor: skipped: only in the checkpoint"] if case.alone and not case.strict else []
                assert [str(one.report) for one in found.components] + others == said, case
            else:
                refusals = [one.refusal for one in found.components if one.refusal] or [found.refusal]
                assert any(said[0].endswith(refusal) for refusal in refusals), (case, said, refusals)
            did[outcome] += 1
            for kind in KINDS:
                did[kind] += any(kind in line for line in said)
    return did


def test_a_load_does_what_was_foreseen(root: Path) -> None:
    did = check(root, chosen(45))
    assert min(did["loaded"], did["refused"]) > 10
    assert min(did.values()) > 0, did


@pytest.mark.full
def test_many_more_loads_do_what_was_foreseen(root: Path) -> None:
    did = check(root, chosen(1000))
    assert min(did["loaded"], did["refused"]) > 200
    assert min(did.values()) > 3, did


def test_nothing_is_read_into_the_objects_that_are_asked(root: Path) -> None:
    case = saved_case("per_rank", "different")
    topology = Topology.supposed(1, hosts(SAVED_ON), {"dp": pairs(4)})
    asked = components(topology, case)
    held = asked[1].stateful
    assert isinstance(held, Held)
    held.state["w"].fill_(-1)
    found = forecast(
        root / case.folder / "checkpoint-1", [Rank(topology, asked)], cpu(), strict=True, allow_pickle=False
    )
    assert [one.report.status for one in found.components if one.report] == [Status.RESTORED] * 2
    assert torch.all(held.state["w"] == -1)
    assert held.loaded is None
    assert found.components[1].bytes_by_rank == [24 * 4 * 4 + REPEATS * 24 * 4 * 4]
