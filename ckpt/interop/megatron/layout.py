"""Files of a checkpoint that Megatron-Core's zarr strategy wrote, before upstream removed that strategy.

```text
metadata.json                  {"sharded_backend": "zarr", ...}, written last
<key>/.zarray, 0.0, 0.1 ...    a Zarr v2 array per tensor: raw chunks, row-major; a `/` in a key makes nested folders
<key>.sync/                    empty files: locks between ranks
<key>/shard_<offset>_<shape>.pt   an object per file, pickled
common.pt                      everything else, pickled
```

There are no digests: damage is detected only if a file is missing, has the wrong size, or cannot be decoded.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from ckpt.errors import CheckpointNotFoundError, ConfigurationError, CorruptCheckpointError, sentence
from ckpt.format.box import chunk_box, num_chunks
from ckpt.format.dtypes import item_bytes, torch_dtype
from ckpt.format.manifest import MANIFEST_NAME
from ckpt.format.strict_json import MAX_INT, Shape, corrupt, read
from ckpt.storage.checkpoint_files import CheckpointFolder, link_in_checkpoint
from ckpt.storage.metadata import CONFIG_FNAME, maybe_load_config

COMMON_STATE_FNAME = "common.pt"
ARRAY_FILE = ".zarray"
NO_DIGESTS = "Take another checkpoint, or a copy of this one."
_MOST_METADATA_BYTES = 1 << 20
_KNOWN_CODECS = (
    "adler32, bitround, blosc, bz2, crc32, crc32c, fletcher32, gzip, jenkins_lookup3, lz4, lzma, shuffle, zlib, zstd"
)
"""Codecs that run no code of the file, and whose decoded size is known before."""
_CHUNK_FILE = re.compile(r"[0-9]+(\.[0-9]+)*")
_OBJECT_FILE = re.compile(r"shard_([0-9]+(\.[0-9]+)*)?_(-?[0-9]+(\.-?[0-9]+)*)?\.pt")


def is_megatron_zarr(checkpoint_dir: Path) -> bool:
    """Whether a folder is a checkpoint of this kind. One with a manifest is this project's, whatever its metadata.json says.

    Raises:
        CorruptCheckpointError: its metadata.json cannot be parsed.
    """
    if (checkpoint_dir / MANIFEST_NAME).exists():
        return False
    config = maybe_load_config(checkpoint_dir)
    # A common state in JSON means that this project wrote it, and that its manifest is lost.
    return config is not None and config.sharded_backend == "zarr" and config.common_backend != "json"


def require_version(checkpoint_dir: Path) -> None:
    """Refuse folders of another kind, and later versions of the format.

    Raises:
        CheckpointNotFoundError: no checkpoint of this kind.
        ConfigurationError: unknown version.
    """
    config = maybe_load_config(checkpoint_dir)
    if config is None or not is_megatron_zarr(checkpoint_dir):
        what = "there is none" if config is None else f"it says {config.sharded_backend}, or there is a {MANIFEST_NAME}"
        raise CheckpointNotFoundError(
            f"{checkpoint_dir} is no checkpoint that Megatron-Core's zarr strategy wrote: its {CONFIG_FNAME} would say "
            f"sharded_backend zarr, and {what}"
        )
    if config.sharded_backend_version != 1:
        raise ConfigurationError(
            f"{checkpoint_dir} is of version {config.sharded_backend_version} of Megatron-Core's zarr format; version 1 is known"
        )


@dataclass(frozen=True)
class MegatronFolder:
    """Files and folders of a checkpoint, as sorted paths below it.

    Attributes:
        arrays: folders with array metadata; the path is the key of the tensor.
        objects: files of objects.
        headless: folders with chunks of an array but without its metadata.
        others: files unknown to this format.
    """

    arrays: list[str] = field(default_factory=list)
    objects: list[str] = field(default_factory=list)
    headless: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)


def layout_of(checkpoint_dir: Path) -> MegatronFolder:
    """List a checkpoint's files. Opens none of them.

    Raises:
        CorruptCheckpointError: a folder in it is a symbolic link, whose target is no part of the checkpoint.
    """
    found = MegatronFolder()
    for folder, files in _folders(checkpoint_dir):
        path = folder.relative_to(checkpoint_dir).as_posix()
        if ARRAY_FILE in files:
            if not _is_for_locks(folder):
                found.arrays.append(path)
            continue
        chunks = [name for name in files if _CHUNK_FILE.fullmatch(name)]
        found.headless.extend([path] if chunks else [])
        for name in set(files) - set(chunks):
            below = name if path == "." else f"{path}/{name}"
            if path != "." and _OBJECT_FILE.fullmatch(name):
                found.objects.append(below)
            elif below not in (CONFIG_FNAME, COMMON_STATE_FNAME):
                found.others.append(below)
    for paths in (found.arrays, found.objects, found.headless, found.others):
        paths.sort()
    return found


@dataclass(frozen=True, slots=True)
class MegatronArray:
    """Metadata of one stored tensor.

    Attributes:
        dtype: a Zarr v3 data type name, as in `ckpt.format.dtypes`.
        grid: shape of one chunk; every side is at least 1.
        is_raw: chunks are plain elements, row-major and little-endian.
        separator: between the numbers in a chunk's file name.
        codecs: names of filters and compressor, in the order in which they encode.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    grid: tuple[int, ...]
    is_raw: bool
    separator: str
    codecs: tuple[str, ...] = ()

    @property
    def num_chunks(self) -> int:
        return math.prod(num_chunks(self.shape, self.grid))

    @property
    def num_bytes(self) -> int:
        """Size of all elements."""
        return math.prod(self.shape) * item_bytes(self.dtype)

    @property
    def chunk_bytes(self) -> int:
        """Size of a raw chunk. Chunks at the edge are padded to the same size."""
        return math.prod(self.grid) * item_bytes(self.dtype)

    def chunk_file(self, number: int) -> str:
        """Name of a chunk's file, by the chunk's row-major number."""
        offsets = chunk_box(self.shape, self.grid, number).offsets
        return self.separator.join(str(o // side) for o, side in zip(offsets, self.grid, strict=True)) or "0"


def array_at(checkpoint_dir: Path, key: str) -> MegatronArray:
    """Read the metadata of one array.

    Raises:
        CorruptCheckpointError: `.zarray` cannot be read or is invalid.
    """
    file = checkpoint_dir / key / ARRAY_FILE
    where = f"{key}: {file} does not describe a Zarr v2 array"
    try:
        with CheckpointFolder(checkpoint_dir) as folder:
            metadata = read(folder.read(f"{key}/{ARRAY_FILE}", _MOST_METADATA_BYTES), _Document, where)
        codecs = [codec for codec in (*(metadata.filters or ()), metadata.compressor) if codec is not None]
        _require_known(codecs)
    except (ValueError, KeyError, TypeError, OSError) as error:
        if isinstance(error, CorruptCheckpointError):
            raise
        raise CorruptCheckpointError(f"{where}: {sentence(error)}") from error
    array = MegatronArray(
        key=key,
        dtype=_dtype_name(metadata.dtype, key, file),
        shape=metadata.shape,
        grid=tuple(max(side, 1) for side in metadata.chunks),
        is_raw=not codecs and metadata.order == "C" and not metadata.dtype.startswith(">"),
        separator=metadata.dimension_separator,
        codecs=tuple(codec["id"] for codec in codecs),
    )
    if len(metadata.shape) != len(metadata.chunks) or max(array.num_bytes, array.chunk_bytes) > MAX_INT:
        raise corrupt(where, f"an array of shape {list(metadata.shape)} cannot lie in chunks of {list(metadata.chunks)}")
    return array


class _Document(msgspec.Struct):
    """Fields of `.zarray`."""

    zarr_format: Literal[2]
    shape: Shape
    chunks: Shape
    dtype: str
    order: Literal["C", "F"]
    compressor: dict[str, Any] | None = None
    filters: list[dict[str, Any]] | None = None
    dimension_separator: Literal[".", "/"] = "."


def _require_known(codecs: Iterable[Any]) -> None:
    """Refuse codecs outside of the list: numcodecs' `pickle` runs code from the file."""
    for codec in codecs:
        if codec["id"] not in _KNOWN_CODECS.split(", "):
            raise ValueError(f"codec {codec['id']!r:.40} is not one of those that are decoded: {_KNOWN_CODECS}")


def _dtype_name(text: object, key: str, file: Path) -> str:
    """Map a data type of Zarr v2, such as "<f4", or Megatron-Core's "bfloat16", to its name in `ckpt.format.dtypes`."""
    try:
        name = np.dtype(text).name if isinstance(text, str) and re.fullmatch(r"[<>|][biufc][0-9]+", text) else str(text)
        torch_dtype(name)
    except (TypeError, CorruptCheckpointError) as error:
        raise CorruptCheckpointError(f"{key}: {file} says data type {text!r}, of which torch has no tensors") from error
    return name


def headless(checkpoint_dir: Path, key: str) -> CorruptCheckpointError:
    """Make the error for an array whose metadata file is missing."""
    return CorruptCheckpointError(
        f"{key}: {checkpoint_dir / key} holds chunks of an array, and its {ARRAY_FILE} is missing. {NO_DIGESTS}"
    )


def _folders(checkpoint_dir: Path) -> Iterator[tuple[Path, list[str]]]:
    """Yield every folder with its files; does not descend into arrays."""
    for folder, folders, files in os.walk(checkpoint_dir, onerror=_raise):
        if ARRAY_FILE in files:
            folders.clear()
        for name in folders:
            if os.path.islink(path := os.path.join(folder, name)):
                raise link_in_checkpoint(Path(path))
        yield Path(folder), files


def _raise(error: OSError) -> None:
    raise error


def _is_for_locks(folder: Path) -> bool:
    """Whether a folder that looks like an array only holds the locks of the array beside it."""
    return (
        folder.name.endswith(".sync")
        and (folder / ARRAY_FILE).stat().st_size == 0
        and (folder.with_name(folder.name.removesuffix(".sync")) / ARRAY_FILE).is_file()
    )
