"""Checkpoints that Megatron-Core's zarr strategy wrote: real ones, read to the bit, and others, damaged or unusual.

S1.80: what upstream can no longer read. The real ones, and what is in them, are in tests/golden/megatron.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import pickle
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts
import torch
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckpt.errors import (
    CheckpointNotFoundError,
    ConfigurationError,
    CorruptCheckpointError,
    MissingStateError,
    StorageError,
)
from ckpt.format import zarr_dtypes
from ckpt.format.box import Box, whole
from ckpt.format.dtypes import AS_INTEGERS, torch_dtype, zarr_name
from ckpt.format.unknown import UnknownObject
from ckpt.interop.megatron.layout import is_megatron_zarr, layout_of
from ckpt.interop.megatron.zarr import (
    MegatronZarr,
    load_megatron_common,
    load_megatron_object,
    megatron_objects,
)
from tests.golden.megatron.truth import truth
from tests.support.bounded import BOMBS, little_memory
from tests.support.covering import sampled
from tests.support.states import ALL_DTYPES, global_index, random_bits, same_bits
from tests.support.values import same_values

GOLDEN = ("tp2", "dp2", "tp2-dp2", "zero-dim", "old-names")
LIBRARIES = ("zarr", "tensorstore")


def read(stored: MegatronZarr, key: str, box: Box | None = None) -> torch.Tensor:
    array = stored.arrays[key]
    wanted = box or whole(array.shape)
    out = torch.empty(wanted.shape, dtype=torch_dtype(array.dtype))
    stored.read(key, wanted, out)
    return out


def put_together(stored: MegatronZarr, key: str) -> torch.Tensor:
    """A tensor out of its mapped chunks, which are on record as meeting every element once."""
    array = stored.arrays[key]
    out = torch.zeros(array.shape, dtype=torch_dtype(array.dtype))
    times = torch.zeros(array.shape, dtype=torch.int64)
    for box, values in stored.mapped(key):
        out[box.slices] = values
        times[box.slices] += 1
    assert torch.all(times == 1)
    return out


def folder_with(path: Path, **metadata: Any) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "metadata.json").write_text(
        json.dumps({"sharded_backend": "zarr", "sharded_backend_version": 1} | metadata)
    )
    return path


def written(path: Path, values: torch.Tensor, chunks: tuple[int, ...], **options: Any) -> Path:
    """A checkpoint with one tensor `w`, as zarr-python writes Zarr v2: raw unless options say otherwise."""
    zarr_dtypes.register()
    folder_with(path)
    bits = values.numpy() if values.dtype is not torch.bfloat16 else values.view(torch.int16).numpy().view("bfloat16")
    given = {"compressors": None, "fill_value": None, "dtype": bits.dtype} | options
    array = zarr.create_array(path / "w", shape=bits.shape, chunks=chunks, zarr_format=2, **given)
    array = array.with_config({"write_empty_chunks": True})
    array[...] = bits
    return path


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("name", GOLDEN)
def test_every_tensor_that_megatron_core_saved_is_read_to_the_bit(name: str, library: Any) -> None:
    """S1.80: keys, data types, shapes, chunks and bits, through both libraries and as mapped files."""
    expected = truth(name)
    assert is_megatron_zarr(expected.path)
    stored = MegatronZarr(expected.path, library)
    assert stored.arrays.keys() == expected.tensors.keys()
    assert (stored.layout.others, stored.layout.headless) == ([], [])
    for key, tensor in expected.tensors.items():
        array = stored.arrays[key]
        assert (array.key, array.dtype, array.shape) == (key, zarr_name(tensor.dtype), tuple(tensor.shape))
        assert array.grid == expected.chunks[key]
        assert same_bits(read(stored, key), tensor), key
        assert same_bits(put_together(stored, key), tensor), key


@pytest.mark.parametrize("library", LIBRARIES)
def test_any_box_of_a_tensor_is_read(library: Any) -> None:
    expected = truth("tp2")
    stored = MegatronZarr(expected.path, library)

    @settings(max_examples=40, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def check(data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(expected.tensors)))
        tensor = expected.tensors[key]
        sides = [data.draw(st.tuples(st.integers(0, side), st.integers(0, side)).map(sorted)) for side in tensor.shape]
        box = Box(tuple(start for start, _ in sides), tuple(stop - start for start, stop in sides))
        assert same_bits(read(stored, key, box), tensor[box.slices].contiguous())

    check()


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_box_is_read_into_memory_of_any_strides(library: Any) -> None:
    expected = truth("tp2")
    stored = MegatronZarr(expected.path, library)
    for key in ("types.bool", "bits.bfloat16", "types.complex128"):
        tensor = expected.tensors[key]
        memory = torch.zeros((tensor.shape[1], 2, tensor.shape[0]), dtype=tensor.dtype)
        out = memory[:, 1].T
        stored.read(key, whole(tuple(tensor.shape)), out)
        assert same_bits(out, tensor)
        assert not memory[:, 0].any()


@pytest.mark.parametrize("name", GOLDEN)
def test_every_object_that_megatron_core_saved_is_read(name: str) -> None:
    """S1.63, S1.76: by unique key; files of old versions, whose names lack the last number of the shape, too."""
    expected = truth(name)
    found = megatron_objects(expected.path)
    assert found.keys() == expected.objects.keys()
    for key, value in expected.objects.items():
        assert found[key].unique_key == key and found[key].data is None
        assert same_values(load_megatron_object(expected.path, key, allow_pickle=True), value), key


@pytest.mark.parametrize("name", ["tp2", "dp2", "zero-dim", "old-names"])
def test_the_common_state_that_megatron_core_saved_is_read(name: str) -> None:
    """S1.76: namespaces, torch's data types, tensors, numbers beyond 64 bits."""
    expected = truth(name)
    assert same_values(load_megatron_common(expected.path, allow_pickle=True), expected.common)


