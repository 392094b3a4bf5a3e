"""The header of a safetensors file: made after its tensors are written, and parsed. And the index of a folder of such files.

Source of the format: the specification in the README of huggingface/safetensors. A file is the length of the header as 8 bytes, the
header as JSON, padded with spaces, and the tensors, end to end in any order, without a gap.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from json.encoder import encode_basestring_ascii as _quoted
from pathlib import Path
from typing import Any, NamedTuple, Never

import msgspec
import numpy as np

from ckpt.errors import CorruptCheckpointError
from ckpt.format.box import Box, whole
from ckpt.format.consistency import checked_place, require_apart
from ckpt.format.dtypes import item_bytes
from ckpt.format.file_kinds import kind_of
from ckpt.format.gc_pause import gc_paused
from ckpt.format.places import Place, encode_key
from ckpt.format.records import Content
from ckpt.format.strict_json import MAX_INT, Count, Shape, decode, fit, num_keys, parse, read
from ckpt.storage.checkpoint_files import CheckpointFolder, files_below, read_fully

SUFFIX = ".safetensors"
INDEX_NAME = "model.safetensors.index.json"
"""Name of a folder's index, as Hugging Face's loaders expect it."""

_BEGIN_BYTES = 64 << 10
"""What is read of a file at first, most headers whole."""

MOST_HEADER_BYTES = 100_000_000
"""The longest header that the safetensors library reads."""

_ALIGNED = 64
_METADATA = "__metadata__"
_PARTS = "ckpt.parts"
_FLOAT4 = "float4_e2m1fn_x2"
_PAIRS = {"complex128": ("float64", 2), "complex32": ("float16", 2), _FLOAT4: (_FLOAT4, 1)}
"""Types that the format lacks -> type of their numbers, of which one more dimension holds this many. Of float4, scalars alone."""
_NAMES = {
    "bool": "BOOL", "complex64": "C64", "complex128": "F64", "complex32": "F16",
    "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64",
    "uint8": "U8", "uint16": "U16", "uint32": "U32", "uint64": "U64",
    "float16": "F16", "float32": "F32", "float64": "F64",
    "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ", "float8_e8m0fnu": "F8_E8M0",
    _FLOAT4: "F4",  # whose numbers the format counts; torch has pairs of them
}  # fmt: skip
_TYPES = {name: ours for ours, name in _NAMES.items() if not ours.startswith("complex")} | {"C64": "complex64"}
_ANY_TYPE = re.compile(r"[A-Z]+([0-9]{1,3})(_[A-Z0-9]+)?")
"""The name of any data type, with the bits of an element."""
_LIKE_A_PART = re.compile(r"\[([0-9]+:[0-9]+(, [0-9]+:[0-9]+)*)?\]\??\Z")


class Entry(NamedTuple):
    """A tensor in a file, or a part of a tensor that lies in several files.

    Attributes:
        name: in the file.
        dtype: as Zarr v3 calls it.
        content: its tensor, and the box of it.
        start: offset of its first byte after the header.
    """

    name: str
    dtype: str
    content: Content
    start: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.content.box.shape) * item_bytes(self.dtype)


@dataclass(frozen=True, slots=True)
class SafetensorsFile:
    """The parsed header of a safetensors file.

    Attributes:
        data_start: offset of the first tensor in the file, after the header.
        rows: name in the file, data type, key, shape of the whole tensor, box, and offset after the header, of each entry. Plain
            tuples, for there may be very many.
        raw: name in the file -> type and shape of each tensor of a type that torch lacks, such as "F6_E2M3 [4, 8]". Its row is that of
            its bytes.
    """

    data_start: int
    rows: Sequence[tuple[str, str, str, tuple[int, ...], Box, int]]
    raw: Mapping[str, str] = field(default_factory=dict)

    @property
    def entries(self) -> list[Entry]:
        return [
            Entry(name, dtype, Content(key, shape, box), start) for name, dtype, key, shape, box, start in self.rows
        ]


def entries_of(dtype: str, contents: Iterable[Content], start: int) -> list[Entry]:
    """Return the entries of tensors, or parts, that lie end to end from byte `start` on."""
    width = item_bytes(dtype)
    entries = []
    for content in contents:
        entries.append(Entry(name_of(content), dtype, content, start))
        start += math.prod(content.box.shape) * width
    return entries


def name_of(content: Content) -> str:
    """Return the unique name of a tensor, or of a part of one, in a file.

    A whole tensor is named by its key, a part by key and box. A whole tensor is named by key and box, too, if its key looks like the
    name of a part, or is reserved by the format. A key that is not valid UTF-8 is encoded, and marked by a question mark.

    Example:
        >>> name_of(Content("w", (4, 8), Box((0, 0), (4, 8)))), name_of(Content("w", (4, 8), Box((2, 0), (2, 8))))
        ('w', 'w[2:4, 0:8]')
    """
    key, shape, box = content
    is_text = key.isascii() or _is_text(key)
    if box.shape == shape and is_text and key != _METADATA and not (key[-1:] in "]?" and _LIKE_A_PART.search(key)):
        return key
    place = f"[{', '.join(f'{o}:{o + n}' for o, n in zip(box.offsets, box.shape, strict=True))}]"
    return f"{key}{place}" if is_text else f"{encode_key(key)}{place}?"


def _is_text(key: str) -> bool:
    try:
        key.encode()
    except UnicodeEncodeError:
        return False
    return True


class Header:
    """The header of a file that is being written, with space for all entries that the file may get, at any offsets.

    Args:
        entries: all possible ones, in any order; their `start` is ignored.
    """

    def __init__(self, entries: Iterable[Entry]) -> None:
        entries = list(entries)
        last = sum(entry.num_bytes for entry in entries)
        num_bytes = 8 + len(_document((entry, last, last) for entry in entries))
        self.num_bytes = -(-num_bytes // _ALIGNED) * _ALIGNED

    def to_bytes(self, placed: Iterable[tuple[int, Sequence[Entry]]]) -> bytes:
        """Return the bytes of the header.

        Args:
            placed: (offset after the header, entries that lie end to end from there, as `entries_of` returns them with start 0).
        """
        rows = (
            (entry, at + entry.start, at + entry.start + entry.num_bytes) for at, entries in placed for entry in entries
        )
        document = _document(rows)
        assert len(document) + 8 <= self.num_bytes, (len(document), self.num_bytes)
        return (self.num_bytes - 8).to_bytes(8, "little") + document.ljust(self.num_bytes - 8)


def _document(rows: Iterable[tuple[Entry, int, int]]) -> bytes:
    """Return the JSON of a header. Rows: entry, first byte, end."""
    texts = []
    parts: list[str] = []
    pairs: dict[str, list[str]] = {}
    for (name, dtype, content, _), begin, end in rows:
        key, shape, box = content
        quoted = _quoted(name)
        if name != key:
            parts.append(f"{quoted}:[{_quoted(key)},{_numbers(shape)},{_numbers(box.offsets)}]")
        if dtype in _PAIRS and (dtype != _FLOAT4 or not shape):
            pairs.setdefault(dtype, []).append(quoted)
        texts.append(f'{quoted}:{{{_kind(dtype, box.shape)},"data_offsets":[{begin},{end}]}}')
    metadata = {"format": "pt"}
    if parts:
        metadata[_PARTS] = f"{{{','.join(parts)}}}"
    metadata |= {dtype: f"[{','.join(names)}]" for dtype, names in pairs.items()}
    document = ",".join([f"{_quoted(_METADATA)}:{json.dumps(metadata)}", *texts])
    return f"{{{document}}}".encode()


@lru_cache(maxsize=4096)
def _kind(dtype: str, shape: tuple[int, ...]) -> str:
    """Return data type and shape as stored. Cached: the tensors of a model have few."""
    stored = (*shape[:-1], 2 * (shape or (1,))[-1]) if dtype == _FLOAT4 else (*shape, 2) if dtype in _PAIRS else shape
    return f'"dtype":"{_NAMES[dtype]}","shape":{_numbers(stored)}'


@lru_cache(maxsize=4096)
def _numbers(numbers: tuple[int, ...]) -> str:
    return f"[{','.join(map(str, numbers))}]"


@gc_paused()
def read_shard(path: Place, root: Place | None = None) -> SafetensorsFile:
    """Read the header of a safetensors file, ours or another's.

    Args:
        root: a folder above it, below which no link is followed; None: the folder that holds it.

    Raises:
        CorruptCheckpointError: the file is missing, is no safetensors file, or ends before its last tensor.
    """
    with _refusing(path):
        data_start, rows, notes, size = _read_rows(path, root or path.parent)
        raw = {name: f"{row.dtype} {list(row.shape)}" for name, row in rows.items() if not _is_known(row)}
        return SafetensorsFile(data_start, _checked(rows, notes, size - data_start), raw)


def _read_rows(path: Place, root: Place) -> tuple[int, dict[str, HeaderRow], _Notes, int]:
    """Return offset of the first tensor, rows of the header, our notes in it, length of the file."""
    name = path.relative_to(root).as_posix()  # type: ignore[arg-type]  # both are of one kind
    with files_below(root) as files, files.opened(name) as file:
        size = file.size
        begin = memoryview(bytearray(min(size, _BEGIN_BYTES)))
        read_fully(file, begin, 0)
        length = int.from_bytes(begin[:8], "little")
        if size < 8 or length > min(size - 8, MOST_HEADER_BYTES):
            kind = _kind_at(root, name)
            raise ValueError(f"it is {kind}" if kind else f"it has {size} bytes, and its header should have {length}")
        header = memoryview(bytearray(length))
        there = min(length, len(begin) - 8)
        header[:there] = begin[8 : 8 + there]
        read_fully(file, header[there:], 8 + there)
        rows, metadata = parse_header(bytes(header), f"{path} is no safetensors file")
        parts = read(metadata.get(_PARTS, "{}"), dict[str, tuple[str, Shape, Shape]], _PARTS)
        pairs = {name: dtype for dtype in _PAIRS for name in read(metadata.get(dtype, "[]"), list[str], dtype)}
        notes = _Notes(parts, pairs)
        return 8 + length, rows, notes, size


def _kind_at(root: Place, name: str) -> str | None:
    if not isinstance(root, Path):
        return None
    with CheckpointFolder(root) as folder, folder.stream(name) as stream:
        return kind_of(stream)


class HeaderRow(msgspec.Struct):
    """The schema of a header's row."""

    dtype: str
    shape: Shape
    data_offsets: tuple[Count, Count]


