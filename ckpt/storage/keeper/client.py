"""Find or start the keeper of this host, and ask those of other hosts. See `ckpt.storage.keeper.server`."""

from __future__ import annotations

import errno
import json
import logging
import os
import select
import signal
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Empty, LifoQueue
from typing import Any, NamedTuple

from ckpt.errors import StorageError, telling
from ckpt.ranks.addresses import peer_of
from ckpt.storage.checkpoint_files import CheckpointFolder
from ckpt.storage.files import PIECE_BYTES
from ckpt.storage.keeper.server import ENDED, HOME, LOG, SOCKET
from ckpt.storage.keeper.wire import (
    DONE,
    LINK,
    LIST,
    MISSING,
    READ,
    STAT,
    WRITE,
    Request,
    limit_silence,
    prove_as_client,
    receive_answer,
    receive_into,
    received,
    send_request,
)

_START_S = 30.0
_CONNECT_S = 10.0

_log = logging.getLogger("ckpt")


class Where(NamedTuple):
    """A keeper, for other hosts. `secret` goes only to ranks of the job, through the job's store.

    Attributes:
        host: its address.
        secret: as hexadecimal digits.
    """

    host: str
    port: int
    secret: str


class OwnKeeper:
    """The connection of one process to the keeper of its host. Its end tells the keeper that the process has gone.

    Attributes:
        where: for other hosts.
        pid: of the keeper.
    """

    def __init__(self, link: socket.socket, greeting: dict[str, Any]) -> None:
        self._link = link
        self.where = Where(greeting["address"][0], greeting["address"][1], greeting["secret"])
        self.pid: int = greeting["pid"]

    def is_there(self) -> bool:
        """Whether the keeper lives."""
        return _is_open(self._link)

    def replace(self) -> None:
        """End the keeper, which leaves its files to the next one."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)
        while self.is_there():
            time.sleep(0.02)
        self._link.close()

    def leave(self, *, has_ended: bool) -> None:
        """Leave the keeper.

        Args:
            has_ended: the job has ended as it should; once the last rank says so, nothing is kept any more. Waits until memory is free.
        """
        with suppress(OSError):
            if has_ended:
                self._link.sendall(ENDED)
                self._link.shutdown(socket.SHUT_WR)
                self._link.settimeout(_START_S)
                self._link.recv(1)
        self._link.close()


def make_folder(folder: Path, *, is_private: bool) -> None:
    """Make the folder of a tier on this host.

    Args:
        is_private: the folder above it is this user's alone: nobody else enters it. Otherwise it is the user's own affair.

    Raises:
        StorageError: it cannot be made, or the one above it is another user's.
    """
    with telling(f"{folder} cannot be made for checkpoints"):
        if is_private:
            folder.parent.mkdir(mode=0o700, exist_ok=True)
            found = os.lstat(folder.parent)
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
                raise StorageError(
                    f"{folder.parent} is not a folder of this user alone, and no checkpoint is put there: remove it"
                )
        folder.mkdir(parents=True, exist_ok=True)


def own_keeper(folder: Path, address: str, *, keep_s: float, removes: bool) -> OwnKeeper:
    """Connect to the keeper of a folder on this host, and start one if there is none. Any process of the user.

    Args:
        folder: exists, and belongs to this user.
        address, keep_s, removes: see `ckpt.storage.keeper.server.Keeper`; they are those of the first who comes.

    Raises:
        StorageError: the keeper did not start.
    """
    home = folder / HOME
    deadline = time.monotonic() + _START_S
    started: int | None = None
    while True:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)  # again: a keeper that ends just now removes it
        if (found := _connected(home)) is not None:
            return found
        if started is None or _has_ended(started):  # or it found another one's lock, which has ended since
            started = _start(folder, address, keep_s=keep_s, removes=removes)
        if time.monotonic() > deadline:
            raise StorageError(
                f"the keeper of {folder} did not start within {_START_S:.0f} s: {_last_line(home / LOG)}"
            )
        time.sleep(0.02)


def _start(folder: Path, address: str, *, keep_s: float, removes: bool) -> int:
    """Start a keeper in a session of its own, which signals for the ranks' process group do not reach; return its pid."""
    command = [sys.executable, "-m", "ckpt.storage.keeper.server", str(folder.absolute())]
    command += ["--address", address, "--keep-s", f"{keep_s:g}", *(["--removes"] if removes else [])]
    paths = [str(Path(__file__).parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])]
    log = str(folder / HOME / LOG)
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600),
        (os.POSIX_SPAWN_DUP2, 1, 2),
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    return os.posix_spawn(sys.executable, command, environment, file_actions=actions, setsid=True)


def _has_ended(pid: int) -> bool:
    """Whether a keeper that this process has started has ended."""
    with suppress(ChildProcessError):
        return os.waitpid(pid, os.WNOHANG) != (0, 0)
    return True


def _connected(home: Path) -> OwnKeeper | None:
    """Connect to a keeper of this user; None: there is none, or it is ending."""
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        place = os.open(home, os.O_PATH | os.O_DIRECTORY)
        try:
            link.settimeout(_CONNECT_S)
            link.connect(f"/proc/self/fd/{place}/{SOCKET}")
        finally:
            os.close(place)
        pid, user = peer_of(link)
        if user != os.geteuid():
            raise StorageError(f"the keeper in {home} belongs to another user")
        line = b""
        try:
            while not line.endswith(b"\n"):
                line += received(link, 1)
        except TimeoutError:
            _log.warning("the keeper of %s, process %d, hangs, and is replaced: the files need none to stay", home.parent, pid)
            os.kill(pid, signal.SIGKILL)
            raise
        link.settimeout(None)
        return OwnKeeper(link, json.loads(line))
    except OSError:
        link.close()
        return None
    except BaseException:
        link.close()
        raise