def test_an_enum_of_megatrons_own_is_refused_by_name_or_kept_as_what_it_is_called() -> None:
    expected = truth("tp2-dp2")
    with pytest.raises(
        ConfigurationError,
        match=r"common\.pt holds .*: args\.model_type: megatron\.core\.enums\.ModelType\. Allow a class",
    ):
        load_megatron_common(expected.path, allow_pickle=True)
    common = load_megatron_common(expected.path, allow_pickle=True, unknown="keep")
    kind, member = vars(common["args"]).pop("model_type"), vars(expected.common["args"]).pop("model_type")
    assert isinstance(kind, UnknownObject) and (kind.name, kind.args) == (member.type, (member.value,))
    assert same_values(common, expected.common)


def test_nothing_pickled_is_read_unless_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("something was unpickled")

    monkeypatch.setattr(torch, "load", never)
    path = truth("tp2").path
    says = r" is a pickle, which is read only where that is asked for: load with allow_pickle=True\. Then"
    with pytest.raises(ConfigurationError, match=rf"common\.pt{says}"):
        load_megatron_common(path, allow_pickle=False)
    with pytest.raises(ConfigurationError, match=rf"shard_0\.1_1\.2\.pt{says}"):
        load_megatron_object(path, "rng_state/shard_0.1_1.2", allow_pickle=False)
    assert len(MegatronZarr(path).arrays) == 22 and len(megatron_objects(path)) == 9


@pytest.mark.parametrize(
    "unique_key", ["rng_state/shard_0.1_1.4", "rng_state/shard_0.2_1.2", "no/shard_0_1", "cube/shard_0_1"]
)
def test_an_object_that_is_not_there_is_said_to_be_missing(unique_key: str, caplog: pytest.LogCaptureFixture) -> None:
    """S1.63: the short name of an old file is not taken for that of an object of another shape."""
    path = truth("old-names").path
    with (
        caplog.at_level(logging.DEBUG, "ckpt"),
        pytest.raises(MissingStateError, match=f"object {unique_key} is not in "),
    ):
        load_megatron_object(path, unique_key, allow_pickle=True)
    listed = {"rng_state": "shard_0.1_1.pt", "no": "common.pt", "cube": "shard_0.0.2_1.1.pt"}[
        unique_key.partition("/")[0]
    ]
    assert listed in caplog.text


