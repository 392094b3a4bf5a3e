"""Checkpoints that lie, signed anew: every reader says so in one sentence, and `resume=latest` goes on from an older one.

Each row below changes one thing in a real checkpoint. Its digests fit, so nothing but what it says is wrong.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckpt import StateComponent
from ckpt.backends.zarr import ZarrBackend
from ckpt.catalog.verify import verify_checkpoint
from ckpt.cli.reading import InspectKeys, ReadingKeys, show, verify
from ckpt.dist_checkpointing import ShardedTensor
from ckpt.errors import CheckpointError, ConfigurationError, CorruptCheckpointError
from ckpt.interop.rewriting import rewrite
from ckpt.memory.device import Device
from ckpt.ranks.topology import Topology
from ckpt.state.statefuls import RNGState
from ckpt.storage.stored import read_index, read_manifest
from tests.support.bounded import ZSTD_SKIPPED, little_memory, zstd_frame
from tests.support.crafts import (
    MANIFEST,
    Tree,
    edit_index,
    edit_json,
    edit_manifest,
    index_tree,
    manifest_tree,
    put,
    resign,
    spoil,
    write_listed,
    write_manifest,
)
from tests.support.ranks import run_threads
from tests.support.states import Held, coordinator

BIG = 40_000
PLAIN = "model/plain.json"
Change = Callable[[Tree], object]


def components() -> list[StateComponent]:
    """An array of its own in two chunks, two packed ones, a tied one, plain values, and random generators."""
    big = torch.arange(BIG, dtype=torch.float32).reshape(200, 200)
    state = {"big": big, "tied": big, "a": torch.arange(5), "b": torch.arange(5, 12), "step": 7, "lr": (0.5, [1])}
    device = Device(type="cpu", collectives="gloo")
    return [StateComponent("model", Held(state), "replicated"), StateComponent("rng", RNGState(device), "per_rank")]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints, the same but for their names."""
    made = tmp_path_factory.mktemp("crafts")
    run = coordinator(Topology.alone(), made, components(), config_text="a: 1\n")
    for checkpoint_id in ("1", "2"):
        run.save_checkpoint(checkpoint_id=checkpoint_id)
    return made


@pytest.fixture
def copied(root: Path, tmp_path: Path) -> Path:
    return shutil.copytree(root, tmp_path / "root", copy_function=os.link)  # what is changed is written anew


def load_newest(root: Path) -> str:
    run = coordinator(Topology.alone(), root, components())
    run.load_checkpoint()
    assert run.last_load is not None
    return Path(run.last_load.path).name


def load(checkpoint: Path) -> None:
    coordinator(Topology.alone(), checkpoint.parent, components()).load_checkpoint(checkpoint)


def set_at(*way: Any, to: Any) -> Change:
    """Put a value into a tree."""

    def change(tree: Tree) -> None:
        here: Any = tree
        for step in way[:-1]:
            here = here[step]
        here[way[-1]] = to

    return change


def array(**values: Any) -> Change:
    return lambda tree: tree["arrays"]["model/big"].update(values)


def packed(name: str, **values: Any) -> Change:
    return lambda tree: tree["arrays"][f"model/{name}"].update(values)


def chunk(position: int, value: Any) -> Change:
    return set_at("chunks", "model/big", 0, position, to=value)


def piece(position: int, value: Any, name: str = "model/b") -> Change:
    return set_at("pieces", name, 0, position, to=value)


def value(plain: Any) -> Callable[[Any], Any]:
    """Plain values in which `step` is something else."""
    return lambda rows: [[row[0], plain] if row[0] == ["step"] else row for row in rows]


