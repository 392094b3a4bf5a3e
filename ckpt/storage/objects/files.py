"""Read the objects of one checkpoint by their paths in it. The counterpart of `ckpt.storage.checkpoint_files` for object stores."""

from __future__ import annotations

import errno
import io
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from threading import Lock
from typing import Any, BinaryIO, Protocol, TypeVar

from ckpt.errors import CorruptCheckpointError
from ckpt.format.places import ObjectPath, is_inner_path
from ckpt.storage.files import Closed
from ckpt.storage.objects.store import fill, store_of

RANGE_BYTES = 8 << 20
"""Bytes of one request: several are in flight, and their answers still fit the processor's cache when they are copied and digested."""


REQUESTS = 16
"""Requests in flight: at 30 ms each, one alone gives 0.2 GB/s, 16 give 1.3 (measured)."""

_ASKED_ONE_BY_ONE = 4
"""Objects whose size is asked for before all are listed."""

_STREAM_BYTES = 256 << 10
"""Bytes of a request for a stream: those that describe a checkpoint of another program, mostly."""

Range = tuple[str, int, int]
"""The path of an object, and its bytes [start, stop)."""

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def side_by_side(call: Callable[[_Item], _Result], items: Iterable[_Item]) -> list[_Result]:
    """Call for each item, several at a time: an answer takes as long as the way to the store and back. Raises one of their errors."""
    items = list(items)
    if len(items) < 2:
        return [call(item) for item in items]
    num = min(REQUESTS, len(items))
    with ThreadPoolExecutor(num, thread_name_prefix="requests") as threads:
        # Not an item at a time: of what is at hand, to hand it to a thread costs more than the call.
        found = list(threads.map(lambda first: [call(item) for item in items[first::num]], range(num)))
    return [found[number % num][number // num] for number in range(len(items))]


class ObjectFiles(Closed):
    """The objects below one address. See `ckpt.storage.checkpoint_files.Files`."""

    def __init__(self, root: ObjectPath) -> None:
        self.root = root
        self._store = store_of(root)
        self._sizes: dict[str, int] | None = None
        self._num_asked = 0
        self._listing = Lock()
        self._ahead = _Ahead((), self._range)

    def close(self) -> None:
        """Forget what was listed, and what was asked for and not read. Connections are the store's."""
        self._sizes = None
        self._ahead.close()

    def read(self, path: str, most_bytes: int) -> bytes:
        """Read a small object whole."""
        data = self._store.get_range(self._key(path), 0, most_bytes + 1)
        if len(data) > most_bytes:
            raise CorruptCheckpointError(f"{path} has more than the {most_bytes} bytes that it should have", file=path)
        return bytes(data)

    def first_bytes(self, path: str, most_bytes: int) -> bytes:
        """Read the beginning of an object, at most so many bytes."""
        return bytes(self._store.get_range(self._key(path), 0, most_bytes))

    def size(self, path: str) -> int:
        """Return the size of an object in bytes. After some calls all are listed: a request for each would take minutes of waiting."""
        key = self._key(path)
        with self._listing:
            if self._sizes is None and self._num_asked < _ASKED_ONE_BY_ONE:
                self._num_asked += 1
                return self._store.head(key)[0]
            if self._sizes is None:
                self._sizes = {found.key: found.size for found in self._store.below(self.root.key)}
        if key not in self._sizes:
            raise FileNotFoundError(errno.ENOENT, "there is no such object", str(self.root / path))
        return self._sizes[key]

    def size_and_version(self, path: str) -> tuple[int, tuple[object, ...]]:
        """Return the size of an object, and a value that differs from that of a later object of this key."""
        size, tag = self._store.head(self._key(path))
        return size, tag

    def opened(self, path: str, *, once: bool = False) -> ObjectFile:
        """Return an object to read ranges of."""
        return ObjectFile(self, path)

    def stream(self, path: str) -> BinaryIO:
        """Return an object as a file to read."""
        return io.BufferedReader(Stream(self.opened(path)), _STREAM_BYTES)

    def read_soon(self, ranges: Iterable[Range], num_requests: int = REQUESTS) -> None:
        """Ask for ranges that `read_at` will be asked for in this order, by one thread: so many of them are in flight from now on."""
        self._ahead.close()
        self._ahead = _Ahead(ranges, self._range, num_requests)

    def _range(self, path: str, start: int, stop: int) -> memoryview:
        return self._store.get_range(self._key(path), start, stop)

    def read_at(self, path: str, buffers: Sequence[memoryview], offset: int) -> int:
        """Fill buffers in turn with an object's bytes from `offset` on; return the number of bytes: one request's at most."""
        stop = offset + min(sum(map(len, buffers)), RANGE_BYTES)
        data = self._ahead.take(path, offset, stop)
        return self._store.get_into(self._key(path), offset, stop, buffers) if data is None else fill(buffers, data)

    def below(self, path: str = "") -> Iterator[str]:
        """Yield the path of every object below a path, at any depth."""
        start = self.root.key + "/" if self.root.key else ""
        place = self.root / path if path else self.root
        yield from (found.key.removeprefix(start) for found in self._store.below(place.key))

    def sizes(self) -> list[int]:
        """Return the bytes of each object."""
        return [found.size for found in self._store.below(self.root.key)]

    def write(self, path: str, data: bytes) -> None:
        """Put a small object."""
        self._store.put(self._key(path), data)

    def require_folder(self, path: str) -> None:
        """Refuse a path that leads out of the checkpoint. A store has no links."""
        self._key(path)

    def require_regular(self, path: str) -> None:
        """See `require_folder`."""
        self._key(path)

    def require_regular_below(self, path: str, progress: Callable[[], object] = lambda: None) -> None:
        """See `require_folder`."""
        self._key(path)

    def _key(self, path: str) -> str:
        if not is_inner_path(path):
            raise CorruptCheckpointError(f"{path!r:.200} is not a path inside of {self.root}", file=path)
        return (self.root / path).key


class ReadAt(Protocol):
    """Bytes that are read by their place."""

    @property
    def size(self) -> int: ...

    def read_at(self, buffers: Sequence[memoryview], offset: int) -> int: ...


class Stream(io.RawIOBase):
    """The bytes of an object, or of a part of a file, as of a file."""

    def __init__(self, file: ReadAt) -> None:
        self._file = file
        self._at = 0
        self._size = file.size

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence])
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, memory: Any) -> int:
        count = self._file.read_at([memoryview(memory).cast("B")], self._at)
        self._at += count
        return count


