"""Client of a job's key-value store: values of any size, and queues; no call but `pop` waits for another rank."""

from __future__ import annotations

import copy
import json
import threading
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from ckpt.ranks.stores import StoreGoneError, connection, has_queues, where_is
from ckpt.ranks.waiting import OutOfTimeError, poll_until

_PIECE_BYTES = 4 << 20  # longest value of one key; the store closes a connection that sends more than 8 MiB
_COMPRESS_BYTES = 64 << 10
_LOOK_S = 1.0
_NOTHING = "?"  # no packed value begins with it, see `StoreClient._packed`
_T = TypeVar("_T")


class _VanishedError(Exception):
    """A key was deleted meanwhile."""


class _Wire:
    """A connection, which carries one request at a time, with its deadline."""

    def __init__(self, store: Store, timeout_s: float, longest_wait_s: float) -> None:
        self._where = where_is(store)
        self._timeout_s = timeout_s
        self._silence: str | None = None
        self._lock = threading.Lock()
        self.connection: Store = connection(store, timeout_s)
        self.connection.set_timeout(timedelta(seconds=longest_wait_s))

    def call(self, method: Callable[..., _T], *args: Any) -> _T:
        with self._lock:
            if self._silence is not None:  # a late answer to that call would be read as the answer to this one
                raise StoreGoneError(self._silence, is_silent=True)
            began_s = time.monotonic()
            try:
                return method(*args)
            except dist.DistStoreError as error:
                raise _VanishedError(str(error)) from error
            except dist.DistError as error:
                if time.monotonic() - began_s < 0.99 * self._timeout_s:
                    raise StoreGoneError(str(error)) from error
                self._silence = f"the store at {self._where} did not answer {method.__name__} within {self._timeout_s:g} s"
                raise StoreGoneError(self._silence, is_silent=True) from error