IN_MANIFEST: dict[str, Change] = {
    "it lies elsewhere": set_at("checkpoint_path", to="../2"),
    "its config has another hash": set_at("training_args_hash", to="0" * 32),
    "a component is a path": lambda tree: tree["components"].update(
        {"x/y": {**tree["components"]["rng"], "key": "x/y"}}
    ),
    "an array of no component": lambda tree: tree["arrays"].update(
        {"link/big": tree["arrays"]["model/big"] | {"path": "x"}}
    ),
    "world_size is a boolean": set_at("world_size", to=True),
    "world_size is 0": set_at("world_size", to=0),
    "world_size is 10^12": set_at("world_size", to=10**12),
    "world_size is a float": set_at("world_size", to=1.5),
    "no world_size": lambda tree: tree.pop("world_size"),
    "timestamp is none": set_at("timestamp", to="yesterday"),
    "timestamp without zone": set_at("timestamp", to="2026-01-01T00:00:00"),
    "timestamp of the year 1": set_at("timestamp", to="0001-01-01T00:00:00+14:00"),
    "components is a list": set_at("components", to=[]),
    "component of another name": set_at("components", "model", "key", to="other"),
    "unknown pattern": set_at("components", "model", "sharing_pattern", to="telepathic"),
    "per_group of no group": set_at("components", "model", "sharing_pattern", to="per_group"),
    "component of rank 7": set_at("components", "model", "ranks", to=[7]),
    "plain values of rank -1": set_at("components", "model", "plain_in", to={"": -1}),
    "plain values where no rank wrote": set_at("components", "model", "plain_in", to={"x/": 0, "": 0}),
    "plain values that are not said to be there": set_at("components", "rng", "plain_in", to={}),
    "topology of rank 9": set_at("topology", "nodes", to=[[0], [9]]),
    "topology of a rank twice": set_at("topology", "nodes", to=[[0, 0]]),
    "arrays is null": set_at("arrays", to=None),
    "an array is a number": set_at("arrays", "model/big", to=3),
    "dtype unknown": array(dtype="float12"),
    "dtype another": array(dtype="float64"),
    "shape below 0": array(shape=[-200, 200]),
    "shape of 10^18": array(shape=[10**9, 10**9]),
    "shape of 10^40": array(shape=[10**20, 10**20]),
    "shape NaN": array(shape=[float("nan"), 200]),
    "shape of booleans": array(shape=[True, 200]),
    "shape of 10^12 chunks": array(shape=[10**12, 1], grid=[1, 1], writers=[[0, 0, 10**12]]),
    "100 dimensions": array(shape=[1] * 100, grid=[1] * 100, writers=[[0, 0, 1]]),
    "grid of 0": array(grid=[0, 200]),
    "grid of one dimension": array(grid=[200]),
    "writers of no chunk": array(writers=[]),
    "writers of too many": array(writers=[[0, 0, 2]]),
    "writers with a hole": array(writers=[[0, 1, 1]]),
    "writers of a rank without index": array(writers=[[5, 0, 1]]),
    "writers below 0": array(writers=[[0, 0, -1]]),
    "packed and not": array(packed_in=[0]),
    "neither packed nor not": lambda tree: tree["arrays"].update({"model/big": {"dtype": "int8", "shape": [3]}}),
    "packed in rank 3": packed("a", packed_in=[3]),
    "packed in a rank twice": packed("a", packed_in=[0, 0]),
    "packed shape another": packed("a", shape=[6]),
    "packed dtype another": packed("a", dtype="float64"),
    "a tensor that no index has": lambda tree: tree["arrays"].update(
        {"model/c": {"dtype": "int8", "shape": [1], "store": "zarr", "packed_in": [0]}}
    ),
    "alias of itself": packed("tied", alias_of="model/tied"),
    "alias of nothing": packed("tied", alias_of="model/none"),
    "alias of another shape": packed("tied", alias_of="model/a"),
    "two arrays in one place": lambda tree: tree["arrays"].update({"model/more": tree["arrays"]["model/big"]}),
    "file size below 0": set_at("files", "config.yaml", to=[-1, "0" * 32]),
    "file of 200 GB": set_at("files", "config.yaml", to=[200 << 30, "0" * 32]),
    "file digest of capitals": set_at("files", "config.yaml", to=[5, "A" * 32]),
    "file is a number": set_at("files", "config.yaml", to=5),
    "index of rank 10^6": set_at("files", "index-9999999.json", to=[5, "0" * 32]),
    "two indexes of a rank": set_at("files", "index-00000.1.json", to=[5, "0" * 32]),
    "no index": lambda tree: tree["files"].pop("index-00000.json"),
    "format version is text": set_at("format_version", to="1"),
    "format version 0": set_at("format_version", to=0),
    "format version is true": set_at("format_version", to=True),
}

