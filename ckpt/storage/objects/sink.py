"""Write the files of one rank in one save into an object store: each is put whole, from memory that the sink owns until the store has it.

A rank's bytes are copied to a few buffers, piece by piece, while they are in the processor's cache from being digested. Threads put full
ones while the next is filled. There are no uploads in parts: a part that a killed process has left cannot be seen, and costs money.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from queue import SimpleQueue

from ckpt.errors import CorruptCheckpointError
from ckpt.format.places import ObjectPath, Place, is_inner_path
from ckpt.ranks.waiting import start
from ckpt.storage.direct_io import Buffers
from ckpt.storage.host_memory import private
from ckpt.storage.objects.store import store_of

NUM_THREADS = 4
"""Puts in flight."""

_SMALL = 1 << 20
"""Shorter objects are put from memory of their own; they are many, and a buffer each would hold up the long ones."""


class ObjectSink:
    """Puts objects one after another; several may be in flight when `write` returns. Used by one thread. See `ckpt.storage.sink.Sink`.

    Args:
        root: place of all objects of the attempt.
        progress: called, from any thread, with the number of bytes that the store has taken.
        buffers: memory of `segment_bytes` each; about `NUM_THREADS + 1` are in use, and a longer value takes its own length for as long as
            it is put.
    """

    def __init__(self, root: ObjectPath, progress: Callable[[int], None], buffers: Buffers) -> None:
        self.segment_bytes: int | None = buffers.segment_bytes
        self._buffers = buffers
        self._root = root
        self._progress = progress
        self._store = store_of(root)
        self._threads: list[threading.Thread] = []
        self._jobs: SimpleQueue[tuple[str, memoryview, memoryview] | None] = SimpleQueue()
        self._changed = threading.Condition()  # of the five below
        self._free: list[memoryview] = []
        self._num_buffers = 0
        self._num_in_flight = 0  # of all objects
        self._buffers_in_flight = 0
        self._small_bytes = 0  # in flight, in memory of their own
        self._error: BaseException | None = None
        self._is_given_up = False

    def write(self, name: str, pieces: Iterable[memoryview], num_bytes: int) -> None:
        """Put a new object. The pieces' memory is free when this returns.

        Args:
            num_bytes: of all pieces together.

        Raises:
            OSError: a put failed, of this object or of an earlier one, which it names.
        """
        stream = self.open(name, num_bytes)
        stream.append(pieces)
        stream.close()

    def open(self, name: str, num_bytes: int | None = None) -> ObjectStream:
        """Open a new object. The caller appends to it and closes it.

        Args:
            num_bytes: that will be appended; None: unknown, at most `segment_bytes`, or one value.
        """
        if not is_inner_path(name):
            raise CorruptCheckpointError(f"{name!r:.200} is not a path inside of {self._root}, and is not written")
        self._raise_if_failed()
        return ObjectStream(self, name, num_bytes)

    def link(self, name: str, checkpoint: Place, size: int) -> bool:
        """Have the store copy an object of another checkpoint to the same path below the root; return whether that worked.

        Args:
            checkpoint: where its files are.
        """
        if not isinstance(checkpoint, ObjectPath) or (checkpoint.scheme, checkpoint.bucket) != (self._root.scheme, self._root.bucket):
            return False
        try:
            if self._store.head((checkpoint / name).key)[0] != size:
                return False
            self._store.copy((checkpoint / name).key, (self._root / name).key)
        except FileNotFoundError:
            return False
        self._progress(1)
        return True

    def unlink(self, name: str) -> None:
        """Undo `link`."""
        self._store.delete([(self._root / name).key])

    def flush(self) -> None:
        """Wait until the store has all objects.

        Raises:
            OSError: a put failed; it names the object.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._num_in_flight == 0)
        self._raise_if_failed()

    def make_durable(self) -> None:
        """As `flush`: what a store has taken is durable. Ends the threads."""
        try:
            self.flush()
        finally:
            self._stop()

    def abort(self) -> None:
        """Stop; return when no put is in flight."""
        self._is_given_up = True
        with self._changed:
            self._changed.wait_for(lambda: self._num_in_flight == 0)
        self._stop()

    def buffer(self, num_bytes: int) -> memoryview:
        """Return memory for an object: one of the buffers, or, for a short or a very long one, its own. Waits until some is free.

        Raises:
            OSError: a put failed, and the save with it.
        """
        assert self.segment_bytes is not None
        most = self.segment_bytes
        with self._changed:
            if num_bytes > most:
                self._changed.wait_for(lambda: self._buffers_in_flight == 0)
                return memoryview(private(num_bytes))
            if num_bytes <= _SMALL:
                self._changed.wait_for(lambda: self._small_bytes + num_bytes <= most)
                return memoryview(bytearray(num_bytes))
            # Where more objects are filled at a time than there are buffers, none comes free that is not in flight.
            self._changed.wait_for(
                lambda: self._free or self._num_buffers <= NUM_THREADS or self._buffers_in_flight == 0
            )
            self._raise_if_failed()
            if self._free:
                return self._free.pop()
            self._num_buffers += 1
            return self._buffers.take_segment()

    def put(self, name: str, memory: memoryview, num_bytes: int) -> None:
        """Put the first bytes of memory that `buffer` returned, as an object, and take the memory back."""
        if len(self._threads) < NUM_THREADS:
            self._threads.append(threading.Thread(target=self._run, name=f"puts of {self._root.name}", daemon=True))
            start(self._threads[-1])
        with self._changed:
            self._note(memory, 1)
        self._jobs.put((name, memory[:num_bytes], memory))

    def _note(self, memory: memoryview, change: int) -> None:
        """Count an object as in flight, or, with -1, no more. Under `_changed`."""
        self._num_in_flight += change
        if len(memory) <= _SMALL:
            self._small_bytes += change * len(memory)
        else:
            self._buffers_in_flight += change

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            name, data, memory = job
            try:
                if self._error is None and not self._is_given_up:
                    self._store.put((self._root / name).key, data)
                    self._progress(len(data))
            except BaseException as error:
                self._error = self._error or error
            with self._changed:
                self._note(memory, -1)
                if len(memory) == self.segment_bytes and len(memory) > _SMALL:
                    self._free.append(memory)
                self._changed.notify_all()
            del job, data, memory

    def _stop(self) -> None:
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []
        while self._free:
            self._buffers.give_back_segment(self._free.pop())
            self._num_buffers -= 1

    def _raise_if_failed(self) -> None:
        if self._error is not None:
            raise self._error


class ObjectStream:
    """One object that is being filled. Used by the sink's thread. See `ckpt.storage.sink.Stream`."""

    def __init__(self, sink: ObjectSink, name: str, num_bytes: int | None) -> None:
        self._sink = sink
        self._name = name
        self._memory = sink.buffer(num_bytes if num_bytes is not None else sink.segment_bytes or 0)
        self.size = 0

    def append(self, pieces: Iterable[memoryview]) -> None:
        """Append pieces. Their memory is free when this returns.

        Raises:
            OSError: an earlier put failed.
        """
        for piece in pieces:
            end = self.size + len(piece)
            assert end <= len(self._memory), f"{self._name} is longer than was said"
            self._memory[self.size : end] = piece
            self.size = end

    def close(self, head: bytes = b"") -> None:
        """End the object, and put it.

        Args:
            head: replaces its first bytes.
        """
        self._memory[: len(head)] = head
        self._sink.put(self._name, self._memory, self.size)
