"""Keep the files of a rank's newest save in host memory, byte for byte as they lie on disk.

The bytes of a save are copied once from the tensors, or from a device, to this memory, and written from there. It takes as much memory
as the rank writes in a save. The next save reuses it file by file, because memory touched for the first time is slow; from its start
until its commit no save is held. Closing the coordinator frees the memory.
"""

from __future__ import annotations

import os
import secrets
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ckpt.storage.host_memory import HUGE_PAGE, MemoryFile, mapped, shared

_PAGE = 4096

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class PoolFile:
    """A growing file in a memfd. `begin` empties it and keeps its memory.

    Attributes:
        size: bytes that have been appended.
    """

    def __init__(self) -> None:
        self._name = f"ckpt-pool-{secrets.token_hex(8)}"
        self._fd = shared(self._name, 0)
        self._close = weakref.finalize(self, os.close, self._fd)
        self._inode = os.fstat(self._fd).st_ino
        self._memory: Bytes = np.empty(0, np.uint8)
        self._end = 0  # size of the memfd: mapped memory behind it must not be touched
        self.size = 0

    @property
    def whole(self) -> Bytes:
        """All appended bytes."""
        return self._memory[: self.size]

    @property
    def num_bytes(self) -> int:
        """Bytes of its memory that have been touched."""
        return os.fstat(self._fd).st_blocks * 512

    def begin(self) -> None:
        """Empty the file. Readers of its old content notice: the memfd is longer now than any file in it was."""
        self.size = 0
        self._lengthen(self._end, len(self._memory))

    def append(self, piece: memoryview) -> None:
        """Append a piece. A piece that lies in the right place of this memory already is not copied."""
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
        """Return appended bytes; valid until `begin`."""
        assert stop <= self.size
        flat: Any = self._memory[start:stop]
        return memoryview(flat)

    def room(self, start: int, stop: int) -> torch.Tensor:
        """Return memory for bytes [start, stop), flat uint8, to be filled before they are appended."""
        self.make_room(stop)
        return torch.from_numpy(self._memory[start:stop])

    def make_room(self, num_bytes: int) -> None:
        """Grow the memory to this many bytes. Content and existing views stay valid."""
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
        """Free the memory behind the last byte. Return the file's place, for readers on this host."""
        os.ftruncate(self._fd, self.size)
        self._end = self.size
        return MemoryFile(os.getpid(), self._fd, self._inode, self.size, self._name)

    def close(self) -> None:
        """Free the memory; existing views keep it until they are gone."""
        self._memory, self._end, self.size = np.empty(0, np.uint8), 0, 0
        self._close()

    def _lengthen(self, least: int, wanted: int) -> None:
        try:
            os.ftruncate(self._fd, wanted)
        except OSError:  # such as a size beyond RLIMIT_FSIZE
            wanted = -(-least // _PAGE) * _PAGE
            os.ftruncate(self._fd, wanted)
        self._end = wanted


@dataclass(eq=False)
class PooledSave:
    """The files of one save in memory. Filled by the thread that writes the save.

    Attributes:
        before: folder of the checkpoint that was held when this save began; None: there was none.
        folder: where it was committed; None: not yet.
        files: path below the checkpoint -> its bytes.
    """

    pool: Pool
    before: Path | None = None
    folder: Path | None = None
    files: dict[str, PoolFile] = field(default_factory=dict)

    def file(self, name: str) -> PoolFile:
        """Return the memory of a file of this save, empty at first."""
        if name not in self.files:
            self.files[name] = self.pool.take(name)
        return self.files[name]

    def link(self, name: str, there: Path) -> None:
        """Keep a file that was hard-linked, if the earlier save had it in memory."""
        if self.before is not None and there == self.before / name and (file := self.pool.take_as_it_is(name)):
            self.files[name] = file

    def unlink(self, name: str) -> None:
        """Undo `link`."""
        if name in self.files:
            self.pool.give_back(name, self.files.pop(name))

    def add(self, files: Mapping[str, bytes]) -> None:
        """Keep small files that were not written through a sink."""
        for name, data in files.items():
            self.file(name).append(memoryview(data))

    def settle(self) -> dict[str, MemoryFile]:
        """Return the places of all files, after the last write."""
        return {name: file.settle() for name, file in self.files.items()}


class Pool:
    """The memory of one rank's saves, one after another. Any thread.

    `begin` a save: the held save is released, and its memory reused, unless a reader is inside of `reading`. Then `keep` the save when
    it is committed, which frees all other memory, or `drop` it.

    Attributes:
        held: the save that is held; None: none is.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: dict[str, PoolFile] = {}
        self.held: PooledSave | None = None
        self._readers: dict[PooledSave, int] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of memory in use by the held save and by files to be reused."""
        with self._lock:
            held = self.held.files.values() if self.held is not None else ()
            return sum(file.num_bytes for file in (*held, *self._free.values()))

    def begin(self) -> PooledSave:
        """Return memory for the files of a new save. No save is held from now on."""
        with self._lock:
            held, self.held = self.held, None
            if held is None or held in self._readers:
                return PooledSave(self)
            unused = self._use_again(held.files)
        _close(unused)
        return PooledSave(self, held.folder)

    def keep(self, save: PooledSave, folder: Path) -> None:
        """Hold this save, which is committed."""
        with self._lock:
            before, self.held, save.folder = self.held, save, folder
            unused = list(self._free.values())
            self._free = {}
            # A save that began before the one before it was kept has memory of its own.
            if before is not None and before is not save and before not in self._readers:
                unused += before.files.values()
        _close(unused)

    def drop(self, save: PooledSave) -> None:
        """Take back the memory of a failed save. No thread uses its files any more."""
        with self._lock:
            if save is self.held:
                self.held = None
            unused = self._use_again(save.files)
            save.files = {}
        _close(unused)

    @contextmanager
    def reading(self) -> Iterator[PooledSave | None]:
        """Yield the held save, whose memory stays unchanged inside of the block; None: none is held."""
        with self._lock:
            save = self.held
            if save is not None:
                self._readers[save] = self._readers.get(save, 0) + 1
        try:
            yield save
        finally:
            if save is not None:
                self._end_reading(save)

    def close(self) -> None:
        """Free all memory that has no reader."""
        with self._lock:
            held, self.held = self.held, None
            files = [*self._free.values(), *(held.files.values() if held not in self._readers and held else ())]
            self._free = {}
        _close(files)

    def _end_reading(self, save: PooledSave) -> None:
        with self._lock:
            self._readers[save] -= 1
            if self._readers[save]:
                return
            del self._readers[save]
            files = [] if save is self.held else list(save.files.values())
        _close(files)

    def take(self, name: str) -> PoolFile:
        """Return an empty file: the memory of the earlier save's file of this name, or new memory."""
        found = self.take_as_it_is(name)
        if found is None:
            return PoolFile()
        found.begin()
        return found

    def take_as_it_is(self, name: str) -> PoolFile | None:
        """Return the earlier save's file of this name with its content; None: there is none."""
        with self._lock:
            return self._free.pop(name, None)

    def give_back(self, name: str, file: PoolFile) -> None:
        """Take back a file that a save does not need."""
        with self._lock:
            unused = self._use_again({name: file})
        _close(unused)

    def _use_again(self, files: Mapping[str, PoolFile]) -> list[PoolFile]:
        """Keep memory for later saves. Called under lock. Returns the files it replaces, for the caller to close."""
        replaced = [self._free[name] for name in files if name in self._free]
        self._free |= files
        return replaced


def _close(files: Iterable[PoolFile]) -> None:
    for file in files:
        file.close()


class Memories:
    """Hands the memory of a save from the host cache to the backend's writer."""

    def __init__(self) -> None:
        self._of: dict[tuple[Path, int], PooledSave] = {}

    def assign(self, root: Path, rank: int, save: PooledSave) -> None:
        """Keep the files that this rank writes below `root` in the memory of `save`."""
        self._of[root, rank] = save

    def take(self, root: Path, rank: int) -> PooledSave | None:
        """Return the memory for a rank's files below `root`, once; None: they are not kept."""
        return self._of.pop((root, rank), None)
