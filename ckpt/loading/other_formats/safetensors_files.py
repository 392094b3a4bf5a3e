"""Open safetensors files, as Hugging Face's `save_pretrained` writes them: one, or several with an index. They hold the model alone."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import msgspec

from ckpt.errors import CorruptCheckpointError
from ckpt.format.box import whole
from ckpt.format.checkpoint_files import CheckpointFolder
from ckpt.format.dtypes import item_bytes
from ckpt.format.strict_json import Count, Shape, fit, parse
from ckpt.loading.other_formats.raw_pieces import OtherCheckpoint, OtherTensor, Piece

INDEX = "model.safetensors.index.json"
ONE_FILE = "model.safetensors"
_MOST_BYTES = 100_000_000  # the format's own bound of a header
_DTYPES = {
    "BOOL": "bool", "I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64", "U8": "uint8", "U16": "uint16", "U32": "uint32",
    "U64": "uint64", "F16": "float16", "F32": "float32", "F64": "float64", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "C64": "complex64",
}  # fmt: skip


def is_safetensors(path: Path) -> bool:
    """Whether a path is a safetensors file, or a folder with a model in such files."""
    return (path.suffix == ".safetensors" and path.is_file()) or any((path / n).is_file() for n in (INDEX, ONE_FILE))


def open_safetensors(path: Path) -> OtherCheckpoint:
    """Open it. Reads the headers alone.

    Raises:
        CorruptCheckpointError: a header, or the index, is damaged, or a file is shorter than its header says.
    """
    root = path.parent if path.is_file() else path
    tensors: dict[str, OtherTensor] = {}
    with CheckpointFolder(root) as folder:
        for file in [path.name] if path.is_file() else _files_of(folder):
            for name, tensor in _tensors_in(folder, file).items():
                if name in tensors:
                    raise CorruptCheckpointError(f"{root}: two files hold the tensor {name!r}", file=file)
                tensors[name] = tensor
    return OtherCheckpoint(root, "safetensors", tensors, {})


def _files_of(folder: CheckpointFolder) -> list[str]:
    if not (folder.root / INDEX).is_file():
        return [ONE_FILE]
    where = str(folder.root / INDEX)
    weight_map = fit(parse(folder.read(INDEX, _MOST_BYTES), where), dict[str, Any], where).get("weight_map")
    return sorted(set(fit(weight_map, dict[str, str], where).values()))


def _tensors_in(folder: CheckpointFolder, file: str) -> dict[str, OtherTensor]:
    where = str(folder.root / file)
    with folder.stream(file) as stream:
        size = folder.stat(file).st_size
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if length > min(_MOST_BYTES, size - 8):
            raise CorruptCheckpointError(
                f"{where} is no safetensors file: its header would have {length} bytes", file=file
            )
        header = parse(stream.read(length), where)
    if isinstance(header, dict):
        header.pop("__metadata__", None)
    data = 8 + length
    entries = fit(header, dict[str, _Entry], where)
    return {name: _tensor(name, entry, file, where, data, size) for name, entry in entries.items()}


class _Entry(msgspec.Struct):
    """A tensor in a header."""

    dtype: str
    shape: Shape
    data_offsets: tuple[Count, Count]


def _tensor(name: str, entry: _Entry, file: str, where: str, data: int, size: int) -> OtherTensor:
    shape, (begin, end) = entry.shape, entry.data_offsets
    dtype = _DTYPES.get(entry.dtype)
    if dtype is None:
        raise CorruptCheckpointError(
            f"{where}: tensor {name!r} is of type {entry.dtype!r}, which is not known", file=file
        )
    box = whole(shape)
    if end - begin != box.num_elements * item_bytes(dtype) or data + end > size:
        raise CorruptCheckpointError(f"{where}: tensor {name!r} does not fit its place in the file", file=file)
    piece = Piece(box, file, data + begin)
    return OtherTensor((name,), dtype, shape, lambda: [piece])
