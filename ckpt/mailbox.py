"""A job's key-value store as the ranks use it: values of any size, and no call that waits for another rank."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store  # torch.distributed exports it where mypy cannot see it

_PIECE_BYTES = 4 << 20  # longest value put in one key; the store closes the connection of whoever sends more than 8 MiB
_COMPRESS_BYTES = 64 << 10
_NOTHING = "?"  # no value of ours begins with it: see Mailbox._packed
_T = TypeVar("_T")


class StoreGoneError(Exception):
    """The store does not answer any more."""


class _VanishedError(Exception):
    """A key that was there is gone."""


class Mailbox:
    """Values of any size under keys of a store, over a connection of its own. No call waits for another rank.

    One thread at a time: a connection carries one request.
    """

    def __init__(self, store: Store, *, writer: int) -> None:
        self._store: Store = store.clone()  # type: ignore[attr-defined]  # its stub has no clone
        # Only get and multi_get can wait, and only where another rank deleted a key that was there a moment ago.
        self._store.set_timeout(timedelta(seconds=10))
        self._writer = writer
        self._pieces: dict[str, list[str]] = {}

    def put(self, key: str, data: bytes, *, compress: bool = True) -> None:
        self._call(self._store.set, key, self._packed(key, data, compress))

    def put_first(self, key: str, data: bytes) -> bytes:
        """Put `data` there unless something is, and return what is there now."""
        packed = self._packed(key, data, True)
        there = self._call(self._store.compare_set, key, "", packed)
        if there == packed:
            return data
        self._delete_pieces(key)
        return self._unpacked(key, there)

    def peek(self, key: str) -> bytes | None:
        """Return what is there, or None. (`compare_set` answers with the expected value where there is no key.)"""
        packed = self._call(self._store.compare_set, key, _NOTHING, _NOTHING)
        try:
            return None if packed == _NOTHING.encode() else self._unpacked(key, packed)
        except _VanishedError:
            return None

    def has(self, keys: list[str]) -> bool:
        return bool(self._call(self._store.check, keys))

    def take(self, keys: list[str]) -> list[bytes] | None:
        """Return the values, or None if one of the keys is gone (which takes seconds to find out)."""
        try:
            found = self._call(self._store.multi_get, keys)
            return [self._unpacked(key, packed) for key, packed in zip(keys, found, strict=True)]
        except _VanishedError:
            return None

    def delete(self, key: str) -> None:
        self._call(self._store.delete_key, key)
        self._delete_pieces(key)

    def _packed(self, key: str, data: bytes, compress: bool) -> bytes:
        packed = b"z" + zlib.compress(data, 1) if compress and len(data) > _COMPRESS_BYTES else b"=" + data
        if len(packed) <= _PIECE_BYTES:
            return packed
        pieces = [packed[at : at + _PIECE_BYTES] for at in range(0, len(packed), _PIECE_BYTES)]
        keys = [f"{key}/{self._writer}.{number}" for number in range(len(pieces))]
        for piece_key, piece in zip(keys, pieces, strict=True):
            self._call(self._store.set, piece_key, piece)
        self._pieces[key] = keys
        return b"s" + json.dumps(keys).encode()

    def _unpacked(self, key: str, packed: bytes) -> bytes:
        if packed[:1] == b"s":
            self._pieces[key] = json.loads(packed[1:])
            packed = b"".join(self._call(self._store.get, piece) for piece in self._pieces[key])
        return zlib.decompress(packed[1:]) if packed[:1] == b"z" else packed[1:]

    def _delete_pieces(self, key: str) -> None:
        for piece in self._pieces.pop(key, ()):
            self._call(self._store.delete_key, piece)

    def _call(self, method: Callable[..., _T], *args: Any) -> _T:
        try:
            return method(*args)
        except dist.DistStoreError as error:
            raise _VanishedError(str(error)) from error
        except dist.DistError as error:
            raise StoreGoneError(str(error)) from error
