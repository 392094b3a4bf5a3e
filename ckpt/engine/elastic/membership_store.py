"""Messages between the lead of a job and its rollouts beside updates: values under keys of the first trainer's store.

    lead      call/<k>   the members of update k   come/<n>     rollout n is a member from that call on   news, layout  newest version
    rollout   beat/<n>   its heartbeat             request/<n>  it is ready, or wants to leave            here/<n>      it still is

Only the lead decides, and all members read the same calls one after the other, so all members of an update know of each other.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from torch.distributed import PrefixStore, Store

from ckpt.engine.elastic.membership import Call, Epoch, News
from ckpt.engine.members import TOPOLOGY
from ckpt.errors import RankAbsentError
from ckpt.ranks.agreement import Beat, PhaseIndex
from ckpt.ranks.heartbeat import Heartbeat, beat_key, ended
from ckpt.ranks.store_client import StoreClient
from ckpt.ranks.stores import StoreGoneError
from ckpt.ranks.waiting import OutOfTimeError, poll_until

READY, LEAVING = "ready", "leaving"
_PREFIX = "board"
_NUMBERS = "numbers"
_LOOK_S = 0.5
_NAP_S = 0.002
_T = TypeVar("_T")


def reserve(store: Store, count: int) -> None:
    """Reserve the first numbers for the founders of the job. Called by the process that made the store, before others can reach it."""
    PrefixStore(_PREFIX, store).add(_NUMBERS, count)


class MembershipStore:
    """The messages, as one process reads and writes them. One thread at a time; `request` may come from any.

    It has a connection of its own: to open one may take long where host names are looked up, and other users of the store would wait.

    Args:
        store: of the first trainer.
        who: this process, for the error when the store is gone.
        timeout_s: that the store may take to answer.

    Raises:
        RankAbsentError: the store is gone, or hangs; so does every call.
    """

    def __init__(self, store: Store, who: str, *, timeout_s: float = 300.0) -> None:
        self._store = PrefixStore(_PREFIX, store)
        self._who = who
        self._timeout_s = timeout_s
        self._client = _Client(self._store, who, timeout_s)
        self._layout: str | None = None  # digest of the layout that is published

    # Calls

    def call(self, call: Call) -> None:
        """Call the members of an update. The lead alone."""
        self._client.put(f"call/{call.number}", call.encode())
        self._client.put("latest", str(call.number).encode())

    def forget_calls(self, numbers: Iterable[int]) -> None:
        """Remove calls that all members have read. The lead alone."""
        for number in numbers:
            self._client.delete(f"call/{number}")

    def await_call(self, number: int, given_up: Callable[[], bool]) -> Call:
        """Wait for a call, however long that takes.

        Raises:
            RankAbsentError: the lead is gone, or its calls have gone on without this process; or `given_up`.
        """

        def look() -> None:
            latest = self._client.peek("latest")
            if latest is not None and int(latest) > number and not self._client.has([f"call/{number}"]):
                raise RankAbsentError(f"{self._who} went on after the others had timed it out")

        return Call.decode(self._await(f"call/{number}", given_up, look, _LOOK_S))

    # Coming and going

    def new_number(self) -> int:
        """Return an unused number, for a rollout that joins a running job."""
        return self._client.add(_NUMBERS, 1) - 1

    def num_numbers(self) -> int:
        """Return how many numbers are in use, or have been."""
        return self._client.add(_NUMBERS, 0)

    def request(self, number: int, wish: str) -> None:
        """Ask the lead for membership, or to be left out: `READY` or `LEAVING`. A rollout; any thread."""
        self._client.put(f"request/{number}", wish.encode())
        self._client.add("requests", 1)

    def num_requests(self) -> int:
        """Return how many there have been, by which the lead knows of new ones."""
        return self._client.add("requests", 0)

    def requests(self, numbers: Iterable[int]) -> dict[int, str]:
        """Return the last request of each of these rollouts that has made one."""
        found = {number: self._client.peek(f"request/{number}") for number in numbers}
        return {number: wish.decode() for number, wish in found.items() if wish is not None}

    def heartbeat(self, number: int, host: str) -> Heartbeat:
        """Start the heartbeat of a rollout, over a connection of its own."""
        with _naming_first_trainer(self._who):
            client = StoreClient(self._store, writer=number, timeout_s=self._timeout_s)
            beat = Heartbeat(client, number, host=host, interval_s=1.0)
            beat.start()
        return beat

    def dead(self, numbers: Collection[int]) -> set[int]:
        """Return those of these rollouts that have ended, or left. One look: a process of another host may have died unseen."""
        return set(ended(self._client, numbers))

    def ask(self, numbers: Iterable[int]) -> None:
        """Ask rollouts that have said that they are ready whether they still are."""
        for number in numbers:
            self._client.put(f"ask/{number}", b"?")

    def answered(self, numbers: Iterable[int], patience_s: float) -> set[int]:
        """Return those of them that have answered; waits for the others, but not for the dead, and for `patience_s` at most."""
        waiting, here = set(numbers), set[int]()

        def ask() -> set[int] | None:
            here.update(number for number in waiting if self._client.has([f"here/{number}"]))
            waiting.difference_update(here)
            return here if not waiting - self.dead(waiting) else None

        with suppress(OutOfTimeError):
            poll_until(ask, timeout_s=patience_s)
        return here

    def invite(self, numbers: Iterable[int], call: int) -> None:
        """Make rollouts members from a call on."""
        for number in numbers:
            self._client.put(f"come/{number}", str(call).encode())

    def await_invitation(self, number: int, given_up: Callable[[], bool]) -> int:
        """Wait until this rollout is a member, answering when the lead asks; return the number of the first call.

        Raises:
            RankAbsentError: the lead is gone; or `given_up`.
        """
        answered = False

        def answer() -> None:
            nonlocal answered
            if not answered and self._client.has([f"ask/{number}"]):
                self._client.put(f"here/{number}", b"!")
                answered = True

        return int(self._await(f"come/{number}", given_up, answer, 0.0))

    def store_of(self, epoch: Epoch) -> Store:
        """Return the part of the store in which the engines of an epoch agree."""
        return PrefixStore(_epoch_prefix(epoch), self._store)

    def vouch(self, epoch: Epoch) -> None:
        """Copy the rollouts' heartbeats to where an epoch's engines look: one that dies before its first beat there is missed at once."""
        for number in epoch.rollouts:
            if (found := self._client.peek(beat_key(number))) is not None:
                beat = Beat.decode(found)
                beat.rank, beat.number, beat.moves, beat.at = epoch.rank_of(number), 0, 0, PhaseIndex(0, -1)
                self._client.put(f"{_epoch_prefix(epoch)}/{TOPOLOGY}/{beat_key(beat.rank)}", beat.encode())

    # News

    def tell(self, news: News, layout_rows: Callable[[], list[Any]]) -> None:
        """Publish which version all members have. The lead alone."""
        if self._layout != news.layout:
            self._client.put("layout", json.dumps([news.layout, layout_rows()]).encode())
            self._layout = news.layout
        self._client.put("news", news.encode())

    def news(self) -> tuple[News, list[Any]] | None:
        """Return the newest version that all members have, and the rows of its layout; None: nothing has been published yet."""
        while (found := self._client.peek("news")) is not None:
            news, layout = News.decode(found), self._client.peek("layout")
            digest, rows = json.loads(layout or b"[null, null]")
            if digest == news.layout:
                return news, rows
            time.sleep(_NAP_S)  # the layout is written before the news
        return None

    # The end

    def reply(self, number: int, words: Any) -> None:
        """Answer the last call, in JSON. A rollout."""
        self._client.put(f"reply/{number}", json.dumps(words).encode())

    def replies(self, numbers: Collection[int], patience_s: float) -> dict[int, Any]:
        """Return the rollouts' replies, without those that die first, or take longer than `patience_s`."""
        waiting, found = set(numbers), dict[int, Any]()

        def ask() -> dict[int, Any] | None:
            dead = self.dead(waiting)  # before the replies: a rollout may reply and leave
            for number in waiting:
                if (reply := self._client.peek(f"reply/{number}")) is not None:
                    found[number] = json.loads(reply)
            waiting.difference_update(found, dead)
            return None if waiting else found

        with suppress(OutOfTimeError):
            poll_until(ask, timeout_s=patience_s)
        return found

    def say_closed(self, number: int) -> None:
        """Tell the lead that a member no longer needs the store."""
        with suppress(RankAbsentError):
            self._client.put(f"closed/{number}", b"1")

    def linger(self, numbers: Iterable[int], patience_s: float) -> None:
        """Wait until these members no longer need the store; some may be gone, so not longer than `patience_s`."""
        keys = [f"closed/{number}" for number in numbers]
        with suppress(RankAbsentError, OutOfTimeError):
            poll_until(lambda: not keys or self._client.has(keys) or None, timeout_s=patience_s)

    def _await(self, key: str, given_up: Callable[[], bool], look: Callable[[], None], look_s: float) -> bytes:
        """Wait for a value, and look now and then whether it can still come."""

        def ask() -> bytes | None:
            found = self._client.peek(key)
            if found is None and given_up():
                raise RankAbsentError(f"{self._who} stopped waiting for the lead")
            return found

        return poll_until(ask, look=look, look_s=look_s)


def _epoch_prefix(epoch: Epoch) -> str:
    return f"epoch-{epoch.number}"


class _Client(StoreClient):
    """A client of the first trainer's store; when that is gone, every call raises `RankAbsentError`."""

    def __init__(self, store: Store, who: str, timeout_s: float) -> None:
        self._who = who
        with _naming_first_trainer(who):
            super().__init__(store, writer=0, timeout_s=timeout_s)

    def _call(self, method: Callable[..., _T], *args: Any) -> _T:
        with _naming_first_trainer(self._who):
            return super()._call(method, *args)


@contextmanager
def _naming_first_trainer(who: str) -> Iterator[None]:
    """Turn the store's own errors into a sentence about the first trainer."""
    try:
        yield
    except StoreGoneError as error:
        if error.is_silent:
            raise RankAbsentError(f"{who} timed the first trainer out: {error}") from error
        raise RankAbsentError(
            f"the first trainer is gone, and with it the store through which {who} and all other members agree"
        ) from error
