"""What all engines have in common: an update is staged, verified and voted on by all ranks before any rollout changes.

    trainers   yield -> host pool, digests     \\                       / version
                                                 agree -> carry -> agree
    rollouts   does it fit the model? room     /      verify each bucket \\ live model, version

Every phase ends in an agreement (ckpt/ranks/topology.py): one rank that fails, or is gone, fails the update on all of them, in one
sentence, and everybody keeps the weights and the version it had. The commit is the agreement behind the last bucket.
"""

from __future__ import annotations

import asyncio
import time
from abc import abstractmethod
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, NoReturn, Protocol

import torch
from torch._C._distributed_c10d import Store

from ckpt.engine.agreed import WHAT, agreed_digests, agreed_step, require_one_layout, to_step, version_digest
from ckpt.engine.base import CASTABLE, NamedTensor, SyncReport, WeightVersion
from ckpt.engine.joined import JoinedEngine
from ckpt.engine.stream import OpenUpdate, WeightStream
from ckpt.engine.wire.delta import BLOCK_KIB, Changes, agreed_changes, require_one_block
from ckpt.engine.wire.layout import WeightLayout, take_turns
from ckpt.engine.wire.pool import HostPool, ReceivedStream, digest_of_bucket
from ckpt.engine.wire.ring import on_device
from ckpt.engine.wire.transfer import PHASE
from ckpt.errors import CheckpointError, ConfigurationError
from ckpt.format.dtypes import is_dtensor
from ckpt.ranks.topology import Topology
from ckpt.state.abilities import tied_names

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in CASTABLE}
_PAUSE_EVERY = 16  # tensors after which a sender's event loop may do something else


