"""Name the part of the store that this life of a job uses: no earlier process over the same store can have used it.

A launcher that restarts ranks may keep the store, and with it all keys of the life before. Numbers do not help: a restarted process
counts from 0 again, and a counter in the store is a key of an earlier life itself. So the ranks meet before they agree on anything:

    rank r    arrived/<r>: a new nonce
    lead      roll: the nonces of all ranks, its own included; again whenever one of them changes.   stage: call <digest of the roll>
    rank r    finds its own nonce in the roll.                                                        answer/<r>: that digest
    lead      all answers are the digest of its last roll.                                            stage: go <digest>

The digest is the prefix of every key from then on. A nonce of an earlier life only delays: its rank has not answered yet. An answer of an
earlier life never matches, because the lead's nonce is new; and a rank goes on with no roll but one that holds its own.

    arrived --roll holds our nonce--> answered --go--> met
       |                                  |
       +--------- time is up, or the lead says that it is ------> failed
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import time
from typing import Any

from ckpt.errors import CheckpointError, RankAbsentError, describe, rebuild
from ckpt.ranks.store_client import StoreClient
from ckpt.ranks.waiting import nap_s, poll_until

_ROLL, _STAGE = "roll", "stage"
_SIGN_S = 0.5  # between two signs of life of the lead


def meet(client: StoreClient, rank: int, world_size: int, *, host: str, timeout_s: float) -> str:
    """Return the name of this life of the job, equal on all ranks. Collective.

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
    return poll_until(one.ask, look=one.look, look_s=_SIGN_S, nap=lambda waited_s: nap_s(waited_s, world_size))


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
        self._heard_s = time.monotonic()
        self._stage: bytes | None = None
        self._answered = ""

    def ask(self) -> str | None:
        stage = self._client.peek(_STAGE)
        if stage is None or stage == self._stage:
            return None
        self._stage, self._heard_s = stage, time.monotonic()
        word, digest, *_ = stage.decode().split()
        if digest != self._answered and word != "wait":
            self._read_roll(word == "failed")
        return digest if word == "go" and digest == self._answered else None

    def _read_roll(self, has_failed: bool) -> None:
        """Answer the roll, or raise the lead's error, if this process is in it: else it is of other processes."""
        roll = self._client.peek(_ROLL) or b"[[], null]"
        nonces, error = json.loads(roll)
        if self.nonce not in nonces:
            return
        if has_failed and error is not None:
            raise rebuild(error)
        if len(nonces) == self._world_size:
            self._answered = _digest(roll)
            self._client.put(_answer(self._rank), self._answered.encode())

    def look(self) -> None:
        """Raise if the lead is silent, or if this rank is another process by now."""
        if time.monotonic() - self._heard_s > self._timeout_s:
            raise _absent(0, self._client.peek(_arrived(0)), self._timeout_s)
        self._require_own_place()

    def _require_own_place(self) -> None:
        now = self._client.peek(_arrived(self._rank))
        if now is not None and now.decode() != self.nonce:
            raise CheckpointError(
                f"two processes have come as rank {self._rank} of this job, the later one {_who(now)}: give each process a rank of its "
                "own; after a restart the earlier one ends here",
                rank=self._rank,
                phase="join",
            )


class _Lead(_Member):
    """Rank 0: calls the roll until all have answered the same."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        ranks = range(self._world_size)
        self._arrivals, self._answers = [_arrived(rank) for rank in ranks], [_answer(rank) for rank in ranks]
        self._nonces: list[str] = []
        self._roll = b""
        self._num_signs = 0

    def ask(self) -> str | None:
        found = self._client.take(self._arrivals) if self._client.has(self._arrivals) else None
        if found is None:
            return None
        nonces = [nonce.decode() for nonce in found]
        if nonces != self._nonces:
            self._nonces = nonces
            self._call(None)
            self._client.put(_answer(0), _digest(self._roll).encode())
        if not self._client.has(self._answers):
            return None
        digest = _digest(self._roll)
        if {answer.decode() for answer in self._client.take(self._answers) or [b""]} != {digest}:
            return None
        self._sign("go")
        return digest

    def _call(self, error: dict[str, Any] | None) -> None:
        self._roll = json.dumps([self._nonces, error]).encode()
        self._client.put(_ROLL, self._roll)
        self._sign("call" if error is None else "failed")

    def _sign(self, word: str) -> None:
        """Tell the others how far the lead is. Each sign differs, so that they see that it lives."""
        self._num_signs += 1
        digest = _digest(self._roll)
        self._client.put(_STAGE, f"{word} {digest} {self._num_signs} {self.nonce}".encode())

    def look(self) -> None:
        """Show that the lead lives; raise, here and on all that have come, if a rank is missing when the time is up."""
        self._require_own_place()
        if time.monotonic() - self._heard_s <= self._timeout_s:
            self._sign("call" if self._nonces else "wait")
            return
        there = [self._client.peek(key) for key in self._arrivals]
        answers = [self._client.peek(key) for key in self._answers]
        wanted = _digest(self._roll).encode() if self._nonces else None
        missing = [rank for rank, one in enumerate(there) if one is None]
        missing = missing or [rank for rank, one in enumerate(answers) if one != wanted and rank]
        if not missing:
            return  # the last one has just answered
        error = _absent(missing[0], there[missing[0]], self._timeout_s, missing)
        self._nonces = [one.decode() for one in there if one is not None]
        self._call(describe(error))
        raise error


def _who(arrival: bytes) -> str:
    """Return "pid 7 on host", of a nonce."""
    return arrival.decode().partition(" ")[2]


def _absent(rank: int, arrival: bytes | None, timeout_s: float, missing: list[int] | None = None) -> RankAbsentError:
    others = [f"rank {one}" for one in (missing or [])[1:4]] + (["..."] if len(missing or []) > 4 else [])
    ranks = " and ".join([f"rank {rank}", ", ".join(others)]) if others else f"rank {rank}"
    last = "" if arrival is None else f"; the last process that came as rank {rank} is {_who(arrival)}"
    return RankAbsentError(
        f"phase join failed: {ranks} did not join the job within {timeout_s:g} s{last}", rank=rank, phase="join"
    )
