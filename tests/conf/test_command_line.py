"""The training command as a user types it: what it prints, leaves behind and exits with."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import pickle
import pty
import re
import shutil
import struct
import subprocess
import sys
import termios
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

import recipes.benchmark.__main__
import recipes.sync_weights
import recipes.train
import recipes.verify
from recipes.support.cli import _Job
from tests.support.pages import parsed
from tests.support.ranks import forkserver

SMALL = ["train.batch_size=2", "launch.nproc_per_node=1", "model.size=nano"]
BYTES = 2e6
"""A checkpoint of it holds more."""
REPO = Path(recipes.train.__file__).parent.parent


@dataclass
class Outcome:
    code: int
    out: str
    err: str


Command = Callable[..., Outcome]


class Remover:
    """A component of the user's own that removes the folder of the run before the second save."""

    def __init__(self, model: object) -> None:
        self.times = 0

    def state_dict(self) -> dict[str, int]:
        self.times += 1
        if self.times == 2:
            shutil.rmtree("outputs/dev")
        return {"times": self.times}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        raise NotImplementedError


class Broken:
    """A component of the user's own with a bug in it."""

    def __init__(self, model: object) -> None:
        raise KeyError("a bug of ours")


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Command]:
    """Run `python -m recipes.train <overrides>`, or another command, in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, main: Callable[[], None] = recipes.train.main) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["recipes/train.py", *arguments])
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
        return Outcome(code, *capsys.readouterr())

    yield run
    for handler in logging.root.handlers[:]:  # Hydra's, the log file of the last run among them
        if type(handler).__module__.startswith("logging"):
            logging.root.removeHandler(handler)
            handler.close()


def summary(run_dir: str = "outputs/dev") -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(Path(run_dir, "summary.json").read_text())
    return loaded


def files(run_dir: str = "outputs/dev") -> dict[str, tuple[bytes, int]]:
    """The files of a run's folder: content and time of each."""
    found = [path for path in Path(run_dir).rglob("*") if path.is_file()]
    return {str(path.relative_to(run_dir)): (path.read_bytes(), path.stat().st_mtime_ns) for path in found}


