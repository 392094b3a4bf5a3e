"""Updates while rollouts join and leave: the engine's ranks join anew whenever the members change.

    rollout   registers, heartbeat -> catches up (catch_up.py) -> is ready, waits for the lead -> member -> ... -> leaves, or dies
    lead      before each update: which rollouts are ready, leave, have died? -> a call to all members: this epoch's ranks make update k

The update itself is the engine's, all or nothing. If it fails because a rollout is gone, or because a newcomer cannot load it, the others
make it again at once. With the same members as before, a call costs the lead five store requests, and the others one.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import uuid
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, Self

from torch.distributed import DistError, Store, TCPStore

from ckpt.engine.base import Weights
from ckpt.engine.elastic.membership import Call, Epoch, News, Rendezvous, goes_on_after, next_epoch
from ckpt.engine.elastic.membership_store import LEAVING, READY, MembershipStore, reserve
from ckpt.engine.members import EngineThread, Result, done, own_store
from ckpt.engine.update import Sink
from ckpt.engine.versioned import VersionedEngine
from ckpt.engine.wire.layout import WeightLayout
from ckpt.errors import CheckpointError, ConfigurationError, RankAbsentError, describe, rebuild
from ckpt.ranks.heartbeat import Heartbeat
from ckpt.ranks.stores import StoreGoneError, reach

ANSWER_S = 0.1
"""How long an update waits for answers of rollouts that have just become ready. A later answer counts for the next update."""
_REACH_S = 10.0
_LINGER_S = 1.0


def meeting(timeout_s: float, facts: Mapping[str, Any], num_founders: int) -> tuple[TCPStore, Rendezvous]:
    """Start the store of a job in this process, its first trainer; return it, and the rendezvous for rollouts that join later.

    It listens on one address, that of `ckpt.ranks.addresses.own_address`.

    Args:
        timeout_s: of the store.
        facts: see `Rendezvous`.
        num_founders: number of trainers and rollouts that will call `ElasticEngine.found`; their numbers are reserved.
    """
    store, address = own_store(timeout_s)
    reserve(store, num_founders)
    job = uuid.uuid4().hex
    store.set("job", job)  # last: no rollout joins before this key is there
    return store, Rendezvous(address, store.port, job, facts)


def reached_store(rendezvous: Rendezvous) -> TCPStore:
    """Connect to the store of a running job.

    Raises:
        RankAbsentError: the store does not answer, or belongs to another job.
    """
    where = f"{rendezvous.address}:{rendezvous.port}"
    try:
        store = reach(rendezvous.address, rendezvous.port, timeout_s=_REACH_S)
        found = store.get("job").decode() if store.check(["job"]) else None
    except (StoreGoneError, DistError) as error:
        raise RankAbsentError(f"no job answers at {where}: it has ended, or this host cannot reach it") from error
    if found != rendezvous.job:
        raise RankAbsentError(f"another job answers at {where}: the one that wrote this rendezvous has ended")
    return store


class ElasticEngine:
    """One process of a job whose rollouts join and leave; makes its engine's updates with the members of the moment.

    Made by `found` on the ranks that the job starts with, by `come` in a rollout that joins later. Trainers call `send_weights`,
    rollouts `receive_into`, once for each update; the first trainer is the lead. A trainer that dies ends the job.

    Args:
        engine: not joined; closed with this object.
        store: of the first trainer.
        number: of this process: a trainer's rank, or a rollout's number, which is never reused in the job.
        epoch: the first; None: a rollout that is not a member yet.

    Attributes:
        last_words: of the lead, in the last call.
        epoch: the newest that this process was in.
    """

    def __init__(
        self, engine: VersionedEngine, store: Store, number: int, epoch: Epoch | None, *, host: str | None
    ) -> None:
        if engine.colocated:
            raise ConfigurationError(
                "rollouts that are also trainers cannot come and go: make the engine with colocated=False"
            )
        self.engine = engine
        self.number = number
        self.epoch = epoch
        self.last_words: Any = None
        self._host = host or socket.gethostname()
        self._is_rollout = epoch is None or number >= epoch.num_trainers
        self._who = f"rollout {number}" if self._is_rollout else f"trainer {number}"
        self._membership = MembershipStore(store, self._who, timeout_s=engine.timeout_s)
        self._beat: Heartbeat | None = None
        self._thread = EngineThread()
        self._given_up = threading.Event()
        self._next = 1  # number of the next call
        self._call: Call | None = None  # the last one; None: one is awaited
        # The last call's task was cancelled before its update began: the next task gets the same call.
        self._is_again = False
        self._joined: int | None = None  # number of the epoch whose ranks the engine has joined
        self._proven = False
        self._failure: CheckpointError | None = None  # of the last update, which is made again
        self._ended = False
        # On the lead only:
        self._ready: set[int] = set()
        self._asked: set[int] = set()
        self._leaving: set[int] = set()
        self._gone: set[int] = set()
        self._num_requests = 0
        self._first_call = 1  # the oldest one that a member may not have read

    @classmethod
    def found(
        cls,
        engine: VersionedEngine,
        store: Store,
        *,
        rank: int,
        num_trainers: int,
        num_rollouts: int,
        host: str | None = None,
    ) -> Self:
        """Join the ranks that the job starts with. All of them call it.

        Args:
            store: the first trainer's (see `meeting`), as this process reaches it.
            rank: of the engine, trainers first.
            num_rollouts: at the start; may be 0.
        """
        if num_trainers < 1 or num_rollouts < 0 or not 0 <= rank < num_trainers + num_rollouts:
            raise ConfigurationError(
                f"rank {rank} of {num_trainers} trainers and {num_rollouts} rollouts: expected a trainer, and a rank below their sum"
            )
        epoch = Epoch(1, num_trainers, tuple(range(num_trainers, num_trainers + num_rollouts)))
        member = cls(engine, store, rank, epoch, host=host)
        try:
            if member._is_rollout:
                member._live()
            if num_rollouts:
                member._thread.submit(member._enter, epoch).result()
        except BaseException:
            member.close()
            raise
        return member

    @classmethod
    def come(cls, engine: VersionedEngine, rendezvous: Rendezvous, *, host: str | None = None) -> Self:
        """Register a rollout with a running job. It becomes a member by `receive_into`, between two updates.

        Raises:
            RankAbsentError: the job has ended.
        """
        store = reached_store(rendezvous)
        number = MembershipStore(store, "a new rollout", timeout_s=engine.timeout_s).new_number()
        member = cls(engine, store, number, None, host=host)
        member._live()
        return member

    @property
    def _current(self) -> Epoch:
        assert self.epoch is not None, "the lead is a founder"
        return self.epoch

    @property
    def is_lead(self) -> bool:
        return self.number == 0 and not self._is_rollout

    def news(self) -> tuple[News, WeightLayout] | None:
        """Return the newest version that all members have, and its layout; None: there is none yet. Before the first `receive_into`."""
        found = self._membership.news()
        return None if found is None else (found[0], WeightLayout.from_rows(found[1]))

    # Updates

    async def send_weights(self, weights: Weights, global_steps: int | None = None) -> dict[str, Any]:
        """Publish weights to all rollouts that are members; again, if one of them dies meanwhile. All trainers call it.

        Args:
            weights: as for `VersionedEngine.send_weights`; may be iterated over several times.

        Returns:
            the figures of the update, with `num_rollouts` and `epoch`; without any rollout, only these two.

        Raises:
            CheckpointError: the update failed for another reason, or a trainer is gone; on all members.
        """
        while True:
            call = await self._run_ahead(self._next_call)
            if call.is_last:
                raise ConfigurationError("the first trainer has ended the updates")
            if not call.epoch.rollouts:
                self._failure = None
                return _members_of(call)
            report = await self._attempt(call, lambda: self.engine.send_weights(weights, global_steps))
            if report is not None:
                return report
            _require_renewable(weights, self._failure)

    async def receive_into(self, sink: Sink, global_steps: int | None = None) -> dict[str, Any] | None:
        """Receive the next update into a live model. A rollout that is not a member yet waits until the lead makes it one.

        Returns:
            the figures of the update, with `num_rollouts` and `epoch`; None: this rollout has left, or there are no further updates.

        Raises:
            CheckpointError: the update, or the job, failed on all members; or the others have gone on without this rollout.
        """
        while True:
            if self.epoch is None:
                await self._run(self._come_in)
            call = await self._run_ahead(self._next_call)
            if call.is_last or self.number not in call.epoch.rollouts:
                return None
            report = await self._attempt(call, lambda: self.engine.receive_into(sink, global_steps))
            if report is not None:
                return report

    async def _attempt(self, call: Call, update: Callable[[], Awaitable[dict[str, Any]]]) -> dict[str, Any] | None:
        """Make an update with the members of a call; None: it failed because of a rollout, and the others make it again."""
        try:
            await self._run_ahead(self._enter, call.epoch)
            report = await update()
        except CheckpointError as error:
            await self._run(self._forgive, error, call.epoch)
            return None
        await self._run(self._succeeded, call)
        return report | _members_of(call)

    def ask_to_leave(self) -> None:
        """Have the lead leave this rollout out of its next call; `receive_into` then returns None. Any thread."""
        self._leaving.add(self.number)
        self._membership.request(self.number, LEAVING)

    async def end(self, last_words: Any = None, patience_s: float = 60.0) -> dict[int, Any]:
        """End the updates. The lead only; the other trainers just stop.

        Args:
            last_words: JSON for all rollouts.

        Returns:
            the rollouts' replies, by number, without those that die first or take longer than `patience_s`.
        """
        return await self._run(self._end, last_words, patience_s)

    async def reply(self, words: Any) -> None:
        """Answer the lead's last words, in JSON. A rollout whose `receive_into` has returned None."""
        await self._run(self._membership.reply, self.number, words)

    def close(self, error: BaseException | None = None) -> None:
        """Leave the others without waiting for them, and free all memory. The lead ends the job for all.

        Args:
            error: of the lead, for which it ends the job; None: it just ends it.
        """
        self._given_up.set()
        try:
            if self.is_lead:
                self._say_goodbye(error)
            else:
                self._membership.say_closed(self.number)
        finally:
            if self._beat is not None:
                self._beat.stop()
            self.engine.close()
            self._thread.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        self.close(error)

    # In the thread of this object

    def _live(self) -> None:
        self._beat = self._membership.heartbeat(self.number, self._host)

    def _come_in(self) -> None:
        self._membership.request(self.number, READY)
        self._next = self._membership.await_invitation(self.number, self._given_up.is_set)

    def _next_call(self) -> Call:
        """Make the next call, on the lead; wait for it, on other members.

        Raises:
            CheckpointError: the job has failed; or it goes on without this rollout, which did not ask to leave.
        """
        is_again, self._is_again = self._is_again, False
        if self._call is None or not is_again:
            if self._ended:
                raise ConfigurationError(f"{self._who} is out of the job: there is nothing more to send or to receive")
            self._call = None
            self._call = (
                self._decide() if self.is_lead else self._membership.await_call(self._next, self._given_up.is_set)
            )
        call = self._call
        self._next = call.number + 1
        if self.epoch is None or call.epoch.number != self.epoch.number:
            self.epoch, self._proven = call.epoch, False
        if call.failure is not None or call.is_last:
            self._ended = True
            self.last_words = call.last_words
        if call.failure is not None:
            raise rebuild(call.failure)
        if self._is_rollout and self.number not in call.epoch.rollouts and not call.is_last:
            self._ended = True
            if self.number not in self._leaving:
                raise self._failure or RankAbsentError(f"the others timed {self._who} out and go on without it")
        return call

    def _enter(self, epoch: Epoch) -> None:
        """Join the ranks of an epoch, unless they are joined."""
        if self._joined == epoch.number:
            return
        self.engine.leave()
        self._joined = None
        self.engine.init_process_group(
            epoch.rank_of(self.number) if self._is_rollout else self.number,
            epoch.num_trainers,
            len(epoch.rollouts),
            store=self._membership.store_of(epoch),
            host=self._host,
        )
        self._joined = epoch.number

    def _succeeded(self, call: Call) -> None:
        self._proven, self._failure = True, None
        if not self.is_lead:
            return
        self._membership.forget_calls(range(self._first_call, call.number))
        self._first_call = call.number
        engine = self.engine
        if engine.version is not None and (layout := engine.layout) is not None:
            digests = dict(engine.bucket_digests)
            self._membership.tell(News(*engine.version, layout.digest(), digests, engine.peers), layout.as_rows)

    def _forgive(self, error: CheckpointError, epoch: Epoch) -> None:
        """Raise an error of an update, unless the others make it again without the rollout that caused it."""
        if not goes_on_after(error, epoch, proven=self._proven):
            raise error
        self._failure = error
        if self.is_lead and (rollout := epoch.rollout_at(error.rank)) is not None:
            self._gone.add(rollout)

    # The lead's

    def _decide(self) -> Call:
        """Decide on the members of the next update, and call them. The lead.

        Raises:
            CheckpointError: the last update failed, and no rollout is gone.
        """
        self._look()
        epoch = self._following(self._ready_still())
        if self._failure is not None and set(self._current.rollouts) <= set(epoch.rollouts):
            self._fail(self._failure)  # no rollout that could be left out caused it
            raise self._failure
        if epoch is not self.epoch and epoch.rollouts:
            self._membership.vouch(epoch)
            self._membership.invite(set(epoch.rollouts) - set(self._current.rollouts), self._next)
        self._ready -= set(epoch.rollouts)
        call = Call(number=self._next, epoch=epoch)
        self._membership.call(call)
        return call

    def _ready_still(self) -> set[int]:
        """Return the ready rollouts that have answered: an update never waits for a newcomer that hangs, or is gone."""
        new = self._ready - self._asked
        self._membership.ask(new)
        self._asked |= new
        return self._membership.answered(self._ready, ANSWER_S if new else 0.0) if self._ready else set()

    def _following(self, ready: Iterable[int]) -> Epoch:
        return next_epoch(self._current, proven=self._proven, ready=set(ready), leaving=self._leaving, gone=self._gone)

    def _look(self) -> None:
        """Update which rollouts are ready, want to leave, or have died."""
        if (num_requests := self._membership.num_requests()) != self._num_requests:
            self._num_requests = num_requests
            numbers = (
                set(range(self._current.num_trainers, self._membership.num_numbers())) - self._gone - self._leaving
            )
            for number, wish in self._membership.requests(numbers).items():
                if wish == LEAVING:
                    self._leaving.add(number)
                elif number not in self._current.rollouts:
                    self._ready.add(number)
        self._gone |= self._membership.dead({*self._current.rollouts, *self._ready} - self._gone - self._leaving)
        self._ready -= self._gone | self._leaving

    def _fail(self, error: BaseException) -> None:
        self._last_call(Call(number=self._next, epoch=self._current, failure=describe(error)))

    def _end(self, last_words: Any, patience_s: float) -> dict[int, Any]:
        self._look()
        epoch = self._following(())
        self.epoch = epoch
        self._last_call(Call(number=self._next, epoch=epoch, is_last=True, last_words=last_words))
        return self._membership.replies(epoch.rollouts, patience_s)

    def _last_call(self, call: Call) -> None:
        if not self._ended:
            self._ended = True
            self._look()
            self._membership.invite(self._ready, call.number)  # rollouts that wait to join read the call, too
            self._membership.call(call)

    def _say_goodbye(self, error: BaseException | None) -> None:
        """End the job, and wait until the members have read so: the store ends with this process."""
        with suppress(CheckpointError):  # the store is gone
            if not self._ended:
                self._fail(error or CheckpointError("the first trainer has ended the job"))
            epoch = self._current
            self._membership.linger([*range(1, epoch.num_trainers), *epoch.rollouts], _LINGER_S)

    async def _run(self, call: Callable[..., Result], *args: Any) -> Result:
        """Make a call in this object's thread, while the event loop goes on."""

        def afresh() -> Result:
            self._given_up.clear()
            return call(*args)

        return await done(self._thread.submit(afresh), self._given_up.set)

    async def _run_ahead(self, call: Callable[..., Result], *args: Any) -> Result:
        """The same, before an update: if the task is cancelled, the next one gets the same call, which the other members follow already."""
        try:
            return await self._run(call, *args)
        except asyncio.CancelledError:
            self._is_again = True
            raise


def _members_of(call: Call) -> dict[str, Any]:
    return {"num_rollouts": len(call.epoch.rollouts), "epoch": call.epoch.number}


def _require_renewable(weights: Any, error: CheckpointError | None) -> None:
    """Check that weights can be iterated over again.

    Raises:
        ConfigurationError: they are an iterator.
    """
    again = aiter(weights) if isinstance(weights, AsyncIterable) else iter(weights)
    if again is weights:
        raise ConfigurationError(
            "an update is made again without a rollout that is gone, but the weights were given as an iterator, which is used up: "
            "give an object that can be iterated over again"
        ) from error