@pytest.mark.parametrize("content", [None, [1, 2]])
def test_a_common_state_that_is_none_is_refused(
    tmp_path: Path, content: object, caplog: pytest.LogCaptureFixture
) -> None:
    folder_with(tmp_path)
    if content is not None:
        torch.save(content, tmp_path / "common.pt")
        with pytest.raises(ConfigurationError, match=r"common\.pt holds a list, where a state dict should be"):
            load_megatron_common(tmp_path, allow_pickle=True)
        return
    with (
        caplog.at_level(logging.DEBUG, "ckpt"),
        pytest.raises(CorruptCheckpointError, match=r"common\.pt does not exist"),
    ):
        load_megatron_common(tmp_path, allow_pickle=True)
    assert "metadata.json" in caplog.text


@pytest.mark.parametrize("library", LIBRARIES)
def test_an_array_that_is_not_there_is_said_to_be_missing(library: Any, caplog: pytest.LogCaptureFixture) -> None:
    """S1.32: the error names it, and the debug log lists the folder."""
    stored = MegatronZarr(truth("tp2").path, library)
    with caplog.at_level(logging.DEBUG, "ckpt"):
        with pytest.raises(
            MissingStateError,
            match=r"array model\.wte is not in .*tp2: there is no .*model\.wte/\.zarray\. .* 22 others",
        ):
            stored.read("model.wte", Box((0,), (1,)), torch.empty(1))
        with pytest.raises(MissingStateError, match="array rng_state is not in"):
            stored.mapped("rng_state")
    assert "types.bool" in caplog.text


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("fill_value", [None, 0])
@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "longer"])
def test_a_damaged_chunk_is_named_and_never_read_as_zeros(
    tmp_path: Path, damage: str, fill_value: object, library: Any
) -> None:
    values = global_index((5, 7))
    written(tmp_path, values, (2, 3), fill_value=fill_value)
    file = tmp_path / "w" / "1.2"
    content = file.read_bytes()
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes({"empty": b"", "cut": content[:-1], "longer": content + b"\0"}[damage])
    stored = MegatronZarr(tmp_path, library)
    says = (
        r"w: chunk 1\.2 is missing"
        if damage == "missing"
        else r"w: chunk 1\.2 has \d+ bytes, and \[2, 3\] elements of float32 are 24"
    )
    for box in (whole((5, 7)), Box((2, 6), (1, 1))):
        with pytest.raises(CorruptCheckpointError, match=says):
            read(stored, "w", box)
    with pytest.raises(CorruptCheckpointError, match=says):
        stored.mapped("w")
    sound = Box((0, 0), (5, 6))
    assert same_bits(read(stored, "w", sound), values[sound.slices].contiguous())
    assert read(stored, "w", Box((3, 6), (0, 1))).shape == (0, 1), "a box of nothing meets no chunk"


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("damage", ["missing", "cut", "other"])
def test_a_damaged_chunk_that_is_encoded_is_named(tmp_path: Path, damage: str, library: Any) -> None:
    values = random_bits((5, 7), torch.int32, 0)
    spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{folder_with(tmp_path)}/w/"}}
    metadata = {"shape": [5, 7], "chunks": [2, 3], "dtype": "<i4", "compressor": {"id": "zlib", "level": 1}}
    ts.open(spec | {"metadata": metadata}, create=True).result().write(values.numpy()).result()
    stored = MegatronZarr(tmp_path, library)
    assert same_bits(read(stored, "w"), values) and same_bits(put_together(stored, "w"), values)
    file = tmp_path / "w" / "1.2"
    file.unlink() if damage == "missing" else file.write_bytes(
        {"cut": file.read_bytes()[:5], "other": b"zlib?"}[damage]
    )
    says = r"w: chunk 1\.2 is missing" if damage == "missing" else rf"w: {library} cannot read chunk 1\.2 of .*/w: "
    for fresh in (stored, MegatronZarr(tmp_path, library)):
        with pytest.raises(CorruptCheckpointError, match=says):
            read(fresh, "w")


