"""Saves that link what has not changed: every checkpoint stands alone, and none keeps much that nobody uses."""

from __future__ import annotations

import errno
import itertools
import logging
import math
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckpt.backends import linked_values
from ckpt.backends.base import Backend, Previous, staged_digests
from ckpt.backends.zarr import ZarrBackend
from ckpt.catalog.incremental import DiskUse, disk_use, linked_with, previous_of, same_files
from ckpt.catalog.ledger import Ledger
from ckpt.catalog.verify import examine, verify_checkpoint
from ckpt.errors import CorruptCheckpointError, StorageError, describe, rebuild
from ckpt.format.box import chunk_box, num_chunks, whole
from ckpt.format.digests import BlockDigests
from ckpt.format.manifest_parsing import parse_index
from ckpt.format.records import BLOCK_BYTES, ArraySpec, ChunkExtent, FileRecord, stored_shape
from ckpt.storage import files as files_module
from ckpt.storage.checkpoint_files import CheckpointFolder
from ckpt.storage.sink import Pieces
from ckpt.storage.stored import check_file, read_index, read_manifest
from tests.support import plain_safetensors
from tests.support.arrays import array, expected, read_by_extents
from tests.support.covering import and_in_full, covering, sampled
from tests.support.incremental_saves import Shelf, as_saved, bytes_on_disk
from tests.support.states import BACKENDS, backend_named

ZSTD = [{"name": "zstd", "configuration": {"level": 1, "checksum": False}}]
STORES = (*BACKENDS, "zstd")
RAW = BACKENDS
WHOLE_FILES = ("safetensors",)
"""Stores of which a file is linked whole or not at all: where something in it has changed, the rest moves once to a file of its own."""
FRESH = itertools.count(1000)


def made(name: str) -> Backend:
    return ZarrBackend(compressors=ZSTD) if name == "zstd" else backend_named(name)


def state() -> dict[ArraySpec, torch.Tensor]:
    """Arrays of several types and chunks; edge chunks of `b` and `d` are padded."""
    return dict(
        [
            array("model/a", torch.arange(600, dtype=torch.float32).reshape(20, 30), 5, 30),
            array("model/b", torch.arange(70, dtype=torch.int16).reshape(10, 7), 4, 4),
            array("model/c", torch.arange(33, dtype=torch.bfloat16)),
            array("model/d", torch.arange(50, dtype=torch.float64), 20),
            array("model/e", torch.tensor(3, dtype=torch.int8)),
        ]
    )


def all_chunks(arrays: dict[ArraySpec, torch.Tensor]) -> list[tuple[ArraySpec, int]]:
    return [(spec, n) for spec in arrays for n in range(math.prod(num_chunks(spec.shape, spec.grid)))]


def change(arrays: dict[ArraySpec, torch.Tensor], spec: ArraySpec, number: int) -> None:
    """Give one element of a chunk a value that it never had."""
    part = arrays[spec][chunk_box(spec.shape, spec.grid, number).slices]
    part[(0,) * part.dim()] = part[(0,) * part.dim()] + 1 if spec.dtype == "int8" else next(FRESH)


@pytest.fixture(autouse=True)
def unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many saves, and a disk that others are using."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    monkeypatch.setattr(files_module, "_syncfs", lambda root: None)


def require_sound(shelf: Shelf, checkpoint_id: str) -> None:
    assert verify_checkpoint(shelf.folder(checkpoint_id)) == []
    assert shelf.reads_back(checkpoint_id)


def saves_and_deletions(
    root: Path, store: str, changes: list[set[int]], order: list[int], min_live: float, stages: bool
) -> None:
    """Save over and over, then delete in some order; whatever is left is whole all the time."""
    shelf = Shelf(root, made(store), min_live=min_live, stages=stages)
    arrays = state()
    chunks = all_chunks(arrays)
    for number, changed in enumerate(changes):
        for at in changed:
            change(arrays, *chunks[at % len(chunks)])
        shelf.save(str(number), arrays, previous=str(number - 1) if number else None)
        require_sound(shelf, str(number))
        if not changed and number and min_live < 0.1:
            assert shelf.linked_bytes(str(number)) > 0
    left = [str(number) for number in range(len(changes))]
    for at in order:
        shutil.rmtree(shelf.folder(left.pop(at % len(left))))
        assert all(verify_checkpoint(shelf.folder(one)) == [] for one in left)
        if left:
            assert shelf.reads_back(left[at % len(left)])
        use, on_disk = disk_use([shelf.folder(one) for one in left])
        assert on_disk == bytes_on_disk(root)
        if len(left) == 1:
            (only,) = use.values()
            assert only.apparent_bytes == only.unique_bytes == on_disk


