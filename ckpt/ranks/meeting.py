"""Name the part of the store that this life of a job uses: no earlier process over the same store can have used it.

A launcher that restarts ranks may keep the store, and with it all keys of the life before. Numbers do not help: a restarted process
counts from 0 again, and a counter in the store is a key of an earlier life itself. So the ranks meet before they agree on anything:

    rank r    arrived/<r>: a new nonce
    lead      roll: the nonces of all ranks, its own included; again whenever one of them changes.   stage: call <digest of the roll>
    rank r    finds its own nonce in the roll.                                                        answer/<r>: that digest
    lead      all others' answers are the digest of its last roll.                                    stage: go <digest>

The digest is the prefix of every key from then on. A nonce of an earlier life only delays: its rank does not answer, and those of the
last roll that an earlier lead has called are called some seconds later, when their successors have come. An answer of an earlier life
never matches, because the lead's nonce is new; and a rank goes on with no roll but one that holds its own.

    arrived --roll holds our nonce--> answered --go--> met
       |                                  |
       +--------- time is up, or the lead says that it is ------> failed

Limit: a process of an earlier life that still runs and has not met cannot be told from one of this life. As soon as
another process comes as its rank it ends with an error, or the later one does if the job has gone on with the earlier.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import time
from functools import partial
from typing import Any, NamedTuple

from ckpt.errors import CheckpointError, RankAbsentError, describe, rebuild
from ckpt.ranks.heartbeat import ended
from ckpt.ranks.store_client import StoreClient
from ckpt.ranks.waiting import AwakeClock, nap_s, poll_until

_ROLL, _STAGE = "roll", "stage"
_SIGN_S = 0.5  # between two signs of life of the lead; longer among thousands of ranks, each of which it looks for


_SUSPECT_S = 3.0  # in which the successors come of processes that an earlier lead has called


class Life(NamedTuple):
    """One life of a job.

    Attributes:
        name: that no other life has, of this or another job.
        hosts: of all ranks, as they have given them.
    """

    name: str
    hosts: tuple[str, ...]


def meet(client: StoreClient, rank: int, world_size: int, *, host: str, timeout_s: float) -> Life:
    """Return this life of the job, equal on all ranks. Collective.

    Args:
        client: of the part of the store in which the ranks of all lives meet.
        timeout_s: that a rank waits: the lead for all others, the others for a sign of the lead.

    Raises:
        RankAbsentError: a rank did not come; the ranks that did raise the same.
        CheckpointError: another process has come as this rank.
        StoreGoneError: the store does not answer.
    """
    kind = _Lead if rank == 0 else _Member
    one = kind(client, rank, world_size, f"{secrets.token_hex(8)} pid {os.getpid()} on {host}", timeout_s)
    client.put(_arrived(rank), one.nonce.encode())
    nap = partial(nap_s, world_size=world_size)
    name = poll_until(one.ask, look=one.look, look_s=_look_s(world_size), nap=nap)
    return Life(name, tuple(nonce.partition(" on ")[2] for nonce in one.nonces))


def _look_s(world_size: int) -> float:
    return _SIGN_S * max(1.0, world_size / 512)


def _arrived(rank: int) -> str:
    return f"arrived/{rank}"


def _answer(rank: int) -> str:
    return f"answer/{rank}"


def _digest(roll: bytes) -> str:
    return hashlib.blake2b(roll, digest_size=12).hexdigest()


class _Member:
    """A rank that waits for the lead."""

    def __init__(self, client: StoreClient, rank: int, world_size: int, nonce: str, timeout_s: float) -> None:
        self._client = client
        self._rank = rank
        self._world_size = world_size
        self.nonce = nonce
        self._timeout_s = timeout_s
        self._clock = AwakeClock(5 * _look_s(world_size))
        self._heard_s = self._clock()
        self._stage = client.peek(_STAGE)  # of an earlier life, or of a lead that came first
        self._is_first_stage = self._stage is not None
        self._answered = ""
        self.nonces: list[str] = []
        self._met_without_us: str | None = None

    def ask(self) -> str | None:
        stage = self._client.peek(_STAGE)
        if stage is None or (stage == self._stage and not self._is_first_stage):
            return None
        if stage != self._stage:
            self._heard_s = self._clock()
        is_news = not self._is_first_stage
        self._stage, self._is_first_stage = stage, False
        word, digest, *_ = stage.decode().split()
        if digest != self._answered and word != "wait":
            self._read_roll(word, is_news)
        return digest if word == "go" and digest == self._answered else None

    def _read_roll(self, word: str, is_news: bool) -> None:
        """Answer the roll, or raise the lead's error, if this process is in it: else it is of other processes.

        Args:
            is_news: a lead that lives has said the word.
        """
        roll = self._client.peek(_ROLL) or b"[[], null]"
        nonces, error = json.loads(roll)
        if self.nonce not in nonces:
            if word == "go" and self._rank < len(nonces):
                self._met_without_us = nonces[self._rank]
                if is_news:
                    raise _displaced(self._rank, self._met_without_us)
            return
        if word == "failed" and error is not None:
            raise rebuild(error)
        if len(nonces) == self._world_size:
            self._answered, self.nonces = _digest(roll), nonces
            self._client.put(_answer(self._rank), self._answered.encode())

    def look(self) -> str | None:
        """Raise if the lead is silent, or if this rank is another process by now."""
        if self._clock() - self._heard_s > self._timeout_s:
            if self._met_without_us is not None:
                raise _displaced(self._rank, self._met_without_us)
            raise _absent([0], self._client.peek(_arrived(0)), self._timeout_s)
        self._require_own_place(self._client.peek(_arrived(self._rank)))
        return None

    def _require_own_place(self, arrived: bytes | None) -> None:
        if arrived is not None and arrived.decode() != self.nonce:
            raise _displaced(self._rank, arrived.decode())


class _Lead(_Member):
    """Rank 0: calls the roll until all others have answered the same."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._arrivals = [_arrived(rank) for rank in range(self._world_size)]
        self._answers = [_answer(rank) for rank in range(1, self._world_size)]
        self._roll = self._client.peek(_ROLL) or b"[[], null]"
        self._earlier = frozenset(json.loads(self._roll)[0])
        self._suspects_until_s = time.monotonic() + min(_SUSPECT_S, self._timeout_s / 4)
        self._num_signs = 0

    def ask(self) -> str | None:
        found = self._client.take(self._arrivals) if self._client.has(self._arrivals) else None
        if found is None:
            return None
        self._require_own_place(found[0])
        nonces = [nonce.decode() for nonce in found]
        if not self._earlier.isdisjoint(nonces) and time.monotonic() < self._suspects_until_s:
            return None
        if nonces != self.nonces:
            self.nonces = nonces
            self._call(None)
        digest = _digest(self._roll)
        if self._answers and not self._client.has(self._answers):
            return None
        answers = self._client.take(self._answers) if self._answers else []
        if answers is None or any(answer.decode() != digest for answer in answers):
            return None
        self._require_own_place(self._client.peek(_arrived(0)))
        self._sign("go")
        return digest

    def _call(self, error: dict[str, Any] | None) -> None:
        self._roll = json.dumps([self.nonces, error]).encode()
        self._client.put(_ROLL, self._roll)
        self._sign("call" if error is None else "failed")

    def _sign(self, word: str) -> None:
        """Tell the others how far the lead is. Each sign differs, so that they see that it lives."""
        self._num_signs += 1
        digest = _digest(self._roll)
        self._client.put(_STAGE, f"{word} {digest} {self._num_signs} {self.nonce}".encode())

    def look(self) -> str | None:
        """Show that the lead lives; raise, here and on all that have come, if a rank is dead, or missing when the time is up."""
        there = [self._client.peek(key) for key in self._arrivals]
        self._require_own_place(there[0])
        is_late = self._clock() - self._heard_s > self._timeout_s
        missing = [rank for rank, nonce in enumerate(there) if nonce is None]
        if dead := ended(self._client, missing):  # that somebody has vouched for, by a heartbeat
            error = RankAbsentError(f"phase join failed: {dead[min(dead)].cause}", rank=min(dead), phase="join")
        elif not is_late:
            self._sign("call" if self.nonces else "wait")
            return None
        else:
            if not missing:
                wanted = _digest(self._roll).encode()
                missing = [rank for rank, key in enumerate(self._answers, start=1) if self._client.peek(key) != wanted]
            if not missing and (name := self.ask()) is not None:
                return name  # the last one has just answered
            error = _absent(missing or [0], there[missing[0]] if missing else None, self._timeout_s)
        self.nonces = [nonce.decode() for nonce in there if nonce is not None]
        self._call(describe(error))
        raise error


def _who(arrival: bytes) -> str:
    """Return "pid 7 on host", of a nonce."""
    return arrival.decode().partition(" ")[2]


def _displaced(rank: int, by: str) -> CheckpointError:
    return CheckpointError(
        f"two processes have come as rank {rank} of this job, the other one {_who(by.encode())}: give each process a rank of its own. "
        "After a restart the earlier one ends here, or this one if the job has gone on with that: end all processes of the earlier life",
        rank=rank,
        phase="join",
    )


def _absent(missing: list[int], arrival: bytes | None, timeout_s: float) -> RankAbsentError:
    others = [f"rank {rank}" for rank in missing[1:4]] + (["..."] if len(missing) > 4 else [])
    ranks = f"rank {missing[0]}" + (f" and {', '.join(others)}" if others else "")
    last = "" if arrival is None else f"; the last process that came as rank {missing[0]} is {_who(arrival)}"
    return RankAbsentError(
        f"phase join failed: {ranks} did not join the job within {timeout_s:g} s{last}", rank=missing[0], phase="join"
    )