IN_INDEX: dict[str, Change] = {
    "rank another": set_at("rank", to=1),
    "files is a list": set_at("files", to=[]),
    "no chunks": lambda tree: tree.pop("chunks"),
    "chunk number below 0": chunk(0, -1),
    "chunk number beyond": chunk(0, 1),
    "chunk number a boolean": chunk(0, False),
    "file number beyond": chunk(1, 99),
    "file number below 0": chunk(1, -1),
    "offset beyond": chunk(2, 1 << 40),
    "offset NaN": chunk(2, float("nan")),
    "length too short": chunk(3, 4),
    "length beyond": chunk(3, 10**18),
    "block of 0": chunk(4, 0),
    "block of 16 with one digest": chunk(4, 16),
    "block that splits elements": chunk(4, 4194319),
    "no digest": chunk(5, ""),
    "digest is no hex": chunk(5, "not hexadecimal!"),
    "digest is cut": chunk(5, "0123"),
    "raw is 2": chunk(6, 2),
    "chunk row is short": lambda tree: tree["chunks"]["model/big"][0].pop(),
    "chunk twice": lambda tree: tree["chunks"]["model/big"].append(tree["chunks"]["model/big"][0]),
    "chunks of nothing known": lambda tree: tree["chunks"].update({"model/x": tree["chunks"]["model/big"]}),
    "chunk of no file alone": lambda tree: tree["chunks"].update({"model/big": []}),
    "packed length below 0": lambda tree: tree["packed"].update(dict.fromkeys(tree["packed"], -1)),
    "packed length another": lambda tree: tree["packed"].update(dict.fromkeys(tree["packed"], 13)),
    "packed length of 10^18": lambda tree: tree["packed"].update(dict.fromkeys(tree["packed"], 10**18)),
    "packed array that is none": lambda tree: tree["packed"].update({"model/packed-x": 5}),
    "piece in no array": piece(0, 9),
    "piece of another shape": piece(1, [8]),
    "piece of more dimensions": piece(1, [7, 1]),
    "piece beyond its tensor": piece(2, [1]),
    "piece cut short": piece(3, [6]),
    "piece below 0": piece(4, -1),
    "piece beyond its array": piece(4, 6),
    "piece over another": piece(4, 4),
    "piece twice": lambda tree: tree["pieces"]["model/b"].append(tree["pieces"]["model/b"][0]),
    "pieces that overlap": lambda tree: tree["pieces"].update(
        {"model/b": [[0, [7], [0], [4], 5], [0, [7], [2], [3], 9]]}
    ),
    "no pieces": lambda tree: tree["pieces"].update({"model/b": []}),
    "pieces lost": lambda tree: tree["pieces"].pop("model/b"),
    "pieces of nothing known": lambda tree: tree["pieces"].update({"model/x": tree["pieces"]["model/b"]}),
    "two chunks in one place": lambda tree: (
        tree["dead"].update({"model/big/c/0/0": [[0, 16, 16, "0" * 16]]})
        if "dead" in tree
        else tree.update(dead={"model/big/c/0/0": [[0, 16, 16, "0" * 16]]})
    ),
    "dead bytes of no file": lambda tree: tree.update(dead={"elsewhere": [[0, 1, 1, "0" * 16]]}),
    "description of 200 GB": lambda tree: tree["files"].update({"zarr.json": [200 << 30, "0" * 32]}),
}

