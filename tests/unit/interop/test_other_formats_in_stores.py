"""Checkpoints of other programs in an object store: read as those in folders are, which are the oracle."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckpt
from ckpt.cli.reading_others import other_at
from ckpt.errors import CheckpointNotFoundError, CorruptCheckpointError
from ckpt.format.places import ObjectPath
from ckpt.interop.programs import format_at
from ckpt.storage.objects.store import store_of
from tests.support.covering import sampled
from tests.support.object_server import ObjectServer
from tests.support.values import same_values

GOLDEN = Path(__file__).parents[2] / "golden"
AT = ObjectPath("s3", "bucket", "others")


@pytest.fixture
def server() -> Iterator[ObjectServer]:
    with ObjectServer() as server, server.used():
        yield server


def put(folder: Path) -> ObjectPath:
    """Copy a folder, or a file, into the store, as other tools do; return its address."""
    files = [folder] if folder.is_file() else [path for path in folder.rglob("*") if path.is_file()]
    for path in files:
        store_of(AT).put((AT / folder.name / path.relative_to(folder)).key if folder.is_dir() else (AT / path.name).key, path.read_bytes())
    return AT / folder.name


def weights() -> dict[str, torch.Tensor]:
    return {f"h.{number}.w": torch.randn(40, 30).to(torch.bfloat16) for number in range(4)} | {"wte": torch.arange(77)}


def safetensors_folder(folder: Path) -> Path:
    folder.mkdir()
    names = list(weights())
    files = {f"model-0000{n}-of-00002.safetensors": {name: weights()[name] for name in names[n - 1 :: 2]} for n in (1, 2)}
    for name, tensors in files.items():
        save_file(tensors, folder / name)
    index = {"weight_map": {name: file for file, tensors in files.items() for name in tensors}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text("{}")
    return folder


def torch_file(file: Path) -> Path:
    w = torch.randn(20, 30)
    odd = {"turned": w.T, "part": w[3:, ::2], "complex": torch.randn(3, dtype=torch.complex64).conj()}
    state: dict[str, Any] = {"model": weights() | odd}
    torch.save(state | {"epoch": 3, "lr": [0.1, 0.2]}, file)
    return file


def made(kind: str, tmp_path: Path) -> Path:
    if kind == "safetensors":
        return safetensors_folder(tmp_path / "hub")
    if kind == "one file":
        save_file(weights(), tmp_path / "one.safetensors")
        return tmp_path / "one.safetensors"
    if kind == "torch.save":
        return torch_file(tmp_path / "state.pt")
    return next(path.parent for path in sorted((GOLDEN / "dcp" / kind).rglob(".metadata")))


@sampled("load", ["direct", "two-stage"])
@pytest.mark.parametrize("kind", ["safetensors", "one file", "torch.save", "torch-2.13.0", "torchtitan-0.3.0"])
def test_it_is_read_as_from_a_folder(server: ObjectServer, tmp_path: Path, kind: str, load: str) -> None:
    torch.manual_seed(0)
    here = made(kind, tmp_path)
    there = put(here)
    assert format_at(there) == format_at(here)
    assert same_values(ckpt.load(there, allow_pickle=True, load=load), ckpt.load(here, allow_pickle=True, load=load))
    ours, theirs = other_at(there, allow_pickle=True), other_at(here, allow_pickle=True)
    assert ours is not None and theirs is not None
    assert (ours.tensors, ours.names, ours.values) == (theirs.tensors, theirs.names, theirs.values)
    if format_at(here) != "safetensors":
        with pytest.raises(CheckpointNotFoundError, match="is a pickle"):
            ckpt.load(there)


def test_what_is_cut_off_or_missing_is_named(server: ObjectServer, tmp_path: Path) -> None:
    there = put(safetensors_folder(tmp_path / "hub"))
    (second,) = [key for key in server.objects["bucket"] if "00002-of-00002" in key]
    kept = server.objects["bucket"].pop(second)
    with pytest.raises(CorruptCheckpointError, match="model-00002-of-00002.safetensors"):
        ckpt.load(there)
    del kept.data[-10:]
    server.objects["bucket"][second] = kept
    with pytest.raises(CorruptCheckpointError, match="model-00002-of-00002.safetensors"):
        ckpt.load(there)
    with pytest.raises(CheckpointNotFoundError, match="s3://bucket/none"):
        ckpt.load("s3://bucket/none")