@sampled("library", LIBRARIES)
@pytest.mark.parametrize(
    "bomb", ["zlib, a small stream first", "bz2, a small stream first", "zstd, a small frame first", "blosc"]
)
def test_a_chunk_is_not_decoded_that_would_be_far_longer_than_it_should(
    tmp_path: Path, bomb: str, library: Any
) -> None:
    codec, make = BOMBS[bomb]
    folder = written(tmp_path, torch.zeros(8, 8), (8, 8))
    document = json.loads((folder / "w" / ".zarray").read_bytes())
    (folder / "w" / ".zarray").write_text(json.dumps(document | {"compressor": {"id": codec}}))
    (folder / "w" / "0.0").write_bytes(make(256, 128 << 20))
    with little_memory(64), pytest.raises(CorruptCheckpointError, match=f"w: {library} .* would decode to"):
        read(MegatronZarr(folder, library), "w")


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(
    "options",
    [
        {"order": "F"},
        {"dtype": ">i4"},
        {"chunk_key_encoding": {"name": "v2", "separator": "/"}},
        {"fill_value": 7},
    ],
    ids=["column-major", "big-endian", "chunks in folders", "fill value"],
)
def test_what_other_writers_of_zarr_may_choose_is_understood(
    tmp_path: Path, options: dict[str, Any], library: Any
) -> None:
    values = random_bits((5, 7), torch.int32, 1)
    stored = MegatronZarr(written(tmp_path, values, (2, 3), **options), library)
    for box in (whole((5, 7)), Box((1, 2), (3, 4))):
        assert same_bits(read(stored, "w", box), values[box.slices].contiguous())
    is_raw = "order" not in options and "dtype" not in options
    assert same_bits(put_together(stored, "w"), values) and len(stored.mapped("w")) == (9 if is_raw else 1)


@pytest.mark.parametrize("library", LIBRARIES)
def test_every_data_type_of_both_is_read(tmp_path: Path, library: Any) -> None:
    named = [dtype for dtype in ALL_DTYPES if zarr_name(dtype) not in AS_INTEGERS]
    for dtype, shape in product(named, [(3, 2), (), (0, 4)]):
        name, values = zarr_name(dtype), random_bits(shape, dtype, 2)
        path = folder_with(tmp_path / f"{name} {len(shape)} {values.numel()}")
        spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{path}/w/"}, "dtype": name}
        bits = values.view(torch.uint8).numpy().view(ts.dtype(name).numpy_dtype) if shape else None
        array = ts.open(spec | {"metadata": {"compressor": None}}, create=True, shape=shape).result()
        if shape:
            array.write(bits).result()
        else:
            (path / "w" / "0").write_bytes(bytes(values.reshape(1).view(torch.uint8).tolist()))
        stored = MegatronZarr(path, library)
        assert stored.arrays["w"].dtype == name
        assert same_bits(read(stored, "w"), values)
        assert same_bits(put_together(stored, "w"), values)


def test_large_chunks_are_mapped_and_small_ones_read(tmp_path: Path) -> None:
    """A converter holds all chunks of a checkpoint at once, so a large one may cost no memory."""
    values = global_index((3, 20_000))
    written(tmp_path, values, (2, 20_000))
    stored = MegatronZarr(tmp_path)
    (first_box, first), (second_box, second) = stored.mapped("w")
    assert (first_box, second_box) == (Box((0, 0), (2, 20_000)), Box((2, 0), (1, 20_000)))
    assert same_bits(first, values[:2]) and same_bits(second, values[2:])
    maps = Path("/proc/self/maps").read_text()
    assert all(maps.count(f"{tmp_path}/w/{chunk}\n") == 1 for chunk in ("0.0", "1.0"))
    first.zero_()
    assert same_bits(read(stored, "w"), values), "what is written to a view goes nowhere"
    written(tmp_path / "small", values[:, :50], (1, 50))
    assert len(MegatronZarr(tmp_path / "small").mapped("w")) == 3
    assert f"{tmp_path}/small" not in Path("/proc/self/maps").read_text()


def test_a_file_that_cannot_be_mapped_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    stored = MegatronZarr(written(tmp_path, global_index((40_000,)), (40_000,)))
    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(StorageError, match=r"w/0 cannot be mapped: .*Cannot allocate memory.*vm\.max_map_count"):
        stored.mapped("w")


