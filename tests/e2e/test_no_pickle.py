"""No pickle, anywhere: not in what a run writes, not in what a load runs, not in what the library imports."""

from __future__ import annotations

import ast
import json
import pickle
import shelve
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import xxhash
import yaml

import ckpt
from ckpt.format.manifest import CONFIG_NAME, MANIFEST_NAME
from ckpt.ranks.topology import Topology
from ckpt.storage.stored import read_index, read_manifest
from recipes.training.training import train
from tests.e2e.conftest import STEPS, Run
from tests.e2e.runs import checkpoint, run

OCDBT_MANIFEST = b"\x0c\xdb\x3a\x2a"
OCDBT_NODE = b"\x0c\xdb\x20\xde"
PICKLED = (*(bytes([0x80, protocol]) for protocol in range(2, 6)), b"PK\x03\x04", b"PK\x05\x06")
PACKAGE = Path(ckpt.__file__).parent
FORBIDDEN_MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "copyreg"}
FORBIDDEN_CALLS = {
    "torch.load", "torch.save", "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list",
    "send_object_list", "recv_object_list", "numpy.save", "np.save", "np.load",
}  # fmt: skip
CALLS = {
    "interop/unpickling.py": {"torch.load"},
    "integrations/dcp.py": {"torch.save"},
    "interop/dcp/writing.py": {"torch.save"},
    "interop/megatron/writing.py": {"torch.save"},
    "interop/torch_save/writing.py": {"torch.save"},
    "integrations/lightning.py": {"all_gather_object"},
}
"""File -> calls: what load.allow_pickle allows, with weights_only, as the test below checks; plain values in memory, for DCP, and in its
files; and random generators, from rank to rank, by the group that Lightning itself says such things by."""
TO_WORKERS = {"engine/inference/worker_line.py": {"pickle"}}
"""What a rollout says, and never reads, to workers of an inference engine, in checkpoint-engine's words. Nothing of it is stored."""
READS_INERT = {"interop/unpickling.py": {"pickle"}}
"""Reads what describes checkpoints of other programs, if that is allowed; every name in it stands for something that does nothing."""


KINDS = {
    "straight": {"json", "yaml", "chunks"},
    "in_ocdbt": {"json", "yaml", "ocdbt", "ocdbt and chunks"},
    "in_safetensors": {"json", "yaml", "safetensors"},
}


@pytest.mark.parametrize("source", KINDS, ids=["zarr", "ocdbt", "safetensors"])
def test_every_byte_of_a_checkpoint_is_json_yaml_ocdbt_a_header_or_a_listed_chunk(
    source: str, request: pytest.FixtureRequest
) -> None:
    folder = checkpoint(request.getfixturevalue(source).dir, STEPS)
    chunks = _chunks(folder)
    kinds: dict[str, int] = {}
    for path in (path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        kind = _kind_of(name, path.read_bytes(), chunks.pop(name, []))
        kinds[kind] = kinds.get(kind, 0) + 1
    assert not chunks, "a chunk in a file that is not there"
    indexed = {path.parent for path in folder.rglob("*.safetensors")}
    assert kinds["json"] > 10 if source == "straight" else kinds["json"] == 8 + len(indexed)
    assert kinds["yaml"] == 1
    assert set(kinds) == KINDS[source]


def test_what_a_run_writes_beside_its_checkpoints_is_text(straight: Run) -> None:
    beside = [path for path in straight.dir.rglob("*") if path.is_file() and "checkpoint-" not in str(path)]
    assert [path.name for path in beside] == ["summary.json"]
    json.loads(beside[0].read_text())


@pytest.mark.parametrize(
    "source",
    [
        pytest.param("straight", marks=pytest.mark.full),
        "in_ocdbt",
        pytest.param("in_safetensors", marks=pytest.mark.full),
    ],
    ids=["zarr", "ocdbt", "safetensors"],
)
def test_a_run_resumes_and_saves_where_nothing_can_be_pickled(
    tmp_path: Path, straight: Run, source: str, request: pytest.FixtureRequest
) -> None:
    """On two ranks, from their first line on: torch, DDP and both libraries included."""
    path = checkpoint(request.getfixturevalue(source).dir, STEPS - 1)
    found = run(tmp_path / "run", f"resume={path}", f"train.steps={STEPS}", ranks=2, job=_train_without_pickle)
    assert found["losses"] == straight.summary["losses"][-1:]
    assert found["state_digest"] == straight.summary["state_digest"]


def test_no_module_of_the_library_mentions_a_pickler() -> None:
    for path in sorted(PACKAGE.rglob("*.py")):
        tree, name = ast.parse(path.read_text()), path.relative_to(PACKAGE).as_posix()
        assert FORBIDDEN_MODULES & set(_imported(tree)) == (TO_WORKERS | READS_INERT).get(name, set()), path
        used = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute | ast.Name)}
        keywords = {node.arg for node in ast.walk(tree) if isinstance(node, ast.keyword)}
        names = {part for use in used for part in (use, use.rpartition(".")[2])} | keywords
        assert FORBIDDEN_CALLS & names == CALLS.get(name, set()), path


