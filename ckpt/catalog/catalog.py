"""The catalog of a checkpoint root, and the claim on it, wherever it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ckpt.catalog.committed import Catalog
from ckpt.catalog.lease import Lease
from ckpt.catalog.ledger import Ledger
from ckpt.catalog.object_ledger import ObjectLedger
from ckpt.catalog.owner import FolderLock
from ckpt.catalog.retention import Retention
from ckpt.format.places import Place

Lock = FolderLock | Lease
"""A run's claim on a root."""


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
        return Ledger(root, run_id=run_id, saves_as=saves_as, keep_last=keep_last, stale_s=stale_s, delete=delete)
    return ObjectLedger(root, run_id=run_id, saves_as=saves_as, keep_last=keep_last, stale_s=stale_s)


def lock_at(owner: Place, *, run_id: str, what: str, advice: str, stale_s: float) -> Lock:
    """Return a claim on a root, by its owner file or object in it. See `FolderLock` for the arguments."""
    kind: Any = FolderLock if isinstance(owner, Path) else Lease
    lock: Lock = kind(owner, run_id=run_id, what=what, advice=advice, stale_s=stale_s)
    return lock