class StoreClient:
    """A connection to a store, for values of any size. Any thread; no call but `pop` waits for another rank.

    Each call may raise `StoreGoneError`; after the first one all do.

    Args:
        writer: rank of this process.
        timeout_s: that the store may take to answer a call.
        pops: of a connection that is for `pop` alone, which waits up to `timeout_s` for a message.

    Attributes:
        connection: the store, over the connection of this client.
    """

    def __init__(self, store: Store, *, writer: int, timeout_s: float = 300.0, pops: bool = False) -> None:
        # Else only get and multi_get can wait, and only if another rank has just deleted a key.
        self._wire = _Wire(store, timeout_s, timeout_s if pops else min(10.0, timeout_s))
        self._take_part(self._wire.connection, writer, has_queues(store))

    def _take_part(self, part: Store, writer: int, queues: bool) -> None:
        self.connection = part
        self._writer = writer
        self._pieces: dict[str, list[str]] = {}
        self._has_queues = queues
        self._num_pushed = self._num_popped = 0
        self._awaited: list[int] = []  # numbers of messages in a store without queues

    def part(self, name: str) -> StoreClient:
        """Return a client of a part of the store, over the same connection."""
        made = copy.copy(self)
        made._take_part(PrefixStore(name, self.connection), self._writer, self._has_queues)
        return made

    def put(self, key: str, data: bytes, *, compress: bool = True) -> None:
        self._call(self.connection.set, key, self._packed(key, data, compress))

    def put_first(self, key: str, data: bytes) -> bytes:
        """Set a key that is not set yet; return its value, `data` or another rank's."""
        packed = self._packed(key, data, True)
        there = self._call(self.connection.compare_set, key, "", packed)
        if there == packed:
            return data
        self._delete_pieces(key)
        return self._unpacked(key, there)

    def peek(self, key: str) -> bytes | None:
        """Return the value, or None."""
        packed = self._there(key)
        try:
            return None if packed is None else self._unpacked(key, packed)
        except _VanishedError:
            return None

    def _there(self, key: str) -> bytes | None:
        """Return what stands under a key, or None. (`compare_set` answers with the expected value if there is no key.)"""
        found = self._call(self.connection.compare_set, key, _NOTHING, _NOTHING)
        return None if found == _NOTHING.encode() else found

    def has(self, keys: list[str]) -> bool:
        return bool(self._call(self.connection.check, keys))

    def take(self, keys: list[str]) -> list[bytes] | None:
        """Return the values, or None if one of the keys is gone, which takes seconds to find out."""
        try:
            found = self._call(self.connection.multi_get, keys)
            return [self._unpacked(key, packed) for key, packed in zip(keys, found, strict=True)]
        except _VanishedError:
            return None

    def push(self, inbox: str, data: bytes) -> None:
        """Put a message into a queue, from which one reader pops it."""
        self._num_pushed += 1
        packed = self._packed(f"{inbox}/{self._num_pushed}", data, True)
        if self._has_queues:
            self._call(self.connection.queue_push, inbox, packed)
        else:
            number = self._call(self.connection.add, f"{inbox}/number", 1)
            self._call(self.connection.set, f"{inbox}/{number}", packed)

    def pop(self, inbox: str) -> bytes | None:
        """Wait for the next message, while the server wakes this client; None: none has come for some seconds."""
        if not self._has_queues:
            return self._pop_by_number(inbox)
        try:
            return self._message(self._call(self.connection.queue_pop, inbox, True))
        except _VanishedError:
            return None

    def pop_waiting(self, inbox: str) -> list[bytes]:
        """Return all messages that are there, each in half of the time of `pop`."""
        num = self.num_waiting(inbox)
        return [self._message(self._call(self.connection.queue_pop, inbox, False)) for _ in range(num)]

    def num_waiting(self, inbox: str) -> int:
        """Return how many messages are in a queue; of a store without queues, which is asked all the time, 0."""
        return self._call(self.connection.queue_len, inbox) if self._has_queues else 0

    def _message(self, packed: bytes) -> bytes:
        data = self._unpacked("", packed)
        self._delete_pieces("")
        return data

    def _pop_by_number(self, inbox: str) -> bytes | None:
        """As `pop`, for a store without queues, which is asked again and again."""
        with suppress(OutOfTimeError):
            return poll_until(lambda: self._next_by_number(inbox), timeout_s=_LOOK_S)
        return None

    def _next_by_number(self, inbox: str) -> bytes | None:
        """Return the first message that is there. Not yet there, or never, is that of a rank that has ended with its number alone."""
        given = self._there(f"{inbox}/number")  # without `add`: of a FileStore it writes
        num_given = 0 if given is None else int(given)
        self._awaited += range(self._num_popped + 1, num_given + 1)
        self._num_popped = num_given
        for number in self._awaited:
            if (data := self.peek(key := f"{inbox}/{number}")) is not None:
                self._awaited.remove(number)
                self.delete(key)
                return data
        return None

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, which begins at 0, and return the sum. Any thread."""
        return self._call(self.connection.add, key, amount)

    def delete(self, key: str) -> None:
        self._call(self.connection.delete_key, key)
        self._delete_pieces(key)

    def _packed(self, key: str, data: bytes, compress: bool) -> bytes:
        packed = b"z" + zlib.compress(data, 1) if compress and len(data) > _COMPRESS_BYTES else b"=" + data
        if len(packed) <= _PIECE_BYTES:
            return packed
        pieces = [packed[at : at + _PIECE_BYTES] for at in range(0, len(packed), _PIECE_BYTES)]
        keys = [f"{key}/{self._writer}.{number}" for number in range(len(pieces))]
        for piece_key, piece in zip(keys, pieces, strict=True):
            self._call(self.connection.set, piece_key, piece)
        self._pieces[key] = keys
        return b"s" + json.dumps(keys).encode()

    def _unpacked(self, key: str, packed: bytes) -> bytes:
        if packed[:1] == b"s":
            self._pieces[key] = json.loads(packed[1:])
            packed = b"".join(self._call(self.connection.get, piece) for piece in self._pieces[key])
        return zlib.decompress(packed[1:]) if packed[:1] == b"z" else packed[1:]

    def _delete_pieces(self, key: str) -> None:
        for piece in self._pieces.pop(key, ()):
            self._call(self.connection.delete_key, piece)

    def _call(self, method: Callable[..., _T], *args: Any) -> _T:
        return self._wire.call(method, *args)
