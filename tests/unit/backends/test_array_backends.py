"""What every array backend owes its caller, and that each library reads, bit for bit, what the other wrote."""

from __future__ import annotations

import math
import os
import resource
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tensorstore as ts
import torch
import xxhash
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.backends import registry
from ckpt.backends.base import Backend
from ckpt.backends.registry import backend_of_store
from ckpt.backends.tensorstore import TensorStoreBackend
from ckpt.backends.zarr import ZarrBackend
from ckpt.errors import CheckpointError, CorruptCheckpointError
from ckpt.format import zarr_dtypes
from ckpt.format.blocks import EMPTY_DIGEST
from ckpt.format.box import Box, chunk_box, whole
from ckpt.format.dtypes import bits_of, zarr_name
from ckpt.format.names import encode_key
from ckpt.format.records import ArraySpec, stored_shape
from tests import plain_safetensors
from tests.arrays import Saved, array, expected, key_of, read_by_extents, save
from tests.states import ALL_DTYPES, BACKENDS, backend_named, random_bits, same_bits

ZSTD = [{"name": "zstd", "configuration": {"level": 1, "checksum": False}}]
RAW = BACKENDS
EVERY = (*RAW, "zstd")
IN_FOLDERS = ("zarr", "file", "zstd")


def made(name: str) -> Backend:
    if name == "zstd":
        return ZarrBackend(compressors=ZSTD)
    return backend_named(name)


def samples(dtype: torch.dtype) -> dict[ArraySpec, torch.Tensor]:
    """Arrays of one type in every shape that is special: 0-dim, empty, one chunk, edge chunks along each dimension."""
    cases: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
        ((), ()),
        ((0, 3), (1, 3)),
        ((4,), (4,)),
        ((5, 7), (2, 7)),
        ((5, 7), (2, 3)),
        ((130, 70), (100, 70)),  # these are too large to be handed over as bytes
        ((130, 70), (130, 50)),
    ]
    return dict(
        array(f"model/{zarr_name(dtype)}-{number}", random_bits(shape, dtype, number), *grid)
        for number, (shape, grid) in enumerate(cases)
    )


def plain_zarr(root: Path, spec: ArraySpec) -> np.ndarray:
    zarr_dtypes.register()
    return np.asarray(zarr.open_array(root / spec.path, mode="r")[...])


def plain(root: Path, spec: ArraySpec, store: str) -> np.ndarray:
    """An array as the store's library reads it, in plain numbers of its bits."""
    if store == "safetensors":
        return bits_of(plain_safetensors.read(root / spec.path.rpartition("/")[0], key_of(spec.path)))
    kvstore: dict[str, object] = {"driver": "file", "path": f"{root}/{spec.path}/"}
    if store == "ocdbt":
        kvstore = {"driver": "ocdbt", "base": f"file://{root}/arrays.ocdbt/", "path": f"{spec.path}/"}
    return np.asarray(ts.open({"driver": "zarr3", "kvstore": kvstore}).result().read().result())


