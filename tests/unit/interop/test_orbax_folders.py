"""Checkpoints that Orbax wrote (tests/golden/orbax) are loaded to the bit; damaged and hostile ones are refused."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ckpt
from ckpt import Checkpointer
from ckpt.backends.ocdbt_format import Node, Value, _interior, manifest_of, tree_of
from ckpt.errors import CheckpointNotFoundError, ConfigurationError, CorruptCheckpointError, MissingStateError
from ckpt.ranks.topology import Topology
from tests.support.bounded import BOMBS, little_memory, zstd_frame
from tests.support.covering import sampled
from tests.support.ranks import run_ranks
from tests.support.states import ALL_DTYPES, same_bits

GOLDEN = Path(__file__).parents[2] / "golden" / "orbax"
WITH_TYPES = ("manager/7", "zarr2")
ALL = (*WITH_TYPES, "ocdbt-zarr2", "zarr3")


LATER_DTYPES = {
    torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2, torch.complex32,
}  # fmt: skip
"""Of which the golden files have none."""


def numbers(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """The values of tests/golden/orbax/write.py."""
    size = torch.Size(shape).numel() * dtype.itemsize
    data = ((torch.arange(size) + seed) * 2654435761 >> 15 & (1 if dtype is torch.bool else 255)).to(torch.uint8)
    return data.view(dtype).reshape(shape)


def written(name: str) -> dict[str, Any]:
    types = {
        str(dtype).removeprefix("torch."): numbers((4, 3), dtype, 5)
        for dtype in ALL_DTYPES
        if dtype not in LATER_DTYPES
    }
    return {
        "model": {"0.weight": numbers((8, 6), torch.int32, 1).float(), "0.bias": numbers((8,), torch.int8, 2).float()},
        "params": {"dense": {"kernel": numbers((48, 40), torch.int16, 3), "b/é": numbers((4,), torch.bfloat16, 4)}},
        "types": types if name in WITH_TYPES else {},
        "opt": [
            {"count": numbers((), torch.int32, 6), "mu": {"w": numbers((4, 2), torch.float32, 7)}}, None, (), [1, 2.5],
        ],
        "host": {"a": numbers((5,), torch.int64, 8), "zero_dim": torch.tensor(-5, dtype=torch.int8), "number": torch.tensor(0.1).item()},
        "step": 7, "lr": 0.1, "flag": True, "large": 1 << 40, "text": 'a "ü"', "note/x": "y", "none": None, "dict": {}, "list": [],
    }  # fmt: skip


def require_same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert same_bits(found, expected)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, one in expected.items():
            require_same(found[key], one)
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for left, right in zip(found, expected, strict=True):
            require_same(left, right)
    else:
        assert found == expected


@pytest.mark.parametrize("name", ALL)
def test_a_tree_that_orbax_saved_comes_back_as_it_was(name: str) -> None:
    require_same(ckpt.load(GOLDEN / name), written(name))


def _load_rows_and_columns(topology: Topology) -> None:
    mesh = init_device_mesh("cpu", (topology.world_size,))
    for name, load, dim in (("manager/7", "direct", 1), ("manager/7", "two-stage", 0), ("zarr2", "two-stage", 1)):
        into = {"params": written(name)["params"]}
        kernel = into["params"]["dense"]["kernel"]
        empty = torch.full_like(kernel, -1)
        into["params"]["dense"]["kernel"] = distribute_tensor(empty, mesh, [Shard(dim)], src_data_rank=None)
        ckpt.load(GOLDEN / name, into, load=load, strict=False)
        expected = distribute_tensor(kernel, mesh, [Shard(dim)], src_data_rank=None)
        assert torch.equal(into["params"]["dense"]["kernel"].to_local(), expected.to_local()), (name, load, dim)


def test_what_orbax_saved_on_four_devices_loads_on_three_ranks() -> None:
    run_ranks(3, _load_rows_and_columns, process_group=True)


@pytest.mark.parametrize("path", ["manager/7", "manager/7/default"])
def test_a_checkpointer_finds_the_model_and_the_step(tmp_path: Path, path: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(6, 8))
    with Checkpointer(tmp_path, model=model, save_rng=False) as checkpoints:
        assert checkpoints.restore(GOLDEN / path, strict=False) == 7
    require_same(dict(model.state_dict()), dict(reversed(written(path)["model"].items())))


def test_a_step_with_several_items_asks_for_one_of_them(tmp_path: Path) -> None:
    step = tmp_path / "7"
    shutil.copytree(GOLDEN / "manager/7", step)
    shutil.copytree(step / "default", step / "ema")
    with pytest.raises(ConfigurationError, match="7 holds 2 items of Orbax: default, ema. Name one of these folders"):
        ckpt.load(step)
    require_same(ckpt.load(step / "ema"), written("manager/7"))


def test_a_save_that_orbax_has_not_finished_is_no_checkpoint(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "zarr3", tmp_path / "7" / "default.orbax-checkpoint-tmp")
    with pytest.raises(CheckpointNotFoundError, match="a save of Orbax that was not finished"):
        ckpt.load(tmp_path / "7" / "default.orbax-checkpoint-tmp")
    with pytest.raises(CheckpointNotFoundError, match="7 is not a checkpoint"):
        ckpt.load(tmp_path / "7")


def _json(file: str, change: Callable[[Any], object]) -> Callable[[Path], None]:
    def craft(folder: Path) -> None:
        document = json.loads((folder / file).read_text())
        change(document)
        (folder / file).write_text(json.dumps(document))

    return craft


def _leaf(keys: list[tuple[Any, Any]], kind: Any = "jax.Array") -> dict[str, Any]:
    return {
        "key_metadata": [{"key": key, "key_type": key_type} for key, key_type in keys],
        "value_metadata": {"value_type": kind, "skip_deserialize": False},
    }


def _with_leaf(keys: list[tuple[Any, Any]], kind: Any = "jax.Array") -> Callable[[Path], None]:
    return _json("_METADATA", lambda tree: tree["tree_metadata"].update(new=_leaf(keys, kind)))


def _alone(keys: list[tuple[Any, Any]], kind: Any = "jax.Array") -> Callable[[Path], None]:
    return _json("_METADATA", lambda tree: tree.update(tree_metadata={"new": _leaf(keys, kind)}))


def _linked(path: str) -> Callable[[Path], None]:
    def craft(folder: Path) -> None:
        (folder / path).rename(folder.parent / "elsewhere")
        (folder / path).symlink_to(folder.parent / "elsewhere")

    return craft


def _cut(path: str, size: int) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / path, size)


def _described(name: str, **changes: Any) -> Callable[[Path], None]:
    return _json(f"{name}/.zarray", lambda document: document.update(changes))


KERNEL = "params.dense.kernel"
ON_FOLDERS: dict[str, Callable[[Path], object]] = {
    "no JSON": lambda folder: (folder / "_METADATA").write_text("{"),
    "a tree that is a list": _json("_METADATA", lambda tree: tree.update(tree_metadata=[])),
    "a path that leads out": _alone([("../secret", 2)]),
    "an absolute path": _alone([("/etc", 2)]),
    "a name that is no text": _alone([("\ud800", 2)]),
    "an unknown type of key": _alone([("step", 3)]),
    "a position that is no number": _with_leaf([("opt", 2), ("x", 1)]),
    "a position far out": _with_leaf([("opt", 2), ("999999999", 1)]),
    "a name in a list": _with_leaf([("opt", 2), ("x", 2)]),
    "a leaf below a leaf": _with_leaf([("step", 2), ("x", 2)]),
    "the same leaf twice": _with_leaf([("step", 2)]),
    "two leaves of one name": _with_leaf([("host.a", 2)]),
    "a thousand steps": _with_leaf([("x", 2)] * 1000, "None"),
    "an array that is not there": _with_leaf([("nowhere", 2)]),
    "a number with a shape": _alone([(KERNEL, 2)], "scalar"),
    "a string that is not there": _with_leaf([("nowhere", 2)], "string"),
    "no strings": lambda folder: (folder / "_strings.json").unlink(),
    "a string that is a number": _json("_strings.json", lambda strings: strings.update(text=7)),
    "a shape that nothing fills": _described(KERNEL, shape=[1 << 60, 1 << 60]),
    "a chunk that its bytes cannot fill": _described(KERNEL, shape=[1 << 20, 1 << 20], chunks=[1 << 20, 1 << 20]),
    "a chunk of no elements": _described(KERNEL, chunks=[0, 40]),
    "chunks of another rank": _described(KERNEL, chunks=[48]),
    "more rows than there are": _described(KERNEL, shape=[96, 40]),
    "a shape that no tensor has": _described(KERNEL, shape=[0, 1 << 62, 1 << 62], chunks=[1, 1, 1]),
    "fewer elements in a chunk": _described(KERNEL, chunks=[48, 39], shape=[48, 39]),
    "another type": _described(KERNEL, dtype="<i8"),
    "a format that it is not": _described(KERNEL, zarr_format=3),
    "a missing chunk": lambda folder: (folder / KERNEL / "0.0").unlink(),
    "a chunk that was cut off": _cut(f"{KERNEL}/0.0", 500),
    "an empty chunk": _cut(f"{KERNEL}/0.0", 0),
    "a chunk that is a link": _linked(f"{KERNEL}/0.0"),
    "an array that is a link": _linked(KERNEL),
    "metadata that are a link": _linked("_METADATA"),
}


@pytest.mark.parametrize("craft", ON_FOLDERS)
def test_a_hostile_checkpoint_of_folders_is_refused(tmp_path: Path, craft: str) -> None:
    folder = tmp_path / "saved"
    shutil.copytree(GOLDEN / "zarr2", folder)
    shutil.copytree(folder / KERNEL, tmp_path / "secret")
    ON_FOLDERS[craft](folder)
    with pytest.raises(CorruptCheckpointError, match="saved|opt|host"):
        ckpt.load(folder)


@pytest.mark.parametrize(
    ("craft", "message"),
    [
        (_alone([]), "only dicts are read here"),
        (_alone([("0", 1)]), "only dicts are read here"),
    ],
)
def test_what_is_not_read_is_refused_by_name(tmp_path: Path, craft: Callable[[Path], None], message: str) -> None:
    shutil.copytree(GOLDEN / "zarr2", tmp_path / "saved")
    craft(tmp_path / "saved")
    with pytest.raises(ConfigurationError, match=message):
        ckpt.load(tmp_path / "saved")


@pytest.mark.parametrize(
    ("craft", "message"),
    [
        (_described(KERNEL, dtype="<f99"), r"params\.dense\.kernel \(.*is of <f99, a data type that is not read here"),
        (_described(KERNEL, dtype="int4"), r"params\.dense\.kernel \(.*is of int4, a data type that is not read here"),
        (_described(KERNEL, compressor={"id": "blosc"}), r"codecs \['blosc'\], which are not decoded here"),
        (_with_leaf([("x", 2)], "MyHandler"), r"x \(is of the type 'MyHandler'"),
    ],
)
def test_an_array_that_is_not_read_is_refused_alone(
    tmp_path: Path, craft: Callable[[Path], None], message: str
) -> None:
    shutil.copytree(GOLDEN / "zarr2", tmp_path / "saved")
    whole = ckpt.load(tmp_path / "saved")
    craft(tmp_path / "saved")
    with pytest.raises(MissingStateError, match=message):
        ckpt.load(tmp_path / "saved")
    found = ckpt.load(tmp_path / "saved", strict=False)
    assert found.keys() == whole.keys() and torch.equal(found["model"]["0.weight"], whole["model"]["0.weight"])


def test_bytes_that_are_compressed_twice_are_not_decoded(tmp_path: Path) -> None:
    """Each compression multiplies the memory that a byte of a chunk can ask for."""
    shutil.copytree(GOLDEN / "zarr3", tmp_path / "saved")
    zstd = {"name": "zstd", "configuration": {"level": 0}}
    _json("model.0.weight/zarr.json", lambda document: document["codecs"].append(zstd))(tmp_path / "saved")
    with pytest.raises(MissingStateError, match="compresses bytes more than once"):
        ckpt.load(tmp_path / "saved")


def _shard(index_first: bool) -> Callable[[bytes], bytes]:
    def make(chunk: bytes) -> bytes:
        index = (16 * index_first).to_bytes(8, "little") + len(chunk).to_bytes(8, "little")
        return index + chunk if index_first else chunk + index

    return make


@sampled("form", ["zarr2", "zarr3", "index at the start"])
@pytest.mark.parametrize("bomb", [name for name in BOMBS if name.startswith("zstd")])
def test_a_chunk_is_not_decoded_that_would_be_far_longer_than_it_should(tmp_path: Path, form: str, bomb: str) -> None:
    name, make = ("params.dense.kernel", BOMBS[bomb][1])
    shutil.copytree(GOLDEN / ("zarr2" if form == "zarr2" else "zarr3"), tmp_path / "saved")
    if form == "zarr2":
        file, pack = tmp_path / "saved" / name / "0.0", lambda chunk: chunk
    else:
        file, pack = tmp_path / "saved" / name / "c/0/0", _shard(form != "zarr3")

        def change(document: dict[str, Any]) -> None:
            configuration = document["codecs"][0]["configuration"]
            configuration["index_codecs"] = configuration["index_codecs"][:1]  # no checksum, which would tell
            configuration["index_location"] = "end" if form == "zarr3" else "start"

        _json(f"{name}/zarr.json", change)(tmp_path / "saved")
    size = written("zarr2" if form == "zarr2" else "zarr3")["params"]["dense"]["kernel"].nbytes
    file.write_bytes(pack(zstd_frame(size, size)))
    assert not ckpt.load(tmp_path / "saved")["params"]["dense"]["kernel"].any()
    file.write_bytes(pack(make(size, 256 << 20)))
    with little_memory(128), suppress(CorruptCheckpointError):  # or nothing behind the chunk is looked at
        assert not ckpt.load(tmp_path / "saved")["params"]["dense"]["kernel"].any()


def test_a_chunk_that_an_older_orbax_left_out_is_not_taken_for_zeros(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "zarr2", tmp_path / "saved")
    _json("_METADATA", lambda tree: tree.pop("store_array_data_equal_to_fill_value"))(tmp_path / "saved")
    require_same(ckpt.load(tmp_path / "saved"), written("zarr2"))
    (tmp_path / "saved" / KERNEL / "0.0").unlink()
    with pytest.raises(CorruptCheckpointError, match="left chunks of zeros out"):
        ckpt.load(tmp_path / "saved")


def _database(
    *values: Value, inside: Callable[[Node, int], tuple[Node, bytes]] | None = None
) -> Callable[[Path], None]:
    """Replace the database by one with these values."""

    def craft(folder: Path) -> None:
        nodes, root = tree_of(values, "d/nodes", 0)
        if inside is not None:
            root, node = inside(root, len(nodes[0]))
            nodes.append(node)
        (folder / "d").mkdir(exist_ok=True)
        (folder / "d" / "nodes").write_bytes(b"".join(nodes))
        (folder / "manifest.ocdbt").write_bytes(manifest_of(root, "d/nodes", bytes(16), 0))

    return craft


def _twice(leaf: Node, at: int) -> tuple[Node, bytes]:
    return _interior([leaf, replace(leaf, key=b"y")], "d/nodes", at, is_root=True)


def _in_a_circle(leaf: Node, at: int) -> tuple[Node, bytes]:
    child = leaf
    for _ in range(5):  # until its own length, which is in it, stands still
        node, data = _interior([child], "d/nodes", at, is_root=True)
        child = Node(leaf.key, 0, 0, at, len(data), 1, len(data), 0)
    return node, data


def _file_of_chunks(folder: Path) -> Path:
    return max((folder / "ocdbt.process_0" / "d").iterdir(), key=lambda file: file.stat().st_size)


def _root_of_the_tree(folder: Path) -> Path:
    (file,) = (folder / "d").iterdir()
    return file


def _flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


ON_DATABASE: dict[str, Callable[[Path], object]] = {
    "no manifest": lambda folder: (folder / "manifest.ocdbt").unlink(),
    "a manifest of garbage": lambda folder: (folder / "manifest.ocdbt").write_bytes(b"garbage"),
    "an empty manifest": _cut("manifest.ocdbt", 0),
    "a manifest that is a link": _linked("manifest.ocdbt"),
    "a flipped bit in the manifest": lambda folder: _flip(folder / "manifest.ocdbt", 40),
    "a flipped bit in the tree": lambda folder: _flip(_root_of_the_tree(folder), 40),
    "a tree that was cut off": lambda folder: os.truncate(_root_of_the_tree(folder), 100),
    "no tree": lambda folder: _root_of_the_tree(folder).unlink(),
    "chunks that were cut off": lambda folder: os.truncate(_file_of_chunks(folder), 1000),
    "no file of chunks": lambda folder: _file_of_chunks(folder).unlink(),
    "chunks behind a link": lambda folder: _linked(f"ocdbt.process_0/d/{_file_of_chunks(folder).name}")(folder),
    "no values": _database(Value(b"x", "d/nodes", 0, 1)),
    "a document outside": _database(Value(b"flag/.zarray", "../secret/.zarray", 0, 10)),
    "a document far out": _database(Value(b"flag/.zarray", "_METADATA", (1 << 62) - 1, 1 << 62)),
    "a document that is none": _database(Value(b"flag/.zarray", "_METADATA", 0, 100)),
    "a node twice": _database(Value(b"x", "d/nodes", 0, 1), inside=_twice),
    "a tree in a circle": _database(Value(b"x", "d/nodes", 0, 1), inside=_in_a_circle),
    "arrays in folders": _json("_METADATA", lambda tree: tree.update(use_ocdbt=False)),
    "another version of zarr": _json("_METADATA", lambda tree: tree.update(use_zarr3=True)),
}


@pytest.mark.parametrize("craft", ON_DATABASE)
def test_a_hostile_checkpoint_of_a_database_is_refused(tmp_path: Path, craft: str) -> None:
    folder = tmp_path / "saved"
    shutil.copytree(GOLDEN / "ocdbt-zarr2", folder)
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / ".zarray").write_text((GOLDEN / "zarr2" / "host.a" / ".zarray").read_text())
    ON_DATABASE[craft](folder)
    with pytest.raises(CorruptCheckpointError, match=re.escape(str(folder)) + "|is not a path inside|was cut off"):
        ckpt.load(folder)
