"""Claims on folders: an owner file names the process that uses a folder; the process locks it, and touches it every second.

`Owner` claims an unpublished folder, whose name is unique. `FolderLock` claims a folder that several runs may want at once.

The lock ends with its process, at once, but on some file systems other hosts do not see it. The mtime is a heartbeat that all hosts
see, but a silent one may only be slow. So a locked file never counts as abandoned. An unlocked file does if we would see its owner's
lock (same run or same machine), or if its heartbeat has been silent for `stale_s`.

Who can open a file can lock it. So only those who may write a folder may open the lock files in it (`new_lock_file`). Of a file that others
may open, as earlier versions made them, a lock proves nothing: the heartbeat alone decides.

An owner file is written and locked under the name `.claim-<nonce>`, and then renamed.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Self

import psutil

from ckpt.errors import (
    CheckpointError,
    FolderInUseError,
    StorageError,
    free_bytes,
    is_full,
    logger_of,
    needing,
    sentence,
)
from ckpt.ranks.addresses import machine
from ckpt.ranks.waiting import start
from ckpt.storage.files import Same, remove

OWNER_SUFFIX = ".owner.json"
HEARTBEAT_S = 1.0

_ATTEMPTS = 100
_HELPERS_S = 5.0
_CLAIM = re.compile(r"\.claim-[0-9a-f]{8}")
_RUN = re.compile(rf"\.run(?:-(?P<id>[0-9A-Za-z_.-]+))?{re.escape(OWNER_SUFFIX)}")
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
_NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK)

_log = logger_of(__name__)


def owner_file(folder: Path) -> Path:
    return folder.with_name(folder.name + OWNER_SUFFIX)


def file_system_now(folder: Path) -> float:
    """Return the time by the clock of the folder's file system, which stamps heartbeats. Touches the folder."""
    os.utime(folder)
    return folder.stat().st_mtime


class _Claim:
    """An owner file of this process, locked and touched every second until `release`, `let_go` or `close`."""

    def __init__(self, file: Path, descriptor: int) -> None:
        self.file = file
        self.num_users = 0
        self._descriptor = descriptor
        self._is_open = True
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name=f"heartbeat of {file.name}", daemon=True)
        try:
            start(self._thread)
        except CheckpointError:
            remove(file, Same.of(descriptor))
            os.close(descriptor)
            raise
        _OPEN.add(self)

    @property
    def stands(self) -> bool:
        """Whether the claim is open and its file in place. Another process may have removed or replaced the file."""
        try:
            return self._is_open and _has_name(self.file, self._descriptor) and self._is_open
        except OSError:
            if self._is_open:
                raise
            return False  # another thread has closed the descriptor meanwhile, whose number may be another file's now

    def fileno(self) -> int:
        return self._descriptor

    def release(self) -> None:
        """End the claim and remove the file."""
        try:
            if self.stands:
                remove(self.file, Same.of(self._descriptor))
        finally:
            self.let_go()

    def let_go(self) -> None:
        """Stop the heartbeat and drop the lock, but leave the file, as the death of this process would."""
        if self._is_open:
            self._stop.set()
            if self._thread.ident != threading.get_ident():  # garbage collection may call this in any thread
                self._thread.join()
            self.close()

    def close(self) -> None:
        """Close this process's descriptor, and with it the lock, unless another process holds a copy."""
        if self._is_open:
            self._is_open = False
            _OPEN.discard(self)
            os.close(self._descriptor)

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT_S):
            try:
                os.utime(self._descriptor)
            except OSError as error:
                _log.warning("cannot touch %s: %s", self.file, sentence(error))


class Owner(_Claim):
    """The lead's claim on one unpublished folder, which need not exist yet.

    Release it after the folder was renamed or removed: without the owner file the folder looks abandoned.
    """

    def __init__(self, folder: Path, run_id: str) -> None:
        file = owner_file(folder)
        super().__init__(file, _make(file, about_process(run_id), os.rename))