def test_only_folders_with_array_metadata_are_arrays_and_a_key_is_the_way_to_one(tmp_path: Path) -> None:
    """S1.36: locks, objects and other folders do not count, however deep."""
    folder_with(tmp_path / "a")
    for key in ("w", "x/y/z", "x.sync", "locked", "deep/er.sync"):
        written(tmp_path / "made", global_index((2,)), (2,))
        shutil.move(tmp_path / "made" / "w", tmp_path / "a" / key)
    for path in ("locked.sync/.zarray", "locked.sync/0", "alone.sync/.zarray", "notes/text"):
        (tmp_path / "a" / path).parent.mkdir(exist_ok=True)
        (tmp_path / "a" / path).touch()
    shutil.rmtree(tmp_path / "a" / "alone.sync")
    (tmp_path / "a" / "object").mkdir()
    torch.save(1, tmp_path / "a" / "object" / "shard_0_1.pt")
    found = layout_of(tmp_path / "a")
    assert found.arrays == sorted(["w", "x/y/z", "x.sync", "locked", "deep/er.sync"])
    assert (found.objects, found.headless, found.others) == (["object/shard_0_1.pt"], [], ["notes/text"])
    for key in found.arrays:
        assert same_bits(read(MegatronZarr(tmp_path / "a"), key), global_index((2,)))


@pytest.mark.parametrize("place", ["w", "w/0", "w/.zarray", "w/fifo", "w/above", "common.pt", "o/shard_0_1.pt"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_nothing_outside_of_the_folder_is_read(tmp_path: Path, place: str, library: Any) -> None:
    """S1.36 follows links; here they are refused, as in all other checkpoints."""
    folder, outside = written(tmp_path / "a", global_index((64,)), (64,)), tmp_path / "outside"
    (folder / "o").mkdir()
    for name in ("common.pt", "o/shard_0_1.pt"):
        torch.save({"a": 1}, folder / name)
    if place == "w/fifo":
        (folder / "w" / "0").unlink()
        os.mkfifo(folder / "w" / "0")
    elif place == "w/above":  # the numbers of a chunk, with what stands between them
        (folder / "w").rename(outside)
        written(tmp_path / "a", global_index((8, 8)), (8, 8))
        document = json.loads((folder / "w" / ".zarray").read_bytes()) | {"dimension_separator": "/../../../outside/"}
        (folder / "w" / ".zarray").write_text(json.dumps(document))
        (folder / "w" / "0.0").rename(outside / "0")
        (folder / "w" / "0").mkdir()
    else:
        (folder / place).rename(outside)
        (folder / place).symlink_to(outside)

    def everything() -> None:
        stored = MegatronZarr(folder, library)
        put_together(stored, "w")
        load_megatron_common(folder, allow_pickle=True)
        load_megatron_object(folder, "o/shard_0_1", allow_pickle=True)

    with pytest.raises(
        CorruptCheckpointError, match="symbolic link|not a regular file|not a path inside of|dimension_separator"
    ):
        everything()
    if place.startswith("w/") and place != "w/.zarray":
        with pytest.raises(
            CorruptCheckpointError, match="symbolic link|not a regular file|not a path inside of|dimension_separator"
        ):
            read(MegatronZarr(folder, library), "w")


class _Runs:
    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self._file,)


@pytest.mark.parametrize("place", ["filters", "compressor"])
def test_a_codec_that_runs_what_it_reads_is_refused(tmp_path: Path, place: str) -> None:
    """numcodecs has one, and takes it by its name in the metadata; that zarr-python 3.1 stops at the data type before is luck."""
    folder = written(tmp_path, global_index((4,)), (4,))
    codec = {"id": "pickle", "protocol": 4}
    document = json.loads((folder / "w" / ".zarray").read_bytes())
    document |= {place: [codec] if place == "filters" else codec}
    (folder / "w" / ".zarray").write_text(json.dumps(document))
    (folder / "w" / "0").write_bytes(pickle.dumps(_Runs(tmp_path / "ran")))
    with pytest.raises(CorruptCheckpointError, match="codec 'pickle' is not one of those that are decoded"):
        read(MegatronZarr(folder), "w")
    assert not (tmp_path / "ran").exists()


def test_chunks_whose_metadata_is_missing_are_said_to_be_that(tmp_path: Path) -> None:
    written(tmp_path, global_index((4,)), (2,))
    (tmp_path / "w" / ".zarray").unlink()
    (tmp_path / "w" / ".zattrs").unlink(missing_ok=True)
    stored = MegatronZarr(tmp_path)
    assert stored.arrays == {} and stored.layout.headless == ["w"]
    with pytest.raises(CorruptCheckpointError, match=r"w: .* holds chunks of an array, and its \.zarray is missing"):
        stored.mapped("w")


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        (None, "Expecting value"),
        ([1], "Expected `object`"),
        ({"shape": None}, "Expected `array`, got `null` - at `$.shape`"),
        ({"shape": [2, 2]}, r"shape \[2, 2\] cannot lie in chunks of \[2\]"),
        ({"shape": [1 << 40], "chunks": [1 << 62]}, "cannot lie in chunks"),
        ({"shape": [True]}, "Expected `int`, got `bool`"),
        ({"shape": [float("nan")]}, "NaN is no JSON"),
        ({"chunks": [-1]}, "at `$.chunks"),
        ({"zarr_format": 3}, "at `$.zarr_format`"),
        ({"order": "X"}, "at `$.order`"),
        ({"dimension_separator": "/../"}, "at `$.dimension_separator`"),
        ({"dtype": "<V2"}, "data type '<V2', of which torch has no tensors"),
        ({"dtype": "<f16"}, "data type '<f16'"),
        ({"dtype": [["a", "<f4"]]}, "at `$.dtype`"),
    ],
    ids=str,
)
def test_metadata_of_an_array_that_cannot_be_understood_is_named(tmp_path: Path, changed: Any, says: str) -> None:
    written(tmp_path, global_index((2,)), (2,))
    file = tmp_path / "w" / ".zarray"
    document = json.loads(file.read_bytes()) | changed if isinstance(changed, dict) else changed
    file.write_text("" if document is None else json.dumps(document))
    with pytest.raises(CorruptCheckpointError, match=rf"^w: .*/w/\.zarray .*{says.replace('$', chr(92) + '$')}"):
        MegatronZarr(tmp_path)


