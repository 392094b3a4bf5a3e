"""What all engines have in common: an update is staged, verified and voted on by all ranks before any rollout changes.

    trainers   yield -> host pool, digests     \\                       / version
                                                 agree -> carry -> agree
    rollouts   does it fit the model? room     /      verify each bucket \\ live model, version

Every phase ends in an agreement (ckpt/topology.py): one rank that fails, or is gone, fails the update on all of them, in one
sentence, and everybody keeps the weights and the version it had. The commit is the agreement behind the last bucket.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
import uuid
from abc import abstractmethod
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from fnmatch import fnmatchcase
from typing import Any, NoReturn, Protocol, Self, TypeVar

import torch
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistError

from ckpt.device import Device, device_memory, wait_for
from ckpt.dtypes import is_dtensor
from ckpt.engine.base import (
    CheckpointEngineWithCache,
    MasterMetadata,
    NamedTensor,
    SyncReport,
    WeightVersion,
)
from ckpt.engine.engine_thread import EngineThread
from ckpt.engine.layout import ALIGNED, WeightLayout, aligned, take_turns
from ckpt.engine.pool import HostPool, Landing
from ckpt.engine.transfer import PHASE
from ckpt.errors import CheckpointError, ConfigurationError, RankAbsentError, ReplicationError
from ckpt.manifest import digest_of
from ckpt.topology import Topology

Result = TypeVar("Result")

_FLOATS = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in _FLOATS}
_NEVER = ConfigurationError("the engine has not joined any ranks: call init_process_group first")
_PAUSE_EVERY = 16  # tensors after which a sender's event loop may do something else
_WHAT = "the weight update"
_LINGER_S = 1.0
_LEAVE_S = 5.0


class Sink(Protocol):
    """What takes weights that have come: `ckpt.engine.live.LiveModel`, or another of its kind."""

    def check(self, layout: WeightLayout) -> None:
        """Refuse what does not fit, before a byte moves."""

    def load(self, weights: Iterable[NamedTensor], version: WeightVersion) -> None:
        """Take whole tensors on the host, all at once. Does not fail for what `check` has passed."""


@dataclass
class _Offloaded:
    """What one trainer has on its host.

    Attributes:
        began: the call, by the clock of `time.perf_counter`.
        error: why it has nothing.
    """

    layout: WeightLayout
    began: float
    digests: dict[int, str] = field(default_factory=dict)
    error: Exception | None = None
    seconds: float = 0.0


@dataclass
class Update:
    """One update under way on one rank.

    Attributes:
        layout, version: of what comes.
        topology, context: the operation, open until the weights are loaded.
        seconds: of this rank, by the field of `SyncReport`.
    """

    layout: WeightLayout
    version: WeightVersion
    digests: dict[int, str]
    topology: Topology
    context: ExitStack = field(default_factory=ExitStack)
    seconds: dict[str, float] = field(default_factory=dict)


class VersionedEngine(CheckpointEngineWithCache):
    """The update, whoever carries the bytes.

    Ranks of the engine are 0 to T - 1 for trainers and T to T + R - 1 for rollouts; colocated, the same T ranks are both: they
    call `send_weights`, and then `receive_weights` or `receive_into`.

    All agreements are made by one thread of the engine's own, so that the event loop goes on. What a coroutine of a rank raises,
    those of all others do. One that is cancelled fails the update on all ranks, as long as nothing has been committed.

    Args:
        bucket_size: bytes that travel at a time, at most; None: `bucket_mib`.
        bucket_mib: the same in MiB.
        device: whose memory the collectives move, and where weights are yielded; None: the host, by gloo.
        staging: copy the next bucket to or from the device while one is under way: two buckets of device memory, else one.
        memory_fraction: of the device's free memory that buckets may take; they become smaller where that is not enough.
        timeout_s: a rank that stands still for so long is absent.
        rollout_dtype: floating point weights travel as this type, except float8; None: as they are. Other types always do.
        keep_dtype: patterns such as "*.router.weight" of names that travel as they are all the same.
        colocated: the trainers are the rollouts.
        cached: keep the newest version while the next one comes, for `get_weights`; takes its size once more in host memory.
        rebuild_group: leave the other ranks in `finalize`, and join anew for the next update.
        is_master: this rank's `prepare` says where to meet. One rank is, the first trainer.

    Attributes:
        rank: of the engine.
        trainers, rollouts: the ranks that send, and that receive.
        version: the newest that all ranks have; None before the first.
        report: figures of the last update.

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
        rollout_dtype: str | torch.dtype | None = None,
        keep_dtype: Sequence[str] = (),
        colocated: bool = False,
        cached: bool = False,
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
        self.version: WeightVersion | None = None
        self.report: SyncReport | None = None
        self.topology: Topology | None = None
        self._bucket_size = bucket_size // ALIGNED * ALIGNED
        self._halves = 2 if staging else 1
        self._memory_fraction = memory_fraction
        self._rollout_dtype = _float_type(rollout_dtype)
        self._keep_dtype = tuple(keep_dtype)
        self._rebuild_group = rebuild_group
        self.rank = 0
        self.trainers = self.rollouts = range(0)
        self._landings = [Landing() for _ in range(1 + cached)]
        self._held: WeightVersion | None = None  # of the weights in the second landing
        self._pool: HostPool | None = None
        self._known: WeightLayout | None = None
        self._update: Update | None = None
        self._meeting: tuple[TCPStore, MasterMetadata] | None = None
        self._joined_as: tuple[Any, ...] | None = None
        self._store: Store | None = None
        self._thread: EngineThread | None = None
        self._cancelled = threading.Event()
        self._num_ended = 0
        self._generation = 0  # of connections

    # Joining

    def prepare(self) -> MasterMetadata | None:
        """See `CheckpointEngine.prepare`. The master's store is there from now on."""
        if not self.is_master:
            return None
        if self._meeting is None:
            store = TCPStore(
                "0.0.0.0", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=self.timeout_s)
            )
            self._meeting = store, MasterMetadata(_own_address().strip("[]"), store.port)
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
                self._meeting = self._update = self._joined_as = None
                if topology is not None:
                    topology.close()

    def close(self) -> None:
        """Leave the other ranks and let go of all memory."""
        self.leave()
        self._store = self._pool = None
        for landing in self._landings:
            landing.let_go()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _join(self, world_size: int, store: Store | None, master: MasterMetadata | None, host: str | None) -> None:
        store = store or self._store_of(master)
        self._store = store
        self._cancelled.clear()
        self._num_ended = 0
        self._generation = 0  # of connections
        self.topology = Topology.join(
            PrefixStore("topology", store), self.rank, world_size, host=host, timeout_s=self.timeout_s
        )
        with self.topology.operation("the join of trainers and rollouts"):
            with self.topology.phase("agree on the buckets") as phase:
                phase.payload = [self._room_for_buckets(), uuid.uuid4().hex]
            self._bucket_bytes = min(room for room, _ in phase.payloads)
            self._groups_name = f"ckpt-engine-{phase.payloads[0][1]}"
            self._join_transport(store)
        self._known = None
        self._pool = None
        self._sends_as = self.rank
        self._turns = self._owners(self.topology)

    def _part(self) -> None:
        """The end of the engine's thread."""
        self._settle()
        if self.topology is not None:
            try:
                self._leave_transport()
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
            return TCPStore(
                master.address,
                master.port,
                is_master=False,
                wait_for_workers=False,
                timeout=timedelta(seconds=self.timeout_s),
            )
        except DistError as error:
            raise RankAbsentError(
                f"rank {self.rank} cannot reach the first trainer's store at {master.address}:{master.port}"
            ) from error

    def _room_for_buckets(self) -> int:
        """Bytes that a bucket may have on this rank's device, all halves considered."""
        if self.device.type == "cpu":
            return self._bucket_size
        room = int(self.device.memory().free * self._memory_fraction) // self._halves // ALIGNED * ALIGNED
        return min(self._bucket_size, max(room, ALIGNED))

    def _owners(self, topology: Topology) -> list[int]:
        """The ranks that send, in turn."""
        return take_turns(topology.nodes, self.trainers)

    # The transport

    @abstractmethod
    def _join_transport(self, store: Store) -> None:
        """Get ready to carry bytes between the ranks. All ranks call it; it may have phases."""

    @abstractmethod
    def _leave_transport(self) -> None:
        """Let go of that."""

    @abstractmethod
    def _ready(self, layout: WeightLayout, pool: HostPool | None) -> None:
        """Get ready for a layout that is new, or for the first time. All ranks call it; it may have phases."""

    @abstractmethod
    def _carry(self, update: Update, pool: HostPool | None, landing: Landing | None) -> None:
        """Bring every bucket to every rollout, and verify it there. All ranks call it, within a phase.

        Raises:
            CorruptCheckpointError: a bucket has changed on the way.
            RankLeftError: another rank is gone.
        """

    @abstractmethod
    def _reset_transport(self) -> None:
        """Forget what a carry that failed, here or elsewhere, has left. Any rank may be gone; waits for none."""

    # Sending

    async def send_weights(
        self, weights: Iterable[NamedTensor] | AsyncIterable[NamedTensor], global_steps: int | None = None
    ) -> dict[str, Any]:
        """See `CheckpointEngine.send_weights`. What is owned is copied to the host before the next tensor is asked for, or queued.

        Args:
            weights: names and tensors of any strides, on any device, DTensors too (whose gathering is collective: every trainer
                takes all of them). May have `tied_names`, {alias: name}: rollouts get the alias, too, and it does not travel.
            global_steps: the step after which these are the weights; higher than that of the last update.

        Raises:
            CheckpointError: the update failed, on all ranks; everybody keeps what it had.
        """
        topology = self._topology()
        if self.rank not in self.trainers:
            raise ConfigurationError(f"rank {self.rank} is a rollout, and sends nothing: it calls receive_weights")
        await self._run(self._begin)
        if global_steps is None:
            global_steps = 1 if self.version is None else self.version.step + 1
        try:
            offloaded = await self._offload(weights, topology)
        except BaseException:  # of the program, and no matter of the weights
            self._submit(self._decline)
            raise
        await self._run(self._agree_and_carry, global_steps, offloaded, None)
        if self.colocated:
            return {}
        report = await self._run_to_the_end(self._finish, self._update, None, offloaded.began)
        return report.as_dict()

    async def _offload(
        self, weights: Iterable[NamedTensor] | AsyncIterable[NamedTensor], topology: Topology
    ) -> _Offloaded:
        """Take all weights; copy those parts to the host that this rank owns. What goes wrong is told to all ranks afterwards."""
        began = time.perf_counter()
        pool = self._pool = self._pool or HostPool(self._sends_as, self._bucket_bytes)
        layout = WeightLayout(self._bucket_bytes, self._turns, getattr(weights, "tied_names", {}))
        found = _Offloaded(layout, began)
        try:
            async for number, (name, tensor) in _numbered(weights):
                # A failure of ours is no reason not to take the rest: the others' exports wait for ours.
                whole = tensor.detach().full_tensor() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]
                if found.error is None:
                    try:
                        pool.put(layout, layout.add(name, self.travels_as(name, whole.dtype), whole.shape), whole)
                    except Exception as error:
                        found.error = error
                topology.progress()
                if number % _PAUSE_EVERY == 0:
                    await asyncio.sleep(0)
            if found.error is None:
                found.digests = await self._run(pool.seal, layout)
        except Exception as error:
            found.error = found.error or error
        found.seconds = time.perf_counter() - began
        return found

    def travels_as(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """The type in which a weight of this name and type reaches the rollouts."""
        if self._rollout_dtype is None or dtype not in _FLOATS:
            return dtype
        kept = any(fnmatchcase(name, pattern) for pattern in self._keep_dtype)
        return dtype if kept else self._rollout_dtype

    # Receiving

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[NamedTensor]:
        """Yield the weights of an update that all ranks have committed, on the engine's device. All rollouts call it.

        Nothing is yielded before the last bucket has been verified everywhere. A tensor is a view of memory that is used again:
        copy it before the next one is asked for. A consumer that stops early, or raises, fails the update on all ranks; use
        `contextlib.aclosing`, lest they learn it late.

        Args:
            global_steps: the step that is expected; None: any.

        Raises:
            CheckpointError: the update failed, on all ranks.
        """
        landing = await self._received(global_steps, None)
        update, topology, began, taken = self._update, self._topology(), time.perf_counter(), 0
        try:
            for named in self._on_device(landing):
                yield named
                taken += 1
                topology.progress()
        except Exception as error:
            await self._run_to_the_end(self._fail, update, error)
            raise
        except BaseException:
            if self._thread is not None:
                self._submit(self._withdraw, update, f"the consumer of the weights stopped after {taken} of them")
            raise
        await self._run_to_the_end(self._finish, update, began, None)

    async def receive_into(self, sink: Sink, global_steps: int | None = None) -> dict[str, Any]:
        """Receive an update into a live model: all of it, or nothing. All rollouts call it, or `receive_weights`.

        Returns:
            the figures of the update.

        Raises:
            CheckpointError: the update failed, on all ranks; the model is as it was.
        """
        landing = await self._received(global_steps, sink)
        began = time.perf_counter()
        report = await self._run_to_the_end(self._load, sink, landing, began)
        return report.as_dict()

    async def get_weights(self) -> AsyncIterator[NamedTensor]:
        """Yield the newest version that has come whole, whatever is under way. Local.

        Raises:
            ConfigurationError: the engine keeps nothing, or nothing has come.
        """
        if len(self._landings) < 2:
            raise ConfigurationError("this engine keeps no weights: make it with cached=True")
        if self._held is None:
            raise ConfigurationError("no weights have come yet")
        for named in self._on_device(self._landings[1]):
            yield named

    async def _received(self, global_steps: int | None, sink: Sink | None) -> Landing:
        self._topology()
        if self.rank not in self.rollouts:
            raise ConfigurationError(f"rank {self.rank} is a trainer, and receives nothing: it calls send_weights")
        if not self.colocated:
            await self._run(self._begin)
            await self._run(self._agree_and_carry, global_steps, None, sink)
        elif self._update is None:
            raise ConfigurationError("nothing has been sent: colocated, send_weights comes first")
        elif sink is not None:
            await self._run(self._check_late, sink)
        return self._landings[0]

    def _check_late(self, sink: Sink) -> None:
        """Colocated, the sink comes when everything has been carried."""
        update = self._update
        topology = self._still_open(update).topology
        assert update is not None
        try:
            with topology.phase("check"):
                self._require_wanted(topology)
                sink.check(update.layout)
        except CheckpointError as error:
            self._close_update(update, error)
            raise

    def _on_device(self, landing: Landing) -> Iterator[NamedTensor]:
        """Host weights on the engine's device, through memory that is used again."""
        if self.device.type == "cpu":
            yield from landing.weights()
            return
        device = self.device.torch_device
        ring = device_memory(0, device)
        used = 0
        for name, host in landing.weights():
            if used + aligned(host.nbytes) > len(ring):
                wait_for(device)  # whoever copies from what was yielded has done so
                if len(ring) < aligned(host.nbytes):
                    ring = device_memory(max(aligned(host.nbytes), self._bucket_bytes), device)
                used = 0
            there = ring[used : used + host.nbytes].view(host.dtype).view(host.shape)
            there.copy_(host, non_blocking=True)
            wait_for(device)
            used += aligned(host.nbytes)
            yield name, there
        wait_for(device)  # the same, of the last

    # The update, in the engine's thread

    def _agree_and_carry(self, step: int | None, offloaded: _Offloaded | None, sink: Sink | None) -> None:
        """Everything up to the commit. Collective."""
        topology = self._topology()
        pool = self._pool if self.rank in self.trainers else None
        landing = self._landings[0] if self.rank in self.rollouts else None
        with ExitStack() as context:
            context.callback(self._say_ended)
            context.enter_context(topology.operation(_WHAT))  # alike on all ranks, whether they know the step or not
            context.push(self._forget_layout)
            with topology.phase("offload") as phase:
                phase.payload = self._offer(topology, step, offloaded, landing, sink)
            began = time.perf_counter()
            context.enter_context(topology.operation(_to_step(phase.payloads)))
            sent = offloaded.layout if offloaded is not None else None
            update = self._prepare(topology, phase.payloads, sent, landing, pool, sink)
            gathered = time.perf_counter()
            with topology.phase(PHASE):
                self._require_wanted(topology)
                update = update or self._agreed(phase.payloads)
                self._carry(update, pool, landing)
            carried = time.perf_counter()
            update.seconds = {"gather_s": gathered - began, "transfer_s": carried - gathered}
            if offloaded is not None:
                update.seconds |= {"offload_s": offloaded.seconds, "blocked_s": carried - offloaded.began}
            update.context = context.pop_all()
            self._update = update

    def _forget_layout(self, kind: object, *_: object) -> None:
        """After a failure, on all ranks: the next update tells its layout anew, and through new connections."""
        if kind is not None:
            self._known = None
            self._generation += 1
            self._reset_transport()

    def _offer(
        self,
        topology: Topology,
        step: int | None,
        offloaded: _Offloaded | None,
        landing: Landing | None,
        sink: Sink | None,
    ) -> dict[str, Any]:
        """What this rank has to say: which weights it sends, and which it could take at once."""
        self._require_wanted(topology)
        if offloaded is not None and offloaded.error is not None:
            raise offloaded.error
        said: dict[str, Any] = {"step": step, "held": self.version.step if self.version else None}
        said |= {"fits": self._fits(landing, sink), "generation": self._generation}
        said["known"] = self._known.digest() if self._known is not None else None
        if offloaded is None:
            return said
        layout = offloaded.layout
        return said | {
            "layout": layout.digest(),
            "size": [len(layout.weights), layout.payload_bytes],
            "digests": sorted(offloaded.digests.items()),
        }

    def _fits(self, landing: Landing | None, sink: Sink | None) -> str | None:
        """The digest of the last layout, if it could be taken again."""
        if self._known is None:
            return None
        try:
            _make_ready(self._known, landing, sink)
        except Exception:
            return None  # should it come again, that is said
        return self._known.digest()

    def _prepare(
        self,
        topology: Topology,
        said: Sequence[Mapping[str, Any]],
        sent: WeightLayout | None,
        landing: Landing | None,
        pool: HostPool | None,
        sink: Sink | None,
    ) -> Update | None:
        """See that all rollouts can take what comes; None: they have said so already."""
        generation, layout = max(one["generation"] for one in said), said[0]["layout"]
        new = any((one["known"], one["generation"]) != (layout, generation) for one in said)
        if self._generation < generation:  # a failure of the others' has passed this rank by
            self._generation = generation
            self._reset_transport()
        if not new and all(one["fits"] == layout for one in said):
            return None
        if new:
            with topology.phase("layout") as phase:
                phase.payload = sent.as_rows() if topology.is_lead and sent is not None else None
            self._known = WeightLayout.from_rows(phase.payloads[0])
        with topology.phase("prepare"):
            self._require_wanted(topology)
            update = self._agreed(said)
            _make_ready(update.layout, landing, sink)
        if new:
            self._ready(update.layout, pool)
        return update

    def _agreed(self, said: Sequence[Mapping[str, Any]]) -> Update:
        """What comes, from what all have said; the same on all ranks, errors too."""
        step = _agreed_step(said)
        _require_one_layout([said[rank] for rank in self.trainers])
        layout = self._known
        assert layout is not None, "whoever does not know it is told"
        digests = _agreed_digests([said[rank]["digests"] for rank in self.trainers], layout)
        version = WeightVersion(step, _version_digest(layout, digests))
        return Update(layout, version, digests, self._topology())

    def _load(self, sink: Sink, landing: Landing, began: float) -> SyncReport:
        update = self._update
        assert update is not None
        try:
            sink.load(_noticed(landing.weights(), update.topology), update.version)
        except Exception as error:
            self._fail(update, error)
        return self._finish(update, began, None)

    def _finish(self, update: Update | None, reload_began: float | None, send_began: float | None) -> SyncReport:
        """The weights are where they shall be, on this rank: see that it is so on all. Collective."""
        topology = self._still_open(update).topology
        assert update is not None
        now = time.perf_counter()
        update.seconds["reload_s"] = 0.0 if reload_began is None else now - reload_began
        try:
            with topology.phase("load") as phase:
                phase.stands = f"all rollouts have received the weights of step {update.version.step}"
                if send_began is not None:
                    update.seconds["blocked_s"] = time.perf_counter() - send_began
                phase.payload = update.seconds
        except BaseException as error:
            self._close_update(update, error)
            raise
        self._close_update(update, None)
        self.version = update.version
        if len(self._landings) > 1 and self.rank in self.rollouts:
            self._landings.reverse()
            self._held = update.version
        slowest = {
            name: max(said.get(name, 0.0) for said in phase.payloads)
            for name in ("offload_s", "gather_s", "transfer_s", "reload_s", "blocked_s")
        }
        self.report = SyncReport(
            step=update.version.step,
            num_tensors=len(update.layout.weights),
            num_bytes=update.layout.payload_bytes,
            num_buckets=update.layout.num_buckets,
            **slowest,
        )
        return self.report

    def _fail(self, update: Update | None, error: Exception) -> NoReturn:
        """Fail an update that all have received, for it could not be loaded here. Collective; raises what all ranks raise."""
        topology = self._still_open(update).topology
        try:
            with topology.phase("load"):
                raise error
        except BaseException as told:
            self._close_update(update, told)
            raise

    def _still_open(self, update: Update | None) -> Update:
        if update is None or self._update is not update:
            raise CheckpointError("the weights that came were taken too late: the update has failed without this rank")
        return update

    def _close_update(self, update: Update | None, error: BaseException | None) -> None:
        """Leave the operation, as its block would be left."""
        if update is not None and self._update is update:
            self._update = None
            update.context.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)

    # Updates that somebody does not want any more

    def _require_wanted(self, topology: Topology) -> None:
        if self._cancelled.is_set() or self.topology is not topology:
            raise CheckpointError("the call was cancelled")

    def _withdraw(self, update: Update | None, why: str) -> None:
        """Fail an update if it is open still: tell the others, and wait for none of them."""
        self._close_update(update, asyncio.CancelledError(why))

    def _decline(self) -> None:
        """Tell the others that this rank does not come to an update."""
        with suppress(asyncio.CancelledError), ExitStack() as context:
            context.callback(self._say_ended)
            context.enter_context(self._topology().operation(_WHAT))
            context.push(self._forget_layout)
            raise asyncio.CancelledError("the call was cancelled")

    def _settle(self) -> None:
        """Clean up behind calls that were cancelled, consumers that have gone, an error of the program between two calls."""
        self._withdraw(self._update, "the weights that came were not taken")
        self._cancelled.clear()

    # Helpers

    def _topology(self) -> Topology:
        if self.topology is None:
            raise _NEVER
        return self.topology

    def _begin(self) -> None:
        """Have nothing open from the update before."""
        if self._update is not None and self.colocated and not self._cancelled.is_set():
            raise ConfigurationError(
                f"the weights of step {self._update.version.step} have come and have not been taken: colocated, each "
                "send_weights is followed by receive_weights or receive_into"
            )
        self._settle()

    def _submit(self, call: Callable[..., Result], *args: Any) -> Future[Result]:
        """Queue for the engine's thread."""
        if self._thread is None:
            raise _NEVER
        return self._thread.submit(call, *args)

    async def _run(self, call: Callable[..., Result], *args: Any) -> Result:
        """Run in the engine's thread, while the event loop goes on. A caller that is cancelled fails the update at its next phase."""
        future = self._submit(call, *args)
        try:
            return await _done(future)
        except asyncio.CancelledError:
            self._cancelled.set()
            self._submit(self._settle)
            raise

    async def _run_to_the_end(self, call: Callable[..., Result], *args: Any) -> Result:
        """The same for what the others count on: a caller that is cancelled is so when it is done."""
        future = self._submit(call, *args)
        try:
            return await _done(future)
        except asyncio.CancelledError:
            with suppress(Exception):
                await _done(future)
            raise


