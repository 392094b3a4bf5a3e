"""Very many small tensors: a handful of files, a handful of opens, and nothing planned or told twice. Counted, not timed."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt import StateComponent
from ckpt.ranks.topology import Phase, Topology
from ckpt.saving import saver
from tests.support.covering import sampled
from tests.support.ranks import run_ranks
from tests.support.states import Held, coordinator

MANY = 20_000
ENOUGH = 4_000  # to tell a file for each from a handful
SOME = 2_000
ELEMENTS = 8
RANKS = 2


@pytest.mark.parametrize("count", [ENOUGH, pytest.param(MANY, marks=pytest.mark.full)])
@sampled(("pattern", "backend"), [("replicated", "zarr"), ("sharded", "ocdbt"), ("sharded", "safetensors")])
def test_thousands_of_tensors_cost_neither_thousands_of_files_nor_of_opens(
    tmp_path: Path, pattern: str, backend: str, count: int
) -> None:
    opened = run_ranks(RANKS, _save_and_load_all, tmp_path, pattern, backend, count, timeout_s=180)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) <= 10 + 4 * RANKS
    assert all(0 < opens <= 10 + 8 * RANKS for opens in opened), opened


@pytest.mark.parametrize("pattern", ["replicated", "sharded"])
def test_a_second_save_says_once_that_nothing_has_changed_and_plans_nothing(tmp_path: Path, pattern: str) -> None:
    for first, second, changed in run_ranks(RANKS, _save_again_and_again, tmp_path, pattern):
        assert first["plan_save"] == changed["plan_save"] == 1 and second["plan_save"] == 0
        assert {"tables", "pieces of tables", "plan"} <= first.keys()
        assert "plan" in changed
        assert not {"tables", "pieces of tables", "plan", "compare", "fingerprints", "reach"} & second.keys()
        assert second["bytes told"] < 1_000


def test_what_ranks_of_a_sharded_component_leave_to_each_other_is_told_in_few_bytes(tmp_path: Path) -> None:
    run_ranks(RANKS, _save_and_load_all, tmp_path, "sharded", "zarr", SOME)
    assert all(told < 1_000 for told in run_ranks(RANKS, _told_in_the_check, tmp_path))


def test_a_plain_value_that_changes_is_told_again_and_the_tensors_beside_it_are_not(tmp_path: Path) -> None:
    for told, loaded in run_ranks(RANKS, _save_with_a_step_of_each_rank, tmp_path):
        assert told < 1_000
        assert loaded == {"step-0": 2, "step-1": 2}


def _save_and_load_all(topology: Topology, root: Path, pattern: str, backend: str, count: int) -> int:
    """Save on all ranks, load into other memory, compare; return how many files the load opened."""
    state = _tensors(topology, pattern, count)
    saving = coordinator(topology, root, [StateComponent("model", Held(state), pattern)], backend=backend)
    saving.save_checkpoint(checkpoint_id="1")
    into = {name: torch.full_like(tensor, -1) for name, tensor in state.items()}
    loading = coordinator(topology, root, [StateComponent("model", Held(into), pattern)], backend=backend)
    with _opened_below(root) as opened:
        loading.load_checkpoint(root / "checkpoint-1")
    for name, tensor in state.items():
        assert torch.equal(tensor, into[name]), name
    assert loading.last_load is not None
    assert loading.last_load.bytes_needed == count * ELEMENTS * 4 * (RANKS if pattern == "replicated" else 1)
    return sum(opened.values())


def _save_again_and_again(topology: Topology, root: Path, pattern: str) -> list[Counter[str]]:
    """Save, save the same, save one tensor more; return what each save said and planned."""
    state = _tensors(topology, pattern)
    saving = coordinator(topology, root, [StateComponent("model", Held(state), pattern)])
    counts = []
    for number in range(3):
        if number == 2:
            state[f"one more of {topology.rank if pattern == 'sharded' else 'all'}"] = torch.arange(3)
        with _counting(saver, "plan_save") as count, _telling() as said:
            saving.save_checkpoint(checkpoint_id=str(number))
        counts.append(Counter(said.keys()) + Counter({"bytes told": sum(said.values())}))
        counts[-1]["plan_save"] = count["plan_save"]
    return counts


def _told_in_the_check(topology: Topology, root: Path) -> int:
    into = _tensors(topology, "sharded")
    with _telling() as said:
        coordinator(topology, root, [StateComponent("model", Held(into), "sharded")]).load_checkpoint()
    return said["check"]


def _save_with_a_step_of_each_rank(topology: Topology, root: Path) -> tuple[int, dict[str, int]]:
    """Save twice, a step further each time, and load; return what the second save told, and the steps."""
    state: dict[str, Any] = {**_tensors(topology, "sharded"), f"step-{topology.rank}": 1}
    held = Held(state)
    saving = coordinator(topology, root, [StateComponent("model", held, "sharded")])
    saving.save_checkpoint(checkpoint_id="1")
    state[f"step-{topology.rank}"] = 2
    with _telling() as said:
        saving.save_checkpoint(checkpoint_id="2")
    saving.load_checkpoint()
    assert held.loaded is not None
    return said["compare"], {key: value for key, value in held.loaded.items() if key.startswith("step")}


def _tensors(topology: Topology, pattern: str, count: int = SOME) -> dict[str, torch.Tensor]:
    """Every tensor's elements say which tensor it is, and which element. Of a sharded component each rank has its share."""
    whole = torch.arange(count * ELEMENTS, dtype=torch.int32).view(count, ELEMENTS)
    mine = range(count)
    if pattern == "sharded":
        mine = mine[topology.rank * count // RANKS : (topology.rank + 1) * count // RANKS]
    return {f"layers.{number}.weight": whole[number].clone() for number in mine}


@contextmanager
def _opened_below(root: Path) -> Iterator[Counter[str]]:
    """Count how often each file is opened, by whatever call. The hook stays until this rank ends."""
    opened: Counter[str] = Counter()
    is_on = True

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if is_on and event == "open" and str(args[0]).startswith(str(root)):
            opened[str(args[0])] += 1

    sys.addaudithook(hook)
    try:
        yield opened
    finally:
        is_on = False


@contextmanager
def _counting(module: Any, name: str) -> Iterator[Counter[str]]:
    count: Counter[str] = Counter()
    real: Callable[..., Any] = getattr(module, name)

    def counted(*args: Any, **options: Any) -> Any:
        count[name] += 1
        return real(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, counted)
        yield count


@contextmanager
def _telling() -> Iterator[Counter[str]]:
    """Count what this rank says to the others: phase -> bytes."""
    said: Counter[str] = Counter()
    real = Topology.phase

    @contextmanager
    def phase(topology: Topology, name: str) -> Iterator[Phase]:
        with real(topology, name) as one:
            yield one
            said[name] += len(json.dumps(one.payload))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Topology, "phase", phase)
        yield said