IN_PLAIN: dict[str, Callable[[Any], Any]] = {
    "dtype is a function": value({"~dtype": "load"}),
    "dtype is a module": value({"~dtype": "_dynamo"}),
    "dtype is a list": value({"~dtype": ["float32"]}),
    "unknown tag": value({"~pickle": "gASVAAAA"}),
    "tag beside another key": value({"~tuple": [], "x": 1}),
    "tuple of a number": value({"~tuple": 5}),
    "dict of no pairs": value({"~dict": [[1]]}),
    "dict of lists as keys": value({"~dict": [[[1], 2]]}),
    "set of lists": value({"~set": [[1]]}),
    "bytes that are none": value({"~bytes": "*"}),
    "array of objects": value({"~ndarray": ["|O8", [1], "AAAAAAAAAAA="]}),
    "array of another length": value({"~ndarray": ["<f8", [1000, 1000], "AAAA"]}),
    "array of shape below 0": value({"~ndarray": ["<f8", [-1], "AAAAAAAAAAA="]}),
    "scalar of two": value({"~scalar": ["<u1", "AAAA"]}),
    "float that is finite": value({"~float": "1.5"}),
    "size of text": value({"~Size": ["x"]}),
    "namespace of a number": value({"~Namespace": 3}),
    "enum of numbers": value({"~enum": [1, 2, 3]}),
    "complex of one": value({"~complex": ["1"]}),
    # From 3.12 on Python's own parser takes many more levels.
    **({"nested deeply": value(json.loads("[" * 900 + "]" * 900))} if sys.version_info < (3, 12) else {}),
    "rows are an object": lambda rows: {"rows": rows},
    "a row is empty": lambda rows: [*rows, []],
    "a path is a number": lambda rows: [*rows, [5, 5]],
    "a step is a boolean": lambda rows: [*rows, [[True], 5]],
    "a step is nothing": lambda rows: [*rows, [[[]], 5]],
    "a key is no JSON": lambda rows: [*rows, [[["{", "key"]], 5]],
    "a key is a list": lambda rows: [*rows, [[["[1]", "key"]], 5]],
    "a path through a value": lambda rows: [*rows, [["step", "below"], 5]],
    "a key twice": lambda rows: [*rows, [["step"], 5]],
    "a tensor that is not there": lambda rows: [*rows, [["nowhere"]]],
}  # fmt: skip


def refused_by_all(root: Path) -> str:
    """The newest checkpoint is refused by `load`, told by `verify`, and passed over; return the sentence of the load."""
    checkpoint = root / "checkpoint-2"
    with pytest.raises(CorruptCheckpointError) as caught:
        load(checkpoint)
    problems = verify_checkpoint(checkpoint)
    assert problems and all(problems), problems
    assert load_newest(root) == "checkpoint-1"
    text = str(caught.value)
    assert "\n" not in text and len(text) < 600, text
    return text


@pytest.mark.parametrize("name", IN_MANIFEST)
def test_a_manifest_that_lies_is_refused(copied: Path, name: str) -> None:
    edit_manifest(copied / "checkpoint-2", IN_MANIFEST[name])
    refused_by_all(copied)


@pytest.mark.parametrize("name", IN_INDEX)
def test_an_index_that_lies_is_refused(copied: Path, name: str) -> None:
    edit_index(copied / "checkpoint-2", 0, IN_INDEX[name])
    assert "index-00000.json" in refused_by_all(copied)


@pytest.mark.parametrize("name", IN_PLAIN)
def test_plain_values_that_nobody_saved_are_refused(copied: Path, name: str) -> None:
    edit_json(copied / "checkpoint-2", PLAIN, IN_PLAIN[name])
    assert "plain.json" in refused_by_all(copied)