def python(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(REPO)} | environment
    return subprocess.run([sys.executable, *arguments], cwd=cwd, env=env, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["ckpt=nope"], "ckpt=nope: there is no such choice; ckpt is one of kimi-engine, tensorstore, zarr"),
        (["parallel=nope"], "parallel=nope: there is no such choice; parallel is one of accelerate, ddp, "),
        (["trian.steps=3"], "trian.steps: there is no such key; did you mean train.steps?"),
        (["train.stpes=3"], "train.stpes: there is no such key; did you mean train.steps?"),
        (["chkpt=zarr"], "chkpt: there is no such key; did you mean ckpt?"),
        (["~components.rgn"], "components.rgn: there is no such key; did you mean components.rng?"),
        (["train.steps=[1"], "train.steps=[1: cannot be read as key=value: no viable alternative at input '[1'"),
        (["train.steps=-1"], "train.steps=-1: expected at least 1"),
        (["device=gpu"], "device=gpu: there is no such choice; did you mean cuda? device is one of cpu, cuda, npu"),
        (["device=mps"], "device=mps: it is not supported; device is one of cpu, cuda, npu"),
        (["ckpt=null"], "ckpt=null: expected a choice; ckpt is one of kimi-engine, tensorstore, zarr"),
        (["save.every=null"], "save.every=null: expected a whole number"),
        (["output_dir=null"], "output_dir=null: expected a text"),
        (["load=null"], "load=null: expected keys with values"),
        (["coordinator.memory_budget_mib={}"], "coordinator.memory_budget_mib={}: expected a whole number"),
        *(
            ([f"{new}{key}=8"], f"{key} is no key any more: coordinator.memory_budget_mib bounds")
            for key in ("ckpt.buffer_mib", "device.pinned_mib", "save.staging_budget_mib", "coordinator.packed_mib")
            for new in ("", "+")
        ),
        (["train.seed=18446744073709551616"], "train.seed=18446744073709551616: expected less than 2**63"),
        (
            ["data._target_=builtins.dict"],
            "data: builtins.dict makes a dict; expected a dataset with __len__ and __getitem__, a DataLoader, or an iterable",
        ),
        (
            ["parallel._target_=builtins.dict"],
            "parallel: builtins.dict makes a dict; expected a recipes.training.parallel.",
        ),
        (["train.steps=three"], "train.steps=three: expected a whole number"),
        (
            ["parallel=single", "launch.nproc_per_node=2"],
            "parallel=single trains on one rank, but there are 2: choose ",
        ),
        (
            ["components.model.sharing_pattern=per_group"],
            "components.model.sharing_pattern=per_group needs process_group_name",
        ),
        (["data.path=/no/such"], "data.path=/no/such: there is no such file or folder"),
        (
            ["output_dir=/proc/x"],
            "the folder of the run cannot be made: No such file or directory: '/proc/x'; choose another with output_dir=",
        ),
        (
            ["-m", "output_dir=/proc/x", "train.steps=1,2"],
            "the folder of the sweep, /proc/x, cannot be written; choose another with output_dir=<folder>: No such file or directory: ",
        ),
        (["output_dir=/proc"], "the folder of the run, /proc, cannot be written; choose another with output_dir=<folder>: No such file "),
        (["optimizer.lr=abc"], "optimizer.lr=abc: expected a number"),
        (["resume="], "resume= has no value: it is latest, null or the path of a checkpoint; leave the key out"),
        (["run_name="], "run_name= has no value: it is a name; leave the key out for its default"),
        (["output_dir="], "output_dir= has no value: it is a folder; leave the key out for its default"),
        (["ckpt=zarr,tensorstore"], "ckpt=zarr,tensorstore: several values are a sweep, which needs -m; "),
        (
            ["--resume", "latest"],
            "--resume latest: there is no such option; a key is given without dashes, as resume=latest",
        ),
        (
            ["train.steps=3", "--resume=latest"],
            "--resume=latest: there is no such option; a key is given without dashes, ",
        ),
        (["--multirun=3"], "argument --multirun/-m: ignored explicit argument '3'; --help shows how "),
        (["-m", "ckpt=zarr,nope"], "ckpt=nope: there is no such choice; ckpt is one of kimi-engine, tensorstore, zarr"),
        (["-m", "trian.steps=3,4"], "trian.steps: there is no such key; did you mean train.steps?"),
        (
            ["-m", "trian.steps=3,4", "ckpt=zarr,tensorstore"],
            "trian.steps: there is no such key; did you mean train.steps?",
        ),
        (
            ["resume=/no/such/checkpoint-3"],
            "/no/such/checkpoint-3 is not a checkpoint: it does not exist. Give the folder of a committed checkpoint.",
        ),
        (
            ["resume=/no/lates"],
            "/no/lates is not a checkpoint: it does not exist. Give the folder of a committed checkpoint. Did you "
            "mean resume=latest?",
        ),
        (["outputs/dev"], "outputs/dev: expected key=value; --help shows the keys"),
        (
            ["-sc", "query=bash"],
            "-sc query=bash is asked by bash, which sets COMP_LINE; -sc install=bash prints the code for",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_sentence_and_exit_code_1(command: Command, arguments: list[str], sentence: str) -> None:
    outcome = command(*arguments)
    assert outcome.code == 1
    assert outcome.err.startswith(sentence) and outcome.err.count("\n") == 1, outcome.err
    assert not list(Path().iterdir()), "a refused run leaves no folder"


def test_a_run_tells_its_progress_and_leaves_a_summary(command: Command, tmp_path: Path) -> None:
    outcome = command(*SMALL, "train.steps=5", "save.every=2")
    assert outcome.code == 0 and outcome.err == ""
    saves = [line for line in outcome.out.splitlines() if "saved checkpoint-" in line]
    assert [line.split()[1] for line in saves] == ["2/5", "4/5", "5/5"]
    assert all("GB/s" in line and " MB," in line and "loss" in line for line in saves)
    found = summary()
    assert list(found) == [
        "world_size",
        "first_step",
        "final_step",
        "losses",
        "resumed_from",
        "fell_back_from",
        "loaded_digest",
        "state_digest",
        "checkpoints",
        "skipped",
        "load_s",
        "bytes_read",
        "bytes_needed",
    ]
    assert (found["world_size"], found["first_step"], found["final_step"], len(found["losses"])) == (1, 1, 5, 5)
    assert [found[key] for key in ("resumed_from", "loaded_digest", "load_s", "bytes_read", "bytes_needed")] == [
        None
    ] * 5
    assert found["fell_back_from"] == []
    root = tmp_path / "outputs" / "dev" / "checkpoints"
    assert [(save["step"], save["path"]) for save in found["checkpoints"]] == [
        (step, f"{root}/checkpoint-{step:08d}") for step in (2, 4, 5)
    ]
    assert all(save["bytes"] > BYTES and save["save_s"] >= save["blocked_s"] > 0 for save in found["checkpoints"])


def test_a_terminal_shows_one_live_line_and_keeps_its_last_state(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 110, 0, 0))
    words = [*SMALL, "train.steps=4", "save.every=2", "save.mode=async"]
    process = forkserver().Process(target=_train_in_terminal, args=(os.ttyname(theirs), tmp_path, words))
    process.start()
    ends = threading.Thread(target=lambda: (process.join(), os.close(theirs)))
    ends.start()
    screen = b""
    with contextlib.suppress(OSError):  # how a terminal says that the program has ended
        while data := os.read(ours, 1 << 16):
            screen += data
    ends.join()
    os.close(ours)
    assert process.exitcode == 0
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.decode())
    memory, live, *rest = (line for line in plain.split("\n") if line.strip())
    assert memory.startswith("checkpointing takes at most 104 MiB of host memory of each rank")
    states = [state.rstrip() for state in live.split("\r") if state.strip()]
    assert states[0].startswith("step 0/4") and states[-1].startswith("step 4/4")
    assert max(map(len, states)) <= 110 and len(states) >= 5
    found = summary(str(tmp_path / "outputs" / "dev"))
    last = found["checkpoints"][-1]
    for part in (f"loss {found['losses'][-1]:.4f}", " samples/s", "save 2.", f"blocked {last['blocked_s']:.2f} s"):
        assert part in states[-1]
    assert [line.split()[0] for line in rest] == ["trained", "state"] and " samples/s, loss " in rest[0]


