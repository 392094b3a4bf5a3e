"""Who writes an unpublished folder, and are they still alive? A locked file beside the folder, touched every second.

The lock ends with its process, at once and for certain, but on some file systems other hosts do not see it. The mtime
is seen everywhere and says less: a silent heartbeat may only be slow. So what is locked never counts as abandoned. What is
not locked does if the same run left it, or if its heartbeat has been silent for long.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path

from ckpt.errors import sentence

OWNER_SUFFIX = ".owner.json"
HEARTBEAT_S = 1.0

_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)

_log = logging.getLogger(__name__)


def owner_file(folder: Path) -> Path:
    return folder.with_name(folder.name + OWNER_SUFFIX)


class Owner:
    """The lead's claim on one unpublished folder, from construction to `release`. The folder need not exist yet."""

    def __init__(self, folder: Path, run_id: str) -> None:
        self._file = owner_file(folder)
        self._descriptor = _claim(self._file, {"run_id": run_id, "host": socket.gethostname(), "pid": os.getpid()})
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name=f"heartbeat of {folder.name}", daemon=True)
        self._thread.start()
        _OPEN.add(self)

    def release(self) -> None:
        """End the claim. The folder must be out of sight by now: without this file it looks abandoned."""
        try:
            self._file.unlink(missing_ok=True)
        finally:
            self.let_go()

    def let_go(self) -> None:
        """Stop the heartbeat and drop the lock, as the death of this process would, and leave the file."""
        self._stop.set()
        self._thread.join()
        self.close()

    def close(self) -> None:
        if self in _OPEN:
            _OPEN.discard(self)
            os.close(self._descriptor)

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT_S):
            try:
                os.utime(self._descriptor)
            except OSError as error:
                _log.warning("cannot touch %s: %s", self._file, sentence(error))


_OPEN: weakref.WeakSet[Owner] = weakref.WeakSet()


def _close_in_child() -> None:
    # A forked child shares the lock with the lead, and would hold it for as long as it outlives the lead.
    for owner in list(_OPEN):
        owner.close()


os.register_at_fork(after_in_child=_close_in_child)


@contextmanager
def abandoned(folder: Path, run_id: str, now: float, stale_s: float) -> Iterator[bool]:
    """Is nobody writing this folder any more? The answer holds, by lock, until the block ends.

    Args:
        run_id: what the asking run calls itself.
        now: seconds, by the clock of the folder's file system.
        stale_s: how long a heartbeat may be silent.
    """
    try:
        descriptor = os.open(owner_file(folder), os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        yield folder.exists() and now - folder.stat().st_mtime > stale_s
        return
    try:
        lock = _lock(descriptor, wait=False)
        stale = now - os.fstat(descriptor).st_mtime > stale_s
        ours = lock is _Lock.TAKEN and _run_of(descriptor) == run_id
        yield lock is not _Lock.HELD_BY_ANOTHER and (ours or stale)
    finally:
        os.close(descriptor)


class _Lock(Enum):
    TAKEN = "taken"
    HELD_BY_ANOTHER = "held by another"
    UNSUPPORTED = "unsupported"  # some mounts have no locks: there the heartbeat alone says who is alive


def _lock(descriptor: int, *, wait: bool) -> _Lock:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return _Lock.HELD_BY_ANOTHER
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return _Lock.UNSUPPORTED
        raise
    return _Lock.TAKEN


def _claim(owner: Path, about: dict[str, object]) -> int:
    """Make the owner file and return its descriptor, locked."""
    while True:
        descriptor = os.open(owner, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            _lock(descriptor, wait=True)
            if os.fstat(descriptor).st_nlink:  # else a clean-up took it for an orphan before it was locked
                os.write(descriptor, json.dumps(about).encode())
                return descriptor
        except OSError:
            owner.unlink(missing_ok=True)
            os.close(descriptor)
            raise
        os.close(descriptor)


def _run_of(descriptor: int) -> object:
    """The run id in an owner file; None if it was cut short."""
    try:
        return json.loads(os.pread(descriptor, 4096, 0))["run_id"]
    except (ValueError, KeyError, TypeError):
        return None
