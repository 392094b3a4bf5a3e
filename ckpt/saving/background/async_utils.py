"""Work that goes on while training does: a request, and the queue in which all ranks finalize theirs in one order.

A request has a function, which writes, and finalizers, which say that all is written. The function runs in a thread of its
rank, started by `schedule_async_request`; the finalizers run in the caller, once the function has ended on all ranks. A thread
shares the interpreter with training: a function that waits for storage costs steps little, one that computes in Python slows
them. It is a daemon: a process that ends before `close` leaves the request as a crash would, not finalized.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import takewhile
from typing import Any

from ckpt.errors import CheckpointError, ConfigurationError, describe, rebuild, sentence
from ckpt.memory.device import wait_for_accelerator
from ckpt.ranks.job import current_topology
from ckpt.ranks.topology import Topology

logger = logging.getLogger(__name__)
_LOOK_S = 0.25


@dataclass(eq=False)
class AsyncRequest:
    """A function to call on this rank, and what to call when all ranks are done with theirs.

    Every rank makes one, for the same thing. Function and `preload_fn` enter no phases; finalizers may, all ranks alike.

    Attributes:
        async_fn: None: this rank has nothing to do.
        finalize_fns: called in order, in the caller's thread.
        preload_fn: called in the caller's thread, before anything else; what it returns, unless None, takes the place of
            the second of `async_fn_args`. Copies it leaves under way on the device are waited for.
        call_idx: number of the call in its queue; None outside of one.
        what: what the request does, for the errors; equal on all ranks.
        abandon_fns: called on every rank when the request has failed on any, to let go of what it holds; they raise nothing.

    Source: megatron.core.dist_checkpointing.strategies.async_utils. What comes after the first three has another order in
    each of its versions, and is given by name.
    """

    async_fn: Callable[..., object] | None
    async_fn_args: Sequence[Any]
    finalize_fns: list[Callable[[], object]]
    _: KW_ONLY
    async_fn_kwargs: Mapping[str, Any] = field(default_factory=dict)
    preload_fn: Callable[[], Any] | None = None
    is_frozen: bool = False
    call_idx: int | None = None
    what: str = "async request"
    abandon_fns: list[Callable[[], object]] = field(default_factory=list)

    def add_finalize_fn(self, fn: Callable[[], object]) -> None:
        """Call `fn` too, after the finalizers that are there.

        Raises:
            ConfigurationError: the request is frozen, as a scheduled one is. On this rank alone.
        """
        if self.is_frozen:
            raise ConfigurationError(
                f"{self.what}: it is frozen, as a scheduled request is, and takes no more finalizers; add them before it is scheduled"
            )
        self.finalize_fns.append(fn)

    def freeze(self) -> AsyncRequest:
        """Refuse further finalizers from now on, and return this request."""
        self.is_frozen = True
        return self

    def execute_sync(self) -> None:
        """Do at once what the queue would do in time: the function, the agreement of all ranks, then the finalizers.

        Every rank calls it. The function runs in the calling thread, inside a phase: should it take longer than the
        topology's `timeout_s`, it says `topology.progress` meanwhile.

        Raises:
            CheckpointError: the function, or a finalizer, raised on some rank; on every rank. After a function that raised,
                no finalizer runs.
        """
        topology = current_topology()
        with _abandoning(self), topology.operation(self.what):
            with topology.phase("run"):
                self.preload()()
            _finalize(self, topology, None)

    def preload(self) -> Callable[[], object]:
        """Call `preload_fn`, and return the function that is left to call, with its arguments."""
        arguments = list(self.async_fn_args)
        staged = None if self.preload_fn is None else self.preload_fn()
        if staged is not None:
            if len(arguments) < 2:
                raise ConfigurationError(
                    f"{self.what}: what preload_fn returns takes the place of the second argument, and async_fn_args has "
                    f"{len(arguments)}; give it two, or let preload_fn return None"
                )
            arguments[1] = staged
        wait_for_accelerator()
        function, keywords = self.async_fn, dict(self.async_fn_kwargs)
        return (lambda: None) if function is None else lambda: function(*arguments, **keywords)


class AsyncCallsQueue:
    """The requests of this rank that are under way, oldest first. One thread, that of the topology's phases, makes the calls."""

    def __init__(
        self,
        topology: Callable[[], Topology] = current_topology,
        *,
        look: Callable[[], CheckpointError | None] | None = None,
    ) -> None:
        """Join the ranks of `topology()`; default: those of torch's default process group.

        Args:
            look: says what a function that has not ended has failed of, if that is known. Then the functions tell the topology of their
                progress themselves. None: one that has not ended counts as moving.
        """
        self._topology = topology
        self._look = look
        self._calls: deque[_Call] = deque()
        self._num_scheduled = 0

    def schedule_async_request(self, async_request: AsyncRequest) -> int:
        """Start a request in the background, freeze it, and return its number: 0, 1, 2 ...

        Every rank schedules the same requests in the same order, and none waits for another here. So what `preload_fn` raises
        is raised where all ranks meet, by `maybe_finalize_async_calls`.
        """
        number = self._num_scheduled
        self._calls.append(_Call(number, replace(async_request.freeze(), call_idx=number)))
        self._num_scheduled += 1
        return number

    def maybe_finalize_async_calls(self, blocking: bool = False) -> list[int]:
        """Finalize, in order, the requests whose functions have ended on all ranks, and return their numbers.

        Every rank calls it. It costs one agreement, and nothing at all where no request is under way.

        Args:
            blocking: wait for all of them.

        Raises:
            CheckpointError: a request's function, or a finalizer, raised on some rank, or the ranks have scheduled different
                numbers of requests; on every rank. A request that failed has left the queue, with no finalizer called after the
                failure; the next call goes on with those behind it.
        """
        if not self._calls:
            return []
        topology = self._topology()
        with topology.operation("finalization of async calls"):
            finalized: list[int] = []
            for _ in range(self._num_done(topology, blocking)):
                finalized.append(self._finalize_next(topology, finalized))
        return finalized

    def get_num_unfinalized_calls(self) -> int:
        """Return how many requests this rank has scheduled and not taken from the queue. No call of other ranks is needed."""
        return len(self._calls)

    def close(self) -> None:
        """Wait for all requests and finalize them, also those behind one that failed. Every rank calls it.

        Raises:
            CheckpointError: requests failed, or the ranks cannot agree: the class of the first error, the sentences of all; on
                every rank. Only in the second case something is left in the queue.
        """
        errors: list[CheckpointError] = []
        while self._calls:
            before = len(self._calls)
            try:
                self.maybe_finalize_async_calls(blocking=True)
            except CheckpointError as error:
                errors.append(error)
                if len(self._calls) == before:  # no request's error: the ranks cannot agree
                    break
        if len(errors) > 1:
            raise rebuild({**describe(errors[0]), "message": "; ".join(map(str, errors))}) from errors[0]
        if errors:
            raise errors[0]

    def _num_done(self, topology: Topology, blocking: bool) -> int:
        """How many of the oldest requests have ended on every rank?"""
        with topology.phase("wait for all" if blocking else "see what is done") as phase:
            for call in self._calls if blocking else ():
                call.wait(topology, self._look)
            num_done = sum(1 for _ in takewhile(_Call.is_done, self._calls))
            phase.payload = [self._num_scheduled, len(self._calls), num_done]
        first, *_ = phase.payloads
        for rank, own in enumerate(phase.payloads):
            if own[:2] != first[:2]:
                raise CheckpointError(
                    f"rank 0 has scheduled {_counted(*first[:2])}, rank {rank} has scheduled {_counted(*own[:2])}; every rank "
                    "must schedule and finalize the same requests in the same order"
                )
        return min(int(num_done) for _, _, num_done in phase.payloads)

    def _finalize_next(self, topology: Topology, finalized: Sequence[int]) -> int:
        """Finalize the oldest request, after those that this call has finalized already, and return its number.

        The operation is named after the request, so that ranks at different ones disagree, and all of them raise.
        """
        call = self._calls.popleft()
        stands = _said(finalized)
        with _abandoning(call.request), topology.operation(f"{call.request.what} (async call {call.number})"):
            with topology.phase("run") as phase:
                phase.stands = stands
                call.raise_error()
            _finalize(call.request, topology, stands)
        return call.number


