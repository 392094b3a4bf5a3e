"""Committed checkpoints: what the first bytes of their manifests say, their order, and what is the same in all catalogs of them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from ckpt.catalog.retention import Retention
from ckpt.errors import CheckpointError, CheckpointExistsError, CorruptCheckpointError, logger_of, sentence, telling
from ckpt.format.manifest import MANIFEST_NAME, MAX_COMMIT_NUMBER, is_fence
from ckpt.format.manifest_parsing import require_own_digest
from ckpt.format.places import Place
from ckpt.storage.checkpoint_files import files_below
from ckpt.storage.stored import identity_of, read_manifest, read_manifest_bytes

COMMITTED = "checkpoint-"
_TIMESTAMP = re.compile(rb'"timestamp"\s*:\s*"([^"]+)"')
_COMMIT_NUMBER = re.compile(rb'"commit_number"\s*:\s*(-?\d[\d.]*)\s*[,}]')
_ID = re.compile(rb'"checkpoint_id"\s*:\s*("(?:[^"\\]|\\.)*")')
_RUN_ID = re.compile(rb'"run_id"\s*:\s*"([0-9A-Za-z_.-]{1,64})"')
_REMOVED = re.compile(rb'\n  "removed": (\["[0-9A-Za-z_", -]+"\]),?\n')
_HEAD_BYTES = 4096  # holds these keys as `CheckpointManifest` writes them; other writers may order them otherwise
_MOST_BYTES = 1 << 16
_AHEAD = timedelta(days=1)
_UNKNOWN = -1

_log = logger_of(__name__)


_Where = TypeVar("_Where", bound=Place, covariant=True)
Where = TypeVar("Where", bound=Place)
"""A path, or an object's address."""


@dataclass(frozen=True, slots=True)
class Committed(Generic[_Where]):
    """A checkpoint that was published: `path` holds a manifest.

    Attributes:
        timestamp: of the manifest, UTC.
        number: its `commit_number`; 0: none, as in older versions.
        run_id: of the run that saved it; None: the manifest has none.
        is_ahead: its time is more than a day in the future, and is not used for the order of commits.
        says_id: the manifest says this id; False: it says none or another one, because it is damaged, or the whole name, as saves by path
            write it.
        removed: keys of the components that retention has taken out.
    """

    id: str
    path: _Where
    timestamp: datetime
    number: int = 0
    run_id: str | None = None
    is_ahead: bool = False
    says_id: bool = True
    removed: tuple[str, ...] = ()

    @property
    def order(self) -> tuple[int, bool, datetime, str]:
        """Sort key for the order of commits: by number; checkpoints without one come first, by time."""
        return self.number, not self.is_ahead, self.timestamp, self.id


def look(path: Where) -> Committed[Where] | None:
    """Return the checkpoint in this folder, under the id in its manifest; None: it has no manifest."""
    try:
        head = _head_of(path)
        return None if head is None else committed_in(head, path)
    except FileNotFoundError:
        return None


def committed_in(head: bytes, path: Where) -> Committed[Where]:
    """Return the checkpoint of which the first bytes of a manifest, or all, tell.

    Raises:
        FileNotFoundError: they are damaged, and the manifest is gone meanwhile.
    """
    timestamp, number, run_id = _timestamp(head), _COMMIT_NUMBER.search(head), _RUN_ID.search(head)
    id = _recorded_id(head)
    is_damaged = timestamp is None or (run_id is not None and number is None)
    if timestamp is None or is_damaged:
        timestamp = _time_of(path)
    return Committed(
        id or "",
        path,
        timestamp,
        number=_UNKNOWN if is_damaged else _counted(number[1] if number is not None else b""),
        run_id=run_id[1].decode() if run_id is not None else None,
        is_ahead=timestamp - datetime.now(UTC) > _AHEAD,
        says_id=id is not None,
        removed=_removed(head),
    )


