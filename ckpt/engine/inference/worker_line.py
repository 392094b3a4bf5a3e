"""What is said to one worker process of an inference engine, in checkpoint-engine's words: it answers everything once.

    we say        the handle of a buffer   tensors in it   ...   None             None again              an error
    it answers    ""                       "", or a traceback    "": it let go    "": it is done, or ends  nothing: it ends

Source: `checkpoint_engine.worker.update_weights_from_ipc`, which is the other side. That one waits without end for what is said next, so
that nobody is left without a word. Ours is a DEALER socket in place of a REQ one, which may speak before it has an answer.
"""

from __future__ import annotations

import os
import pickle
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ckpt.errors import CheckpointError, RankAbsentError
from ckpt.ranks.waiting import poll_until

try:
    import zmq
    from zmq.utils.monitor import recv_monitor_message
except ImportError as error:
    raise ImportError(
        "workers of inference engines are spoken to by pyzmq, which comes with checkpoint-engine: pip install 'ckpt-coordinator[kimi]'"
    ) from error

_LOOK_MS = 100
_LEFT_MS = 1000
"""For what has been said last to reach a worker that has been let go of."""
_PATIENCE_S = 600.0
"""With workers that stand still when an update fails, or have not come."""


class WorkerLine:
    """One line, for one update: nobody who comes late from the one before is taken for somebody else.

    Args:
        worker: the name under which the worker looks for `address`.

    Attributes:
        address: where it connects; of this host, and of this network namespace. Only a process of this user can.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], worker: str) -> None:
        self.worker = worker
        self.address = f"ipc://@ckpt-engine-{uuid.uuid4().hex}.sock"
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(
            zmq.IPC_FILTER_UID, os.geteuid()
        )  # such an address has no permissions: anybody could connect
        self._ends = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._socket.bind(self.address)
        self._saying: list[bytes] | None = None
        self._is_due = self._is_dismissed = self._left = False

    def say(self, message: Any) -> None:
        """Send a message, as soon as somebody is there. It is answered before the next one."""
        assert not self._is_due, "it has not answered yet"
        self._is_due = True
        self._saying = [b"", pickle.dumps(message)]

    def look(self) -> bool:
        """Go on with what has been said; whether it has been answered. Does not wait.

        Raises:
            CheckpointError: the worker answered with an error, or left.
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
        """Let a poller wake up when there may be something new."""
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._ends, zmq.POLLIN)

    def dismissed(self, why: Exception) -> bool:
        """Tell a worker that it waits in vain, whatever it waits for; whether it has gone. Does not wait."""
        if not self._is_dismissed:
            message = [b"", pickle.dumps(why)]
            self._is_dismissed = self._sent(message) and self._sent(message)  # who has no handle yet acknowledges one
        while self._socket.poll(0):
            self._socket.recv_multipart()
        self._left = self._left or self._has_ended()
        return self._left

    def close(self) -> None:
        """Let go of the socket, but for what has been said."""
        self._socket.disable_monitor()
        self._ends.close(linger=0)
        self._socket.close(linger=_LEFT_MS)

    def _has_ended(self) -> bool:
        """Whether the process at the other end has, or its loop."""
        return bool(self._ends.poll(0) and recv_monitor_message(self._ends))

    def _sent(self, message: list[bytes]) -> bool:
        try:
            self._socket.send_multipart(message, zmq.NOBLOCK)
        except zmq.Again:  # nobody is there
            return False
        return True


def await_answers(lines: Sequence[WorkerLine], timeout_s: float, look: Callable[[], None]) -> None:
    """Wait until all workers have answered what has been said to them.

    Args:
        timeout_s: that one may take.
        look: called now and then; what it raises ends the waiting.

    Raises:
        RankAbsentError: a worker did not answer.
        CheckpointError: a worker answered with an error, or left.
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
    """Tells workers that an update has failed, beside whatever comes next: those that are busy, and those that come late."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []

    def to(self, lines: Iterable[WorkerLine]) -> None:
        """Take lines, for good. Who has not come within ten minutes is told no more."""
        thread = threading.Thread(target=self._tell, args=([*lines],), name="ckpt-farewell", daemon=True)
        thread.start()
        self._threads = [one for one in self._threads if one.is_alive()] + [thread]

    def end(self) -> bool:
        """Tell nobody any more; whether all lines are closed."""
        self._over.set()
        for thread in self._threads:
            thread.join(2.0)
        return not any(thread.is_alive() for thread in self._threads)

    def _tell(self, lines: list[WorkerLine]) -> None:
        why = RuntimeError("Some workers failed to update weights")
        until = time.monotonic() + _PATIENCE_S
        while True:
            for line in [line for line in lines if line.dismissed(why)]:
                lines.remove(line)
                line.close()
            if not lines or time.monotonic() > until or self._over.wait(0.1):
                break
        for line in lines:
            line.close()


def _cause(answer: bytes) -> str:
    """The last line of a traceback, which is the error."""
    lines = answer.decode(errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else "it did not say why"