class _Ahead:
    """Ranges that will be read in order, of which some are in flight. Used by one thread."""

    def __init__(self, ranges: Iterable[Range], ask: Callable[[str, int, int], memoryview], num_requests: int = REQUESTS) -> None:
        self._num_requests = num_requests
        self._coming = _merged(ranges)
        self._ask = ask
        self._asked: deque[tuple[Range, Future[memoryview]]] = deque()
        self._threads: ThreadPoolExecutor | None = None
        self._fill()

    def take(self, path: str, start: int, stop: int) -> memoryview | None:
        """Return bytes from `start` on, `stop` at most; None: they were not asked for. Ranges before them are not kept."""
        while self._asked and not _is_in(start, path, self._asked[0][0]):
            if not any(_is_in(start, path, asked) for asked, _ in self._asked):
                return None
            self._next()
        if not self._asked:
            return None
        (_, first, last), coming = self._asked[0]
        stop = min(stop, last)
        data = coming.result()[start - first : stop - first]
        if stop == last:
            self._next()
        return data

    def close(self) -> None:
        """Ask for no more. Answers that are on their way are dropped."""
        self._coming = iter(())
        self._asked.clear()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._threads = None

    def _next(self) -> None:
        self._asked.popleft()
        self._fill()

    def _fill(self) -> None:
        while len(self._asked) < self._num_requests and (one := next(self._coming, None)) is not None:
            self._threads = self._threads or ThreadPoolExecutor(self._num_requests, thread_name_prefix="ranges")
            self._asked.append((one, self._threads.submit(self._ask, *one)))


def _merged(ranges: Iterable[Range]) -> Iterator[Range]:
    """Join ranges that follow one another, and cut what is longer than `RANGE_BYTES`."""
    path, start, stop = "", 0, 0
    for name, begin, end in ranges:
        if (name, begin) == (path, stop):
            stop = end
        else:
            if start < stop:
                yield path, start, stop
            path, start, stop = name, begin, end
        while stop - start >= RANGE_BYTES:
            yield path, start, start + RANGE_BYTES
            start += RANGE_BYTES
    if start < stop:
        yield path, start, stop


def _is_in(at: int, path: str, one: Range) -> bool:
    return one[0] == path and one[1] <= at < one[2]


class ObjectFile(Closed):
    """One object. See `ckpt.storage.checkpoint_files.OpenedFile`."""

    def __init__(self, files: ObjectFiles, path: str) -> None:
        self._files = files
        self._path = path

    @property
    def size(self) -> int:
        return self._size_and_version[0]

    @property
    def version(self) -> tuple[object, ...]:
        return self._size_and_version[1]

    @cached_property
    def _size_and_version(self) -> tuple[int, tuple[object, ...]]:
        return self._files.size_and_version(self._path)

    def close(self) -> None:
        """Do nothing."""

    def read_at(self, buffers: Sequence[memoryview], offset: int) -> int:
        """See `ObjectFiles.read_at`."""
        return self._files.read_at(self._path, buffers, offset)
