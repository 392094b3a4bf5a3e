"""Files on their way to the disk: whole however they are cut, past the page cache where that can be, and errors that name them."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import os
import resource
import signal
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.storage import direct_io
from ckpt.storage.checkpoint_files import CheckpointFolder
from ckpt.storage.direct_io import ALIGNED, Buffers
from ckpt.storage.sink import DIRECT_BYTES, FileSink
from tests.support.states import sized

pytestmark = pytest.mark.usefixtures("collected")

DATA = bytes(range(251)) * 12_000  # 3 MB, no piece of it like another


def nothing(num_bytes: int) -> None:
    """Progress that nobody looks at."""


def sink(root: Path, buffers: Buffers | None = None, rank: int = 0) -> FileSink:
    return FileSink(root, rank, nothing, buffers or sized(Buffers(direct_io=True), num_bytes=1 << 20))


def pieces_of(data: bytes, *cuts: int) -> list[memoryview]:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [memoryview(data)[begin:end] for begin, end in pairwise(edges)]


@pytest.fixture
def takes_direct(tmp_path: Path) -> None:
    """Skip where the file system of the tests takes no direct writes."""
    try:
        os.close(os.open(tmp_path / "probe", os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
    except OSError as error:
        pytest.skip(f"{tmp_path} takes no direct writes: {error}")


@pytest.fixture
def pwrites(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, int, int]]:
    """What is written at a place: directly?, how much, where."""
    seen: list[tuple[bool, int, int]] = []
    original = os.pwrite

    def pwrite(fd: int, data: Any, at: int) -> int:
        seen.append((bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT), len(data), at))
        return original(fd, data, at)

    monkeypatch.setattr(os, "pwrite", pwrite)
    return seen


@pytest.mark.parametrize("direct_io", [True, False])
@given(
    st.sampled_from([0, 1, ALIGNED - 1, ALIGNED, ALIGNED + 1, (256 << 10) - 1, 256 << 10, 1_000_003, len(DATA)]),
    st.lists(st.integers(0, len(DATA)), max_size=4),
)
@pytest.mark.usefixtures("turns")
@settings(max_examples=20)
def test_a_file_is_whole_however_its_bytes_are_cut(
    tmp_path_factory: pytest.TempPathFactory, direct_io: bool, size: int, cuts: list[int]
) -> None:
    root = tmp_path_factory.mktemp("sink")
    out = sink(root, sized(Buffers(direct_io=direct_io), num_bytes=1 << 20))
    out.write("a/first", pieces_of(DATA[:size], *cuts), DIRECT_BYTES)
    out.write("a/b/second", pieces_of(DATA[-size:], *cuts), DIRECT_BYTES)
    out.make_durable()
    assert (root / "a/first").read_bytes() == DATA[:size]
    assert (root / "a/b/second").read_bytes() == DATA[-size:]


@pytest.mark.usefixtures("takes_direct")
def test_whole_blocks_of_large_files_go_past_the_page_cache_and_small_files_do_not(
    tmp_path: Path, pwrites: list[tuple[bool, int, int]]
) -> None:
    out = sink(tmp_path)
    out.write("small", [memoryview(DATA)[:1000]], 1000)
    out.write("large", [memoryview(DATA)], len(DATA))
    out.flush()
    assert sorted(pwrites, key=lambda one: one[2]) == [
        *((True, 256 << 10, at << 18) for at in range(11)),
        (True, 126_976, 11 << 18),
    ]
    assert 0 < len(DATA) - (11 << 18) - 126_976 < ALIGNED
    assert (tmp_path / "large").read_bytes() == DATA and (tmp_path / "small").read_bytes() == DATA[:1000]


def test_a_file_that_grows_beside_others_is_filled_from_its_first_byte_on(tmp_path: Path) -> None:
    out = sink(tmp_path)
    stream = out.open("grows")
    for at in range(0, len(DATA), 700_001):
        stream.append(pieces_of(DATA[at : at + 700_001], 5))
        out.write(f"other/{at}", [memoryview(DATA)], len(DATA))
    assert stream.size == len(DATA)
    stream.close()
    out.make_durable()
    assert (tmp_path / "grows").read_bytes() == DATA
    assert all((tmp_path / f"other/{at}").read_bytes() == DATA for at in range(0, len(DATA), 700_001))


@pytest.mark.parametrize("call", ["open", "pwrite"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_file_system_that_refuses_direct_writes_gets_others_and_rank_0_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str, rank: int
) -> None:
    tried: list[str] = []
    original = CheckpointFolder.open

    def refuse(*args: Any) -> int:
        if call == "open":
            opened = original(*args)  # some file systems refuse when they have made the file
            if not args[2] & os.O_DIRECT:
                return opened
            os.close(opened)
        tried.append(call)
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(CheckpointFolder if call == "open" else os, call, refuse)
    if call == "pwrite":
        monkeypatch.setattr(direct_io, "O_DIRECT", 0)  # so that it is taken on a file system of any kind
    buffers = sized(Buffers(direct_io=True), num_bytes=4 << 20)
    buffers.direct_io = True
    with caplog.at_level(logging.WARNING, logger="ckpt"):
        for save in ("first", "second"):
            out = sink(tmp_path, buffers, rank)
            out.write(f"{save}/w", [memoryview(DATA)[: 1 << 20]], 1 << 20)
            out.write(f"{save}/v", [memoryview(DATA)[5 : 5 + (1 << 20)]], 1 << 20)
            out.make_durable()
    assert (tmp_path / "second/w").read_bytes() == DATA[: 1 << 20]
    assert (tmp_path / "first/v").read_bytes() == DATA[5 : 5 + (1 << 20)]
    assert 1 <= len(tried) <= 2  # two threads may meet the refusal at the same time
    assert len(caplog.messages) == (1 if rank == 0 else 0)
    assert all(
        "takes no direct writes (Invalid argument)" in line and "direct_io=False" in line for line in caplog.messages
    )


def full_disk(fd: int, data: Any, at: int) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def open_files() -> list[str]:
    return sorted(os.listdir("/proc/self/fd"))


def test_a_write_that_fails_is_raised_with_its_own_file_s_name_and_leaves_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, threads = open_files(), threading.active_count()
    monkeypatch.setattr(os, "pwrite", full_disk)
    buffers = sized(Buffers(direct_io=True), num_bytes=1 << 20)
    out = sink(tmp_path, buffers)
    with pytest.raises(OSError, match="No space left on device: '.*/first'") as caught:
        out.write("first", [memoryview(DATA)], len(DATA))
        out.write("second", [memoryview(DATA)], len(DATA))
        out.flush()
    assert caught.value.filename == str(tmp_path / "first")
    out.abort()
    assert open_files() == before and threading.active_count() == threads
    monkeypatch.undo()
    again = sink(tmp_path, buffers)
    again.write("again", [memoryview(DATA)], len(DATA))
    again.make_durable()
    assert (tmp_path / "again").read_bytes() == DATA


def test_nothing_is_written_after_an_abort(tmp_path: Path, pwrites: list[tuple[bool, int, int]]) -> None:
    before = open_files()
    out = sink(tmp_path)
    stream = out.open("grows")
    stream.append([memoryview(DATA)])
    out.write("whole", [memoryview(DATA)], len(DATA))
    out.abort()
    written = len(pwrites)
    assert open_files() == before
    assert len(pwrites) == written


def test_buffers_are_used_again_and_never_by_two_writers_at_once() -> None:
    buffers = sized(Buffers(direct_io=True), num_bytes=2 << 20)
    first, second = buffers.take(), buffers.take()
    assert sum(map(len, first)) == 2 << 20
    first[0][:4] = b"mine"
    second[0][:4] = b"your"
    assert bytes(first[0][:4]) == b"mine"
    buffers.give_back(first)
    assert buffers.take()[0][:4] == b"mine"


def test_buffers_go_back_once_even_if_a_save_fails_and_is_then_aborted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pwrite", full_disk)
    buffers = sized(Buffers(direct_io=True), num_bytes=1 << 20)
    out = sink(tmp_path, buffers)
    with pytest.raises(OSError, match="No space"):
        out.write("first", [memoryview(DATA)], len(DATA))
        out.flush()
    out.abort()
    out.abort()
    assert buffers.take()[0].obj is not buffers.take()[0].obj


def test_every_byte_counts_as_progress_when_it_is_written(tmp_path: Path) -> None:
    moved: list[int] = []
    out = FileSink(tmp_path, 0, moved.append, sized(Buffers(direct_io=True), num_bytes=1 << 20))
    out.write("large", [memoryview(DATA)], len(DATA))
    out.write("small", [memoryview(b"abc")], 3)
    out.flush()
    assert sum(moved) == len(DATA) + 3 and max(moved) <= 256 << 10


def _blocks(path: Path) -> int:
    return os.stat(path).st_blocks * 512


def test_no_room_stays_reserved_behind_a_file_of_unknown_size(tmp_path: Path) -> None:
    """Room is asked for in large steps; a file that ends within one gives the rest back."""
    sink = FileSink(tmp_path, 0, lambda _: None, sized(Buffers(direct_io=True), num_bytes=4 << 20))
    stream = sink.open("grows")
    data = np.random.default_rng(3).integers(0, 256, (3 << 20) + 777, dtype=np.uint8)
    stream.append([memoryview(data)])
    stream.close()
    sink.make_durable()
    assert (tmp_path / "grows").read_bytes() == data.tobytes()
    assert _blocks(tmp_path / "grows") <= (3 << 20) + 2 * 4096


def test_a_disk_without_the_room_that_is_asked_for_ahead_takes_what_fits(
    tmp_path: Path, takes_direct: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of unknown size asks for more than it will need."""

    class Full:
        def fallocate(self, *_: Any) -> int:
            ctypes.set_errno(errno.ENOSPC)
            return -1

    monkeypatch.setattr("ckpt.storage.files._libc", Full)
    out = sink(tmp_path)
    stream = out.open("large")
    stream.append(pieces_of(DATA))
    stream.close()
    out.flush()
    assert (tmp_path / "large").read_bytes() == DATA


