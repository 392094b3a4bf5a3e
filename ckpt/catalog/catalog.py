"""The catalog of a checkpoint root, wherever it is: which checkpoints are committed, and how a new one becomes so."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

from ckpt.catalog.committed import Committed
from ckpt.catalog.lease import Lease
from ckpt.catalog.ledger import Commit, Ledger
from ckpt.catalog.object_ledger import ObjectLedger
from ckpt.catalog.owner import FolderLock
from ckpt.catalog.retention import Retention
from ckpt.format.places import Place

Lock = FolderLock | Lease
"""A run's claim on a root."""

At = TypeVar("At", bound=Place)


class Catalog(Protocol[At]):
    """All checkpoints below one root. Any rank may read; only the lead does the rest.

    new --open--> unpublished --record, publish--> committed; `discard_all` ends what is unpublished.

    `ckpt.catalog.ledger.Ledger` says what each method does, `ckpt.catalog.object_ledger.ObjectLedger` what is different in a store.
    """

    def committed(self) -> Sequence[Committed[At]]: ...

    def newest(self) -> Committed[At] | None: ...

    def newer_than(self, checkpoint: Place) -> Sequence[Committed[At]] | None: ...

    def next_commit(self) -> Commit: ...

    def renamed(self) -> list[str]: ...

    def claim(self, lock: Any, progress: Callable[[], object]) -> None: ...

    def open(self, checkpoint_id: str) -> At: ...

    def open_at(self, target: At) -> At: ...

    def open_again(self, target: At, nonce: str) -> At: ...

    def leave(self, unpublished: At) -> None: ...

    def is_seen(self, unpublished: At) -> bool: ...

    def record(self, unpublished: At, manifest: bytes) -> None: ...

    def publish(
        self,
        unpublished: At,
        checkpoint_id: str,
        *,
        refused: Mapping[At, str] | None = None,
        replace_others: bool = False,
        committed: Callable[[At], None] = ...,
    ) -> At: ...

    def require_free(self, target: At) -> None: ...

    def publish_at(
        self, unpublished: At, target: At, *, replaces: bool = False, committed: Callable[[At], None] = ...
    ) -> None: ...

    def living(self) -> Set[str | None]: ...

    def quarantine(self, refused: Mapping[At, str], *, keep: At) -> Sequence[At]: ...

    def abandon(self, newer: Sequence[Committed[At]]) -> Sequence[At]: ...

    def discard(self, unpublished: At) -> None: ...

    def discard_all(self) -> None: ...

    def remove(self, checkpoint: At) -> None: ...

    def retain(
        self,
        *,
        keep: At,
        history: Mapping[str | None, int] = MappingProxyType({}),
        remove_others: bool = False,
        progress: Callable[[], object] = ...,
    ) -> Sequence[At]: ...


def catalog_at(
    root: Place,
    *,
    run_id: str = "reader",
    saves_as: str | None = None,
    keep_last: int | Retention | None = None,
    stale_s: float = 60.0,
    delete: Callable[[Path], None] | None = None,
) -> Catalog[Any]:
    """Return the catalog of a root. See `Ledger` for the arguments."""
    if isinstance(root, Path):
        of_folder: Catalog[Path] = Ledger(
            root, run_id=run_id, saves_as=saves_as, keep_last=keep_last, stale_s=stale_s, delete=delete
        )
        return of_folder
    return ObjectLedger(root, run_id=run_id, saves_as=saves_as, keep_last=keep_last, stale_s=stale_s)


def lock_at(owner: Place, *, run_id: str, what: str, advice: str, stale_s: float) -> Lock:
    """Return a claim on a root, by its owner file or object in it. See `FolderLock` for the arguments."""
    kind: Any = FolderLock if isinstance(owner, Path) else Lease
    lock: Lock = kind(owner, run_id=run_id, what=what, advice=advice, stale_s=stale_s)
    return lock
