"""What goes wrong in the background: no checkpoint of it, the one before untouched, and the same error on every rank at the next call.

Nothing hangs, nothing is left behind: no folder, no process, no shared memory, no open file.
"""

from __future__ import annotations

import logging
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from ckpt import CheckpointCoordinator, StateComponent
from ckpt.catalog.verify import verify_checkpoint
from ckpt.errors import CheckpointError, RankAbsentError, StorageError
from ckpt.ranks.topology import Topology
from ckpt.saving.background import background
from ckpt.saving.prepared_save import SaveReport
from tests.support.async_runs import (
    PATIENCE_S,
    SHAPE,
    Left,
    Troubled,
    committed,
    error_of,
    has_come,
    let_go,
    names_in,
    settings,
    until,
)
from tests.support.covering import and_in_full, rows, sampled
from tests.support.ranks import Dead, run_ranks, run_threads
from tests.support.states import BACKENDS, Held, coordinator, global_index, same_bits

AGREE_S = 2.0


def state(number: int) -> dict[str, torch.Tensor]:
    return {f"w{n}": global_index(SHAPE) + 1000 * number + n for n in range(6)}


class Numbered:
    """State that is that of the save it is asked for."""

    def __init__(self) -> None:
        self.held = Held(state(0))

    def become(self, number: int) -> None:
        for key, tensor in state(number).items():
            self.held.state[key].copy_(tensor)

    def coordinator(self, topology: Topology, root: Path, **options: Any) -> CheckpointCoordinator:
        return coordinator(topology, root, [StateComponent("model", self.held, "replicated")], **options)


def require_sound(root: Path, names: list[str]) -> None:
    """These are committed and no others; each is whole, and holds its own state."""
    assert committed(root) == names
    for name in names:
        assert verify_checkpoint(root / name) == []
        held = Held({key: torch.zeros_like(one) for key, one in state(0).items()})
        alone = coordinator(Topology.alone(), root, [StateComponent("model", held, "replicated")])
        alone.load_checkpoint(root / name)
        wanted = state(int(name.removeprefix("checkpoint-")))
        assert held.loaded is not None and all(same_bits(held.loaded[key], one) for key, one in wanted.items()), name


# A rank's write error


CALLS = ["save", "load", "maybe_finalize", "wait", "close"]
ERRORS = [("full", "zarr", "save", 1), ("broken", "safetensors", "load", 1), ("full", "zarr", "maybe_finalize", 0)]
ERRORS_IN_FULL = rows(
    {"trouble": ["full", "broken", "bug"], "store": ["zarr", "safetensors"], "call": CALLS, "rank": [0, 1]}, 2
)


def _fail(topology: Topology, root: Path, notes: Path, trouble: str, store: str, call: str, rank: int) -> list[Any]:
    """Checkpoint 1 is there, 2 fails, the call says so, 3 is well."""
    left = Left()
    numbered = Numbered()
    backend = Troubled(trouble, notes, checkpoint_id="2", rank=rank, at=2, backend=store)
    made = numbered.coordinator(topology, root, backend=backend, saves=settings())
    said = []
    for number in (1, 2):
        numbered.become(number)
        assert made.save_checkpoint(checkpoint_id=f"{number}") == str(root / f"checkpoint-{number}")
        if number == 1:
            made.wait()
    numbered.become(3)
    act = {
        "save": lambda: made.save_checkpoint(checkpoint_id="3"),
        "load": made.load_checkpoint,
        "maybe_finalize": lambda: made.maybe_finalize(blocking=True),
        "wait": made.wait,
        "close": made.close,
    }
    said.append(error_of(act[call]))
    with topology.phase("all have raised"):
        pass
    assert committed(root) == ["checkpoint-1"]
    until(lambda: not any(name.startswith(".") for name in names_in(root)), "a thread to delete what is left of the save")
    if call != "close":
        assert made.maybe_finalize(blocking=True) == [], "it is raised once"
        assert made.save_checkpoint(checkpoint_id="3") is not None
        made.close()
        left.require_nothing()
    return said


