"""The array backends keep the contract, and each library reads, bit for bit, what the other wrote."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import numpy as np
import pytest
import tensorstore as ts
import torch
import zarr

from ckpt.backends.base import Backend
from ckpt.backends.registry import backend_of_store
from ckpt.backends.tensorstore import TensorStoreBackend
from ckpt.backends.zarr import ZarrBackend
from ckpt.errors import CorruptCheckpointError
from ckpt.format import zarr_dtypes
from ckpt.format.box import whole
from ckpt.format.dtypes import bits_of
from ckpt.format.records import ArraySpec
from tests.support import plain_safetensors
from tests.support.arrays import Saved, array, key_of, save
from tests.support.backend_contract import BackendContract, samples
from tests.support.states import backend_named, random_bits, same_bits

ZSTD = [{"name": "zstd", "configuration": {"level": 1, "checksum": False}}]
EVERY = ("zarr", "ocdbt", "file", "safetensors", "zstd")
IN_FOLDERS = ("zarr", "file", "zstd")


def made(name: str) -> Backend:
    if name == "zstd":
        return ZarrBackend(compressors=ZSTD)
    return backend_named(name)


def plain_zarr(root: Path, spec: ArraySpec) -> np.ndarray:
    zarr_dtypes.register()
    return np.asarray(zarr.open_array(root / spec.path, mode="r")[...])


def plain_tensorstore(kvstore: dict[str, object]) -> np.ndarray:
    return np.asarray(ts.open({"driver": "zarr3", "kvstore": kvstore}).result().read().result())


def equal_bits(values: np.ndarray, tensor: torch.Tensor) -> bool:
    return values.shape == tensor.shape and values.tobytes() == bits_of(tensor).tobytes()


class TestZarr(BackendContract):
    def make(self) -> Backend:
        return ZarrBackend()

    def require_equal_elsewhere(self, root: Path, spec: ArraySpec, value: torch.Tensor) -> None:
        assert equal_bits(plain_zarr(root, spec), value), spec
        assert equal_bits(plain_tensorstore({"driver": "file", "path": f"{root}/{spec.path}/"}), value), spec


class TestZarrCompressed(TestZarr):
    raw = False

    def make(self) -> Backend:
        return ZarrBackend(compressors=ZSTD)


class TestTensorStoreInFiles(TestZarr):
    def make(self) -> Backend:
        return TensorStoreBackend(kvstore="file")


class TestTensorStoreInOcdbt(BackendContract):
    def make(self) -> Backend:
        return TensorStoreBackend()

    def lose(self, saved: Saved, path: str, number: int) -> None:
        database = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{saved.root}/arrays.ocdbt/"}).result()
        database.write(f"{path}/c/{number}", None).result()

    def require_equal_elsewhere(self, root: Path, spec: ArraySpec, value: torch.Tensor) -> None:
        base = {"driver": "ocdbt", "base": f"file://{root}/arrays.ocdbt/", "path": f"{spec.path}/"}
        assert equal_bits(plain_tensorstore(base), value), spec


class TestKimiEngine(BackendContract):
    def make(self) -> Backend:
        return backend_named("safetensors")

    def require_equal_elsewhere(self, root: Path, spec: ArraySpec, value: torch.Tensor) -> None:
        read = plain_safetensors.read(root / spec.path.rpartition("/")[0], key_of(spec.path))
        assert equal_bits(bits_of(read), value), spec


@pytest.mark.parametrize("name", EVERY)
def test_the_backend_that_a_load_finds_by_the_store_reads_what_any_wrote(tmp_path: Path, name: str) -> None:
    spec, value = array("model/w", random_bits((6, 5), torch.float8_e5m2, 0), 4, 5)
    save(made(name), tmp_path, {spec: value})
    out = torch.zeros(6, 5, dtype=torch.float8_e5m2)
    backend_of_store(made(name).store).read(tmp_path, spec, whole((6, 5)), out)
    assert same_bits(out, value)


@pytest.mark.parametrize("name", IN_FOLDERS)
def test_metadata_that_is_cut_off_is_refused(tmp_path: Path, name: str) -> None:
    spec, value = array("model/w", torch.arange(10.0), 5)
    backend = made(name)
    save(backend, tmp_path, {spec: value})
    os.truncate(tmp_path / "model/w/zarr.json", 20)
    with pytest.raises(CorruptCheckpointError, match="model/w"):
        backend.read(tmp_path, spec, whole((10,)), torch.zeros(10))


def test_a_compressed_chunk_that_cannot_be_decoded_is_refused(tmp_path: Path) -> None:
    spec, value = array("model/w", torch.arange(10.0), 5)
    save(made("zstd"), tmp_path, {spec: value})
    (tmp_path / "model/w/c/0").write_bytes(b"not zstd")
    with pytest.raises(CorruptCheckpointError, match="model/w/c/0 cannot be decoded"):
        made("zstd").read(tmp_path, spec, whole((10,)), torch.zeros(10))


def test_arrays_in_a_database_are_listed_as_they_were_saved_and_removed_by_path(tmp_path: Path) -> None:
    arrays = samples(torch.complex64) | dict([array("optimizer/rank-00001/w%2Fx", torch.arange(6), 4)])
    backend = TensorStoreBackend()
    save(backend, tmp_path, arrays)
    assert backend.list_arrays(tmp_path) == {spec.path: spec for spec in arrays}
    gone = [spec.path for spec in arrays if spec.path.startswith("model/")]
    backend.remove(tmp_path, gone[1:])
    assert set(backend.list_arrays(tmp_path)) == {gone[0], "optimizer/rank-00001/w%2Fx"}
    backend.remove(tmp_path, [*gone, "optimizer/rank-00001/w", "optimizer/rank", "model/nowhere"])
    assert list(backend.list_arrays(tmp_path)) == ["optimizer/rank-00001/w%2Fx"]
    last = next(spec for spec in arrays if spec.path.startswith("optimizer"))
    out = torch.zeros(6, dtype=torch.int64)
    backend.read(tmp_path, last, whole((6,)), out)
    assert out.tolist() == [0, 1, 2, 3, 4, 5]


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
