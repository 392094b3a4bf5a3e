"""The raw reader against NumPy slicing: any region, any box, any strides; damage is named; nothing is read twice."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.errors import CorruptCheckpointError
from ckpt.format.box import Box, whole
from ckpt.format.digests import BlockDigests
from ckpt.format.dtypes import raw_bytes
from ckpt.format.records import ChunkExtent
from ckpt.storage import extents, wanted_bytes
from ckpt.storage.extents import ExtentReader
from ckpt.storage.wanted_bytes import WantedBox, WantedBytes
from tests.support.states import ALL_DTYPES


def store(
    root: Path, data: bytes, *, file: str = "model/w/c/0", before: bytes = b"", block_bytes: int = 64
) -> ChunkExtent:
    """Write `before` and then the chunk `data` into a file, with bytes of no chunk behind it."""
    path = root / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(before + data + b"behind the chunk")
    stream = BlockDigests(block_bytes)
    stream.update(memoryview(data))
    return ChunkExtent(file, len(before), len(data), stream.close(), block_bytes)


def numbers(*shape: int, dtype: type = np.int32) -> np.ndarray:
    """An array whose value is its own global index: a wrong offset names its source."""
    return np.arange(math.prod(shape), dtype=dtype).reshape(shape)


def part(array: np.ndarray, box: Box, *, base: int = 0, name: str = "model: w") -> WantedBox:
    """Want `box` of a region that holds `array`, into a fresh tensor in which an element nobody read stays -1."""
    return WantedBox(base, array.shape, box, torch.full(box.shape, -1, dtype=torch.from_numpy(array).dtype), name)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x40
    path.write_bytes(data)


def as_on_a_device(patch: pytest.MonkeyPatch) -> None:
    """Let tensors on the host be treated as those on a device are."""
    for module in (extents, wanted_bytes):
        patch.setattr(module, "is_on_host", lambda tensor: False)


@pytest.fixture
def small_slabs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Thousandths of the real sizes, so that small arrays meet every border."""
    monkeypatch.setattr(extents, "SLAB_BYTES", 128)
    monkeypatch.setattr(wanted_bytes, "DIRECT_BYTES", 48)
    monkeypatch.setattr(wanted_bytes, "GAP_BYTES", 96)
    yield


@st.composite
def wanted_boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    offsets = [draw(st.integers(0, max(n - 1, 0))) for n in shape]
    return Box(
        tuple(offsets), tuple(draw(st.integers(0 if n == 0 else 1, n - o)) for n, o in zip(shape, offsets, strict=True))
    )


