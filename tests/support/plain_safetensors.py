"""Tensors of a folder of safetensors files, by the library and by the folder's index alone: nothing of ours is asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file

INDEX = "model.safetensors.index.json"
COMPLEX = ("complex128", "complex32")
"""Types that the format does not have: pairs of float64 or float16 then, in a dimension more."""
SCALARS = "float4_e2m1fn_x2"
"""Of this, which the format counts by halves, tensors without dimensions have one."""


def index_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / INDEX).read_bytes())
    assert set(found) <= {"metadata", "weight_map", "parts"}
    return found


def keys_in(folder: Path) -> set[str]:
    """Every tensor that the index names, whole or in parts; none in both ways."""
    index = index_of(folder)
    assert not set(index["weight_map"]) & set(index.get("parts", {}))
    return {*index["weight_map"], *index.get("parts", {})}


def read(folder: Path, key: str) -> torch.Tensor:
    """A tensor by its key; one in parts is put together, and has no hole and nothing twice."""
    index = index_of(folder)
    if key in index["weight_map"]:
        return tensor(folder / index["weight_map"][key], key)
    form = index["parts"][key]
    out, filled = None, 0
    for part in form["parts"]:
        values = tensor(folder / part["file"], part["name"])
        assert list(values.shape) == part["shape"]
        out = torch.zeros(form["shape"], dtype=values.dtype) if out is None else out
        out[tuple(slice(o, o + n) for o, n in zip(part["offset"], part["shape"], strict=True))] = values
        filled += values.numel()
    assert out is not None and filled == out.numel()
    return out


def tensor(file: Path, name: str) -> torch.Tensor:
    with safe_open(file, "pt") as opened:
        found: torch.Tensor = opened.get_tensor(name)
        notes = opened.metadata() or {}
    if name in json.loads(notes.get(SCALARS, "[]")):
        return found.view(())
    return torch.view_as_complex(found) if any(name in json.loads(notes.get(one, "[]")) for one in COMPLEX) else found


def names_in(folder: Path) -> dict[str, str]:
    """Name -> file of everything in the files of a folder; no two have the same, and the index names every one of them."""
    found: dict[str, str] = {}
    for file in sorted(folder.glob("*.safetensors")):
        names = list(load_file(file))
        assert not found.keys() & set(names)
        found |= dict.fromkeys(names, file.name)
    index = index_of(folder)
    parts = [part for form in index.get("parts", {}).values() for part in form["parts"]]
    assert found == index["weight_map"] | {part["name"]: part["file"] for part in parts}
    return found
