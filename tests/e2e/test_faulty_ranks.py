"""One rank fails in a save: the command says which and where, once, commits nothing, and the run can go on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ckpt.catalog.verify import verify_checkpoint
from ckpt.errors import RankAbsentError
from tests.e2e.processes import a_second, left_after, mark, marked
from tests.e2e.runs import Command, checkpoint, committed, root_of, run, start

IN_BACKEND = ["ckpt._target_=tests.e2e.misbehaving.FaultyZarr", "+ckpt.fault={}"]
IN_COMPONENT = ["+components.counter={{_target_: tests.e2e.misbehaving.Counter, fault: {}, sharing_pattern: per_rank}}"]
STRANGERS = re.compile(
    r"gloo|ChildFailed|elastic|Traceback|Connection reset|c10d|TCPStore|NCCL|Error executing job", re.I
)


IN_WRITE = "in phase write of save of checkpoint-00000004"
IN_COLLECT = "in phase collect of save of checkpoint-00000004"
KILLED = rf"rank 1 was killed by SIGKILL {IN_WRITE}; the kernel does that when memory runs out"
FULL = r"failed in phase {} on rank 1: {}No space left on device: 'model/wte\.weight/c/0/0'"
NEED = r" \([\d,]+ bytes are needed for the part of rank 1\)"


def test_a_rank_killed_in_a_save_is_named_and_the_run_goes_on(tmp_path: Path) -> None:
    overrides = [override.format("killed") for override in IN_BACKEND]
    with pytest.raises(RankAbsentError) as caught:
        run(tmp_path / "run", "train.steps=6", "save.every=2", "agree.timeout_s=3", *overrides, ranks=3)
    assert re.fullmatch(KILLED, str(caught.value))
    assert (caught.value.rank, caught.value.phase) == (1, "write")
    _is_as_after_step_2(tmp_path / "run")


@pytest.mark.full
@pytest.mark.parametrize(
    ("where", "fault", "sentence"),
    [
        (IN_BACKEND, "killed", KILLED),
        (IN_BACKEND, "ended", rf"rank 1 ended with exit code 7 {IN_WRITE}"),
        (IN_BACKEND, "full_disk", "save of checkpoint-00000004 " + FULL.format("write", "") + NEED),
        (IN_BACKEND, "hung", rf"rank 1 \(pid \d+ on .*\) made no progress for 3 s {IN_WRITE}"),
        (IN_COMPONENT, "killed", KILLED.replace(IN_WRITE, IN_COLLECT)),
        (IN_COMPONENT, "full_disk", "save of checkpoint-00000004 " + FULL.format("collect", "counter: ")),
        (IN_COMPONENT, "hung", rf"rank 1 \(pid \d+ on .*\) made no progress for 3 s {IN_COLLECT}"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isidentifier() else "",
)
def test_the_command_names_the_rank_and_the_phase_once(
    tmp_path: Path, where: list[str], fault: str, sentence: str
) -> None:
    command = _fail(tmp_path / "run", where, fault)
    assert command.err.count("\n") == 1, command.err
    assert re.fullmatch(sentence, command.err.strip()), command.err
    assert not STRANGERS.search(command.err + command.out), command.err + command.out
    _is_as_after_step_2(tmp_path / "run")


@pytest.mark.full
@pytest.mark.parametrize(
    ("where", "place"),
    [(IN_COMPONENT, "phase collect on rank 1: counter"), (IN_BACKEND, "phase write on rank 1")],
    ids=["component", "backend"],
)
def test_a_bug_keeps_its_traceback_once_above_the_sentence(tmp_path: Path, where: list[str], place: str) -> None:
    command = _fail(tmp_path / "run", where, "bug")
    assert command.err.count("Traceback") == 1
    assert command.err.count('raise KeyError("a bug of the user")') == 1
    last = command.err.splitlines()[-1]
    assert last == f"save of checkpoint-00000004 failed in {place}: KeyError: 'a bug of the user'"
    assert command.err.count(last) == 1
    assert not re.search("gloo|ChildFailed|Connection reset", command.err, re.I)
    _is_as_after_step_2(tmp_path / "run")


def _fail(run_dir: Path, where: list[str], fault: str) -> Command:
    """Three ranks, of which one fails in the second save; nothing of them is left."""
    overrides = [override.format(fault) for override in where]
    command = start(
        run_dir, "train.steps=6", "save.every=2", "agree.timeout_s=3", *overrides, ranks=3, environment=mark(run_dir)
    ).ended()
    assert left_after(a_second(), lambda: marked(run_dir)) == []
    assert command.code == 1, command.out + command.err
    return command


def _is_as_after_step_2(run_dir: Path) -> None:
    """Only the first save was committed, it is whole, and a run without the fault goes on from it."""
    assert committed(run_dir) == [checkpoint(run_dir, 2)]
    assert verify_checkpoint(checkpoint(run_dir, 2)) == []
    assert not (run_dir / "summary.json").exists()
    found = run(run_dir, "resume=latest", "train.steps=4", "load.strict=false", ranks=3)
    assert found["first_step"] == 3
    assert sorted(path.name for path in root_of(run_dir).iterdir()) == ["checkpoint-00000002", "checkpoint-00000004"]
