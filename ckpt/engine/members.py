"""The ranks of an engine: how they join and leave, and the thread that makes the collective calls of one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

from torch.distributed import DistError, PrefixStore, Store, TCPStore

from ckpt.engine.base import MasterMetadata
from ckpt.errors import ConfigurationError, RankAbsentError
from ckpt.memory.device import same_device
from ckpt.ranks.addresses import own_address
from ckpt.ranks.stores import StoreGoneError, reach, serve
from ckpt.ranks.topology import Topology
from ckpt.ranks.waiting import OutOfTimeError, poll_until, start

Result = TypeVar("Result")

TOPOLOGY = "topology"
"""Prefix of the agreement's keys in an engine's store."""
_NOT_JOINED = "the engine has not joined any ranks: call init_process_group first"
_LINGER_S = 1.0
_LEAVE_S = 5.0


class Place(NamedTuple):
    """The arguments of a join; see `VersionedEngine.init_process_group`."""

    rank: int
    num_trainers: int
    num_rollouts: int
    master: MasterMetadata | None
    store: Store | None


class Members:
    """The trainers and rollouts of an engine, on one of its ranks.

    Ranks are 0 to T - 1 for trainers and T to T + R - 1 for rollouts; colocated, the same T ranks are both.

        apart --- prepare, join ---> joined --- leave ---> apart

    One thread makes all collective calls; it lives while the ranks are joined, and the event loop never blocks.

    Args:
        timeout_s: a rank that does not move for so long is absent.
        colocated: the trainers are the rollouts.
        is_master: this rank holds the store to meet at. True on the first trainer only.

    Attributes:
        rank: of this process, in the engine.
        trainers, rollouts: the ranks that send, and that receive.
        topology: of all ranks; None: they are not joined.
        store: through which they meet.
        cancelled: set when a call was cancelled, so that the update under way fails.

    Raises:
        ConfigurationError: a value is out of range.
    """

    def __init__(self, *, timeout_s: float, colocated: bool, is_master: bool) -> None:
        if not timeout_s > 0:
            raise ConfigurationError(f"timeout_s={timeout_s}: expected more than 0 seconds")
        self.timeout_s = timeout_s
        self.colocated = colocated
        self.is_master = is_master
        self.rank = 0
        self.trainers = self.rollouts = range(0)
        self.topology: Topology | None = None
        self.store: Store | None = None
        self.cancelled = threading.Event()
        self._meeting: tuple[TCPStore, MasterMetadata] | None = None
        self._joined_as: Place | None = None
        self._thread: EngineThread | None = None
        self._num_ended = 0

    def require_topology(self) -> Topology:
        """Return the topology of all ranks.

        Raises:
            ConfigurationError: they are not joined.
        """
        if self.topology is None:
            raise ConfigurationError(_NOT_JOINED)
        return self.topology

    # Meeting and parting

    def prepare(self) -> MasterMetadata | None:
        """See `CheckpointEngine.prepare`. The master starts its store."""
        if not self.is_master:
            return None
        if self._meeting is None:
            store, address = own_store(self.timeout_s)
            self._meeting = store, MasterMetadata(address, store.port)
        return self._meeting[1]

    def are_joined_as(self, place: Place) -> bool:
        """Whether these ranks are joined already.

        Raises:
            ConfigurationError: a number is out of range, or other ranks are joined.
        """
        world_size = place.num_trainers + (0 if self.colocated else place.num_rollouts)
        if place.num_trainers < 1 or place.num_rollouts < 1 or not 0 <= place.rank < world_size:
            raise ConfigurationError(
                f"rank {place.rank} of {place.num_trainers} trainers and {place.num_rollouts} rollouts: each needs at least one"
            )
        if self.colocated and place.num_rollouts != place.num_trainers:
            raise ConfigurationError(
                f"colocated: expected as many rollouts as trainers, {place.num_trainers}, found {place.num_rollouts}"
            )
        if self._joined_as not in (None, place):
            raise ConfigurationError(
                f"the engine has joined {len(self.trainers)} trainers and {len(self.rollouts)} rollouts: call leave() on every rank "
                "before it joins others, or make it with rebuild_group=True"
            )
        return self._joined_as is not None

    def join(self, place: Place, host: str | None, get_ready: Callable[[Topology], None]) -> None:
        """Join the other ranks. If it fails, call `leave` next.

        Args:
            host: name of this host; None: its own.
            get_ready: last part of the join, called by the thread on all ranks; may have phases.

        Raises:
            RankAbsentError: a rank did not come.
        """
        self.rank = place.rank
        self.trainers = range(place.num_trainers)
        first = 0 if self.colocated else place.num_trainers
        self.rollouts = range(first, first + place.num_rollouts)
        self._thread = EngineThread()
        self.submit(self._join, place, host, get_ready).result()
        self._joined_as = place

    def leave(self, last: Callable[[], None]) -> None:
        """Leave the other ranks without waiting for them; any may be gone. Does nothing if none are joined.

        Waits up to 5 s for a call under way; one that hangs is abandoned.

        Args:
            last: called by the thread before the ranks part.
        """
        thread, self._thread = self._thread, None
        if thread is not None:
            self.cancelled.set()
            try:
                with suppress(TimeoutError):
                    thread.submit(self._part, last).result(_LEAVE_S)
            finally:
                thread.stop()
                topology, self.topology = self.topology, None
                self._meeting = self._joined_as = None
                if topology is not None:
                    topology.close()

    def say_ended(self, topology: Topology) -> None:
        """Tell the others that this rank no longer needs the store for an operation of `topology`."""
        if self.topology in (None, topology):
            self._num_ended += 1
            if self.store is not None:
                with suppress(DistError):
                    self.store.set(f"ended/{self.rank}", str(self._num_ended))

    def _join(self, place: Place, host: str | None, get_ready: Callable[[Topology], None]) -> None:
        if not self.is_master:
            self._meeting = None  # from a call of `prepare` that did not know its rank yet
        self.store = store = place.store or self._store_of(place.master)
        self.cancelled.clear()
        self._num_ended = 0
        world_size = len({*self.trainers, *self.rollouts})
        self.topology = topology = Topology.join(
            PrefixStore(TOPOLOGY, store), self.rank, world_size, host=host, timeout_s=self.timeout_s
        )
        with topology.operation("the join of trainers and rollouts"):
            get_ready(topology)

    def _part(self, last: Callable[[], None]) -> None:
        try:
            last()
        finally:
            if self.topology is not None:
                self._linger(self.topology.world_size)

    def _linger(self, world_size: int) -> None:
        """Wait until the others have read how the last update ended: the master's store ends with its process."""
        if self._meeting is None or not self._num_ended:
            return
        store, keys = self._meeting[0], [f"ended/{rank}" for rank in range(world_size)]

        def all_ended() -> bool | None:
            ended = store.check(keys) and all(int(store.get(key)) >= self._num_ended for key in keys)
            return True if ended else None

        with suppress(OutOfTimeError):  # one is gone, or in no hurry
            poll_until(all_ended, timeout_s=_LINGER_S)

    def _store_of(self, master: MasterMetadata | None) -> Store:
        if master is None:
            raise ConfigurationError("the engine has no address to meet at: give master_metadata or a store")
        if self._meeting is not None:
            return self._meeting[0]
        try:
            return reach(master.address, master.port, timeout_s=self.timeout_s)
        except StoreGoneError as error:
            raise RankAbsentError(
                f"rank {self.rank} cannot reach the first trainer's store at {master.address}:{master.port}"
            ) from error

    # The thread

    def submit(self, call: Callable[..., Result], *args: Any) -> Future[Result]:
        """Queue a call for the thread."""
        if self._thread is None:
            raise ConfigurationError(_NOT_JOINED)
        return self._thread.submit(call, *args)

    def leave_to_thread(self, call: Callable[..., object], *args: Any) -> None:
        """Queue a call whose result nobody awaits; does nothing if the ranks have parted. Any thread."""
        if (thread := self._thread) is not None:
            thread.submit(call, *args)

    async def run_to_the_end(self, call: Callable[..., Result], *args: Any) -> Result:
        """Make a call in the thread that the other ranks wait for: if the caller is cancelled, it takes effect after the call."""
        future = self.submit(call, *args)
        try:
            return await done(future)
        except asyncio.CancelledError:
            with suppress(Exception):
                await done(future)
            raise