def test_a_refused_reservation_keeps_no_room_and_leaves_the_bytes_that_are_in_flight(
    tmp_path: Path, takes_direct: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ext4 keeps what it could reserve before it refused; the first reservation works here, and all others fail so."""
    asked: list[int] = []

    class KeepsSome:
        def fallocate(self, fd: int, mode: int, offset: Any, num_bytes: Any) -> int:
            asked.append(offset.value)
            assert ctypes.CDLL(None).fallocate(fd, mode, offset, ctypes.c_int64(num_bytes.value + (8 << 20))) == 0
            if offset.value == 0:
                return 0
            ctypes.set_errno(errno.ENOSPC)
            return -1

    monkeypatch.setattr("ckpt.storage.files._libc", KeepsSome)
    out = sink(tmp_path)
    stream = out.open("large")
    stream.append(pieces_of(DATA))
    assert len(asked) == 2 and asked[1] > 0
    assert _blocks(tmp_path / "large") <= len(DATA) + ALIGNED
    stream.close()
    out.flush()
    assert (tmp_path / "large").read_bytes() == DATA


def test_no_more_is_reserved_ahead_than_was_written_and_little_where_little_is_free(
    tmp_path: Path, takes_direct: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other ranks write meanwhile."""
    stream = sink(tmp_path).open("large")
    stream.append(pieces_of(DATA[: 1 << 20]))
    assert _blocks(tmp_path / "large") <= 2 << 20
    stream.close()
    real = os.fstatvfs

    def little(fd: int) -> os.statvfs_result:
        found = list(real(fd))
        found[4] = 64  # f_bavail
        return os.statvfs_result(found)

    monkeypatch.setattr(os, "fstatvfs", little)
    stream = sink(tmp_path).open("other")
    stream.append(pieces_of(DATA))
    assert _blocks(tmp_path / "other") <= len(DATA) + (64 * real(0).f_frsize >> 8) + ALIGNED
    stream.close()


@pytest.mark.parametrize("limit", [1_000_003, 1 << 20], ids=["within a block", "at the end of one"])
def test_a_file_that_may_not_grow_is_no_file_system_without_direct_writes(
    tmp_path: Path, takes_direct: None, caplog: pytest.LogCaptureFixture, limit: int
) -> None:
    """Up to the limit the system writes, and says of the rest what it says of blocks that are cut."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    buffers = sized(Buffers(direct_io=True), num_bytes=8 << 20)
    out = sink(tmp_path, buffers)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(OSError, match="File too large") as refused:
            out.write("large", pieces_of(DATA), len(DATA))
            out.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert refused.value.filename == str(tmp_path / "large")
    assert buffers.direct_io and not caplog.messages
