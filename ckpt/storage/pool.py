"""Host memory that keeps the files of a rank's newest save, byte for byte as they lie on the disk.

The bytes of a save go from the tensors, or from a device, to this memory once, and from there to the disk. What it takes is as much as the
rank writes in a save. It is used again by the next save, file by file, for memory that is touched for the first time is slow; from then
on, and until that save is committed, nothing is held. It goes when the coordinator is closed, or with the process.
"""

from __future__ import annotations

import os
import secrets
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ckpt.format.held import MemoryFile
from ckpt.storage.host_memory import HUGE_PAGE, mapped, shared

_PAGE = 4096

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class PoolFile:
    """One file that grows, in memory. Its memory stays when it begins anew.

    Attributes:
        size: bytes that have been appended.
    """

    def __init__(self) -> None:
        self._name = f"ckpt-pool-{secrets.token_hex(8)}"
        self._fd = shared(self._name, 0)
        self._close = weakref.finalize(self, os.close, self._fd)
        self._inode = os.fstat(self._fd).st_ino
        self._memory: Bytes = np.empty(0, np.uint8)
        self._end = 0  # of the memory's own file: what is mapped behind it must not be touched
        self.size = 0

    @property
    def whole(self) -> Bytes:
        """All that has been appended."""
        return self._memory[: self.size]

    @property
    def num_bytes(self) -> int:
        """Of the memory that has been touched."""
        return os.fstat(self._fd).st_blocks * 512

    def begin(self) -> None:
        """Forget what is in it. Who was told of that finds it no more: it is longer now than any file in it has been."""
        self.size = 0
        self._lengthen(self._end, len(self._memory))

    def append(self, piece: memoryview) -> None:
        """Copy a piece behind the others, unless it lies there already."""
        if not len(piece):
            return
        start, stop = self.size, self.size + len(piece)
        self.make_room(stop)
        source: Bytes = np.frombuffer(piece, np.uint8)
        there = self._memory[start:stop]
        in_place = source.ctypes.data == there.ctypes.data
        assert in_place or not self._lies_here(source), f"bytes {start} to {stop} of {self._name} lie elsewhere in it"
        if not in_place:
            np.copyto(there, source)
        self.size = stop

    def overwrite(self, data: bytes) -> None:
        """Replace the first bytes."""
        assert len(data) <= self.size
        self._memory[: len(data)] = np.frombuffer(data, np.uint8)

    def view(self, start: int, stop: int) -> memoryview:
        """Bytes that have been appended, as they stay until it begins anew."""
        assert stop <= self.size
        flat: Any = self._memory[start:stop]
        return memoryview(flat)

    def room(self, start: int, stop: int) -> torch.Tensor:
        """Memory for bytes that will be appended, flat uint8, to be filled before."""
        self.make_room(stop)
        return torch.from_numpy(self._memory[start:stop])

    def make_room(self, num_bytes: int) -> None:
        """Have memory for so many bytes. What was there stays, also for who has a view of it."""
        if num_bytes > len(self._memory):
            wanted = max(num_bytes + 1, 2 * len(self._memory))
            page = HUGE_PAGE if wanted >= HUGE_PAGE else _PAGE
            self._lengthen(num_bytes, -(-wanted // page) * page)
            self._memory = np.frombuffer(mapped(self._fd, self._end), np.uint8)
        elif num_bytes > self._end:
            self._lengthen(num_bytes, len(self._memory))

    def _lies_here(self, source: Bytes) -> bool:
        return 0 <= source.ctypes.data - self._memory.ctypes.data < len(self._memory)

    def settle(self) -> MemoryFile:
        """Nothing more is appended for now: what is behind is let go of. Returns where others find it."""
        os.ftruncate(self._fd, self.size)
        self._end = self.size
        return MemoryFile(os.getpid(), self._fd, self._inode, self.size, self._name)

    def close(self) -> None:
        """Let go of the memory, as soon as nobody has a view of it."""
        self._memory, self._end, self.size = np.empty(0, np.uint8), 0, 0
        self._close()

    def _lengthen(self, least: int, wanted: int) -> None:
        try:
            os.ftruncate(self._fd, wanted)
        except OSError:  # longer than this process's files may be, perhaps
            wanted = -(-least // _PAGE) * _PAGE
            os.ftruncate(self._fd, wanted)
        self._end = wanted


@dataclass(eq=False)
class PooledSave:
    """The files of one save in memory. Filled by the thread that writes it.

    Attributes:
        before: folder of the checkpoint that was held when it began; None: none was.
        folder: where it has been committed.
        files: path below the checkpoint -> its bytes.
    """

    pool: Pool
    before: Path | None = None
    folder: Path | None = None
    files: dict[str, PoolFile] = field(default_factory=dict)

    def file(self, name: str) -> PoolFile:
        """The memory of a file of this save, from its first byte on."""
        if name not in self.files:
            self.files[name] = self.pool.take(name)
        return self.files[name]

    def link(self, name: str, there: Path) -> None:
        """A file has been linked, not written: it is kept as it is, if it is in memory."""
        if self.before is not None and there == self.before / name and (file := self.pool.take_as_it_is(name)):
            self.files[name] = file

    def unlink(self, name: str) -> None:
        """It has not been, after all."""
        if name in self.files:
            self.pool.give_back(name, self.files.pop(name))

    def add(self, files: Mapping[str, bytes]) -> None:
        """Keep small files that have been written in another way."""
        for name, data in files.items():
            self.file(name).append(memoryview(data))

    def settle(self) -> dict[str, MemoryFile]:
        """Where the files are, now that all have been written."""
        return {name: file.settle() for name, file in self.files.items()}


class Pool:
    """The memory of one rank, for one save after another. Any thread.

    A save `begin`s: what was held is held no more, and its memory is used again, unless somebody is `reading` it, who keeps it for
    as long. Then it is `dropped`, or everything else is let go of, because it has been `kept`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: dict[str, PoolFile] = {}
        self._held: PooledSave | None = None
        self._readers: dict[PooledSave, int] = {}

    @property
    def held(self) -> PooledSave | None:
        return self._held

    @property
    def num_bytes(self) -> int:
        """That the system has given to the newest save, and to what will be used again."""
        with self._lock:
            held = self._held.files.values() if self._held is not None else ()
            return sum(file.num_bytes for file in (*held, *self._free.values()))

    def begin(self) -> PooledSave:
        """Memory for the files of a new save; nothing is held from now on."""
        with self._lock:
            held, self._held = self._held, None
            if held is None or held in self._readers:
                return PooledSave(self)
            unused = self._use_again(held.files)
        _close(unused)
        return PooledSave(self, held.folder)

    def keep(self, save: PooledSave, folder: Path) -> None:
        """This save is committed: it is held."""
        with self._lock:
            before, self._held, save.folder = self._held, save, folder
            unused = list(self._free.values())
            self._free = {}
            # A save that began before the one before it was kept has memory of its own.
            if before is not None and before is not save and before not in self._readers:
                unused += before.files.values()
        _close(unused)

    def drop(self, save: PooledSave) -> None:
        """This save has failed; nobody writes to its files, or from them, any more."""
        with self._lock:
            if save is self._held:
                self._held = None
            unused = self._use_again(save.files)
            save.files = {}
        _close(unused)

    @contextmanager
    def reading(self) -> Iterator[PooledSave | None]:
        """What is held, which stays as it is inside of the block; None: nothing."""
        with self._lock:
            save = self._held
            if save is not None:
                self._readers[save] = self._readers.get(save, 0) + 1
        try:
            yield save
        finally:
            if save is not None:
                self._end_reading(save)

    def close(self) -> None:
        """Let go of all memory that nobody is reading."""
        with self._lock:
            held, self._held = self._held, None
            files = [*self._free.values(), *(held.files.values() if held not in self._readers and held else ())]
            self._free = {}
        _close(files)

    def _end_reading(self, save: PooledSave) -> None:
        with self._lock:
            self._readers[save] -= 1
            if self._readers[save]:
                return
            del self._readers[save]
            files = [] if save is self._held else list(save.files.values())
        _close(files)

    def take(self, name: str) -> PoolFile:
        """The memory of the file of that name of the save before, or new memory, with nothing in it."""
        found = self.take_as_it_is(name)
        if found is None:
            return PoolFile()
        found.begin()
        return found

    def take_as_it_is(self, name: str) -> PoolFile | None:
        """The file of that name of the save before; None: there is none."""
        with self._lock:
            return self._free.pop(name, None)

    def give_back(self, name: str, file: PoolFile) -> None:
        """A save does not need a file that it took."""
        with self._lock:
            unused = self._use_again({name: file})
        _close(unused)

    def _use_again(self, files: Mapping[str, PoolFile]) -> list[PoolFile]:
        """Keep memory for the saves to come, under lock. Returns what it replaces, which is to be closed."""
        replaced = [self._free[name] for name in files if name in self._free]
        self._free |= files
        return replaced


def _close(files: Iterable[PoolFile]) -> None:
    for file in files:
        file.close()


class Memories:
    """Where a backend's writers find the memory for their files. A copy for another process has none."""

    def __init__(self) -> None:
        self._of: dict[tuple[Path, int], PooledSave] = {}

    def assign(self, root: Path, rank: int, save: PooledSave) -> None:
        """What this rank writes below `root` shall be kept there."""
        self._of[root, rank] = save

    def take(self, root: Path, rank: int) -> PooledSave | None:
        """The memory for what a rank writes below `root`; None: it is not kept. Once."""
        return self._of.pop((root, rank), None)

    def __reduce__(self) -> tuple[Callable[[], Memories], tuple[()]]:
        return Memories, ()