class FolderLock:
    """A claim on a folder that one run uses at a time. Held from `acquire` to `release`, or to the end of the process.

    All locks of one process on the same file share one claim. Garbage collection of the object releases the lock, too.

    Args:
        file: the owner file, inside of the folder, which exists when the lock is acquired.
        run_id: of this run.
        what: the folder, for the error: "checkpoint root /x".
        advice: next step for a refused user, for the error.
        stale_s: how long the heartbeat of an owner on another machine may be silent before it counts as dead, in seconds.
    """

    def __init__(self, file: Path, *, run_id: str, what: str, advice: str, stale_s: float = 60.0) -> None:
        self._file = Path(file)
        self._run_id = run_id
        self._what = what
        self._advice = advice
        self._stale_s = stale_s
        self._when_collected: weakref.finalize[..., FolderLock] | None = None
        self._claim: _Claim | None = None

    def acquire(self, progress: Callable[[], object] = lambda: None) -> None:
        """Claim the folder, or check that it is still claimed, which costs two `stat`.

        A lost lock, whose owner file was removed or taken over, is acquired again. An owner on another machine, whose lock is not
        visible here, is watched until its heartbeat moves (alive: refused) or has been silent for `stale_s` (dead: replaced).

        Args:
            progress: called twice a second during this wait.

        Raises:
            FolderInUseError: another process uses the folder.
            OSError: the file cannot be written.
        """
        while self._claim is None or not self._claim.stands:
            self.release()
            with _ACQUIRING:
                claim = _open_claim_on(self._file) or _Claim(self._file, self._take(progress))
                claim.num_users += 1
            self._claim, self._when_collected = claim, weakref.finalize(self, _give_back_when_collected, claim)
            _give_back_collected()

    def fileno(self) -> int:
        """Return the lock's descriptor, for helper processes: the folder is in use until the last of them has closed it."""
        assert self._claim is not None, "the lock is not held"
        return self._claim.fileno()

    @property
    def is_held(self) -> bool:
        """Whether the lock was acquired and not released."""
        return self._claim is not None

    def stands(self) -> bool:
        """Whether the lock is held, and no other process has taken it over."""
        return self._claim is not None and self._claim.stands

    def release(self) -> None:
        """End the claim, if no other lock of this process shares it. Does nothing if it is not held."""
        if self._claim is not None and self._when_collected is not None and self._when_collected.detach() is not None:
            with _ACQUIRING:
                _give_back(self._claim)
        self._claim = self._when_collected = None

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _take(self, progress: Callable[[], object]) -> int:
        """Create our owner file; return its locked descriptor."""
        remove_dead_claims(self._file.parent, os.listdir(self._file.parent))
        for _ in range(_ATTEMPTS):
            try:
                return _make(self._file, about_process(self._run_id), _put_if_free)
            except FileExistsError:
                try:
                    descriptor = self._take_over(progress)
                except PermissionError as error:
                    raise self._of_another_user() from error
                if descriptor is not None:
                    return descriptor
        raise OSError(
            errno.EAGAIN, f"the owner file was replaced {_ATTEMPTS} times while it was looked at", str(self._file)
        )

    def _take_over(self, progress: Callable[[], object]) -> int | None:
        """Replace the owner file of a dead owner. Return None if the file changed meanwhile: try again."""
        with _opened(self._file) as old:
            if old is None:
                return None
            lock = _lock_once_its_helpers_end(old, self._file.parent)
            if lock is _Lock.HELD_BY_ANOTHER:
                time.sleep(
                    HEARTBEAT_S / 20
                )  # another claimant holds the lock of a dead owner's file until it has replaced it
                if _has_name(self._file, old):
                    raise self._in_use(old)
                return None
            if not _has_name(self._file, old):
                return None
            is_seen_here = lock is _Lock.TAKEN and _read(old).get("machine") == machine()
            if not is_seen_here and not self._is_silent(old, progress):
                return None
            new = _make(self._file, about_process(self._run_id), os.replace)
        if not is_seen_here:
            time.sleep(
                HEARTBEAT_S
            )  # no lock keeps a second claimant from having done the same: the last one has the name
            if not _has_name(self._file, new):
                os.close(new)
                return None
        return new

    def _is_silent(self, old: int, progress: Callable[[], object]) -> bool:
        """Wait until the heartbeat has been silent for `stale_s`; False if the owner file was removed or replaced.

        Raises:
            FolderInUseError: the heartbeat moved.
        """
        beat = os.fstat(old).st_mtime
        left_s = self._stale_s - (file_system_now(self._file.parent) - beat)
        if left_s > 0:
            _log.warning("%s was in use by %s: waiting %.0f s for a sign of life", self._what, who(_read(old)), left_s)
        until = time.monotonic() + left_s
        while time.monotonic() < until:
            time.sleep(min(HEARTBEAT_S / 2, max(0.0, until - time.monotonic())))
            progress()
            with _opened(self._file) as now:
                if now is None or not os.path.samestat(os.fstat(now), os.fstat(old)):
                    return False
                if os.fstat(now).st_mtime != beat:
                    raise self._in_use(now)
        return True

    def _of_another_user(self) -> FolderInUseError:
        found = os.stat(self._file)
        silent_s = max(0.0, file_system_now(self._file.parent) - found.st_mtime)
        return FolderInUseError(
            f"{self._what} is or was in use by user {found.st_uid}, whose last sign of life was {silent_s:.0f} s ago, and whose "
            f"{self._file.name} you may not open: remove this file if that run has ended, else {self._advice}"
        )

    def _in_use(self, descriptor: int) -> FolderInUseError:
        about = _read(descriptor)
        silent_s = max(0.0, file_system_now(self._file.parent) - os.fstat(descriptor).st_mtime)
        since = f" since {about['since']}" if "since" in about else ""
        return FolderInUseError(
            f"{self._what} is in use{since} by {who(about)}, whose last sign of life was {silent_s:.0f} s ago: {self._advice}"
        )


