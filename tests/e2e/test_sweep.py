"""A sweep: every job a run of its own, on ranks of its own, in one process; one table at the end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.processes import a_second, left_after, mark, marked
from tests.e2e.runs import SMALL, Command
from tests.support.pages import parsed

FAILED = (
    "train.batch_size=12 does not divide into the 5 parts that parallel=ddp makes of a batch on 5 ranks: give a multiple of 5, "
    "such as train.batch_size=15"
)


def _sweep(folder: Path, *choices: str) -> tuple[Command, list[dict[str, Any]]]:
    arguments = [
        "-m",
        "recipes.train",
        "-m",
        f"output_dir={folder}",
        *SMALL,
        "train.steps=2",
        "save.every=1",
    ]
    command = Command(arguments, choices, folder.parent, mark(folder)).ended()
    assert left_after(a_second(), lambda: marked(folder)) == []
    assert "Traceback" not in command.out + command.err
    return command, json.loads((folder / "sweep.json").read_text())


@pytest.mark.full
def test_a_sweep_over_backends_and_ranks_ends_with_one_table(tmp_path: Path) -> None:
    command, rows = _sweep(tmp_path / "sweep", "ckpt=zarr,tensorstore", "launch.nproc_per_node=1,2")
    assert command.code == 0 and command.err == "", command.err
    own = [[row["overrides"][i] for i in (-2, -1)] for row in rows]
    assert own == [
        [f"ckpt={ckpt}", f"launch.nproc_per_node={ranks}"] for ckpt in ("zarr", "tensorstore") for ranks in (1, 2)
    ]
    assert all(row["error"] is None for row in rows)
    one, two, one_ts, two_ts = (row["state_digest"] for row in rows)
    assert (one, two) == (one_ts, two_ts)
    for row in rows:
        assert row["save_s"] > 0 and row["load_s"] > 0 and row["blocked_s"] > 0
        assert row["bytes_written"] > 2e6 and row["bytes_read"] > 2e6
        summary = json.loads((Path(row["run_dir"]) / "summary.json").read_text())
        assert summary["state_digest"] == row["state_digest"]
    assert [Path(row["run_dir"]).name for row in rows] == ["0", "1", "2", "3"]
    _is_one_table(command, tmp_path / "sweep", rows)


@pytest.mark.full
def test_a_job_that_fails_is_a_row_and_the_others_go_on(tmp_path: Path) -> None:
    command, rows = _sweep(tmp_path / "sweep", "ckpt=zarr,tensorstore", "launch.nproc_per_node=1,5,2")
    assert command.code == 1
    assert command.err.splitlines() in ([FAILED], [FAILED, FAILED])
    assert [row["error"] for row in rows] == [None, FAILED, None] * 2
    _is_one_table(command, tmp_path / "sweep", rows)


@pytest.mark.full
def test_a_job_whose_ranks_fail_in_a_save_is_a_row_and_the_others_go_on(tmp_path: Path) -> None:
    faulty = ["ckpt._target_=tests.e2e.misbehaving.FaultyZarr", "+ckpt.fault=killed,full_disk,none"]
    command, rows = _sweep(tmp_path / "sweep", *faulty, "launch.nproc_per_node=2")
    assert command.code == 1
    killed, full, none = (row["error"] for row in rows)
    assert "rank 1" in killed and "killed by SIGKILL in phase write of save of checkpoint-00000002" in killed
    assert full.startswith("save of checkpoint-00000002 failed in phase write on rank 1: No space left on device")
    assert none is None
    _is_one_table(command, tmp_path / "sweep", rows)


def _is_one_table(command: Command, folder: Path, rows: list[dict[str, Any]]) -> None:
    shown = parsed((folder / "sweep.html").read_text()).texts("jobs")
    assert [row["save s"].startswith("failed: ") for row in shown] == [row["error"] is not None for row in rows]
    for text in (command.out, (folder / "sweep.txt").read_text()):
        assert text.count(f"{len(rows)} jobs: ") == 1
        for row in rows:
            assert row["overrides"][-1].rpartition(".")[2] in text
            assert (row["state_digest"][:8] if row["error"] is None else row["error"].split()[-1]) in text