class _Call:
    """A request that is under way on this rank."""

    def __init__(self, number: int, request: AsyncRequest) -> None:
        """Preload, and start the thread."""
        self.number = number
        self.request = request
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        try:
            function = request.preload()
            if request.async_fn is not None:
                target, name = copy_context().run, f"async call {number}"  # it sees the topology of its caller
                thread = threading.Thread(target=target, args=(self._run, function), name=name, daemon=True)
                thread.start()
                self._thread = thread
        except Exception as error:
            self._error = error

    def is_done(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    def wait(self, topology: Topology, look: Callable[[], CheckpointError | None] | None) -> None:
        """Wait for the function to end, or until it is known what it has failed of."""
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(_LOOK_S)
            if look is None:
                topology.progress()
            elif (error := look()) is not None and self._thread.is_alive():
                self._thread, self._error = None, error  # it may never end
            else:
                topology.require_awaited()

    def raise_error(self) -> None:
        """Raise what the function, or `preload_fn`, raised. SystemExit in a thread ends no process: it is a failure like others."""
        if isinstance(self._error, Exception):
            raise self._error
        if self._error is not None:
            raise CheckpointError(sentence(self._error)) from self._error

    def _run(self, function: Callable[[], object]) -> None:
        try:
            function()
        except BaseException as error:
            self._error = error


@contextmanager
def _abandoning(request: AsyncRequest) -> Iterator[None]:
    try:
        yield
    except BaseException:
        for abandon_fn in request.abandon_fns:
            abandon_fn()
        raise


def _finalize(request: AsyncRequest, topology: Topology, stands: str | None) -> None:
    """Call the finalizers, and agree that they have ended, so that no rank goes on where another's has failed."""
    for finalize_fn in request.finalize_fns:
        finalize_fn()
    with topology.phase("finalize") as phase:
        phase.stands = stands


def _counted(num_scheduled: int, num_waiting: int) -> str:
    return f"{num_scheduled} async calls and finalized {num_scheduled - num_waiting}"


def _said(finalized: Sequence[int]) -> str | None:
    """What is so even if the next request fails."""
    if not finalized:
        return None
    calls, are = ("async call", "is") if len(finalized) == 1 else ("async calls", "are")
    return f"{calls} {', '.join(map(str, finalized))} {are} finalized"
