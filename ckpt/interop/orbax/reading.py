"""Open checkpoints of Orbax, JAX's library: `_METADATA` describes the tree, and each leaf is a Zarr array, a string or an empty container.

The arrays (Zarr v2 or v3) lie in an OCDBT database, or each in a folder. TensorStore decodes them. Before memory is asked for, each chunk
is looked up: it is there, all its bytes are, and they are enough to decode to it.

Source: `orbax.checkpoint._src.metadata.tree` and `...serialization.tensorstore_utils` of orbax-checkpoint 0.12.8.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import torch

from ckpt.backends.ocdbt_format import Value
from ckpt.errors import CheckpointNotFoundError, ConfigurationError, CorruptCheckpointError, importing
from ckpt.format.box import Box, chunk_box, num_chunks, whole
from ckpt.format.dtypes import is_known, item_bytes, torch_dtype
from ckpt.format.gc_pause import gc_paused
from ckpt.format.records import ArraySpec
from ckpt.format.strict_json import MAX_INT, Shape, Side, fit, parse, read
from ckpt.loading.other_checkpoint import Encoded, OtherCheckpoint, OtherTensor
from ckpt.state.flatten import Path as StatePath
from ckpt.storage.checkpoint_files import CheckpointFolder

METADATA = "_METADATA"
_STEP = "_CHECKPOINT_METADATA"
_UNFINISHED = ".orbax-checkpoint-tmp"
_DATABASE = "manifest.ocdbt"
_STRINGS = "_strings.json"
_MOST_BYTES = 1 << 30
_MOST_DOCUMENT_BYTES = 1 << 20
_MOST_DEPTH = 128
_TREE_CACHE_BYTES = 100_000_000
"""As Orbax: without it the nodes, which hold small arrays, too, are decoded again for each array."""
_EMPTY: dict[str, Callable[[], Any]] = {
    "None": lambda: None, "Dict": dict, "List": list, "Tuple": tuple, "NamedTuple": lambda: None,
}  # fmt: skip
"""Types of leaves without bytes, and what Orbax restores for them."""
_ARRAYS = ("jax.Array", "np.ndarray")
_CODECS = {
    "bytes": 1,
    "crc32c": 1,
    "transpose": 1,
    "sharding_indexed": 1,
    "gzip": 1 << 11,
    "zlib": 1 << 11,
    "zstd": 1 << 16,
}
"""Codecs that are decoded, and the most bytes that one byte can decode to, rounded up: deflate reaches 1032, zstd 128 KiB in 4 bytes."""

_ZARR2_TYPES = {
    np.dtype(name).str[1:]: name
    for name in (
        "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64", "complex64",
        "complex128",
    )
}  # fmt: skip
"""What Zarr v2 calls them, behind a letter for the order of bytes, which TensorStore heeds. Others have the same names in both versions."""
_LEFT_OUT = (
    ". This version of Orbax left chunks of zeros out, and a lost one cannot be told from them: restore the checkpoint with Orbax, and "
    "save it with a newer version"
)

_Steps = tuple[str | int, ...]


class _Key(msgspec.Struct):
    key: str | int
    key_type: Literal[1, 2]


class _LeafValue(msgspec.Struct):
    value_type: str
    skip_deserialize: bool = False


class _Leaf(msgspec.Struct):
    key_metadata: list[_Key]
    value_metadata: _LeafValue


class _Tree(msgspec.Struct):
    tree_metadata: dict[str, _Leaf]
    use_ocdbt: bool | None = None
    use_zarr3: bool | None = False
    store_array_data_equal_to_fill_value: bool | None = False


class _Codec2(msgspec.Struct):
    id: str


class _Zarr2(msgspec.Struct):
    zarr_format: Literal[2]
    shape: Shape
    chunks: tuple[Side, ...]
    dtype: str
    compressor: _Codec2 | None = None
    filters: None = None
    dimension_separator: Literal[".", "/"] = "."


class _Cells(msgspec.Struct):
    chunk_shape: tuple[Side, ...]


class _Grid(msgspec.Struct):
    name: Literal["regular"]
    configuration: _Cells


class _Separator(msgspec.Struct):
    separator: Literal[".", "/"] | None = None


class _KeyEncoding(msgspec.Struct):
    name: Literal["default", "v2"]
    configuration: _Separator = msgspec.field(default_factory=_Separator)


class _Inner(msgspec.Struct):
    codecs: list[_Codec3] = []


class _Codec3(msgspec.Struct):
    name: str
    configuration: _Inner = msgspec.field(default_factory=_Inner)


class _Zarr3(msgspec.Struct):
    zarr_format: Literal[3]
    node_type: Literal["array"]
    shape: Shape
    data_type: str
    chunk_grid: _Grid
    chunk_key_encoding: _KeyEncoding
    codecs: list[_Codec3]


@cache
def _by_tensorstore() -> Any:
    """Import `ckpt.backends.tensorstore`.

    Raises:
        ConfigurationError: TensorStore cannot be imported.
    """
    with importing("reading a folder of Orbax"):
        from ckpt.backends import tensorstore
    return tensorstore


def is_at(path: Path) -> bool:
    """Whether a folder is an item of Orbax, or a step, of which an item is a folder in it."""
    return (path / METADATA).is_file() or bool(_items_of(path))


@gc_paused()
def open_at(path: Path) -> OtherCheckpoint:
    """Open an item, or the one item of a step. Reads what describes it, and looks up each chunk.

    Raises:
        CheckpointNotFoundError: its save was not finished.
        ConfigurationError: a step has several items, or an item has what is not read here: a root that is no dict, a codec.
        CorruptCheckpointError: it is damaged.
    """
    root = _item_at(path)
    if root.name.endswith(_UNFINISHED):
        raise CheckpointNotFoundError(f"{root} is a save of Orbax that was not finished")
    with CheckpointFolder(root) as folder:
        where = str(root / METADATA)
        tree = read(folder.read(METADATA, _MOST_BYTES), _Tree, where)
        leaves = _leaves_of(tree, where)
        is_database = (root / _DATABASE).exists() if tree.use_ocdbt is None else tree.use_ocdbt
        files = _Database(folder) if is_database else _Folders(folder)
        arrays = _Arrays(root, files, bool(tree.use_zarr3), bool(tree.store_array_data_equal_to_fill_value))
        tensors: dict[str, OtherTensor] = {}
        values: dict[StatePath, Callable[[], Any]] = {}
        unread: dict[StatePath, str] = {}
        strings = _strings_in(folder) if any(described.value_type == "string" for described in leaves.values()) else None
        for steps, leaf in leaves.items():
            name = ".".join(map(str, steps))
            at: StatePath = tuple([(step, "list") if isinstance(step, int) else step for step in steps])
            if leaf.value_type in _EMPTY:
                values[at] = _EMPTY[leaf.value_type]
            elif leaf.value_type == "string":
                values[at] = partial(_string_at, strings, name, str(root / _STRINGS))
            elif leaf.skip_deserialize or leaf.value_type not in (*_ARRAYS, "scalar"):
                unread[at] = (
                    f"is of the type {leaf.value_type!r:.80}, or stored outside of the arrays, which is not read here"
                )
            else:
                try:
                    spec, encoded = arrays.describe(name)
                except ConfigurationError as error:
                    unread[at] = str(error)
                    continue
                if leaf.value_type == "scalar":
                    if spec.shape:
                        raise CorruptCheckpointError(
                            f"{root}: {name} is a number, and its array has the shape {list(spec.shape)}"
                        )
                    values[at] = partial(_number, spec, encoded)
                else:
                    tensors[name] = OtherTensor(at, spec.dtype, spec.shape, encoded)
    step = root.parent if (root.parent / _STEP).is_file() else root
    return OtherCheckpoint(root, tensors, values, named_by=step, unread=unread)


def _items_of(step: Path) -> list[str]:
    found = (file.parent.name for file in step.glob(f"*/{METADATA}") if file.is_file())
    return sorted(name for name in found if not name.endswith(_UNFINISHED))


def _item_at(path: Path) -> Path:
    if (path / METADATA).is_file():
        return path
    items = _items_of(path)
    if len(items) != 1:
        raise ConfigurationError(
            f"{path} holds {len(items)} items of Orbax: {', '.join(items)}. Name one of these folders."
        )
    with CheckpointFolder(path) as folder:
        folder.require_folder(items[0])
    return path / items[0]


def _leaves_of(tree: _Tree, where: str) -> dict[_Steps, _LeafValue]:
    """The leaves by their paths.

    Raises:
        ConfigurationError: the root is no dict.
        CorruptCheckpointError: the paths make no tree, or two leaves have one name: Orbax joins the steps by dots.
    """
    leaves: dict[_Steps, _LeafValue] = {}
    for leaf in tree.tree_metadata.values():
        steps = tuple(_step(part, where) for part in leaf.key_metadata)
        if steps in leaves or len(steps) > _MOST_DEPTH:
            raise CorruptCheckpointError(
                f"{where}: the leaf {_shown(steps)} stands there twice, or is nested too deeply"
            )
        leaves[steps] = leaf.value_metadata
    if any(not steps or isinstance(steps[0], int) for steps in leaves):
        raise ConfigurationError(
            f"{where} describes a list, a tuple or one leaf. Save a dict of it with Orbax: only dicts are read here."
        )
    below: dict[_Steps, set[str | int]] = {}
    for steps in leaves:
        for depth in range(len(steps)):
            below.setdefault(steps[:depth], set()).add(steps[depth])
    for steps, found in below.items():
        # An empty container stays in the list when a later save fills it.
        if steps in leaves and leaves.pop(steps).value_type not in _EMPTY:
            raise CorruptCheckpointError(f"{where}: {_shown(steps)} is a leaf, and there are leaves below it")
        positions = {part for part in found if isinstance(part, int)}
        if positions and (len(positions) != len(found) or max(positions) >= len(found)):
            raise CorruptCheckpointError(
                f"{where}: {_shown(steps)} is a list, of which elements are missing or have names"
            )
    names = Counter(".".join(map(str, steps)) for steps, leaf in leaves.items() if leaf.value_type not in _EMPTY)
    if names and (most := names.most_common(1)[0])[1] > 1:
        raise CorruptCheckpointError(f"{where}: {most[1]} leaves have the name {most[0]!r:.200}")
    return leaves


def _step(one: _Key, where: str) -> str | int:
    if re.search("[\ud800-\udfff]", str(one.key)):
        raise CorruptCheckpointError(f"{where}: {one.key!r:.200} is no text")
    if one.key_type == 2:
        return str(one.key)
    if not re.fullmatch(r"[0-9]{1,9}", str(one.key)):
        raise CorruptCheckpointError(f"{where}: {one.key!r:.200} is no position in a list")
    return int(one.key)


def _shown(steps: _Steps) -> str:
    return f"{'.'.join(map(str, steps))!r:.200}"


def _strings_in(folder: CheckpointFolder) -> dict[str, Any]:
    where = str(folder.root / _STRINGS)
    try:
        return fit(parse(folder.read(_STRINGS, _MOST_BYTES), where), dict[str, Any], where)
    except FileNotFoundError as error:
        raise CorruptCheckpointError(f"{where} is missing", file=_STRINGS) from error


def _string_at(strings: Any, name: str, where: str) -> str:
    """The string of a leaf, whose name Orbax takes for a JSON pointer."""
    found = strings
    for step in name.split("/"):
        found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
    if not isinstance(found, str):
        raise CorruptCheckpointError(f"{where} does not hold the string {name!r:.200}", file=_STRINGS)
    return found


def _number(array: ArraySpec, encoded: Encoded) -> Any:
    out = torch.empty((), dtype=torch_dtype(array.dtype), device="cpu")
    encoded.read(whole(()), out)
    return out.item()


class _Folders:
    """Arrays with a folder each: documents and chunks, by their keys.

    Attributes:
        file: one that all arrays need, if there is one.
    """

    file: str | None = None

    def __init__(self, folder: CheckpointFolder) -> None:
        self._folder = folder

    def read(self, key: str) -> bytes:
        """Return a document."""
        return self._folder.read(key, _MOST_DOCUMENT_BYTES)

    def size(self, key: str) -> int:
        """Return the bytes of a chunk, which are all there."""
        return self._folder.stat(key).st_size

    def store(self, name: str) -> dict[str, Any]:
        """Return TensorStore's description of an array's store."""
        kvstore: dict[str, Any] = _by_tensorstore().folder_store(self._folder.root / name)
        return kvstore


class _Database:
    """As `_Folders`; in one OCDBT database, whose B-tree refers to files of its own and of the processes that wrote."""

    file: str | None = _DATABASE

    def __init__(self, folder: CheckpointFolder) -> None:
        self._folder = folder
        self._file_size = cache(lambda file: folder.stat(file).st_size)
        with _by_tensorstore().refusing(f"the database of {folder.root} cannot be read"):
            folder.require_regular(_DATABASE)
            self._values: dict[bytes, Value | bytes] = dict(_by_tensorstore().values_in(folder.root, self._file_size))

    def read(self, key: str) -> bytes:
        value, size = self._value(key), self.size(key)
        if isinstance(value, bytes):
            return value
        with self._folder.stream(value.file) as stream:
            stream.seek(value.offset)
            return stream.read(min(size, _MOST_DOCUMENT_BYTES))

    def size(self, key: str) -> int:
        value = self._value(key)
        if isinstance(value, bytes):
            return len(value)
        if value.offset + value.length > self._file_size(value.file):
            raise CorruptCheckpointError(
                f"{self._folder.root / value.file} was cut off: it does not hold all of {key}", file=value.file
            )
        return value.length

    def store(self, name: str) -> dict[str, Any]:
        base = _by_tensorstore().folder_store(self._folder.root)
        return {"driver": "ocdbt", "base": base, "path": f"{name}/", "cache_pool": _by_tensorstore().TREE_CACHE}

    def _value(self, key: str) -> Value | bytes:
        try:
            return self._values[key.encode()]
        except KeyError:
            raise FileNotFoundError from None


class _Arrays:
    """The arrays of an item.

    Args:
        has_all_chunks: Orbax has stored chunks of zeros, too.
    """

    def __init__(self, root: Path, files: _Folders | _Database, is_zarr3: bool, has_all_chunks: bool) -> None:
        self._root = root
        self._files = files
        self._is_zarr3 = is_zarr3
        self._has_all_chunks = has_all_chunks
        self._context = _by_tensorstore().mapping_files(tree_cache_bytes=_TREE_CACHE_BYTES)
        self._opened: dict[str, Any] = {}

    def describe(self, name: str) -> tuple[ArraySpec, Encoded]:
        """Describe an array, and check that all its chunks are there.

        Raises:
            ConfigurationError: it has codecs that are not decoded here.
            CorruptCheckpointError: it is damaged.
        """
        document = f"{name}/{'zarr.json' if self._is_zarr3 else '.zarray'}"
        file = self._files.file or document
        where = f"{self._root / document}"
        try:
            data = self._files.read(document)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise CorruptCheckpointError(f"{where} is missing", file=file) from error
        array, codecs, key_of = (_zarr3 if self._is_zarr3 else _zarr2)(data, name, where)
        if unknown := set(codecs) - _CODECS.keys():
            raise ConfigurationError(f"{where} names the codecs {sorted(unknown)}, which are not decoded here")
        if sum(_CODECS[codec] > 1 for codec in codecs) > 1:
            raise ConfigurationError(f"{where} compresses bytes more than once, by {codecs}, which is not decoded here")
        if len(array.grid) != len(array.shape) or math.prod(side or 1 for side in array.shape) > MAX_INT:
            raise CorruptCheckpointError(
                f"{where}: no array has the shape {list(array.shape)} and chunks of {list(array.grid)}"
            )
        if not is_known(array.dtype):
            raise ConfigurationError(f"{where} is of {array.dtype:.80}, a data type that is not read here")
        chunk_bytes = math.prod(array.grid) * item_bytes(array.dtype)
        self._require_chunks(array, key_of, chunk_bytes // math.prod(_CODECS[codec] for codec in codecs))
        return array, Encoded(file, array.grid, partial(self._read, array))

    def _require_chunks(self, array: ArraySpec, key_of: Callable[[Sequence[int]], str], least: int) -> None:
        """Refuse an array of which a chunk is missing, or has fewer bytes than it can be decoded from."""
        for number in range(math.prod(num_chunks(array.shape, array.grid))):
            offsets = chunk_box(array.shape, array.grid, number).offsets
            key = f"{array.path}/{key_of([at // side for at, side in zip(offsets, array.grid, strict=True)])}"
            file = self._files.file or key
            try:
                size = self._files.size(key)
            except (FileNotFoundError, NotADirectoryError) as error:
                older = "" if self._has_all_chunks else _LEFT_OUT
                raise CorruptCheckpointError(f"{self._root}: the chunk {key} is missing{older}", file=file) from error
            if size < least:
                raise CorruptCheckpointError(
                    f"{self._root}: the chunk {key} has {size} bytes, too few for {list(array.grid)} elements of {array.dtype}",
                    file=file,
                )

    def _read(self, array: ArraySpec, box: Box, out: torch.Tensor) -> None:
        """See `Encoded.read`."""
        if out.numel() == 0:
            return
        with _by_tensorstore().refusing(f"tensorstore cannot read {box} of {array.path} in {self._root}"):
            if array.path not in self._opened:
                self._opened[array.path] = self._open(array)
            _by_tensorstore().read_box(self._opened[array.path], self._context, box, out)

    def _open(self, array: ArraySpec) -> Any:
        stored = _by_tensorstore().opened(
            self._files.store(array.path), self._context, driver="zarr3" if self._is_zarr3 else "zarr"
        )
        grid = stored.chunk_layout.write_chunk.shape
        found = ArraySpec(array.path, stored.dtype.name, tuple(stored.shape), tuple(side or 1 for side in grid or ()))
        if found != array:
            raise CorruptCheckpointError(f"{self._root}: to tensorstore this is {found}, and its metadata says {array}")
        return stored


_Described = tuple[ArraySpec, list[str], Callable[[Sequence[int]], str]]


def _zarr2(document: bytes, name: str, where: str) -> _Described:
    """Return what `.zarray` says of an array, its codecs, and the function that names its chunks."""
    metadata = read(document, _Zarr2, where)
    array = ArraySpec(name, _ZARR2_TYPES.get(metadata.dtype[1:], metadata.dtype), metadata.shape, metadata.chunks)
    codecs = [metadata.compressor.id] if metadata.compressor else []
    return array, codecs, lambda at: metadata.dimension_separator.join(map(str, at)) or "0"


def _zarr3(document: bytes, name: str, where: str) -> _Described:
    """As `_zarr2`, of a `zarr.json`."""
    metadata = read(document, _Zarr3, where)
    array = ArraySpec(name, metadata.data_type, metadata.shape, metadata.chunk_grid.configuration.chunk_shape)
    codecs, left = [], list(metadata.codecs)
    for codec in left:
        codecs.append(codec.name)
        left += codec.configuration.codecs
    encoding = metadata.chunk_key_encoding
    if encoding.name == "v2":
        separator = encoding.configuration.separator or "."
        return array, codecs, lambda at: separator.join(map(str, at)) or "0"
    return array, codecs, lambda at: (encoding.configuration.separator or "/").join(["c", *map(str, at)])
