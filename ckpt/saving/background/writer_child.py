"""The writer process: the program that `WriterProcess` starts. It imports little before it can see that its trainer is gone.

Threads: `main` writes, and starts those of the storage library; `listener` receives the trainer's messages; `watcher` ends the process
with its trainer.
"""

from __future__ import annotations

import logging
import logging.handlers
import math
import os
import pickle
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from importlib import import_module
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from ckpt.errors import StorageError, sentence
from ckpt.saving.background.priority import Throttle, in_background, write_throttled
from ckpt.saving.background.serialized_errors import refusing, serialize_error

if TYPE_CHECKING:
    import torch

    from ckpt.saving.writing import Staged, WriteResult

TELL_S = 0.1
"""Seconds between two messages about bytes that moved."""
LOOK_S = 0.25
"""Seconds between two looks whether the trainer is there."""

_IGNORED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT")


class _GivenUp(Exception):
    """The trainer has given up the save."""


def serve(
    *, fd: int, parent: int, modules: list[str], num_cores: int | None, local_rank: int, mib_s: float | None, retry_s: float
) -> None:
    """Write for the trainer until it ends this process, or is gone itself. Never returns.

    Args:
        fd: of the connection to the trainer.
        parent: the trainer's process id.
        modules: imported before the trainer is told that this process is up.
        num_cores, local_rank, mib_s: see `WriterProcess`.
        retry_s: seconds in which a failed request to an object store is tried again.
    """
    for name in _IGNORED:
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(parent,), name="watcher", daemon=True).start()
    try:
        in_background(num_cores, local_rank=local_rank)
        for module in ("ckpt.saving.writing", *modules):
            import_module(module)
        import_module("ckpt.storage.objects.store").retry_for(retry_s)
        trainer = _Trainer(Connection(fd))
        logging.getLogger("ckpt").addHandler(logging.handlers.QueueHandler(trainer))  # type: ignore[arg-type]  # it only puts
        trainer.tell("up")
        _Server(trainer, parent, None if mib_s is None else Throttle(mib_s)).run()
    except BaseException:
        traceback.print_exc()
        _leave(1)


def _end_with(parent: int) -> None:
    """End with the trainer. The connection may outlive it: a process that it has forked holds an end of it too."""
    while os.getppid() == parent:
        time.sleep(LOOK_S)
    _leave(0)


def _leave(code: int) -> None:
    """End at once, whatever other threads do."""
    sys.stderr.flush()
    os._exit(code)


class _Trainer:
    """The connection to the trainer. Any thread may tell it something.

    Attributes:
        messages: received from it, in order.
        given_up: it has given up the save that it asked for last.
    """

    def __init__(self, connection: Connection) -> None:
        self.messages: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self.given_up = threading.Event()
        self._connection = connection
        self._sending = threading.Lock()
        self._moved = 0
        self._told_s = time.monotonic()
        threading.Thread(target=self._listen, name="listener", daemon=True).start()

    def tell(self, kind: str, content: Any = None) -> None:
        """Send a message. The one that ends a save follows the number of bytes that have moved and are not told."""
        with self._sending:
            if kind in ("done", "failed"):
                self._tell_progress()
            self._connection.send((kind, content))

    def progress(self, num_bytes: int) -> None:
        """Count bytes that moved, and tell the trainer now and then. Ends the save, by an error, once it is given up."""
        if self.given_up.is_set():
            raise _GivenUp
        with self._sending:
            self._moved += num_bytes
            if time.monotonic() > self._told_s + TELL_S:
                self._tell_progress()

    def _tell_progress(self) -> None:
        if self._moved:
            self._connection.send(("moved", self._moved))
        self._moved, self._told_s = 0, time.monotonic()

    def put_nowait(self, record: logging.LogRecord) -> None:
        """Send a log record, whose values are formatted already. Called by `logging.handlers.QueueHandler`."""
        self.tell("log", record)

    def _listen(self) -> None:
        try:
            while True:
                kind, content = self._connection.recv()
                if kind == "save":
                    self.given_up.clear()
                elif kind == "give up":
                    self.given_up.set()
                self.messages.put((kind, content))
        except (EOFError, OSError):
            _leave(0)
        except BaseException:
            traceback.print_exc()
            _leave(1)


class _Server:
    """Writes save after save, in the main thread."""

    def __init__(self, trainer: _Trainer, parent: int, throttle: Throttle | None) -> None:
        self._trainer = trainer
        self._parent = parent
        self._throttle = throttle
        self._share: Any = None
        self._backend: Any = None
        self._segments: dict[int, torch.Tensor] = {}

    def run(self) -> None:
        while True:
            kind, content = self._trainer.messages.get()
            if kind == "save":  # anything else is about a save that has failed here before
                answer = self._answer(content)
                del content  # slivers and plain values, which would stay until the next save
                self._segments.clear()  # the trainer may be about to release them
                self._trainer.tell(*answer)

    def _answer(self, save: tuple[Any, ...]) -> tuple[str, Any]:
        try:
            return "done", self._write(*save)
        except BaseException as error:  # told to the trainer
            return "failed", serialize_error(error, f"the writer process (pid {os.getpid()})")

    def _write(
        self, share: bytes | None, backend: bytes | None, job: Sequence[Any], current_folder: str | None, log_level: int
    ) -> WriteResult:
        from ckpt.saving.writing import WriteJob

        if current_folder is not None:
            os.chdir(current_folder)
        logging.getLogger("ckpt").setLevel(log_level)
        if share is not None:
            self._share = _unpickled(share, "what is to be saved")
        if backend is not None:
            self._backend = _unpickled(backend, "the backend")
        folder, *rest = job
        return write_throttled(
            self._throttle,
            self._trainer.given_up,
            self._share,
            WriteJob(folder, self._backend, *rest),
            self._staged(),
            self._trainer.progress,
        )

    def _staged(self) -> Iterator[Staged]:
        """Yield the items, asking for each when the one before it is written."""
        from ckpt.saving.writing import Staged

        while True:
            self._trainer.tell("next")
            kind, content = self._trainer.messages.get()
            if kind == "end":
                return
            if kind == "give up":
                raise _GivenUp
            number, places, digests = content
            yield Staged(number, [self._tensor(*place) for place in places], digests)

    def _tensor(self, where: tuple[int, int, int] | bytes, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor in the trainer's shared memory (number and descriptor of the segment, first byte in it), or of bytes that were sent."""
        import torch

        if isinstance(where, bytes):
            return (
                torch.frombuffer(bytearray(where), dtype=dtype).view(shape)
                if where
                else torch.empty(shape, dtype=dtype, device="cpu")
            )
        number, fd, first = where
        if number not in self._segments:
            self._segments[number] = _mapped(self._parent, fd)
        return self._segments[number][first:][: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


def _mapped(parent: int, fd: int) -> torch.Tensor:
    """Map the shared memory behind a descriptor of the trainer, as flat bytes.

    Raises:
        StorageError: the system does not let this process open or map it.
    """
    from ckpt.memory.shared_memory import mapped

    try:
        own = os.open(f"/proc/{parent}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.getppid() != parent:  # another process may have its number by now
                _leave(0)
            return mapped(own)
        finally:
            os.close(own)
    except OSError as error:
        raise StorageError(
            f"the writer process cannot map the memory of its trainer: {sentence(error)}; give saves.writer='thread'"
        ) from error


def _unpickled(data: bytes, what: str) -> Any:
    with refusing(
        f"{what} cannot be made anew in the writer process",
        "Define its classes in a module that can be imported, not in the program itself",
    ):
        return pickle.loads(data)
