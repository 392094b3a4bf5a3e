"""Tensors in the archives that `torch.save` writes: where their bytes lie, and of what type they are. No code of the archive runs.

An archive is a zip without compression: `data.pkl` describes the tensors, and `data/<n>` is the memory of one or several of them.
"""

from __future__ import annotations

import math
import mmap
import struct
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch

from ckpt.errors import CheckpointError, ConfigurationError, CorruptCheckpointError
from ckpt.format.box import Box, first_overlap, overlap, whole
from ckpt.format.dtypes import is_known, item_bytes, torch_dtype
from ckpt.format.file_kinds import kind_of
from ckpt.format.places import Place
from ckpt.format.unknown import UnknownObject, shown
from ckpt.interop.unpickling import require_repeats_within, unpickle_inert
from ckpt.loading.other_checkpoint import Encoded, FilePiece, folder_with
from ckpt.storage.objects.files import Stream

_MOST_PICKLE_BYTES = 1 << 30
_MOST_DIMS = 60
_DECODED_BYTES = 16 << 20
"""The most bytes of a tensor with strides that a two-stage load reads at once."""
_STORAGE_DTYPES = {
    "BoolStorage": "bool", "CharStorage": "int8", "ShortStorage": "int16", "IntStorage": "int32", "LongStorage": "int64",
    "ByteStorage": "uint8", "HalfStorage": "float16", "FloatStorage": "float32", "DoubleStorage": "float64",
    "BFloat16Storage": "bfloat16", "ComplexFloatStorage": "complex64", "ComplexDoubleStorage": "complex128",
}  # fmt: skip
MAKES_TENSORS = ("torch._utils._rebuild_", "torch._tensor._rebuild_")
_REBUILT = {"torch._utils._rebuild_tensor_v2": 6, "torch._utils._rebuild_tensor_v3": 7}
"""Function that makes a tensor -> position of its argument for the bits of views. `v3`: of types that are newer than typed storages."""
_PARAMETERS = {"torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state"}
_PLAIN_TYPES = {"torch.Tensor", "torch._tensor.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer"}
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_DAMAGE = (AttributeError, KeyError, TypeError, ValueError, IndexError, OverflowError)


@dataclass(frozen=True, slots=True)
class ArchivedTensor:
    """A tensor in an archive.

    Attributes:
        stride: in elements; 0 for sides of one element or none.
        header: where its memory begins in the file that holds the archive: a member of the zip, with its header; None: it is empty, or
            it lies in no archive.
        first: its first element, in bytes from the member's content; of one in no archive, from the beginning of the file.
        is_conj, is_neg: its elements are the complex conjugates, or the negatives, of those that lie there.
        crc: CRC-32 of all memory that it is a part of, as the archive's directory says; 0: it says none.
    """

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    header: int | None
    first: int
    is_conj: bool = False
    is_neg: bool = False
    crc: int = field(default=0, compare=False)

    @property
    def is_raw(self) -> bool:
        """Whether its elements lie there as they are, row-major."""
        return self._lies_by(range(len(self.shape))) and (0 in self.shape or not (self.is_conj or self.is_neg))

    @property
    def order(self) -> list[int]:
        """The dimensions in the order of memory, the slowest first, if elements fill it in another order than by rows; otherwise []."""
        order = sorted(range(len(self.shape)), key=self.stride.__getitem__, reverse=True)
        return [] if self._lies_by(range(len(self.shape))) or not self._lies_by(order) else order

    def _lies_by(self, order: Sequence[int]) -> bool:
        expected = 1
        for dim in reversed(order):
            if self.shape[dim] != 1 and self.stride[dim] != expected:
                return 0 in self.shape
            expected *= self.shape[dim]
        return True