@sampled("store", STORES, 2)
@given(
    st.lists(st.sets(st.integers(0, 14), max_size=6), min_size=2, max_size=5),
    st.permutations(range(5)),
    st.sampled_from([0.01, 0.5, 1.0]),
    st.booleans(),
    st.sampled_from([2, 32]),
)
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_changes_between_saves_and_whichever_are_deleted_what_is_left_is_whole(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    store: str,
    changes: list[set[int]],
    order: list[int],
    min_live: float,
    stages: bool,
    most_files: int,
) -> None:
    monkeypatch.setattr(linked_values, "MOST_FILES", most_files)
    saves_and_deletions(tmp_path_factory.mktemp("shelf"), store, changes, order[: len(changes)], min_live, stages)


@and_in_full(("store",), [("zarr",), ("ocdbt",), ("safetensors",)], [(store,) for store in STORES])
def test_seven_checkpoints_can_be_deleted_in_any_order(tmp_path: Path, store: str) -> None:
    dice = random.Random(store)
    changes = [{dice.randrange(15) for _ in range(dice.randrange(4))} for _ in range(7)]
    saves_and_deletions(tmp_path, store, changes, [dice.randrange(7) for _ in range(7)], 0.5, dice.random() < 0.5)


@pytest.mark.full
@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("seed", range(25))
def test_ten_checkpoints_can_be_deleted_in_many_orders(tmp_path: Path, store: str, seed: int) -> None:
    dice = random.Random(f"{store} {seed}")
    changes = [{dice.randrange(15) for _ in range(dice.randrange(15))} for _ in range(10)]
    min_live = dice.choice([0.1, 0.5, 0.9])
    saves_and_deletions(tmp_path, store, changes, [dice.randrange(10) for _ in range(10)], min_live, bool(seed % 2))


@covering({"store": STORES, "stages": [False, True]}, default=1)
def test_where_nine_tenths_are_frozen_a_tenth_is_written(tmp_path: Path, store: str, stages: bool) -> None:
    shelf = Shelf(tmp_path, made(store), stages=stages)
    frozen = [array(f"model/frozen.{n}", torch.rand(256, 100)) for n in range(9)]
    arrays = dict([*frozen, array("model/head", torch.rand(256, 100))])
    shelf.save("0", arrays)
    for step in range(1, 4):
        arrays[frozen[0][0]].data.set_(arrays[frozen[0][0]].clone())  # other memory, the same values
        next(reversed(arrays.values())).uniform_()
        shelf.save(str(step), arrays, previous=str(step - 1))
        moves = 0.4 if store in WHOLE_FILES and step == 1 else 0
        assert shelf.written_bytes(str(step)) <= (0.15 + moves) * shelf.written_bytes("0")
        assert shelf.linked_bytes(str(step)) > (0.85 - moves) * shelf.written_bytes("0")
        require_sound(shelf, str(step))
    assert bytes_on_disk(tmp_path) < (1.85 if store in WHOLE_FILES else 1.45) * bytes_on_disk(shelf.folder("0"))


@pytest.mark.parametrize("store", STORES)
def test_a_save_of_nothing_new_writes_descriptions_alone(tmp_path: Path, store: str) -> None:
    shelf = Shelf(tmp_path, made(store))
    arrays = dict([array("model/w", torch.rand(300, 100), 100, 100), array("model/v", torch.rand(2000))])
    shelf.save("0", arrays)
    shelf.save("1", arrays, previous="0")
    assert shelf.written_bytes("1") < 8000 < shelf.linked_bytes("1")
    require_sound(shelf, "1")
    assert {path for one in shelf.written["1"] for path in one.files} == {
        path.relative_to(shelf.folder("1")).as_posix()
        for path in shelf.folder("1").rglob("*")
        if path.is_file() and path.name not in read_manifest(shelf.folder("1")).files
        and path.relative_to(shelf.folder("1")).as_posix() not in read_manifest(shelf.folder("1")).files
        and path.name != "checkpoint_manifest.json"
    }  # fmt: skip


@sampled("store", STORES, 2)
def test_retention_frees_what_no_checkpoint_uses_any_more(tmp_path: Path, store: str) -> None:
    shelf = Shelf(tmp_path, made(store), ranks=(0,))
    specs = [array(f"model/{n}", torch.rand(128, 64)) for n in range(10)]
    arrays = dict(specs)
    shelf.save("0", arrays)
    full = bytes_on_disk(shelf.folder("0"))
    for step in range(1, 6):
        for at in range(3):  # a window moves over all of them
            arrays[specs[(3 * step + at) % 10][0]].uniform_()
        shelf.save(str(step), arrays, previous=str(step - 1))
        Ledger(tmp_path, run_id="test", keep_last=1).retain(keep=shelf.folder(str(step)))
        assert [one.id for one in Ledger(tmp_path, run_id="test").committed()] == [str(step)]
        assert bytes_on_disk(tmp_path) <= full / 0.5 * 1.1
        if store != "ocdbt":  # a file a chunk: nothing is kept that is not used
            assert bytes_on_disk(tmp_path) <= full * (1.03 if store in WHOLE_FILES else 1.01)
    require_sound(shelf, "5")


