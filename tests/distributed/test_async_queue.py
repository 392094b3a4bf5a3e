"""Background requests of several ranks: finalized on all of them, in one order, or failed on all of them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ckpt.errors import CheckpointError, RankAbsentError, StorageError
from ckpt.ranks.default_topology import current_topology, use_topology
from ckpt.ranks.topology import Topology
from ckpt.saving.background.async_utils import AsyncCallsQueue, AsyncRequest
from tests.support.ranks import Dead, run_ranks

SAVE = "save of checkpoint-20"


def _when(path: Path) -> None:
    """Wait until a file is there."""
    while not path.exists():
        time.sleep(0.005)


def _no_space() -> None:
    raise OSError(28, "No space left on device", "w")


def _error_of(call: Callable[[], object]) -> tuple[Any, ...]:
    """What a call raised: the same on every rank."""
    with pytest.raises(CheckpointError) as caught:
        call()
    return type(caught.value), str(caught.value), caught.value.rank, caught.value.phase


def _the_one(outcomes: list[Any]) -> Any:
    """What all ranks have in common, which is everything."""
    assert all(outcome == outcomes[0] for outcome in outcomes), outcomes
    return outcomes[0]


# All goes well


def _with_a_slow_rank(_: Topology, folder: Path) -> list[Any]:
    """Rank 1 writes when it may, the others at once; each finalizer notes who had written by then."""
    rank, queue = dist.get_rank(), AsyncCallsQueue()
    noted: list[list[str]] = []

    def write(number: int) -> None:
        if rank == 1:
            _when(folder / f"go-{number}")
        (folder / f"{number}-from-{rank}").touch()

    def note(number: int) -> None:
        noted.append(sorted(path.name for path in folder.glob(f"{number}-from-*")))

    for number in range(2):
        queue.schedule_async_request(AsyncRequest(write, (number,), [partial(note, number)]))
    asked = [queue.maybe_finalize_async_calls() for _ in range(3)]
    for number in range(2):
        if rank == 0:
            (folder / f"go-{number}").touch()
        while not (finalized := queue.maybe_finalize_async_calls()):
            time.sleep(0.005)
        asked.append(finalized)
    return [asked, noted, queue.get_num_unfinalized_calls()]


def test_nothing_is_finalized_before_the_slowest_rank_has_written_and_then_it_is_on_all(tmp_path: Path) -> None:
    """S1.21: collective, in order; and it agrees by itself where torch's default process group is all there is."""
    asked, noted, unfinalized = _the_one(run_ranks(3, _with_a_slow_rank, tmp_path, process_group=True))
    assert asked == [[], [], [], [0], [1]]
    assert noted == [[f"{number}-from-{rank}" for rank in range(3)] for number in range(2)]
    assert unfinalized == 0


def _wait_long(topology: Topology, seconds: float) -> list[int]:
    with use_topology(topology):
        queue = AsyncCallsQueue()
        queue.schedule_async_request(AsyncRequest(time.sleep, (seconds * topology.rank,), []))
        return queue.maybe_finalize_async_calls(blocking=True)


@pytest.mark.full
def test_a_request_that_takes_longer_than_ranks_are_waited_for_is_waited_for() -> None:
    """S1.21: a rank that waits for its own thread does not count as absent."""
    assert run_ranks(2, _wait_long, 4.0, agree_s=1.5) == [[0], [0]]


# A rank fails


def _one_fails(topology: Topology) -> list[Any]:
    with use_topology(topology):
        queue, log = AsyncCallsQueue(), []
        parts: list[dict[str, Any]] = [{}, {"async_fn": _no_space}, {"preload_fn": _no_space}, {}]
        for number, part in enumerate(parts):
            given = {"async_fn": None, **(part if topology.rank == 1 else {})}
            queue.schedule_async_request(
                AsyncRequest(**given, async_fn_args=(), finalize_fns=[partial(log.append, number)], what=SAVE)
            )
        first = _error_of(lambda: queue.maybe_finalize_async_calls(blocking=True))
        second = _error_of(lambda: queue.maybe_finalize_async_calls(blocking=True))
        return [first, second, queue.maybe_finalize_async_calls(blocking=True), log, queue.get_num_unfinalized_calls()]


