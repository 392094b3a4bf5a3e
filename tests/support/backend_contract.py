"""The contract of a storage backend as tests. `class TestMine(BackendContract)` with a method `make` runs all of them."""

from __future__ import annotations

import math
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckpt.backends.base import Backend, staged_digests
from ckpt.errors import CheckpointError, CorruptCheckpointError, StorageError
from ckpt.format.box import Box, chunk_box, whole
from ckpt.format.dtypes import zarr_name
from ckpt.format.places import encode_key
from ckpt.format.records import ArraySpec, stored_shape
from tests.support.arrays import Saved, array, expected, read_by_extents, save
from tests.support.states import ALL_DTYPES, random_bits, same_bits, zero_bits


def samples(dtype: torch.dtype) -> dict[ArraySpec, torch.Tensor]:
    """Arrays of one type in every special shape: 0-dim, empty, one chunk, edge chunks along each dimension."""
    cases: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
        ((), ()),
        ((0, 3), (1, 3)),
        ((4,), (4,)),
        ((5, 7), (2, 7)),
        ((5, 7), (2, 3)),
        ((130, 70), (100, 70)),  # too large for writes below one page
        ((130, 70), (130, 50)),
    ]
    return dict(
        array(f"model/{zarr_name(dtype)}-{number}", random_bits(shape, dtype, number), *grid)
        for number, (shape, grid) in enumerate(cases)
    )


@st.composite
def grids(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], Box]:
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=3)))
    grid = tuple(draw(st.integers(1, n)) for n in shape)
    offsets = tuple(draw(st.integers(0, n - 1)) for n in shape)
    return shape, grid, Box(offsets, tuple(draw(st.integers(1, n - o)) for n, o in zip(shape, offsets, strict=True)))


