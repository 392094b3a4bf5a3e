"""Marker file of a save into a folder: another save finds it, and sees by its lock whether the first one is still running."""

from __future__ import annotations

import fcntl
import os
import secrets
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path

from ckpt.errors import CheckpointExistsError, CorruptCheckpointError
from ckpt.format.checkpoint_files import CheckpointFolder

MARK = ".saving-"


class SaveMarker:
    """A file in the folder, locked until `remove`, or the end of this object or process. Lead rank only.

    Attributes:
        path: of the file in `folder`.

    Raises:
        CheckpointExistsError: another save into the folder is under way, of this process or of another one.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / f"{MARK}{secrets.token_hex(4)}"
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._close = weakref.finalize(self, _release, descriptor)
        _lock(descriptor)
        others = [path for path in folder.glob(f"{MARK}*") if path != self.path and _is_locked(path)]
        if others:  # two saves that begin at one moment find each other, and both fail
            self.remove()
            raise CheckpointExistsError(
                f"another save into {folder} is under way ({others[0].name}): wait for it, or finalize it if it is an asynchronous one of "
                "this job, or save into another folder"
            )

    def require(self) -> None:
        """Require that no other save has taken over the folder.

        Raises:
            CheckpointExistsError: one has.
        """
        if not self.path.exists():
            raise CheckpointExistsError(
                f"another save into {self.folder} has begun since this one did, which is therefore given up; what the other one saves "
                "stays as it is"
            )

    def remove(self) -> None:
        """Remove the file, at the end of the save or after its failure."""
        self.path.unlink(missing_ok=True)
        self._close()


_given: ContextVar[SaveMarker | None] = ContextVar("the mark of the save that is under way", default=None)


@contextmanager
def marked(mark: SaveMarker | None) -> Iterator[None]:
    """Have saves inside the block use this marker instead of making one. Remove it if the block fails."""
    token = _given.set(mark)
    try:
        yield
    except BaseException:
        if mark is not None:
            mark.remove()
        raise
    finally:
        _given.reset(token)


def given_mark(folder: Path) -> SaveMarker | None:
    """The marker that a caller has made for this folder, or None."""
    mark = _given.get()
    return mark if mark is not None and mark.folder == folder else None


def _lock(descriptor: int) -> bool:
    """Lock a file; return whether that worked. On a file system without locks it always does."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _release(descriptor: int) -> None:
    """Unlock, because a forked process may have the descriptor too; then close."""
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def _is_locked(path: Path) -> bool:
    """Whether a running save holds this marker. Only a regular file can be one."""
    try:
        with CheckpointFolder(path.parent) as folder, folder.stream(path.name) as file:
            return not _lock(file.fileno())
    except (FileNotFoundError, CorruptCheckpointError):
        return False
