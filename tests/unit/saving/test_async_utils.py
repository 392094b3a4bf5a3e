"""Requests that run in the background, and their queue, on a rank that is alone."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ckpt.errors import CheckpointError, ConfigurationError, CorruptCheckpointError, StorageError
from ckpt.ranks.default_topology import current_topology, use_topology
from ckpt.ranks.topology import Topology
from ckpt.saving.background.async_utils import AsyncCallsQueue, AsyncRequest


def noting(log: list[Any], *notes: Any) -> list[Callable[[], object]]:
    """Finalizers that note, in order."""
    return [lambda note=note: log.append(note) for note in notes]


def raising(error: BaseException) -> Callable[[], object]:
    def fail() -> None:
        raise error

    return fail


class Gate:
    """An async function that ends when it is told to."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.began = threading.Event()

    def __call__(self) -> None:
        self.began.set()
        assert self.opened.wait(30)

    def open(self) -> None:
        self.opened.set()


def until_done(queue: AsyncCallsQueue) -> list[int]:
    """Ask the queue again and again, without blocking, as a training loop does."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        if finalized := queue.maybe_finalize_async_calls():
            return finalized
        time.sleep(0.001)
    raise AssertionError("nothing was finalized")


# A request


def test_the_first_three_fields_are_those_of_the_first_reference_and_the_rest_have_names() -> None:
    """S1.20: function, args, finalizers, frozen flag; kwargs, preload function and call index of later versions."""
    request = AsyncRequest(print, (1, 2), [])
    assert (request.async_fn, request.async_fn_args, request.finalize_fns) == (print, (1, 2), [])
    assert (request.async_fn_kwargs, request.preload_fn, request.is_frozen, request.call_idx) == ({}, None, False, None)
    with pytest.raises(TypeError, match="positional"):
        AsyncRequest(print, (1, 2), [], True)  # type: ignore[misc]  # is_frozen in one version, kwargs in the next


def test_a_frozen_request_takes_no_more_finalizers() -> None:
    """S1.20: `add_finalize_fn` refuses when frozen."""
    log: list[str] = []
    request = AsyncRequest(None, (), noting(log, "first"), what="save of x")
    request.add_finalize_fn(*noting(log, "second"))
    assert request.freeze().is_frozen
    with pytest.raises(ConfigurationError, match="^save of x: it is frozen, .*add them before it is scheduled$"):
        request.add_finalize_fn(*noting(log, "third"))
    request.execute_sync()
    assert log == ["first", "second"]


def test_a_scheduled_request_is_frozen_itself_so_that_no_finalizer_is_added_in_vain() -> None:
    """S1.20, S1.21: the queue's copy shares nothing that the caller could still change unnoticed."""
    queue, log = AsyncCallsQueue(), []
    request = AsyncRequest(None, (), noting(log, "finalized"))
    queue.schedule_async_request(request)
    with pytest.raises(ConfigurationError, match="it is frozen"):
        request.add_finalize_fn(*noting(log, "too late"))
    queue.close()
    assert log == ["finalized"]


def test_execute_sync_preloads_runs_and_finalizes_in_this_thread() -> None:
    """S1.20: run, agreement, then the finalizers in their order."""
    log: list[Any] = []

    def write(*args: Any, **kwargs: Any) -> None:
        log.append((args, kwargs, threading.current_thread() is threading.main_thread()))

    request = AsyncRequest(
        write,
        ("rank 0", "tensors on the device", "results"),
        noting(log, "first", "second"),
        async_fn_kwargs={"sync": True},
        preload_fn=lambda: log.append("preload") or "tensors on the host",
    )
    request.execute_sync()
    written = ("rank 0", "tensors on the host", "results"), {"sync": True}, True
    assert log == ["preload", written, "first", "second"]


