"""A run that cannot start ends with one sentence on stderr and exit code 1, from the command as a user starts it."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt.catalog.verify import verify_checkpoint
from ckpt.errors import ConfigurationError, StorageError
from ckpt.ranks.topology import Topology
from recipes.training.training import train
from tests.e2e.processes import a_second, left_after, mark, marked
from tests.e2e.runs import REPO, SMALL, Command, checkpoint, committed, run, start, summary_of

BACKENDS = ("zarr", "tensorstore", "kimi-engine")
LIMITED = """
import resource, runpy, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # so that a write fails, as it does on a full disk
resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, resource.RLIM_INFINITY))
sys.argv = ["recipes/train.py", *sys.argv[1:]]
runpy.run_module("recipes.train", run_name="__main__", alter_sys=True)
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("device=npu", r"device=npu: .*torch_npu.*"),
        ("ckpt=nope", r"ckpt=nope: there is no such choice; ckpt is one of kimi-engine, tensorstore, zarr"),
        ("train.steps=-1", r"train\.steps=-1: expected at least 1"),
        ("trian.steps=3", r"trian\.steps: there is no such key; did you mean train\.steps\?"),
        ("components.model.sharing_pattern=per_group", r"components\.model\.sharing_pattern=per_group needs process_group_name.*"),
        (
            "output_dir=/proc/x",
            r"the folder of the run cannot be made: .*'/proc/x'; choose another with output_dir=<folder>",
        ),
        (
            "checkpoint_root=/proc/x",
            r"the checkpoint root, /proc/x.*, cannot be written; choose another with checkpoint_root=<folder>: .*'/proc/x'",
        ),
        ("data.path=/proc/x", r"data\.path=/proc/x: there is no such file or folder"),
    ],
    ids=["npu", "no such choice", "bad value", "no such key", "no group", "run folder", "checkpoint root", "text"],
)
def test_a_wrong_choice_is_one_sentence(tmp_path: Path, override: str, sentence: str) -> None:
    command = start(tmp_path / "run", override, ranks=2).ended()
    assert re.fullmatch(sentence, command.refused()), command.err
    assert not list(tmp_path.rglob("checkpoint-*"))


@pytest.mark.full
def test_the_same_command_run_twice_is_refused_in_one_sentence_with_three_ways_out(tmp_path: Path) -> None:
    """README's first command, made short."""
    arguments = ["-m", "recipes.train", "train.steps=2", "save.every=1"]
    first = Command(arguments, (), tmp_path, {}).ended()
    assert first.code == 0 and first.err == ""
    before = summary_of(tmp_path / "outputs" / "dev")
    assert len(committed(tmp_path / "outputs" / "dev")) == 2
    sentence = Command(arguments, (), tmp_path, {}).ended().refused()
    for part in (str(tmp_path / "outputs/dev/checkpoints"), "resume=latest", "run_name=", "overwrite=true"):
        assert part in sentence
    assert summary_of(tmp_path / "outputs" / "dev") == before


def _may_write_little(cfg: dict[str, Any], topology: Topology) -> dict[str, Any] | None:
    """By a process of its own: the limit stays."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # so that a write fails, as it does on a full disk
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, resource.RLIM_INFINITY))
    return train(cfg, topology)


def test_a_file_that_may_not_grow_further_fails_the_save_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="^save of checkpoint-00000001.*File too large"):
        run(tmp_path, "train.steps=1", ranks=2, job=_may_write_little)
    assert not committed(tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_file_that_may_not_grow_further_fails_the_save_in_one_sentence(
    tmp_path: Path, ranks: int, backend: str
) -> None:
    """RLIMIT_FSIZE: the error that a quota gives."""
    run_dir = tmp_path / "run"
    arguments = ["-c", LIMITED, f"output_dir={run_dir}", f"launch.nproc_per_node={ranks}", *SMALL]
    command = Command(arguments, ("train.steps=1", f"ckpt={backend}"), tmp_path, mark(run_dir)).ended()
    sentence = command.refused()
    assert sentence.startswith("save of checkpoint-00000001")
    assert "File too large" in sentence
    assert not committed(run_dir)
    assert left_after(a_second(), lambda: marked(run_dir)) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 20 MB: one checkpoint and a half."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", folder], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"a small tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_full_disk_fails_the_save_in_one_sentence_and_leaves_the_checkpoint_before(
    tmp_path: Path, small_disk: Path, ranks: int, backend: str
) -> None:
    run_dir = small_disk / "run"
    overrides = ["train.steps=4", "save.every=2", "model.size=tiny", f"ckpt={backend}"]
    sentence = start(run_dir, *overrides, ranks=ranks).ended().refused()
    assert sentence.startswith("save of checkpoint-00000004")
    assert "No space left on device" in sentence
    assert committed(run_dir) == [checkpoint(run_dir, 2)]
    assert verify_checkpoint(checkpoint(run_dir, 2)) == []
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["checkpoint-00000002"]
    elsewhere = tmp_path / "elsewhere"
    done = start(elsewhere, *overrides, f"resume={checkpoint(run_dir, 2)}", ranks=ranks).ended()
    assert done.code == 0, done.err
    assert committed(elsewhere) == [checkpoint(elsewhere, 4)]


@pytest.mark.full
def test_a_command_whose_reader_is_gone_ends_quietly(tmp_path: Path) -> None:
    command = f"{sys.executable} -m recipes.train output_dir={tmp_path}/run train.steps=2 save.every=1 | head -n 2"
    env = os.environ | {"PYTHONPATH": str(REPO)}
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["checkpointing", "step"]
    assert "Traceback" not in done.stderr and done.stderr == ""


@pytest.mark.parametrize("betas", ["3", "''", "[0.9]", "[2,3]"])
def test_values_that_an_optimizer_refuses_are_named(tmp_path: Path, betas: str) -> None:
    with pytest.raises(ConfigurationError, match="optimizer: torch.optim.AdamW refuses lr=.* betas=.*: "):
        run(tmp_path / "run", "train.steps=1", f"optimizer.betas={betas}")
