"""Files in memory: what is put there is there byte for byte, once, and stays as long as it is said to."""

from __future__ import annotations

import gc
import os
import random
from pathlib import Path

import numpy as np
import pytest

from ckpt.backends.kimi_engine import KimiEngineBackend
from ckpt.storage.direct_io import Buffers
from ckpt.storage.host_memory import HeldFiles, can_be_shared
from ckpt.storage.pool import Pool, PooledSave, PoolFile
from ckpt.storage.sink import FileSink
from tests.support.states import sized

pytestmark = pytest.mark.skipif(not can_be_shared(), reason="needs memfd_create")

DATA = bytes(range(251)) * 40_000  # 10 MB, no piece of it like another


def held(save: PooledSave) -> HeldFiles:
    return HeldFiles(save.settle())


def filled(pool: Pool, files: dict[str, bytes]) -> PooledSave:
    save = pool.begin()
    save.add(files)
    return save


def test_a_file_has_the_bytes_that_it_was_given_however_they_are_cut() -> None:
    random.seed(1)
    for _ in range(20):
        save = Pool().begin()
        file, at = save.file("f"), 0
        end = random.choice([0, 1, 4095, 4096, 4097, 1 << 21, len(DATA)])
        while at < end:
            step = random.choice([1, 17, 4096, 100_000, 1 << 20, 5_000_000])
            file.append(memoryview(DATA)[at : min(at + step, end)])
            at += step
        assert file.size == end
        assert held(save).read("f") == DATA[:end]


def test_what_lies_in_its_place_already_is_not_copied_and_what_lies_elsewhere_is_a_mistake() -> None:
    file = PoolFile()
    file.make_room(20_000)
    room = file.room(100, 100 + 5000).numpy()
    room[:] = np.frombuffer(DATA, np.uint8, 5000)
    file.append(memoryview(DATA)[:100])
    file.append(memoryview(room))
    assert bytes(file.view(0, file.size)) == DATA[:100] + DATA[:5000]
    with pytest.raises(AssertionError, match="lie elsewhere"):
        file.append(memoryview(room))


def address_of(file: PoolFile) -> int:
    return np.frombuffer(file.view(0, 1), np.uint8).ctypes.data


def test_views_of_a_file_stay_good_while_it_grows() -> None:
    file = PoolFile()
    file.append(memoryview(DATA)[:5000])
    first = file.view(1000, 5000)
    for _ in range(3):
        file.append(memoryview(DATA))
    assert first == memoryview(DATA)[1000:5000]


def test_the_next_save_uses_the_same_memory_and_what_was_held_is_held_no_more(tmp_path: Path) -> None:
    pool = Pool()
    first = filled(pool, {"a": DATA, "b": DATA[:10]})
    before = held(first)
    pool.keep(first, tmp_path)
    assert pool.held is first and before.read("b") == DATA[:10]
    addresses = {name: address_of(file) for name, file in first.files.items()}
    second = pool.begin()
    assert pool.held is None
    assert second.file("a").size == 0 and before.read("a") is None
    second.add({"a": DATA[:-1], "b": DATA[:10]})
    assert {name: address_of(file) for name, file in second.files.items()} == addresses
    assert before.read("a") is None and before.read("b") is None
    pool.keep(second, tmp_path)
    assert held(second).read("a") == DATA[:-1]


def test_memory_that_a_save_does_not_need_any_more_is_let_go_of(tmp_path: Path) -> None:
    pool = Pool()
    pool.keep(filled(pool, {"a": DATA, "b": DATA}), tmp_path)
    assert pool.num_bytes >= 2 * len(DATA)
    pool.keep(filled(pool, {"a": DATA}), tmp_path)
    assert pool.num_bytes < 2 * len(DATA)


def test_memory_is_used_again_behind_a_save_that_failed(tmp_path: Path) -> None:
    pool = Pool()
    failed = filled(pool, {"a": DATA})
    address = address_of(failed.file("a"))
    pool.drop(failed)
    assert pool.held is None
    again = filled(pool, {"a": DATA[::-1]})
    assert address_of(again.file("a")) == address
    assert held(again).read("a") == DATA[::-1]


