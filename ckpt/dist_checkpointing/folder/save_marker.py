"""The sign that a save into a folder has begun: whoever wants to save there too finds it, and sees whether its maker lives."""

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
    """A file in the folder, locked for as long as this object, and this process, live. Lead rank only.

    Raises:
        CheckpointExistsError: another save into the folder is under way, of this process or of another one.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / f"{MARK}{secrets.token_hex(4)}"
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._close = weakref.finalize(self, _release, descriptor)
        _lock(descriptor)
        others = [path for path in folder.glob(f"{MARK}*") if path != self._path and _is_locked(path)]
        if others:  # found by both, should both have begun at one moment: then neither goes on
            self.remove()
            raise CheckpointExistsError(
                f"another save into {folder} is under way ({others[0].name}): wait for it, or finalize it if it is an asynchronous one of "
                "this job, or save into another folder"
            )

    @property
    def folder(self) -> Path:
        return self._folder

    @property
    def path(self) -> Path:
        return self._path

    def require(self) -> None:
        """Refuse to finish a save whose folder another one has taken over meanwhile.

        Raises:
            CheckpointExistsError: one has.
        """
        if not self._path.exists():
            raise CheckpointExistsError(
                f"another save into {self._folder} has begun since this one did, which is therefore given up; what the other one saves "
                "stays as it is"
            )

    def remove(self) -> None:
        """The save has ended, well or not."""
        self._path.unlink(missing_ok=True)
        self._close()


_given: ContextVar[SaveMarker | None] = ContextVar("the mark of the save that is under way", default=None)


@contextmanager
def marked(mark: SaveMarker | None) -> Iterator[None]:
    """Let what is called inside the block save under this mark, where it would make one of its own. Remove it if the block fails."""
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
    """The mark that the caller has made for this folder, if it has."""
    mark = _given.get()
    return mark if mark is not None and mark.folder == folder else None


def _lock(descriptor: int) -> bool:
    """Whether it is ours now; on a file system that knows no locks it always is."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _release(descriptor: int) -> None:
    """Unlock, for a process that was forked meanwhile has the descriptor, too; and close."""
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def _is_locked(path: Path) -> bool:
    """Whether another save holds this mark. What is no regular file is none, whatever it is called."""
    try:
        with CheckpointFolder(path.parent) as folder, folder.stream(path.name) as file:
            return not _lock(file.fileno())
    except (FileNotFoundError, CorruptCheckpointError):
        return False
