"""The protocol with one worker process of an inference engine, which is checkpoint-engine's: the worker answers each message once.

    message   handle of a buffer   tensors in it   ...   None                   None again             an error
    answer    ""                   "", or a traceback    "": it has unmapped    "": done, or it ends   none: it ends

Source: `checkpoint_engine.worker.update_weights_from_ipc`, the other side, which waits for the next message without a timeout: each worker
must be dismissed. This side has a DEALER socket in place of a REQ one, for it may send before it has an answer.
"""

from __future__ import annotations

import os
import pickle
import threading
import uuid
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from typing import Any

from ckpt.errors import CheckpointError, RankAbsentError
from ckpt.ranks.waiting import OutOfTimeError, in_thread, poll_until

try:
    import zmq
    from zmq.utils.monitor import recv_monitor_message
except ImportError as error:
    raise ImportError(
        "messages to workers of inference engines need pyzmq, which comes with checkpoint-engine: pip install 'ckpt-coordinator[kimi]'"
    ) from error

_LOOK_MS = 100
_LEFT_MS = 1000
"""How long a closed socket goes on to deliver its last message."""
_PATIENCE_S = 600.0
"""How long workers that hang when an update fails, or have not connected, are waited for before they are abandoned."""


class WorkerLine:
    """The connection to one worker for one update: a worker that is late for the update before cannot connect to it.

    Args:
        worker: the name under which the worker looks up `address`.

    Attributes:
        address: to connect to, for processes of this user on this host and network namespace.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], worker: str) -> None:
        self.worker = worker
        self.address = f"ipc://@ckpt-engine-{uuid.uuid4().hex}.sock"
        self._socket = context.socket(zmq.DEALER)
        # Such an address has no permissions: any user could connect.
        self._socket.setsockopt(zmq.IPC_FILTER_UID, os.geteuid())
        self._ends = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._socket.bind(self.address)
        self._saying: list[bytes] | None = None
        self._is_due = self._is_dismissed = self._left = False

    def say(self, message: Any) -> None:
        """Send a message, as soon as the worker has connected. It must be answered before the next one."""
        assert not self._is_due, "it has not answered yet"
        self._is_due = True
        self._saying = [b"", pickle.dumps(message)]

    def look(self) -> bool:
        """Return whether the last message has been answered. Does not wait.

        Raises:
            CheckpointError: the worker answered with an error, or has ended.
        """
        if self._is_due and self._saying is not None and self._sent(self._saying):
            self._saying = None
        if self._is_due and self._socket.poll(0):
            *_, answer = self._socket.recv_multipart()
            if answer:
                raise CheckpointError(f"the inference engine's worker on {self.worker} failed: {_cause(answer)}")
            self._is_due = False
        self._left = self._left or self._has_ended()
        if self._is_due and self._left and not self._socket.poll(0):
            raise CheckpointError(
                f"the inference engine's worker on {self.worker} has ended in the middle of an update: see its log"
            )
        return not self._is_due

    def register(self, poller: zmq.Poller) -> None:
        """Let a poller wake up at an answer, or when the worker ends."""
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._ends, zmq.POLLIN)

    def dismissed(self, why: Exception) -> bool:
        """Send the worker the error that ends its update; return whether it has disconnected. Does not wait."""
        if not self._is_dismissed:
            message = [b"", pickle.dumps(why)]
            # Twice, for a worker without a handle acknowledges one.
            self._is_dismissed = self._sent(message) and self._sent(message)
        while self._socket.poll(0):
            self._socket.recv_multipart()
        self._left = self._left or self._has_ended()
        return self._left

    def close(self) -> None:
        """Close the socket, after its last message is delivered."""
        self._socket.disable_monitor()
        self._ends.close(linger=0)
        self._socket.close(linger=_LEFT_MS)

    def _has_ended(self) -> bool:
        """Whether the worker's process, or its loop, has ended."""
        return bool(self._ends.poll(0) and recv_monitor_message(self._ends))

    def _sent(self, message: list[bytes]) -> bool:
        try:
            self._socket.send_multipart(message, zmq.NOBLOCK)
        except zmq.Again:  # the worker has not connected
            return False
        return True


def await_answers(lines: Sequence[WorkerLine], timeout_s: float, look: Callable[[], None]) -> None:
    """Wait until all workers have answered.

    Args:
        timeout_s: that one may take.
        look: called several times a second; its errors end the wait.

    Raises:
        RankAbsentError: a worker did not answer.
        CheckpointError: a worker answered with an error, or has ended.
    """
    poller = zmq.Poller()
    for line in lines:
        line.register(poller)
    waiting: list[str] = []

    def all_answered() -> bool | None:
        waiting[:] = [line.worker for line in lines if not line.look()]
        if not waiting:
            return True
        poller.poll(_LOOK_MS)
        return None

    def failure() -> RankAbsentError:
        names = ", ".join(waiting)
        return RankAbsentError(f"the inference engine's worker on {names} did not answer for {timeout_s:g} s")

    poll_until(all_answered, look=look, nap=None, timeout_s=timeout_s, failure=failure)


class Farewell:
    """Dismisses the workers of updates that failed, in threads beside the next update: they may be busy, or connect late."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._tellings: list[Future[None]] = []

    def to(self, lines: Iterable[WorkerLine]) -> None:
        """Dismiss the workers, and close their lines; after ten minutes also those that have not connected."""
        self._tellings = [telling for telling in self._tellings if not telling.done()]
        self._tellings.append(in_thread(partial(self._tell, [*lines]), "ckpt-farewell"))

    def end(self) -> bool:
        """Stop; return whether all lines are closed."""
        self._over.set()
        return not wait(self._tellings, timeout=2.0).not_done

    def _tell(self, lines: list[WorkerLine]) -> None:
        why = RuntimeError("Some workers failed to update weights")

        def all_gone() -> bool | None:
            for line in [line for line in lines if line.dismissed(why)]:
                lines.remove(line)
                line.close()
            return True if not lines or self._over.wait(0.1) else None

        with suppress(OutOfTimeError):
            poll_until(all_gone, nap=None, timeout_s=_PATIENCE_S)
        for line in lines:
            line.close()


def _cause(answer: bytes) -> str:
    """Return the last line of a traceback, the error."""
    lines = answer.decode(errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else "it did not say why"
