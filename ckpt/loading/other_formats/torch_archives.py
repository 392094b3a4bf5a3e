"""Tensors in the archives that `torch.save` writes: where their bytes lie, and of what type they are. No code of the archive runs.

An archive is a zip without compression: `data.pkl` describes the tensors, and `data/<n>` is the memory of one or several of them.
"""

from __future__ import annotations

import io
import struct
import zipfile
from dataclasses import dataclass
from typing import Any, BinaryIO

from ckpt.errors import CorruptCheckpointError
from ckpt.format.dtypes import item_bytes
from ckpt.format.unpickling import unpickle_inert

_MOST_PICKLE_BYTES = 1 << 30
_STORAGE_DTYPES = {
    "BoolStorage": "bool", "CharStorage": "int8", "ShortStorage": "int16", "IntStorage": "int32", "LongStorage": "int64",
    "ByteStorage": "uint8", "HalfStorage": "float16", "FloatStorage": "float32", "DoubleStorage": "float64",
    "BFloat16Storage": "bfloat16", "ComplexFloatStorage": "complex64", "ComplexDoubleStorage": "complex128",
}  # fmt: skip
_LOCAL_HEADER = struct.Struct("<4s22xHH")


@dataclass(frozen=True, slots=True)
class ArchivedTensor:
    """A tensor in an archive.

    Attributes:
        offset: of its first element in the file that holds the archive.
        stride: in elements.
    """

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def is_row_major(self) -> bool:
        expected = 1
        for side, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if side != 1 and stride != expected:
                return 0 in self.shape
            expected *= side
        return True


def tensor_in(file: BinaryIO, begin: int, length: int, where: str) -> ArchivedTensor:
    """Find the one tensor of an archive that lies at `begin` in a file.

    Raises:
        CorruptCheckpointError: there is no such archive, or it holds something else.
    """
    archive, root = _open_archive(file, begin, length, where)
    described = unpickle_inert(_read(archive, f"{root}data.pkl", where), where)
    try:
        if described.name == "torch._utils._rebuild_parameter":
            described = described.args[0]
        (kind, storage_type, key, _, num_elements), first, shape, stride = described.args[:4]
        if described.name == "torch._utils._rebuild_tensor_v2":
            dtype = _STORAGE_DTYPES[storage_type.name.rpartition(".")[2]]
        elif described.name == "torch._utils._rebuild_tensor_v3":  # of types that are newer than typed storages
            dtype = described.args[6].name.removeprefix("torch.")
            num_elements //= item_bytes(dtype)
        else:
            raise ValueError(f"it is made by {described.name}")
        shape, stride = sizes_in(shape), sizes_in(stride)
        last = (
            first + sum((side - 1) * step for side, step in zip(shape, stride, strict=True)) if 0 not in shape else -1
        )
        if kind != "storage" or first < 0 or not last < num_elements:
            raise ValueError(f"its elements {first} to {last} of {num_elements}")
        name = f"{root}data/{key}"
        item = item_bytes(dtype)
        if 0 in shape:
            return ArchivedTensor(dtype, shape, stride, begin)
        inside = archive.getinfo(name)
        if inside.compress_type != zipfile.ZIP_STORED or inside.file_size < num_elements * item:
            raise ValueError(f"{name} is compressed, or too short")
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        raise CorruptCheckpointError(f"{where} describes no tensor that can be read: {error}") from error
    return ArchivedTensor(
        dtype, shape, stride, begin + _data_offset(file, begin, inside.header_offset, where) + first * item
    )


def sizes_in(given: Any) -> tuple[int, ...]:
    """Return a shape, or strides, of a pickle.

    Raises:
        ValueError: it is something else.
    """
    if not isinstance(given, tuple) or not all(type(one) is int and one >= 0 for one in given):
        raise ValueError(f"{given!r} is no shape")
    return given


def _open_archive(file: BinaryIO, begin: int, length: int, where: str) -> tuple[zipfile.ZipFile, str]:
    """Open an archive that lies in a file; return it, and the folder that all its names begin with."""
    try:
        archive = zipfile.ZipFile(_Slice(file, begin, length))
        name = next(one for one in archive.namelist() if one.endswith("/data.pkl"))
    except (zipfile.BadZipFile, StopIteration, OSError, ValueError, struct.error, NotImplementedError) as error:
        raise CorruptCheckpointError(f"{where} is no archive of torch.save") from error
    return archive, name.removesuffix("data.pkl")


def _read(archive: zipfile.ZipFile, name: str, where: str) -> bytes:
    info = archive.getinfo(name)
    if info.file_size > _MOST_PICKLE_BYTES or info.compress_type != zipfile.ZIP_STORED:
        raise CorruptCheckpointError(f"{where}: {name} has {info.file_size} bytes, or is compressed")
    try:
        return archive.read(info)
    except (zipfile.BadZipFile, OSError, EOFError) as error:
        raise CorruptCheckpointError(f"{where}: {name} cannot be read") from error


def _data_offset(file: BinaryIO, begin: int, header: int, where: str) -> int:
    """The first byte of a member, which follows its local header: its name and padding are as long as that says."""
    file.seek(begin + header)
    found = file.read(_LOCAL_HEADER.size)
    if len(found) < _LOCAL_HEADER.size or not found.startswith(b"PK\x03\x04"):
        raise CorruptCheckpointError(f"{where}: the header of a tensor's bytes is missing")
    _, name, extra = _LOCAL_HEADER.unpack(found)
    return int(header + _LOCAL_HEADER.size + name + extra)


class _Slice(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, file: BinaryIO, begin: int, length: int) -> None:
        self._file, self._begin, self._length, self._at = file, begin, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise ValueError("before the beginning")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        most = max(0, self._length - self._at)
        size = most if size is None or size < 0 else min(size, most)
        self._file.seek(self._begin + self._at)
        data = self._file.read(size)
        self._at += len(data)
        return data