def test_old_files_are_read_as_weights_only() -> None:
    tree = ast.parse((PACKAGE / "interop/unpickling.py").read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    loads = [call for call in calls if ast.unparse(call.func) == "torch.load"]
    assert len(loads) == 1
    assert {word.arg: ast.unparse(word.value) for word in loads[0].keywords}["weights_only"] == "True"


def _chunks(folder: Path) -> dict[str, list[tuple[int, int, int, tuple[int, ...]]]]:
    """By file: offset, length, bytes of a block, and the digest of each block, as the indexes list them."""
    manifest = read_manifest(folder)
    found: dict[str, list[tuple[int, int, int, tuple[int, ...]]]] = {}
    for rank in manifest.index_ranks():
        for by_number in read_index(folder, manifest, rank).chunks.values():
            for e in by_number.values():
                found.setdefault(e.file, []).append((e.offset, e.length, e.block_bytes, tuple(e.digests)))
    return found


def _kind_of(name: str, data: bytes, chunks: list[tuple[int, int, int, tuple[int, ...]]]) -> str:
    rest = bytearray()
    at = 0
    for offset, length, block_bytes, digests in sorted(chunks):
        rest += data[at:offset]
        at = offset + length
        blocks = [data[begin : min(begin + block_bytes, at)] for begin in range(offset, at, block_bytes)]
        assert [xxhash.xxh3_64_intdigest(block) for block in blocks] == list(digests), name
    rest += data[at:]
    if chunks and not rest:
        return "chunks"
    assert not bytes(rest).startswith(PICKLED), name
    if name.endswith(".json"):
        json.loads(rest)
        assert not chunks
        return "json"
    if name == CONFIG_NAME:
        assert isinstance(yaml.safe_load(bytes(rest)), dict)
        return "yaml"
    if name.endswith(".safetensors"):
        assert int.from_bytes(rest[:8], "little") == len(rest) - 8
        assert json.loads(rest[8:])["__metadata__"]["format"] == "pt"
        return "safetensors"
    assert name.startswith("arrays.ocdbt/"), f"{name} is of no known kind"
    assert name != MANIFEST_NAME
    _parse_ocdbt(bytes(rest), name)
    return "ocdbt and chunks" if chunks else "ocdbt"


def _parse_ocdbt(data: bytes, name: str) -> None:
    """The parts of a database file that are no chunks: nodes, which begin with their length, Zarr's JSON, and zeros."""
    at = 0
    while at < len(data):
        if data[at] == 0:  # the rest of a disk block
            at += 1
        elif data.startswith((OCDBT_MANIFEST, OCDBT_NODE), at):
            at += int.from_bytes(data[at + 4 : at + 12], "little")
        else:
            document, length = json.JSONDecoder().raw_decode(data[at:].decode("latin-1"))
            assert document["zarr_format"] == 3
            at += length
    assert at == len(data), name


def _train_without_pickle(cfg: dict[str, Any], topology: Topology) -> dict[str, Any]:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise AssertionError("something was pickled or unpickled")

    for name in ("load", "loads", "dump", "dumps"):  # not those of marshal, by which Python reads its own .pyc files
        setattr(pickle, name, refuse)
    pickle.Unpickler = pickle.Pickler = pickle._Unpickler = pickle._Pickler = refuse  # type: ignore[assignment,misc,attr-defined]
    torch.load = torch.save = torch.serialization.load = torch.serialization.save = refuse  # type: ignore[assignment]
    shelve.open = refuse  # type: ignore[assignment]
    return train(cfg, topology)


def _imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            yield node.module.partition(".")[0]