_OPEN: weakref.WeakSet[_Claim] = weakref.WeakSet()
"""Registry: the open claims of this process."""
_ACQUIRING = threading.RLock()  # reentrant: garbage collection may release another lock meanwhile
_COLLECTED: SimpleQueue[_Claim] = SimpleQueue()
"""Claims of locks that were garbage collected while another thread held `_ACQUIRING`; that thread gives them back."""


def _open_claim_on(file: Path) -> _Claim | None:
    """Return this process's claim on a file; None: it has none."""
    return next((owner for owner in list(_OPEN) if owner.stands and _is_same_file(owner.file, file)), None)


def _give_back(claim: _Claim) -> None:
    """Drop one user of a claim. Called under `_ACQUIRING`."""
    claim.num_users -= 1
    if claim.num_users == 0:
        try:
            claim.release()
        except OSError as error:
            _log.warning("cannot remove %s: %s", claim.file, sentence(error))


def _give_back_when_collected(claim: _Claim) -> None:
    """Queue a claim. Garbage collection runs in any thread, and must not wait for `_ACQUIRING`."""
    _COLLECTED.put(claim)
    _give_back_collected()


def _give_back_collected() -> None:
    while not _COLLECTED.empty() and _ACQUIRING.acquire(blocking=False):
        try:
            with suppress(Empty):
                _give_back(_COLLECTED.get_nowait())
        finally:
            _ACQUIRING.release()


def _close_in_child() -> None:
    # A forked child shares the lock with its parent, and would keep it after the parent's end.
    global _ACQUIRING, _COLLECTED
    _ACQUIRING, _COLLECTED = threading.RLock(), SimpleQueue()
    for owner in list(_OPEN):
        owner.close()


os.register_at_fork(after_in_child=_close_in_child)


