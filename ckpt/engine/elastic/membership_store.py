"""What the lead of a job and its rollouts tell each other beside updates: words under keys of the first trainer's store.

    lead      call/<k>   who makes update k       come/<n>  rollout n is in from that call on     news, layout   the newest version
    rollout   beat/<n>   it lives                 word/<n>  it is ready, or wants to leave        here/<n>       it still is

Only the lead decides, and everybody reads one call after the other, so nobody is ever in an update that another one is not in.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store

from ckpt.engine.elastic.membership import Call, Epoch, News
from ckpt.engine.members import TOPOLOGY
from ckpt.errors import RankAbsentError
from ckpt.ranks.heartbeat import Beat, FailureDetector, Heartbeat, PhaseIndex, beat_key
from ckpt.ranks.store_client import StoreClient
from ckpt.ranks.stores import StoreGoneError

READY, LEAVING = "ready", "leaving"
_PREFIX = "board"
_NUMBERS = "numbers"
_LOOK_S = 0.5
_NAP_S = 0.002
_LONGEST_NAP_S = 0.005


def reserve(store: Store, count: int) -> None:
    """Keep the first numbers for the ranks that found the job. Whoever has made the store, before anybody else can reach it."""
    PrefixStore(_PREFIX, store).add(_NUMBERS, count)


class MembershipStore:
    """One process's access to the words. One thread at a time, but for `say`.

    It makes one connection of its own: to make one may take long where names of hosts are looked up, and others wait meanwhile.

    Args:
        store: of the first trainer.
        who: for the error when the store is gone.
        timeout_s: that the store may take to answer.

    Raises:
        RankAbsentError: the store is gone, or hangs; so does every call.
    """

    def __init__(self, store: Store, who: str, *, timeout_s: float = 300.0) -> None:
        self._store = PrefixStore(_PREFIX, store)
        self._who = who
        self._timeout_s = timeout_s
        with self._reached():
            self._mailbox = StoreClient(self._store, writer=0, timeout_s=timeout_s)
        self._layout: str | None = None  # the digest of the one that is told

    # Calls

    def call(self, call: Call) -> None:
        """Make a call. The lead alone."""
        with self._reached():
            self._mailbox.put(f"call/{call.number}", call.encode())
            self._mailbox.put("latest", str(call.number).encode())

    def forget_calls(self, numbers: Iterable[int]) -> None:
        """Remove calls that all members have heard. The lead alone."""
        with self._reached():
            for number in numbers:
                self._mailbox.delete(f"call/{number}")

    def await_call(self, number: int, given_up: Callable[[], bool]) -> Call:
        """Wait for a call, however long that takes.

        Raises:
            RankAbsentError: the lead is gone, or its calls have gone on without this process; or `given_up`.
        """
        return Call.decode(self._await(f"call/{number}", given_up, lambda: self._require_awaited(number)))

    def _require_awaited(self, number: int) -> None:
        latest = self._mailbox.peek("latest")
        if latest is not None and int(latest) > number and not self._mailbox.has([f"call/{number}"]):
            raise RankAbsentError(f"{self._who} came back when the others had gone on without it")

    # Coming and going

    def new_number(self) -> int:
        """A number for a rollout that comes to a running job."""
        with self._reached():
            return self._mailbox.add(_NUMBERS, 1) - 1

    def num_numbers(self) -> int:
        with self._reached():
            return self._mailbox.add(_NUMBERS, 0)

    def say(self, number: int, word: str) -> None:
        """Tell the lead what a rollout wants. Any thread."""
        with self._reached():
            self._mailbox.put(f"word/{number}", word.encode())
            self._mailbox.add("words", 1)

    def num_words(self) -> int:
        """How many there have been: whether it is worth the lead's while to look for them."""
        with self._reached():
            return self._mailbox.add("words", 0)

    def words(self, numbers: Iterable[int]) -> dict[int, str]:
        """What these rollouts want, of those that want something."""
        with self._reached():
            said = {number: self._mailbox.peek(f"word/{number}") for number in numbers}
        return {number: word.decode() for number, word in said.items() if word is not None}

    def heartbeat(self, number: int, host: str) -> Heartbeat:
        """Begin to say that a rollout lives, over a connection of its own."""
        with self._reached():
            beat = Heartbeat(
                StoreClient(self._store, writer=number, timeout_s=self._timeout_s), number, host=host, interval_s=1.0
            )
            beat.start()
        return beat

    def dead(self, numbers: Iterable[int]) -> set[int]:
        """Those of these rollouts that have ended, or left, as far as one look can tell: those of other hosts may have died unseen."""
        numbers = list(numbers)
        if not numbers:
            return set()
        with self._reached():
            return set(
                FailureDetector(self._mailbox, PhaseIndex(0, -1), "", float("inf")).absent(numbers, hinted=False)
            )

    def ask(self, numbers: Iterable[int]) -> None:
        """Ask rollouts that have said that they are ready whether they still are."""
        with self._reached():
            for number in numbers:
                self._mailbox.put(f"ask/{number}", b"?")

    def answered(self, numbers: Iterable[int], patience_s: float) -> set[int]:
        """Those of them that have answered. It is waited for the others for a moment, but for the dead."""
        waiting, here, until = set(numbers), set[int](), time.monotonic() + patience_s
        with self._reached():
            while True:
                here |= {number for number in waiting if self._mailbox.has([f"here/{number}"])}
                waiting -= here
                if not waiting or time.monotonic() > until or not (waiting - self.dead(waiting)):
                    return here
                time.sleep(_NAP_S)

    def invite(self, numbers: Iterable[int], call: int) -> None:
        """Tell rollouts that they are in from a call on."""
        with self._reached():
            for number in numbers:
                self._mailbox.put(f"come/{number}", str(call).encode())

    def await_invitation(self, number: int, given_up: Callable[[], bool]) -> int:
        """Wait until the lead says from which call on this rollout is in, answering when it asks; return the call.

        Raises:
            RankAbsentError: the lead is gone; or `given_up`.
        """
        answered = False

        def answer() -> None:
            nonlocal answered
            if not answered and self._mailbox.has([f"ask/{number}"]):
                self._mailbox.put(f"here/{number}", b"!")
                answered = True

        return int(self._await(f"come/{number}", given_up, answer, look_s=0.0))

    def store_of(self, epoch: Epoch) -> Store:
        """What the engines of an epoch, and nobody else, agree through."""
        return PrefixStore(_epoch_prefix(epoch), self._store)

    def vouch(self, epoch: Epoch) -> None:
        """Say for the rollouts of an epoch who they are: one that dies before it has said so itself is missed at once."""
        with self._reached():
            for number in epoch.rollouts:
                if (found := self._mailbox.peek(beat_key(number))) is not None:
                    beat = Beat.decode(found)
                    beat.rank, beat.number, beat.moves, beat.at = epoch.rank_of(number), 0, 0, PhaseIndex(0, -1)
                    self._mailbox.put(f"{_epoch_prefix(epoch)}/{TOPOLOGY}/{beat_key(beat.rank)}", beat.encode())

    # News

    def tell(self, news: News, layout_rows: Callable[[], list[Any]]) -> None:
        """Say which version all have. The lead alone."""
        with self._reached():
            if self._layout != news.layout:
                self._mailbox.put("layout", json.dumps([news.layout, layout_rows()]).encode())
                self._layout = news.layout
            self._mailbox.put("news", news.encode())

    def news(self) -> tuple[News, list[Any]] | None:
        """The newest version that all have, and the rows of its layout; None: nothing has been published yet."""
        with self._reached():
            while (found := self._mailbox.peek("news")) is not None:
                news, layout = News.decode(found), self._mailbox.peek("layout")
                digest, rows = json.loads(layout or b"[null, null]")
                if digest == news.layout:
                    return news, rows
                time.sleep(_NAP_S)  # between the two words of another layout
        return None

    # The end

    def reply(self, number: int, words: Any) -> None:
        """Answer the last call."""
        with self._reached():
            self._mailbox.put(f"reply/{number}", json.dumps(words).encode())

    def replies(self, numbers: Collection[int], patience_s: float) -> dict[int, Any]:
        """What rollouts answer, but for those that die first, or take longer."""
        waiting, found, until = set(numbers), dict[int, Any](), time.monotonic() + patience_s
        with self._reached():
            while waiting and time.monotonic() < until:
                dead = self.dead(waiting)  # first: one that has answered, and left since, has answered
                for number in sorted(waiting):
                    if (said := self._mailbox.peek(f"reply/{number}")) is not None:
                        found[number] = json.loads(said)
                waiting -= {*found, *dead}
                time.sleep(_NAP_S if waiting else 0)
        return found

    def say_closed(self, number: int) -> None:
        """Say that a member needs the store no more."""
        with suppress(StoreGoneError):
            self._mailbox.put(f"closed/{number}", b"1")

    def linger(self, numbers: Iterable[int], patience_s: float) -> None:
        """Wait until these members need the store no more, but not for long: some may be gone."""
        keys, until = [f"closed/{number}" for number in numbers], time.monotonic() + patience_s
        with suppress(StoreGoneError):
            while keys and not self._mailbox.has(keys) and time.monotonic() < until:
                time.sleep(_NAP_S)

    # The store

    def _await(
        self, key: str, given_up: Callable[[], bool], look: Callable[[], None], look_s: float = _LOOK_S
    ) -> bytes:
        """Ask for a word until it is there, ever more seldom, as ranks that agree do; and look now and then whether it will come."""
        began = look_at = time.monotonic()
        with self._reached():
            while (found := self._mailbox.peek(key)) is None:
                if given_up():
                    raise RankAbsentError(f"{self._who} stopped waiting for the lead")
                if (now := time.monotonic()) > look_at:
                    look()
                    look_at = now + look_s
                time.sleep(min(max((now - began) / 16, _NAP_S / 10), _LONGEST_NAP_S))
        return found

    def _reached(self) -> _Reached:
        return _Reached(self._who)


def _epoch_prefix(epoch: Epoch) -> str:
    return f"epoch-{epoch.number}"


class _Reached:
    """Turns the store's own errors into a sentence."""

    def __init__(self, who: str) -> None:
        self._who = who

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if isinstance(error, StoreGoneError):
            if error.is_silent:
                raise RankAbsentError(f"{self._who} gives the first trainer up: {error}") from error
            raise RankAbsentError(
                f"{self._who} finds the first trainer gone, and with it the store through which the job's members agree"
            ) from error
