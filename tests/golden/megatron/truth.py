"""The true values of the golden checkpoints, for tests: read from the JSON and the bytes beside them, without pickle."""

from __future__ import annotations

import argparse
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

FOLDER = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Named:
    """A member of an enum whose module need not be installed here."""

    type: str
    name: str
    value: Any


@dataclass(frozen=True)
class Truth:
    """What one golden checkpoint holds.

    Attributes:
        path: the checkpoint.
        ranks: by how many it was written.
        tensors: whole global tensors by key.
        chunks: the shape of each one's chunks.
        objects: values of the sharded objects by `<key>/shard_<offset>_<shape>`.
        common: what all ranks held alike.
    """

    path: Path
    ranks: int
    tensors: dict[str, torch.Tensor]
    chunks: dict[str, tuple[int, ...]]
    objects: dict[str, Any]
    common: dict[str, Any]


def truth(name: str) -> Truth:
    """Read the record of one golden checkpoint."""
    record = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    data = (FOLDER / f"{name}.bin").read_bytes()
    return Truth(
        path=FOLDER / name,
        ranks=record["ranks"],
        tensors={key: _tensor(place, data) for key, place in record["tensors"].items()},
        chunks={key: tuple(place["chunks"]) for key, place in record["tensors"].items()},
        objects={key: _decode(value, data) for key, value in record["objects"].items()},
        common={key: _decode(value, data) for key, value in record["common"].items()},
    )


def _tensor(place: dict[str, Any], data: bytes) -> torch.Tensor:
    raw = bytearray(data[place["at"] : place["at"] + place["bytes"]])
    return torch.frombuffer(raw, dtype=getattr(torch, place["dtype"])).reshape(place["shape"])


def _array(place: dict[str, Any], data: bytes) -> np.ndarray:
    raw = bytearray(data[place["at"] : place["at"] + place["bytes"]])
    return np.frombuffer(raw, place["dtype"]).reshape(place["shape"])


def _decode(value: Any, data: bytes) -> Any:
    """Undo `_encode` of make.py."""
    if isinstance(value, list):
        return [_decode(one, data) for one in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind in ("dict", "Namespace"):
        pairs = [(_decode(key, data), _decode(one, data)) for key, one in content]
        return dict(pairs) if kind == "dict" else argparse.Namespace(**dict(pairs))
    simple = {
        "tensor": lambda: _tensor(content, data),
        "ndarray": lambda: _array(content, data),
        "tuple": lambda: tuple(_decode(content, data)),
        "Size": lambda: torch.Size(content),
        "bytes": lambda: bytes.fromhex(content),
        "BytesIO": lambda: io.BytesIO(bytes.fromhex(content)),
        "dtype": lambda: getattr(torch, content),
        "enum": lambda: Named(*content),
    }
    return simple[kind]()
