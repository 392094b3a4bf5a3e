"""Requests that run beside training, and the queue in which all ranks finalize them in one order.

A request has a function, which writes, and finalizers, which commit. The function runs in a thread of its rank, started by
`schedule_async_request`; the finalizers run in the caller, once the function has ended on all ranks. The thread shares the
interpreter with training: waiting for storage costs steps little, computing in Python slows them. It is a daemon: a process
that ends before `close` leaves the request as a crash would, not finalized.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import takewhile
from typing import Any

from ckpt.errors import CheckpointError, ConfigurationError, describe, rebuild, sentence
from ckpt.memory.device import wait_for_accelerator
from ckpt.ranks.default_topology import current_topology
from ckpt.ranks.heartbeat import WAITING
from ckpt.ranks.merging import Alike, alike, least
from ckpt.ranks.topology import Topology
from ckpt.ranks.waiting import in_thread

_LOOK_S = 0.25


@dataclass(eq=False)
class AsyncRequest:
    """A function that this rank runs, and finalizers that it calls once the functions of all ranks have ended.

    Every rank makes one for the same save. Function and `preload_fn` enter no phases; finalizers may, on all ranks alike.

    Attributes:
        async_fn: None: this rank has nothing to do.
        finalize_fns: called in order, in the caller's thread.
        preload_fn: called first, in the caller's thread; its result, unless None, replaces the second of `async_fn_args`.
            Copies that it leaves unfinished on the device are waited for.
        call_idx: number of the call in its queue; None outside of one.
        what: name of the request in errors; equal on all ranks.
        abandon_fns: called on every rank when the request has failed on any, to release resources; they raise nothing.

    Source: megatron.core.dist_checkpointing.strategies.async_utils. Its versions order the arguments after the first three
    differently, so these are keywords here.
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
        """Add a finalizer, called after the present ones.

        Raises:
            ConfigurationError: the request is frozen, as a scheduled one is. Raised on this rank alone.
        """
        if self.is_frozen:
            raise ConfigurationError(
                f"{self.what}: it is frozen, as a scheduled request is, and takes no more finalizers; add them before it is scheduled"
            )
        self.finalize_fns.append(fn)

    def freeze(self) -> AsyncRequest:
        """Refuse further finalizers, and return this request."""
        self.is_frozen = True
        return self

    def execute_sync(self) -> None:
        """Run the request now: the function, the agreement of all ranks, then the finalizers. Collective.

        The function runs in the calling thread, inside a phase: if it takes longer than the topology's `timeout_s`, it must
        call `topology.progress` meanwhile.

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
        """Call `preload_fn`, and return a function that calls `async_fn` with its arguments."""
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
    """The unfinished requests of this rank, oldest first. Called by one thread, that of the topology's phases."""

    def __init__(
        self,
        topology: Callable[[], Topology] = current_topology,
        *,
        look: Callable[[], CheckpointError | None] | None = None,
    ) -> None:
        """Join the ranks of `topology()`; default: those of torch's default process group.

        Args:
            look: returns the error of a function that has not ended, if that is known; the functions report their progress to the
                topology themselves then. None: an unfinished function counts as progress.
        """
        self._topology = topology
        self._look = look
        self._calls: deque[_Call] = deque()
        self._num_scheduled = 0

    def schedule_async_request(self, async_request: AsyncRequest) -> int:
        """Start a request in the background, freeze it, and return its number: 0, 1, 2 ...

        Every rank schedules the same requests in the same order, without waiting for others. An error of `preload_fn` is
        therefore raised by `maybe_finalize_async_calls`, on all ranks.
        """
        number = self._num_scheduled
        self._calls.append(_Call(number, replace(async_request.freeze(), call_idx=number)))
        self._num_scheduled += 1
        return number

    def maybe_finalize_async_calls(self, blocking: bool = False) -> list[int]:
        """Finalize, in order, the requests whose functions have ended on all ranks, and return their numbers. Collective.

        It costs one agreement, and nothing if there is no request.

        Args:
            blocking: wait for all of them.

        Raises:
            CheckpointError: a request's function, or a finalizer, raised on some rank, or the ranks have scheduled different
                numbers of requests; on every rank. A failed request has left the queue, and none of its finalizers is called after the
                failure; the next call continues with the requests behind it.
        """
        if not self._calls:
            return []
        topology = self._topology()
        with topology.operation("finalization of async calls"):
            finalized: list[int] = []
            for _ in range(self._num_done(topology, blocking)):
                finalized.append(self._finalize_next(topology, finalized))
        return finalized

    def has_ended(self, number: int) -> bool:
        """Return whether the function of a request that is not finalized has ended on this rank, or was never started. Not collective."""
        return any(call.number == number and call.is_done() for call in self._calls)

    def get_num_unfinalized_calls(self) -> int:
        """Return the number of requests in the queue of this rank. Not collective."""
        return len(self._calls)

    def close(self) -> None:
        """Wait for all requests and finalize them, also those behind one that failed. Collective.

        Raises:
            CheckpointError: requests failed, or the ranks cannot agree: the class of the first error, the sentences of all; on
                every rank. Requests stay in the queue only if the ranks cannot agree.
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
        """The number of oldest requests that have ended on every rank."""
        with topology.phase(WAITING if blocking else "see what is done") as phase:
            for call in self._calls if blocking else ():
                call.wait(topology, self._look)
            num_done = sum(1 for _ in takewhile(_Call.is_done, self._calls))
            phase.merge = {"calls": alike([self._num_scheduled, len(self._calls)]), "done": least(num_done)}
        calls: Alike = phase.merged["calls"]
        if not calls.is_alike:
            raise CheckpointError(
                f"rank 0 has scheduled {_counted(*calls.value)}, rank {calls.odd_rank} has scheduled {_counted(*calls.odd_value)}; every "
                "rank must schedule and finalize the same requests in the same order"
            )
        return int(phase.merged["done"])

    def _finalize_next(self, topology: Topology, finalized: Sequence[int]) -> int:
        """Finalize the oldest request, after those in `finalized`, and return its number.

        The operation is named after the request, so that ranks at different requests disagree, and all raise.
        """
        call = self._calls.popleft()
        stands = _committed_text(finalized)
        with _abandoning(call.request), topology.operation(f"{call.request.what} (async call {call.number})"):
            with topology.phase("run") as phase:
                phase.stands = stands
                call.raise_error()
            _finalize(call.request, topology, stands)
        return call.number


class _Call:
    """A scheduled request of this rank."""

    def __init__(self, number: int, request: AsyncRequest) -> None:
        """Preload, and start the thread."""
        self.number = number
        self.request = request
        self._outcome: futures.Future[object] = futures.Future()
        try:
            function, context = request.preload(), copy_context()  # the thread has the topology of its caller
            if request.async_fn is None:
                self._outcome.set_result(None)
            else:
                self._outcome = in_thread(lambda: context.run(function), f"async call {number}")
        except Exception as error:
            self._outcome.set_exception(error)

    def is_done(self) -> bool:
        return self._outcome.done()

    def wait(self, topology: Topology, look: Callable[[], CheckpointError | None] | None) -> None:
        """Wait for the function to end, or until its error is known."""
        while not self.is_done():
            futures.wait([self._outcome], _LOOK_S)
            if look is None:
                topology.progress()
            elif (error := look()) is not None and not self.is_done():
                self._outcome = futures.Future()  # the function may never end
                self._outcome.set_exception(error)
            else:
                topology.require_awaited()

    def raise_error(self) -> None:
        """Raise the error of the function or of `preload_fn`. SystemExit, which ends no process from a thread, is a failure like others."""
        error = self._outcome.exception()
        if isinstance(error, Exception):
            raise error
        if error is not None:
            raise CheckpointError(sentence(error)) from error


@contextmanager
def _abandoning(request: AsyncRequest) -> Iterator[None]:
    try:
        yield
    except BaseException:
        for abandon_fn in request.abandon_fns:
            abandon_fn()
        raise


def _finalize(request: AsyncRequest, topology: Topology, stands: str | None) -> None:
    """Call the finalizers, and agree that they have ended: if one fails on any rank, all raise."""
    for finalize_fn in request.finalize_fns:
        finalize_fn()
    with topology.phase("finalize") as phase:
        phase.stands = stands


def _counted(num_scheduled: int, num_waiting: int) -> str:
    return f"{num_scheduled} async calls and finalized {num_scheduled - num_waiting}"


def _committed_text(finalized: Sequence[int]) -> str | None:
    """The sentence about requests that are finalized even if the next one fails."""
    if not finalized:
        return None
    calls, are = ("async call", "is") if len(finalized) == 1 else ("async calls", "are")
    return f"{calls} {', '.join(map(str, finalized))} {are} finalized"