@contextmanager
def abandoned(folder: Path, run_id: str, now: float, stale_s: float) -> Iterator[bool]:
    """Yield whether an unpublished folder has no living owner. A lock keeps the answer true until the block ends.

    Args:
        run_id: of the asking run.
        now: seconds, by the clock of the folder's file system.
        stale_s: longest silence of a living owner's heartbeat, in seconds.
    """
    with _opened(owner_file(folder)) as descriptor:
        if descriptor is None:
            yield folder.exists() and now - folder.stat().st_mtime > stale_s
            return
        lock = _trusted(_lock(descriptor, wait=False), descriptor, folder.parent)
        stale = now - os.fstat(descriptor).st_mtime > stale_s
        ours = lock is _Lock.TAKEN and _read(descriptor).get("run_id") == run_id
        yield lock is not _Lock.HELD_BY_ANOTHER and (ours or stale)


def remove_dead_claims(folder: Path, names: Iterable[str]) -> None:
    """Remove owner files that killed processes had not renamed yet.

    A living process whose file was not locked yet creates it again.

    Args:
        names: of the files in the folder.
    """
    for name in filter(_CLAIM.fullmatch, names):
        with suppress(PermissionError), _opened(folder / name) as descriptor:  # else it is of another user
            if descriptor is not None and _lock(descriptor, wait=False) is not _Lock.HELD_BY_ANOTHER:
                remove(folder / name, Same.of(descriptor))


def living_runs(root: Path, names: Iterable[str], stale_s: float) -> Iterator[str]:
    """Yield the ids of runs that have claimed a root, and may be alive; remove the files of dead ones that shared it.

    A file of this process for the whole root is passed over: all that this process saves there is one run's.

    Args:
        names: of the files in the root.
        stale_s: longest silence of a living owner's heartbeat, in seconds.
    """
    for match in filter(None, map(_RUN.fullmatch, names)):
        try:
            with _opened(root / match[0]) as descriptor:
                about = _read(descriptor) if descriptor is not None else {}
                is_own = match["id"] is None and (about.get("machine"), about.get("pid")) == (machine(), os.getpid())
                if descriptor is None or is_own:
                    continue
                lock = _trusted(_lock(descriptor, wait=False), descriptor, root)
                is_seen_here = lock is _Lock.TAKEN and about.get("machine") == machine()
                is_silent = file_system_now(root) - os.fstat(descriptor).st_mtime > stale_s
                if lock is _Lock.HELD_BY_ANOTHER or not (is_seen_here or is_silent):
                    yield match["id"] or str(about.get("run_id"))
                elif match["id"] is not None:
                    remove(root / match[0], Same.of(descriptor))
        except PermissionError:  # of another user
            yield match["id"] or ""


class _Lock(Enum):
    TAKEN = "taken"
    HELD_BY_ANOTHER = "held by another"
    UNSUPPORTED = "unsupported"  # mounts without locks: only the heartbeat shows who is alive


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


def _lock_once_its_helpers_end(descriptor: int, folder: Path) -> _Lock:
    """Lock an owner file. Waits up to `_HELPERS_S` for helper processes of a dead owner, which still hold the lock while they end."""
    until = time.monotonic() + _HELPERS_S
    while (lock := _lock(descriptor, wait=False)) is _Lock.HELD_BY_ANOTHER:
        if time.monotonic() > until or not has_ended(_read(descriptor)):
            break
        time.sleep(HEARTBEAT_S / 20)
    return _trusted(lock, descriptor, folder)


def _trusted(lock: _Lock, descriptor: int, folder: Path) -> _Lock:
    """UNSUPPORTED in place of a lock that may be held by somebody who cannot write the folder, while the owner does not run here."""
    if lock is _Lock.HELD_BY_ANOTHER and _strangers_may_open(descriptor, folder):
        about = _read(descriptor)
        if about.get("machine") != machine() or has_ended(about):
            return _Lock.UNSUPPORTED
    return lock