class Archive:
    """An archive that lies in a file, from byte `begin` on. Reads its directory.

    Args:
        where: its name, for messages.

    Raises:
        CorruptCheckpointError: there is no such archive.
        ConfigurationError: it is of a big-endian machine.
    """

    def __init__(self, file: BinaryIO, begin: int, length: int, where: str) -> None:
        self._begin, self._length, self._where = begin, length, where
        self._found: set[ArchivedTensor] = set()
        self._found_bytes = 0
        part: Any = Stream(_Part(file, begin, length))  # without a buffer: the file has one
        try:
            self._zip = zipfile.ZipFile(part)
            names = self._zip.namelist()
            self._root = next(name for name in names if name.endswith("/data.pkl")).removesuffix("data.pkl")
        except Exception:  # bytes that are no zip make Python raise nearly anything
            part.seek(0)
            kind = kind_of(part)
            what = "" if kind is None else f": it is {kind}"
            raise CorruptCheckpointError(f"{where} is no archive of torch.save{what}") from None
        if len(set(names)) != len(names):
            raise CorruptCheckpointError(f"{where} has two members of one name")
        if f"{self._root}byteorder" in names and self._read("byteorder") != b"little":
            raise ConfigurationError(f"{where} was written on a big-endian machine, which is not read here")

    @property
    def pickle(self) -> bytes:
        """The description of its tensors."""
        return self._read("data.pkl")

    def beside(self, name: str) -> bytes | None:
        """The content of a member beside it; None: there is none."""
        return self._read(name) if f"{self._root}{name}" in self._zip.NameToInfo else None

    def tensor(self, described: Any, name: str) -> ArchivedTensor:
        """Return the tensor that an object of the pickle stands for.

        Raises:
            ConfigurationError: it is a tensor of a kind that is not read here, or none.
            CorruptCheckpointError: it does not lie in the archive.
        """
        try:
            return self._tensor(described, name)
        except CheckpointError:
            raise
        except _DAMAGE as error:
            raise CorruptCheckpointError(f"{name} describes no tensor that can be read: {error}") from None

    def _tensor(self, described: Any, name: str) -> ArchivedTensor:
        described = _unwrapped(described)
        made_by = getattr(described, "name", type(described).__name__)
        if made_by not in _REBUILT:
            raise ConfigurationError(f"{name} is made by {made_by}: only plain tensors are read, with all elements")
        at = _REBUILT[made_by]
        (kind, storage_type, key, _, num_elements), first, shape, stride = described.args[:4]
        bits = described.args[at] if len(described.args) > at else None
        if kind != "storage" or not (isinstance(key, str) and key.isdecimal()):
            raise ValueError(f"its memory is {shown(kind)} {shown(key)}")
        if any(type(number) is not int or number < 0 for number in (first, num_elements)):
            raise ValueError(f"its first element is {shown(first)} of {shown(num_elements)}")
        dtype = _STORAGE_DTYPES.get(storage_type.name.rpartition(".")[2]) if at == 6 else _dtype_name(described.args[6])
        if dtype is None:
            kind = shown(described.args[6]) if at == 7 else storage_type.name
            raise ConfigurationError(f"{name} is of {kind}, a data type that is not read here")
        item = item_bytes(dtype)
        shape, stride = sizes_in(shape), sizes_in(stride)
        if math.prod(max(1, side) for side in shape) * item >= 1 << 63:
            raise ValueError(f"its shape is {shown(shape)}")
        stride = tuple(step if side > 1 else 0 for side, step in zip(shape, stride, strict=True))
        is_conj, is_neg = _bits(bits)
        if 0 in shape:
            return ArchivedTensor(dtype, shape, stride, None, 0)
        last = first + sum((side - 1) * step for side, step in zip(shape, stride, strict=True))
        member = self._member(f"data/{key}")
        if (last + 1) * item > member.file_size or not last < num_elements // (1 if at == 6 else item):
            raise ValueError(f"its elements {first} to {last} do not lie in {member.filename}")
        at = self._begin + member.header_offset
        one = ArchivedTensor(dtype, shape, stride, at, first * item, is_conj, is_neg, member.CRC)
        if one not in self._found:
            self._found.add(one)
            self._found_bytes += math.prod(shape) * item
            what = f"{name} repeats its elements to {math.prod(shape) * item} bytes"
            require_repeats_within(self._found_bytes, self._length, what)
        return one

    def _member(self, name: str) -> zipfile.ZipInfo:
        member = self._zip.getinfo(f"{self._root}{name}")
        if (
            member.compress_type != zipfile.ZIP_STORED
            or member.flag_bits & 1
            or member.compress_size != member.file_size
            or not 0 <= member.header_offset <= self._length - member.file_size
        ):
            raise CorruptCheckpointError(f"{self._where}: {name} is compressed, encrypted or cut off")
        return member

    def _read(self, name: str) -> bytes:
        member = self._member(name)
        if member.file_size > _MOST_PICKLE_BYTES:
            raise CorruptCheckpointError(f"{self._where}: {name} has {member.file_size} bytes")
        try:
            return self._zip.read(member)
        except Exception:  # as above
            raise CorruptCheckpointError(f"{self._where}: {name} cannot be read") from None