def test_a_folder_is_one_of_megatrons_by_its_metadata_alone(tmp_path: Path) -> None:
    folder_with(tmp_path / "one")
    folder_with(tmp_path / "other", sharded_backend="torch_dist")
    folder_with(tmp_path / "ours")
    (tmp_path / "ours" / "checkpoint_manifest.json").touch()
    (tmp_path / "none").mkdir()
    folder_with(tmp_path / "bad")
    (tmp_path / "bad" / "metadata.json").write_text("{")
    assert [is_megatron_zarr(tmp_path / name) for name in ("one", "other", "ours", "none", "nowhere")] == [True] + [
        False
    ] * 4
    with pytest.raises(CorruptCheckpointError, match=r"bad/metadata\.json"):
        is_megatron_zarr(tmp_path / "bad")
    for name in ("other", "ours", "none"):
        with pytest.raises(
            CheckpointNotFoundError, match=f"{name} is no checkpoint that Megatron-Core's zarr strategy wrote"
        ):
            MegatronZarr(tmp_path / name)


def test_a_later_version_and_an_unknown_library_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"is of version 2 of Megatron-Core's zarr format; version 1 is known"):
        MegatronZarr(folder_with(tmp_path, sharded_backend_version=2))
    with pytest.raises(ConfigurationError, match="library 'numpy' is not known; choose zarr or tensorstore"):
        MegatronZarr(truth("tp2").path, "numpy")  # type: ignore[arg-type]


def test_arrays_of_numpy_in_objects_may_be_changed() -> None:
    state = load_megatron_object(truth("tp2").path, "rng_state/shard_0.0_1.2", allow_pickle=True)[0]["np_rng_state"]
    assert isinstance(state[1], np.ndarray) and state[1].flags.writeable