class BackendContract:
    """Tests that every backend passes. Subclasses define `make`, and the attributes that differ.

    Attributes:
        raw: chunks are stored as their elements, so that extents serve them.
    """

    raw = True

    def make(self) -> Backend:
        """Return a new backend."""
        raise NotImplementedError

    def lose(self, saved: Saved, path: str, number: int) -> None:
        """Destroy one chunk of an array, and no chunk of another writer."""
        (saved.root / saved.chunks[path, number].file).unlink()

    def require_equal_elsewhere(self, root: Path, spec: ArraySpec, value: torch.Tensor) -> None:
        """Compare an array with the same array as read by a library that is not ours. Does nothing by default."""

    @pytest.fixture
    def no_file_larger_than_a_mib(self) -> Iterator[None]:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
        yield
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    @pytest.mark.parametrize("shapes", [2, pytest.param(7, marks=pytest.mark.full)])
    def test_every_type_and_shape_is_read_bit_for_bit(self, tmp_path: Path, shapes: int) -> None:
        """By the backend, by extents, and by other libraries; each type in `shapes` shapes, in turn."""
        arrays: dict[ArraySpec, torch.Tensor] = {}
        for number, dtype in enumerate(ALL_DTYPES):
            of_type = list(samples(dtype).items())
            arrays |= dict(of_type[(number * shapes + at) % len(of_type)] for at in range(shapes))
        saved = save(self.make(), tmp_path, arrays)
        for spec, value in saved.arrays.items():
            out = zero_bits(spec.shape, value.dtype)
            self.make().read(tmp_path, spec, whole(spec.shape), out)
            assert same_bits(out, value), spec
            self.require_equal_elsewhere(tmp_path, spec, value)
            if self.raw:
                assert same_bits(read_by_extents(saved, spec, whole(spec.shape)), value), spec

    @pytest.mark.parametrize(
        "shape_box", [((5, 7), (2, 3), Box((1, 2), (3, 4))), ((5, 7), (2, 7), Box((3, 0), (2, 1)))]
    )
    def test_a_box_across_chunks_is_read_into_a_strided_tensor(
        self, tmp_path: Path, shape_box: tuple[tuple[int, ...], tuple[int, ...], Box]
    ) -> None:
        shape, grid, box = shape_box
        spec, value = array("model/w", torch.arange(math.prod(shape), dtype=torch.bfloat16).reshape(shape), *grid)
        save(self.make(), tmp_path, {spec: value})
        out = torch.zeros(box.shape[1], 2 * box.shape[0], dtype=torch.bfloat16).T[::2]
        self.make().read(tmp_path, spec, box, out)
        assert same_bits(out, value[box.slices])

    def test_every_file_is_listed_once_with_its_size_and_every_chunk_with_its_extent(self, tmp_path: Path) -> None:
        saved = save(self.make(), tmp_path, samples(torch.float32) | samples(torch.int8))
        assert saved.files_found() == {*saved.rank_files, *saved.lead_files}
        assert not set(saved.rank_files) & set(saved.lead_files)
        for file, record in saved.rank_files.items():
            assert record.size == (tmp_path / file).stat().st_size
        for (path, number), chunk in saved.chunks.items():
            spec = next(spec for spec in saved.arrays if spec.path == path)
            assert chunk.raw == self.raw
            if chunk.raw:
                stored = stored_shape(saved.store, spec.grid, chunk_box(spec.shape, spec.grid, number).shape)
                assert chunk.length == math.prod(stored) * saved.arrays[spec].element_size()
            assert chunk.offset + chunk.length <= (tmp_path / chunk.file).stat().st_size

    def test_every_byte_of_a_rank_s_files_lies_under_a_block_digest_or_that_of_the_rest(self, tmp_path: Path) -> None:
        saved = save(self.make(), tmp_path, samples(torch.int16))
        for file, record in saved.rank_files.items():
            data = (tmp_path / file).read_bytes()
            covered = sorted((c.offset, c.offset + c.length) for c in saved.chunks.values() if c.file == file)
            rest, at = b"", 0
            for start, stop in [*covered, (len(data), len(data))]:
                rest += data[at:start]
                at = stop
            assert record.rest == xxhash.xxh3_128_hexdigest(rest)

    def test_an_all_zero_chunk_is_stored_like_any_other(self, tmp_path: Path) -> None:
        large, small = array("model/large", torch.zeros(300, 100), 100, 100), array("model/small", torch.zeros(3), 1)
        saved = save(self.make(), tmp_path, dict([large, small]))
        assert len(saved.chunks) == 6
        assert all(chunk.length > 0 for chunk in saved.chunks.values())

    def test_a_missing_chunk_is_refused_instead_of_read_as_zeros(self, tmp_path: Path) -> None:
        spec, value = array("model/w", torch.arange(10.0), 5)
        backend = self.make()
        self.lose(save(backend, tmp_path, {spec: value}), "model/w", 1)
        with pytest.raises(CorruptCheckpointError, match="model/w: "):
            backend.read(tmp_path, spec, Box((3,), (4,)), torch.zeros(4))
        out = torch.zeros(4)
        backend.read(tmp_path, spec, Box((1,), (4,)), out)  # chunk 0 can still be read
        assert out.tolist() == [1, 2, 3, 4]

    def test_a_missing_array_is_refused_by_name(self, tmp_path: Path) -> None:
        spec, value = array("model/w", torch.arange(10.0), 5)
        backend = self.make()
        save(backend, tmp_path, {spec: value})
        with pytest.raises(CorruptCheckpointError, match="model/nope"):
            backend.read(tmp_path, array("model/nope", value, 5)[0], whole((10,)), torch.zeros(10))

    def test_a_chunk_that_was_changed_after_its_digests_were_taken_is_refused(self, tmp_path: Path) -> None:
        spec, value = array("model/w", torch.arange(10.0), 5)
        digests = staged_digests(value[:5], stored_shape(self.make().store, spec.grid, (5,)))
        writer = self.make().writer(tmp_path, 0, lambda num_bytes: None)
        writer.expect([expected(spec, 0)])
        value[2] = -1
        with pytest.raises(StorageError, match="model/w was changed in memory"):
            writer.write(spec, 0, value[:5], digests)
        writer.abort()

    def test_names_and_roots_are_data_and_not_urls(self, tmp_path: Path) -> None:
        root = tmp_path / "a folder %41 with ü"
        root.mkdir()
        keys = {
            f"m/{encode_key(key)}": key
            for key in ("../x", "", "a.b-c_d e", "k" * 183, "\udcff", "w[0:2]", "__metadata__")
        }
        arrays = dict(array(path, torch.arange(4) + at, 2) for at, path in enumerate(keys))
        saved = save(self.make(), root, arrays, keys=keys)
        for spec, value in arrays.items():
            out = torch.zeros(4, dtype=torch.int64)
            self.make().read(root, spec, whole((4,)), out)
            assert torch.equal(out, value)
            if self.raw:
                assert torch.equal(read_by_extents(saved, spec, whole((4,))), value)

    def test_a_renamed_checkpoint_stays_whole(self, tmp_path: Path) -> None:
        spec, value = array("model/w", torch.arange(300_00.0).reshape(300, 100), 100, 100)
        (tmp_path / "unpublished").mkdir()
        saved = save(self.make(), tmp_path / "unpublished", {spec: value})
        saved.root = (tmp_path / "unpublished").rename(tmp_path / "published")
        out = torch.zeros_like(value)
        self.make().read(saved.root, spec, whole((300, 100)), out)
        assert torch.equal(out, value)
        if self.raw:
            assert torch.equal(read_by_extents(saved, spec, whole((300, 100))), value)

    def test_progress_moves_with_every_chunk(self, tmp_path: Path) -> None:
        spec, value = array("model/w", random_bits((5 << 20,), torch.int32, 0), 5 << 20)  # 20 MiB
        moved: list[int] = []
        writer = self.make().writer(tmp_path, 0, moved.append)
        writer.expect([expected(spec, 0)])
        writer.write(spec, 0, value)
        writer.finish()
        assert sum(moved) >= (20 << 20 if self.raw else 1) and min(moved) > 0

    def test_a_writer_that_wrote_nothing_leaves_nothing(self, tmp_path: Path) -> None:
        written = self.make().writer(tmp_path, 5, lambda num_bytes: None).finish()
        assert written.chunks == {} and written.files == {}
        assert list(tmp_path.iterdir()) == []

    def test_an_array_without_elements_is_described_and_read(self, tmp_path: Path) -> None:
        backend = self.make()
        empty, value = array("model/none", torch.zeros(0, 4), 1, 4)
        writer = backend.writer(tmp_path, 0, lambda num_bytes: None)
        writer.expect([expected(empty, None)])
        writer.describe([empty], ["model"])
        assert writer.finish().chunks == {}
        writer.make_durable()
        backend.join(tmp_path, [0], lambda num_bytes: None)
        backend.read(tmp_path, empty, whole((0, 4)), value)

    def test_an_aborted_save_disturbs_no_later_one(self, tmp_path: Path) -> None:
        backend = self.make()
        spec, value = array("model/w", torch.arange(40_000.0), 20_000)
        (tmp_path / "first").mkdir()
        (tmp_path / "second").mkdir()
        writer = backend.writer(tmp_path / "first", 0, lambda num_bytes: None)
        writer.expect([expected(spec, number) for number in (0, 1)])
        writer.write(spec, 0, value[:20_000])
        writer.abort()
        save(backend, tmp_path / "second", {spec: value})
        out = torch.zeros(40_000)
        backend.read(tmp_path / "second", spec, whole((40_000,)), out)
        assert torch.equal(out, value)

    @pytest.mark.usefixtures("no_file_larger_than_a_mib")
    def test_a_refusal_of_the_file_system_is_an_os_error_that_names_the_file(self, tmp_path: Path) -> None:
        spec, value = array("model/w", random_bits((1 << 20,), torch.int32, 0), 1 << 20)
        writer = self.make().writer(tmp_path, 0, lambda num_bytes: None)
        writer.expect([expected(spec, 0)])
        with pytest.raises(OSError) as caught:
            writer.write(spec, 0, value)
            writer.finish()
        writer.abort()
        assert caught.value.strerror == "File too large"
        assert str(caught.value.filename).startswith(str(tmp_path))
        assert not str(caught.value.filename).endswith("__lock")

    def test_a_root_that_cannot_be_written_is_an_error_that_names_it(self) -> None:
        spec, value = array("model/w", torch.arange(40_000.0), 40_000)
        writer = self.make().writer(Path("/proc/nowhere"), 0, lambda num_bytes: None)
        writer.expect([expected(spec, 0)])
        with pytest.raises((OSError, CheckpointError), match="/proc/nowhere"):
            writer.write(spec, 0, value)
            writer.finish()
        writer.abort()

    @given(grids())
    @settings(max_examples=12, suppress_health_check=[HealthCheck.differing_executors])
    def test_any_box_under_any_grid_is_what_numpy_slices(
        self,
        tmp_path_factory: pytest.TempPathFactory,
        case: tuple[tuple[int, ...], tuple[int, ...], Box],
    ) -> None:
        shape, grid, box = case
        spec = ArraySpec("model/w", "int32", shape, grid)
        value = torch.arange(math.prod(shape), dtype=torch.int32).reshape(shape)
        saved = save(self.make(), tmp_path_factory.mktemp("grid"), {spec: value})
        out = torch.zeros(box.shape, dtype=torch.int32)
        self.make().read(saved.root, spec, box, out)
        assert torch.equal(out, value[box.slices])
        if self.raw:
            assert torch.equal(read_by_extents(saved, spec, box), value[box.slices])
