"""The Zarr v3 format: documents and chunk names, without a library. Used by both array backends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal

import msgspec

from ckpt.errors import LOAD_EARLIER, CorruptCheckpointError
from ckpt.format.box import chunk_box
from ckpt.format.dtypes import AS_INTEGERS, item_bytes
from ckpt.format.records import ArraySpec
from ckpt.format.strict_json import Shape, read

DOCUMENT = "zarr.json"
"""Name of the file, or key, that describes an array or a group."""


def array_document(array: ArraySpec, compressors: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """Return the `zarr.json` of an array: little-endian, row-major, chunk keys such as `c/0/1`, fill value zero."""
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(array.shape),
        "data_type": described_as(array.dtype),
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(array.grid)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": _zero(array.dtype),
        "codecs": [_bytes_codec(array.dtype), *compressors],
        "attributes": {},
    }


class _Cells(msgspec.Struct):
    chunk_shape: Shape


class _Grid(msgspec.Struct):
    name: Literal["regular"]
    configuration: _Cells


class _Codec(msgspec.Struct):
    name: str


class _Document(msgspec.Struct):
    """The schema of an array's `zarr.json`: the fields that the manifest has, too."""

    zarr_format: Literal[3]
    node_type: Literal["array"]
    shape: Shape
    data_type: str
    chunk_grid: _Grid
    codecs: list[_Codec] = []


def spec_in(document: bytes, path: str) -> tuple[ArraySpec, list[str]]:
    """Parse the `zarr.json` of the array at `path`; return its spec, and the names of the codecs of its chunks, the outermost last.

    Raises:
        CorruptCheckpointError: it does not describe an array as this package writes them.
    """
    said = read(document, _Document, below(path, DOCUMENT))
    codecs = [codec.name for codec in said.codecs]
    return ArraySpec(path, said.data_type, said.shape, said.chunk_grid.configuration.chunk_shape), codecs


def compressors_in(codecs: Sequence[str], path: str) -> Sequence[str]:
    """Return the codecs of an array that turn bytes into bytes.

    Raises:
        CorruptCheckpointError: the elements are not simply turned into bytes before, as in every array of this package.
    """
    if codecs[:1] != ["bytes"]:
        raise CorruptCheckpointError(
            f"{path}: its {DOCUMENT} names the codecs {list(codecs)!r:.200}, where the first should be bytes",
            LOAD_EARLIER,
        )
    return codecs[1:]


def require_spec(described: ArraySpec, array: ArraySpec) -> None:
    """Refuse an array whose metadata differs from the manifest's entry: libraries allocate memory by the metadata.

    Raises:
        CorruptCheckpointError
    """
    if described != replace(array, dtype=described_as(array.dtype)):
        raise CorruptCheckpointError(
            f"{array.path}: its {DOCUMENT} describes {described.dtype} of shape {list(described.shape)} in chunks of "
            f"{list(described.grid)}, the manifest {array.dtype} of {list(array.shape)} in {list(array.grid)}",
            LOAD_EARLIER,
        )


def group_document() -> dict[str, Any]:
    """Return the `zarr.json` of a group."""
    return {"zarr_format": 3, "node_type": "group", "attributes": {}}


def with_groups_above(groups: Iterable[str]) -> list[str]:
    """Return the paths of these groups and of all groups above them, outermost first; the checkpoint itself is ""."""
    found = {""}
    for group in groups:
        parts = group.split("/")
        found.update("/".join(parts[:depth]) for depth in range(1, len(parts) + 1))
    return sorted(found)


def below(path: str, name: str) -> str:
    """Join the path of an array or group, which may be "", with a file name or key."""
    return f"{path}/{name}" if path else name


def chunk_key(array: ArraySpec, number: int) -> str:
    """Return the key of chunk `number` (row-major) below its array, such as `c/0/1`; for a 0-dim array `c`."""
    offsets = chunk_box(array.shape, array.grid, number).offsets
    return "/".join(["c", *(str(offset // side) for offset, side in zip(offsets, array.grid, strict=True))])


def described_as(dtype: str) -> str:
    """Return the data type that an array's `zarr.json` names: its own, or that of integers of its size."""
    return AS_INTEGERS.get(dtype, dtype)


def _zero(dtype: str) -> object:
    """The fill value, whose bits are zero."""
    if dtype == "bool":
        return False
    if dtype == "float8_e8m0fnu":  # has no zero
        return "0x00"
    if dtype in ("complex64", "complex128"):
        return [0.0, 0.0]
    return 0.0 if "float" in described_as(dtype) else 0


def _bytes_codec(dtype: str) -> dict[str, Any]:
    """Return the codec of raw elements. For elements of one byte zarr-python writes no endianness."""
    if item_bytes(dtype) == 1:
        return {"name": "bytes"}
    return {"name": "bytes", "configuration": {"endian": "little"}}
