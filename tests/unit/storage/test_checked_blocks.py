"""A block is hashed by one rank of a host; what is another block, or a file that was changed, is hashed again."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.errors import CorruptCheckpointError
from ckpt.format.box import whole
from ckpt.format.records import ChunkExtent
from ckpt.storage import extents
from ckpt.storage.extents import CheckedBlocks, ExtentReader
from ckpt.storage.host_memory import HeldFiles, MemoryFile
from ckpt.storage.pool import PoolFile
from tests.support.ranks import forkserver
from tests.unit.storage.test_extents import flip, numbers, part, store


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Bytes of each stream that was hashed."""
    sizes: list[int] = []

    class Counting(extents.BlockDigests):
        def update(self, piece: memoryview) -> None:
            sizes.append(len(piece))
            super().update(piece)

    monkeypatch.setattr(extents, "BlockDigests", Counting)
    yield sizes


def made() -> CheckedBlocks:
    table = CheckedBlocks.make()
    assert table is not None
    return table


def joined(place: MemoryFile) -> CheckedBlocks:
    table = CheckedBlocks.join(place)
    assert table is not None
    return table


def read(root: Path, chunk: ChunkExtent, array: np.ndarray, checked: CheckedBlocks | None) -> None:
    wanted = part(array, whole(array.shape))
    with ExtentReader(root, checked=checked) as reader:
        reader.read(chunk, [wanted])
    assert np.array_equal(wanted.out.numpy(), array)


def test_a_block_that_one_rank_has_checked_is_not_hashed_by_another(tmp_path: Path, hashed: list[int]) -> None:
    array = numbers(40, 10)
    chunk = store(tmp_path, array.tobytes())
    table = made()
    read(tmp_path, chunk, array, table)
    assert sum(hashed) == array.nbytes
    read(tmp_path, chunk, array, joined(table.place))
    assert sum(hashed) == array.nbytes, "the second reader hashed nothing"
    read(tmp_path, chunk, array, None)
    assert sum(hashed) == 2 * array.nbytes


def test_what_one_rank_has_checked_in_part_another_checks_where_it_reads_more(tmp_path: Path, hashed: list[int]) -> None:
    array = numbers(64)
    chunk = store(tmp_path, array.tobytes())  # four blocks of 16 elements
    table = made()
    few = part(array, whole((16,)))
    with ExtentReader(tmp_path, checked=table) as reader:
        reader.read(chunk, [few])
    assert sum(hashed) == 64
    read(tmp_path, chunk, array, joined(table.place))
    assert sum(hashed) == 64 + array.nbytes


def test_a_file_that_is_replaced_or_written_to_is_hashed_again_and_its_damage_found(tmp_path: Path) -> None:
    array = numbers(64)
    chunk = store(tmp_path, array.tobytes())
    table = made()
    read(tmp_path, chunk, array, table)
    file = tmp_path / chunk.file
    before = file.stat()
    flip(file, 5)
    with pytest.raises(CorruptCheckpointError, match="are not those that were saved"):
        read(tmp_path, chunk, array, table)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    copy = file.with_name("copy")
    copy.write_bytes(file.read_bytes())
    os.utime(copy, ns=(before.st_atime_ns, before.st_mtime_ns))
    copy.replace(file)  # another inode, of the same time and size
    with pytest.raises(CorruptCheckpointError, match="are not those that were saved"):
        read(tmp_path, chunk, array, table)


def test_a_file_in_memory_is_hashed_once_until_the_next_save_begins_to_overwrite_it(
    tmp_path: Path, hashed: list[int]
) -> None:
    array = numbers(64)
    chunk = store(tmp_path, array.tobytes())
    kept = PoolFile()
    kept.append(memoryview((tmp_path / chunk.file).read_bytes()))
    held = HeldFiles({chunk.file: kept.settle()})
    table = made()
    for rank in range(3):
        with ExtentReader(tmp_path, checked=table, held=held) as reader:
            wanted = part(array, whole(array.shape))
            reader.read(chunk, [wanted])
            assert reader.bytes_read == 0, rank
        assert sum(hashed) == array.nbytes, rank
    kept.begin()
    kept.append(memoryview(bytes(array.nbytes)))
    kept.append(memoryview(b"behind the chunk"))
    changed = HeldFiles({chunk.file: kept.settle()})
    with ExtentReader(tmp_path, checked=table, held=changed) as reader:
        wanted = part(array, whole(array.shape))
        reader.read(chunk, [wanted])
    assert np.array_equal(wanted.out.numpy(), array), "its memory was found to be changed, and the disk was read"
    assert reader.bytes_read == array.nbytes
    assert chunk.file not in changed
    kept.close()


def test_a_damaged_block_is_never_marked(tmp_path: Path) -> None:
    array = numbers(64)
    chunk = store(tmp_path, array.tobytes())
    flip(tmp_path / chunk.file, 5)
    table = made()
    for _ in range(2):
        with pytest.raises(CorruptCheckpointError, match="are not those that were saved"):
            read(tmp_path, chunk, array, table)


def test_the_digest_that_was_found_is_part_of_a_mark(tmp_path: Path) -> None:
    """Another record that claims other digests for the same bytes is not believed because of the first one."""
    array = numbers(64)
    chunk = store(tmp_path, array.tobytes())
    table = made()
    read(tmp_path, chunk, array, table)
    liar = replace(chunk, digests=tuple(digest ^ 1 for digest in chunk.digests))
    with pytest.raises(CorruptCheckpointError, match="are not those that were saved"):
        read(tmp_path, liar, array, table)


