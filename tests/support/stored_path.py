"""Addresses in object stores with the methods of `Path` that tests of folders call: the same tests run on them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath
from types import SimpleNamespace
from typing import Any

from ckpt.format.places import ObjectPath
from ckpt.storage.objects.store import store_of


class StoredPath(ObjectPath):
    """See the module. Folders are there whenever they are named."""

    __slots__ = ()

    def __truediv__(self, below: str | PurePosixPath) -> StoredPath:
        return StoredPath(self.scheme, self.bucket, f"{self.key}/{below}" if self.key else str(below))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObjectPath) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash((self.scheme, self.bucket, self.key))

    @property
    def parent(self) -> StoredPath:
        return StoredPath(self.scheme, self.bucket, self.key.rpartition("/")[0])

    def mkdir(self, **_: Any) -> None: ...

    def unlink(self) -> None:
        store_of(self).delete([self.key])

    def read_bytes(self) -> bytes:
        return bytes(store_of(self).get(self.key)[0])

    def write_bytes(self, data: bytes) -> None:
        store_of(self).put(self.key, data)

    def stat(self) -> SimpleNamespace:
        return SimpleNamespace(st_size=store_of(self).head(self.key)[0])

    def iterdir(self) -> Iterator[StoredPath]:
        folders, objects = store_of(self).names(self.key)
        return (self / name for name in (*folders, *objects))

    def rename(self, other: StoredPath) -> StoredPath:
        store = store_of(self)
        for one in list(store.below(self.key)):
            store.copy(one.key, other.key + one.key.removeprefix(self.key))
            store.delete([one.key])
        return other