@pytest.mark.parametrize(
    ("error", "kind", "says"),
    [
        (OSError(28, "No space left on device", "w"), StorageError, "No space left on device: 'w'"),
        (CorruptCheckpointError("block 3 has changed"), CorruptCheckpointError, "block 3 has changed"),
        (KeyError("w"), CheckpointError, "KeyError: 'w'"),
    ],
)
@pytest.mark.parametrize("part", ["function", "preload"])
def test_after_a_failure_execute_sync_finalizes_nothing(
    error: Exception, kind: type[CheckpointError], says: str, part: str
) -> None:
    """S1.20: an error of the function is raised, and no finalizer runs."""
    log: list[str] = []
    request = AsyncRequest(raising(error), (), noting(log, "finalized"), what="save of x")
    if part == "preload":
        request = AsyncRequest(None, (), noting(log, "finalized"), preload_fn=raising(error), what="save of x")
    with pytest.raises(kind) as caught:
        request.execute_sync()
    assert (type(caught.value), str(caught.value), caught.value.phase) == (kind, f"save of x: {says}", "run")
    assert caught.value.__cause__ is error
    assert log == []


def test_a_finalizer_that_fails_ends_the_request_there() -> None:
    """S1.20: the finalizers behind it do not run."""
    log: list[str] = []
    finalizers = [*noting(log, "first"), raising(ValueError("no")), *noting(log, "third")]
    with pytest.raises(CheckpointError, match="^save of x: ValueError: no$"):
        AsyncRequest(None, (), finalizers, what="save of x").execute_sync()
    assert log == ["first"]


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_of_execute_sync_goes_on_as_it_is(interrupt: type[BaseException]) -> None:
    """S1.20: it is no failure of the request; nothing is finalized."""
    log: list[str] = []
    with pytest.raises(interrupt):
        AsyncRequest(raising(interrupt()), (), noting(log, "finalized")).execute_sync()
    assert log == []
    with current_topology().phase("next"):
        pass


def test_what_preload_returns_needs_a_second_argument_to_take_the_place_of() -> None:
    """S1.20: as in later versions of the first reference; None leaves the arguments alone."""
    log: list[Any] = []
    AsyncRequest(log.append, ("kept",), [], preload_fn=lambda: None).execute_sync()
    assert log == ["kept"]
    with pytest.raises(ConfigurationError, match="takes the place of the second argument, and async_fn_args has 1;"):
        AsyncRequest(log.append, ("kept",), [], preload_fn=lambda: "staged").execute_sync()
    assert log == ["kept"]


@pytest.mark.parametrize("in_use", [True, False])
def test_copies_that_are_under_way_on_a_device_end_before_the_function_begins(
    monkeypatch: pytest.MonkeyPatch, in_use: bool
) -> None:
    """S1.20: what `preload_fn` has begun to copy; a device that the process has not touched is left alone."""
    log: list[str] = []
    device = SimpleNamespace(is_initialized=lambda: in_use, synchronize=lambda: log.append("synchronized"))
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    AsyncRequest(
        lambda: log.append("written"), (), [], preload_fn=lambda: log.append("copies under way")
    ).execute_sync()
    assert log == ["copies under way", *(["synchronized"] if in_use else []), "written"]


# The queue


def test_a_request_runs_in_the_background_and_is_finalized_in_the_caller() -> None:
    """S1.21: an index for each; finalized once, when it is done; the count of those that are not."""
    queue, gate, log = AsyncCallsQueue(), Gate(), []
    main = threading.get_ident()
    request = AsyncRequest(gate, (), [lambda: log.append(threading.get_ident() == main)])
    assert queue.get_num_unfinalized_calls() == 0
    assert queue.schedule_async_request(request) == 0
    assert gate.began.wait(30)
    assert (queue.maybe_finalize_async_calls(), queue.get_num_unfinalized_calls(), log) == ([], 1, [])
    gate.open()
    assert until_done(queue) == [0]
    assert (queue.maybe_finalize_async_calls(), queue.get_num_unfinalized_calls(), log) == ([], 0, [True])
    assert queue.schedule_async_request(AsyncRequest(None, (), [])) == 1


def test_requests_are_finalized_in_their_order_whichever_ends_first() -> None:
    """S1.21: in order."""
    queue, gates, log = AsyncCallsQueue(), [Gate(), Gate(), Gate()], []
    for number, gate in enumerate(gates):
        assert queue.schedule_async_request(AsyncRequest(gate, (), noting(log, number))) == number
    gates[1].open()
    gates[2].open()
    assert queue.maybe_finalize_async_calls() == []
    gates[0].open()
    finalized: list[int] = []
    while len(finalized) < 3:
        finalized += until_done(queue)
    assert (finalized, log) == ([0, 1, 2], [0, 1, 2])


