"""The keeper of one host's saves: a process that imports no torch, and that outlives the ranks which started it.

The saves are files in a folder, in memory or on a local disk, and need no process to last. The keeper hands them to the hosts of the
job that ask for them, takes copies of what those hosts have saved, and removes a folder of memory when nobody needs it any more:

    ranks of this host --Unix socket, same user--> keeper: address and secret. The connection stays: its end is the rank's end.
    ranks of any host  --TCP, proof of the secret--> keeper: reads, copies

    serving --the last rank of this host has left--> waiting --keep_s--> ended
       ^                                                |
       +------------------- a rank comes ---------------+

Run as `python -m ckpt.storage.keeper.server FOLDER ...` by `ckpt.storage.keeper.client`.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import selectors
import signal
import socket
import stat
import sys
import threading
import time
from argparse import ArgumentParser
from collections import OrderedDict
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

from ckpt.errors import CorruptCheckpointError
from ckpt.format.places import is_inner_path
from ckpt.ranks.addresses import peer_of
from ckpt.storage.checkpoint_files import CheckpointFolder
from ckpt.storage.files import Same, remove, write_all
from ckpt.storage.keeper.wire import (
    DONE,
    LINK,
    LIST,
    MISSING,
    READ,
    REFUSED,
    STAT,
    WRITE,
    Request,
    limit_silence,
    prove_as_keeper,
    receive_into,
    receive_request,
    received,
    send_answer,
)

HOME = ".keeper"
"""Folder of a keeper's socket, lock and record, below the folder that it keeps."""

SOCKET, LOCK, LOG = "socket", "lock", "log"

ENDED = b"ended\n"
"""What a rank says before it leaves, if the job has ended: nobody will come back."""

_PROOF_S = 5.0
"""Seconds that a stranger may take to prove itself."""

_MOST_STRANGERS = 128
"""Connections without proof; the oldest one is closed for a newer one, so that strangers keep nobody out."""

_SILENCE_S = 300.0
_LIFE_S, _SURE_S = 5.0, 60.0
_FOLDER = re.compile(r"(torchft-)?[0-9a-f]{16}")
"""Names of folders of memory: of a run, by its checkpoint root, and of a replica group."""
_END_S = 60.0
_PIECE_BYTES = 4 << 20


