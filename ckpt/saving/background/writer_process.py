"""A process beside one rank that writes its shares, from memory it shares with it; training has the interpreter to itself.

    the rank, a thread in the background          its writer
    a share, where it goes, plain values  ---->   opens the files
    where an item lies in shared memory   ---->   digests and writes it
    the next one, please                  <----   has copied or written all of it
    bytes that moved, warnings            <----
    the result, or the error              <----   all is durable

Both are one program, and trust each other: messages are pickled objects over a `multiprocessing.connection.Connection`, and the writer maps
the rank's shared memory through /proc. The process is started once, as a new interpreter (never a fork of a process with threads),
imports torch and the storage library and no accelerator's, and ends with the rank. It takes no signals but SIGKILL: launchers send
theirs to every process, and it is the rank that decides when a save is given up.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from ckpt.errors import ConfigurationError, StorageError, sentence
from ckpt.format.dtypes import contiguous, raw_bytes
from ckpt.format.places import Place
from ckpt.memory.shared_memory import segment_of
from ckpt.saving.background.serialized_errors import deserialize_error, refusing
from ckpt.storage.objects import store

if TYPE_CHECKING:
    import torch

    from ckpt.backends.base import Backend
    from ckpt.saving.writing import RankWritePlan, Staged, WriteJob, WriteResult

START_TIMEOUT_S = 180.0
"""Starting takes 1.5 s on an idle machine, and minutes where a thousand ranks read one file server."""
GIVE_UP_S = 10.0
"""For the writer to let go of a save; one that cannot, as with a disk that does not answer, is killed."""
TAKE_S = 30.0
"""For the writer to take a message that does not fit the socket's buffer, or to go on with one of its own; else it is killed."""
END_S = 5.0
"""For a killed process to be gone; one that waits for a disk is left to the system."""
LOOK_S = 0.25
"""Between two looks of a thread that waits for a message."""

# Nothing is imported before the trainer's path is there: by its own it could come from whatever lies in the current folder.
_PROGRAM = (
    "import sys; sys.path[:] = sys.argv[2:]; import json; "
    "from ckpt.saving.background.writer_child import serve; serve(**json.loads(sys.argv[1]))"
)
_TAIL_BYTES = 4096
_IDLE = "while it had nothing to do"
_log = logging.getLogger("ckpt")


class _Gone(Exception):
    """The process is gone, or does not answer."""


class WriterProcess:
    """The writer of one rank. `write` in one thread at a time, everything else in any.

    Args:
        num_cores: how many cores it may use; None: all.
        mib_s: how many MiB a second it may write; None: no limit.
        local_rank: number of the rank on its host, so that the writers of several take different cores.
    """

    def __init__(self, *, num_cores: int | None = None, mib_s: float | None = None, local_rank: int = 0) -> None:
        self._settings = {"num_cores": num_cores, "mib_s": mib_s, "local_rank": local_rank}
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._child: _Child | None = None
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """Of the process; None: there is none."""
        child = self._child
        return child.process.pid if child is not None and child.process.poll() is None else None

    def start(self, backend: Backend) -> None:
        """Start the process, unless it runs, and return at once; `write` waits until it is up.

        Args:
            backend: one that will be written with.

        Raises:
            StorageError: the system starts no process, or `close` was called.
            ConfigurationError: the path of the Python interpreter is unknown.
        """
        self._started(backend)

    def write(
        self, share: RankWritePlan, job: WriteJob, staged: Iterable[Staged], progress: Callable[[int], None]
    ) -> WriteResult:
        """Have a share written, and return the result when it is durable. As `RankWritePlan.write`, which says more of it.

        Tensors that lie in `shared_memory` are read there; others are sent. A share and a backend are sent once, however often
        they are used: they must not change.

        Args:
            progress: called with bytes that moved, and with 0 now and then when none did; an exception of it ends the save, as does
                one of `staged`. Nothing is written any more when this returns.

        Raises:
            StorageError: also if the process died, or was not up in time. The next save starts another.
            ConfigurationError: what is to be written, or the backend, cannot be sent to a process.
        """
        with self._writing:
            child = self._started(job.backend)
            try:
                child.await_up(progress)
                return child.write(share, job, staged, progress)
            except _Gone:
                error = child.error_of_end()
                child.end()
                child.disconnect()
                raise error from None

    def close(self) -> None:
        """End the process, whatever it does, and wait until it is gone. Also done when this object goes, and when Python ends."""
        with self._lock:
            self._is_closed = True
            child, self._child = self._child, None
        if child is not None:
            child.end("was closed")

    def _started(self, backend: Backend) -> _Child:
        with self._lock:
            if self._is_closed:
                raise StorageError("the writer process was closed; nothing more can be saved with it")
            child = self._child
            if child is not None and not child.has_ended and child.process.poll() is not None:
                _log.warning("%s; another one is started", child.error_of_end())
                child.end()
            if child is None or child.has_ended:
                child = self._child = _Child(self._settings, backend)
            return child