def data_files(folder: Path) -> dict[str, int]:
    """Name -> size of the data files of rank 0's database."""
    return {path.name: path.stat().st_size for path in (folder / "arrays.ocdbt/rank-00000/d").iterdir()}


def big_and_small(numbers: int = 4) -> tuple[list[ArraySpec], dict[ArraySpec, torch.Tensor]]:
    arrays = dict(array(f"model/{n}", torch.rand(100, 100)) for n in range(numbers))
    return list(arrays), arrays


@pytest.mark.parametrize(("changed", "links"), [(1, True), (2, True), (3, False), (4, False)])
def test_a_data_file_is_linked_while_half_of_it_is_in_use_and_rewritten_after(
    tmp_path: Path, changed: int, links: bool
) -> None:
    shelf = Shelf(tmp_path, made("ocdbt"), ranks=(0,), min_live=0.48)
    specs, arrays = big_and_small()
    (first,) = data_files(shelf.save("0", arrays))
    for spec in specs[:changed]:
        arrays[spec].uniform_()
    folder = shelf.save("1", arrays, previous="0")
    assert (first in data_files(folder)) is links
    assert len(data_files(folder)) == 2 - (changed == 4)
    (written,) = shelf.written["1"]
    dead = written.dead.get(f"arrays.ocdbt/rank-00000/d/{first}", [])
    assert sum(extent.length for extent in dead) == (40_000 * changed if links else 0)
    assert shelf.linked_bytes("1") == (data_files(folder)[first] if links else 0)
    shutil.rmtree(shelf.folder("0"))
    require_sound(shelf, "1")


def test_what_is_rewritten_unchanged_gets_a_file_of_its_own_and_is_not_rewritten_again(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, made("ocdbt"), ranks=(0,))
    specs, arrays = big_and_small(10)
    (first,) = data_files(shelf.save("0", arrays))
    for step in range(1, 5):
        for spec in specs[:6]:
            arrays[spec].uniform_()
        folder = shelf.save(str(step), arrays, previous=str(step - 1))
        require_sound(shelf, str(step))
        sizes = sorted(data_files(folder).values())
        assert first not in data_files(folder)
        assert sizes[0] == 4 * 40_000 and len(sizes) == 2 and 6 * 40_000 < sizes[1] < 6.2 * 40_000
        assert shelf.linked_bytes(str(step)) == (0 if step == 1 else 4 * 40_000)
    specs_left = {extent.file for (path, _), extent in shelf.written["4"][0].chunks.items() if path >= "model/6"}
    assert len(specs_left) == 1 and shelf.written["4"][0].dead == {}


@pytest.mark.parametrize("min_live", [0.9, 1.0])
def test_a_data_file_in_which_nothing_has_died_is_linked_by_any_setting(tmp_path: Path, min_live: float) -> None:
    shelf = Shelf(tmp_path, made("ocdbt"), ranks=(0,), min_live=min_live)
    specs, arrays = big_and_small()
    (first,) = data_files(shelf.save("0", arrays))
    assert first in data_files(shelf.save("1", arrays, previous="0"))
    arrays[specs[0]].uniform_()
    assert first not in data_files(shelf.save("2", arrays, previous="1"))
    require_sound(shelf, "2")


def test_what_died_earlier_counts_too_when_a_data_file_is_linked_on(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, made("ocdbt"), ranks=(0,), min_live=0.3)
    specs, arrays = big_and_small()
    (first,) = data_files(shelf.save("0", arrays))
    sizes = []
    for step, spec in enumerate(specs, 1):
        arrays[spec].uniform_()
        folder = shelf.save(str(step), arrays, previous=str(step - 1))
        require_sound(shelf, str(step))
        sizes.append(len(data_files(folder)))
        assert (first in data_files(folder)) is (step < 3)
        (written,) = shelf.written[str(step)]
        dead = written.dead.get(f"arrays.ocdbt/rank-00000/d/{first}", [])
        assert [extent.length for extent in dead] == ([40_000] * step if step < 3 else [])
    assert max(sizes) <= 4
    while len(left := Ledger(tmp_path, run_id="test").committed()) > 1:
        shutil.rmtree(left[0].path)
        require_sound(shelf, left[-1].id)