def look_for(checkpoint_id: str, path: Where) -> Committed[Where] | None:
    """Return the checkpoint in this folder; None: it has no manifest, or a whole one that says another id."""
    one = look(path)
    if one is None or (one.says_id and one.id not in (checkpoint_id, path.name) and _is_whole(path)):
        return None
    return replace(one, id=checkpoint_id, says_id=one.id == checkpoint_id)


def runs_of(one: Committed[Place]) -> set[str | None]:
    """Return the ids of the run that saved a checkpoint, and of those that it went on from, as far as its manifest can be read."""
    try:
        return {one.run_id, *read_manifest(one.path).history}
    except CheckpointError:
        return {one.run_id}


def continues(new: Place, old: Committed[Place]) -> bool:
    """Whether a checkpoint is of the run that has saved an older one, or of a run that went on from it."""
    if (one := look(new)) is not None and one.run_id == old.run_id:
        return True
    try:
        return old.number <= read_manifest(new).history.get(old.run_id or "", -1)
    except CheckpointError:
        return False


def placed(found: Sequence[Committed[Where]]) -> list[Committed[Where]]:
    """Order checkpoints. One with a damaged manifest is not placed before its time, so that a load reports a damaged newest one.

    The manifest is damaged if it says too little, or if its number contradicts its time and it does not match its digest.
    """
    in_order = sorted((commit for commit in found if commit.number != _UNKNOWN), key=lambda one: one.order)
    by_time = sorted(in_order, key=lambda one: one.timestamp)
    known = {commit.id: commit for commit, at in zip(in_order, by_time, strict=True) if commit is at or _is_whole(commit.path)}
    return [*known.values()] + [
        replace(commit, number=max([0, commit.number, *(k.number for k in known.values() if k.timestamp <= commit.timestamp)]))
        for commit in found
        if commit.id not in known
    ]


def _is_whole(checkpoint: Place) -> bool:
    """Whether a manifest matches its own digest."""
    with suppress(CheckpointError, OSError):
        return _matches_own_digest(checkpoint, identity_of(checkpoint))
    return False


def id_in(name: str) -> str:
    return name.removeprefix(COMMITTED)


@lru_cache(maxsize=1024)
def _matches_own_digest(checkpoint: Place, identity: tuple[object, ...] | None) -> bool:
    try:
        require_own_digest(read_manifest_bytes(checkpoint), str(checkpoint))
    except CorruptCheckpointError:
        return False
    return True


def _head_of(checkpoint: Place) -> bytes | None:
    """Return the first bytes of a manifest, up to its tables; b"" if they cannot be read; None: there is no manifest.

    A folder that one may not enter counts as a checkpoint: the others beside it are found, and whoever reads it is told why he cannot.

    Raises:
        OSError: an object store does not answer. To a reader, its checkpoints must not seem damaged, nor missing.
    """
    try:
        if isinstance(checkpoint, Path) and not (checkpoint / MANIFEST_NAME).is_file():
            return None
        with files_below(checkpoint) as files:
            head = files.first_bytes(MANIFEST_NAME, _HEAD_BYTES)
            if _TIMESTAMP.search(head) is None or _ID.search(head) is None:
                head = files.first_bytes(MANIFEST_NAME, _MOST_BYTES)
    except FileNotFoundError:
        if isinstance(checkpoint, Path):
            raise
        return None
    except (OSError, CorruptCheckpointError) as error:
        if not isinstance(checkpoint, Path):
            raise
        _log.debug("%s cannot be read: %s", checkpoint / MANIFEST_NAME, sentence(error))
        return b""
    return None if is_fence(head) else head


def _time_of(checkpoint: Place) -> datetime:
    """The time at which a manifest was last changed: where it does not say when it was committed. Of a closed folder its own."""
    if isinstance(checkpoint, Path):
        with suppress(PermissionError):
            return datetime.fromtimestamp((checkpoint / MANIFEST_NAME).stat().st_mtime, UTC)
        return datetime.fromtimestamp(checkpoint.stat().st_mtime, UTC)
    return datetime.now(UTC)