class Keeper:
    """Serves one folder. See the module.

    Args:
        folder: of the saves. It exists.
        address: to listen on for other hosts.
        keep_s: seconds to wait for ranks of this host when the last one has left without a word.
        removes: whether the folder is removed at the end, as memory is. It was made by this package, empty.
    """

    def __init__(self, folder: Path, address: str, *, keep_s: float, removes: bool) -> None:
        self._folder = folder
        self._same = Same.of(folder)
        self._keep_s = keep_s
        self._removes = removes
        self._secret = secrets.token_bytes(32)
        self._local = _local_socket(folder / HOME)
        self._remote = _remote_socket(address)
        host, port = self._remote.getsockname()[:2]
        greeting = {"address": [host, port], "secret": self._secret.hex(), "pid": os.getpid(), "keep_s": keep_s}
        self._greeting = json.dumps(greeting).encode() + b"\n"
        self._lock = threading.Lock()
        self._strangers: OrderedDict[socket.socket, None] = OrderedDict()
        self._num_here = 0
        self._has_job_ended = False
        self._alone_since = time.monotonic()
        self._is_asked_to_end = threading.Event()
        self._is_gone = threading.Event()

    def run(self, show_life: Callable[[], None]) -> None:
        """Serve until no rank of this host has been here for `keep_s`, the job has ended, or SIGTERM.

        Args:
            show_life: called now and then.
        """
        os.chdir("/")
        signal.signal(signal.SIGTERM, lambda *_: self._is_asked_to_end.set())
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with selectors.DefaultSelector() as selector:
            selector.register(self._local, selectors.EVENT_READ, self._meet_rank)
            selector.register(self._remote, selectors.EVENT_READ, self._meet_stranger)
            shown = 0.0
            while not self._is_over():
                if time.monotonic() - shown > _LIFE_S:
                    show_life()
                    shown = time.monotonic()
                for key, _ in selector.select(0.1):
                    with suppress(OSError):  # it has left already, or this process has no descriptors left for it
                        link, _ = key.fileobj.accept()  # type: ignore[union-attr]
                        if key.fileobj is self._local:
                            self._count(1)  # here, so that it counts before this loop looks whether it is over
                        threading.Thread(target=key.data, args=(link,), daemon=True).start()
        self._end()

    def _is_over(self) -> bool:
        with self._lock:
            if self._is_asked_to_end.is_set():
                return True
            if self._num_here:
                return False
            return self._has_job_ended or time.monotonic() - self._alone_since > self._keep_s

    def _end(self) -> None:
        self._remote.close()
        self._local.close()
        if self._removes and not self._is_asked_to_end.is_set():
            # Aside first: whoever comes now makes a new folder, and starts a keeper of that.
            aside = self._folder.with_name(f".removed-{self._folder.name}-{secrets.token_hex(4)}")
            with suppress(FileNotFoundError):
                os.rename(self._folder, aside)
                remove(aside, self._same)
        self._is_gone.set()

    def _meet_rank(self, link: socket.socket) -> None:
        """Greet a process of this host, and wait for its end."""
        with closing(link):
            last = b""
            try:
                if peer_of(link)[1] == os.geteuid():
                    link.sendall(self._greeting)
                    while piece := link.recv(64):
                        last = (last + piece)[-len(ENDED) :]
            except OSError:
                pass
            finally:
                if self._count(-1, has_job_ended=last == ENDED):
                    self._is_gone.wait(_END_S)  # who says that the job has ended finds its memory free

    def _count(self, change: int, *, has_job_ended: bool = False) -> bool:
        """Count a process of this host that has come or left; return whether the job has ended."""
        with self._lock:
            self._num_here += change
            self._has_job_ended = has_job_ended
            self._alone_since = time.monotonic()
            return has_job_ended and not self._num_here

    def _meet_stranger(self, link: socket.socket) -> None:
        """Serve a connection of another process once it has proved that it is of the job."""
        with closing(link):
            with self._lock:
                self._strangers[link] = None
                oldest = next(iter(self._strangers)) if len(self._strangers) > _MOST_STRANGERS else None
            if oldest is not None:
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
            try:
                link.settimeout(_PROOF_S)
                is_known = prove_as_keeper(link, self._secret)
            except OSError:
                return
            finally:
                with self._lock:
                    self._strangers.pop(link, None)
            if is_known:
                limit_silence(link, _SILENCE_S)
                link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                with suppress(OSError, UnicodeDecodeError):
                    while (request := receive_request(link)) is not None:
                        self._answer(link, request)

    def _answer(self, link: socket.socket, request: Request) -> None:
        try:
            _require_served(request.path)
            with CheckpointFolder(self._folder) as files:
                _ANSWERS[request.kind](files, link, request)
        except FileNotFoundError:
            send_answer(link, MISSING)
        except (OSError, CorruptCheckpointError, KeyError) as error:
            if isinstance(error, ConnectionError | BlockingIOError):
                raise
            send_answer(link, REFUSED, str(error).encode())


def _require_served(path: str) -> None:
    if not is_inner_path(path) or path.split("/")[0] == HOME:
        raise CorruptCheckpointError(f"{path!r:.200} is not a path that a keeper serves")


def _read(files: CheckpointFolder, link: socket.socket, request: Request) -> None:
    fd = files.open(request.path)
    try:
        at = request.start
        stop = min(at + request.num_bytes, os.fstat(fd).st_size)
        send_answer(link, DONE, max(0, stop - at))
        while at < stop:
            try:
                sent = os.sendfile(link.fileno(), fd, at, min(_PIECE_BYTES, stop - at))
            except OSError as error:  # an answer would be taken for bytes of the file
                raise ConnectionError(f"{request.path} was not sent to its end") from error
            if not sent:
                raise ConnectionError(f"{request.path} got shorter while it was sent")
            at += sent
    finally:
        os.close(fd)


def _stat(files: CheckpointFolder, link: socket.socket, request: Request) -> None:
    with files.opened(request.path) as file:
        send_answer(link, DONE, json.dumps([file.size, file.version]).encode())


def _write(files: CheckpointFolder, link: socket.socket, request: Request) -> None:
    """Take a new file. What was begun is removed if the other side leaves before its end."""
    _make_folder_of(files, request.path)
    with files.parent(request.path) as (folder, name):  # which may have another name by the end
        fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666, dir_fd=folder)
        _fill(link, fd, request, partial(remove, Path(name), Same.of(fd), dir_fd=folder))
    send_answer(link, DONE)