def _train_in_terminal(terminal: str, folder: Path, words: list[str]) -> None:
    os.setsid()
    for stream in range(3):
        os.dup2(os.open(terminal, os.O_RDWR), stream)
    os.chdir(folder)
    for name in ("COLUMNS", "LINES", "NO_COLOR"):
        os.environ.pop(name, None)
    os.environ["TERM"] = "xterm"
    torch.set_num_threads(1)
    sys.argv = ["recipes.train", *words]
    recipes.train.main()


def events(run_dir: str = "outputs/dev") -> dict[str, list[tuple[int, float]]]:
    """Step and value of each figure in the event files, as TensorBoard reads them."""
    from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

    read = EventAccumulator(f"{run_dir}/tensorboard", size_guidance={SCALARS: 0})
    read.Reload()
    return {name: [(one.step, one.value) for one in read.Scalars(name)] for name in read.Tags()[SCALARS]}


def in_float32(figures: dict[str, list[tuple[int, float]]]) -> dict[str, list[tuple[int, float]]]:
    return {name: [(step, torch.tensor(float(value)).item()) for step, value in of] for name, of in figures.items()}


def test_tensorboard_shows_the_figures_of_the_summary_and_those_of_a_resumed_run_take_over(command: Command) -> None:
    pytest.importorskip("tensorboard", reason="logger=tensorboard needs the package tensorboard")
    assert command(*SMALL, "train.steps=3", "save.every=2", "logger=tensorboard").code == 0
    found = summary()
    names = ("save_s", "blocked_s", "bytes")
    first = {f"checkpoint/{name}": [(one["step"], one[name]) for one in found["checkpoints"]] for name in names}
    losses = list(enumerate(found["losses"], 1))
    assert events() == in_float32(first | {"train/loss": losses})
    shutil.rmtree("outputs/dev/checkpoints/checkpoint-00000003")
    on = command(*SMALL, "train.steps=4", "save.every=9", "logger=tensorboard", "resume=latest", "save.mode=async")
    assert on.code == 0
    found = summary()
    loads = {f"checkpoint/{name}": [(2, found[name])] for name in ("load_s", "bytes_read")}
    (last,) = found["checkpoints"]
    saves = {f"checkpoint/{name}": [first[f"checkpoint/{name}"][0], (4, last[name])] for name in names}
    losses = losses[:2] + list(enumerate(found["losses"], 3))
    assert events() == in_float32(saves | loads | {"train/loss": losses})


