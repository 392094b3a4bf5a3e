"""The index of a folder of safetensors files says which file holds which tensor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckpt
from ckpt.backends.kimi_engine import KimiEngineBackend
from ckpt.errors import CorruptCheckpointError
from tests.support.arrays import array, save
from tests.support.states import same_bits

A, B = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
FIRST, SECOND = torch.arange(6.0).view(2, 3), torch.arange(8, dtype=torch.int64)


def folder(tmp_path: Path, files: dict[str, dict[str, torch.Tensor]], index: dict[str, str]) -> Path:
    for name, tensors in files.items():
        save_file(tensors, tmp_path / name)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return tmp_path


def test_tensors_that_it_does_not_name_are_not_part_of_the_model(tmp_path: Path) -> None:
    files = {A: {"a": FIRST, "stale": SECOND}, B: {"b": SECOND}}
    loaded = ckpt.load(folder(tmp_path, files, {"a": A, "b": B}))
    assert loaded.keys() == {"a", "b"}
    assert ckpt.load(tmp_path / A).keys() == {"a", "stale"}  # the file itself


def test_a_name_in_two_files_is_taken_from_the_one_that_it_names(tmp_path: Path) -> None:
    files = {A: {"a": FIRST, "b": SECOND + 1}, B: {"b": SECOND, "a": FIRST.double()}}
    loaded = ckpt.load(folder(tmp_path, files, {"a": A, "b": B}))
    assert same_bits(loaded["a"], FIRST) and same_bits(loaded["b"], SECOND)


def test_a_tensor_that_it_names_and_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    path = folder(tmp_path, {A: {"a": FIRST}, B: {"b": SECOND}}, {"a": A, "b": B, "lost": A})
    with pytest.raises(CorruptCheckpointError, match=rf"index\.json names 'lost' in {A}, which does not hold it"):
        ckpt.load(path)
    path = folder(tmp_path, {A: {"a": FIRST}}, {"a": A, "b": "gone.safetensors"})
    with pytest.raises(CorruptCheckpointError, match=r"gone\.safetensors"):
        ckpt.load(path)


def test_beside_it_one_file_is_the_model_as_for_transformers(tmp_path: Path) -> None:
    path = folder(tmp_path, {A: {"a": FIRST}, "model.safetensors": {"a": FIRST + 1}}, {"a": A})
    assert same_bits(ckpt.load(path)["a"], FIRST + 1)


def test_parts_of_tensors_in_the_index_of_this_package_are_read(tmp_path: Path) -> None:
    value = torch.arange(70_000.0).view(7, 10_000)
    spec, tensor = array("model/w", value, 4, 10_000)
    save(KimiEngineBackend(pool=False), tmp_path, {spec: tensor}, ranks=(0, 1))
    assert same_bits(ckpt.load(tmp_path / "model")["w"], value)