class EngineThread:
    """Makes calls one after the other, in a daemon thread: a call that never ends does not keep the process alive."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._stopped = threading.Event()
        start(threading.Thread(target=self._run, args=(same_device(),), name="ckpt-engine", daemon=True))

    def submit(self, call: Callable[..., Result], *args: Any) -> Future[Result]:
        """Queue a call; return its future."""
        future: Future[Result] = Future()
        self._calls.put((future, lambda: call(*args)))
        return future

    def stop(self) -> None:
        """End after the call under way, and cancel those that are queued. Does not wait."""
        self._stopped.set()
        self._calls.put(None)

    def _run(self, begin: Callable[[], None]) -> None:
        begin()
        while (queued := self._calls.get()) is not None:
            future, call = queued
            if self._stopped.is_set():
                future.cancel()
                continue
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
            del queued, future, call  # a result may hold much memory until the next call


async def done(future: Future[Result], cancelled: Callable[[], object] = lambda: None) -> Result:
    """Wait for another thread, which goes on if this task is cancelled.

    Args:
        cancelled: called if it is.
    """
    loop, ended = asyncio.get_running_loop(), asyncio.Event()

    def tell(_: Future[Result]) -> None:
        with suppress(RuntimeError):  # the loop is closed, and no task waits
            loop.call_soon_threadsafe(ended.set)

    future.add_done_callback(tell)
    try:
        await ended.wait()
    except asyncio.CancelledError:
        cancelled()
        raise
    return future.result()


def own_store(timeout_s: float) -> tuple[TCPStore, str]:
    """Start a store for the ranks of an engine; return it, and the only address on which it listens.

    Raises:
        ConfigurationError: it cannot listen there.
    """
    address = own_address()
    try:
        return serve(address, timeout_s=timeout_s), address
    except OSError as error:
        raise ConfigurationError(
            f"no store can listen on {address}, this machine's address: {error}; name its interface by GLOO_SOCKET_IFNAME"
        ) from error