def test_blocking_waits_for_all() -> None:
    """S1.21: `blocking=True`."""
    queue, log = AsyncCallsQueue(), []
    for number in range(2):
        queue.schedule_async_request(AsyncRequest(time.sleep, (0.05,), noting(log, number)))
    assert queue.maybe_finalize_async_calls(blocking=True) == [0, 1]
    assert log == [0, 1]


def test_the_function_gets_what_was_preloaded_before_schedule_returned() -> None:
    """S1.20, S1.21: the preload function runs in the caller, so that training may go on changing the tensors."""
    queue, log = AsyncCallsQueue(), []
    weights = torch.arange(8)
    threads: list[int] = []

    def stage() -> torch.Tensor:
        threads.append(threading.get_ident())
        return weights.clone()

    queue.schedule_async_request(AsyncRequest(lambda *args: log.append(args), ("w", weights), [], preload_fn=stage))
    weights += 1
    queue.close()
    ((name, staged),) = log
    assert (name, threads) == ("w", [threading.get_ident()])
    assert torch.equal(staged, torch.arange(8))


@pytest.mark.parametrize("part", ["function", "preload"])
def test_a_request_that_failed_is_named_when_it_is_finalized_and_those_behind_it_still_are(part: str) -> None:
    """S1.21: its finalizers do not run; the next call goes on behind it."""
    queue, log = AsyncCallsQueue(), []
    error = OSError(28, "No space left on device", "w")
    parts: dict[str, Any] = {"preload_fn": raising(error)} if part == "preload" else {}
    for number in range(2):
        queue.schedule_async_request(AsyncRequest(None, (), noting(log, number), what="save of checkpoint-10"))
    failing = AsyncRequest(raising(error), (), noting(log, 2), what="save of checkpoint-20", **parts)
    assert queue.schedule_async_request(failing) == 2
    assert queue.schedule_async_request(AsyncRequest(None, (), noting(log, 3), what="save of checkpoint-30")) == 3
    with pytest.raises(StorageError) as caught:
        queue.maybe_finalize_async_calls(blocking=True)
    assert str(caught.value) == (
        "save of checkpoint-20 (async call 2): No space left on device: 'w'; async calls 0, 1 are finalized all the same"
    )
    assert caught.value.__cause__ is error
    assert (queue.get_num_unfinalized_calls(), log) == (1, [0, 1])
    assert queue.maybe_finalize_async_calls() == [3]
    assert log == [0, 1, 3]


@pytest.mark.parametrize("stop", [SystemExit(3), KeyboardInterrupt()])
def test_who_asks_for_the_end_of_the_process_in_the_background_has_failed(stop: BaseException) -> None:
    """S1.21: a thread cannot end the process; but its request is not taken for done."""
    queue, log = AsyncCallsQueue(), []
    queue.schedule_async_request(AsyncRequest(raising(stop), (), noting(log, 0), what="save of x"))
    with pytest.raises(CheckpointError, match=rf"^save of x \(async call 0\): {type(stop).__name__}"):
        queue.close()
    assert (queue.get_num_unfinalized_calls(), log) == (0, [])


def test_an_interrupt_while_waiting_leaves_the_requests_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """S1.21: Ctrl-C goes on as it is; who catches it can still close the queue."""
    queue, gate, log = AsyncCallsQueue(), Gate(), []
    queue.schedule_async_request(AsyncRequest(gate, (), noting(log, 0)))
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Topology, "progress", lambda self: raising(KeyboardInterrupt())())
        queue.maybe_finalize_async_calls(blocking=True)
    assert (queue.get_num_unfinalized_calls(), log) == (1, [])
    gate.open()
    queue.close()
    assert (queue.get_num_unfinalized_calls(), log) == (0, [0])


