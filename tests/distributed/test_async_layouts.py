"""Saves in the background change nothing: a run that saves so trains as one that never saves, and goes on from any of them to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckpt.verify import verify_checkpoint
from tests.async_runs import SETTINGS
from tests.conf.configs import config
from tests.distributed.test_layouts import BACKENDS, LAYOUTS, checkpoint
from tests.distributed.test_layouts import _train as train_all
from tests.ranks import run_ranks

SMALL = ["train.batch_size=12", "model.dropout=0.1"]

TOGETHER = {
    1: [("single", "thread, overlap", "zarr")],
    2: [("pipeline 2", "thread, overlap", "tensorstore"), ("accelerate 2", "thread", "kimi-engine")],
    3: [("ddp 3", "thread", "tensorstore"), ("fsdp 3", "process, overlap", "kimi-engine")],
    4: [("hsdp 4", "thread", "zarr"), ("tp_fsdp 4", "thread, overlap", "tensorstore"),
        ("ddp_tp 4", "thread, overlap", "kimi-engine"), ("ddp_pipeline 4", "process", "tensorstore")],
}  # fmt: skip
"""Number of ranks -> every layout once, with ways to save in the background and backends spread over them."""


def runs_of(num_ranks: int, runs: list[tuple[str, Path, list[str]]]) -> list[dict[str, Any]]:
    """Train several runs, each in a layout, one after another on one set of ranks; their summaries, on which all ranks agree."""
    cfgs = []
    for layout, run_dir, overrides in runs:
        assert LAYOUTS[layout][0] == num_ranks
        cfgs.append(config(run_dir, *LAYOUTS[layout][1], *SMALL, *overrides, num_ranks=num_ranks))
    by_rank = run_ranks(num_ranks, train_all, cfgs, process_group=True, timeout_s=60.0 * len(runs))
    for summaries in by_rank:
        assert [one["losses"] for one in summaries] == [one["losses"] for one in by_rank[0]]
    return list(by_rank[0])


def in_parts(folder: Path, layout: str, setting: str, backend: str, steps: int) -> list[tuple[str, Path, list[str]]]:
    """A run that saves after its last step only, one that saves in the background after each, and two that go on in its middle:
    from a checkpoint that was written while the run went on, and where a run in the background ended.
    """
    middle = steps // 2
    own = [*BACKENDS[backend], *SETTINGS[setting]]
    straight, parts = folder / "straight", folder / "parts"
    every, whole, half = "save.every=1", f"train.steps={steps}", f"train.steps={middle}"
    return [
        (layout, folder / "never", [whole, "save.every=100"]),
        (layout, straight, [*own, every, whole]),
        (layout, folder / "on", [*own, every, whole, f"resume={checkpoint(straight, middle)}"]),
        (layout, parts, [*own, every, half]),
        (layout, parts, [*own, "save.every=100", whole, f"resume={checkpoint(parts, middle)}"]),
    ]


def require_alike(folder: Path, steps: int, summaries: list[dict[str, Any]]) -> None:
    never, straight, on, *parts = summaries
    middle = steps // 2
    assert straight["losses"] == never["losses"]
    assert straight["state_digest"] == never["state_digest"]
    assert [Path(save["path"]).name for save in straight["checkpoints"]] == [
        f"checkpoint-{step:08d}" for step in range(1, steps + 1)
    ]
    for save in straight["checkpoints"]:
        assert verify_checkpoint(Path(save["path"])) == []
    assert (on["first_step"], on["losses"]) == (middle + 1, never["losses"][middle:])
    assert on["state_digest"] == never["state_digest"]
    if parts:
        first, rest = parts
        assert rest["loaded_digest"] == first["state_digest"]
        assert first["losses"] + rest["losses"] == never["losses"]
        assert rest["state_digest"] == never["state_digest"]


@pytest.mark.parametrize("num_ranks", [1, 2, *(pytest.param(count, marks=pytest.mark.full) for count in (3, 4))])
def test_a_run_goes_on_to_the_bit_from_what_it_saved_while_it_trained(tmp_path: Path, num_ranks: int) -> None:
    cases = TOGETHER[num_ranks]
    runs = [
        run
        for layout, setting, backend in cases
        for run in in_parts(tmp_path / layout, layout, setting, backend, 3)[:3]
    ]
    summaries = runs_of(num_ranks, runs)
    for number, (layout, _, _) in enumerate(cases):
        require_alike(tmp_path / layout, 3, summaries[3 * number : 3 * number + 3])


@pytest.mark.full
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_goes_on_to_the_bit_by_every_way_to_save(
    tmp_path: Path, layout: str, setting: str, backend: str
) -> None:
    """Six steps are three and three; and the third of six."""
    require_alike(tmp_path, 6, runs_of(LAYOUTS[layout][0], in_parts(tmp_path, layout, setting, backend, 6)))


@pytest.mark.full
@pytest.mark.parametrize("when_busy", ["skip", "queue"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_what_is_skipped_or_queued_changes_nothing_either(tmp_path: Path, setting: str, when_busy: str) -> None:
    own = [
        *SETTINGS[setting],
        f"save.when_busy={when_busy}",
        "save.staging_budget_mib=4",
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