def _recorded_id(head: bytes) -> str | None:
    """Return the id in a manifest; None: there is none, or it is damaged."""
    match = _ID.search(head)
    try:
        return str(json.loads(match[1])) if match is not None else None
    except ValueError:
        return None


def _removed(head: bytes) -> tuple[str, ...]:
    """Return the components that a manifest says are taken out; none where that cannot be read."""
    match = _REMOVED.search(head)
    try:
        return tuple(map(str, json.loads(match[1]))) if match is not None else ()
    except ValueError:
        return ()


def _timestamp(head: bytes) -> datetime | None:
    """Return the commit time in a manifest; None: it is damaged."""
    match = _TIMESTAMP.search(head)
    if match is None:
        return None
    try:
        stamp = datetime.fromisoformat(match[1].decode())
        return stamp.astimezone(UTC) if stamp.tzinfo else stamp.replace(tzinfo=UTC)
    except (ValueError, OverflowError):
        return None


def _counted(number: bytes) -> int:
    """Parse a commit number; 0 if no save can have counted up to it."""
    found = int(number) if number.isdigit() and len(number) <= len(str(MAX_COMMIT_NUMBER)) else 0
    return found if found <= MAX_COMMIT_NUMBER else 0


class Catalog(Protocol[Where]):
    """All checkpoints below one root. Any rank may read; only the lead does the rest.

    new --open--> unpublished --record, publish--> committed; `discard_all` ends what is unpublished.

    `ckpt.catalog.ledger.Ledger` says what each method does, `ckpt.catalog.object_ledger.ObjectLedger` what is different in a store.
    """

    _root: Where
    _saves_as: str | None
    _retention: Retention
    _opened: dict[Where, Any]
    """Unpublished checkpoint of this object -> what is known of it."""

    def committed(self) -> Sequence[Committed[Where]]: ...

    def newest(self) -> Committed[Where] | None:
        """Return the checkpoint that was committed last."""
        return max(self.committed(), key=lambda commit: commit.order, default=None)

    def newer_than(self, checkpoint: Place) -> Sequence[Committed[Where]] | None: ...

    def next_commit(self) -> Commit: ...

    def renamed(self) -> list[str]:
        """Return the names of copied and renamed checkpoints in the root, which are the user's."""
        names = [name for name in self._names() if name.startswith(COMMITTED)]
        return [name for name in names if look(self._root / name) and not look_for(id_in(name), self._root / name)]

    def claim(self, lock: Any, progress: Callable[[], object]) -> None: ...

    def open(self, checkpoint_id: str) -> Where: ...

    def open_at(self, target: Where) -> Where: ...

    def open_again(self, target: Where, nonce: str) -> Where: ...

    def leave(self, unpublished: Where) -> None: ...

    def is_seen(self, unpublished: Where) -> bool: ...

    def record(self, unpublished: Where, manifest: bytes) -> None: ...

    def publish(
        self,
        unpublished: Where,
        checkpoint_id: str,
        *,
        refused: Mapping[Where, str] | None = None,
        replace_others: bool = False,
        committed: Callable[[Where], None] = ...,
    ) -> Where: ...

    def require_free(self, target: Where) -> None: ...

    def publish_at(
        self, unpublished: Where, target: Where, *, replaces: bool = False, committed: Callable[[Where], None] = ...
    ) -> None: ...

    def living(self) -> Set[str | None]: ...

    def quarantine(self, refused: Mapping[Where, str], *, keep: Where) -> Sequence[Where]: ...

    def abandon(self, newer: Sequence[Committed[Where]]) -> Sequence[Where]: ...

    def discard(self, unpublished: Where) -> None: ...

    def discard_all(self) -> None:
        """Discard every open save of this object. Never raises."""
        for unpublished in list(self._opened):
            self.discard(unpublished)

    def remove(self, checkpoint: Where) -> None: ...

    def retain(
        self,
        *,
        keep: Where,
        history: Mapping[str | None, int] = MappingProxyType({}),
        remove_others: bool = False,
        spare: Set[Where] = frozenset(),
        progress: Callable[[], object] = lambda: None,
    ) -> list[Where]:
        """Remove the checkpoints of a run that its retention does not keep, after `keep` was committed; return what was removed.

        Then take out of those that stay the components that only newer ones keep.

        `keep` is never removed, and counts as the newest. Neither counted nor removed are symbolic links, folders whose manifest does not
        say the id that is in their name, and checkpoints of other living runs.

        Args:
            history: run id -> the largest commit number that counts, of the runs that this one goes on from.
            remove_others: also remove the checkpoints of all other runs.
            spare: those that stay for now.
            progress: called between files.
        """
        if not self._retention.acts and not remove_others:
            return []
        with telling(f"checkpoint root {self._root} cannot be read"):
            committed, living = self._settled(), self.living()
        newest = next((commit for commit in committed if self._is(commit.path, keep)), None)
        found = [commit for commit in committed if commit is not newest and commit.says_id and commit.run_id not in living]
        ours = [commit for commit in found if commit.run_id == self._saves_as or commit.number <= history.get(commit.run_id, -1)]
        surplus = [commit for commit in found if commit not in ours] if remove_others else []
        surplus += self._retention.surplus(ours, newest)
        removed = [old.path for old in surplus if old.path not in spare and self._remove_surplus(old)]
        for old, keys in self._retention.outdated([commit for commit in ours if commit not in surplus], newest):
            with to_be_tried_again(f"{', '.join(keys)} cannot be removed from {old.path}"), suppress(FileNotFoundError):
                self._take_out(old, keys, progress)
        return removed

    def _names(self) -> Iterable[str]:
        """The names in the root."""

    def _settled(self) -> Sequence[Committed[Where]]:
        """The committed checkpoints that a retention counts, after interrupted replacements are finished."""

    def _is(self, now: Where, named: Where) -> bool:
        """Whether `named` is the checkpoint at `now`."""

    def _remove_surplus(self, old: Committed[Where]) -> bool:
        """Remove a checkpoint; return whether it went."""

    def _take_out(self, one: Committed[Where], keys: Sequence[str], progress: Callable[[], object]) -> None: ...

    def _require_not_of_another(self, one: Committed[Where] | None) -> None:
        """Require that a checkpoint which is to be replaced is not of another run that lives, which would lose it."""
        if one is not None and one.run_id != self._saves_as and one.run_id in self.living():
            found = f"{one.path} is of another run, {one.run_id}, which lives and shares the root"
            raise CheckpointExistsError(f"{found}: save under ids of each run's own, or into another root")