def parse_header(data: bytes, where: str) -> tuple[dict[str, HeaderRow], dict[str, str]]:
    """Return the rows of a header, by name, and its metadata.

    Raises:
        CorruptCheckpointError: it is not strict JSON, or no header.
    """
    return _usual_header(data) or parse_any_header(data, where)


def _usual_header(data: bytes) -> tuple[dict[str, HeaderRow], dict[str, str]] | None:
    """Parse a header in which every row has its three keys alone, in half of the time; None: it is another one, or damaged."""
    try:
        texts = decode(data, dict[str, msgspec.Raw])
        noted = texts.pop(_METADATA, None)
        metadata = {} if noted is None else decode(bytes(noted), dict[str, str])
        rows = decode(b"[" + b",".join(texts.values()) + b"]", list[HeaderRow])
    except (ValueError, RecursionError):
        return None
    # With fewer keys than these it could not be decoded; a key that stands twice, or is unknown, makes it more.
    expected = len(rows) * (1 + len(HeaderRow.__struct_fields__)) + len(metadata) + (noted is not None)
    return (dict(zip(texts, rows, strict=True)), metadata) if num_keys(data) == expected else None


def parse_any_header(data: bytes, where: str) -> tuple[dict[str, HeaderRow], dict[str, str]]:
    """`parse_header` of any header."""
    tree = parse(data, where)
    if not isinstance(tree, dict):
        raise CorruptCheckpointError(f"{where}: its header is no object")
    metadata = fit(tree.pop(_METADATA, {}), dict[str, str], where)
    return fit(tree, dict[str, HeaderRow], where), metadata