def has_ended(about: Mapping[str, Any]) -> bool:
    """Whether an owner file is of a process of this machine that has ended. Of another container on it that is not known."""
    try:
        if (about["machine"], about.get("pids")) not in ((machine(), None), (machine(), machine("pid"))):
            return False
        return bool(psutil.Process(about["pid"]).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
    except (KeyError, TypeError, ValueError, psutil.Error):
        return False


def new_lock_file(file: Path) -> int:
    """Create a file that only those who may write its folder may open, whatever the umask; return its descriptor.

    Raises:
        FileExistsError: the name is taken.
    """
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    mode, group = _lockers(file.parent)
    if mode != 0o600:
        with suppress(OSError):  # not in that group
            os.fchown(descriptor, -1, group)
        with suppress(OSError):  # a file system with one mode for all files
            os.fchmod(descriptor, mode if _is_of(group, descriptor) or mode & 0o006 else 0o600)
    return descriptor


def _lockers(folder: Path) -> tuple[int, int]:
    """Mode and group of a lock file that only those may open who may write the folder."""
    found = os.stat(folder)
    writers = found.st_mode & 0o022
    return 0o600 | writers | writers << 1, found.st_gid


def _is_of(group: int, descriptor: int) -> bool:
    return os.fstat(descriptor).st_gid == group


def _strangers_may_open(descriptor: int, folder: Path) -> bool:
    """Whether others than those who may write the folder may open a file, and so lock it."""
    (mode, group), found = _lockers(folder), os.fstat(descriptor)
    return bool(found.st_mode & 0o066 & ~mode) or (
        bool(found.st_mode & 0o060) and found.st_gid != group and not mode & 0o006
    )


def _make(file: Path, about: Mapping[str, object], put: Callable[[Path, Path], object]) -> int:
    """Write and lock an owner file, and give it its name. Returns its descriptor.

    Args:
        put: renames the file (first argument) to the name (second).

    Raises:
        StorageError: the disk is full.
    """
    data = json.dumps(about).encode()
    while True:
        beside, free = file.with_name(f".claim-{secrets.token_hex(4)}"), free_bytes(file.parent)
        descriptor = new_lock_file(beside)
        try:
            _lock(descriptor, wait=True)
            with needing(file.name, lambda: len(data), free):
                try:
                    os.write(descriptor, data)
                except OSError as error:  # of a call on a descriptor, which names no file
                    error.filename = str(file)
                    raise
            put(beside, file)
        except BaseException as error:
            if isinstance(error, OSError):  # after any other the next claim removes the file
                remove(beside, Same.of(descriptor))
            os.close(descriptor)
            if isinstance(error, FileNotFoundError):  # `remove_dead_claims` removed it before it was locked
                continue
            if isinstance(error, OSError) and is_full(error):
                raise StorageError(f"{file.parent} cannot be written; make room there: {sentence(error)}") from error
            raise
        return descriptor


def _put_if_free(beside: Path, file: Path) -> None:
    """Rename `beside` to `file`.

    Raises:
        FileExistsError: the name is taken.
    """
    try:
        os.link(beside, file)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
    else:
        remove(beside, Same.of(file))
        return
    os.close(new_lock_file(file))
    os.replace(beside, file)


@contextmanager
def _opened(file: Path) -> Iterator[int | None]:
    """Yield a descriptor of a file; None: it does not exist."""
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        yield None
        return
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _has_name(file: Path, descriptor: int) -> bool:
    with _opened(file) as now:  # opening makes network file systems ask the server
        return now is not None and os.path.samestat(os.fstat(now), os.fstat(descriptor))


def _is_same_file(one: Path, other: Path) -> bool:
    try:
        return os.path.samefile(one, other)
    except FileNotFoundError:
        return False


def about_process(run_id: str) -> dict[str, object]:
    since = datetime.now(UTC).isoformat(timespec="seconds")
    host = socket.gethostname()
    return {"run_id": run_id, "host": host, "pid": os.getpid(), "since": since, "machine": machine(), "pids": machine("pid")}


def _read(descriptor: int) -> dict[str, Any]:
    """Return the first line of an owner file, which holds no more; {} if it is damaged."""
    try:
        about = json.loads(os.pread(descriptor, 4096, 0).partition(b"\n")[0])
    except (ValueError, RecursionError):
        return {}
    return about if isinstance(about, dict) else {}


def who(about: Mapping[str, Any]) -> str:
    return f"run {about.get('run_id', '?')} (pid {about.get('pid', '?')} on {about.get('host', '?')})"