@and_in_full(("trouble", "store", "call", "rank"), ERRORS, ERRORS_IN_FULL)
def test_a_write_error_in_the_background_is_raised_on_every_rank_by_the_next_call(
    tmp_path: Path, trouble: str, store: str, call: str, rank: int
) -> None:
    root, notes = tmp_path / "root", tmp_path / "notes"
    notes.mkdir()
    ranks = run_ranks(2, _fail, root, notes, trouble, store, call, rank, agree_s=10.0)
    assert all(said == ranks[0] for said in ranks), ranks
    ((kind, sentence, at, phase),) = ranks[0]
    assert (at, phase) == (rank, "write")
    assert f"save of checkpoint-2 failed in phase write on rank {rank}: " in sentence
    cause = {
        "full": "No space left on device: 'model/w",
        "broken": "Input/output error: 'model/w",
        "bug": "a bug of the user",
    }
    assert cause[trouble] in sentence
    assert kind == (CheckpointError if trouble == "bug" else StorageError).__name__
    require_sound(root, ["checkpoint-1"] if call == "close" else ["checkpoint-1", "checkpoint-3"])


def _exceed_the_limit(topology: Topology, root: Path) -> tuple[Any, ...]:
    """A file of one rank may not become as large as a chunk: what a full disk or a quota does, by the kernel."""
    numbered = Numbered()
    made = numbered.coordinator(topology, root, saves=settings())
    numbered.become(1)
    made.save_checkpoint(checkpoint_id="1")
    made.wait()
    if topology.rank == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    numbered.become(2)
    made.save_checkpoint(checkpoint_id="2")
    said = error_of(made.wait)
    if topology.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    numbered.become(3)
    made.save_checkpoint(checkpoint_id="3")
    made.close()
    return said


def test_a_file_that_the_kernel_refuses_to_let_grow_fails_the_save_on_all_ranks(tmp_path: Path) -> None:
    first, second = run_ranks(2, _exceed_the_limit, tmp_path)
    assert first == second
    assert first[2] == 1 and "File too large" in first[1] and "save of checkpoint-2" in first[1]
    require_sound(tmp_path, ["checkpoint-1", "checkpoint-3"])


def _warn(topology: Topology, root: Path, notes: Path) -> list[str]:
    told: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ckpt").addHandler(handler)
    numbered = Numbered()
    backend = Troubled("full", notes, checkpoint_id="2", rank=1)
    with numbered.coordinator(topology, root, backend=backend, saves=settings(on_async_error="warn")) as made:
        for number in (1, 2, 3):
            numbered.become(number)
            made.save_checkpoint(checkpoint_id=f"{number}")
            reports = made.maybe_finalize(blocking=True)
            assert [report.checkpoint_id for report in reports] == ([] if number == 2 else [f"{number}"])
    return told


def test_on_async_error_warn_tells_of_it_and_goes_on(tmp_path: Path) -> None:
    root, notes = tmp_path / "root", tmp_path / "notes"
    notes.mkdir()
    told = run_ranks(2, _warn, root, notes, agree_s=10.0)
    (sentence,) = [one for one in told[0] if "checkpoint-2" in one]
    assert (
        "save of checkpoint-2 failed in phase write on rank 1: " in sentence and "No space left on device" in sentence
    )
    require_sound(root, ["checkpoint-1", "checkpoint-3"])


def _keep_errors(topology: Topology, root: Path, notes: Path) -> list[str]:
    """Fail three times, and keep each error as long as the run lasts, with all that it refers to."""
    numbered, errors = Numbered(), []
    with numbered.coordinator(
        topology, root, backend=Troubled("full", notes, checkpoint_id="1", rank=1, at=2), saves=settings()
    ) as made:
        for _ in range(3):
            made.save_checkpoint(checkpoint_id="1")
            try:
                made.wait()
            except StorageError as error:
                errors.append(error)
        numbered.become(2)
        made.save_checkpoint(checkpoint_id="2")
    return [str(error) for error in errors]


def test_an_error_that_is_kept_keeps_no_memory(tmp_path: Path) -> None:
    root, notes = tmp_path / "root", tmp_path / "notes"
    notes.mkdir()
    first, second = run_ranks(2, _keep_errors, root, notes, agree_s=10.0, timeout_s=45.0)
    assert first == second and len(first) == 3
    require_sound(root, ["checkpoint-2"])