def test_the_number_of_data_files_stays_bounded_where_every_save_leaves_a_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linked_values, "MOST_FILES", 6)
    shelf = Shelf(tmp_path, made("ocdbt"), ranks=(0,), min_live=0.1)
    arrays = dict(array(f"model/{n}", torch.rand(40, 50)) for n in range(18))
    shelf.save("0", arrays)
    counts = []
    for step, spec in enumerate(arrays, 1):
        arrays[spec].uniform_()
        counts.append(len(data_files(shelf.save(str(step), arrays, previous=str(step - 1)))))
    assert max(counts) == 7 and min(counts[7:]) < 7
    require_sound(shelf, "18")
    assert sum(shelf.written_bytes(str(step)) for step in range(1, 19)) < 3 * shelf.written_bytes("0")


@sampled("seed", range(4))
def test_no_safetensors_file_names_a_tensor_that_is_not_of_its_checkpoint(tmp_path: Path, seed: int) -> None:
    """Whatever comes, goes, changes, or gets another type or shape between two saves; tensors without elements, too."""
    dice = random.Random(seed)
    shelf = Shelf(tmp_path, made("safetensors"), min_live=0.01)
    arrays: dict[ArraySpec, torch.Tensor] = {}
    for step in range(8):
        for spec in list(arrays):
            fate = dice.random()
            if fate < 0.1:
                del arrays[spec]
            elif fate < 0.2:
                arrays[spec] = torch.rand(spec.shape).to(arrays[spec].dtype)
        for number in range(dice.randrange(4) if step else 12):
            shape = dice.choice([(0,), (5, 0), (30,), (6, 7)])
            kind = dice.choice([torch.float32, torch.float16])
            name = f"model/{dice.choice('abcdefgh')}{number % 3}"
            for spec in [spec for spec in arrays if spec.path == name]:
                del arrays[spec]
            arrays |= dict([array(name, torch.rand(shape).to(kind), *dice.choice([(), (3,) * len(shape)]))])
        shelf.save(str(step), arrays, previous=str(step - 1) if step else None)
        folder = shelf.folder(str(step)) / "model"
        assert plain_safetensors.keys_in(folder) == {spec.path.removeprefix("model/") for spec in arrays}
        plain_safetensors.names_in(folder)
        require_sound(shelf, str(step))
    shelf.save("same", arrays, previous="7")
    shelf.save("again", arrays, previous="same")
    before, after = ([one.chunks for one in shelf.written[name]] for name in ("same", "again"))
    assert after == before, "all of it lies in files of its own since the save before"
    plain_safetensors.names_in(shelf.folder("again") / "model")
    require_sound(shelf, "again")


def test_files_that_cannot_become_one_do_not_count_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linked_values, "MOST_FILES", 2)
    shelf = Shelf(tmp_path, made("safetensors"), ranks=(0,))
    arrays = dict(
        array(f"{folder}/{kind}", torch.arange(9).to(kind))
        for folder in ("model", "optimizer")
        for kind in (torch.float32, torch.float16, torch.int8)
    )
    shelf.save("0", arrays)
    shelf.save("1", arrays, previous="0")
    assert shelf.written_bytes("1") == 0 < shelf.linked_bytes("1")
    assert shelf.written["1"][0].chunks == shelf.written["0"][0].chunks
    require_sound(shelf, "1")