def is_tensor(leaf: Any) -> bool:
    """Whether an object of a pickle stands for a tensor."""
    return isinstance(leaf, UnknownObject) and leaf.name.startswith(MAKES_TENSORS)


def kind_of_tensor(described: Any) -> tuple[bool, bool]:
    """Whether the tensor that an object of the pickle stands for is a parameter, and whether it requires a gradient."""
    made_by = getattr(described, "name", None)
    args: tuple[Any, ...] = getattr(described, "args", None) or ()
    if made_by in _PARAMETERS:
        return True, len(args) > 1 and args[1] is True
    return False, made_by in _REBUILT and len(args) > 4 and args[4] is True


def parts_of_dtensor(described: Any) -> tuple[Any, Any] | None:
    """Return what a pickle holds of a DTensor: the object of its local tensor, and that of its spec; None: the object is no DTensor."""
    described = _unwrapped(described)
    args: Any = getattr(described, "args", None) or ()
    if getattr(described, "name", None) != "torch._tensor._rebuild_from_type_v2" or len(args) != 4:
        return None
    made_by, kind = (getattr(named, "name", "") for named in args[:2])
    if made_by != "torch._utils._rebuild_wrapper_subclass" or not kind.endswith(".DTensor"):
        return None
    state = args[3][1] if isinstance(args[3], tuple) and len(args[3]) == 2 else args[3]
    if not isinstance(state, dict) or not state.keys() >= {"_local_tensor", "_spec"}:
        return None
    return state["_local_tensor"], state["_spec"]


def read_tensor(root: Place, file: str, one: ArchivedTensor, name: str) -> torch.Tensor:
    """Read a tensor of a file into memory."""
    box = whole(one.shape)
    out = torch.empty(one.shape, dtype=torch_dtype(one.dtype), device="cpu")
    if out.numel():
        _copy(root, FilePiece(box, file, _content(root, file, one, name)), one, box, out, name)
    return out


def tensor_in(file: BinaryIO, begin: int, length: int, where: str) -> ArchivedTensor:
    """Find the one tensor of an archive that lies at `begin` in a file.

    Raises: as `Archive`, and `Archive.tensor`.
    """
    archive = Archive(file, begin, length, where)
    described = unpickle_inert(archive.pickle, where)
    if not isinstance(described, UnknownObject):
        raise CorruptCheckpointError(f"{where} describes no tensor: {type(described).__name__}")
    return archive.tensor(described, where)


def located(
    root: Place, name: str, shape: tuple[int, ...], parts: Sequence[tuple[Box, str, ArchivedTensor]]
) -> list[FilePiece] | Encoded:
    """Find the bytes of a tensor's parts: pieces, where all lie row-major; otherwise they are copied out of the files, which are mapped.

    Args:
        name: of the tensor.
        parts: box in the whole tensor, file that the archive lies in, and the part, whose shape has as many elements as the box.

    Raises:
        CorruptCheckpointError: the header of a part is missing, or parts with strides do not tile the tensor.
    """
    pieces = [FilePiece(box, file, _content(root, file, part, name)) for box, file, part in parts]
    if all(part.is_raw for _, _, part in parts):
        return pieces
    if first_overlap([box for box, _, _ in parts]) or sum(box.num_elements for box, _, _ in parts) != math.prod(shape):
        raise CorruptCheckpointError(f"{root}: the parts of {name} do not tile it")

    def read(wanted: Box, out: torch.Tensor) -> None:
        for piece, (_, _, content) in zip(pieces, parts, strict=True):
            if (both := overlap(piece.box, wanted)) is not None:
                _copy(root, piece, content, both.relative_to(piece.box), out[both.relative_to(wanted).slices], name)

    return Encoded(parts[0][1], _grid(shape, parts[0][2].dtype), read)