TEXTS: dict[str, Callable[[bytes], bytes]] = {
    "a key twice": lambda text: text.replace(b'"world_size": 1', b'"world_size": 1, "world_size": 1'),
    "an array twice": lambda text: text.replace(b'"model/a": {', b'"model/b": {', 1),
    "infinity": lambda text: text.replace(b'"world_size": 1', b'"world_size": Infinity'),
    "5,000 digits": lambda text: text.replace(b'"world_size": 1', b'"world_size": ' + b"1" * 5000),
    "nested deeply": lambda text: text.replace(b'"groups": {}', b'"groups": ' + b"[" * 100_000 + b"]" * 100_000),
    "no UTF-8": lambda text: text.replace(b'"model/big"', b'"model/\xff\xfe"'),
    "no JSON": lambda text: text.replace(b'"world_size": 1', b'"world_size"'),
    "a list": lambda text: b"[],\n",
    "nothing": lambda text: b"",
}  # fmt: skip


@pytest.mark.parametrize("laid_out_as_we_do", [True, False])
@pytest.mark.parametrize("name", TEXTS)
def test_text_that_is_no_such_json_is_refused(copied: Path, name: str, laid_out_as_we_do: bool) -> None:
    checkpoint = copied / "checkpoint-2"
    if not laid_out_as_we_do:
        edit_manifest(checkpoint, lambda tree: None)
    text = (checkpoint / MANIFEST).read_bytes()
    body = TEXTS[name](text[: text.rindex(b'  "manifest_digest"')])
    assert name in ("a list", "nothing") or len(body) != len(text) or name == "an array twice"
    write_manifest(checkpoint, body)
    assert MANIFEST in refused_by_all(copied)


@pytest.mark.parametrize("name", ["a key twice", "infinity", "nested deeply", "no UTF-8"])
def test_an_index_that_is_no_such_json_is_refused(copied: Path, name: str) -> None:
    checkpoint = copied / "checkpoint-2"
    text = (checkpoint / "index-00000.json").read_bytes()
    changed = {
        "a key twice": text.replace(b'"model/b": [', b'"model/a": [', 1),
        "infinity": text.replace(b'"rank": 0', b'"rank": Infinity'),
        "nested deeply": text.replace(b'"rank": 0', b'"more": ' + b"[" * 100_000 + b"]" * 100_000 + b', "rank": 0'),
        "no UTF-8": text.replace(b'"model/b"', b'"model/\xff"'),
    }[name]
    assert changed != text
    write_listed(checkpoint, "index-00000.json", changed)
    assert "index-00000.json" in refused_by_all(copied)


def test_a_later_version_is_told_by_its_number_whatever_its_rows_are(copied: Path) -> None:
    checkpoint = copied / "checkpoint-2"

    def to_version_2(tree: Tree) -> None:
        tree["format_version"] = 2
        tree["arrays"] = [["model/big", "f4", "200x200"]]
        del tree["components"]

    edit_manifest(checkpoint, to_version_2)
    with pytest.raises(ConfigurationError, match="format version 2; this version of ckpt reads version 1"):
        read_manifest(checkpoint)
    edit_manifest(checkpoint, lambda tree: tree.update(format_version=3, arrays={"x": {"form": [1]}}))
    body = (checkpoint / MANIFEST).read_bytes()
    write_manifest(checkpoint, b'{\n  "format_version": 3,\n  "arrays": {\n    "x" -> 5\n  },\n')
    assert body != (checkpoint / MANIFEST).read_bytes()
    with pytest.raises(ConfigurationError, match="format version 3"):
        read_manifest(checkpoint)


def test_keys_that_this_version_does_not_know_are_passed_over(copied: Path) -> None:
    checkpoint = copied / "checkpoint-2"
    edit_manifest(checkpoint, lambda tree: tree.update(later={"a": [{"b": 1}]}))
    edit_manifest(checkpoint, lambda tree: tree["arrays"]["model/a"].update(later={"a": 1}))
    edit_manifest(checkpoint, lambda tree: tree["components"]["model"].update(later=[1]))
    edit_index(checkpoint, 0, lambda tree: tree.update(later={"a": {"b": 1}}))
    assert verify_checkpoint(checkpoint) == []
    assert load_newest(copied) == "checkpoint-2"