def test_what_failed_on_one_rank_is_raised_on_all_and_finalized_on_none() -> None:
    """S1.21: rank and cause are named, and the requests behind it stay finalizable."""
    first, second, finalized, log, unfinalized = _the_one(run_ranks(3, _one_fails))
    failed = f"{SAVE} (async call {{}}) failed in phase run on rank 1: No space left on device: 'w'"
    assert first == (StorageError, failed.format(1) + "; async call 0 is finalized all the same", 1, "run")
    assert second == (StorageError, failed.format(2), 1, "run")
    assert (finalized, log, unfinalized) == ([3], [0, 3], 0)


def _fail_at_once(topology: Topology) -> list[Any]:
    with use_topology(topology):
        log: list[str] = []
        note = partial(log.append, "finalized")
        fails = topology.rank == 1
        function = AsyncRequest(_no_space if fails else None, (), [note], what=SAVE)
        finalizer = AsyncRequest(None, (), [note, *([_no_space] if fails else [])], what=SAVE)
        return [_error_of(function.execute_sync), list(log), _error_of(finalizer.execute_sync), log]


def test_a_request_that_is_executed_at_once_fails_on_all_ranks_alike() -> None:
    """S1.19, S1.20: after a function that failed on one rank no rank finalizes; a finalizer that failed is told as well."""
    function, noted, finalizer, log = _the_one(run_ranks(3, _fail_at_once))
    assert function == (StorageError, f"{SAVE} failed in phase run on rank 1: No space left on device: 'w'", 1, "run")
    assert noted == []
    message = f"{SAVE} failed before phase finalize on rank 1: No space left on device: 'w'"
    assert finalizer == (StorageError, message, 1, "finalize")
    assert log == ["finalized"]


def _die(topology: Topology, folder: Path) -> Any:
    with use_topology(topology):
        queue = AsyncCallsQueue()
        write = _when if topology.rank == 1 else None
        queue.schedule_async_request(AsyncRequest(write, (folder / "never",), [(folder / "done").touch]))
        assert queue.maybe_finalize_async_calls() == []
        if topology.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return _error_of(queue.close)


def test_a_rank_that_dies_while_it_writes_is_named_and_nothing_is_finalized(tmp_path: Path) -> None:
    """S1.21: the others neither wait for ever nor finalize without it."""
    outcomes = run_ranks(3, _die, tmp_path, expect_dead={1})
    assert outcomes.pop(1) == Dead(-signal.SIGKILL)
    kind, message, rank, _ = _the_one(outcomes)
    assert (kind, rank) == (RankAbsentError, 1)
    assert message.startswith("finalization of async calls failed in phase wait for all: rank 1 (pid ")
    assert not (tmp_path / "done").exists()


def _interrupt(topology: Topology, folder: Path) -> list[Any]:
    with use_topology(topology):
        queue, log = AsyncCallsQueue(), []
        write = _when if topology.rank == 1 else None
        queue.schedule_async_request(AsyncRequest(write, (folder / "go",), [partial(log.append, "finalized")]))
        before = signal.signal(signal.SIGALRM, signal.default_int_handler)
        try:
            if topology.rank == 1:
                signal.setitimer(signal.ITIMER_REAL, 0.4)
            queue.maybe_finalize_async_calls(blocking=True)
        except (KeyboardInterrupt, CheckpointError) as error:
            said = repr(error) if isinstance(error, KeyboardInterrupt) else str(error)
        finally:
            signal.signal(signal.SIGALRM, before)
        (folder / "go").touch()
        queue.close()
        return [said, log]