@given(st.lists(st.integers(1, (1 << 64) - 1), unique=True, max_size=30))
def test_what_is_marked_is_there_unless_another_mark_has_taken_its_place(marks: list[int]) -> None:
    table = made()
    for number, mark in enumerate(marks):
        assert not table.has([mark])
        table.add([mark])
        assert table.has([mark])
        places = {one % extents._NUM_MARKS for one in marks[: number + 1]}
        assert sum(table.has([one]) for one in marks) == len(places)


def _join_and_mark(place: MemoryFile, said: Connection) -> None:
    table = joined(place)
    said.send(table.has([7]))
    table.add([8])
    said.send("marked")


def test_another_process_sees_the_marks_and_a_place_that_is_no_table_is_not_joined(tmp_path: Path) -> None:
    table = made()
    table.add([7])
    here, there = forkserver().Pipe()
    process = forkserver().Process(target=_join_and_mark, args=(table.place, there))
    process.start()
    assert here.poll(30) and here.recv() is True
    assert here.poll(30) and here.recv() == "marked"
    process.join()
    assert table.has([7, 8])
    place = table.place
    for other in (place._replace(name=place.name[:-1]), place._replace(inode=1), place._replace(pid=1 << 22)):
        assert CheckedBlocks.join(other) is None
    fd = place.fd
    del table
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def _flip_in_place(file: Path, at: int) -> None:
    """Change a byte of the same file, and set its time back, as `rsync --inplace -t` does."""
    before = file.stat()
    with file.open("r+b") as stream:
        stream.seek(at)
        byte = stream.read(1)
        stream.seek(at)
        stream.write(bytes([byte[0] ^ 1]))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_byte_that_is_changed_in_place_is_found_though_the_files_time_is_set_back(tmp_path: Path) -> None:
    array = numbers(64)
    chunk = store(tmp_path, array.tobytes())
    table = made()
    read(tmp_path, chunk, array, table)
    time.sleep(0.02)  # the resolution of a file's times
    _flip_in_place(tmp_path / chunk.file, 5)
    with pytest.raises(CorruptCheckpointError, match="are not those that were saved"):
        read(tmp_path, chunk, array, table)


@pytest.mark.parametrize("moment", ["after the read", "before the read"])
def test_a_file_that_changes_while_a_block_is_read_gets_no_mark_and_uses_none(
    tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a mark would be for the state of the file after the change, and the bytes from before it, or the other way round."""
    array = numbers(64)
    chunk = store(tmp_path, array.tobytes())
    table = made()
    preadv = os.preadv

    def changing(fd: int, buffers: Sequence[memoryview], at: int, *flags: int) -> int:
        if flags:
            return preadv(fd, buffers, at, *flags)
        time.sleep(0.02)
        if moment == "before the read":
            _flip_in_place(tmp_path / chunk.file, 5)
        num_bytes = preadv(fd, buffers, at)
        if moment == "after the read":
            _flip_in_place(tmp_path / chunk.file, 5)
        return num_bytes

    if moment == "before the read":
        read(tmp_path, chunk, array, table)
    wanted = part(array, whole(array.shape))
    monkeypatch.setattr(os, "preadv", changing)
    with ExtentReader(tmp_path, checked=table, read_at=os.preadv) as reader:
        if moment == "before the read":
            with pytest.raises(CorruptCheckpointError, match="are not those that were saved"):
                reader.read(chunk, [wanted])
        else:
            reader.read(chunk, [wanted])  # its bytes are right
    monkeypatch.undo()
    with pytest.raises(CorruptCheckpointError, match="are not those that were saved"):
        read(tmp_path, chunk, array, table)


def _flipped(preadv: Callable[..., int], fd: int, buffers: Sequence[memoryview], at: int) -> int:
    num_bytes = preadv(fd, buffers, at)
    buffers[0][5] ^= 1
    return num_bytes


@pytest.mark.parametrize("how", ["a reader with a way of its own", "a file system without a page cache"])
def test_bytes_that_another_rank_may_not_have_got_are_hashed(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is as it was when its block was marked, but this reader's bytes are not those of the page cache."""
    array = numbers(64)
    chunk = store(tmp_path, array.tobytes())
    table = made()
    read(tmp_path, chunk, array, table)
    preadv = os.preadv

    def uncached(fd: int, buffers: Sequence[memoryview], at: int, *flags: int) -> int:
        if flags:
            raise OSError(errno.EOPNOTSUPP, "this file system does not say what it has in memory")
        return _flipped(preadv, fd, buffers, at)

    read_at: Callable[..., int] = partial(_flipped, preadv)
    if how == "a file system without a page cache":
        read_at = uncached
        monkeypatch.setattr(os, "preadv", uncached)
    with (
        ExtentReader(tmp_path, checked=table, read_at=read_at) as reader,
        pytest.raises(CorruptCheckpointError, match="are not those that were saved"),
    ):
        reader.read(chunk, [part(array, whole(array.shape))])


def test_bytes_that_another_rank_may_not_get_are_not_marked(tmp_path: Path, hashed: list[int]) -> None:
    """They were right, but those in the page cache have not been looked at."""
    array = numbers(64)
    chunk = store(tmp_path, array.tobytes())
    table = made()
    with ExtentReader(tmp_path, checked=table, read_at=lambda fd, buffers, at: os.preadv(fd, buffers, at)) as reader:
        reader.read(chunk, [part(array, whole(array.shape))])
    read(tmp_path, chunk, array, table)
    assert sum(hashed) == 2 * array.nbytes


def test_a_table_that_cannot_be_mapped_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(fd: int, num_bytes: int) -> None:
        raise OSError(errno.ENOMEM, "no memory")

    before = set(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(extents, "mapped", refused)
    assert CheckedBlocks.make() is None
    assert set(os.listdir("/proc/self/fd")) <= before