@pytest.mark.parametrize("path", [MANIFEST, "index-00000.json", PLAIN, "config.yaml"])
def test_a_file_that_claims_to_be_longer_than_memory_is_not_read(copied: Path, path: str) -> None:
    """Sparse, so it takes no room on the disk; to read it would take 200 GB of memory."""
    put(copied / "checkpoint-2" / path, b"")
    os.truncate(copied / "checkpoint-2" / path, 200 << 30)
    text = refused_by_all(copied)
    assert path in text and str(200 << 30) in text


def test_random_generators_that_do_not_take_their_state_are_damage(copied: Path) -> None:
    def cut(rows: Any) -> Any:
        for row in rows:
            if row[0] == ["torch", "cpu"]:
                row[1] = {"~bytes": "AAAA"}
        return rows

    edit_json(copied / "checkpoint-2", "rng/rank-00000/plain.json", cut)
    with pytest.raises(CorruptCheckpointError, match="random generators cannot load the saved state"):
        load(copied / "checkpoint-2")
    assert load_newest(copied) == "checkpoint-1"


anything = st.recursive(
    st.sampled_from(
        [None, True, -1, 0, 1, 3, 1 << 40, 1 << 63, 10**30, 0.5, float("nan"), "", "x", "model/a", "0" * 32]
    )
    | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=4,
)


@pytest.mark.usefixtures("turns")
@given(data=st.data())
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_records_say_only_our_errors_come_of_it(root: Path, tmp_path: Path, data: st.DataObject) -> None:
    checkpoint = tmp_path / "root" / "checkpoint-2"
    shutil.rmtree(tmp_path / "root", ignore_errors=True)
    shutil.copytree(root, tmp_path / "root", copy_function=os.link)
    which = data.draw(st.sampled_from(["manifest", "index", PLAIN]))
    file = {"manifest": MANIFEST, "index": "index-00000.json"}.get(which, which)
    tree = manifest_tree(checkpoint) if which == "manifest" else json.loads((checkpoint / file).read_bytes())
    spoil(tree, anything, data)
    if which == "manifest":
        write_manifest(checkpoint, tree)
    else:
        write_listed(checkpoint, file, json.dumps(tree).encode())
    state = random.getstate()
    problems = ["none was looked for"]
    try:
        problems = verify_checkpoint(checkpoint)
        read_index(checkpoint, read_manifest(checkpoint), 0)
        load(checkpoint)
    except CheckpointError as error:
        assert problems or not isinstance(error, CorruptCheckpointError), f"verify calls this sound: {error}"
    finally:
        random.setstate(state)


def compressed(tmp_path: Path, codec: dict[str, Any]) -> Path:
    """A committed checkpoint with chunks that only zarr-python can decode."""
    run = coordinator(Topology.alone(), tmp_path, components(), backend=ZarrBackend(compressors=[codec]))
    return Path(str(run.save_checkpoint(checkpoint_id="1")))


def set_chunk(checkpoint: Path, data: bytes) -> None:
    """Put other bytes into the one chunk of model/big, and sign."""
    put(checkpoint / "model/big/c/0/0", data)
    edit_index(checkpoint, 0, chunk(3, len(data)))
    resign(checkpoint)


ZSTD = {"name": "zstd", "configuration": {"level": 3, "checksum": False}}
BOMBS: dict[str, tuple[dict[str, Any], Callable[[], bytes]]] = {
    "gzip": ({"name": "gzip", "configuration": {"level": 5}}, lambda: gzip.compress(bytes(16 << 20), 9)),
    "zstd": (ZSTD, lambda: b"\x28\xb5\x2f\xfd\xe0" + (1 << 50).to_bytes(8, "little") + bytes(64)),
    "zstd, frame by frame": (ZSTD, lambda: ZSTD_SKIPPED + zstd_frame(160000, 160000) + zstd_frame(16 << 20)),
    "blosc": ({"name": "blosc", "configuration": {"cname": "zstd", "clevel": 5, "shuffle": "shuffle", "typesize": 4, "blocksize": 0}},
              lambda: b"\x02\x01\x91\x04" + (1 << 31).to_bytes(4, "little") + bytes(64)),
}  # fmt: skip