async def _done(future: Future[Result]) -> Result:
    """Wait for another thread, which goes on if this task is cancelled."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()

    def tell(_: Future[Result]) -> None:
        with suppress(RuntimeError):  # the loop is closed, and nobody waits
            loop.call_soon_threadsafe(done.set)

    future.add_done_callback(tell)
    await done.wait()
    return future.result()


def _float_type(given: str | torch.dtype | None) -> torch.dtype | None:
    name = None if given is None else str(given).removeprefix("torch.")
    if name is None or name in _DTYPES:
        return _DTYPES[name] if name else None
    raise ConfigurationError(f"rollout_dtype={name}: expected one of {', '.join(sorted(_DTYPES))}, or null")


async def _numbered(
    weights: Iterable[NamedTensor] | AsyncIterable[NamedTensor],
) -> AsyncIterator[tuple[int, NamedTensor]]:
    number = 0
    if isinstance(weights, AsyncIterable):
        async for named in weights:
            number += 1
            yield number, named
    else:
        for named in weights:
            number += 1
            yield number, named


def _to_step(said: Sequence[Mapping[str, Any]]) -> str:
    return f"{_WHAT} to step {next(one['step'] for one in said if one['step'] is not None)}"


def _make_ready(layout: WeightLayout, landing: Landing | None, sink: Sink | None) -> None:
    """See that a rollout can take weights."""
    if sink is not None:
        sink.check(layout)
    if landing is not None:
        landing.make_room(layout)


def _noticed(weights: Iterable[NamedTensor], topology: Topology) -> Iterator[NamedTensor]:
    """Every weight that is taken is a move."""
    for named in weights:
        yield named
        topology.progress()


def _version_digest(layout: WeightLayout, digests: Mapping[int, str]) -> str:
    return digest_of("\n".join([layout.digest(), *(digests[bucket] for bucket in sorted(digests))]).encode())


def _agreed_step(said: Sequence[Mapping[str, Any]]) -> int:
    """The step of an update, which everybody has to know alike, and which only ever rises."""
    steps = {one["step"]: rank for rank, one in reversed([*enumerate(said)]) if one["step"] is not None}
    if len(steps) > 1:
        (first, rank), (second, other) = sorted(steps.items(), key=lambda item: item[1])[:2]
        raise ConfigurationError(f"rank {rank} is at step {first} and rank {other} at step {second}")
    step = next(iter(steps))
    held = max((one["held"] for one in said if one["held"] is not None), default=None)
    if held is not None and step <= held:
        raise ConfigurationError(
            f"the weights of step {held} have been published, and those of step {step} come after them"
        )
    return int(step)


def _require_one_layout(said: Sequence[Mapping[str, Any]]) -> None:
    for rank, one in enumerate(said):
        if one["layout"] != said[0]["layout"]:
            (num, size), (num_0, size_0) = one["size"], said[0]["size"]
            raise ConfigurationError(
                f"trainers yield different weights: {num_0} tensors of {size_0} bytes on rank 0, {num} of {size} bytes on rank "
                f"{rank}, or others, or in another order; each has to yield all of them, in one order"
            )


def _agreed_digests(said: Sequence[Sequence[tuple[int, str]]], layout: WeightLayout) -> dict[int, str]:
    """The digest of every bucket. Where several trainers have one, they have to agree."""
    found: dict[int, tuple[str, int]] = {}
    for rank, rows in enumerate(said):
        for bucket, digest in rows:
            first, of = found.setdefault(bucket, (digest, rank))
            if first != digest:
                raise ReplicationError(
                    f"trainers {of} and {rank} yield other bits of the same weights, in bucket {bucket} with "
                    f"{', '.join(layout.weights_in(bucket)[:3])}"
                )
    return {bucket: digest for bucket, (digest, _) in found.items()}


def _own_address() -> str:
    """An address under which other hosts reach this one; its name, if that cannot be known."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing: the system only picks the interface
            return str(probe.getsockname()[0])
        except OSError:
            return socket.gethostname()
