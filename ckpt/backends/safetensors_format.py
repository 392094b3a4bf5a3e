"""The header of a safetensors file: written by us, when the bytes behind it are there already, and read back. Pure, but for reading.

Source of the format: the specification in the README of huggingface/safetensors. A file is the length of the header as 8 bytes, the
header as JSON, padded with spaces, and the tensors, end to end in any order, without a gap.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt.backends.base import Content
from ckpt.box import Box, whole
from ckpt.dtypes import item_bytes
from ckpt.errors import CorruptCheckpointError

INDEX_NAME = "model.safetensors.index.json"
"""Beside the files of a folder, as Hugging Face's loaders look for it."""

_ALIGNED = 64
_METADATA = "__metadata__"
_PARTS = "ckpt.parts"
_COMPLEX128 = "complex128"
_NAMES = {
    "bool": "BOOL",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "complex64": "C64",
    _COMPLEX128: "F64",  # which the format does not know: pairs of these, in a dimension more
}
_MOST_DIGITS = 20


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of a file, or a part of one that lies in several.

    Attributes:
        name: in the file.
        dtype: as Zarr v3 calls it.
        content: which elements of which tensor it is.
        start: of its first byte behind the header.
    """

    name: str
    dtype: str
    content: Content
    start: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.content.box.shape) * item_bytes(self.dtype)

    @property
    def is_part(self) -> bool:
        return self.content.box.shape != self.content.shape


def entries_of(dtype: str, contents: Iterable[Content], start: int) -> list[Entry]:
    """The entries of tensors, or parts, that lie end to end from a byte on."""
    entries = []
    for content in contents:
        entries.append(Entry(_name_of(content), dtype, content, start))
        start += entries[-1].num_bytes
    return entries


def _name_of(content: Content) -> str:
    """A tensor goes by its key, a part by key and box. The one name that the format keeps for itself goes as a part."""
    if content.box.shape == content.shape and content.key != _METADATA:
        return content.key
    return f"{content.key}[{', '.join(f'{side.start}:{side.stop}' for side in content.box.slices)}]"


def room_for_header(entries: Iterable[Entry]) -> int:
    """Bytes that are enough for the 8 of the length and the header, wherever these entries will lie."""
    digits = 2 * _MOST_DIGITS
    return _padded(len(_document(entries)) + 8 + digits * sum(1 for _ in entries))


def header_bytes(entries: Iterable[Entry], room: int) -> bytes:
    """The first `room` bytes of a file."""
    document = _document(entries)
    assert len(document) + 8 <= room, (len(document), room)
    return (room - 8).to_bytes(8, "little") + document.ljust(room - 8)


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNED) * _ALIGNED


def _document(entries: Iterable[Entry]) -> bytes:
    metadata: dict[str, str] = {"format": "pt"}
    rows: dict[str, Any] = {_METADATA: metadata}
    parts: dict[str, Any] = {}
    pairs = []
    for entry in entries:
        key, shape, box = entry.content
        stored = list(box.shape)
        if entry.dtype == _COMPLEX128:
            stored.append(2)
            pairs.append(entry.name)
        if entry.name != key:
            parts[entry.name] = [key, list(shape), list(box.offsets)]
        ends = [entry.start, entry.start + entry.num_bytes]
        rows[entry.name] = {"dtype": _NAMES[entry.dtype], "shape": stored, "data_offsets": ends}
    if parts:
        metadata[_PARTS] = json.dumps(parts)
    if pairs:
        metadata[_COMPLEX128] = json.dumps(pairs)
    return json.dumps(rows).encode()


def read_header(path: Path) -> list[Entry]:
    """What a file of ours, or any other safetensors file, holds.

    Raises:
        CorruptCheckpointError: it is missing, or no such file.
    """
    try:
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            data = stream.read(length)
        if len(data) != length:
            raise ValueError(f"its header has {len(data)} of {length} bytes")
        return list(_parsed(json.loads(data)))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptCheckpointError(f"{path} is no safetensors file: {error}. Load an earlier checkpoint.") from error


def _parsed(rows: Mapping[str, Any]) -> Iterable[Entry]:
    metadata = rows.get(_METADATA, {})
    parts = json.loads(metadata.get(_PARTS, "{}"))
    pairs = set(json.loads(metadata.get(_COMPLEX128, "[]")))
    types = {name: ours for ours, name in reversed(_NAMES.items())}
    for name, row in rows.items():
        if name == _METADATA:
            continue
        stored = tuple(row["shape"])
        dtype = types[row["dtype"]]
        if name in pairs:
            dtype, stored = _COMPLEX128, stored[:-1]
        content = Content(name, stored, whole(stored))
        if name in parts:
            key, shape, offsets = parts[name]
            content = Content(key, tuple(shape), Box(tuple(offsets), stored))
        yield Entry(name, dtype, content, int(row["data_offsets"][0]))


def index_document(files: Mapping[str, Iterable[Entry]]) -> dict[str, Any]:
    """What lies where in a folder: whole tensors by name, as Hugging Face has it, and those in parts, which that does not know.

    Args:
        files: name of the file -> its entries.
    """
    total = 0
    weight_map: dict[str, str] = {}
    parts: dict[str, dict[str, Any]] = {}
    for file, entries in files.items():
        for entry in entries:
            total += entry.num_bytes
            key, shape, box = entry.content
            if not entry.is_part and entry.name == key:
                weight_map[key] = file
                continue
            form = {"dtype": entry.dtype, "shape": list(shape), "parts": []}
            where = {"file": file, "name": entry.name, "offset": list(box.offsets), "shape": list(box.shape)}
            parts.setdefault(key, form)["parts"].append(where)
    document: dict[str, Any] = {"metadata": {"total_size": total}, "weight_map": weight_map}
    return document | ({"parts": parts} if parts else {})