class Commit(NamedTuple):
    """The place of a new checkpoint in the order of commits.

    Attributes:
        number: greater than that of every checkpoint in the root.
        timestamp: now, or just after the newest checkpoint if the clock is behind it by less than a day. UTC.
        behind: the latest time in the root minus the clock; zero or less: the clock is right.
        runs: the run ids of the checkpoints in the root.
    """

    number: int
    timestamp: datetime
    behind: timedelta
    runs: frozenset[str | None] = frozenset()


def commit_after(found: Sequence[Committed[Where]]) -> Commit:
    """Return the place in the order of commits of a checkpoint that comes after all of these."""
    now = datetime.now(UTC)
    number = 1 + max((commit.number for commit in found), default=0)
    latest = max((commit.timestamp for commit in found), default=now)
    credible = [commit.timestamp + timedelta(microseconds=1) for commit in found if not commit.is_ahead]
    runs = frozenset(commit.run_id for commit in found)
    return Commit(min(number, MAX_COMMIT_NUMBER), max([now, *credible]), latest - now, runs)


@contextmanager
def warned(what: str, errors: tuple[type[Exception], ...] = (OSError,)) -> Iterator[None]:
    """Turn one of these errors inside the block into a warning. For clean-up only: the save goes on."""
    try:
        yield
    except errors as error:
        _log.warning("%s: %s", what, sentence(error))


def to_be_tried_again(what: str) -> AbstractContextManager[None]:
    """See `warned`. What fails is done by the next save."""
    return warned(f"{what}, the next save tries again", (OSError, CheckpointError))