def _have_no_memory(topology: Topology, root: Path) -> tuple[Any, ...]:
    refused: list[int] = []
    before = background.staging_memory

    def none_at_first(num_bytes: int) -> torch.Tensor:
        if refused:
            return before(num_bytes)
        refused.append(num_bytes)
        raise MemoryError(f"no room for {num_bytes} bytes")

    numbered = Numbered()
    numbered.become(1)
    if topology.rank == 1:
        background.staging_memory = none_at_first
    made = numbered.coordinator(topology, root, saves=settings())
    background.staging_memory = before
    made.save_checkpoint(checkpoint_id="1")
    said = error_of(made.wait)
    numbered.become(2)
    made.save_checkpoint(checkpoint_id="2")
    made.close()
    return said


def test_a_rank_without_memory_for_the_copy_fails_the_save_on_all_ranks_and_not_the_run(tmp_path: Path) -> None:
    first, second = run_ranks(2, _have_no_memory, tmp_path, agree_s=10.0)
    assert first == second
    assert first[2] == 1 and "no room for" in first[1] and "save of checkpoint-1" in first[1]
    require_sound(tmp_path, ["checkpoint-2"])


# A rank that is killed


def _die_in_a_save(
    topology: Topology, root: Path, notes: Path, store: str, victim: int, call: str
) -> tuple[Any, ...]:
    numbered = Numbered()
    backend = Troubled("waits", notes, checkpoint_id="2", rank=victim, backend=store)
    made = numbered.coordinator(topology, root, backend=backend, saves=settings())
    numbered.become(1)
    made.save_checkpoint(checkpoint_id="1")
    made.wait()
    numbered.become(2)
    made.save_checkpoint(checkpoint_id="2")
    if topology.rank == victim:
        until(lambda: has_come(notes, "2", victim))
        os.kill(os.getpid(), signal.SIGKILL)
    act = {"wait": made.wait, "save": lambda: made.save_checkpoint(checkpoint_id="3"), "finalize": made.maybe_finalize}[
        call
    ]
    if call == "finalize":
        until(lambda: not Path(f"/proc/{_pid_of(notes, victim)}").exists())
        time.sleep(2 * AGREE_S)
    began = time.monotonic()
    said = error_of(act)
    assert time.monotonic() - began < AGREE_S + 15
    let_go(notes)
    return said[:3]


def _pid_of(notes: Path, victim: int) -> int:
    until(lambda: has_come(notes, "2", victim))
    return int((notes / f"came-2-{victim}").read_text())


KILLS = [
    ("zarr", 1, "wait"),
    ("safetensors", 0, "save"),
    ("ocdbt", 0, "finalize"),
]
KILLS_IN_FULL = [
    ("safetensors", 1, "save"),
    ("file", 0, "wait"),
    *rows({"store": BACKENDS, "victim": [0, 1], "call": ["wait", "save", "finalize"]}, 2),
]


@and_in_full(("store", "victim", "call"), KILLS, KILLS_IN_FULL)
def test_a_rank_killed_while_it_saves_in_the_background_is_named_at_the_others_next_call(
    tmp_path: Path, store: str, victim: int, call: str
) -> None:
    root, notes = tmp_path / "root", tmp_path / "notes"
    notes.mkdir()
    outcomes = run_ranks(3, _die_in_a_save, root, notes, store, victim, call, agree_s=AGREE_S, expect_dead={victim})
    said = [one for one in outcomes if not isinstance(one, Dead)]
    assert len(said) == 2 and all(one == said[0] for one in said)
    assert said[0][0] == RankAbsentError.__name__ and said[0][2] == victim
    assert f"rank {victim}" in said[0][1]
    require_sound(root, ["checkpoint-1"])
    run_ranks(2, _save_again, root)
    require_sound(root, ["checkpoint-1", "checkpoint-4"])
    assert names_in(root) == ["checkpoint-1", "checkpoint-4"], "the next save clears away what the killed one left"


def _save_again(topology: Topology, root: Path) -> None:
    numbered = Numbered()
    numbered.become(4)
    with numbered.coordinator(topology, root, saves=settings()) as made:
        made.save_checkpoint(checkpoint_id="4")


# A save that is still running when the next one begins


