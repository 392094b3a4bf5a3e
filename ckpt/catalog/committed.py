"""What the first bytes of a manifest say of a committed checkpoint, and the order of commits."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import Generic, TypeVar

from ckpt.errors import CheckpointError, CorruptCheckpointError, logger_of, sentence
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
