"""Messages between the ranks of one life of a job: a queue in the store for each rank, which one thread reads for all its topologies.

The server wakes the thread. With the connection for all other requests a rank so has two, however many branches there are.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from queue import Empty, SimpleQueue

from ckpt.ranks.store_client import StoreClient
from ckpt.ranks.stores import StoreGoneError
from ckpt.ranks.waiting import start

_STOP = b"stop"
_AT_ONCE_S = 0.0005
"""A message that is there within this time has been waiting for the reader."""


class Mail:
    """This rank's messages, sorted by channel.

    Args:
        client: of the part of the store that this life of the job uses.
        timeout_s: that the store may be silent.
    """

    def __init__(self, client: StoreClient, rank: int, timeout_s: float) -> None:
        self.client = client
        self._rank = rank
        self._reader: StoreClient | None = StoreClient(client.connection, writer=rank, timeout_s=timeout_s, pops=True)
        self._timeout_s = timeout_s
        self._pushed_s = time.monotonic()
        self._lock = threading.Lock()
        self._channels: dict[str, SimpleQueue[bytes | None]] = {}
        self._failure: StoreGoneError | None = None
        self._thread = threading.Thread(target=self._read, name=f"mail of rank {rank}", daemon=True)
        start(self._thread)

    def send(self, to: int, channel: str, data: bytes) -> None:
        """Send a message to a channel of a rank. Order between two ranks is kept. Any thread."""
        self.client.push(_inbox(to), channel.encode() + b"\0" + data)

    def receive(self, channel: str, timeout_s: float) -> bytes | None:
        """Return the next message in a channel; None: none has come. Signal handlers run meanwhile.

        Raises:
            StoreGoneError: the store does not answer.
        """
        if self._failure is not None:
            raise StoreGoneError(str(self._failure), is_silent=self._failure.is_silent)
        with suppress(Empty):
            data = self._of(channel).get(timeout=timeout_s)
            return self.receive(channel, 0.0) if data is None else data
        return None

    def has_more(self, channel: str) -> bool:
        """Whether there are messages, or may be: some of this rank that have not been read yet."""
        return not self._of(channel).empty() or self.client.num_waiting(_inbox(self._rank)) > 0

    def keep_alive(self) -> None:
        """Send this rank a message from time to time: if none comes for `timeout_s`, the store is gone."""
        if time.monotonic() - self._pushed_s > self._timeout_s / 4:
            self._pushed_s = time.monotonic()
            self.send(self._rank, "", b"")

    def fail(self, error: StoreGoneError) -> None:
        """Wake all who wait for a message: there will be none."""
        with self._lock:
            self._failure = error
            for channel in self._channels.values():
                channel.put(None)

    def forget(self, channel: str) -> None:
        """Drop the messages in a channel that is closed."""
        with self._lock:
            self._channels.pop(channel, None)

    def close(self) -> None:
        """Stop reading."""
        with suppress(StoreGoneError):
            self.client.push(_inbox(self._rank), _STOP)
            self._thread.join(min(5.0, self._timeout_s))

    def _of(self, channel: str) -> SimpleQueue[bytes | None]:
        with self._lock:
            return self._channels.setdefault(channel, SimpleQueue())

    def _read(self) -> None:
        assert self._reader is not None, "the thread has just begun"
        inbox = _inbox(self._rank)
        try:
            while True:
                waited_since_s = time.monotonic()
                messages = [self._reader.pop(inbox)]
                if time.monotonic() - waited_since_s < _AT_ONCE_S:  # many ranks write to this one
                    messages += self._reader.pop_waiting(inbox)
                for data in messages:
                    channel, _, message = (data or b"\0").partition(b"\0")
                    if message:
                        self._of(channel.decode()).put(message)
                if _STOP in messages:
                    break
        except StoreGoneError as error:
            self.fail(error)
        self._reader = None  # and with it the connection


def _inbox(rank: int) -> str:
    return f"inbox/{rank}"