def test_a_logger_whose_package_is_missing_is_refused_before_anything_is_written(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recipes.support.metrics.find_spec", lambda name: None)
    for main in (recipes.train.main, recipes.sync_weights.main):
        outcome = command("logger=tensorboard", main=main)
        assert outcome.code == 1 and outcome.err.count("\n") == 1
        assert "logger=tensorboard needs the package tensorboard, which is not installed: pip install" in outcome.err
        assert command("report=tensorboard", main=main).err == "report is no key any more: logger= takes the same names\n"
        assert list(Path.cwd().iterdir()) == []


def test_a_resumed_run_equals_the_straight_one_bit_for_bit_and_says_what_has_changed(command: Command) -> None:
    command(*SMALL, "run_name=straight", "train.steps=6", "save.every=3")
    command(*SMALL, "train.steps=3", "save.every=3")
    outcome = command(*SMALL, "resume=latest", "train.steps=6", "save.every=2")
    assert outcome.code == 0
    differences = [line.strip() for line in outcome.out.splitlines() if "config differs" in line]
    assert differences == [
        "config differs: save.every: 3 -> 2",
        "config differs: train.steps: 3 -> 6",
    ]
    straight, resumed = summary("outputs/straight"), summary()
    assert resumed["losses"] == straight["losses"][3:]
    assert resumed["state_digest"] == straight["state_digest"]
    assert (resumed["first_step"], resumed["final_step"]) == (4, 6)
    assert resumed["resumed_from"].endswith("outputs/dev/checkpoints/checkpoint-00000003")
    assert resumed["loaded_digest"] is not None and resumed["bytes_read"] == resumed["bytes_needed"] > BYTES


def test_paths_are_taken_as_they_were_typed_and_a_sweep_keeps_its_commas(command: Command) -> None:
    assert command(*SMALL, "train.steps=1", "output_dir=runs/lr=1e-3,(é)", "checkpoint_root=kept/[a]=b").code == 0
    saved = Path("kept/[a]=b/checkpoint-00000001")
    assert saved.is_dir() and Path("runs/lr=1e-3,(é)/summary.json").is_file()
    resumed = command(*SMALL, "-m", "train.steps=2", f"resume={saved}", "run_name=a,b")
    assert resumed.code == 0, resumed.err
    assert {path.parent.parent.name for path in Path("outputs").rglob("checkpoint-00000002")} == {"0", "1"}


def test_resuming_where_there_is_nothing_says_so_and_begins(command: Command) -> None:
    outcome = command(*SMALL, "resume=latest", "train.steps=1")
    assert outcome.code == 0 and "resume=latest: there is no checkpoint in " in outcome.out
    assert (summary()["first_step"], summary()["resumed_from"]) == (1, None)


def test_the_same_command_twice_is_refused_with_three_ways_out(command: Command) -> None:
    command(*SMALL, "train.steps=1")
    before = files()
    assert {"summary.json", ".hydra/config.yaml", ".hydra/hydra.yaml", ".hydra/overrides.yaml"} <= set(before)
    assert OmegaConf.load("outputs/dev/.hydra/config.yaml").train.steps == 1
    assert OmegaConf.load("outputs/dev/.hydra/overrides.yaml") == [*SMALL, "train.steps=1"]
    outcome = command(*SMALL, "train.steps=1", "save.every=7")
    assert outcome.code == 1 and outcome.err.count("\n") == 1
    assert all(way in outcome.err for way in ("resume=latest", "run_name=", "overwrite=true"))
    assert files() == before
    assert command(*SMALL, "train.steps=1", "overwrite=true").code == 0
    assert command(*SMALL, "train.steps=1", "run_name=another").code == 0


def test_going_on_from_an_older_checkpoint_sets_newer_ones_aside_if_that_was_asked_for(
    command: Command,
) -> None:
    command(*SMALL, "train.steps=4", "save.every=1", "~components.rng")
    root, before = Path("outputs/dev/checkpoints"), files()
    on = [
        *SMALL,
        f"resume={root}/checkpoint-00000002",
        "train.steps=3",
        "optimizer.lr=0.01",
        "~components.rng",
    ]
    refused = command(*on)
    assert refused.code == 1 and refused.err.count("\n") == 1
    newer = "newer checkpoints: checkpoint-00000003, checkpoint-00000004. "
    assert all(part in refused.err for part in (newer, "overwrite=true", "run_name=", "resume=latest")), refused.err
    assert files() == before
    assert command(*on, "overwrite=true").code == 0
    names = sorted(path.name for path in root.iterdir())
    assert [name.rpartition("-")[0] for name in names[:2]] == [".abandoned-00000003", ".abandoned-00000004"]
    assert names[2:] == ["checkpoint-00000001", "checkpoint-00000002", "checkpoint-00000003"]
    assert command(*SMALL, "resume=latest", "train.steps=4", "~components.rng").code == 0
    assert summary()["resumed_from"].endswith("checkpoint-00000003")
    foreign = command(
        *SMALL, f"resume={root}/checkpoint-00000002", "run_name=other", "train.steps=3", "~components.rng"
    )
    assert foreign.code == 0
    back = command(*SMALL, "resume=outputs/other/checkpoints/checkpoint-00000003", "train.steps=9", "~components.rng")
    assert back.code == 1 and "holds checkpoints of another history: checkpoint-00000001, " in back.err


def test_a_run_whose_folder_is_removed_says_so_at_the_next_save_and_makes_no_other(command: Command) -> None:
    remover = f"+components.remover={{_target_: {__name__}.Remover, sharing_pattern: global}}"
    outcome = command(*SMALL, "train.steps=3", "save.every=1", remover)
    assert outcome.code == 1 and outcome.err.count("\n") == 1
    assert (
        "outputs/dev/checkpoints was removed while this run was using it; nothing is saved in its place" in outcome.err
    )
    assert not Path("outputs/dev").exists()


def test_a_damaged_checkpoint_is_passed_over_loudly_unless_it_was_named(command: Command) -> None:
    command(*SMALL, "train.steps=3", "save.every=1", "~components.rng")
    newest = Path("outputs/dev/checkpoints/checkpoint-00000003").resolve()
    victim = max((path for path in newest.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    flipped = bytearray(victim.read_bytes())
    flipped[len(flipped) // 2] ^= 1
    victim.write_bytes(flipped)
    named = command(*SMALL, f"resume={newest}", "train.steps=4", "~components.rng")
    assert named.code == 1 and named.err.count("\n") == 1 and newest.name in named.err
    outcome = command(*SMALL, "resume=latest", "train.steps=4", "~components.rng")
    assert outcome.code == 0 and f", because {newest} is damaged" in outcome.out
    assert summary()["fell_back_from"] == [str(newest)]
    assert summary()["first_step"] == 3


def test_reading_back_finds_the_state_that_was_saved(command: Command) -> None:
    outcome = command(*SMALL, "train.steps=2", "load.reread=true")
    found = summary()
    assert outcome.code == 0 and "read back checkpoint-00000002, bit for bit" in outcome.out
    assert found["load_s"] > 0 and found["bytes_read"] == found["bytes_needed"] > BYTES
    assert found["resumed_from"] is None and found["loaded_digest"] is None


def test_a_sweep_ends_with_one_table_in_which_a_failed_job_is_a_row(command: Command, tmp_path: Path) -> None:
    outcome = command(*SMALL, "-m", "ckpt=zarr,tensorstore", "train.steps=2,-1", "save.every=1")
    assert outcome.code == 1 and outcome.err == "train.steps=-1: expected at least 1\n"
    rows = json.loads(Path("outputs/dev/sweep.json").read_text())
    assert [row["overrides"][-3:-1] for row in rows] == [
        [f"ckpt={ckpt}", f"train.steps={steps}"] for ckpt in ("zarr", "tensorstore") for steps in (2, -1)
    ]
    good, bad = [rows[0], rows[2]], [rows[1], rows[3]]
    assert [row["error"] for row in bad] == ["train.steps=-1: expected at least 1"] * 2
    assert good[0]["state_digest"] == good[1]["state_digest"]
    assert all(row["save_s"] > 0 and row["load_s"] > 0 and row["blocked_s"] > 0 for row in good)
    assert all(row["bytes_written"] > BYTES and row["bytes_read"] > BYTES for row in good)
    lines = outcome.out.splitlines()
    for number, row in enumerate(rows):
        job = f"job {number} ckpt={('zarr', 'tensorstore')[number // 2]} train.steps={(2, -1)[number % 2]}: "
        figures = rf"save \d+\.\d{{3}} s, load \d+\.\d{{3}} s, digest {(row.get('state_digest') or '')[:8]}"
        assert re.fullmatch(job + (f"failed: {row['error']}" if row["error"] else figures), lines[number])
    assert lines[4].split(":")[0].strip() == "4 jobs", "and nothing that a job says itself"
    assert "".join(Path("outputs/dev/0/job.log").read_text()).count("saved checkpoint-") == 2
    for text in (outcome.out, Path("outputs/dev/sweep.txt").read_text()):
        assert good[0]["state_digest"][:8] in text and "ckpt=tensorstore" in text
    shown = parsed(Path("outputs/dev/sweep.html").read_text()).texts("jobs")
    assert [row["ckpt"] for row in shown] == ["zarr", "zarr", "tensorstore", "tensorstore"]
    assert shown[0]["digest"] == good[0]["state_digest"][:8] and shown[1]["save s"] == f"failed: {bad[0]['error']}"
    assert good[0]["save_s_each"][0] > 0 and good[0]["bytes_needed"] > BYTES
    folders = [path.name for path in (tmp_path / "outputs" / "dev").iterdir() if path.is_dir()]
    assert sorted(folders) == ["0", "2"], "a refused job leaves no folder"


def test_a_sweep_of_jobs_without_checkpoints_has_a_table(command: Command) -> None:
    small = [key for key in SMALL if not key.startswith("launch.")]
    outcome = command(*small, "-m", "train.steps=1", "train.seed=0,1", "output_dir=s", main=recipes.sync_weights.main)
    assert outcome.code == 0, outcome.err
    assert outcome.out.splitlines()[:2] == [f"job {seed} train.seed={seed}: done, nothing was saved" for seed in (0, 1)]
    assert [row["state_digest"] for row in json.loads(Path("s/sweep.json").read_text())] == ["", ""]
    assert "published" in Path("s/0/job.log").read_text()


def test_a_verbose_sweep_shows_what_each_job_says(command: Command) -> None:
    outcome = command(*SMALL, "-m", "train.seed=0,1", "train.steps=1", "resume=latest", "hydra.verbose=recipes")
    assert outcome.code == 0, outcome.err
    lines = outcome.out.splitlines()
    begins = [lines.index(f"job {number} train.seed={number}") for number in (0, 1)]
    ends = [next(at for at, line in enumerate(lines) if line.startswith(f"job {n} train.seed={n}: save ")) for n in (0, 1)]
    assert begins[0] == 0 and begins[1] == ends[0] + 1 and lines[ends[1] + 1].strip().startswith("2 jobs: ")
    for begin, end in zip(begins, ends, strict=True):
        said = "\n".join(lines[begin + 1 : end])
        assert "there is no checkpoint in" in said and "saved checkpoint-00000001" in said and "read back" in said
    assert not list(Path("outputs").rglob("job.log"))


def test_on_a_terminal_a_sweep_shows_the_job_that_is_under_way(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recipes.support.sweep._on_terminal", lambda: True)
    outcome = command(*SMALL, "-m", "train.steps=1", "train.seed=0,1", "resume=latest")
    assert outcome.code == 0, outcome.err
    for number in (0, 1):
        assert f"job {number} train.seed={number}\r\x1b[Kjob {number} train.seed={number}: save " in outcome.out
    assert "there is no checkpoint in" not in outcome.out
    assert Path("outputs/dev/1/job.log").read_text().startswith("resume=latest: there is no checkpoint in ")


@pytest.mark.full
@pytest.mark.parametrize(("launcher", "package"), [("joblib", "joblib"), ("submitit_local", "submitit")])
def test_a_sweep_in_other_processes_ends_with_the_same_table(command: Command, launcher: str, package: str) -> None:
    pytest.importorskip(f"hydra_plugins.hydra_{package}_launcher")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs, of processes and files that are closed late
        outcome = command(*SMALL, "-m", f"hydra/launcher={launcher}", "train.steps=2,-1", "ckpt=zarr")
        if launcher == "joblib":  # its processes wait for more work
            import_module("joblib.externals.loky").get_reusable_executor().shutdown(wait=True)
    assert (outcome.code, outcome.err) == (1, "train.steps=-1: expected at least 1\n")
    rows = json.loads(Path("outputs/dev/sweep.json").read_text())
    assert [row["error"] for row in rows] == [None, "train.steps=-1: expected at least 1"]
    assert rows[0]["save_s"] > 0 and rows[0]["load_s"] > 0
    for text in (outcome.out, Path("outputs/dev/sweep.txt").read_text()):
        assert rows[0]["state_digest"][:8] in text and "train.steps=-1" in text
    said = OmegaConf.load(Path(rows[0]["run_dir"], ".hydra", "hydra.yaml")).hydra
    assert package in said.launcher._target_ and said.job.id != 0
    assert not Path("outputs/dev/1").exists() and not Path("outputs/dev/.rows").exists()


def test_a_bug_keeps_its_traceback(command: Command) -> None:
    outcome = command(*SMALL, f"+components.bad={{_target_: {__name__}.Broken, sharing_pattern: global}}")
    assert outcome.code == 1
    assert "Traceback" in outcome.err and 'raise KeyError("a bug of ours")' in outcome.err


def test_a_command_leaves_the_environment_as_it_was(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    before = dict(os.environ)
    command("ckpt=nope")
    assert os.environ == before
    assert sys.argv == ["recipes/train.py", "ckpt=nope"]


@pytest.mark.full  # refused by its path, it is run in the test of device plugins
def test_a_recipe_can_be_run_by_its_path_from_anywhere(tmp_path: Path) -> None:
    done = python(str(REPO / "recipes" / "train.py"), "--cfg", "job", cwd=tmp_path, PYTHONPATH="")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ckpt:\n")


def test_a_script_outside_of_the_checkout_can_be_a_recipe(tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    script.write_text("from recipes.support.cli import recipe\n@recipe('train')\ndef main(cfg): ...\nmain()\n")
    done = python(str(script), "--cfg", "hydra", "--package", "hydra.job", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "\nname: mine\n" in done.stdout


def test_the_job_of_a_package_is_named_after_the_package_and_found_by_other_processes(command: Command) -> None:
    main = recipes.benchmark.__main__.main
    shown = command("--cfg", "hydra", "--package", "hydra.job", main=main)
    assert shown.code == 0 and "\nname: benchmark\n" in shown.out
    work = main.__wrapped__  # type: ignore[attr-defined]
    assert pickle.loads(pickle.dumps(_Job(work, "benchmark", None))).work is work


def test_a_benchmark_without_a_scratch_folder_removes_none_of_the_user_s(command: Command) -> None:
    notes = Path("outputs/benchmark_device/scratch/notes.txt")
    notes.parent.mkdir(parents=True)
    notes.write_text("mine")
    outcome = command("measure=device", "launch.nproc_per_node=1", main=recipes.benchmark.__main__.main)
    assert outcome.code == 2 and outcome.err.startswith("device=cpu has no copies to measure")
    assert notes.read_text() == "mine"


@pytest.mark.parametrize("device", ["npu", pytest.param("cpu", marks=pytest.mark.full)])
def test_a_device_plugin_without_its_driver_stops_only_those_who_ask_for_it(tmp_path: Path, device: str) -> None:
    """Torch imports every plugin that is installed, and a plain `import torch` would end in a traceback here.

    The recipe is run by its path, and finds its modules and conf/ from anywhere.
    """
    site = tmp_path / "site"
    (site / "torch_npu").mkdir(parents=True)
    refusal = "libascendcl.so: cannot open shared object file: No such file or directory"
    (site / "torch_npu" / "__init__.py").write_text(f"raise ImportError({refusal!r})\n")
    (site / "torch_npu-2.0.dist-info").mkdir()
    (site / "torch_npu-2.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_npu\nVersion: 2.0\n")
    (site / "torch_npu-2.0.dist-info" / "entry_points.txt").write_text(
        "[torch.backends]\ntorch_npu = torch_npu:autoload\n"
    )
    recipe = str(REPO / "recipes" / "train.py")
    done = python(recipe, *SMALL, f"device={device}", "train.steps=1", cwd=tmp_path, PYTHONPATH=str(site))
    if device == "cpu":
        assert done.returncode == 0, done.stderr
        return
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("device=npu: torch_npu is installed without CANN (libascendcl.so cannot be loaded): ")


def test_a_command_that_only_reads_refuses_a_sweep_and_makes_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["recipes/verify.py", "-m", "path=a,b"])
    with pytest.raises(SystemExit, match="2"):
        recipes.verify.main()
    assert capsys.readouterr().err == "verify only reads, one path at a time: leave out -m\n"
    assert not list(tmp_path.iterdir())


def test_a_root_in_the_memory_of_one_process_is_refused_for_several_ranks(command: Command) -> None:
    outcome = command(*SMALL[::2], "launch.nproc_per_node=2", "checkpoint_root=memory://a/b")
    assert outcome.code == 1
    assert "checkpoint_root=memory://a/b is in the memory of one process, and this run has 2 ranks" in outcome.err


def test_another_root_is_advised_where_the_name_of_the_run_changes_none(command: Command) -> None:
    assert command(*SMALL, "train.steps=1", "checkpoint_root=kept").code == 0
    outcome = command(*SMALL, "train.steps=1", "checkpoint_root=kept", "run_name=other")
    assert outcome.code == 1 and "write elsewhere with checkpoint_root=<another>" in outcome.err