def test_what_is_read_is_not_written_over_and_goes_when_it_has_been_read(tmp_path: Path) -> None:
    pool = Pool()
    first = filled(pool, {"a": DATA})
    files = held(first)
    pool.keep(first, tmp_path)
    with pool.reading() as save, pool.reading() as again:
        assert save is again is first
        for _ in range(2):
            pool.keep(filled(pool, {"a": DATA[::-1]}), tmp_path)
        assert files.read("a") == DATA
    assert files.read("a") is None
    with pool.reading() as save:
        assert save is pool.held is not first


def test_nothing_is_left_open_when_a_pool_is_closed_or_forgotten(tmp_path: Path) -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    pool = Pool()
    pool.keep(filled(pool, {"a": DATA, "b": DATA}), tmp_path)
    assert len(os.listdir("/proc/self/fd")) > before
    pool.close()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
    pool.keep(filled(pool, {"a": DATA}), tmp_path)
    del pool
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_memory_of_another_file_under_the_same_number_is_not_taken_for_it() -> None:
    one, other = Pool().begin(), Pool().begin()
    one.add({"a": DATA})
    other.add({"a": DATA})
    place = one.settle()["a"]
    number = other.settle()["a"].fd
    assert HeldFiles({"a": place}).read("a") == DATA
    for wrong in (place._replace(fd=number), place._replace(inode=place.inode + 1), place._replace(size=1)):
        assert HeldFiles({"a": wrong}).read("a") is None
    assert HeldFiles({"a": place._replace(pid=1 << 22)}).read("a") is None


def test_a_sink_writes_what_it_keeps_large_files_and_small(tmp_path: Path) -> None:
    for direct_io in (True, False):
        save = Pool().begin()
        root = tmp_path / str(direct_io)
        root.mkdir()
        out = FileSink(root, 0, lambda _: None, sized(Buffers(direct_io=direct_io), num_bytes=4 << 20), save)
        out.write("small", [memoryview(b"abc")], 3)
        streams = [out.open(f"x/{number}") for number in range(6)]  # more than there are buffers
        for at in range(0, len(DATA), 700_001):
            for number, stream in enumerate(streams):
                stream.append([memoryview(DATA)[at + number : at + 700_001 + number]])
        for number, stream in enumerate(streams):
            stream.close(b"" if number else b"head")
        out.make_durable()
        files = held(save)
        names = ["small", *(f"x/{number}" for number in range(6))]
        assert sorted(save.files) == names
        assert all(files.read(name) == (root / name).read_bytes() for name in names)
        assert (root / "x/0").read_bytes()[:8] == b"head" + DATA[4:8]


def test_a_link_keeps_what_was_kept_of_the_checkpoint_before_and_of_no_other(tmp_path: Path) -> None:
    pool, buffers = Pool(), sized(Buffers(direct_io=True), num_bytes=4 << 20)
    for number in ("0", "1", "2"):
        (tmp_path / number).mkdir()
    first = pool.begin()
    out = FileSink(tmp_path / "0", 0, lambda _: None, buffers, first)
    for name in "abc":
        out.write(name, [memoryview(DATA)], len(DATA))
    out.make_durable()
    pool.keep(first, tmp_path / "0")
    second = pool.begin()
    out = FileSink(tmp_path / "1", 0, lambda _: None, buffers, second)
    assert out.link("a", tmp_path / "0", len(DATA))
    assert out.link("b", tmp_path / "0", len(DATA))
    out.unlink("b")
    pool.keep(second, tmp_path / "1")
    assert list(second.files) == ["a"] and held(second).read("a") == DATA
    third = pool.begin()
    out = FileSink(tmp_path / "2", 0, lambda _: None, buffers, third)
    assert out.link("a", tmp_path / "0", len(DATA))  # not the one that is held
    assert not third.files


def test_the_memory_of_a_writer_is_taken_once_and_a_backend_without_a_pool_has_none(tmp_path: Path) -> None:
    backend = KimiEngineBackend()
    assert backend.memories is not None
    backend.memories.assign(tmp_path, 0, Pool().begin())
    assert backend.memories.take(tmp_path, 0) is not None
    assert backend.memories.take(tmp_path, 0) is None
    assert KimiEngineBackend(pool=False).memories is None
