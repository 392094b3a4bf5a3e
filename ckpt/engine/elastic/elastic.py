"""Updates while rollouts come and go: an engine that is joined anew, by other ranks, whenever the members change.

    rollout   registers, lives -> catches up (late.py) -> is ready, waits for the lead -> member -> ... -> leaves, or dies
    lead      before each update: who is ready, leaves, has died? -> a call to all members: this epoch's ranks make update k

In between the update is the engine's, all or nothing as ever. One that fails because a rollout is gone, or of a newcomer that cannot take
it, is made again at once by the others. Where nobody comes or goes a call costs the lead five words to the store, and the others one.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import uuid
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Mapping
from typing import Any, Self, TypeVar

from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed import DistError

from ckpt.engine.base import NamedTensor
from ckpt.engine.elastic.membership import Call, Epoch, News, Rendezvous, culprit, goes_on_after, next_epoch
from ckpt.engine.elastic.membership_store import LEAVING, READY, MembershipStore, reserve
from ckpt.engine.engine_thread import EngineThread, done
from ckpt.engine.members import own_store
from ckpt.engine.update import Sink
from ckpt.engine.versioned import VersionedEngine
from ckpt.engine.wire.layout import WeightLayout
from ckpt.errors import CheckpointError, ConfigurationError, RankAbsentError, describe, rebuild
from ckpt.ranks.heartbeat import Heartbeat
from ckpt.ranks.stores import StoreGoneError, reach

Result = TypeVar("Result")

ANSWER_S = 0.1
"""How long an update waits for rollouts that have just said that they are ready, and are asked whether they still are. Later ones are
in the next one."""
_REACH_S = 10.0
_LINGER_S = 1.0


def meeting(timeout_s: float, facts: Mapping[str, Any], num_founders: int) -> tuple[TCPStore, Rendezvous]:
    """The store of a job, held by this process, its first trainer; and where a rollout that comes finds it.

    It listens on one address, that of `ckpt.ranks.addresses.own_address`.

    Args:
        timeout_s: of the store.
        facts: see `Rendezvous`.
        num_founders: trainers and rollouts that will call `ElasticEngine.found`; no rollout that comes gets one of their numbers.
    """
    store, address = own_store(timeout_s)
    reserve(store, num_founders)
    job = uuid.uuid4().hex
    store.set("job", job)  # last: nobody comes before it is there
    return store, Rendezvous(address, store.port, job, facts)


def reached_store(rendezvous: Rendezvous) -> TCPStore:
    """The store of a running job.

    Raises:
        RankAbsentError: nobody answers there, or another job.
    """
    where = f"{rendezvous.address}:{rendezvous.port}"
    try:
        store = reach(rendezvous.address, rendezvous.port, timeout_s=_REACH_S)
        found = store.get("job").decode() if store.check(["job"]) else None
    except (StoreGoneError, DistError) as error:
        raise RankAbsentError(f"nobody answers at {where}: the job has ended, or this host cannot reach it") from error
    if found != rendezvous.job:
        raise RankAbsentError(f"another job answers at {where}: the one that wrote this rendezvous has ended")
    return store


class ElasticEngine:
    """One member of a job whose rollouts come and go; its engine's updates, with whoever is there.

    Made by `found` on the ranks that the job starts with, by `come` in a rollout that joins them later. Trainers call `send_weights`,
    rollouts `receive_into`, as often as there are updates; the first trainer is the lead. A trainer that dies ends the job.

    Args:
        engine: has joined nobody; it is closed with this object.
        store: of the first trainer.
        number: of this process: a trainer's rank, or that of a rollout, which no other one of the job ever has.
        epoch: the first; None: a rollout that is no member yet.

    Attributes:
        last_words: what the lead said at the end.
        epoch: the newest that this process has been in.
    """

    def __init__(
        self, engine: VersionedEngine, store: Store, number: int, epoch: Epoch | None, *, host: str | None
    ) -> None:
        if engine.colocated:
            raise ConfigurationError(
                "rollouts that are trainers, too, cannot come and go: make the engine with colocated=False"
            )
        self.engine = engine
        self.number = number
        self.epoch = epoch
        self.last_words: Any = None
        self._host = host or socket.gethostname()
        self._is_rollout = epoch is None or number >= epoch.num_trainers
        self._who = f"rollout {number}" if self._is_rollout else f"trainer {number}"
        self._board = MembershipStore(store, self._who, timeout_s=engine.timeout_s)
        self._beat: Heartbeat | None = None
        self._thread = EngineThread()
        self._given_up = threading.Event()
        self._next = 1  # the call that is to come
        self._call: Call | None = None  # that has come; None: one is awaited
        self._is_again = False  # its caller was cancelled before the update began, and the next one hears it
        self._joined: int | None = None  # the number of the epoch whose ranks the engine has joined
        self._proven = False
        self._failure: CheckpointError | None = None  # of the last update, which is to be made again
        self._ended = False
        # The lead's:
        self._ready: set[int] = set()
        self._asked: set[int] = set()
        self._leaving: set[int] = set()
        self._gone: set[int] = set()
        self._num_requests = 0
        self._first_call = 1  # that is kept, for somebody may not have heard it

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
            store: the first trainer's (`meeting`), as each of them reaches it.
            rank: of the engine, trainers first.
            num_rollouts: that are there from the beginning; there may be none.
        """
        if num_trainers < 1 or num_rollouts < 0 or not 0 <= rank < num_trainers + num_rollouts:
            raise ConfigurationError(
                f"rank {rank} of {num_trainers} trainers and {num_rollouts} rollouts: there has to be a trainer, and this rank"
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
        """Get to know a running job, as a rollout. It is a member when it has called `receive_into`, between two updates.

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
        """What the lead says of the newest version that all members have; None: there is none yet. Before the first `receive_into`."""
        found = self._board.news()
        return None if found is None else (found[0], WeightLayout.from_rows(found[1]))

    # Updates

    async def send_weights(
        self, weights: Iterable[NamedTensor] | AsyncIterable[NamedTensor], global_steps: int | None = None
    ) -> dict[str, Any]:
        """Publish weights to all rollouts that are there; again, if one of them is gone in the middle of it. All trainers call it.

        Args:
            weights: as `VersionedEngine.send_weights` takes them; they may have to be yielded again, from the first one on.

        Returns:
            the figures of the update, with `num_rollouts` and `epoch`; without any rollout, these two alone.

        Raises:
            CheckpointError: the update failed of something else, or a trainer is gone; on all members.
        """
        while True:
            call = await self._run_ahead(self._next_call)
            if call.is_last:
                raise ConfigurationError("the first trainer has said that there are no further updates")
            if not call.epoch.rollouts:
                self._failure = None
                return _members_of(call)
            report = await self._attempt(call, lambda: self.engine.send_weights(weights, global_steps))
            if report is not None:
                return report
            _require_renewable(weights, self._failure)

    async def receive_into(self, sink: Sink, global_steps: int | None = None) -> dict[str, Any] | None:
        """Receive the next update into a live model. A rollout that is no member yet says that it is ready, and waits to become one.

        Returns:
            the figures of the update, with `num_rollouts` and `epoch`; None: this rollout has left, or there are no further updates.

        Raises:
            CheckpointError: the update failed, on all members, or the job did; or the others have gone on without this rollout.
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
        """Have the lead go on without this rollout from its next call on. `receive_into` says when it is so, by None. Any thread."""
        self._leaving.add(self.number)
        self._board.request(self.number, LEAVING)

    async def end(self, last_words: Any = None, patience_s: float = 60.0) -> dict[int, Any]:
        """Say that there are no further updates. The lead alone; the other trainers just stop.

        Args:
            last_words: JSON for all rollouts.

        Returns:
            what the rollouts reply, by number, but for those that die first or take longer than `patience_s`.
        """
        return await self._run(self._end, last_words, patience_s)

    async def reply(self, words: Any) -> None:
        """Answer the lead's last words, as JSON. A rollout whose `receive_into` has returned None."""
        await self._run(self._board.reply, self.number, words)

    def close(self) -> None:
        """Leave the others, waiting for none of them, and let go of all memory. The lead ends the job for all."""
        self._close(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        self._close(error)

    # In the thread of this object

    def _live(self) -> None:
        self._beat = self._board.heartbeat(self.number, self._host)

    def _come_in(self) -> None:
        self._board.request(self.number, READY)
        self._next = self._board.await_invitation(self.number, self._given_up.is_set)

    def _next_call(self) -> Call:
        """The lead makes it, all others hear it.

        Raises:
            CheckpointError: the job has failed; or it goes on without this rollout, which has not asked for that.
        """
        is_again, self._is_again = self._is_again, False
        if self._call is None or not is_again:
            if self._ended:
                raise ConfigurationError(f"{self._who} is out of the job: there is nothing more to send or to receive")
            self._call = None
            self._call = self._decide() if self.is_lead else self._board.await_call(self._next, self._given_up.is_set)
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
                raise self._failure or RankAbsentError(f"the others have gone on without {self._who}, which was late")
        return call

    def _enter(self, epoch: Epoch) -> None:
        """Be joined with the ranks of an epoch."""
        if self._joined == epoch.number:
            return
        self.engine.leave()
        self._joined = None
        self.engine.init_process_group(
            epoch.rank_of(self.number) if self._is_rollout else self.number,
            epoch.num_trainers,
            len(epoch.rollouts),
            store=self._board.store_of(epoch),
            host=self._host,
        )
        self._joined = epoch.number

    def _succeeded(self, call: Call) -> None:
        self._proven, self._failure = True, None
        if not self.is_lead:
            return
        self._board.forget_calls(range(self._first_call, call.number))
        self._first_call = call.number
        engine = self.engine
        if engine.version is not None and (layout := engine.layout) is not None:
            digests = dict(engine.bucket_digests)
            self._board.tell(News(*engine.version, layout.digest(), digests, engine.peers), layout.as_rows)

    def _forgive(self, error: CheckpointError, epoch: Epoch) -> None:
        """Raise an error that is everybody's, unless the others go on without the rollout that it is of."""
        if not goes_on_after(error, epoch, proven=self._proven):
            raise error
        self._failure = error
        if self.is_lead and (one := culprit(error, epoch)) is not None:
            self._gone.add(one)

    # The lead's

    def _decide(self) -> Call:
        """Look who is there, and call the members of the next update together.

        Raises:
            CheckpointError: the update before failed, and all are there still.
        """
        self._look()
        epoch = self._following(self._ready_still())
        if self._failure is not None and set(self._current.rollouts) <= set(epoch.rollouts):
            self._fail(self._failure)  # of a trainer, or of nobody who could be left out
            raise self._failure
        if epoch is not self.epoch and epoch.rollouts:
            self._board.vouch(epoch)
            self._board.invite(set(epoch.rollouts) - set(self._current.rollouts), self._next)
        self._ready -= set(epoch.rollouts)
        call = Call(number=self._next, epoch=epoch)
        self._board.call(call)
        return call

    def _ready_still(self) -> set[int]:
        """Those who are ready, and have said so when they were asked: who hangs, or is gone, is waited for by nobody."""
        new = self._ready - self._asked
        self._board.ask(new)
        self._asked |= new
        return self._board.answered(self._ready, ANSWER_S if new else 0.0) if self._ready else set()

    def _following(self, ready: Iterable[int]) -> Epoch:
        return next_epoch(self._current, proven=self._proven, ready=set(ready), leaving=self._leaving, gone=self._gone)

    def _look(self) -> None:
        """Learn who is ready, who wants to leave, and who has died."""
        if (num_requests := self._board.num_requests()) != self._num_requests:
            self._num_requests = num_requests
            numbers = set(range(self._current.num_trainers, self._board.num_numbers())) - self._gone - self._leaving
            for number, word in self._board.requests(numbers).items():
                if word == LEAVING:
                    self._leaving.add(number)
                elif number not in self._current.rollouts:
                    self._ready.add(number)
        self._gone |= self._board.dead({*self._current.rollouts, *self._ready} - self._gone - self._leaving)
        self._ready -= self._gone | self._leaving

    def _fail(self, error: BaseException) -> None:
        self._last_call(Call(number=self._next, epoch=self._current, failure=describe(error)))

    def _end(self, last_words: Any, patience_s: float) -> dict[int, Any]:
        self._look()
        epoch = self._following(())
        self.epoch = epoch
        self._last_call(Call(number=self._next, epoch=epoch, is_last=True, last_words=last_words))
        return self._board.replies(epoch.rollouts, patience_s)

    def _last_call(self, call: Call) -> None:
        if not self._ended:
            self._ended = True
            self._look()
            self._board.invite(self._ready, call.number)  # so that those who wait to come in hear it, too
            self._board.call(call)

    def _close(self, error: BaseException | None) -> None:
        self._given_up.set()
        try:
            if self.is_lead:
                self._say_goodbye(error)
            else:
                self._board.say_closed(self.number)
        finally:
            if self._beat is not None:
                self._beat.stop()
            self.engine.close()
            self._thread.stop()

    def _say_goodbye(self, error: BaseException | None) -> None:
        """Let all members read how it ended, from the store that goes with this process."""
        try:
            if not self._ended:
                self._fail(error or CheckpointError("the first trainer has ended the job"))
            epoch = self._current
            self._board.linger([*range(1, epoch.num_trainers), *epoch.rollouts], _LINGER_S)
        except CheckpointError:
            return  # the store is gone

    async def _run(self, call: Callable[..., Result], *args: Any) -> Result:
        """Run in this object's thread, while the event loop goes on."""

        def afresh() -> Result:
            self._given_up.clear()
            return call(*args)

        return await done(self._thread.submit(afresh), self._given_up.set)

    async def _run_ahead(self, call: Callable[..., Result], *args: Any) -> Result:
        """The same, ahead of an update: if the caller is cancelled, the next one hears the same call, for the others are in it by now."""
        try:
            return await self._run(call, *args)
        except asyncio.CancelledError:
            self._is_again = True
            raise


def _members_of(call: Call) -> dict[str, Any]:
    return {"num_rollouts": len(call.epoch.rollouts), "epoch": call.epoch.number}


def _require_renewable(weights: Any, error: CheckpointError | None) -> None:
    """Refuse to make an update again of weights that have been used up.

    Raises:
        ConfigurationError: they are an iterator.
    """
    again = aiter(weights) if isinstance(weights, AsyncIterable) else iter(weights)
    if again is weights:
        raise ConfigurationError(
            "an update has to be made again without a rollout that is gone, and the weights were given as an iterator, which is "
            "used up: give an object that yields them whenever it is iterated over"
        ) from error
