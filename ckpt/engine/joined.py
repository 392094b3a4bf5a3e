"""The ranks of an engine: how they meet and part, the thread that speaks for one of them, and the settings of all that."""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Self, TypeVar

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistError

from ckpt.engine.base import CheckpointEngineWithCache, MasterMetadata
from ckpt.engine.engine_thread import EngineThread
from ckpt.engine.wire.layout import ALIGNED
from ckpt.errors import ConfigurationError, RankAbsentError
from ckpt.memory.device import Device
from ckpt.ranks.addresses import own_address
from ckpt.ranks.stores import StoreGoneError, reach, serve
from ckpt.ranks.topology import Topology

Result = TypeVar("Result")

_NEVER = ConfigurationError("the engine has not joined any ranks: call init_process_group first")
TOPOLOGY = "topology"
"""Where in an engine's store its ranks agree."""
_LINGER_S = 1.0
_LEAVE_S = 5.0


class JoinedEngine(CheckpointEngineWithCache):
    """One rank of an engine, whatever it does there.

    Ranks are 0 to T - 1 for trainers and T to T + R - 1 for rollouts; colocated, the same T ranks are both.

    All agreements are made by one thread of the engine's own, so that the event loop goes on.

    Args:
        bucket_size: bytes that travel at a time, at most; None: `bucket_mib`.
        bucket_mib: the same in MiB.
        device: whose memory the collectives move, and where weights are yielded; None: the host, by gloo.
        staging: copy the next bucket to or from the device while one is under way: two buckets of device memory, else one.
        memory_fraction: of the device's free memory that buckets may take; they become smaller where that is not enough.
        timeout_s: a rank that stands still for so long is absent.
        colocated: the trainers are the rollouts.
        rebuild_group: leave the other ranks in `finalize`, and join anew for the next update.
        is_master: this rank's `prepare` says where to meet. One rank is, the first trainer.

    Attributes:
        rank: of the engine.
        trainers, rollouts: the ranks that send, and that receive.
        topology: of all ranks; None: they are not joined.

    Raises:
        ConfigurationError: a value that cannot be.
    """

    def __init__(
        self,
        bucket_size: int | None = None,
        *,
        bucket_mib: float = 256,
        device: Device | None = None,
        staging: bool = True,
        memory_fraction: float = 0.9,
        timeout_s: float = 300.0,
        colocated: bool = False,
        rebuild_group: bool = False,
        is_master: bool = False,
    ) -> None:
        bucket_size = int(bucket_mib * 2**20) if bucket_size is None else bucket_size
        if bucket_size < ALIGNED:
            raise ConfigurationError(f"a bucket of {bucket_size} bytes is too small: give at least {ALIGNED}")
        if not 0 < memory_fraction <= 1:
            raise ConfigurationError(f"memory_fraction={memory_fraction}: expected more than 0 and at most 1")
        if not timeout_s > 0:
            raise ConfigurationError(f"timeout_s={timeout_s}: expected more than 0 seconds")
        self.device = device or Device(type="cpu", collectives="gloo")
        self.timeout_s = timeout_s
        self.colocated = colocated
        self.is_master = is_master
        self.rank = 0
        self.trainers = self.rollouts = range(0)
        self.topology: Topology | None = None
        self._bucket_size = bucket_size // ALIGNED * ALIGNED
        self._halves = 2 if staging else 1
        self._memory_fraction = memory_fraction
        self._rebuild_group = rebuild_group
        self._meeting: tuple[TCPStore, MasterMetadata] | None = None
        self._joined_as: tuple[Any, ...] | None = None
        self._store: Store | None = None
        self._thread: EngineThread | None = None
        self._cancelled = threading.Event()
        self._num_ended = 0

    @property
    def peers(self) -> Any:
        """JSON that tells a process that has not joined where it can read the newest version; None: nowhere."""
        return None

    def prepare(self) -> MasterMetadata | None:
        """See `CheckpointEngine.prepare`. The master's store is there from now on."""
        if not self.is_master:
            return None
        if self._meeting is None:
            store, address = own_store(self.timeout_s)
            self._meeting = store, MasterMetadata(address, store.port)
        return self._meeting[1]

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: Sequence[MasterMetadata | None]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """See `CheckpointEngine.build_topology`.

        Raises:
            ConfigurationError: no rank is the master.
        """
        masters = [given for given in metadata if given is not None]
        if not masters:
            raise ConfigurationError("no rank says where to meet: make the first trainer's engine with is_master=True")

        def of(ranks: range) -> dict[str, list[Any]]:
            return {
                "rank": list(ranks),
                "actor_wg_world_size": [actor_wg_world_size] * len(ranks),
                "rollout_world_size": [rollout_world_size] * len(ranks),
                "master_metadata": [masters[0]] * len(ranks),
            }

        return of(range(actor_wg_world_size)), of(range(actor_wg_world_size, actor_wg_world_size + rollout_world_size))

    def init_process_group(  # type: ignore[override]
        self,
        rank: int,
        actor_wg_world_size: int,
        rollout_world_size: int,
        master_metadata: MasterMetadata | None = None,
        *,
        store: Store | None = None,
        host: str | None = None,
    ) -> None:
        """Join the other ranks; torch's default process group is neither used nor needed. Does nothing if they are joined as given.

        Args:
            rank: 0 to T - 1 for trainers, then rollouts.
            master_metadata: what the master's `prepare` returned.
            store: in place of the master's: one that all ranks reach, and this engine alone uses.
            host: name of this host; None: its own.

        Raises:
            ConfigurationError: numbers that cannot be; on a colocated engine, other rollouts than trainers.
            RankAbsentError: a rank did not come.
        """
        world_size = actor_wg_world_size + (0 if self.colocated else rollout_world_size)
        if actor_wg_world_size < 1 or rollout_world_size < 1 or not 0 <= rank < world_size:
            raise ConfigurationError(
                f"rank {rank} of {actor_wg_world_size} trainers and {rollout_world_size} rollouts: each needs at least one"
            )
        if self.colocated and rollout_world_size != actor_wg_world_size:
            raise ConfigurationError(
                f"colocated, {actor_wg_world_size} trainers are as many rollouts, not {rollout_world_size}"
            )
        wanted = (rank, actor_wg_world_size, rollout_world_size, master_metadata, store)
        if self._joined_as == wanted:
            return
        if self._joined_as is not None:
            raise ConfigurationError(
                f"the engine has joined {len(self.trainers)} trainers and {len(self.rollouts)} rollouts: call leave() on every rank "
                "before it joins others, or make it with rebuild_group=True"
            )
        self.rank = rank
        self.trainers = range(actor_wg_world_size)
        self.rollouts = self.trainers if self.colocated else range(actor_wg_world_size, world_size)
        self._thread = EngineThread()
        try:
            self._submit(self._join, world_size, store, master_metadata, host).result()
        except BaseException:
            self.leave()
            raise
        self._joined_as = wanted

    def finalize(self) -> None:
        """See `CheckpointEngine.finalize`. Weights that came and were not taken fail the update on all ranks."""
        if self._thread is not None:
            self._submit(self._settle)
        if self._rebuild_group:
            self.leave()

    def leave(self) -> None:
        """Leave the other ranks, waiting for none of them; any may be gone. What is held is kept, and other ranks can be joined.

        A call that is under way is waited for a moment; one that is stuck is left to itself.
        """
        thread, self._thread = self._thread, None
        if thread is not None:
            self._cancelled.set()
            try:
                with suppress(TimeoutError):
                    thread.submit(self._part).result(_LEAVE_S)
            finally:
                thread.stop()
                topology, self.topology = self.topology, None
                self._meeting = self._joined_as = None
                self._forget_update()
                if topology is not None:
                    topology.close()

    def close(self) -> None:
        """Leave the other ranks and let go of all memory."""
        self.leave()
        self._store = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _join(self, world_size: int, store: Store | None, master: MasterMetadata | None, host: str | None) -> None:
        store = store or self._store_of(master)
        self._store = store
        self._cancelled.clear()
        self._num_ended = 0
        self.topology = Topology.join(
            PrefixStore(TOPOLOGY, store), self.rank, world_size, host=host, timeout_s=self.timeout_s
        )
        with self.topology.operation("the join of trainers and rollouts"):
            with self.topology.phase("agree on the buckets") as phase:
                phase.payload = [self._room_for_buckets(), uuid.uuid4().hex]
            self._bucket_bytes = min(room for room, _ in phase.payloads)
            self._groups_name = f"ckpt-engine-{phase.payloads[0][1]}"
            self._join_update(self.topology, store)

    def _part(self) -> None:
        """The end of the engine's thread."""
        self._settle()
        if self.topology is not None:
            try:
                self._leave_update()
            finally:
                self._linger(self.topology.world_size)

    def _linger(self, world_size: int) -> None:
        """The store that the ranks agree through goes with this process: let the others read how the last update ended."""
        if self._meeting is None or not self._num_ended:
            return
        store, until = self._meeting[0], time.monotonic() + _LINGER_S
        for key in [f"ended/{rank}" for rank in range(world_size)]:
            while not store.check([key]) or int(store.get(key)) < self._num_ended:
                if time.monotonic() > until:
                    return  # it is gone, or in no hurry
                time.sleep(0.005)

    def _say_ended(self) -> None:
        self._num_ended += 1
        if self._store is not None:
            with suppress(DistError):
                self._store.set(f"ended/{self.rank}", str(self._num_ended))

    def _store_of(self, master: MasterMetadata | None) -> Store:
        if master is None:
            raise ConfigurationError("the engine is not told where to meet: give master_metadata or a store")
        if self._meeting is not None:
            return self._meeting[0]
        try:
            return reach(master.address, master.port, timeout_s=self.timeout_s)
        except StoreGoneError as error:
            raise RankAbsentError(
                f"rank {self.rank} cannot reach the first trainer's store at {master.address}:{master.port}"
            ) from error

    def _room_for_buckets(self) -> int:
        """Bytes that a bucket may have on this rank's device, all halves considered."""
        if self.device.type == "cpu":
            return self._bucket_size
        room = int(self.device.memory().free * self._memory_fraction) // self._halves // ALIGNED * ALIGNED
        return min(self._bucket_size, max(room, ALIGNED))

    # What the update has to do with it

    @abstractmethod
    def _join_update(self, topology: Topology, store: Store) -> None:
        """Get ready for updates among ranks that have just joined. All call it, within an operation; it may have phases."""

    @abstractmethod
    def _leave_update(self) -> None:
        """Let go of what is between the ranks; any may be gone."""

    @abstractmethod
    def _settle(self) -> None:
        """Fail an update that is open still, and wait for nobody."""

    @abstractmethod
    def _forget_update(self) -> None:
        """Take it that none is open; the thread that knows of one may be stuck."""

    # The engine's thread

    def _topology(self) -> Topology:
        if self.topology is None:
            raise _NEVER
        return self.topology

    def _submit(self, call: Callable[..., Result], *args: Any) -> Future[Result]:
        """Queue for the engine's thread."""
        if self._thread is None:
            raise _NEVER
        return self._thread.submit(call, *args)

    async def _run(self, call: Callable[..., Result], *args: Any) -> Result:
        """Run in the engine's thread, while the event loop goes on. A caller that is cancelled fails the update at its next phase."""
        future = self._submit(call, *args)
        try:
            return await done(future)
        except asyncio.CancelledError:
            self._cancelled.set()
            self._submit(self._settle)
            raise

    async def _run_to_the_end(self, call: Callable[..., Result], *args: Any) -> Result:
        """The same for what the others count on: a caller that is cancelled is so when it is done."""
        future = self._submit(call, *args)
        try:
            return await done(future)
        except asyncio.CancelledError:
            with suppress(Exception):
                await done(future)
            raise


async def done(future: Future[Result]) -> Result:
    """Wait for another thread, which goes on if this task is cancelled."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()

    def tell(_: Future[Result]) -> None:
        with suppress(RuntimeError):  # the loop is closed, and nobody waits
            loop.call_soon_threadsafe(ended.set)

    future.add_done_callback(tell)
    await ended.wait()
    return future.result()


def own_store(timeout_s: float) -> tuple[TCPStore, str]:
    """Hold a store for the ranks of an engine, and return it with the one address on which it listens.

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