def _while_busy(topology: Topology, root: Path, notes: Path, when_busy: str) -> dict[str, Any]:
    numbered = Numbered()
    backend = Troubled("waits", notes, checkpoint_id="1", rank=1)
    made = numbered.coordinator(topology, root, backend=backend, saves=settings(when_busy=when_busy))
    with made:
        numbered.become(1)
        first = made.save_checkpoint(checkpoint_id="1")
        until(lambda: has_come(notes, "1", 1))
        numbered.become(2)
        if when_busy == "wait":
            threading.Timer(0.5, let_go, [notes]).start()
        began = time.monotonic()
        second = made.save_checkpoint(checkpoint_id="2")
        took_s = time.monotonic() - began
        in_between = committed(root)
        num_pending = made.num_pending
        numbered.become(3)
        with topology.phase("all are here"):
            pass
        let_go(notes)
        reports = made.maybe_finalize(blocking=True)
        third = made.save_checkpoint(checkpoint_id="3")
        made.wait()
        assert made.num_pending == 0
        last = made.last_save
    return {
        "paths": [path and Path(path).name for path in (first, second, third)],
        "committed when the second had been asked for": in_between,
        "pending": num_pending,
        "reported": [report.checkpoint_id for report in reports],
        "last": last and last.checkpoint_id,
        "took": took_s,
    }


@sampled("when_busy", ["wait", "skip", "queue"], 3)
def test_a_save_that_begins_while_one_is_running_waits_is_skipped_or_queues(tmp_path: Path, when_busy: str) -> None:
    root, notes = tmp_path / "root", tmp_path / "notes"
    notes.mkdir()
    ranks = run_ranks(2, _while_busy, root, notes, when_busy, agree_s=20.0)
    took = [one.pop("took") for one in ranks]
    assert ranks[0] == ranks[1], "alike on all ranks"
    names = [f"checkpoint-{number}" for number in (1, 2, 3)]
    match when_busy:
        case "wait":
            assert min(took) > 0.2
            assert ranks[0]["committed when the second had been asked for"][:1] == names[:1]
            assert ranks[0]["paths"] == names
            require_sound(root, names)
        case "skip":
            assert ranks[0]["paths"] == [names[0], None, names[2]]
            assert (ranks[0]["pending"], ranks[0]["reported"]) == (1, ["1"])
            require_sound(root, [names[0], names[2]])
        case "queue":
            assert ranks[0]["committed when the second had been asked for"] == []
            assert (ranks[0]["pending"], ranks[0]["reported"]) == (2, ["1", "2"])
            require_sound(root, names)
    assert ranks[0]["last"] == "3"


def _skip_at_random(topology: Topology, root: Path, saves: int) -> list[str | None]:
    """Ranks come at different moments, some before and some after the save before is over on them."""
    random, numbered = Random(topology.rank), Numbered()
    taken = []
    with numbered.coordinator(topology, root, saves=settings(when_busy="skip"), keep_last=3) as made:
        for number in range(1, saves + 1):
            numbered.become(number)
            taken.append(made.save_checkpoint(checkpoint_id=f"{number}"))
            time.sleep(random.uniform(0, 0.05))
    return taken


def test_ranks_agree_on_what_is_skipped_whenever_each_of_them_comes(tmp_path: Path) -> None:
    first, *others = run_ranks(3, _skip_at_random, tmp_path, 20, agree_s=20.0)
    assert all(one == first for one in others)
    taken = [Path(path).name for path in first if path is not None]
    assert first[0] is not None and None in first
    require_sound(tmp_path, taken[-3:])


def test_a_failed_save_in_a_queue_does_not_take_the_next_one_with_it(tmp_path: Path) -> None:
    root, notes = tmp_path / "root", tmp_path / "notes"
    notes.mkdir()

    def save(topology: Topology) -> Any:
        numbered = Numbered()
        backend = Troubled("full", notes, checkpoint_id="1", rank=1, at=2)
        with numbered.coordinator(topology, root, backend=backend, saves=settings(when_busy="queue")) as made:
            numbered.become(1)
            made.save_checkpoint(checkpoint_id="1")
            failed = None
            numbered.become(2)
            try:
                made.save_checkpoint(checkpoint_id="2")
            except StorageError as error:
                failed = str(error)
                made.save_checkpoint(checkpoint_id="2")
            if failed is None:
                failed = error_of(made.wait)[1]
            made.wait()
        return failed

    first, second = run_threads(2, save, agree_s=20.0)
    assert first == second and "save of checkpoint-1" in first and "No space left" in first
    require_sound(root, ["checkpoint-2"])


