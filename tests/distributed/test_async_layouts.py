"""Saves in the background change nothing: a run that saves so trains as one that never saves, and goes on from any of them to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckpt.catalog.verify import verify_checkpoint
from tests.conf.configs import config
from tests.distributed.test_layouts import BACKENDS, LAYOUTS, checkpoint
from tests.distributed.test_layouts import _train as train_all
from tests.e2e.runs import SMALL
from tests.support.async_runs import SETTINGS
from tests.support.covering import rows, sampled
from tests.support.ranks import run_ranks

STEPS = ["train.steps=3"]

TOGETHER = [
    [("pipeline 2", "overlap", "tensorstore")],
    [("single", "overlap", "zarr")],
    [("accelerate 2", "async", "kimi-engine")],
]
"""Layouts of as many ranks, with ways to save in the background and backends spread over them."""


def runs_of(num_ranks: int, runs: list[tuple[str, Path, list[str]]]) -> list[dict[str, Any]]:
    """Train several runs, each in a layout, one after another on one set of ranks; their summaries, on which all ranks agree."""
    cfgs = []
    for layout, run_dir, overrides in runs:
        assert LAYOUTS[layout][0] == num_ranks
        batch = f"train.batch_size={3 * num_ranks}"
        cfgs.append(config(run_dir, *SMALL, *LAYOUTS[layout][1], batch, *overrides, num_ranks=num_ranks))
    by_rank = run_ranks(num_ranks, train_all, cfgs, process_group=True, timeout_s=60.0 * len(runs))
    for summaries in by_rank:
        assert [one["losses"] for one in summaries] == [one["losses"] for one in by_rank[0]]
    return list(by_rank[0])


def in_parts(folder: Path, layout: str, setting: str, backend: str) -> list[tuple[str, Path, list[str]]]:
    """Of three steps: a run that saves after the last one only, one that saves in the background after each, and one that goes on
    from the first of these, which was written while the run went on.
    """
    straight = folder / "straight"
    own = [*BACKENDS[backend], *SETTINGS[setting], "save.every=1"]
    return [
        (layout, folder / "never", [*BACKENDS[backend], *STEPS]),
        (layout, straight, [*own, *STEPS]),
        (layout, folder / "on", [*own, *STEPS, f"resume={checkpoint(straight, 1)}"]),
    ]


def require_alike(never: dict[str, Any], straight: dict[str, Any], on: dict[str, Any], case: object) -> None:
    assert straight["losses"] == never["losses"], case
    assert straight["state_digest"] == never["state_digest"], case
    require_saved(straight, 3, case)
    assert (on["first_step"], on["losses"]) == (2, never["losses"][1:]), case
    assert on["state_digest"] == never["state_digest"], case


def require_saved(run: dict[str, Any], steps: int, case: object) -> None:
    """Every step of it is there, and sound."""
    assert [Path(save["path"]).name for save in run["checkpoints"]] == [
        f"checkpoint-{step:08d}" for step in range(1, steps + 1)
    ], case
    for save in run["checkpoints"]:
        assert verify_checkpoint(Path(save["path"])) == [], case


@sampled("cases", TOGETHER)
def test_a_run_goes_on_to_the_bit_from_what_it_saved_while_it_trained(
    tmp_path: Path, cases: list[tuple[str, str, str]]
) -> None:
    num_ranks, _ = LAYOUTS[cases[0][0]]
    summaries = runs_of(num_ranks, [run for case in cases for run in in_parts(tmp_path / case[0], *case)])
    for number, case in enumerate(cases):
        require_alike(*summaries[3 * number : 3 * number + 3], case)


PAIRS = rows({"layout": list(LAYOUTS), "setting": list(SETTINGS), "backend": list(BACKENDS)}, 2)
"""Every layout by every way to save and every backend, and every way to save by every backend."""


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_goes_on_to_the_bit_by_every_way_to_save_and_every_backend(tmp_path: Path, layout: str) -> None:
    """A run of two steps that saves in the background after each, and one that goes on to the third: by turns from what was
    written while the run went on, and from where it ended.
    """
    cases = [(setting, backend) for one, setting, backend in PAIRS if one == layout]
    from_step = [1 + (number + [*LAYOUTS].index(layout)) % 2 for number in range(len(cases))]
    runs = [(layout, tmp_path / "never", STEPS)]
    for number, (setting, backend) in enumerate(cases):
        folder = tmp_path / f"{number}"
        own = [*BACKENDS[backend], *SETTINGS[setting], "save.every=1", "train.steps=2"]
        resume = f"resume={checkpoint(folder, from_step[number])}"
        runs += [(layout, folder, own), (layout, folder / "on", [*STEPS, resume])]
    never, *summaries = runs_of(LAYOUTS[layout][0], runs)
    for case, start, straight, on in zip(cases, from_step, summaries[::2], summaries[1::2], strict=True):
        assert straight["losses"] == never["losses"][:2], case
        require_saved(straight, 2, case)
        assert start == 1 or on["loaded_digest"] == straight["state_digest"], case
        assert (on["first_step"], on["losses"]) == (start + 1, never["losses"][start:]), case
        assert on["state_digest"] == never["state_digest"], case


@pytest.mark.full
@pytest.mark.parametrize("when_busy", ["skip", "queue"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_what_is_skipped_or_queued_changes_nothing_either(tmp_path: Path, setting: str, when_busy: str) -> None:
    own = [
        *SETTINGS[setting],
        f"save.when_busy={when_busy}",
        "coordinator.memory_budget_mib={_target_: ckpt.memory.budget.MemoryBudget, staging: 1048576}",
        "save.every=1",
        "train.steps=8",
    ]
    straight = tmp_path / "straight"
    never, saved = runs_of(2, [("ddp 2", tmp_path / "never", ["train.steps=8"]), ("ddp 2", straight, own)])
    assert (saved["losses"], saved["state_digest"]) == (never["losses"], never["state_digest"])
    steps = [save["step"] for save in saved["checkpoints"]]
    assert steps == sorted(steps) and steps[0] == 1
    if when_busy == "queue":
        assert steps == list(range(1, 9))
    resumed = runs_of(
        2,
        [
            ("ddp 2", tmp_path / f"from {step}", ["train.steps=8", f"resume={checkpoint(straight, step)}"])
            for step in steps[:-1]
        ],
    )
    for step, one in zip(steps, resumed, strict=False):
        assert one["losses"] == never["losses"][step:]
        assert one["state_digest"] == never["state_digest"]