def _copy(root: Place, piece: FilePiece, one: ArchivedTensor, box: Box, out: torch.Tensor, name: str) -> None:
    """Copy a box of a part into host memory. The elements may lie at any byte, so that NumPy copies them, as integers."""
    item = item_bytes(one.dtype)
    word = min(item, 8)
    stride = [step * item for step in one.stride]
    first = piece.offset + sum(at * step for at, step in zip(box.offsets, stride, strict=True))
    shape, steps = (*box.shape, item // word), (*stride, word)
    with folder_with(root, piece.file) as folder, folder.stream(piece.file) as stream:
        try:
            memory: Any
            if isinstance(root, Path):
                memory = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
            else:  # from the first byte that is wanted to the last one
                stream.seek(first)
                memory, first = stream.read(sum((side - 1) * step for side, step in zip(shape, steps, strict=True)) + word), 0
            source: Any = np.ndarray(shape, f"<i{word}", memory, first, steps)  # checks that all lies in the file
        except (ValueError, TypeError):
            raise CorruptCheckpointError(f"{root / piece.file} was cut off: {name}", file=piece.file) from None
    out = out.detach()
    real = torch.view_as_real(out) if item > word else out.unsqueeze(-1)
    words: Any = real.view(_WORDS[word]).numpy()
    np.copyto(words, source)
    if one.is_conj:
        torch.conj_physical_(out)
    if one.is_neg:
        out.neg_()


_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _grid(shape: tuple[int, ...], dtype: str) -> tuple[int, ...]:
    """Cut a tensor along its first sides into chunks of at most `_DECODED_BYTES`."""
    grid, inner = [], item_bytes(dtype)
    for side in reversed(shape):
        grid.append(max(1, min(side, _DECODED_BYTES // inner)))
        inner *= grid[-1]
    return tuple(reversed(grid))


def sizes_in(given: Any) -> tuple[int, ...]:
    """Return a shape, or strides, of a pickle.

    Raises:
        ValueError: it is something else.
    """
    if not isinstance(given, tuple) or len(given) > _MOST_DIMS:
        raise ValueError(f"{shown(given)} is no shape")
    if not all(type(number) is int and 0 <= number < 1 << 63 for number in given):
        raise ValueError(f"{shown(given)} is no shape")
    return tuple(given)


def _unwrapped(described: Any) -> Any:
    """Return the tensor inside of a parameter or buffer: their Python attributes are no part of the state."""
    for _ in range(2):  # a parameter of a plain type with attributes
        name: Any = getattr(described, "name", None)
        args: Any = getattr(described, "args", None) or ()
        if name in _PARAMETERS:
            described = args[0]
        elif name == "torch._tensor._rebuild_from_type_v2" and getattr(args[1], "name", None) in _PLAIN_TYPES:
            made = UnknownObject(*args[2])
            made.__dict__["name"] = args[0].name
            described = made
    return described


def _dtype_name(given: Any) -> str | None:
    """The data type of a pickle's argument: one of torch, or a stand-in for it; None: it is not known."""
    name: Any = str(given) if isinstance(given, torch.dtype) else getattr(given, "name", None)
    if not isinstance(name, str):
        return None
    name = name.removeprefix("torch.")
    return str(name) if is_known(name) else None


def _bits(given: Any) -> tuple[bool, bool]:
    bits = given or {}
    if not isinstance(bits, dict) or not bits.keys() <= {"conj", "neg"}:
        raise ValueError(f"it has the bits {shown(given)}")
    return bool(bits.get("conj")), bool(bits.get("neg"))


def _content(root: Place, file: str, one: ArchivedTensor, name: str) -> int:
    """The position of a tensor's first element in its file. Its member's header says where the content begins."""
    if one.header is None:
        return one.first
    with folder_with(root, file) as folder, folder.stream(file) as stream:
        stream.seek(one.header)
        found = stream.read(_LOCAL_HEADER.size)
    if len(found) < _LOCAL_HEADER.size or not found.startswith(b"PK\x03\x04"):
        raise CorruptCheckpointError(f"{root / file}: the header of the bytes of {name} is missing", file=file)
    _, name_length, extra = _LOCAL_HEADER.unpack(found)
    return int(one.header + _LOCAL_HEADER.size + name_length + extra + one.first)


class _Part(NamedTuple):
    """A part of a file, see `ckpt.storage.objects.files.ReadAt`."""

    file: BinaryIO
    begin: int
    size: int

    def read_at(self, buffers: Sequence[memoryview], offset: int) -> int:
        self.file.seek(self.begin + offset)
        data = self.file.read(min(len(buffers[0]), max(0, self.size - offset)))
        buffers[0][: len(data)] = data
        return len(data)
