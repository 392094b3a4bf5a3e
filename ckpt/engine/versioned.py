"""The engine: an update is copied to hosts, transferred, verified and agreed on by all ranks before any rollout changes.

    trainers   weights -> host pool, digests     \\                       / version
                                                   agree -> carry -> agree
    rollouts   does it fit the model? memory     /      verify each bucket \\ live model, version

Each phase ends in an agreement (ckpt/ranks/topology.py): if one rank fails, or is gone, the update fails on all ranks with the same error,
and each keeps its weights and its version. The commit is the agreement after the last bucket.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch.distributed import Store

from ckpt.engine.agreed import OPERATION, agreed_digests, agreed_step, require_one_layout, to_step, version_digest
from ckpt.engine.base import CheckpointEngineWithCache, MasterMetadata, NamedTensor, SyncReport, Weights, WeightVersion
from ckpt.engine.members import Members, Place, Result, done
from ckpt.engine.offload import Offloaded, TravelTypes
from ckpt.engine.stream import OpenUpdate, WeightStream, on_device
from ckpt.engine.update import Sink, Transport, Update
from ckpt.engine.wire.buffers import Buckets
from ckpt.engine.wire.delta import BLOCK_KIB, agreed_changes, require_one_block
from ckpt.engine.wire.layout import WeightLayout
from ckpt.engine.wire.pool import HostPool, ReceivedStream, digest_of_bucket
from ckpt.engine.wire.receivers import Receivers, agreed_sharing
from ckpt.engine.wire.transfer import PHASE
from ckpt.errors import CheckpointError, ConfigurationError, refused
from ckpt.memory.device import Device
from ckpt.ranks.merging import least, most
from ckpt.ranks.topology import Topology
from ckpt.state.abilities import tied_names
from ckpt.storage.files import Closed
from ckpt.storage.host_memory import can_be_shared

_SECONDS = ("offload_s", "gather_s", "transfer_s", "reload_s", "blocked_s")


class VersionedEngine(CheckpointEngineWithCache, Closed):
    """An engine of any transport: its members, the host memory of both ends, and the update.

    Trainers call `send_weights`, rollouts `receive_weights` or `receive_into`; colocated, each rank calls one and then the other. If one
    rank's coroutine raises, those of all ranks raise the same error. A cancelled one fails the update on all ranks, until the commit.

        settled ---- begin ----> agreeing ---- commit ----> open ---- finish ----> settled
        version n                   |                         |                    version n + 1
           ^                        |                         |
           +------------------------+------- any failure -----+

    - agreeing: all ranks agree on step, layout and digests, and the transport carries the buckets.
    - commit: each bucket has been verified in the memory of each rollout.
    - open: the rollouts load the weights, and trainers wait.
    - finish: all rollouts have loaded them.
    - failure: a rank raises, is cancelled or is gone. All ranks keep version n; the next update sends everything, over new connections.

    `_update` is the whole path from left to right. While the update is open it is suspended at its `yield`.

    Rollouts of one host share one copy of the weights in host memory: the first of them receives and verifies it, the others map it. Those
    that may write to what they are given do not: with `cached`, and where `receive_weights` yields host tensors, or, colocated, could.

    Args:
        bucket_size: size of a bucket in bytes, at most; None: `bucket_mib`.
        bucket_mib: the same in MiB.
        device, staging, memory_fraction: see `Buckets`; weights are yielded on that device.
        timeout_s, colocated, is_master: see `Members`.
        rebuild_group: leave the other ranks in `finalize`, and join again for the next update.
        rollout_dtype: type in which floating point weights travel, except float8; None: unchanged. Other types are never cast.
        keep_dtype: patterns of names, such as "*.router.weight", that travel unchanged.
        cached: keep the newest version while the next one arrives, for `get_weights`; doubles a rollout's host memory.
        delta: send only what has changed since the last update, if all ranks hold that; else everything: at first, with another layout,
            and after an update that failed. Rollouts verify all bytes in any case. The next update builds on the host tensors that
            `receive_weights` yields: do not write to them. Takes up to 4/3 of a bucket more host memory. Equal on all ranks.
        delta_block_kib: size of the blocks that are compared and sent; equal on all ranks. Digests of versions depend on it.

    Attributes:
        members, buckets, transport: of this engine; each subclass sets its transport.
        version: the newest that all ranks have; None before the first.
        layout, bucket_digests: of that version; `digest_of` makes such digests.
        report: figures of the last update.
        pool: buckets to send, on a trainer that has sent some.
        receive_buffers: memory of received weights; with `cached` two, of which the last holds the newest version.

    Raises:
        ConfigurationError: a value is out of range.
    """

    transport: Transport

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
        rollout_dtype: str | torch.dtype | None = None,
        keep_dtype: Sequence[str] = (),
        cached: bool = False,
        delta: bool = False,
        delta_block_kib: int = BLOCK_KIB,
    ) -> None:
        num_bytes = int(bucket_mib * 2**20) if bucket_size is None else bucket_size
        self.buckets = Buckets(num_bytes, device=device, staging=staging, memory_fraction=memory_fraction)
        self.members = Members(timeout_s=timeout_s, colocated=colocated, is_master=is_master)
        self.device, self.colocated = self.buckets.device, colocated
        self._rebuild_group = rebuild_group
        self._types = TravelTypes(rollout_dtype, keep_dtype)
        if delta_block_kib < 1:
            raise refused("engine.delta_block_kib", delta_block_kib, "at least 1")
        self._block_bytes = delta_block_kib << 10 if delta else None
        self.version: WeightVersion | None = None
        self.report: SyncReport | None = None
        self.layout: WeightLayout | None = None
        self.bucket_digests: Mapping[int, str] = {}
        self.receive_buffers = [ReceivedStream() for _ in range(1 + cached)]
        self.pool: HostPool | None = None
        self._known: WeightLayout | None = None  # last layout that all ranks were sent
        self._receivers = Receivers(0, (), self.receive_buffers)
        self._open: Update | None = None
        self._generation = 0  # of connections; each failure begins another

    @property
    def rank(self) -> int:
        return self.members.rank

    @property
    def trainers(self) -> range:
        return self.members.trainers

    @property
    def rollouts(self) -> range:
        return self.members.rollouts

    @property
    def topology(self) -> Topology | None:
        return self.members.topology

    @property
    def timeout_s(self) -> float:
        return self.members.timeout_s

    @property
    def peers(self) -> Any:
        """JSON by which a process that has not joined can read the newest version from the trainers' memory; None: it cannot."""
        return None

    def digest_of(self, bucket: torch.Tensor) -> str:
        """Return the digest of a bucket as in `bucket_digests`, given its bytes, flat, on the host."""
        return digest_of_bucket(bucket, self._block_bytes)

    # Joining and leaving

    def prepare(self) -> MasterMetadata | None:
        """See `CheckpointEngine.prepare`. The master starts its store."""
        return self.members.prepare()

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
        """Join the other ranks, without torch's default process group. Does nothing if they are joined as given.

        Args:
            rank: 0 to T - 1 for trainers, then rollouts.
            master_metadata: result of the master's `prepare`.
            store: used in place of the master's; all ranks reach it, and only this engine uses it.
            host: name of this host; None: its own.

        Raises:
            ConfigurationError: a number is out of range; a colocated engine has other rollouts than trainers.
            RankAbsentError: a rank did not come.
        """
        place = Place(rank, actor_wg_world_size, rollout_world_size, master_metadata, store)
        if self.members.are_joined_as(place):
            return
        try:
            self.members.join(place, host, self._get_ready)
        except BaseException:
            self.leave()
            raise

    def finalize(self) -> None:
        """See `CheckpointEngine.finalize`. An update that is still open fails on all ranks."""
        self.members.leave_to_thread(self._settle)
        if self._rebuild_group:
            self.leave()

    def leave(self) -> None:
        """Leave the other ranks without waiting for them; any may be gone. Keeps the weights, and may join other ranks.

        Waits up to 5 s for a call under way; one that hangs is abandoned.
        """
        try:
            self.members.leave(self._part)
        finally:
            abandoned, self._open = self._open, None  # the thread may hang before it closes an update
            if abandoned is not None:
                abandoned.open = nullcontext()  # an update and its context refer to each other
                if abandoned.receive_buffer is not None:
                    abandoned.receive_buffer.let_go()  # other rollouts of this host may still load from it

    def close(self) -> None:
        """Leave the other ranks and free all memory."""
        self.leave()
        self.members.store = None
        self.pool = None
        for receive_buffer in self.receive_buffers:
            receive_buffer.let_go()

    def _get_ready(self, topology: Topology) -> None:
        """Last part of the join. Collective."""
        with topology.phase("agree on the buckets") as phase:
            phase.merge = {"room": least(self.buckets.room())}
            phase.from_lead = uuid.uuid4().hex
        self._bucket_bytes = phase.merged["room"]
        self._connections = f"ckpt-engine-{phase.from_lead}"
        self._generation = 0
        self._known = None
        self._receivers = Receivers(self.rank, self.rollouts, self.receive_buffers)
        self._owners = self.transport.owners(topology, self.trainers)
        self._sends_as = self._owners[0] if self.rank in self.trainers and self.rank not in self._owners else self.rank
        if self.pool is not None and not self.pool.is_of(self._sends_as, self._bucket_bytes):
            self.pool = None
        self.transport.join(topology)

    def _part(self) -> None:
        self._settle()
        if self.topology is not None:
            self.transport.leave()

    # Sending

    async def send_weights(
        self, weights: Weights, global_steps: int | None = None, *, committed: Callable[[], object] | None = None
    ) -> dict[str, Any]:
        """See `CheckpointEngine.send_weights`. The copy of a tensor to the host is done, or queued, before the next one is requested.

        Args:
            weights: names and tensors of any strides, on any device, DTensors too (gathering them is collective: each trainer
                iterates over all). An attribute `tied_names`, {alias: name}, gives rollouts these aliases, which do not travel.
            global_steps: training step of the weights; higher than that of the last update.
            committed: called when all rollouts have the weights in host memory, and before they load them.

        Raises:
            CheckpointError: the update failed, on all ranks; each keeps its version.
        """
        topology = self.members.require_topology()
        if self.rank not in self.trainers:
            raise ConfigurationError(f"rank {self.rank} is a rollout, and sends nothing: it calls receive_weights")
        await self._run(self._begin)
        if global_steps is None:
            global_steps = 1 if self.version is None else self.version.step + 1
        try:
            offloaded = await self._offload(weights, topology)
        except BaseException:  # such as a cancelled task; errors of the weights are in `offloaded`
            self.members.leave_to_thread(self._decline)
            raise
        update = await self._run(self._commit, global_steps, offloaded, None)
        if committed is not None:
            committed()
        if self.colocated:
            return {}
        return await self.members.run_to_the_end(self._finish, update)

    async def _offload(self, weights: Weights, topology: Topology) -> Offloaded:
        began = time.perf_counter()
        pool = self.pool or HostPool(self._sends_as, self._bucket_bytes, block_bytes=self._block_bytes)
        self.pool = pool
        layout = WeightLayout(self._bucket_bytes, self._owners, tied_names(weights))
        found = Offloaded(layout, began)
        seal = partial(self._run, pool.seal, layout)
        await found.take(weights, self._types.of, pool, progress=topology.progress, seal=seal)
        return found

    def travels_as(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """Return the type in which a weight of this name and type reaches the rollouts."""
        return self._types.of(name, dtype)

    # Receiving

    def receive_weights(self, global_steps: int | None = None) -> WeightStream:
        """Return an async iterator over the weights of a committed update, on the engine's device. All rollouts call it.

        The first weight is yielded after the last bucket has been verified on all rollouts. A tensor is a view of memory that is reused:
        copy it before requesting the next one. A consumer that stops early, or raises, fails the update on all ranks at once. Only if
        the task that iterates catches the exception, and a variable refers to the iterator, the iterator must be closed
        (`contextlib.aclosing`): the others wait for that, at most `engine.timeout_s`.

        Args:
            global_steps: the expected step; None: any.

        Raises:
            CheckpointError: the update failed, on all ranks.
        """
        return WeightStream(lambda: self._open_for_consumer(global_steps))

    async def _open_for_consumer(self, global_steps: int | None) -> OpenUpdate:
        update, weights = await self._received(global_steps, None)

        def withdraw(why: str) -> None:
            self.members.leave_to_thread(self._leave_open, update, asyncio.CancelledError(why))

        return OpenUpdate(
            weights=on_device(weights, self.device.torch_device, self._bucket_bytes),
            progress=update.topology.progress,
            finish=partial(self.members.run_to_the_end, self._finish, update),
            withdraw=withdraw,
        )

    async def receive_into(self, sink: Sink, global_steps: int | None = None) -> dict[str, Any]:
        """Receive an update into a live model, all or none of it. All rollouts call it, or `receive_weights`.

        Returns:
            the figures of the update.

        Raises:
            CheckpointError: the update failed, on all ranks; the model is unchanged.
        """
        update, weights = await self._received(global_steps, sink)
        return await self.members.run_to_the_end(self._load, update, weights, sink)

    async def get_weights(self) -> AsyncIterator[NamedTensor]:
        """Yield the newest complete version received, also while an update is under way. Local.

        Raises:
            ConfigurationError: the engine keeps no weights, or has not received any.
        """
        if len(self.receive_buffers) < 2:
            raise ConfigurationError("this engine keeps no weights: make it with cached=True")
        if self.receive_buffers[1].holds is None:
            raise ConfigurationError("no weights have been received yet")
        for named in on_device(self.receive_buffers[1].weights(), self.device.torch_device, self._bucket_bytes):
            yield named

    async def _received(self, global_steps: int | None, sink: Sink | None) -> tuple[Update, Iterator[NamedTensor]]:
        """Return a committed update, and its weights on the host."""
        self.members.require_topology()
        if self.rank not in self.rollouts:
            raise ConfigurationError(f"rank {self.rank} is a trainer, and receives nothing: it calls send_weights")
        update = self._open
        if not self.colocated:
            await self._run(self._begin)
            update = await self._run(self._commit, global_steps, None, sink)
        elif update is None:
            raise ConfigurationError("nothing has been sent: colocated, send_weights comes first")
        elif sink is not None:
            await self._run(self._check_late, update, sink)
        assert update.receive_buffer is not None, "a rollout has one"
        update.reload_began = time.perf_counter()
        return update, update.receive_buffer.weights()

    # The update, in the members' thread

    @contextmanager
    def _update(self, step: int | None, offloaded: Offloaded | None, sink: Sink | None) -> Iterator[Update]:
        """One update: agree -> carry -> agree. Collective; the rollouts load the weights inside the block.

        Args:
            step: sent, or expected; None: any.
            offloaded: on a trainer.
            sink: on a rollout; None: it accepts any layout.
        """
        with self._operation() as topology:
            # Agree on step, layout and digests, and that all rollouts can load it.
            with topology.phase("offload") as phase:
                phase.payload = self._offer(topology, step, offloaded, sink)
            offers, began, update = phase.payloads, time.perf_counter(), None
            with topology.operation(to_step(offers)):
                # Another rank may have seen a failure that this one has not.
                self._reconnect(max(offer["generation"] for offer in offers))
                is_new = self._is_new(offers)
                if is_new:
                    with topology.phase("layout") as phase:
                        if offloaded is not None and topology.is_lead:
                            phase.from_lead = offloaded.layout.as_rows()
                    self._known = WeightLayout.from_rows(phase.from_lead)
                sharing = agreed_sharing(offers, topology.nodes)
                fits = all(offer["fits"] == offers[0]["layout"] for offer in offers)
                if is_new or not fits or not self._receivers.are_settled(offers, sharing):
                    with topology.phase("prepare") as phase:
                        self._require_wanted(topology)
                        update = self._agreed(topology, offers)
                        if sink is not None:
                            sink.check(update.layout)
                        phase.payload = self._receivers.make_room(update.layout, sharing)
                    held = self._receivers.settle(topology, update.layout, sharing, phase.payloads)
                    offers = [offer | {"holds": version} for offer, version in zip(offers, held, strict=True)]
                    update = self._agreed(topology, offers)
                    if is_new:
                        self.transport.ready(update)
                gathered = time.perf_counter()
                # Carry it to every rollout, and verify it there.
                with topology.phase(PHASE):
                    self._require_wanted(topology)
                    update = update or self._agreed(topology, offers)
                    self._require_base(update)
                    self.transport.carry(update)
                carried = time.perf_counter()
                update.seconds = {"gather_s": gathered - began, "transfer_s": carried - gathered}
                if offloaded is not None:
                    update.seconds |= {"offload_s": offloaded.seconds, "blocked_s": carried - offloaded.began}
                yield update
                # Agree that each rollout has loaded it.
                reload_began, now = update.reload_began, time.perf_counter()
                update.seconds["reload_s"] = 0.0 if reload_began is None else now - reload_began
                with topology.phase("load") as phase:
                    if update.failure is not None:
                        raise update.failure
                    phase.stands = f"all rollouts have received the weights of step {update.version.step}"
                    if offloaded is not None and not self.colocated:
                        update.seconds["blocked_s"] = time.perf_counter() - offloaded.began
                    phase.merge = {name: most(seconds) for name, seconds in update.seconds.items()}
        self._keep(update, phase.merged)

    @contextmanager
    def _operation(self) -> Iterator[Topology]:
        """The operation of an update, with one name on all ranks, whether they know the step or not. Cleans up after a failure."""
        topology = self.members.require_topology()
        is_dropped = False
        try:
            with topology.operation(OPERATION):
                try:
                    yield topology
                except GeneratorExit:  # the engine has left these ranks, or is no more
                    is_dropped = True
                    raise
                except BaseException:
                    if self.topology in (None, topology):
                        self._forget()
                    raise
        finally:
            if not is_dropped:
                self.members.say_ended(topology)

    def _forget(self) -> None:
        """Have the next update send its layout, and all weights, over new connections."""
        self._known = None
        self.receive_buffers[0].holds = None
        if self.pool is not None and self.pool.history is not None:
            self.pool.history.forget()
        self._reconnect(self._generation + 1)

    def _reconnect(self, generation: int) -> None:
        if generation > self._generation:
            self._generation = generation
            self.transport.reset(self.receive_buffers[0])
            if self.receive_buffers[0].place is not None:
                self.receive_buffers[0].let_go()  # a rollout that the others have given up may still load from it

    def _offer(
        self, topology: Topology, step: int | None, offloaded: Offloaded | None, sink: Sink | None
    ) -> dict[str, Any]:
        """Return this rank's offer: the weights that it sends, and the layout that it could receive at once."""
        self._require_wanted(topology)
        if offloaded is not None and offloaded.error is not None:
            raise offloaded.error
        offer: dict[str, Any] = {"step": step, "held": self.version.step if self.version else None}
        offer |= {"fits": self._fits(sink), "generation": self._generation}
        offer["known"] = self._known.digest() if self._known is not None else None
        offer["block_bytes"] = self._block_bytes
        if self._receive_buffer is not None:  # after `_fits`, which may free it
            offer |= {"holds": self.receive_buffers[-1].holds, "place": self._receive_buffer.place}
            # Nobody but the sink, or the device, gets to see the host memory.
            keeps_to_itself = sink is not None or self.device.torch_device.type != "cpu"
            offer["shares"] = keeps_to_itself and len(self.receive_buffers) == 1 and can_be_shared()
        if offloaded is None:
            return offer
        layout = offloaded.layout
        if self.pool is not None and (history := self.pool.history) is not None:
            offer |= {"base": history.base, "changed": history.changed()}
        return offer | {
            "layout": layout.digest(),
            "size": [len(layout.weights), layout.payload_bytes],
            "digests": sorted(offloaded.digests.items()),
        }

    @property
    def _receive_buffer(self) -> ReceivedStream | None:
        return self.receive_buffers[0] if self.rank in self.rollouts else None

    def _fits(self, sink: Sink | None) -> str | None:
        """Return the digest of the last layout, if this rank could receive it again."""
        if self._known is None:
            return None
        try:
            if sink is not None:
                sink.check(self._known)
            if self._receive_buffer is not None:
                self._receive_buffer.make_room(self._known)
        except Exception:
            return None  # if that layout comes again, phase prepare raises
        return self._known.digest()

    def _is_new(self, offers: Sequence[Mapping[str, Any]]) -> bool:
        """Whether the layout must be sent: some rank does not have it, or got it before a failure."""
        return any((offer["known"], offer["generation"]) != (offers[0]["layout"], self._generation) for offer in offers)

    def _agreed(self, topology: Topology, offers: Sequence[Mapping[str, Any]]) -> Update:
        """Return the update that all offers make together; equal on all ranks, errors too, except for the memory."""
        step = agreed_step(offers)
        require_one_block(offers)
        require_one_layout([offers[rank] for rank in self.trainers])
        layout = self._known
        assert layout is not None, "the phase layout has sent it"
        digests = agreed_digests([offers[rank]["digests"] for rank in self.trainers], layout)
        changes = None
        if self._block_bytes is not None:
            changes = agreed_changes(offers, layout, self.rollouts, self._block_bytes)
        receive_buffer = self._receive_buffer
        has_before = changes is not None and receive_buffer is not None and len(self.receive_buffers) > 1
        return Update(
            topology=topology,
            layout=layout,
            version=WeightVersion(step, version_digest(layout, digests)),
            digests=digests,
            block_bytes=self._block_bytes,
            changes=changes,
            pool=self.pool if self.rank in self.trainers else None,
            receive_buffer=receive_buffer,
            receivers=self._receivers.ranks,
            before=self.receive_buffers[-1] if has_before else None,
            connections=f"{self._connections}-{self._generation}",
        )

    def _require_base(self, update: Update) -> None:
        """Check that the receive buffer holds the version that the changes are based on; from now on it holds none."""
        if update.receive_buffer is None:
            return
        if update.changes is not None and self.receive_buffers[-1].holds != update.changes.base:
            raise CheckpointError(
                "the version that the changes are based on is no longer in memory; the next update sends everything"
            )
        update.receive_buffer.holds = None

    def _keep(self, update: Update, seconds: Mapping[str, float]) -> None:
        """Record the version that all ranks hold now, and its figures."""
        self.version, self.layout, self.bucket_digests = update.version, update.layout, update.digests
        if update.pool is not None and update.pool.history is not None:
            update.pool.history.commit(update.version.digest)
        if update.receive_buffer is not None:
            update.receive_buffer.holds = update.version.digest
            if len(self.receive_buffers) > 1:
                self.receive_buffers.reverse()
        self.report = SyncReport(
            step=update.version.step,
            num_tensors=len(update.layout.weights),
            num_bytes=update.layout.payload_bytes,
            sent_bytes=update.sent_bytes,
            num_buckets=update.layout.num_buckets,
            **{name: seconds.get(name, 0.0) for name in _SECONDS},
        )

    # From one state to the next, in the members' thread

    def _begin(self) -> None:
        """Close an update that was left open; colocated, raise if its weights were not taken."""
        if self._open is not None and self.colocated and not self.members.cancelled.is_set():
            raise ConfigurationError(
                f"the weights of step {self._open.version.step} have arrived and have not been taken: colocated, each "
                "send_weights is followed by receive_weights or receive_into"
            )
        self._settle()

    def _commit(self, step: int | None, offloaded: Offloaded | None, sink: Sink | None) -> Update:
        """settled -> open: run `_update` up to its `yield`. Collective."""
        context = self._update(step, offloaded, sink)
        update = context.__enter__()
        update.open = context
        self._open = update
        return update

    def _check_late(self, update: Update, sink: Sink) -> None:
        """Check the layout with a sink that is known only after the transfer: colocated, `receive_into` comes second."""
        topology = self._still_open(update).topology
        try:
            with topology.phase("check"):
                self._require_wanted(topology)
                sink.check(update.layout)
        except CheckpointError as error:
            self._leave_open(update, error)
            raise

    def _load(self, update: Update, weights: Iterable[NamedTensor], sink: Sink) -> dict[str, Any]:
        try:
            sink.load(update.counted(weights), update.version)
        except Exception as error:
            return self._finish(update, error)
        return self._finish(update)

    def _finish(self, update: Update, failure: Exception | None = None) -> dict[str, Any]:
        """open -> settled, given this rank's error, if loading failed. Collective; returns the figures."""
        context = self._still_open(update).open
        update.failure = failure
        try:
            context.__exit__(None, None, None)
        finally:
            if self._open is update:
                self._open = None
        assert self.report is not None
        return self.report.as_dict()

    def _still_open(self, update: Update) -> Update:
        if self._open is not update:
            raise CheckpointError(
                "the received weights were taken too late: the others timed this rank out, and the update failed"
            )
        return update

    def _leave_open(self, update: Update | None, error: BaseException) -> None:
        """Fail an update, if it is still open: tell the other ranks, without waiting for them."""
        if update is not None and self._open is update:
            self._open = None
            update.open.__exit__(type(error), error, error.__traceback__)

    # Updates that are cancelled

    async def _run(self, call: Callable[..., Result], *args: Any) -> Result:
        """Make a call in the members' thread. If the caller is cancelled, the update fails at its next phase."""
        return await done(self.members.submit(call, *args), self._cancel)

    def _cancel(self) -> None:
        self.members.cancelled.set()
        self.members.leave_to_thread(self._settle)

    def _require_wanted(self, topology: Topology) -> None:
        if self.members.cancelled.is_set() or self.topology is not topology:
            raise CheckpointError("the call was cancelled")

    def _decline(self) -> None:
        """Tell the other ranks that this one takes no part in an update."""
        with suppress(asyncio.CancelledError), self._operation():
            raise asyncio.CancelledError("the call was cancelled")

    def _settle(self) -> None:
        """Clean up after cancelled calls, consumers that are gone, or an error of the program between two calls."""
        self._leave_open(self._open, asyncio.CancelledError("the received weights were not taken"))
        self.members.cancelled.clear()