def equal_bits(values: np.ndarray, tensor: torch.Tensor) -> bool:
    return values.shape == tensor.shape and values.tobytes() == bits_of(tensor).tobytes()


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("shapes", [2, pytest.param(7, marks=pytest.mark.full)])
def test_every_type_and_shape_is_read_bit_for_bit_by_us_and_by_the_plain_libraries(
    tmp_path: Path, name: str, shapes: int
) -> None:
    """Each type in so many shapes, in turn."""
    backend = made(name)
    arrays: dict[ArraySpec, torch.Tensor] = {}
    for number, dtype in enumerate(ALL_DTYPES):
        of_type = list(samples(dtype).items())
        arrays |= dict(of_type[(number * shapes + at) % len(of_type)] for at in range(shapes))
    saved = save(backend, tmp_path, arrays)
    for spec, value in saved.arrays.items():
        out = torch.zeros(spec.shape, dtype=value.dtype)
        backend.read(tmp_path, spec, whole(spec.shape), out)
        assert same_bits(out, value), spec
        assert equal_bits(plain(tmp_path, spec, backend.store), value), spec
        if backend.store == "zarr":
            assert equal_bits(plain_zarr(tmp_path, spec), value), spec
        if name != "zstd":
            assert same_bits(read_by_extents(saved, spec, whole(spec.shape)), value), spec


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("shape_box", [((5, 7), (2, 3), Box((1, 2), (3, 4))), ((5, 7), (2, 7), Box((3, 0), (2, 1)))])
def test_a_box_across_chunks_is_read_into_a_strided_tensor(
    tmp_path: Path, name: str, shape_box: tuple[tuple[int, ...], tuple[int, ...], Box]
) -> None:
    shape, grid, box = shape_box
    spec, value = array("model/w", torch.arange(math.prod(shape), dtype=torch.bfloat16).reshape(shape), *grid)
    backend = made(name)
    save(backend, tmp_path, {spec: value})
    out = torch.zeros(box.shape[1], 2 * box.shape[0], dtype=torch.bfloat16).T[::2]
    backend.read(tmp_path, spec, box, out)
    assert same_bits(out, value[box.slices])