def test_close_drains_also_behind_requests_that_failed_and_says_each_failure() -> None:
    """S1.21: `close` drains."""
    queue, log = AsyncCallsQueue(), []
    functions = [None, raising(OSError(28, "No space left")), None, raising(ValueError("no")), None]
    for number, function in enumerate(functions):
        queue.schedule_async_request(AsyncRequest(function, (), noting(log, number), what=f"save {number}"))
    with pytest.raises(StorageError) as caught:
        queue.close()
    assert str(caught.value) == (
        "save 1 (async call 1): No space left; async call 0 is finalized all the same; "
        "save 3 (async call 3): ValueError: no; async call 2 is finalized all the same"
    )
    assert (queue.get_num_unfinalized_calls(), log) == (0, [0, 2, 4])
    queue.close()


def test_a_finalizer_that_fails_takes_its_request_from_the_queue() -> None:
    """S1.21: it is not called again; the next request is finalized by the next call."""
    queue, log = AsyncCallsQueue(), []
    queue.schedule_async_request(AsyncRequest(None, (), [raising(ValueError("no")), *noting(log, 0)], what="save of x"))
    queue.schedule_async_request(AsyncRequest(None, (), noting(log, 1)))
    with pytest.raises(CheckpointError, match=r"^save of x \(async call 0\): ValueError: no$"):
        queue.maybe_finalize_async_calls(blocking=True)
    assert queue.maybe_finalize_async_calls(blocking=True) == [1]
    assert log == [1]


def test_a_finalizer_may_agree_with_the_other_ranks_and_schedule_the_next_request() -> None:
    """S1.21: it runs between two phases, of an operation that names the request."""
    queue, log = AsyncCallsQueue(), []

    def publish() -> None:
        with current_topology().phase("publish") as phase:
            phase.payload = "published"
        log.extend(phase.payloads)
        log.append(queue.schedule_async_request(AsyncRequest(None, (), noting(log, "last"))))

    queue.schedule_async_request(AsyncRequest(None, (), [publish]))
    assert queue.maybe_finalize_async_calls(blocking=True) == [0]
    assert queue.maybe_finalize_async_calls(blocking=True) == [1]
    assert log == ["published", 1, "last"]


def test_the_function_sees_the_topology_of_its_caller() -> None:
    """S1.21: so that it can say that it moves; phases are the caller's alone."""
    queue, seen = AsyncCallsQueue(), []
    with use_topology(Topology.alone()) as _:
        mine = current_topology()
        queue.schedule_async_request(AsyncRequest(lambda: seen.append(current_topology()), (), []))
        queue.close()
    assert seen == [mine]


class CountsPhases(Topology):
    phases = 0

    def phase(self, name: str) -> Any:
        self.phases += 1
        return super().phase(name)


def test_a_queue_in_which_nothing_is_scheduled_asks_nobody() -> None:
    """S1.21: a training loop may ask after every step."""
    topology = CountsPhases.alone()
    assert isinstance(topology, CountsPhases)
    with use_topology(topology):
        queue = AsyncCallsQueue()
        queue.maybe_finalize_async_calls()
        queue.maybe_finalize_async_calls(blocking=True)
        queue.close()
        assert topology.phases == 0
        gate = Gate()
        queue.schedule_async_request(AsyncRequest(gate, (), []))
        for number in range(1, 4):
            assert queue.maybe_finalize_async_calls() == []
            assert topology.phases == number, "one phase while it is under way"
        gate.open()
        queue.close()
        asked = topology.phases
        queue.maybe_finalize_async_calls()
        assert topology.phases == asked


LEAVES_WHILE_IT_WRITES = """
import sys, threading
from ckpt.saving.background.async_utils import AsyncCallsQueue, AsyncRequest

queue = AsyncCallsQueue()
queue.schedule_async_request(AsyncRequest(threading.Event().wait, (), [lambda: print("finalized")]))
sys.exit(7)
"""


def test_a_process_that_ends_does_not_wait_for_its_requests_and_does_not_finalize_them() -> None:
    """S1.21: as in a crash, nothing says that all is written."""
    began = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-c", LEAVES_WHILE_IT_WRITES],
        cwd=Path(__file__).resolve().parents[3],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (7, "", "")
    assert time.monotonic() - began < 30