def _fill(link: socket.socket, fd: int, request: Request, undo: Callable[[], object]) -> None:
    try:
        send_answer(link, DONE)  # the bytes come only now
        memory, left = memoryview(bytearray(min(_PIECE_BYTES, request.num_bytes))), request.num_bytes
        failure: OSError | None = None
        while left:
            piece = memory[: min(len(memory), left)]
            receive_into(link, piece)
            left -= len(piece)
            if failure is None:
                try:
                    write_all(fd, piece)
                except OSError as error:  # such as a full memory: the rest is no request, and has to be received, too
                    failure = error
        if failure is not None:
            raise failure
    except BaseException:
        undo()
        raise
    finally:
        os.close(fd)


def _link(files: CheckpointFolder, link: socket.socket, request: Request) -> None:
    """Give a file that is here another name, for a copy of a save that has linked it."""
    there = received(link, request.num_bytes).decode()
    _require_served(there)
    files.require_regular(there)
    _make_folder_of(files, request.path)
    with files.parent(there) as (old, was), files.parent(request.path) as (new, name):
        os.link(was, name, src_dir_fd=old, dst_dir_fd=new, follow_symlinks=False)
    send_answer(link, DONE)


def _make_folder_of(files: CheckpointFolder, path: str) -> None:
    above, _, _ = path.rpartition("/")
    if above:
        os.makedirs(files.root / above, exist_ok=True)


def _list(files: CheckpointFolder, link: socket.socket, request: Request) -> None:
    files.require_folder(request.path)
    send_answer(link, DONE, json.dumps(files.sizes_below(request.path)).encode())


_ANSWERS = {READ: _read, STAT: _stat, WRITE: _write, LIST: _list, LINK: _link}


def _is_socket(path: Path, found: os.stat_result) -> bool:
    """Proof: it is a socket, in a folder that this package alone makes."""
    return stat.S_ISSOCK(found.st_mode)


def _local_socket(home: Path) -> socket.socket:
    """Listen for processes of this host. A path of any length: the socket's name itself is short."""
    place = os.open(home, os.O_PATH | os.O_DIRECTORY)
    try:
        found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        remove(Path(SOCKET), _is_socket, dir_fd=place)  # of a keeper that was killed: this one holds the lock
        found.bind(f"/proc/self/fd/{place}/{SOCKET}")
        os.chmod(SOCKET, 0o600, dir_fd=place)
        found.listen(128)
        return found
    finally:
        os.close(place)


def _remote_socket(address: str) -> socket.socket:
    family = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][0]
    found = socket.socket(family, socket.SOCK_STREAM)
    found.bind((address, 0))
    found.listen(128)
    return found


def sweep(folder: Path) -> None:
    """Remove the memory of other runs whose keepers were killed, and which nobody has come back for."""
    for other in folder.parent.iterdir():
        if other == folder or not _FOLDER.fullmatch(other.name):
            continue
        with suppress(OSError, ValueError), open(other / HOME / LOCK, "rb") as lock:
            is_old = time.time() - os.fstat(lock.fileno()).st_mtime > float(lock.read(32)) + _SURE_S
            if is_old and _locked(lock):
                remove(other, Same.of(other))


def _locked(lock: BinaryIO) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def main(arguments: list[str]) -> int:
    """Keep a folder, unless another keeper does."""
    parser = ArgumentParser("ckpt.storage.keeper.server", description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--address", required=True)
    parser.add_argument("--keep-s", type=float, required=True)
    parser.add_argument("--removes", action="store_true")
    given = parser.parse_args(arguments)
    given.folder = given.folder.absolute()
    with open(os.open(given.folder / HOME / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+b") as lock:
        if not _locked(lock):
            return 0
        lock.truncate()
        lock.write(f"{given.keep_s}\n".encode())
        lock.flush()
        if given.removes:
            sweep(given.folder)
        Keeper(given.folder, given.address, keep_s=given.keep_s, removes=given.removes).run(partial(os.utime, lock.fileno()))
    return 0


if __name__ == "__main__":
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # what the rank has not closed: whoever waits for its end would wait for this process
    sys.exit(main(sys.argv[1:]))