@pytest.mark.parametrize("name", EVERY)
def test_the_backend_that_a_load_finds_by_the_store_reads_what_any_wrote(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_STORES", {})
    spec, value = array("model/w", random_bits((6, 5), torch.float8_e5m2, 0), 4, 5)
    save(made(name), tmp_path, {spec: value})
    out = torch.zeros(6, 5, dtype=torch.float8_e5m2)
    backend_of_store(made(name).store).read(tmp_path, spec, whole((6, 5)), out)
    assert same_bits(out, value)


@pytest.mark.parametrize("name", EVERY)
def test_every_file_is_listed_once_with_its_size_and_every_chunk_with_its_extent(tmp_path: Path, name: str) -> None:
    saved = save(made(name), tmp_path, samples(torch.float32) | samples(torch.int8))
    assert saved.files_found() == {*saved.rank_files, *saved.lead_files}
    assert not set(saved.rank_files) & set(saved.lead_files)
    for file, record in saved.rank_files.items():
        assert record.size == (tmp_path / file).stat().st_size
    for (path, number), chunk in saved.chunks.items():
        spec = next(spec for spec in saved.arrays if spec.path == path)
        if chunk.raw:
            stored = stored_shape(saved.store, spec.grid, chunk_box(spec.shape, spec.grid, number).shape)
            assert chunk.length == math.prod(stored) * saved.arrays[spec].element_size()
        assert chunk.offset + chunk.length <= (tmp_path / chunk.file).stat().st_size


@pytest.mark.parametrize("name", RAW)
def test_every_byte_of_a_rank_s_files_lies_under_a_block_digest_or_under_the_digest_of_the_rest(
    tmp_path: Path, name: str
) -> None:
    saved = save(made(name), tmp_path, samples(torch.int16))
    for file, record in saved.rank_files.items():
        data = (tmp_path / file).read_bytes()
        covered = sorted((c.offset, c.offset + c.length) for c in saved.chunks.values() if c.file == file)
        rest, at = b"", 0
        for start, stop in [*covered, (len(data), len(data))]:
            rest += data[at:start]
            at = stop
        assert record.rest == xxhash.xxh3_128_hexdigest(rest)
        assert name in ("ocdbt", "safetensors") or file.endswith("zarr.json") or record.rest == EMPTY_DIGEST


@pytest.mark.parametrize("name", EVERY)
def test_an_all_zero_chunk_is_stored_like_any_other(tmp_path: Path, name: str) -> None:
    large, small = array("model/large", torch.zeros(300, 100), 100, 100), array("model/small", torch.zeros(3), 1)
    saved = save(made(name), tmp_path, dict([large, small]))
    assert len(saved.chunks) == 6
    assert all(chunk.length > 0 for chunk in saved.chunks.values())


@pytest.mark.parametrize("name", EVERY)
def test_a_missing_chunk_is_refused_instead_of_read_as_zeros(tmp_path: Path, name: str) -> None:
    spec, value = array("model/w", torch.arange(10.0), 5)
    backend = made(name)
    save(backend, tmp_path, {spec: value})
    if name == "ocdbt":
        database = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{tmp_path}/arrays.ocdbt/"}).result()
        database.write("model/w/c/1", None).result()
    elif name == "safetensors":
        (tmp_path / "model/rank-00003-float32.safetensors").unlink()  # rank 3 had the second
    else:
        (tmp_path / "model/w/c/1").unlink()
    missing = "have 2 of the 4 elements" if name == "safetensors" else "model/w.*c/1"
    with pytest.raises(CorruptCheckpointError, match=f"model/w: .*{missing}"):
        backend.read(tmp_path, spec, Box((3,), (4,)), torch.zeros(4))
    out = torch.zeros(4)
    backend.read(tmp_path, spec, Box((1,), (4,)), out)  # what does not touch it can still be read
    assert out.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("name", EVERY)
def test_a_missing_array_is_refused_by_name(tmp_path: Path, name: str) -> None:
    spec, value = array("model/w", torch.arange(10.0), 5)
    backend = made(name)
    save(backend, tmp_path, {spec: value})
    with pytest.raises(CorruptCheckpointError, match="model/nope"):
        backend.read(tmp_path, array("model/nope", value, 5)[0], whole((10,)), torch.zeros(10))


@pytest.mark.parametrize("name", IN_FOLDERS)
def test_metadata_that_is_cut_off_is_refused(tmp_path: Path, name: str) -> None:
    spec, value = array("model/w", torch.arange(10.0), 5)
    backend = made(name)
    save(backend, tmp_path, {spec: value})
    os.truncate(tmp_path / "model/w/zarr.json", 20)
    with pytest.raises(CorruptCheckpointError, match="model/w"):
        backend.read(tmp_path, spec, whole((10,)), torch.zeros(10))
    with pytest.raises(CorruptCheckpointError):
        backend.list_arrays(tmp_path)


def test_a_compressed_chunk_that_cannot_be_decoded_is_refused(tmp_path: Path) -> None:
    spec, value = array("model/w", torch.arange(10.0), 5)
    save(made("zstd"), tmp_path, {spec: value})
    (tmp_path / "model/w/c/0").write_bytes(b"not zstd")
    with pytest.raises(CorruptCheckpointError, match="model/w: zarr cannot read"):
        made("zstd").read(tmp_path, spec, whole((10,)), torch.zeros(10))


@pytest.mark.parametrize("name", EVERY)
def test_arrays_are_listed_as_they_were_saved(tmp_path: Path, name: str) -> None:
    arrays = samples(torch.complex64) | dict([array("optimizer/rank-00001/w%2Fx", torch.arange(6), 4)])
    backend = made(name)
    save(backend, tmp_path, arrays)
    assert backend.list_arrays(tmp_path) == {spec.path: spec for spec in arrays}


def test_a_database_forgets_arrays_by_path(tmp_path: Path) -> None:
    arrays = samples(torch.complex64) | dict([array("optimizer/rank-00001/w%2Fx", torch.arange(6), 4)])
    backend = TensorStoreBackend()
    save(backend, tmp_path, arrays)
    gone = [spec.path for spec in arrays if spec.path.startswith("model/")]
    backend.remove(tmp_path, gone[1:])
    assert set(backend.list_arrays(tmp_path)) == {gone[0], "optimizer/rank-00001/w%2Fx"}
    backend.remove(tmp_path, [*gone, "optimizer/rank-00001/w", "optimizer/rank", "model/nowhere"])
    assert list(backend.list_arrays(tmp_path)) == ["optimizer/rank-00001/w%2Fx"]
    last = next(spec for spec in arrays if spec.path.startswith("optimizer"))
    out = torch.zeros(6, dtype=torch.int64)
    backend.read(tmp_path, last, whole((6,)), out)
    assert out.tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("name", EVERY)
def test_names_and_roots_are_data_and_not_urls(tmp_path: Path, name: str) -> None:
    root = tmp_path / "a folder %41 with ü"
    root.mkdir()
    keys = {
        f"m/{encode_key(key)}": key for key in ("../x", "", "a.b-c_d e", "k" * 183, "\udcff", "w[0:2]", "__metadata__")
    }
    arrays = dict(array(path, torch.arange(4) + at, 2) for at, path in enumerate(keys))
    backend = made(name)
    saved = save(backend, root, arrays, keys=keys)
    assert backend.list_arrays(root) == {spec.path: spec for spec in sorted(arrays, key=lambda spec: spec.path)}
    for spec, value in arrays.items():
        out = torch.zeros(4, dtype=torch.int64)
        backend.read(root, spec, whole((4,)), out)
        assert torch.equal(out, value)
        if name != "zstd":
            assert torch.equal(read_by_extents(saved, spec, whole((4,))), value)


@pytest.mark.parametrize("name", RAW)
def test_a_renamed_checkpoint_stays_whole(tmp_path: Path, name: str) -> None:
    spec, value = array("model/w", torch.arange(300_00.0).reshape(300, 100), 100, 100)
    backend = made(name)
    (tmp_path / "unpublished").mkdir()
    saved = save(backend, tmp_path / "unpublished", {spec: value})
    saved.root = (tmp_path / "unpublished").rename(tmp_path / "published")
    out = torch.zeros_like(value)
    backend.read(saved.root, spec, whole((300, 100)), out)
    assert torch.equal(out, value)
    assert torch.equal(read_by_extents(saved, spec, whole((300, 100))), value)


@pytest.mark.parametrize("name", EVERY)
def test_progress_moves_with_every_chunk_and_in_a_long_one(tmp_path: Path, name: str) -> None:
    spec, value = array("model/w", random_bits((5 << 20,), torch.int32, 0), 5 << 20)  # 20 MiB
    moved: list[int] = []
    writer = made(name).writer(tmp_path, 0, moved.append)
    writer.expect([expected(spec, 0)])
    writer.write(spec, 0, value)
    writer.finish()
    assert sum(moved) >= (20 << 20 if name != "zstd" else 1) and min(moved) > 0
    assert len(moved) >= (3 if name == "zarr" else 1)


@pytest.mark.parametrize("name", RAW)
def test_a_writer_that_wrote_nothing_leaves_nothing(tmp_path: Path, name: str) -> None:
    backend = made(name)
    written = backend.writer(tmp_path, 5, lambda num_bytes: None).finish()
    assert written.chunks == {} and written.files == {}
    assert list(tmp_path.iterdir()) == []
    empty, value = array("model/none", torch.zeros(0, 4), 1, 4)
    writer = backend.writer(tmp_path, 0, lambda num_bytes: None)
    writer.expect([expected(empty, None)])
    writer.describe([empty], ["model"])
    assert writer.finish().chunks == {}
    writer.make_durable()
    backend.join(tmp_path, [0], lambda num_bytes: None)
    assert backend.list_arrays(tmp_path) == {"model/none": empty}
    backend.read(tmp_path, empty, whole((0, 4)), value)


@pytest.mark.parametrize("name", RAW)
def test_an_aborted_save_disturbs_no_later_one(tmp_path: Path, name: str) -> None:
    backend = made(name)
    spec, value = array("model/w", torch.arange(40_000.0), 20_000)
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    writer = backend.writer(tmp_path / "first", 0, lambda num_bytes: None)
    writer.expect([expected(spec, number) for number in (0, 1)])
    writer.write(spec, 0, value[:20_000])
    writer.abort()
    saved = save(backend, tmp_path / "second", {spec: value})
    assert torch.equal(read_by_extents(saved, spec, whole((40_000,))), value)


@pytest.fixture
def no_file_larger_than_a_mib() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("name", RAW)
@pytest.mark.usefixtures("no_file_larger_than_a_mib")
def test_a_refusal_of_the_file_system_is_an_os_error_that_names_the_file(tmp_path: Path, name: str) -> None:
    spec, value = array("model/w", random_bits((1 << 20,), torch.int32, 0), 1 << 20)
    writer = made(name).writer(tmp_path, 0, lambda num_bytes: None)
    writer.expect([expected(spec, 0)])
    with pytest.raises(OSError) as caught:
        writer.write(spec, 0, value)
        writer.finish()
    writer.abort()
    assert caught.value.strerror == "File too large"
    assert str(caught.value.filename).startswith(str(tmp_path))
    assert not str(caught.value.filename).endswith("__lock")


@pytest.mark.parametrize("name", RAW)
def test_a_root_that_cannot_be_written_is_an_error_that_names_it(name: str) -> None:
    spec, value = array("model/w", torch.arange(40_000.0), 40_000)
    writer = made(name).writer(Path("/proc/nowhere"), 0, lambda num_bytes: None)
    writer.expect([expected(spec, 0)])
    with pytest.raises((OSError, CheckpointError), match="/proc/nowhere"):
        writer.write(spec, 0, value)
        writer.finish()
    writer.abort()


@pytest.mark.parametrize("name", IN_FOLDERS)
def test_zarr_walks_the_checkpoint_as_a_tree_of_groups(tmp_path: Path, name: str) -> None:
    arrays = dict(
        array(path, torch.arange(4.0) + at, 3)
        for at, path in enumerate(["model/w", "model/rank-00000/v", "optimizer/node-0001/m"])
    )
    save(made(name), tmp_path, arrays)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        group = zarr.open_group(tmp_path, mode="r")
        assert {path for path, _ in group.members(max_depth=None)} == {
            "model", "model/w", "model/rank-00000", "model/rank-00000/v",
            "optimizer", "optimizer/node-0001", "optimizer/node-0001/m",
        }  # fmt: skip
    assert group["optimizer/node-0001/m"][:].tolist() == [2, 3, 4, 5]


@pytest.mark.parametrize("name", ["zarr", "file"])
def test_both_backends_write_the_same_directory(tmp_path: Path, name: str) -> None:
    saved: list[Saved] = []
    for number, backend in enumerate([ZarrBackend(), made(name)]):
        (tmp_path / str(number)).mkdir()
        saved.append(save(backend, tmp_path / str(number), samples(torch.bfloat16) | samples(torch.bool)))
    assert saved[0].files_found() == saved[1].files_found()
    assert saved[0].chunks == saved[1].chunks
    for file in {chunk.file for chunk in saved[0].chunks.values()}:
        assert (saved[0].root / file).read_bytes() == (saved[1].root / file).read_bytes()


@st.composite
def grids(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], Box]:
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=3)))
    grid = tuple(draw(st.integers(1, n)) for n in shape)
    offsets = tuple(draw(st.integers(0, n - 1)) for n in shape)
    return shape, grid, Box(offsets, tuple(draw(st.integers(1, n - o)) for n, o in zip(shape, offsets, strict=True)))


@pytest.mark.parametrize("name", RAW)
@pytest.mark.usefixtures("turns")
@given(grids())
@settings(max_examples=12)
def test_any_box_under_any_grid_is_what_numpy_slices(
    tmp_path_factory: pytest.TempPathFactory, name: str, case: tuple[tuple[int, ...], tuple[int, ...], Box]
) -> None:
    shape, grid, box = case
    spec = ArraySpec("model/w", "int32", shape, grid)
    value = torch.arange(math.prod(shape), dtype=torch.int32).reshape(shape)
    saved = save(made(name), tmp_path_factory.mktemp("grid"), {spec: value})
    assert torch.equal(read_by_extents(saved, spec, box), value[box.slices])
    first = saved.chunks["model/w", 0]
    assert chunk_box(shape, grid, 0).shape == grid and first.length == 4 * math.prod(grid)