def _save_by_two(topology: Topology, folder: Path) -> list[str]:
    """The first thread in the background of rank 1 is slower than the second; on the other ranks it is not."""
    in_background, threads = background.in_background, []

    def slow(*args: Any, **named: Any) -> None:
        threads.append(threading.current_thread())
        if topology.rank == 1 and len(threads) == 1:
            time.sleep(1.0)
        in_background(*args, **named)

    background.in_background = slow
    numbered = [Numbered(), Numbered()]
    made = [one.coordinator(topology, folder / f"{n}", saves=settings()) for n, one in enumerate(numbered)]
    for number in (1, 2):
        for n in (0, 1):
            numbered[n].become(10 * n + number)
            made[n].save_checkpoint(checkpoint_id=f"{10 * n + number}")
    for one in made:
        one.close()
    return [name for n in (0, 1) for name in committed(folder / f"{n}")]


def test_two_coordinators_of_the_same_ranks_do_not_mix_their_saves(tmp_path: Path) -> None:
    found = run_ranks(2, _save_by_two, tmp_path, agree_s=10.0)
    assert found == [["checkpoint-1", "checkpoint-2", "checkpoint-11", "checkpoint-12"]] * 2
    require_sound(tmp_path / "0", ["checkpoint-1", "checkpoint-2"])
    require_sound(tmp_path / "1", ["checkpoint-11", "checkpoint-12"])


# Finalizing


def _look_now_and_then(
    topology: Topology, root: Path, notes: Path
) -> tuple[list[list[str]], SaveReport | None, str | None]:
    numbered = Numbered()
    backend = Troubled("waits", notes, rank=1)
    with numbered.coordinator(topology, root, backend=backend, saves=settings()) as made:
        before = made.maybe_finalize()
        numbered.become(1)
        path = made.save_checkpoint(checkpoint_id="1")
        made.wait_for_snapshot()
        looks = [before, made.maybe_finalize(), made.maybe_finalize()]
        assert made.num_pending == 1
        with topology.phase("all have looked"):
            pass
        let_go(notes)
        while not (found := made.maybe_finalize()):
            time.sleep(0.005)
        looks.append(found)
        assert made.num_pending == 0
        assert made.maybe_finalize(blocking=True) == []
        made.wait()
        return [[one.checkpoint_id for one in look] for look in looks], made.last_save, path


def test_a_look_finds_a_save_once_it_is_committed_on_all_ranks_at_once(tmp_path: Path) -> None:
    root, notes = tmp_path / "root", tmp_path / "notes"
    notes.mkdir()
    for looks, report, path in run_ranks(2, _look_now_and_then, root, notes, agree_s=20.0):
        assert looks == [[], [], [], ["1"]]
        assert report is not None and report.path == path
        files = [file for file in Path(report.path).rglob("*") if file.is_file()]
        assert report.bytes == report.written_bytes == sum(file.stat().st_size for file in files)
        assert 0 < report.blocked_s < report.save_s
    require_sound(root, ["checkpoint-1"])


def test_a_save_is_durable_without_another_call(tmp_path: Path) -> None:
    """S1.21 asks for collective finalizers on the main thread; the commit does not wait for them."""

    def save(topology: Topology) -> None:
        numbered = Numbered()
        numbered.become(1)
        with numbered.coordinator(topology, tmp_path, saves=settings()) as made:
            made.save_checkpoint(checkpoint_id="1")
            until(lambda: committed(tmp_path) == ["checkpoint-1"])
            assert made.num_pending == 1

    run_threads(2, save, agree_s=10.0)
    require_sound(tmp_path, ["checkpoint-1"])


def _fail_in_training(topology: Topology, root: Path, notes: Path) -> str:
    left = Left()
    numbered = Numbered()
    backend = Troubled("dawdles", notes, checkpoint_id=None)
    with (
        pytest.raises(ZeroDivisionError, match="a bug in training") as caught,
        numbered.coordinator(topology, root, backend=backend, saves=settings()) as made,
    ):
        numbered.become(1)
        made.save_checkpoint(checkpoint_id="1")
        raise ZeroDivisionError("a bug in training")
    left.require_nothing()
    return str(caught.value)


