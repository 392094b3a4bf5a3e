"""What is special about plain Zarr directories: files by computed path, compressors, metadata as zarr-python has it."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
import zarr

from ckpt.backends.zarr import ZarrBackend
from ckpt.errors import ConfigurationError, CorruptCheckpointError
from ckpt.format.box import whole
from ckpt.format.records import ArraySpec
from ckpt.storage.extents import ExtentReader
from tests.support.arrays import array, save


def test_chunk_files_lie_where_their_number_says(tmp_path: Path) -> None:
    arrays = dict([array("model/w", torch.arange(20.0).reshape(4, 5), 2, 3), array("model/step", torch.tensor(3))])
    saved = save(ZarrBackend(), tmp_path, arrays)
    assert saved.files_found() == {
        "zarr.json", "model/zarr.json", "model/w/zarr.json", "model/step/zarr.json", "model/step/c",
        "model/w/c/0/0", "model/w/c/0/1", "model/w/c/1/0", "model/w/c/1/1",
    }  # fmt: skip
    padded = [3.0, 4.0, 0.0, 8.0, 9.0, 0.0]
    assert (
        torch.frombuffer(bytearray((tmp_path / "model/w/c/0/1").read_bytes()), dtype=torch.float32).tolist() == padded
    )


def test_a_writer_needs_no_metadata_and_makes_its_own_folders(tmp_path: Path) -> None:
    spec, value = array("model/w", torch.arange(6.0), 3)
    writer = ZarrBackend().writer(tmp_path, 1, lambda num_bytes: None)
    writer.write(spec, 1, value[3:])
    assert list(writer.finish().chunks) == [("model/w", 1)]
    assert not list(tmp_path.rglob("zarr.json"))


def test_metadata_says_little_endian_raw_bytes_and_fill_value_zero(tmp_path: Path) -> None:
    arrays = dict([array("w", torch.ones(3, dtype=torch.bfloat16), 2), array("flag", torch.tensor(True))])
    ZarrBackend().writer(tmp_path, 0, lambda num_bytes: None).describe(list(arrays))
    document = json.loads((tmp_path / "w/zarr.json").read_bytes())
    assert document["codecs"] == [{"name": "bytes", "configuration": {"endian": "little"}}]
    assert document["data_type"] == "bfloat16" and document["fill_value"] == 0
    assert document["chunk_grid"] == {"name": "regular", "configuration": {"chunk_shape": [2]}}
    assert json.loads((tmp_path / "flag/zarr.json").read_bytes())["fill_value"] is False


@pytest.mark.parametrize(
    ("compressors", "complaint"),
    [
        ([{"name": "nope"}], "codec:? 'nope'"),
        ([{"name": "zstd", "configuration": {"level": "high"}}], "expected (an )?int"),
        ([{"configuration": {}}], "does not have a 'name'"),
        (["zstd"], "Expected dict"),
        ([{"name": "transpose", "configuration": {"order": [0]}}], "Invalid codec order"),
    ],
)
def test_a_compressor_that_zarr_does_not_know_is_refused_before_anything_is_saved(
    compressors: list[dict[str, object]], complaint: str
) -> None:
    with pytest.raises(ConfigurationError, match=f"compressors=.*{complaint}"):
        ZarrBackend(compressors=compressors)


def test_compressed_chunks_are_smaller_not_raw_and_checked_by_the_reader(tmp_path: Path) -> None:
    spec, value = array("model/w", torch.arange(1 << 16, dtype=torch.int32) % 7, 1 << 15)
    saved = save(ZarrBackend(compressors=[{"name": "gzip", "configuration": {"level": 1}}]), tmp_path, {spec: value})
    chunk = saved.chunks["model/w", 1]
    assert not chunk.raw and chunk.length < 1 << 15
    with ExtentReader(tmp_path) as reader:
        reader.check(chunk, "model: w")
        data = bytearray((tmp_path / chunk.file).read_bytes())
        data[-1] ^= 1
        (tmp_path / chunk.file).write_bytes(data)
        with pytest.raises(CorruptCheckpointError, match="model: w: bytes 0 to .*model/w/c/1"):
            reader.check(chunk, "model: w")
    assert zarr.open_array(tmp_path / "model/w", mode="r")[:5].tolist() == [0, 1, 2, 3, 4]


def test_the_metadata_of_500_arrays_is_written_in_a_moment(tmp_path: Path) -> None:
    arrays = [ArraySpec(f"model/layer.{number}.weight", "float32", (number + 1, 64), (1, 64)) for number in range(500)]
    started = time.perf_counter()
    writer = ZarrBackend().writer(tmp_path, 0, lambda num_bytes: None)
    writer.describe(arrays, ["model"])
    writer.make_durable()
    assert time.perf_counter() - started < 5  # some 0.1 s on two idle cores


def test_a_group_without_metadata_hides_no_array(tmp_path: Path) -> None:
    spec, value = array("model/rank-00001/w", torch.arange(6.0), 3)
    backend = ZarrBackend()
    save(backend, tmp_path, {spec: value})
    (tmp_path / "model/rank-00001/zarr.json").unlink()
    out = torch.zeros(6)
    backend.read(tmp_path, spec, whole((6,)), out)
    assert torch.equal(out, value)
