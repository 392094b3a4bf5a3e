"""Claims on addresses of an object store: an object names the process that uses a run's root, and is replaced by it at each heartbeat.

A store has no locks. Each heartbeat is a put that expects the version of the one before, so two processes cannot both hold a claim: one of
them finds that its put is refused. Whether an owner lives, another process sees by its own clock: the object has had one version for
`stale_s`. An owner of this machine that has ended is known at once. The counterpart of `ckpt.catalog.owner`.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from ckpt.catalog.owner import about_process, has_ended, who
from ckpt.errors import CheckpointError, FolderInUseError, StorageError, logger_of, sentence
from ckpt.format.places import ObjectPath
from ckpt.ranks.waiting import start
from ckpt.storage.objects.store import Store, Tag, store_of

BEAT_S = 10.0
"""Seconds between two heartbeats, or a sixth of the time after which an owner counts as dead. A put costs money: this is 5 cents a day."""

_LOOK_S = 0.5
_MOST_BYTES = 1 << 16
_log = logger_of(__name__)


class _Held:
    """A claim of this process, with its heartbeat.

        held --a beat is refused--> lost
        held --release--> released
    """

    def __init__(self, store: Store, at: ObjectPath, about: dict[str, Any], tag: Tag, beat_s: float) -> None:
        self.at = at
        self.num_users = 0
        self._process = os.getpid()
        self._store = store
        self._about = about
        self._tag = tag
        self._beat_s = beat_s
        self._count = 0
        self._lost = False
        self._stop = threading.Event()
        self._beating = threading.Lock()
        self._thread = threading.Thread(target=self._beat, name=f"heartbeat of {at}", daemon=True)
        start(self._thread)

    @property
    def stands(self) -> bool:
        return not self._lost and not self._stop.is_set() and self._process == os.getpid()

    def release(self) -> None:
        """End the claim: the next claimant need not wait. The object stays, for a store can delete none on the condition of a version."""
        if self._process == os.getpid() and not self._stop.is_set():
            self._stop.set()
            if self._thread.ident != threading.get_ident():
                self._thread.join()
            if not self._lost:
                self._store.replace(self.at.key, _encoded(self._about | {"released": True}), self._tag)

    def _beat(self) -> None:
        while not self._lost and not self._stop.wait(self._beat_s):
            try:
                self.beat()
            except OSError as error:
                _log.warning("the heartbeat of %s fails: %s", self.at, sentence(error))

    def beat(self) -> None:
        """Show that this process lives, and see whether the claim stands."""
        with self._beating:
            if self.stands:
                self._count += 1
                tag = self._store.replace(self.at.key, _encoded(self._about | {"beat": self._count}), self._tag)
                if tag is None:
                    self._lost = True
                    _log.warning("%s was taken by another process: this one had been silent for too long", self.at)
                else:
                    self._tag = tag


class Lease:
    """A claim on a root that one run uses at a time. Held from `acquire` to `release`. The counterpart of `owner.FolderLock`.

    All leases of one process on the same object share one claim.

    Args:
        at: address of the object.
        run_id: of this run.
        what: the root, for the error.
        advice: next step for a refused user, for the error.
        stale_s: how long an owner may be silent before it counts as dead, in seconds.

    Attributes:
        known: what the holder knows of the root, for as long as nobody else changes it: see `ObjectLedger`.
    """

    def __init__(self, at: ObjectPath, *, run_id: str, what: str, advice: str, stale_s: float = 60.0) -> None:
        self._at = at
        self._run_id = run_id
        self._what = what
        self._advice = advice
        self._stale_s = stale_s
        self.known: dict[ObjectPath, Any] = {}
        self._held: _Held | None = None
        self._when_collected: weakref.finalize[..., Lease] | None = None

    def acquire(self, progress: Callable[[], object] = lambda: None) -> None:
        """Claim the root, or check that it is still claimed, which costs nothing.

        A lost claim is acquired again. Another owner is watched until its heartbeat moves (alive: refused) or has been silent for
        `stale_s` (dead: replaced).

        Args:
            progress: called twice a second during this wait.

        Raises:
            FolderInUseError: another process uses the root.
            OSError: the store refuses.
        """
        while self._held is None or not self._held.stands:
            self.release()
            self.known.clear()
            with _ACQUIRING:
                held = next((lease for lease in _HELD if lease.stands and lease.at == self._at), None) or self._take(progress)
                held.num_users += 1
                _HELD.add(held)
            self._held, self._when_collected = held, weakref.finalize(self, _give_back, held)

    @property
    def name(self) -> str:
        """The name of the object in its root."""
        return self._at.name

    @property
    def is_held(self) -> bool:
        """Whether the lease was acquired and not released."""
        return self._held is not None

    def stands(self) -> bool:
        """Whether the claim is held, and no other process has taken it over. Asks the store."""
        if self._held is not None:
            self._held.beat()
        return self._held is not None and self._held.stands

    def release(self) -> None:
        """End the claim, if no other lease of this process shares it. Does nothing if it is not held."""
        if self._held is not None and self._when_collected is not None and self._when_collected.detach() is not None:
            _give_back(self._held)
        self._held = self._when_collected = None

    def _take(self, progress: Callable[[], object]) -> _Held:
        store = store_of(self._at)
        about: dict[str, Any] = about_process(self._run_id) | {"nonce": secrets.token_hex(8)}
        mine = _encoded(about)
        beat_s = min(BEAT_S, self._stale_s / 6)
        while True:
            tag = store.create(self._at.key, mine)
            if tag is None:
                try:
                    data, old = store.get(self._at.key)
                except FileNotFoundError:
                    continue
                record = _read(data)
                if not (record.get("released") or has_ended(record)) and not self._is_silent(store, record, old, progress):
                    continue
                tag = store.replace(self._at.key, mine, old)
            if tag is not None:
                return _Held(store, self._at, about, tag, beat_s)

    def _is_silent(self, store: Store, record: Mapping[str, Any], old: Tag, progress: Callable[[], object]) -> bool:
        """Wait until an owner has been silent for `stale_s`; False: the claim is free, or of another owner, by now.

        Raises:
            FolderInUseError: the heartbeat moved, or the owner has ended its claim meanwhile: it may have saved since this run looked.
        """
        began = time.monotonic()
        _log.warning("%s was in use by %s: waiting up to %.0f s for a sign of life", self._what, who(record), self._stale_s)
        while (silent_s := time.monotonic() - began) < self._stale_s:
            time.sleep(min(_LOOK_S, self._stale_s - silent_s))
            progress()
            try:
                data, tag = store.get(self._at.key)
            except FileNotFoundError:
                return False
            now = _read(data)
            if now.get("nonce") != record.get("nonce"):
                return False
            if now.get("released"):
                raise FolderInUseError(
                    f"{self._what} was in use until now by {who(now)}, which may have saved since this run looked there: start again"
                )
            if tag != old:
                raise self._in_use(now)
            if has_ended(record):
                return True
        return True

    def _in_use(self, record: Mapping[str, Any]) -> FolderInUseError:
        since = f" since {record['since']}" if "since" in record else ""
        return FolderInUseError(f"{self._what} is in use{since} by {who(record)}: {self._advice}")


_HELD: set[_Held] = set()
"""Registry: the claims of this process."""
_ACQUIRING = threading.RLock()


def _give_back(held: _Held) -> None:
    with _ACQUIRING:
        held.num_users -= 1
        if held.num_users == 0:
            _HELD.discard(held)
            try:
                held.release()
            except (OSError, CheckpointError) as error:
                _log.warning("%s cannot be released: %s", held.at, sentence(error))


def _in_child() -> None:
    # A forked child has no heartbeat thread: the claim is its parent's.
    global _ACQUIRING
    _ACQUIRING = threading.RLock()
    _HELD.clear()


os.register_at_fork(after_in_child=_in_child)


def living_runs(root: ObjectPath, names: Mapping[str, float], stale_s: float, own: str) -> set[str]:
    """Return the ids of runs that share a root, and may be alive.

    Args:
        names: of the owner objects in the root -> when each was written, by the store's clock, in seconds.
        own: name of the caller's own object, which is passed over; "": it has none.
    """
    now = max(names.values(), default=0.0)  # an object that was put just now tells the store's time
    store = store_of(root)
    found = set()
    for name, beat in names.items():
        if name == own or now - beat > max(stale_s, 2 * BEAT_S):
            continue
        try:
            record = _read(store.get((root / name).key)[0])
        except FileNotFoundError:
            continue
        if not (record.get("released") or has_ended(record)):
            found.add(str(record.get("run_id")))
    return found


def _encoded(about: Mapping[str, object]) -> bytes:
    return json.dumps(about).encode()


def _read(data: memoryview) -> dict[str, Any]:
    if len(data) > _MOST_BYTES:
        raise StorageError("an owner object is too long to be one of ours")
    try:
        record = json.loads(bytes(data))
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}
