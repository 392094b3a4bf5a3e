from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from rich.console import Console

from ckpt.loading.loader import LoadReport
from ckpt.saving.prepared_save import SaveReport
from recipes.support.report import Report, Summary, config_differences, write_summary

CONFIG = {"train": {"steps": 6}, "resume": None, "load": {"verify": True, "list": [1, 2]}, "name": "a"}
SAVED = "train:\n  steps: 6\nresume: null\nload:\n  verify: true\n  list: [1, 2]\nname: a\n"


def loaded(**changes: object) -> LoadReport:
    values = {"path": "/runs/checkpoint-00000004", "checkpoint_id": "00000004", "load_s": 0.5, "bytes_read": 10}
    return LoadReport(**(values | {"bytes_needed": 20, "config_text": SAVED} | changes))


def test_equal_configs_differ_in_nothing() -> None:
    assert config_differences(SAVED, CONFIG) == []


def test_only_what_differs_is_listed_one_line_a_key() -> None:
    now = {"train": {"steps": 9}, "resume": "latest", "load": {"list": [1, 3]}, "name": "a", "new": {"key": False}}
    assert config_differences(SAVED, now) == [
        "load.list: [1, 2] -> [1, 3]",
        "load.verify: true -> (not there)",
        "new.key: (not there) -> false",
        "train.steps: 6 -> 9",
    ]


def test_a_key_that_the_coordinator_repeats_is_listed_once() -> None:
    """The coordinator's node refers to other keys; a checkpoint's config.yaml holds it resolved."""

    def run(every: int, packed_mib: int) -> dict[str, object]:
        save = {"every": every, "mode": "sync"}
        return {"save": save, "coordinator": {"saves": {"save": save}, "packed_mib": packed_mib}}

    assert config_differences(OmegaConf.to_yaml(OmegaConf.create(run(3, 32))), run(2, 64)) == [
        "coordinator.packed_mib: 32 -> 64",
        "save.every: 3 -> 2",
    ]


@pytest.mark.parametrize(
    ("run_name", "output_dir", "says"),
    [
        ("b", "outputs/b", "run_name: a -> b, and with it output_dir, run_dir, checkpoint_root"),
        ("a", "/there", "output_dir: outputs/a -> /there, and with it run_dir, checkpoint_root"),
    ],
)
def test_paths_that_differ_by_the_folder_of_the_run_share_the_last_line(
    run_name: str, output_dir: str, says: str
) -> None:
    def run(name: str, output_dir: str, lr: float) -> dict[str, object]:
        folder = str(Path("/w", output_dir))
        own = {"run_name": name, "output_dir": output_dir, "run_dir": folder}
        return own | {"checkpoint_root": f"{folder}/checkpoints", "log": "/w/log", "z": {"lr": lr}}

    saved = OmegaConf.to_yaml(OmegaConf.create(run("a", "outputs/a", 0.1)))
    now = run(run_name, output_dir, 0.2) | {"log": "/w/log2"}
    assert config_differences(saved, now) == ["log: /w/log -> /w/log2", "z.lr: 0.1 -> 0.2", says]
    assert (
        config_differences(saved, now | {"checkpoint_root": "/mine"})[0]
        == "checkpoint_root: /w/outputs/a/checkpoints -> /mine"
    )


@pytest.mark.parametrize(
    ("damaged", "says"), [(("/c-4",), "/c-4 is damaged"), (("/c-5", "/c-4"), "/c-5, /c-4 are damaged")]
)
def test_a_fall_back_says_why(capsys: pytest.CaptureFixture[str], damaged: tuple[str, ...], says: str) -> None:
    Report({"train": {"steps": 2}}, shown=True).resumed(loaded(path="/c-3", fell_back_from=damaged, config_text=""))
    assert capsys.readouterr().out.startswith(f"WARNING: resume=latest fell back to /c-3, because {says}\n")


def test_a_summary_counts_on_from_the_step_that_was_resumed() -> None:
    summary = Summary(world_size=3)
    summary.add_resume(loaded(fell_back_from=("/runs/checkpoint-00000006",)), "d" * 32)
    assert (summary.first_step, summary.final_step) == (5, 4)
    summary.add_step(5, 2.5)
    saved = [SaveReport("/runs/checkpoint-00000005", "00000005", 99, 0.25, 0.125)]
    assert summary.add_saves(saved) == saved and summary.add_saves(saved) == []
    found = summary.as_dict()
    assert (found["first_step"], found["final_step"], found["losses"]) == (5, 5, [2.5])
    assert found["resumed_from"] == "/runs/checkpoint-00000004"
    assert found["fell_back_from"] == ["/runs/checkpoint-00000006"] and found["loaded_digest"] == "d" * 32
    assert (found["load_s"], found["bytes_read"], found["bytes_needed"]) == (0.5, 10, 20)
    assert found["checkpoints"] == [
        {"path": "/runs/checkpoint-00000005", "step": 5, "bytes": 99, "save_s": 0.25, "blocked_s": 0.125}
    ]


def test_a_summary_is_written_whole_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    summary = Summary(world_size=1, losses=[0.1 + 0.2])
    assert json.loads(write_summary(tmp_path, summary.as_dict()).read_text()) == summary.as_dict()
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def test_only_one_rank_speaks(capsys: pytest.CaptureFixture[str]) -> None:
    for shown in (False, True):
        report = Report({"train": {"steps": 2}}, shown=shown)
        with report.running(1):
            report.step(1, 3.0, [])
            saved = SaveReport("/runs/checkpoint-00000002", "00000002", 4_000_000, 0.5, 0.5, 4_000_000)
            report.step(2, 2.0, [saved])
        out = capsys.readouterr().out
        assert (out == "") is not shown
    assert out.splitlines() == [
        "step      1/2  loss 3.0000",
        "step      2/2  loss 2.0000  saved checkpoint-00000002: 0.500 s, 4.0 MB, 0.01 GB/s",
    ]


def test_a_bar_shows_no_loss_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    report = Report({"train": {"steps": 2}}, shown=True)
    report.console = Console(force_terminal=True, width=100, file=io.StringIO())
    with report.running(1):
        assert report._bar is not None
        report._bar.refresh()
        before = report.console.file.getvalue()  # type: ignore[attr-defined]
        report.step(1, 2.5, ())
    assert "0/2" in before and "loss" not in before
    assert "loss 2.5000" in report.console.file.getvalue()  # type: ignore[attr-defined]