class _Notes(NamedTuple):
    """Our notes in a header: name -> key, shape and offsets of each part; and name -> data type of tensors that are stored as pairs."""

    parts: dict[str, tuple[str, Shape, Shape]]
    pairs: dict[str, str]


@contextmanager
def _refusing(path: Place) -> Iterator[None]:
    """Turn errors of reading a header into a `CorruptCheckpointError` that names the file."""
    try:
        yield
    except CorruptCheckpointError:
        raise
    except OSError as error:
        raise CorruptCheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"its header has {error}" if isinstance(error, KeyError) else str(error)
        raise CorruptCheckpointError(f"{path} is no safetensors file: {what}") from error


class _Form(NamedTuple):
    """What tensors of one data type and one shape in a header have in common. `num_bytes` is at most `MAX_INT`."""

    dtype: str
    box: Box
    num_bytes: int


def _is_known(row: HeaderRow) -> bool:
    """Whether torch has the data type. It has float4 in pairs alone."""
    has_pairs = row.shape != () and row.shape[-1] % 2 == 0
    return row.dtype in _TYPES and (has_pairs or row.dtype != _NAMES[_FLOAT4])


def _form(dtype: str, shape: Shape) -> _Form:
    ours = _TYPES[dtype]
    if ours == _FLOAT4:
        shape = (*shape[:-1], shape[-1] // 2)
    return _Form(ours, whole(shape), min(math.prod(shape) * item_bytes(ours), MAX_INT))


def _raw_form(row: HeaderRow) -> _Form:
    """The bytes of a tensor whose type torch lacks."""
    named, size = _ANY_TYPE.fullmatch(row.dtype), row.data_offsets[1] - row.data_offsets[0]
    if named is None or math.prod(row.shape) * int(named[1]) != 8 * size:
        raise KeyError(row.dtype)
    return _Form("uint8", whole((size,)), size)


def _checked(
    rows: Mapping[str, HeaderRow], notes: _Notes, num_bytes: int
) -> list[tuple[str, str, str, tuple[int, ...], Box, int]]:
    """Return `SafetensorsFile.rows`, all of whose bytes lie in a file of so many bytes, and apart."""
    forms: dict[tuple[str, Shape], _Form] = {}  # there are few
    checked, sizes = [], []
    for name, row in rows.items():
        stored = row.dtype, row.shape
        form = forms.get(stored)
        if form is None:
            form = forms.setdefault(stored, _form(*stored)) if _is_known(row) else _raw_form(row)
        dtype, box, size = form
        key, shape = name, box.shape
        if name in notes.pairs or name in notes.parts:
            dtype, (key, shape, box) = _noted(name, form, notes)
        checked.append((name, dtype, key, shape, box, row.data_offsets[0]))
        sizes.append(size)
    places = np.array([row.data_offsets for row in rows.values()], np.int64).reshape(-1, 2)
    if not are_sound(places, np.array(sizes, np.int64), num_bytes):
        _refuse_places(rows, sizes, num_bytes)
    return checked


def _noted(name: str, stored: _Form, notes: _Notes) -> tuple[str, Content]:
    """Return data type and content of a tensor that our notes tell of."""
    dtype, sides = stored.dtype, stored.box.shape
    if name in notes.pairs:
        of, count = _PAIRS[notes.pairs[name]]
        if (dtype, sides[-1:]) != (of, (count,)):
            raise ValueError(f"{name!r:.80} cannot be pairs of {of}")
        dtype, sides = notes.pairs[name], sides[:-1]
    if name not in notes.parts:
        return dtype, Content(name, sides, whole(sides))
    key, shape, offsets = notes.parts[name]
    return dtype, Content(key, shape, checked_place(shape, offsets, sides))


def are_sound(places: np.ndarray[Any, Any], sizes: np.ndarray[Any, Any], num_bytes: int) -> bool:
    """Whether all ranges [begin, end) have their sizes, lie inside of a file of so many bytes, and share no byte.

    Args:
        places: int64, shape (n, 2), not negative.
        sizes: int64, shape (n,), not negative.
    """
    begins, ends = places[:, 0], places[:, 1]
    if not ((begins <= ends) & (ends <= num_bytes) & (ends - begins == sizes)).all():
        return False
    filled = places[sizes > 0]
    in_order = filled[np.argsort(filled[:, 0])]
    return bool((in_order[:-1, 1] <= in_order[1:, 0]).all())


def _refuse_places(rows: Mapping[str, HeaderRow], sizes: Sequence[int], num_bytes: int) -> Never:
    """Raise the error of ranges that are not `are_sound`."""
    for (name, row), size in zip(rows.items(), sizes, strict=True):
        begin, end = row.data_offsets
        if end - begin != size or not 0 <= begin <= end <= num_bytes:
            raise ValueError(f"bytes {begin} to {end} of {num_bytes} cannot be {name!r:.80} of shape {list(row.shape)}")
    require_apart((row.data_offsets for row in rows.values()), "bytes of its tensors")
    raise AssertionError("they were refused")


@gc_paused()
def index_bytes(folder: Place, files: Iterable[str], progress: Callable[[int], None]) -> bytes:
    """Return the index of a folder: the file of each whole tensor, as Hugging Face defines it, and the parts of the other tensors.

    Args:
        files: names of its safetensors files, in order.
        progress: called with the bytes of each header.

    Raises:
        CorruptCheckpointError: a file is missing, or is no safetensors file.
    """
    total = 0
    whole_rows: list[str] = []  # text, for there may be very many rows
    parted: dict[str, tuple[str, list[str]]] = {}
    for file in files:
        with _refusing(folder / file):
            data_start, rows, notes, _ = _read_rows(folder / file, folder)
            total += sum(end - begin for begin, end in (row.data_offsets for row in rows.values()))
            whole_rows += [f"{_quoted(name)}: {_quoted(file)}" for name in rows if name not in notes.parts]
            for name, (key, shape, offsets) in notes.parts.items():
                dtype = notes.pairs.get(name) or _TYPES[rows[name].dtype]
                form = f'{_quoted(key)}: {{"dtype": "{dtype}", "shape": {list(shape)}'
                sides = list(rows[name].shape[: len(shape)])
                if dtype == _FLOAT4 and sides:
                    sides[-1] //= 2
                place = f'"offset": {list(offsets)}, "shape": {sides}'
                part = f'{{"file": {_quoted(file)}, "name": {_quoted(name)}, {place}}}'
                parted.setdefault(key, (form, []))[1].append(part)
        progress(data_start)
    head = f'{{"metadata": {{"total_size": {total}}},\n"weight_map": {_lines(whole_rows)}'
    parts = [f'{form}, "parts": [{", ".join(some)}]}}' for form, some in parted.values()]
    rest = f',\n"parts": {_lines(parts)}' if parts else ""
    return f"{head}{rest}}}\n".encode()


def _lines(rows: Iterable[str]) -> str:
    """Return a JSON object with one row for each line."""
    return "{\n" + ",\n".join(rows) + "\n}"