def test_an_interrupt_of_a_rank_that_waits_is_told_to_the_others_and_the_requests_remain(tmp_path: Path) -> None:
    """S1.21: who goes on all the same, can finalize them on all ranks."""
    (told, log_0), (interrupted, log_1) = run_ranks(2, _interrupt, tmp_path)
    assert told == "finalization of async calls failed in phase wait for all on rank 1: KeyboardInterrupt"
    assert interrupted.startswith("KeyboardInterrupt(")
    assert log_0 == log_1 == ["finalized"]


# The ranks make different calls


def _schedule_less(topology: Topology, blocking: bool) -> tuple[Any, ...]:
    with use_topology(topology):
        queue = AsyncCallsQueue()
        for _ in range(2 if topology.rank != 1 else 1):
            queue.schedule_async_request(AsyncRequest(None, (), [_no_space]))
        call = queue.close if blocking else queue.maybe_finalize_async_calls
        return _error_of(call)


@pytest.mark.parametrize("blocking", [False, True])
def test_ranks_that_scheduled_different_numbers_of_requests_finalize_none_and_say_so(blocking: bool) -> None:
    """S1.21: checks that all ranks finalize the same."""
    kind, message, rank, _ = _the_one(run_ranks(3, _schedule_less, blocking))
    assert (kind, rank) == (CheckpointError, None)
    assert message == (
        "finalization of async calls: rank 0 has scheduled 2 async calls and finalized 0, rank 1 has scheduled 1 async calls "
        "and finalized 0; every rank must schedule and finalize the same requests in the same order"
    )


def _schedule_nothing(topology: Topology) -> tuple[Any, ...]:
    with use_topology(topology):
        queue = AsyncCallsQueue()
        if topology.rank != 1:
            queue.schedule_async_request(AsyncRequest(None, (), [_no_space]))

        def go_on() -> None:
            queue.maybe_finalize_async_calls()
            with current_topology().operation("save of checkpoint-30"), current_topology().phase("collect"):
                pass

        return _error_of(go_on)


def test_a_rank_that_scheduled_nothing_disagrees_at_its_next_collective_call() -> None:
    """S1.21: it does not ask the others, who wait for it; all of them raise when it comes along with something else."""
    kind, message, rank, _ = _the_one(run_ranks(3, _schedule_nothing))
    assert (kind, rank) == (CheckpointError, 1)
    assert message == (
        "ranks 0, 2 in phase see what is done of finalization of async calls; rank 1 in phase collect of save of "
        "checkpoint-30: all ranks must make the same calls in the same order"
    )


def _finalize_differently(topology: Topology) -> list[Any]:
    with use_topology(topology):
        other, queue = AsyncCallsQueue(), AsyncCallsQueue()
        other.schedule_async_request(AsyncRequest(None, (), []))
        blocking = _error_of(lambda: other.maybe_finalize_async_calls(blocking=topology.rank == 1))
        what = "checkpoint-20" if topology.rank == 0 else "checkpoint-30"
        queue.schedule_async_request(AsyncRequest(None, (), [_no_space], what=f"save of {what}"))
        return [blocking, _error_of(lambda: queue.maybe_finalize_async_calls(blocking=True))]


def test_ranks_that_finalize_different_requests_or_wait_and_do_not_wait_say_so() -> None:
    """S1.21: checks that all ranks finalize the same; nobody's `blocking` is passed over in silence."""
    (_, blocking, _, _), (_, different, _, _) = _the_one(run_ranks(2, _finalize_differently))
    same = ": all ranks must make the same calls in the same order"
    of = "of finalization of async calls"
    assert blocking == f"rank 0 in phase see what is done {of}; rank 1 in phase wait for all {of}{same}"
    assert different == (
        "rank 0 in phase run of save of checkpoint-20 (async call 0); rank 1 in phase run of save of checkpoint-30 "
        f"(async call 0){same}"
    )