def test_an_error_of_the_training_loop_is_not_hidden_and_the_save_before_it_ends(tmp_path: Path) -> None:
    root, notes = tmp_path / "root", tmp_path / "notes"
    notes.mkdir()
    assert run_ranks(2, _fail_in_training, root, notes) == ["a bug in training"] * 2
    require_sound(root, ["checkpoint-1"])


def _fail_in_training_and_in_the_save(topology: Topology, root: Path, notes: Path) -> str:
    numbered = Numbered()
    backend = Troubled("full", notes, rank=1)
    with (
        pytest.raises(ZeroDivisionError, match="a bug in training") as caught,
        numbered.coordinator(topology, root, backend=backend, saves=settings()) as made,
    ):
        made.save_checkpoint(checkpoint_id="1")
        raise ZeroDivisionError("a bug in training")
    return str(caught.value)


def test_it_is_not_hidden_by_an_error_of_that_save_either(tmp_path: Path) -> None:
    root, notes = tmp_path / "root", tmp_path / "notes"
    notes.mkdir()
    assert run_ranks(2, _fail_in_training_and_in_the_save, root, notes) == ["a bug in training"] * 2
    assert committed(root) == []


NEVER_CLOSED = """
import sys, torch
from pathlib import Path
from ckpt import StateComponent
from ckpt.ranks.topology import Topology
from tests.support.async_runs import SHAPE, Troubled, settings
from tests.support.states import Held, coordinator, global_index

if __name__ == "__main__":
    root, notes = Path(sys.argv[1]), Path(sys.argv[2])
    held = Held({f"w{n}": global_index(SHAPE) + 1000 + n for n in range(6)})
    made = coordinator(Topology.alone(), root, [StateComponent("model", held, "replicated")],
                       backend=Troubled("dawdles", notes, checkpoint_id=None), saves=settings())
    made.save_checkpoint(checkpoint_id="1")
    for tensor in held.state.values():
        tensor.zero_()
    print("the end", flush=True)
"""


def test_a_program_that_never_closes_its_coordinator_ends_with_its_last_save_durable(tmp_path: Path) -> None:
    root, notes = tmp_path / "root", tmp_path / "notes"
    notes.mkdir()
    program = tmp_path / "program.py"
    program.write_text(NEVER_CLOSED)
    before = Left()
    done = subprocess.run(
        [sys.executable, program, root, notes],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "the end\n", "")
    require_sound(root, ["checkpoint-1"])
    assert names_in(root) == ["checkpoint-1"]
    before.require_nothing()


# Nothing is left


def _save_many(topology: Topology, root: Path, overlap: bool) -> int:
    """Two coordinators, one after the other, leave nothing; and six saves of one take no more than three do."""
    numbered = Numbered()
    left = Left()
    threads = threading.active_count()
    for _ in range(2):
        saves = settings(overlap=overlap)
        # The second one is another run, which would keep what it saves over.
        with numbered.coordinator(topology, root, saves=saves, keep_last=2, overwrite=True) as made:
            for number in range(1, 4):
                numbered.become(number)
                made.save_checkpoint(checkpoint_id=f"{number}")
                made.wait()
            then = Left()
            for number in range(4, 7):
                numbered.become(number)
                made.save_checkpoint(checkpoint_id=f"{number}")
                made.wait()
            then.require_nothing()
        left.require_nothing()
        assert made._background is not None and made._background._arena.num_bytes == 0
    until(lambda: threading.active_count() <= threads, f"the end of {threading.enumerate()}")
    with topology.phase("all have closed"):  # the lead's coordinator claims the root until then
        pass
    return len(names_in(root))


@pytest.mark.parametrize("overlap", [True, pytest.param(False, marks=pytest.mark.full)])
def test_saves_leave_no_file_open_no_thread_no_process_and_no_memory(tmp_path: Path, overlap: bool) -> None:
    assert run_ranks(2, _save_many, tmp_path, overlap) == [2, 2]
    require_sound(tmp_path, ["checkpoint-5", "checkpoint-6"])