class _Child:
    """One process, from its start to its end."""

    def __init__(self, settings: Mapping[str, Any], backend: Backend) -> None:
        self._is_up = False
        self._end_reason: str | None = None
        self._activity = "before it was up"
        self._share: RankWritePlan | None = None
        self._backend: Backend | None = None
        self._errors = os.memfd_create("ckpt-writer-stderr", os.MFD_CLOEXEC)
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):  # not so after socket.setdefaulttimeout, and a `Connection` has no timeouts
            end.setblocking(True)
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            ours.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(TAKE_S), 0))
        self._connection = Connection(ours.detach())
        try:
            with theirs:
                self.process = self._popen({**settings, "fd": theirs.fileno()}, type(backend).__module__)
        except BaseException as error:
            os.close(self._errors)
            if isinstance(error, OSError):
                raise StorageError(f"the writer process cannot be started: {sentence(error)}") from error
            raise
        self._end = weakref.finalize(self, _end, os.getpid(), self.process, self._errors)
        self._end.atexit = False  # see _end_all
        _children.add(self)

    def _popen(self, settings: dict[str, Any], module: str) -> subprocess.Popen[bytes]:
        if not sys.executable:
            raise ConfigurationError(
                "saves.writer='process' needs sys.executable, which is empty here; give saves.writer='thread'"
            )
        settings |= {"parent": os.getpid(), "retry_s": store.RETRY_S, "modules": [] if module == "__main__" else [module]}
        return subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM, json.dumps(settings), *(entry or os.getcwd() for entry in sys.path)],
            stdin=subprocess.DEVNULL,
            stdout=self._errors,
            stderr=self._errors,
            pass_fds=[settings["fd"]],
            env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "OMP_NUM_THREADS": "1"},
            # Not a session of its own: where the kernel groups sessions, a priority counts among those of one only.
            process_group=0,
        )

    def await_up(self, progress: Callable[[int], None]) -> None:
        """Wait until it can write."""
        deadline = time.monotonic() + START_TIMEOUT_S

        def look() -> None:
            progress(1)
            if time.monotonic() > deadline:
                self._end_reason = f"was not up after {START_TIMEOUT_S:g} s, and has been ended"
                raise _Gone

        while not self._is_up:
            self._is_up = self._receive(look)[0] == "up"
        self._activity = _IDLE

    def write(
        self, share: RankWritePlan, job: WriteJob, staged: Iterable[Staged], progress: Callable[[int], None]
    ) -> WriteResult:
        self._activity = f"when it began to write {job.folder}"
        save = (
            None if share is self._share else _pickled(share, "what is to be saved"),
            None if job.backend is self._backend else _pickled(job.backend, "the backend"),
            (job.folder, job.plain, job.slivers, job.previous),
            None if job.folder.is_absolute() else os.getcwd(),
            _log.getEffectiveLevel(),
        )
        self._share = self._backend = None
        items = iter(staged)
        try:
            self._send("save", save)
            kind, content = self._hand_over(items, share, job.folder, progress)
        except _Gone:
            raise
        except BaseException:
            self._give_up()
            raise
        finally:  # nobody reads its memory any more
            if isinstance(items, Generator):
                items.close()
        self._activity = _IDLE
        if kind == "failed":
            raise deserialize_error(content)
        self._share, self._backend = share, job.backend
        result: WriteResult = content
        return result

    def _hand_over(
        self, items: Iterator[Staged], share: RankWritePlan, folder: Place, progress: Callable[[int], None]
    ) -> tuple[str, Any]:
        """Hand over item after item as they are asked for; return the message that ends the save."""
        while True:
            kind, content = self._receive(lambda: progress(0))
            if kind == "moved":
                progress(content)
            elif kind != "next":
                return kind, content
            elif (staged := next(items, None)) is None:
                self._activity = f"while it wrote the rest of {folder}"
                self._send("end")
            else:
                self._activity = f"while it wrote {share.item_name(staged.number)} to {folder}"
                places = [(_place_of(host), tuple(host.shape), host.dtype) for host in map(contiguous, staged.hosts)]
                self._send("item", (staged.number, places, staged.digests))

    def _give_up(self) -> None:
        """Have the writer let go of the save, and return when it has, or is dead."""
        deadline = time.monotonic() + GIVE_UP_S

        def look() -> None:
            if time.monotonic() > deadline:
                raise _Gone

        try:
            self._send("give up")
            while self._receive(look)[0] not in ("failed", "done"):
                look()
            self._activity = _IDLE
        except _Gone:
            self.end()
            self.disconnect()

    @property
    def has_ended(self) -> bool:
        return not self._end.alive

    def end(self, how: str | None = None) -> None:
        """Kill the process, wait until it is gone, and close its stderr. Any thread, again and again.

        The connection stays open, since another thread may wait for a message: see `disconnect`.

        Args:
            how: the reason that a thread which waits for the process is told.
        """
        self._end_reason = self._end_reason or how
        self._end()

    def disconnect(self) -> None:
        """Close the connection to a process that has ended. Only in the thread that writes; elsewhere it goes with this object."""
        self._connection.close()

    def error_of_end(self) -> StorageError:
        """An error with how the process ended, what it was doing, and what it left on stderr."""
        how, hint = self._end_reason, ""
        if how is None:
            try:
                code = self.process.wait(END_S)
            except subprocess.TimeoutExpired:
                how = "does not answer any more,"
            else:
                name = next((one.name for one in signal.Signals if one == -code), f"signal {-code}")
                how = f"was killed by {name}" if code < 0 else f"ended with exit code {code}"
                hint = "; the kernel does that when memory runs out" if code == -signal.SIGKILL else ""
            how = f"{how} {self._activity}{hint}"
        tail = " ".join(self._tail().split())
        return StorageError(f"the writer process (pid {self.process.pid}) {how}{f'. It said: {tail}' if tail else ''}")

    def _tail(self) -> str:
        if self.has_ended:
            return ""
        size = os.fstat(self._errors).st_size
        return os.pread(self._errors, _TAIL_BYTES, max(0, size - _TAIL_BYTES)).decode(errors="replace")

    def _send(self, kind: str, content: Any = None) -> None:
        try:
            self._connection.send((kind, content))
        except OSError as error:
            raise _Gone from error

    def _receive(self, look: Callable[[], None]) -> tuple[str, Any]:
        """Return the next message; what the writer logs is logged here on the way.

        Args:
            look: called now and then as long as nothing comes and the process is alive; may raise.
        """
        while True:
            while (message := self._next_message()) is None:
                # The connection may outlive the process: a fork that this one has made meanwhile has an end of it too.
                if self.process.poll() is not None:
                    raise _Gone
                look()
            kind, content = message
            if kind != "log":
                return kind, content
            logger = logging.getLogger(content.name)
            if logger.isEnabledFor(content.levelno):
                logger.handle(content)

    def _next_message(self) -> tuple[str, Any] | None:
        """The next message; None: there is none yet. A writer that stops in the middle of one counts as gone."""
        try:
            return self._connection.recv() if self._connection.poll(LOOK_S) else None
        except (EOFError, OSError) as error:
            raise _Gone from error


def _end(owner: int, process: subprocess.Popen[bytes], errors: int) -> None:
    """Kill a process and wait until it is gone."""
    if os.getpid() != owner:  # a fork, to which it does not belong
        return
    process.kill()
    with suppress(subprocess.TimeoutExpired):
        process.wait(END_S)
    os.close(errors)


_children: weakref.WeakSet[_Child] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """End what is left when Python ends; after what was registered later, such as a thread that waits for a save."""
    for child in list(_children):
        child.end("was ended, for this program ends")


def _place_of(host: torch.Tensor) -> tuple[int, int, int] | bytes:
    """Number and descriptor of the segment of shared memory in which a host tensor lies, and its first byte there; or its bytes."""
    found = segment_of(host)
    if found is None:
        return raw_bytes(host).numpy().tobytes()
    segment, first = found
    return segment.number, segment.fd, first


def _pickled(thing: Any, what: str) -> bytes:
    with refusing(f"{what} cannot be sent to a writer process", "Make it something that can be pickled"):
        return pickle.dumps(thing, protocol=pickle.HIGHEST_PROTOCOL)
