from __future__ import annotations

import io
import json
import re
import threading
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from rich.console import Console

from ckpt.loading.report import LoadReport
from ckpt.ranks.topology import Topology
from ckpt.saving.prepared_save import SaveReport
from recipes.support.report import Report, Summary, config_differences, write_summary

RUN = {"train": {"steps": 2, "batch_size": 4}}
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

    def run(every: int, memory_budget_mib: int | None) -> dict[str, object]:
        save = {"every": every, "mode": "sync"}
        return {"save": save, "coordinator": {"saves": {"save": save}, "memory_budget_mib": memory_budget_mib}}

    assert config_differences(OmegaConf.to_yaml(OmegaConf.create(run(3, None))), run(2, 640)) == [
        "coordinator.memory_budget_mib: null -> 640",
        "save.every: 3 -> 2",
    ]


def test_another_layout_is_one_line_that_names_both() -> None:
    def run(layout: str, pattern: str, **own: object) -> dict[str, object]:
        component = {"_target_": "ckpt.StateComponent", "sharing_pattern": pattern}
        target = f"recipes.training.parallel.{layout}"
        return {"parallel": {"_target_": target, **own}, "components": {"model": component}, "train": {"steps": 3}}

    saved = OmegaConf.to_yaml(OmegaConf.create(run("replicated.DataParallel", "replicated", exact_resume=True)))
    now = run("sharded.FullySharded", "sharded", dp=None) | {"train": {"steps": 6}}
    assert config_differences(saved, now) == [
        "parallel: ddp -> fsdp, and with it components.model.sharing_pattern",
        "train.steps: 3 -> 6",
    ]
    assert config_differences(saved, run("mine.Own", "replicated"))[0] == (
        "parallel: ddp -> recipes.training.parallel.mine.Own"
    )


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
    Report(RUN, shown=True).resumed(loaded(path="/c-3", fell_back_from=damaged, config_text=""))
    assert capsys.readouterr().out.startswith(f"WARNING: resume=latest fell back to /c-3, because {says}\n")