def _last_line(log: Path) -> str:
    with suppress(OSError, IndexError):
        return log.read_text(errors="replace").strip().splitlines()[-1]
    return "it said nothing"


class Peer:
    """A keeper of another host, or of this one. Any thread; several requests at a time, each over a connection of its own.

    All methods raise:
        FileNotFoundError: there is no such file.
        OSError: the keeper cannot be reached, is silent for `silence_s`, or refuses.
    """

    def __init__(self, where: Where, *, silence_s: float = 60.0) -> None:
        self._where = where
        self._silence_s = silence_s
        self._free: LifoQueue[socket.socket] = LifoQueue()

    def read(self, path: str, start: int, stop: int) -> memoryview:
        """Return the bytes [start, stop) of a file, fewer where it ends before."""
        memory = memoryview(bytearray(max(0, stop - start)))
        return memory[: self.read_into(path, start, [memory])]

    def read_into(self, path: str, start: int, buffers: Sequence[memoryview]) -> int:
        """Fill buffers in turn with a file's bytes from `start` on; return their number, fewer where it ends before."""
        with self._asking(Request(READ, path, start, sum(map(len, buffers)))) as (link, count):
            left = count
            for buffer in buffers:
                left -= receive_into(link, buffer[:left])
        return count

    def size_and_version(self, path: str) -> tuple[int, tuple[object, ...]]:
        """Return a file's size, and a value that a later file at this path does not have."""
        size, version = json.loads(self._text(Request(STAT, path)))
        return size, tuple(version)

    def sizes(self, folder: str) -> dict[str, int]:
        """Return path -> size of all files below a folder."""
        found: dict[str, int] = json.loads(self._text(Request(LIST, folder)))
        return found

    def copy(self, root: Path, path: str, to: str, progress: Callable[[int], None]) -> int:
        """Give the keeper a copy of a file below `root`, as a new file; return its size.

        Args:
            to: path below the keeper's folder.
            progress: called with the number of bytes that have just been sent.
        """
        with CheckpointFolder(root) as folder, folder.opened(path) as file:
            size = file.size
            request = Request(WRITE, to, 0, size)
            with self._asking(request) as (link, _):
                memory, at = memoryview(bytearray(min(PIECE_BYTES, size))), 0
                while at < size:
                    count = file.read_at([memory], at)
                    if not count:
                        raise OSError(errno.EIO, "it got shorter while it was copied", str(root / path))
                    link.sendall(memory[:count])
                    at += count
                    progress(count)
                _answered(link, request)
        return size

    def link(self, path: str, to: str) -> None:
        """Have the keeper give one of its files another name."""
        request = Request(LINK, to, 0, len(path.encode()))
        with self._asking(request, path.encode()):
            return

    def close(self) -> None:
        """Close all connections that are not in use."""
        with suppress(Empty):
            while True:
                self._free.get_nowait().close()

    def _text(self, request: Request) -> bytes:
        with self._asking(request) as (link, count):
            return received(link, count)

    @contextmanager
    def _asking(self, request: Request, more: bytes = b"") -> Iterator[tuple[socket.socket, int]]:
        """Send a request over a connection; yield that and the number of bytes to come. It is used again unless something fails."""
        link = self._connection()
        try:
            send_request(link, request)
            link.sendall(more)
            count = _answered(link, request)
            yield link, count
        except FileNotFoundError:
            self._free.put(link)
            raise
        except BaseException as error:
            link.close()
            if isinstance(error, OSError) and error.filename is None:
                if isinstance(error, BlockingIOError):  # what the kernel's time-outs are to Python
                    error = TimeoutError(errno.ETIMEDOUT, "timed out")
                why = error.strerror or str(error) or type(error).__name__
                raise OSError(error.errno or errno.EIO, f"host {self._where.host}: {why}", request.path) from error
            raise
        self._free.put(link)

    def _connection(self) -> socket.socket:
        with suppress(Empty):
            while not _is_open(link := self._free.get_nowait()):  # a keeper ends those that are silent for long
                link.close()
            return link
        link = socket.create_connection(self._where[:2], timeout=min(_CONNECT_S, self._silence_s))
        try:
            link.settimeout(self._silence_s)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            prove_as_client(link, bytes.fromhex(self._where.secret))
            limit_silence(link, self._silence_s)
        except BaseException:
            link.close()
            raise
        return link


def _is_open(link: socket.socket) -> bool:
    """Whether the other side, which has nothing to say now, has not left yet."""
    look = select.poll()
    look.register(link, select.POLLIN)
    return not look.poll(0)


def _answered(link: socket.socket, request: Request) -> int:
    """Return the number of bytes that come as the answer."""
    kind, count = receive_answer(link)
    if kind == MISSING:
        raise FileNotFoundError(errno.ENOENT, "that host does not have it", request.path)
    if kind != DONE:
        raise OSError(errno.EIO, received(link, count).decode(errors="replace"), request.path)
    return count