class Sink(Protocol):
    """What takes weights that have come: `ckpt.engine.live.LiveModel`, `InferenceOutlet`, or another of its kind."""

    def check(self, layout: WeightLayout) -> None:
        """Refuse what does not fit, before a byte moves."""

    def load(self, weights: Iterable[NamedTensor], version: WeightVersion) -> None:
        """Take whole tensors on the host, all at once. Does not fail for what `check` has passed, as far as that is in its hands."""


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
        changes: what of it travels; None: everything.
        topology, context: the operation, open until the weights are loaded.
        seconds: of this rank, by the field of `SyncReport`.
    """

    layout: WeightLayout
    version: WeightVersion
    digests: dict[int, str]
    changes: Changes | None
    topology: Topology
    context: ExitStack = field(default_factory=ExitStack)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def sent_bytes(self) -> int:
        return self.layout.num_bytes if self.changes is None else self.changes.num_bytes


class VersionedEngine(JoinedEngine):
    """The update, whoever carries the bytes.

    Trainers call `send_weights`, rollouts `receive_weights` or `receive_into`; colocated, each rank the one and then the other.
    What a coroutine of a rank raises, those of all others do. One that is cancelled fails the update on all ranks, as long as
    nothing has been committed.

    Args:
        rollout_dtype: floating point weights travel as this type, except float8; None: as they are. Other types always do.
        keep_dtype: patterns such as "*.router.weight" of names that travel as they are all the same.
        cached: keep the newest version while the next one comes, for `get_weights`; takes its size once more in host memory.
        delta: send what has changed since the last update, where all ranks hold that, and everything where not, as at first, for other
            layouts, and behind an update that failed. Rollouts verify all bytes all the same. What `receive_weights` yields on the
            host is then what the next update builds upon, and is not to be written to. Takes up to 4/3 of a bucket more host memory.
            Alike on all ranks.
        delta_block_kib: what is compared and sent as one; alike on all ranks, and digests of versions depend on it.
        settings: see `JoinedEngine`.

    Attributes:
        version: the newest that all ranks have; None before the first.
        layout, bucket_digests: of that version; `digest_of` makes such digests.
        report: figures of the last update.
        pool: host memory of what is sent, on a trainer that has sent something.
        landings: host memory of what is received; with `cached` two of them, of which the last holds the newest version.

    Raises:
        ConfigurationError: a value that cannot be.
    """

    def __init__(
        self,
        bucket_size: int | None = None,
        *,
        rollout_dtype: str | torch.dtype | None = None,
        keep_dtype: Sequence[str] = (),
        cached: bool = False,
        delta: bool = False,
        delta_block_kib: int = BLOCK_KIB,
        **settings: Any,
    ) -> None:
        super().__init__(bucket_size, **settings)
        self.version: WeightVersion | None = None
        self.report: SyncReport | None = None
        self.layout: WeightLayout | None = None
        self.bucket_digests: Mapping[int, str] = {}
        self._rollout_dtype = _float_type(rollout_dtype)
        self._keep_dtype = tuple(keep_dtype)
        if delta_block_kib < 1:
            raise ConfigurationError(f"delta_block_kib={delta_block_kib}: expected at least 1")
        self._block_bytes = delta_block_kib << 10 if delta else None
        self.landings = [ReceivedStream() for _ in range(1 + cached)]
        self._held: WeightVersion | None = None  # of the weights in the second landing
        self.pool: HostPool | None = None
        self._known: WeightLayout | None = None
        self._update: Update | None = None
        self._generation = 0  # of connections

    def close(self) -> None:
        """Leave the other ranks and let go of all memory."""
        super().close()
        self.pool = None
        for landing in self.landings:
            landing.let_go()

    def digest_of(self, bucket: torch.Tensor) -> str:
        """The digest that `bucket_digests` has for these bytes, flat, on the host."""
        return digest_of_bucket(bucket, self._block_bytes)

    # Joining

    def _join_update(self, topology: Topology, store: Store) -> None:
        self._generation = 0
        self._known = None
        self._sends_as = self.rank
        self._turns = self._owners(topology)
        if self.pool is not None and not self.pool.is_of(self._sends_as, self._bucket_bytes):
            self.pool = None
        self._join_transport(store)

    def _leave_update(self) -> None:
        self._leave_transport()

    def _forget_update(self) -> None:
        self._update = None

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
    def _carry(self, update: Update, pool: HostPool | None, landing: ReceivedStream | None) -> None:
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
        pool = self.pool or HostPool(self._sends_as, self._bucket_bytes, block_bytes=self._block_bytes)
        self.pool = pool
        layout = WeightLayout(self._bucket_bytes, self._turns, tied_names(weights))
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
        if self._rollout_dtype is None or dtype not in CASTABLE:
            return dtype
        kept = any(fnmatchcase(name, pattern) for pattern in self._keep_dtype)
        return dtype if kept else self._rollout_dtype

    # Receiving

    def receive_weights(self, global_steps: int | None = None) -> WeightStream:
        """Return an async iterator over the weights of an update that all ranks have committed, on the engine's device. All rollouts.

        Nothing is yielded before the last bucket has been verified everywhere. A tensor is a view of memory that is used again:
        copy it before the next one is asked for. A consumer that stops early, or raises, fails the update on all ranks, at once. Only
        one that catches the exception in the task that iterates, and keeps the iterator in a variable, has to close it
        (`contextlib.aclosing`): until then, or `engine.timeout_s`, the others wait.

        Args:
            global_steps: the step that is expected; None: any.

        Raises:
            CheckpointError: the update failed, on all ranks.
        """
        return WeightStream(lambda: self._open_for_consumer(global_steps))

    async def _open_for_consumer(self, global_steps: int | None) -> OpenUpdate:
        landing = await self._received(global_steps, None)
        update, began = self._update, time.perf_counter()

        def withdraw(why: str) -> None:
            if self._thread is not None:
                self._submit(self._withdraw, update, why)

        return OpenUpdate(
            weights=on_device(landing.weights(), self.device.torch_device, self._bucket_bytes),
            progress=self._topology().progress,
            finish=lambda: self._run_to_the_end(self._finish, update, began, None),
            fail=lambda error: self._run_to_the_end(self._fail, update, error),
            withdraw=withdraw,
        )

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
        if len(self.landings) < 2:
            raise ConfigurationError("this engine keeps no weights: make it with cached=True")
        if self._held is None:
            raise ConfigurationError("no weights have come yet")
        for named in on_device(self.landings[1].weights(), self.device.torch_device, self._bucket_bytes):
            yield named

    async def _received(self, global_steps: int | None, sink: Sink | None) -> ReceivedStream:
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
        return self.landings[0]

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

    # The update, in the engine's thread

    def _agree_and_carry(self, step: int | None, offloaded: _Offloaded | None, sink: Sink | None) -> None:
        """Everything up to the commit. Collective."""
        topology = self._topology()
        pool = self.pool if self.rank in self.trainers else None
        landing = self.landings[0] if self.rank in self.rollouts else None
        with ExitStack() as context:
            context.callback(self._say_ended)
            context.enter_context(topology.operation(WHAT))  # alike on all ranks, whether they know the step or not
            context.push(self._forget_layout)
            with topology.phase("offload") as phase:
                phase.payload = self._offer(topology, step, offloaded, landing, sink)
            began = time.perf_counter()
            context.enter_context(topology.operation(to_step(phase.payloads)))
            sent = offloaded.layout if offloaded is not None else None
            update = self._prepare(topology, phase.payloads, sent, landing, pool, sink)
            gathered = time.perf_counter()
            with topology.phase(PHASE):
                self._require_wanted(topology)
                update = update or self._agreed(phase.payloads)
                self._require_base(update, landing)
                self._carry(update, pool, landing)
            carried = time.perf_counter()
            update.seconds = {"gather_s": gathered - began, "transfer_s": carried - gathered}
            if offloaded is not None:
                update.seconds |= {"offload_s": offloaded.seconds, "blocked_s": carried - offloaded.began}
            update.context = context.pop_all()
            self._update = update

    def _forget_layout(self, kind: object, *_: object) -> None:
        """After a failure, on all ranks: the next update tells its layout anew, sends everything, and through new connections."""
        if kind is not None:
            self._known = None
            self.landings[0].holds = None
            if self.pool is not None and self.pool.history is not None:
                self.pool.history.forget()
            self._generation += 1
            self._reset_transport()

    def _offer(
        self,
        topology: Topology,
        step: int | None,
        offloaded: _Offloaded | None,
        landing: ReceivedStream | None,
        sink: Sink | None,
    ) -> dict[str, Any]:
        """What this rank has to say: which weights it sends, and which it could take at once."""
        self._require_wanted(topology)
        if offloaded is not None and offloaded.error is not None:
            raise offloaded.error
        said: dict[str, Any] = {"step": step, "held": self.version.step if self.version else None}
        said |= {"fits": self._fits(landing, sink), "generation": self._generation}
        said["known"] = self._known.digest() if self._known is not None else None
        said["block_bytes"] = self._block_bytes
        if landing is not None:  # behind `fits`, which may have let go of it
            said["holds"] = self.landings[-1].holds
        if offloaded is None:
            return said
        layout = offloaded.layout
        if self.pool is not None and (history := self.pool.history) is not None:
            said |= {"base": history.base, "changed": history.changed()}
        return said | {
            "layout": layout.digest(),
            "size": [len(layout.weights), layout.payload_bytes],
            "digests": sorted(offloaded.digests.items()),
        }

    def _fits(self, landing: ReceivedStream | None, sink: Sink | None) -> str | None:
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
        landing: ReceivedStream | None,
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
        step = agreed_step(said)
        require_one_block(said)
        require_one_layout([said[rank] for rank in self.trainers])
        layout = self._known
        assert layout is not None, "whoever does not know it is told"
        digests = agreed_digests([said[rank]["digests"] for rank in self.trainers], layout)
        version = WeightVersion(step, version_digest(layout, digests))
        changes = None
        if self._block_bytes is not None:
            changes = agreed_changes(said, layout, self.rollouts, self._block_bytes)
        return Update(layout, version, digests, changes, self._topology())

    def _before(self, landing: ReceivedStream | None) -> ReceivedStream | None:
        """Where a rollout has the version before the one that comes to `landing`; None: there."""
        return self.landings[-1] if landing is not None and len(self.landings) > 1 else None

    def _require_base(self, update: Update, landing: ReceivedStream | None) -> None:
        """What comes takes the place of what is there, or is put into it."""
        if landing is None:
            return
        if update.changes is not None and self.landings[-1].holds != update.changes.base:
            raise CheckpointError(
                "the weights that the changes are of have been let go of; the next update sends everything"
            )
        landing.holds = None

    def _load(self, sink: Sink, landing: ReceivedStream, began: float) -> SyncReport:
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
        self.version, self.layout, self.bucket_digests = update.version, update.layout, update.digests
        self._keep(update.version)
        slowest = {
            name: max(said.get(name, 0.0) for said in phase.payloads)
            for name in ("offload_s", "gather_s", "transfer_s", "reload_s", "blocked_s")
        }
        self.report = SyncReport(
            step=update.version.step,
            num_tensors=len(update.layout.weights),
            num_bytes=update.layout.payload_bytes,
            sent_bytes=update.sent_bytes,
            num_buckets=update.layout.num_buckets,
            **slowest,
        )
        return self.report

    def _keep(self, version: WeightVersion) -> None:
        """All ranks hold what this one has sent or received."""
        if self.pool is not None and self.pool.history is not None and self.rank in self.trainers:
            self.pool.history.commit(version.digest)
        if self.rank in self.rollouts:
            self.landings[0].holds = version.digest
        if len(self.landings) > 1 and self.rank in self.rollouts:
            self.landings.reverse()
            self._held = version

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
            context.enter_context(self._topology().operation(WHAT))
            context.push(self._forget_layout)
            raise asyncio.CancelledError("the call was cancelled")

    def _settle(self) -> None:
        """Clean up behind calls that were cancelled, consumers that have gone, an error of the program between two calls."""
        self._withdraw(self._update, "the weights that came were not taken")
        self._cancelled.clear()

    def _begin(self) -> None:
        """Have nothing open from the update before."""
        if self._update is not None and self.colocated and not self._cancelled.is_set():
            raise ConfigurationError(
                f"the weights of step {self._update.version.step} have come and have not been taken: colocated, each "
                "send_weights is followed by receive_weights or receive_into"
            )
        self._settle()


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


def _make_ready(layout: WeightLayout, landing: ReceivedStream | None, sink: Sink | None) -> None:
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