@pytest.fixture
def refused(why: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A file system that refuses links, and what it was asked for."""
    asked: list[str] = []

    def refuse(source: object, target: object, **_: object) -> None:
        asked.append(str(target))
        raise OSError(why, os.strerror(why), str(source), None, str(target))

    monkeypatch.setattr(os, "link", refuse)
    return asked


@covering({"store": STORES, "why": [errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP]}, default=1)
def test_where_links_do_not_work_the_same_checkpoint_is_written(
    tmp_path: Path, store: str, refused: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    shelf = Shelf(tmp_path, made(store))
    arrays = state()
    shelf.save("0", arrays)
    change(arrays, *all_chunks(arrays)[2])
    with caplog.at_level(logging.WARNING, "ckpt"):
        shelf.save("1", arrays, previous="0")
    assert len(refused) == {"ocdbt": 2, "safetensors": 8}.get(store, 14)
    (told,) = caplog.messages
    assert "cannot be linked to" in told and "is written again" in told
    assert shelf.linked_bytes("1") == 0
    shutil.rmtree(shelf.folder("0"))
    require_sound(shelf, "1")


@pytest.mark.parametrize("store", STORES)
def test_a_name_that_is_taken_is_an_error_and_nothing_is_written_through_it(tmp_path: Path, store: str) -> None:
    shelf = Shelf(tmp_path, made(store), ranks=(0,))
    spec, value = array("model/w", torch.arange(6.0))
    shelf.save("0", {spec: value})
    before = previous_of(shelf.folder("0"), 0, 0.5)
    assert before is not None
    writer = shelf.backend.writer(tmp_path / "again", 0, lambda num_bytes: None, before)
    extent = before.chunks["model/w"][0]
    (tmp_path / "again" / extent.file).parent.mkdir(parents=True)
    os.link(shelf.folder("0") / extent.file, tmp_path / "again" / extent.file)
    writer.expect([expected(spec, 0)])
    with pytest.raises(FileExistsError):
        writer.write(spec, 0, value)
    writer.abort()
    require_sound(shelf, "0")


@sampled("store", STORES, 2)
@pytest.mark.parametrize("damage", ["gone", "shorter", "a link", "a folder"])
def test_a_file_that_is_not_what_it_was_is_not_linked(tmp_path: Path, store: str, damage: str) -> None:
    shelf = Shelf(tmp_path, made(store), ranks=(0,))
    spec, value = array("model/w", torch.rand(200))
    shelf.save("0", {spec: value})
    index = read_index(shelf.folder("0"), read_manifest(shelf.folder("0")), 0)
    file = shelf.folder("0") / index.chunks["model/w"][0].file
    size = file.stat().st_size
    if damage == "shorter":
        os.truncate(file, size - 1)
    else:
        file.rename(tmp_path / "elsewhere")
        if damage == "a link":  # which is as long as the file, if that can be
            path = str(tmp_path / "elsewhere")
            file.symlink_to("/" * max(size - len(path), 0) + path)
        elif damage == "a folder":
            file.mkdir()
    shelf.save("1", {spec: value}, previous="0")
    assert shelf.linked_bytes("1") == 0
    require_sound(shelf, "1")


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("linked_before", [False, True])
def test_bytes_that_are_not_those_of_the_snapshot_are_refused_with_the_name(
    tmp_path: Path, store: str, linked_before: bool
) -> None:
    shelf = Shelf(tmp_path, made(store), ranks=(0,))
    spec, value = array("model/h.0.weight", torch.arange(70, dtype=torch.int16).reshape(10, 7), 4, 4)
    shelf.save("0", {spec: value})
    (tmp_path / "new").mkdir()
    before = previous_of(shelf.folder("0"), 0, 0.5) if linked_before else None
    writer = shelf.backend.writer(tmp_path / "new", 0, lambda num_bytes: None, before)
    host = value[:4, 4:].clone() + 1
    digests = staged_digests(host, stored_shape(shelf.backend.store, (4, 4), (4, 3)))
    host[-1, -1] += 1
    writer.expect([expected(spec, 1)])
    with pytest.raises(StorageError, match="model/h.0.weight was changed in memory between the snapshot and the disk"):
        writer.write(spec, 1, host, digests)
        writer.finish()
    writer.abort()


@pytest.mark.parametrize("store", RAW)
def test_a_chunk_that_is_linked_on_account_of_its_digests_is_not_looked_at_again(
    tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = Shelf(tmp_path, made(store), ranks=(0,), min_live=0.01)
    spec, value = array("model/w", torch.arange(60.0), 20)
    shelf.save("0", {spec: value})
    digests = [staged_digests(value[20 * n : 20 * n + 20], (20,)) for n in range(3)]
    monkeypatch.setattr(BlockDigests, "update", lambda *_: pytest.fail("the bytes were read"))
    (tmp_path / "new").mkdir()
    writer = shelf.backend.writer(tmp_path / "new", 0, lambda num_bytes: None, previous_of(shelf.folder("0"), 0, 0.01))
    writer.expect(expected(spec, number) for number in range(3))
    for number in range(3):
        writer.write(spec, number, torch.full((20,), -1.0), digests[number])
    assert set(writer.finish().chunks) == {("model/w", n) for n in range(3)}
    writer.abort()


@given(st.lists(st.integers(0, 40), max_size=6), st.integers(0, 7), st.integers(0, 1))
def test_every_byte_is_digested_once_whether_it_differs_early_late_or_nowhere(
    cuts: list[int], at: int, differs: int
) -> None:
    data = bytearray(os.urandom(41))
    edges = [0, *sorted(cuts), 41]
    old = BlockDigests(BLOCK_BYTES)
    data[at * 5] ^= differs
    old.update(memoryview(bytes(data)))
    data[at * 5] ^= differs
    seen: list[memoryview] = []

    def pieces() -> Iterator[memoryview]:
        for begin, end in itertools.pairwise(edges):
            seen.append(memoryview(data)[begin:end])
            yield seen[-1]

    source = Pieces(pieces())
    assert source.have(old.close()) is not bool(differs)
    assert b"".join(source.digested()) == bytes(data)
    assert b"".join(seen) == bytes(data)
    direct = BlockDigests(BLOCK_BYTES)
    direct.update(memoryview(data))
    assert source.written("w") == direct.close()


def test_comparing_stops_at_the_first_block_that_differs() -> None:
    host = torch.zeros(5 * BLOCK_BYTES, dtype=torch.uint8)
    digests = staged_digests(host, tuple(host.shape))
    host[BLOCK_BYTES + 3] = 1
    taken = []

    def pieces() -> Iterator[memoryview]:
        for at in range(5):
            taken.append(at)
            yield memoryview(host.numpy())[at * BLOCK_BYTES : (at + 1) * BLOCK_BYTES]

    assert not Pieces(pieces()).have(digests)
    assert taken == [0, 1]


@sampled("store", RAW, 2)
def test_large_chunks_are_linked_and_written_past_the_page_cache_alike(tmp_path: Path, store: str) -> None:
    shelf = Shelf(tmp_path, made(store), min_live=0.49)
    arrays = dict(array(f"model/{n}", torch.rand(3 << 19)) for n in range(4))  # of two blocks
    shelf.save("0", arrays)
    for value in list(arrays.values())[:2]:
        value[-1] = 7.0
    shelf.save("1", arrays, previous="0")
    linked = {"ocdbt": 4 * (6 << 20), "safetensors": 0}.get(store, 2 * (6 << 20))
    assert 0 <= shelf.linked_bytes("1") - linked < 20_000
    require_sound(shelf, "1")
    saved = as_saved(shelf, "1", (0, 3))
    for spec, value in arrays.items():
        assert torch.equal(read_by_extents(saved, spec, whole(spec.shape)), value)


@pytest.mark.parametrize("store", STORES)
def test_an_array_of_another_shape_type_or_grid_is_written_again_and_one_that_is_new_too(
    tmp_path: Path, store: str
) -> None:
    shelf = Shelf(tmp_path, made(store), ranks=(0,), min_live=0.01)
    value = torch.arange(24, dtype=torch.int32)
    same = array("model/same", value.clone())
    shelf.save("0", dict([same, *(array(f"model/{name}", value.clone()) for name in ("shape", "type", "grid"))]))
    shelf.save(
        "1",
        dict(
            [
                same,
                array("model/shape", torch.arange(25, dtype=torch.int32)),
                array("model/type", value.to(torch.int64)),
                array("model/grid", value.clone(), 12),
                array("model/new", value.clone()),
            ]
        ),
        previous="0",
    )
    require_sound(shelf, "1")
    (written,) = shelf.written["1"]
    linked = sum(extent in shelf.written["0"][0].chunks.values() for extent in written.chunks.values())
    assert linked == (0 if store in WHOLE_FILES else 1)


@pytest.mark.parametrize("store", RAW)
def test_a_chunk_of_the_same_number_and_bytes_is_not_linked_under_another_ones_name(tmp_path: Path, store: str) -> None:
    shelf = Shelf(tmp_path, made(store), ranks=(0,), min_live=0.01)
    wide = torch.arange(24, dtype=torch.int32).reshape(4, 6)  # two by three chunks
    tall = torch.empty(6, 4, dtype=torch.int32)  # three by two, the first with the bytes of the first, and so on
    for number in range(6):
        tall[chunk_box((6, 4), (2, 2), number).slices] = wide[chunk_box((4, 6), (2, 2), number).slices]
    shelf.save("0", dict([array("model/w", wide, 2, 2)]))
    shelf.save("1", dict([array("model/w", tall, 2, 2)]), previous="0")
    require_sound(shelf, "1")
    linked = sum(extent in shelf.written["0"][0].chunks.values() for extent in shelf.written["1"][0].chunks.values())
    # A key names a value wherever it lies; a file is named by its chunk; parts are named by their boxes.
    assert linked == {"ocdbt": 6, "safetensors": 0}.get(store, 2)


@sampled(
    ("before", "after"),
    [
        ("zarr", "ocdbt"),
        ("ocdbt", "file"),
        ("zstd", "zarr"),
        ("zarr", "zstd"),
        ("safetensors", "zarr"),
        ("ocdbt", "safetensors"),
    ],
    3,
)
def test_nothing_is_linked_from_a_checkpoint_that_is_stored_otherwise(tmp_path: Path, before: str, after: str) -> None:
    shelf = Shelf(tmp_path, made(before))
    arrays = state()
    shelf.save("0", arrays)
    shelf.backend = made(after)
    shelf.save("1", arrays, previous="0")
    assert shelf.linked_bytes("1") == 0
    require_sound(shelf, "1")


def test_the_two_backends_that_make_directories_link_each_others_chunks(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, made("zarr"))
    arrays = state()
    shelf.save("0", arrays)
    shelf.backend = made("file")
    shelf.save("1", arrays, previous="0")
    assert shelf.linked_bytes("1") > 2000
    require_sound(shelf, "1")


@pytest.mark.parametrize("store", STORES)
def test_other_ranks_than_before_link_what_is_theirs_still(tmp_path: Path, store: str) -> None:
    shelf = Shelf(tmp_path, made(store), ranks=(0, 3))
    arrays = state()
    shelf.save("0", arrays)
    shelf.ranks = (3, 4)
    shelf.save("1", arrays, previous="0")
    require_sound(shelf, "1")
    assert shelf.written["1"][1].linked_bytes == 0
    assert previous_of(shelf.folder("0"), 4, 0.5) is None


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    with file.open("r+b") as stream:  # the file itself, not another one in its place
        stream.write(data)


@pytest.mark.parametrize("store", STORES)
def test_a_damaged_file_condemns_every_checkpoint_that_links_it_and_no_other(tmp_path: Path, store: str) -> None:
    shelf = Shelf(tmp_path, made(store), ranks=(0,), min_live=0.01)
    specs, arrays = big_and_small()
    shelf.save("before", arrays)  # not linked by anybody
    for value in arrays.values():
        value.uniform_()
    shelf.save("0", arrays)
    for step in (1, 2):
        arrays[specs[0]].uniform_()
        shelf.save(str(step), arrays, previous=str(step - 1))
    extent = shelf.written["1"][0].chunks["model/2", 0]
    file = extent.file
    flip(shelf.folder("1") / file, extent.offset + 11)
    sharers = "12" if store in WHOLE_FILES else "012"
    for one in sharers:
        found = examine(shelf.folder(one))
        assert found.damaged == {file}
        assert len(found.problems) == 1 and found.problems[0].startswith("model: 2: bytes ")
    for one in {"before", "0", "1", "2"} - {*sharers}:
        require_sound(shelf, one)
    for one in sharers:
        others = [shelf.folder(other) for other in sharers if other != one]
        assert linked_with(tmp_path, shelf.folder(one), [file]) == others
    own = shelf.written["2"][0].chunks["model/0", 0].file
    assert linked_with(tmp_path, shelf.folder("2"), [own, "no/such"]) == []


def test_damage_in_what_a_checkpoint_does_not_use_of_a_linked_file_is_found_and_named(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, made("ocdbt"), ranks=(0,), min_live=0.5)
    specs, arrays = big_and_small()
    shelf.save("0", arrays)
    arrays[specs[1]].uniform_()
    shelf.save("1", arrays, previous="0")
    extent = shelf.written["0"][0].chunks["model/1", 0]
    flip(shelf.folder("0") / extent.file, extent.offset)
    (problem,) = verify_checkpoint(shelf.folder("1"))
    assert problem == (
        f"bytes {extent.offset} to {extent.offset + extent.length} of {extent.file}, not in use here, are not those that were saved"
    )
    assert shelf.reads_back("1")


@pytest.mark.parametrize("place", ["first", "last"])
def test_loose_bytes_of_a_linked_file_are_under_its_digest_still(tmp_path: Path, place: str) -> None:
    shelf = Shelf(tmp_path, made("ocdbt"), ranks=(0,), min_live=0.5)
    specs, arrays = big_and_small()
    shelf.save("0", arrays)
    arrays[specs[1]].uniform_()
    shelf.save("1", arrays, previous="0")
    (file,) = shelf.written["1"][0].dead
    index = read_index(shelf.folder("1"), read_manifest(shelf.folder("1")), 0)
    covered = index.covered()[file]
    check_file(CheckpointFolder(shelf.folder("1")), file, index.files[file], covered)
    end = max(extent.offset + extent.length for extent in covered)
    flip(shelf.folder("1") / file, end if place == "first" else index.files[file].size - 1)
    with pytest.raises(CorruptCheckpointError, match="outside of any array") as caught:
        check_file(CheckpointFolder(shelf.folder("1")), file, index.files[file], covered)
    assert caught.value.file == file
    assert len(verify_checkpoint(shelf.folder("1"))) == 1


def test_a_value_that_must_be_rewritten_and_is_damaged_fails_the_save_and_names_the_file(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, made("ocdbt"), ranks=(0,))
    specs, arrays = big_and_small()
    shelf.save("0", arrays)
    extent = shelf.written["0"][0].chunks["model/3", 0]
    flip(shelf.folder("0") / extent.file, extent.offset + extent.length - 1)
    for spec in specs[:3]:
        arrays[spec].uniform_()
    with pytest.raises(CorruptCheckpointError, match="model/3: bytes .* of .*checkpoint-0/.* are not those") as caught:
        shelf.save("1", arrays, previous="0")
    assert caught.value.file == extent.file
    assert [one.id for one in Ledger(tmp_path, run_id="test").committed()] == ["0"]
    shelf.save("1", arrays)
    require_sound(shelf, "1")


def test_the_folders_of_links_are_made_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = Shelf(tmp_path, made("zarr"), ranks=(0,))
    arrays = dict([array("model/w", torch.arange(60.0), 20)])
    shelf.save("0", arrays)
    synced: set[str] = set()
    original = os.fsync

    def fsync(fd: int) -> None:
        synced.add(os.readlink(f"/proc/self/fd/{fd}").partition("checkpoint")[0].rpartition("unpublished-1-")[2][9:])
        original(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    shelf.save("1", arrays, previous="0")
    assert {"model/w/c", "model/w", "model"} <= synced


def test_many_folders_are_synced_at_once_though_few_files_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once: list[Path] = []
    monkeypatch.setattr(files_module, "_syncfs", at_once.append)
    folders = [tmp_path / str(n) for n in range(files_module.MANY_FILES + 1)]
    files_module.make_durable(tmp_path, {}, folders, lambda num_bytes: None)
    assert at_once == [tmp_path]


def test_what_is_known_of_the_checkpoint_before_is_what_its_index_says(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, made("ocdbt"), ranks=(0,))
    shelf.save("0", state())
    read = previous_of(shelf.folder("0"), 0, 0.25)
    index = read_index(shelf.folder("0"), read_manifest(shelf.folder("0")), 0)
    assert read == Previous(shelf.folder("0"), index.chunks, index.files, index.dead, 0.25)


@pytest.mark.parametrize("what", ["checkpoint_manifest.json", "index-00000.json"])
@pytest.mark.parametrize("damage", ["changed", "gone"])
def test_a_checkpoint_that_is_damaged_is_no_previous_one_and_that_is_said(
    tmp_path: Path, what: str, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    shelf = Shelf(tmp_path, made("zarr"))
    shelf.save("0", state())
    if damage == "gone":
        (shelf.folder("0") / what).unlink()
    else:
        flip(shelf.folder("0") / what, 60)
    with caplog.at_level(logging.WARNING, "ckpt"):
        assert previous_of(shelf.folder("0"), 0, 0.5) is None
    (told,) = caplog.messages
    assert told.startswith(f"rank 0 links nothing to {shelf.folder('0')}, which is damaged: ")


def test_an_index_keeps_what_is_dead_and_says_nothing_where_there_is_none(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, made("ocdbt"), ranks=(0,))
    specs, arrays = big_and_small()
    shelf.save("0", arrays)
    arrays[specs[0]].uniform_()
    shelf.save("1", arrays, previous="0")
    first, second = ((shelf.folder(one) / "index-00000.json").read_bytes() for one in "01")
    assert b'"dead"' not in first and b'"dead"' in second
    for data in (first, second):
        assert parse_index(data).to_bytes() == data
    assert parse_index(second).dead == shelf.written["1"][0].dead


@pytest.mark.parametrize("store", STORES)
def test_what_a_checkpoint_shares_and_what_removing_it_frees_are_told_apart(tmp_path: Path, store: str) -> None:
    shelf = Shelf(tmp_path, made(store), min_live=0.1)
    specs, arrays = big_and_small()
    for step in range(3):
        arrays[specs[0]].uniform_()
        shelf.save(str(step), arrays, previous=str(step - 1) if step else None)
    folders = [shelf.folder(str(step)) for step in range(3)]
    each, on_disk = disk_use(folders)
    assert on_disk == bytes_on_disk(tmp_path) < sum(use.apparent_bytes for use in each.values())
    for folder in folders:
        assert each[folder].apparent_bytes == bytes_on_disk(folder)
    for folder in (folders[1], folders[0], folders[2]):
        use = disk_use([folder])[0][folder]
        before = bytes_on_disk(tmp_path)
        shutil.rmtree(folder)
        assert before - bytes_on_disk(tmp_path) == use.unique_bytes
    assert disk_use([]) == ({}, 0) and each[folders[0]] != DiskUse(0, 0)


def test_files_of_one_name_are_the_same_if_all_digests_are() -> None:
    def holding(digest: int, rest: str = "", dead: int | None = None) -> Previous:
        extents = [ChunkExtent("f", at, 4, (its,)) for at, its in ((0, digest), (4, dead)) if its is not None]
        gone = {"f": extents[1:]} if dead is not None else {}
        return Previous(Path("there"), {"a": {0: extents[0]}}, {"f": FileRecord(8, rest), "g": FileRecord(1, "")}, gone)

    both_live = Previous(Path(), {"b": {7: ChunkExtent("f", 4, 4, (2,))}, "a": {0: ChunkExtent("f", 0, 4, (1,))}}, holding(1).files)
    assert same_files(holding(1), holding(1)) == same_files(both_live, holding(1, dead=2)) == {"f": Path("there")}
    assert {} == same_files(holding(1), holding(2)) == same_files(holding(1), holding(1, "x")) == same_files(holding(1), holding(1, dead=2))
    assert {} == same_files(None, holding(1)) == same_files(holding(1), None)


def test_the_damaged_file_travels_with_the_error() -> None:
    error = CorruptCheckpointError("w: bytes 0 to 4 of a/b are not those that were saved", file="a/b")
    assert rebuild(describe(error)).file == "a/b"
    assert rebuild({**describe(ValueError("x"))}).file is None