@st.composite
def strided_outs(draw: st.DrawFn, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of this shape: as new, or inside a larger one, its dimensions in any order and with steps in between."""
    if draw(st.booleans()):
        return torch.full(shape, -1, dtype=torch.int32)
    order = draw(st.permutations(range(len(shape))))
    steps = [draw(st.integers(1, 3)) if draw(st.booleans()) else 1 for _ in shape]
    larger = torch.full([shape[dim] * steps[dim] for dim in order], -1, dtype=torch.int32)
    return larger.permute([order.index(dim) for dim in range(len(shape))])[
        tuple(slice(None, None, step) for step in steps)
    ]


@st.composite
def reads(draw: st.DrawFn) -> tuple[np.ndarray, list[tuple[int, tuple[int, ...], Box, torch.Tensor]], bool, int]:
    """A chunk of several regions one after the other, and parts wanted of them, in no order."""
    regions = draw(st.lists(st.lists(st.integers(1, 9), max_size=4).map(tuple), min_size=1, max_size=3))
    chunk = numbers(sum(math.prod(region) for region in regions))
    parts = []
    base = 0
    for region in regions:
        for _ in range(draw(st.integers(0, 3))):
            box = draw(wanted_boxes(region))
            parts.append((base, region, box, draw(strided_outs(box.shape))))
        base += 4 * math.prod(region)
    return chunk, draw(st.permutations(parts)), draw(st.booleans()), draw(st.sampled_from([16, 64, 256, 1 << 20]))


@pytest.mark.usefixtures("turns")
@given(reads())
@settings(max_examples=25)
def test_every_box_of_every_region_arrives_as_numpy_slices_it(
    tmp_path_factory: pytest.TempPathFactory,
    case: tuple[np.ndarray, list[tuple[int, tuple[int, ...], Box, torch.Tensor]], bool, int],
) -> None:
    chunk, wanted, verify, block_bytes = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(extents, "SLAB_BYTES", 128)
        patch.setattr(wanted_bytes, "DIRECT_BYTES", 48)
        patch.setattr(wanted_bytes, "GAP_BYTES", 96)
        root = tmp_path_factory.mktemp("read")
        extent = store(root, chunk.tobytes(), before=b"0123456", block_bytes=block_bytes)
        with ExtentReader(root, verify=verify) as reader:
            reader.read(extent, [WantedBox(base, region, box, out, "model: w") for base, region, box, out in wanted])
    for base, region, box, out in wanted:
        start = base // 4
        source = chunk[start : start + math.prod(region)].reshape(region)[box.slices]
        np.testing.assert_array_equal(out.numpy(), source)


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_every_data_type_survives_bit_for_bit_in_place_and_through_scratch(tmp_path: Path, dtype: torch.dtype) -> None:
    random_bits = torch.from_numpy(np.random.default_rng(7).integers(0, 256, 24 * 16 * dtype.itemsize, dtype=np.uint8))
    if dtype == torch.bool:
        random_bits %= 2
    saved = random_bits.view(dtype).reshape(24, 16)
    extent = store(tmp_path, random_bits.numpy().tobytes())
    rows = torch.zeros(5, 16, dtype=dtype)
    columns = torch.zeros(24, 3, dtype=dtype)
    with ExtentReader(tmp_path) as reader:
        reader.read(extent, [WantedBox(0, (24, 16), Box((7, 0), (5, 16)), rows, "rows")])
        reader.read(extent, [WantedBox(0, (24, 16), Box((0, 9), (24, 3)), columns, "columns")])
    assert torch.equal(raw_bytes(rows), raw_bytes(saved[7:12].contiguous()))
    assert torch.equal(raw_bytes(columns), raw_bytes(saved[:, 9:12].contiguous()))


def test_a_0_dim_value_and_an_empty_box_are_read(tmp_path: Path) -> None:
    extent = store(tmp_path, np.float64(2.5).tobytes())
    value, nothing = torch.zeros((), dtype=torch.float64), torch.zeros((0,), dtype=torch.float64)
    with ExtentReader(tmp_path) as reader:
        reader.read(
            extent, [WantedBox(0, (), Box((), ()), value, "step"), WantedBox(0, (1,), Box((0,), (0,)), nothing, "none")]
        )
        assert reader.bytes_read == 8
    assert value.item() == 2.5


def test_a_parameter_that_requires_grad_is_filled_in_place(tmp_path: Path) -> None:
    saved = numbers(6, 4, dtype=np.float32)
    weight = torch.nn.Parameter(torch.zeros(6, 4))
    memory = weight.data_ptr()
    with ExtentReader(tmp_path) as reader:
        reader.read(store(tmp_path, saved.tobytes()), [WantedBox(0, (6, 4), whole((6, 4)), weight, "model: w")])
    assert weight.data_ptr() == memory
    np.testing.assert_array_equal(weight.detach().numpy(), saved)


@pytest.mark.usefixtures("small_slabs")
def test_overlapping_parts_share_one_reading_of_the_file(tmp_path: Path) -> None:
    saved = numbers(40, 8)
    parts = [part(saved, whole((40, 8))), part(saved, Box((3, 0), (20, 8))), part(saved, Box((0, 2), (40, 3)))]
    with ExtentReader(tmp_path) as reader:
        reader.read(store(tmp_path, saved.tobytes()), parts)
        assert reader.bytes_read == saved.nbytes
    for wanted in parts:
        np.testing.assert_array_equal(wanted.out.numpy(), saved[wanted.box.slices])


def test_5000_tiny_parts_of_one_chunk_read_each_block_once(tmp_path: Path) -> None:
    saved = numbers(5_000 * 12)
    extent = store(tmp_path, saved.tobytes(), block_bytes=1 << 16)
    piece = (3, 4)
    parts = [
        WantedBox(48 * number, piece, whole(piece), torch.zeros(piece, dtype=torch.int32), f"model: {number}")
        for number in range(5_000)
    ]
    moved: list[int] = []
    with ExtentReader(tmp_path, progress=moved.append) as reader:
        reader.read(extent, parts)
        assert reader.bytes_read == saved.nbytes == sum(moved)
    got = torch.cat([wanted.out.reshape(-1) for wanted in parts])
    np.testing.assert_array_equal(got.numpy(), saved)


def test_only_the_blocks_that_hold_wanted_bytes_are_read(tmp_path: Path) -> None:
    saved = numbers(16, 1 << 20)  # rows of 4 MiB
    extent = store(tmp_path, saved.tobytes(), block_bytes=1 << 20)
    wanted = part(saved, Box((3, 1000), (2, 10)))
    with ExtentReader(tmp_path) as reader:
        reader.read(extent, [wanted])
        assert reader.bytes_read == 2 << 20
    np.testing.assert_array_equal(wanted.out.numpy(), saved[3:5, 1000:1010])


def test_without_verification_little_more_than_the_wanted_bytes_is_read(tmp_path: Path) -> None:
    saved = numbers(16, 1 << 18)
    extent = store(tmp_path, saved.tobytes(), block_bytes=1 << 20)
    wanted = part(saved, Box((3, 1001), (1, 10)))
    with ExtentReader(tmp_path, verify=False) as reader:
        reader.read(extent, [wanted])
        assert reader.bytes_read <= 40 + 32
    np.testing.assert_array_equal(wanted.out.numpy(), saved[3:4, 1001:1011])


def test_large_runs_are_read_into_the_tensor_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extents, "scatter", None)  # copying out of scratch would fail
    saved = numbers(3, 1 << 18)
    wanted = part(saved, Box((1, 5), (1, (1 << 18) - 9)))
    with ExtentReader(tmp_path) as reader:
        reader.read(store(tmp_path, saved.tobytes(), block_bytes=4096), [wanted])
    np.testing.assert_array_equal(wanted.out.numpy(), saved[1:2, 5:-4])


@pytest.mark.usefixtures("small_slabs")
@pytest.mark.parametrize("verify", [True, False])
def test_a_run_longer_than_a_slab_arrives_slab_after_slab(tmp_path: Path, verify: bool) -> None:
    saved = numbers(20, 30)
    rows = part(saved, Box((3, 0), (15, 30)))  # one run
    inner = WantedBox(
        0, (20, 30), Box((0, 4), (20, 20)), torch.zeros(40, 20, dtype=torch.int32)[::2], "runs"
    )  # 20 runs
    with ExtentReader(tmp_path, verify=verify) as reader:
        for wanted in (rows, inner):
            reader.read(store(tmp_path, saved.tobytes(), before=b"odd"), [wanted])
            np.testing.assert_array_equal(wanted.out.numpy(), saved[wanted.box.slices])


def test_the_scratch_buffer_stays_small_however_large_a_row_is(tmp_path: Path) -> None:
    saved = numbers(1 << 22)
    out = torch.zeros(1 << 22, 2, dtype=torch.int32)[:, 0]
    with ExtentReader(tmp_path) as reader:
        reader.read(
            store(tmp_path, saved.tobytes(), block_bytes=1 << 20),
            [WantedBox(0, saved.shape, whole(saved.shape), out, "w")],
        )
        assert reader._scratch.nbytes == extents.SLAB_BYTES
    np.testing.assert_array_equal(out.numpy(), saved)


@given(at=st.integers(0, 999), in_place=st.booleans())
@settings(max_examples=40)
def test_a_flipped_byte_in_a_block_that_is_read_is_named(
    tmp_path_factory: pytest.TempPathFactory, at: int, in_place: bool
) -> None:
    root = tmp_path_factory.mktemp("flip")
    saved = numbers(250)
    extent = store(root, saved.tobytes(), before=b"header..")
    flip(root / extent.file, 8 + at)
    out = torch.zeros(250 if in_place else 500, dtype=torch.int32)[:: 1 if in_place else 2]
    begin = at // 64 * 64
    with (
        ExtentReader(root) as reader,
        pytest.raises(
            CorruptCheckpointError,
            match=rf"optimizer: step: bytes {8 + begin} to {8 + min(begin + 64, 1000)} of .*model/w/c/0",
        ),
    ):
        reader.read(extent, [WantedBox(0, (250,), whole((250,)), out, "optimizer: step")])


def test_damage_is_blamed_on_the_part_that_wants_the_block(tmp_path: Path) -> None:
    saved = numbers(64)
    extent = store(tmp_path, saved.tobytes())
    flip(tmp_path / extent.file, 130)
    first, second = WantedBox(0, (32,), whole((32,)), torch.zeros(32, dtype=torch.int32), "first"), None
    second = replace(first, base=128, out=torch.zeros(32, dtype=torch.int32), name="second")
    with ExtentReader(tmp_path) as reader:
        reader.read(extent, [first])  # its blocks are whole
        with pytest.raises(CorruptCheckpointError, match="^second: bytes 128 to 192"):
            reader.read(extent, [first, second])


def test_without_verification_a_flipped_byte_passes(tmp_path: Path) -> None:
    saved = numbers(64)
    extent = store(tmp_path, saved.tobytes())
    flip(tmp_path / extent.file, 0)
    wanted = part(saved, whole((64,)))
    with ExtentReader(tmp_path, verify=False) as reader:
        reader.read(extent, [wanted])
    assert wanted.out[0] == 0x40


@pytest.mark.parametrize("verify", [True, False])
def test_a_truncated_file_is_named_with_the_bytes_that_were_saved(tmp_path: Path, verify: bool) -> None:
    saved = numbers(64)
    extent = store(tmp_path, saved.tobytes())
    os.truncate(tmp_path / extent.file, 200)
    with (
        ExtentReader(tmp_path, verify=verify) as reader,
        pytest.raises(
            CorruptCheckpointError, match=r"model: w: .*model/w/c/0 ends at byte 200, where bytes 0 to 256 were saved"
        ),
    ):
        reader.read(extent, [part(saved, whole((64,)))])


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    saved = numbers(64)
    extent = replace(store(tmp_path, saved.tobytes()), file="model/w/c/1")
    with (
        ExtentReader(tmp_path) as reader,
        pytest.raises(CorruptCheckpointError, match="model: w: .*model/w/c/1 is missing"),
    ):
        reader.read(extent, [part(saved, whole((64,)))])


def test_an_index_that_contradicts_the_chunk_is_refused(tmp_path: Path) -> None:
    saved = numbers(64)
    extent = store(tmp_path, saved.tobytes())
    with ExtentReader(tmp_path) as reader:
        with pytest.raises(CorruptCheckpointError, match="at bytes 4 to 260 of a chunk of 256 bytes"):
            reader.read(extent, [part(saved, whole((64,)), base=4)])
        with pytest.raises(CorruptCheckpointError, match="would cut elements in two"):
            reader.read(extent, [part(saved[:8], whole((8,)), base=2)])


def test_no_more_files_stay_open_than_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extents, "MAX_OPEN_FILES", 3)
    saved = numbers(4)
    chunks = [store(tmp_path, (saved + number).tobytes(), file=f"c/{number}") for number in range(10)]
    open_before = len(os.listdir("/proc/self/fd"))
    with ExtentReader(tmp_path) as reader:
        for number in [*range(10), 9, 8, 0]:
            wanted = part(saved, whole((4,)))
            reader.read(chunks[number], [wanted])
            np.testing.assert_array_equal(wanted.out.numpy(), saved + number)
            assert len(os.listdir("/proc/self/fd")) <= open_before + 3 + 1, "the files, and their folder"
    assert len(os.listdir("/proc/self/fd")) == open_before


def test_a_chunk_is_checked_without_reading_it_into_anything(tmp_path: Path) -> None:
    saved = numbers(100)
    extent = store(tmp_path, saved.tobytes(), before=b"before")
    with ExtentReader(tmp_path) as reader:
        reader.check(extent, "model: w")
        assert reader.bytes_read == 400
        flip(tmp_path / extent.file, 6 + 399)
        with pytest.raises(CorruptCheckpointError, match="model: w: bytes 390 to 406"):
            reader.check(extent, "model: w")
        os.truncate(tmp_path / extent.file, 300)
        with pytest.raises(CorruptCheckpointError, match="ends at byte 300"):
            reader.check(extent, "model: w")
    with ExtentReader(tmp_path, verify=False) as reader, pytest.raises(CorruptCheckpointError, match="ends at byte"):
        reader.check(extent, "model: w")


@pytest.mark.parametrize("on_host", [True, False], ids=["by numpy", "as on a device"])
@pytest.mark.usefixtures("turns")
@given(case=reads(), data=st.data())
@settings(max_examples=25)
def test_bytes_that_came_another_way_are_placed_as_if_they_had_been_read(
    tmp_path_factory: pytest.TempPathFactory,
    on_host: bool,
    case: tuple[np.ndarray, list[tuple[int, tuple[int, ...], Box, torch.Tensor]], bool, int],
    data: st.DataObject,
) -> None:
    chunk, asked, verify, block_bytes = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wanted_bytes, "DIRECT_BYTES", 48)
        patch.setattr(wanted_bytes, "GAP_BYTES", 96)
        if not on_host:
            as_on_a_device(patch)
        root = tmp_path_factory.mktemp("place")
        extent = store(root, chunk.tobytes(), before=b"0123456", block_bytes=block_bytes)
        wanted = WantedBytes(
            extent, [WantedBox(base, region, box, out, "model: w") for base, region, box, out in asked]
        )
        with ExtentReader(root, verify=verify) as reader:
            unit = reader.unit_of(extent)
            pieces = []
            for start, stop in wanted.stretches(unit):
                cuts = data.draw(st.sets(st.sampled_from(range(start, stop, unit)), max_size=3))
                pieces += list(pairwise(sorted({start, *cuts, stop})))
            for start, stop in data.draw(st.permutations(pieces)):
                memory = torch.empty(stop - start, dtype=torch.uint8)
                reader.fetch(extent, start, memory.numpy().data, wanted.name_of)
                wanted.place(start, stop, memory)
        assert reader.bytes_read == sum(stop - start for start, stop in pieces)
    for base, region, box, out in asked:
        start = base // 4
        source = chunk[start : start + math.prod(region)].reshape(region)[box.slices]
        np.testing.assert_array_equal(out.numpy(), source)


class AtOnce:
    """A filling that puts bytes where they are wanted when it is given them."""

    def take(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def place(self, wanted: WantedBytes, start: int, stop: int, memory: torch.Tensor) -> None:
        wanted.place(start, stop, memory)


@pytest.mark.parametrize("on_host", [True, False], ids=["by numpy", "as on a device"])
@pytest.mark.usefixtures("turns")
@given(case=reads(), data=st.data())
@settings(max_examples=25)
def test_a_reader_reads_just_the_stretches_it_is_told(
    tmp_path_factory: pytest.TempPathFactory,
    on_host: bool,
    case: tuple[np.ndarray, list[tuple[int, tuple[int, ...], Box, torch.Tensor]], bool, int],
    data: st.DataObject,
) -> None:
    chunk, asked, verify, block_bytes = case
    root = tmp_path_factory.mktemp("some")
    extent = store(root, chunk.tobytes(), block_bytes=block_bytes)
    parts = [WantedBox(base, region, box, out, "model: w") for base, region, box, out in asked]
    before = [out.clone() for _, _, _, out in asked]
    with (
        pytest.MonkeyPatch.context() as patch,
        ExtentReader(root, verify=verify, slab_bytes=128, filling=AtOnce()) as reader,
    ):
        if not on_host:
            as_on_a_device(patch)
        stretches = WantedBytes(extent, parts).stretches(reader.unit_of(extent))
        mine = [stretch for stretch in stretches if data.draw(st.booleans())]
        reader.read(extent, parts, mine)
        assert reader.bytes_read == sum(stop - start for start, stop in mine)
    for (base, region, box, out), old in zip(asked, before, strict=True):
        index = np.arange(math.prod(region)).reshape(region)[box.slices] * 4 + base
        read = np.zeros(index.shape, bool)
        for start, stop in mine:
            read |= (index >= start) & (index < stop)
        source = chunk[base // 4 : base // 4 + math.prod(region)].reshape(region)[box.slices]
        np.testing.assert_array_equal(out.numpy(), np.where(read, source, old.numpy()))


def test_bytes_fetched_for_others_are_checked_too(tmp_path: Path) -> None:
    extent = store(tmp_path, numbers(8, 16).tobytes(), block_bytes=64)
    flip(tmp_path / extent.file, 200)
    memory = np.empty(128, np.uint8)
    with ExtentReader(tmp_path) as reader:
        reader.fetch(extent, 64, memory.data, lambda begin, end: f"bytes {begin} to {end}")
        with pytest.raises(CorruptCheckpointError, match="^bytes 192 to 256: bytes 192 to 256 of .* are not those"):
            reader.fetch(extent, 128, memory.data, lambda begin, end: f"bytes {begin} to {end}")


def drop_from_cache(path: Path) -> None:
    """Drop a file from the page cache; skip the test where the file system keeps it, as one in memory does."""
    with path.open("rb") as stream:
        os.fsync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if cached_bytes(path):
        pytest.skip("this file system does not drop pages")


def cached_bytes(path: Path) -> int:
    """The bytes of a file that can be read without waiting, from its beginning on."""
    with path.open("rb") as stream:
        try:
            return os.preadv(stream.fileno(), [bytearray(path.stat().st_size)], 0, os.RWF_NOWAIT)
        except BlockingIOError:
            return 0
        except OSError as error:
            pytest.skip(f"this file system cannot tell what it has in memory: {error}")


def test_the_kernel_has_read_what_it_was_asked_for_ahead(tmp_path: Path) -> None:
    data = np.random.default_rng(3).bytes(8 << 20)
    extent = store(tmp_path, data, block_bytes=1 << 20)
    drop_from_cache(tmp_path / extent.file)
    with ExtentReader(tmp_path, in_order=True) as reader:
        reader.read_ahead(extent, 32 << 20)
        deadline = time.monotonic() + 30
        while cached_bytes(tmp_path / extent.file) < len(data):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert reader.bytes_read == 0
        out = torch.zeros(len(data), dtype=torch.uint8)
        reader.read(extent, [WantedBox(0, out.shape, whole(out.shape), out, "model: w")])
    assert out.numpy().tobytes() == data


@pytest.mark.parametrize("damage", ["missing", "link", "empty"])
def test_damage_that_is_met_ahead_is_reported_by_the_read(tmp_path: Path, damage: str) -> None:
    extent = store(tmp_path, bytes(range(100)))
    path = tmp_path / extent.file
    path.rename(tmp_path / "elsewhere")
    if damage == "link":
        path.symlink_to(tmp_path / "elsewhere")
    elif damage == "empty":
        path.touch()
    out = torch.zeros(100, dtype=torch.uint8)
    with ExtentReader(tmp_path, in_order=True) as reader:
        reader.read_ahead(extent, 32 << 20)
        with pytest.raises(CorruptCheckpointError, match="model: w: .*(is missing|symbolic link|ends at byte 0)"):
            reader.read(extent, [WantedBox(0, out.shape, whole(out.shape), out, "model: w")])


def test_a_reader_with_its_own_way_to_read_asks_the_kernel_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, at, count, advice: asked.append(advice))
    with ExtentReader(tmp_path, read_at=lambda *of: os.preadv(*of)) as reader:
        reader.read_ahead(store(tmp_path, bytes(100)), 32 << 20)
    assert not asked


def test_a_system_that_refuses_to_read_ahead_reads_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "posix_fadvise", refuse)
    saved = numbers(25)
    extent = store(tmp_path, saved.tobytes())
    wanted = part(saved, whole(saved.shape))
    with ExtentReader(tmp_path, in_order=True) as reader:
        reader.read_ahead(extent, 32 << 20)
        reader.read(extent, [wanted])
    np.testing.assert_array_equal(wanted.out.numpy(), saved)
