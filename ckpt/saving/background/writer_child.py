"""The writer process itself: what `WriterProcess` starts. It imports little before it can see that its trainer is gone."""

from __future__ import annotations

import logging
import os
import pickle
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ckpt.errors import CheckpointError, ConfigurationError, sentence
from ckpt.saving.background.channel import Channel, Gone
from ckpt.saving.background.priority import Throttle, in_background, write_throttled
from ckpt.saving.background.serialized_errors import serialize_error

if TYPE_CHECKING:
    import torch

    from ckpt.saving.writing import Staged

TELL_S = 0.1
"""Between two words about bytes that moved."""

_IGNORED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT")


class _GivenUp(Exception):
    """The trainer wants this save no more."""


class _Save:
    """A save as it was asked for, and what came after: items, their end, or that it is given up."""

    def __init__(self, content: dict[str, Any]) -> None:
        self.content = content
        self.messages: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self.given_up = threading.Event()


def serve(
    *,
    fd: int,
    parent: int,
    modules: list[str],
    num_cores: int | None,
    local_rank: int,
    mib_s: float | None,
) -> None:
    """Write for the trainer until it is gone, or says so. Never returns.

    Args:
        fd: of the socket to it.
        parent: its process id.
        modules: imported before it is told that this process is up.
    """
    for name in _IGNORED:
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    try:
        in_background(num_cores, local_rank=local_rank)
        channel = Channel(socket.socket(fileno=fd))
        listener = _Listener(channel, parent)
        threading.Thread(target=listener.run, name="listener", daemon=True).start()
        for module in ("ckpt.saving.writing", *modules):
            import_module(module)
        logging.getLogger("ckpt").addHandler(_ToTrainer(channel))
        channel.send(("up", None))
        _Server(channel, listener, None if mib_s is None else Throttle(mib_s)).run()
    except BaseException:
        traceback.print_exc()
        _leave(1)


def _leave(code: int) -> None:
    """End at once, in the middle of whatever it is: nobody waits for what is being done here."""
    sys.stderr.flush()
    os._exit(code)


class _Listener:
    """Hears what the trainer says, as a thread of its own, and that it says nothing any more.

    Attributes:
        saves: those that were asked for.
        segments: number -> memory that the trainer shares.
    """

    def __init__(self, channel: Channel, parent: int) -> None:
        self.saves: queue.SimpleQueue[_Save] = queue.SimpleQueue()
        self.segments: dict[int, torch.Tensor] = {}
        self._channel = channel
        self._parent = parent
        self._save = _Save({})

    def run(self) -> None:
        try:
            while True:
                self._take(*self._channel.receive(self._look))
        except Gone:
            _leave(0)
        except BaseException:
            traceback.print_exc()
            _leave(1)

    def _look(self) -> None:
        """The socket may outlive the trainer: whoever it has forked has an end of it too."""
        if os.getppid() != self._parent:
            _leave(0)

    def _take(self, message: tuple[str, Any], fds: list[int]) -> None:
        kind, content = message
        if kind == "save":
            self._save = _Save(content)
            self.saves.put(self._save)
            return
        if kind == "item":
            self._map(content[-1], fds)
        if kind == "give up":
            self._save.given_up.set()
        self._save.messages.put((kind, content))

    def _map(self, numbers: list[int], fds: list[int]) -> None:
        from ckpt.memory.shared_memory import mapped

        for number, fd in zip(numbers, fds, strict=True):
            self.segments[number] = mapped(fd)
            os.close(fd)


class _Server:
    """Writes save after save."""

    def __init__(self, channel: Channel, listener: _Listener, throttle: Throttle | None) -> None:
        self._channel = channel
        self._listener = listener
        self._throttle = throttle
        self._share: Any = None
        self._backend: Any = None

    def run(self) -> None:
        while True:
            save = self._listener.saves.get()
            self._listener.segments.clear()
            answer = self._answer(save)
            self._listener.segments.clear()  # the trainer may be about to let go of them
            self._channel.send(answer)

    def _answer(self, save: _Save) -> tuple[str, Any]:
        progress = _Progress(self._channel, save.given_up)
        try:
            answer = "done", self._write(save, progress)
        except BaseException as error:  # told to the trainer
            answer = "failed", serialize_error(error, f"the writer process (pid {os.getpid()})")
        progress.tell()
        return answer

    def _write(self, save: _Save, progress: _Progress) -> Any:
        from ckpt.saving.writing import WriteJob

        given, save.content = save.content, {}
        if given["below"] is not None:
            os.chdir(given["below"])
        logging.getLogger("ckpt").setLevel(given["level"])
        if given["share"] is not None:
            self._share = _unpickled(given["share"], "what is to be saved")
        if given["backend"] is not None:
            self._backend = _unpickled(given["backend"], "the backend")
        job = WriteJob(given["folder"], self._backend, given["plain"], given["slivers"], given["previous"])
        return write_throttled(self._throttle, save.given_up, self._share, job, self._staged(save), progress)

    def _staged(self, save: _Save) -> Iterator[Staged]:
        """The items, each asked for when the one before it is done with."""
        from ckpt.saving.writing import Staged

        while True:
            self._channel.send(("next", None))
            kind, content = save.messages.get()
            if kind == "end":
                return
            if kind == "give up":
                raise _GivenUp
            number, places, digests, _ = content
            yield Staged(number, [self._tensor(*place) for place in places], digests)

    def _tensor(self, where: tuple[int, int] | bytes, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        import torch

        if isinstance(where, bytes):
            if not where:
                return torch.empty(shape, dtype=dtype)
            return torch.frombuffer(bytearray(where), dtype=torch.uint8).view(dtype).view(shape)
        number, first = where
        num_bytes = dtype.itemsize
        for side in shape:
            num_bytes *= side
        return self._listener.segments[number][first : first + num_bytes].view(dtype).view(shape)


class _Progress:
    """Tells the trainer, now and then, how many bytes have moved; ends the save for whoever calls it when it is given up."""

    def __init__(self, channel: Channel, given_up: threading.Event) -> None:
        self._channel = channel
        self._given_up = given_up
        self._lock = threading.Lock()
        self._moved = 0
        self._told_s = time.monotonic()

    def __call__(self, num_bytes: int) -> None:
        if self._given_up.is_set():
            raise _GivenUp
        with self._lock:
            self._moved += num_bytes
            is_due = time.monotonic() > self._told_s + TELL_S
        if is_due:
            self.tell()

    def tell(self) -> None:
        with self._lock:
            moved, self._moved = self._moved, 0
            self._told_s = time.monotonic()
        if moved:
            self._channel.send(("moved", moved))


class _ToTrainer(logging.Handler):
    """Hands what is logged to the trainer, as text."""

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        trace = "\n" + "".join(traceback.format_exception(*record.exc_info)) if record.exc_info else ""
        plain = {
            **record.__dict__,
            "msg": record.getMessage() + trace,
            "args": None,
            "exc_info": None,
            "exc_text": None,
        }
        self._channel.send(("log", plain))


def _unpickled(data: bytes, what: str) -> Any:
    try:
        return pickle.loads(data)
    except Exception as error:  # whatever a class of somebody's raises
        if isinstance(error, CheckpointError):
            raise
        raise ConfigurationError(
            f"{what} cannot be made anew in the writer process: {sentence(error)}. Define its classes in a module that can be "
            "imported, not in the program itself, or give saves.writer='thread'."
        ) from error