@pytest.mark.parametrize("codec", BOMBS)
def test_a_chunk_is_not_decoded_that_would_be_far_longer_than_it_should(tmp_path: Path, codec: str) -> None:
    config, bomb = BOMBS[codec]
    checkpoint = compressed(tmp_path, config)
    load(checkpoint)
    set_chunk(checkpoint, bomb())
    with little_memory(128), pytest.raises(CorruptCheckpointError, match="would decode to .* where a chunk has 160000"):
        load(checkpoint)
    assert "would decode to" in verify_checkpoint(checkpoint)[0]


@pytest.mark.parametrize("inner", ["sharding_indexed", "gzip"])
def test_a_bomb_inside_of_shards_or_of_another_codec_is_refused(tmp_path: Path, inner: str) -> None:
    checkpoint = compressed(tmp_path, ZSTD)
    gz = {"name": "gzip", "configuration": {"level": 1}}
    endian = {"name": "bytes", "configuration": {"endian": "little"}}
    bomb = gzip.compress(bytes(256 << 20), 9)
    codecs: list[dict[str, Any]] = [endian, gz, gz]
    data = gzip.compress(bomb)
    if inner != "gzip":
        shards = {"chunk_shape": [200, 200], "codecs": [endian, gz], "index_codecs": [endian], "index_location": "end"}
        codecs = [{"name": "sharding_indexed", "configuration": shards}]
        data = bomb + (0).to_bytes(8, "little") + len(bomb).to_bytes(8, "little")
    edit_json(checkpoint, "model/big/zarr.json", lambda document: document | {"codecs": codecs})
    set_chunk(checkpoint, data)
    with little_memory(128), pytest.raises(CorruptCheckpointError, match="would decode to|the first should be bytes"):
        load(checkpoint)
    assert "model/big" in verify_checkpoint(checkpoint)[0]


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("shape", [10**9, 10**9]),
        ("shape", [-1, 200]),
        ("data_type", "float64"),
        ("chunk_grid", {"name": "regular", "configuration": {"chunk_shape": [10**6, 10**6]}}),
        ("chunk_grid", {"name": "regular", "configuration": {"chunk_shape": [0, 0]}}),
        ("codecs", []),
        ("codecs", 5),
        ("node_type", "group"),
        ("node_type", None),
    ],
)
def test_a_description_that_says_another_thing_than_the_manifest_is_refused(
    tmp_path: Path, key: str, said: Any
) -> None:
    checkpoint = compressed(tmp_path, {"name": "zstd", "configuration": {"level": 3, "checksum": False}})
    edit_json(checkpoint, "model/big/zarr.json", lambda document: document | {key: said})
    with pytest.raises(CorruptCheckpointError, match="model/big"):
        load(checkpoint)
    if key != "codecs":
        assert (
            "model/big/zarr.json" in verify_checkpoint(checkpoint)[0]
            or "its zarr.json" in verify_checkpoint(checkpoint)[0]
        )


@pytest.mark.parametrize("backend", ["ocdbt", "safetensors"])
def test_chunks_that_no_library_of_their_store_encodes_are_raw(tmp_path: Path, backend: str) -> None:
    run = coordinator(Topology.alone(), tmp_path, components(), backend=backend)
    checkpoint = Path(str(run.save_checkpoint(checkpoint_id="1")))
    edit_index(checkpoint, 0, chunk(6, 0))
    with pytest.raises(CorruptCheckpointError, match="encoded"):
        load(checkpoint)
    assert "encoded" in verify_checkpoint(checkpoint)[0]