def test_a_run_prints_the_lines_that_a_checkpointer_logs(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report(RUN, shown=True)
    restored = loaded(path="/c-3", config_text="", requests={"range": (3, 10)})
    saved = SaveReport("s3://bucket/run/c-5", "5", 5_000_000, 0.5, 0.5, 4_000_000, requests={"put": (1200, 4_000_000)})
    report.resumed(restored)
    report.saved([saved])
    assert capsys.readouterr().out.splitlines() == [str(restored), str(saved)]
    assert str(restored) == "restored /c-3 at step 4: 0.500 s, 0.0 MB, 0.00 GB/s, 3 range"
    assert str(saved) == "saved c-5: 0.500 s, 5.0 MB, 0.01 GB/s, 1,200 put, 1.0 MB linked"


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
        report = Report(RUN, shown=shown)
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


def test_a_save_in_the_background_is_shown_with_the_loss_of_its_step(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report(RUN, shown=True)
    with report.running(1):
        report.step(1, 3.0, [])
        report.step(2, 2.0, [SaveReport("/runs/checkpoint-00000001", "00000001", 4_000_000, 0.5, 0.125, 4_000_000)])
        report.saved([SaveReport("/runs/checkpoint-00000002", "00000002", 4_000_000, 0.5, 0.25, 4_000_000)])
    assert capsys.readouterr().out.splitlines() == [
        "step      1/2  loss 3.0000",
        "step      1/2  loss 3.0000  saved checkpoint-00000001: 0.500 s, 4.0 MB, 0.01 GB/s, of which training waited 0.125 s",
        "step      2/2  loss 2.0000  saved checkpoint-00000002: 0.500 s, 4.0 MB, 0.01 GB/s, of which training waited 0.250 s",
    ]


def test_a_save_that_copies_beside_training_says_for_how_many_bytes_training_waited(
    capsys: pytest.CaptureFixture[str],
) -> None:
    report = Report(RUN, shown=True)
    for blocked_bytes in (0, 600_000, 4_000_000):
        report.saved(
            [SaveReport("/runs/checkpoint-1", "1", 4_000_000, 0.5, 0.25, 4_000_000, blocked_bytes=blocked_bytes)]
        )
    waited = "saved checkpoint-1: 0.500 s, 4.0 MB, 0.01 GB/s, of which training waited 0.250 s"
    assert capsys.readouterr().out.splitlines() == [
        waited,
        f"{waited}; 0.6 MB could not be copied beside it",
        waited,
    ]


@pytest.mark.parametrize(("seconds", "slowest"), [(2.0, ""), (2.5, ", rank 3 slowest")])
def test_long_saves_and_loads_name_the_slowest_rank(
    capsys: pytest.CaptureFixture[str], seconds: float, slowest: str
) -> None:
    report = Report(RUN, shown=True)
    saved = SaveReport("/runs/checkpoint-2", "2", 5_000_000_000, seconds, seconds, 5_000_000_000, slowest_rank=3)
    report.saved([saved])
    report.reread(loaded(load_s=seconds, bytes_read=5_000_000_000, slowest_rank=3))
    figures = f"{seconds:.3f} s, 5000.0 MB, {5 / seconds:.2f} GB/s{slowest}"
    assert capsys.readouterr().out.splitlines() == [
        f"saved checkpoint-2: {figures}",
        f"read back checkpoint-00000004, bit for bit: {figures}",
    ]


def terminal(width: int) -> tuple[Console, io.StringIO]:
    screen = io.StringIO()
    return Console(
        force_terminal=True, width=width, file=screen, color_system=None, soft_wrap=True, legacy_windows=False
    ), screen


def drawn(screen: io.StringIO) -> list[str]:
    """All states of the line, and the lines above it."""
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())
    return [line.rstrip() for line in re.split(r"[\r\n]+", plain) if line.strip()]


def test_a_terminal_has_one_live_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    clock = iter(range(100))
    monkeypatch.setattr("recipes.support.live_line.time.monotonic", lambda: float(next(clock)))
    console, screen = terminal(120)
    report = Report(RUN, shown=True, console=console)
    with report.running(1):
        report.step(1, 2.5, [SaveReport("/runs/checkpoint-1", "1", 4_000_000, 0.5, 0.125, 4_000_000)])
        report.step(2, 2.25, [])
    save = "save 4.0 MB 0.50 s 0.01 GB/s blocked 0.12 s"
    lines = drawn(screen)
    assert [line.replace("━", "") for line in dict.fromkeys(lines)] == [
        "step 0/2  ",
        f"step 1/2    loss 2.5000  4.00 samples/s  {save}  0:00:01",
        f"step 2/2    loss 2.2500  4.00 samples/s  {save}  0:00:00",
    ]
    assert all(line.count("━") >= 10 for line in lines)


@pytest.mark.parametrize(("is_running", "seconds", "has_line"), [(True, 0.5, 0), (True, 2.5, 1), (False, 0.5, 1)])
def test_beside_the_live_line_only_long_saves_get_one(
    monkeypatch: pytest.MonkeyPatch, is_running: bool, seconds: float, has_line: int
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    console, screen = terminal(120)
    report = Report(RUN, shown=True, console=console)
    with report.running(1) if is_running else nullcontext():
        report.saved([SaveReport("/runs/checkpoint-1", "1", 4_000_000, seconds, 0.125, 4_000_000)])
    assert sum(line.startswith("saved checkpoint-1: ") for line in drawn(screen)) == has_line


@pytest.mark.parametrize("width", [20, 60, 80, 100, 200])
def test_the_live_line_fits_the_terminal(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setenv("TERM", "xterm")
    console, screen = terminal(width)
    report = Report(RUN, shown=True, console=console)
    with report.running(1):
        report.step(1, 2.5, [SaveReport("/runs/checkpoint-1", "1", 4_000_000, 0.5, 0.125, 4_000_000)])
    assert max(map(len, drawn(screen))) <= width


@pytest.mark.parametrize("is_running", [True, False])
def test_bytes_are_shown_while_a_save_or_a_load_takes_long(monkeypatch: pytest.MonkeyPatch, is_running: bool) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("ckpt.cli.progress.SHOWN_AFTER_S", 0.02)
    monkeypatch.setattr("ckpt.cli.progress._REFRESH_S", 0.01)
    console, screen = terminal(120)
    topology = Topology.alone()
    report = Report(RUN, shown=True, console=console, topology=topology)
    with report.running(1) if is_running else nullcontext():
        with report.moving("saving checkpoint-7"):
            topology.progress(3_000_000)
            topology.progress(2_000_000)
            until = time.monotonic() + 20
            while "5.0 MB" not in screen.getvalue() and time.monotonic() < until:
                time.sleep(0.01)
        topology.progress(1)
    assert topology.on_progress is None
    lines = drawn(screen)
    assert any(re.search(r"saving checkpoint-7: 5\.0 MB, \d\.\d\d GB/s, 0 s$", line) for line in lines)
    assert ("saving" in lines[-1]) is not is_running  # it is taken off the screen
    assert threading.active_count() == 1 or "progress" not in {one.name for one in threading.enumerate()}


def test_short_work_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    console, screen = terminal(120)
    with Report(RUN, shown=True, console=console, topology=Topology.alone()).moving("saving checkpoint-7"):
        pass
    assert screen.getvalue() == ""