def _save_rows(topology: Topology, root: Path) -> None:
    """Rows of a small tensor on each rank, so that one packed tensor lies in two indexes."""
    rows = ShardedTensor.from_rank_offsets(
        "w", torch.arange(6.0).reshape(2, 3) + 6 * topology.rank, (0, topology.rank, 2)
    )
    coordinator(topology, root, [StateComponent("model", Held({"w": rows}), "sharded")]).save_checkpoint(
        checkpoint_id="1"
    )


def test_pieces_of_two_ranks_that_overlap_are_refused(tmp_path: Path) -> None:
    run_threads(2, _save_rows, tmp_path)
    checkpoint = tmp_path / "checkpoint-1"
    assert verify_checkpoint(checkpoint) == []
    assert [len(index_tree(checkpoint, rank)["pieces"]) for rank in (0, 1)] == [1, 1]
    edit_index(checkpoint, 1, piece(2, [1, 0], "model/w"))  # rows 1 to 3, where 2 to 4 are its own
    assert "have elements in common" in "".join(verify_checkpoint(checkpoint))
    whole = coordinator(
        Topology.alone(), tmp_path, [StateComponent("model", Held({"w": torch.zeros(4, 3)}), "replicated")]
    )
    with pytest.raises(CorruptCheckpointError, match="have elements in common"):
        whole.load_checkpoint(checkpoint)


def _first_rows_are_refused(topology: Topology, root: Path) -> None:
    rows = ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3), (0, 0, 2), replica_id=topology.rank)
    run = coordinator(topology, root, [StateComponent("model", Held({"w": rows}), "sharded")])
    with pytest.raises(CorruptCheckpointError, match="have elements in common"):
        run.load_checkpoint(root / "checkpoint-1")


def test_they_are_refused_by_ranks_that_each_know_one_of_them(tmp_path: Path) -> None:
    """Ranks that hold the same part of a tensor could otherwise each find another piece for it."""
    run_threads(2, _save_rows, tmp_path)
    edit_index(tmp_path / "checkpoint-1", 1, piece(2, [0, 0], "model/w"))  # the rows of rank 0, once more
    run_threads(2, _first_rows_are_refused, tmp_path)


def test_each_tensor_of_several_pieces_is_looked_at(copied: Path) -> None:
    """Those of one piece are known by their box; what is known of one tensor in pieces says nothing of the next."""

    def cut(tree: Tree, of_b: int) -> None:
        tree["pieces"]["model/a"] = [[0, [5], [0], [2], 0], [0, [5], [2], [3], 2]]
        tree["pieces"]["model/b"] = [[0, [7], [0], [4], 5], [0, [7], [of_b], [3], 9]]

    edit_index(copied / "checkpoint-1", 0, lambda tree: cut(tree, of_b=4))
    assert verify_checkpoint(copied / "checkpoint-1") == []
    edit_index(copied / "checkpoint-2", 0, lambda tree: cut(tree, of_b=3))
    assert "two pieces of 'model/b' have elements in common" in "".join(verify_checkpoint(copied / "checkpoint-2"))


@pytest.mark.parametrize("command", ["inspect", "verify", "convert"])
def test_commands_say_one_sentence(copied: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    checkpoint = copied / "checkpoint-2"
    edit_manifest(checkpoint, array(shape=[10**9, 10**9]))
    if command == "verify":
        assert verify(ReadingKeys(str(checkpoint))) == 1
        assert len(capsys.readouterr().out.splitlines()) == 2
        return
    with pytest.raises(CorruptCheckpointError, match=f"{checkpoint}/{MANIFEST}: .* chunks, and writers of 1"):
        if command == "inspect":
            show(InspectKeys(str(checkpoint)))
        else:
            rewrite(checkpoint, copied / "new", ZarrBackend(), Topology.alone())
    assert not (copied / "new").exists()
