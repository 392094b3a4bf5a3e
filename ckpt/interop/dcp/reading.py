"""Open checkpoints of `torch.distributed.checkpoint`: `.metadata`, a pickle of which no code runs, and the `.distcp` files of the ranks.

torchtitan, Megatron-Core's `torch_dist`, Lightning's sharded checkpoints and FSDP's examples are of this format. Each tensor, or part of
one, is an archive of `torch.save` in a file of the rank that wrote it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from itertools import pairwise
from typing import Any, BinaryIO

from ckpt.errors import ConfigurationError, CorruptCheckpointError
from ckpt.format.box import Box
from ckpt.format.consistency import MAX_FILE_BYTES
from ckpt.format.dtypes import is_known, item_bytes
from ckpt.format.export_records import RECORDS_NAME, records_for
from ckpt.format.places import Place
from ckpt.format.unknown import shown
from ckpt.interop.torch_save.archives import Archive, is_tensor, located, read_tensor, sizes_in, tensor_in
from ckpt.interop.unpickling import unpickle_archived, unpickle_inert
from ckpt.loading.other_checkpoint import (
    Encoded,
    FilePiece,
    OtherCheckpoint,
    OtherTensor,
    folder_with,
    refusing,
)
from ckpt.state.flatten import Path as StatePath
from ckpt.state.flatten import leaves_apart, unflatten
from ckpt.storage.checkpoint_files import files_below, is_file

METADATA = ".metadata"
_MOST_BYTES = 4 << 30
_METADATA = "torch.distributed.checkpoint.metadata."


def is_at(path: Place) -> bool:
    """Whether a folder holds a checkpoint of DCP."""
    return is_file(path / METADATA)


def open_at(root: Place) -> OtherCheckpoint:
    """Open it. Reads `.metadata` alone.

    Raises:
        ConfigurationError: it was written with a transform, such as compression.
        CorruptCheckpointError: `.metadata` is damaged.
    """
    return described_dcp(root)[0]


def described_dcp(root: Place) -> tuple[OtherCheckpoint, dict[str, Any]]:
    """Open it as `open_at` does; also return all that `.metadata` says."""
    where = str(root / METADATA)
    with files_below(root) as folder:
        data = folder.read(METADATA, _MOST_BYTES)
        described = unpickle_inert(data, where)
        with refusing(root / METADATA, "DCP"):
            checkpoint = _checkpoint(root, described.state)
        if is_file(root / RECORDS_NAME):
            found = folder.read(RECORDS_NAME, MAX_FILE_BYTES)
            checkpoint.records = records_for(data, found, str(root / RECORDS_NAME))
    return checkpoint, described.state


def _checkpoint(root: Place, metadata: dict[str, Any]) -> OtherCheckpoint:
    places: dict[tuple[str, tuple[int, ...] | None], Any] = {}
    for index, place in metadata["storage_data"].items():
        key = index.state
        offset = None if key.get("offset") is None else sizes_in(key["offset"])
        places[_text(key["fqn"]), offset] = place.state
    _require_apart(root, places)
    paths = metadata.get("planner_data") or {}
    tensors: dict[str, OtherTensor] = {}
    values: dict[StatePath, Callable[[], Any]] = {}
    in_order: list[StatePath] = []
    unread: dict[StatePath, str] = {}
    for fqn, described in metadata["state_dict_metadata"].items():
        path: StatePath = tuple(
            [(part, "list") if isinstance(part, int) else _text(part) for part in paths.get(fqn, (fqn,))]
        )
        in_order.append(path)
        kind = described.name.removeprefix(_METADATA)
        if kind == "BytesStorageMetadata":
            place = places[fqn, None]
            values[path] = partial(_value, root, fqn, place)
        elif kind == "TensorStorageMetadata":
            shape, dtype = sizes_in(described.state["size"]), _dtype(described.state["properties"])
            if not is_known(dtype):
                unread[path] = f"is of {dtype}, which is not read here"
                continue
            boxes = [Box(sizes_in(c.state["offsets"]), sizes_in(c.state["sizes"])) for c in described.state["chunks"]]
            parts = [(box, places.get((fqn, box.offsets)) or places[fqn, None]) for box in boxes]
            _require_held(root, fqn, shape, dtype, parts)
            tensors[fqn] = OtherTensor(path, dtype, shape, partial(_pieces, root, fqn, dtype, shape, parts))
        else:
            raise CorruptCheckpointError(f"{root / METADATA}: {fqn} is a {described.name}, which is not known")
    return OtherCheckpoint(
        root, tensors, values, paths=in_order, described_in=METADATA, unread=unread
    )


def _require_apart(root: Place, places: Mapping[Any, dict[str, Any]]) -> None:
    """Refuse values that lie in the same bytes, or beyond the end of a file: what they are copied to would be far larger than they.

    A missing file is an error of the values in it, when they are read.
    """
    ranges: dict[str, list[tuple[int, int, str]]] = {}
    for (fqn, _), place in places.items():
        file, offset, length = _place(root, fqn, place)
        ranges.setdefault(file, []).append((offset, offset + length, fqn))
    for file, found in ranges.items():
        found.sort()
        for (_, end, fqn), (begin, _, other) in pairwise(found):
            if begin < end:
                raise CorruptCheckpointError(f"{root / METADATA}: {fqn} and {other} lie in the same bytes of {file}")
        with suppress(FileNotFoundError, NotADirectoryError), files_below(root) as folder:
            if found[-1][1] > folder.size(file):
                raise _cut_off(root, file, found[-1][2])


def _cut_off(root: Place, file: str, fqn: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"{root / file} was cut off: it does not hold all of {fqn}", file=file)


def _require_held(
    root: Place, fqn: str, shape: tuple[int, ...], dtype: str, parts: list[tuple[Box, dict[str, Any]]]
) -> None:
    """Refuse a tensor with more elements than its parts, which have no more than their archives."""
    held = sum(min(box.num_elements, place["length"] // item_bytes(dtype)) for box, place in parts)
    if math.prod(shape) > held:
        raise CorruptCheckpointError(
            f"{root / METADATA}: the pieces of {fqn} hold {held} of the {math.prod(shape)} elements of {list(shape)}"
        )


def _pieces(
    root: Place, fqn: str, dtype: str, shape: tuple[int, ...], parts: list[tuple[Box, dict[str, Any]]]
) -> list[FilePiece] | Encoded:
    """Find the bytes of a tensor's parts in their archives."""
    found = []
    for box, place in parts:
        with _archive(root, fqn, place) as (stream, file, length):
            where = f"{root / file}: {fqn}"
            inside = tensor_in(stream, stream.tell(), length, where)
        if box.num_elements * item_bytes(dtype) > length:
            raise CorruptCheckpointError(
                f"{where} repeats its elements to {box.num_elements * item_bytes(dtype)} bytes, in an archive of {length}"
            )
        if (inside.dtype, inside.shape) != (dtype, box.shape):
            raise CorruptCheckpointError(
                f"{where} is {inside.dtype} {list(inside.shape)}, and {METADATA} says {dtype} {list(box.shape)}"
            )
        found.append((box, file, inside))
    return located(root, fqn, shape, found)


def _value(root: Place, fqn: str, place: dict[str, Any]) -> Any:
    """Read a value, with the tensors in it."""
    with _archive(root, fqn, place) as (stream, file, length):
        label = f"{root / file}: {fqn}"
        archive = Archive(stream, stream.tell(), length, label)
        state = unpickle_archived(archive.pickle, label)
        leaves, paths = {}, {}
        for at, (path, leaf) in enumerate(leaves_apart(state, is_tensor)):
            paths[str(at)], leaves[str(at)] = path, leaf
            if is_tensor(leaf):
                with suppress(ConfigurationError):  # one that cannot be read stays an unknown object
                    leaves[str(at)] = read_tensor(root, file, archive.tensor(leaf, label), label)
    return leaves["0"] if paths["0"] == () else unflatten(leaves, paths, label)


@contextmanager
def _archive(root: Place, fqn: str, place: dict[str, Any]) -> Iterator[tuple[BinaryIO, str, int]]:
    """Open the file that holds an archive, at its first byte; give the file, its name, and the bytes of the archive."""
    file, offset, length = _place(root, fqn, place)
    if place.get("transform_descriptors"):
        raise ConfigurationError(
            f"{root}: {fqn} was written with a transform of DCP, such as compression, which is not read here"
        )
    with folder_with(root, file) as folder, folder.stream(file) as stream:
        if offset + length > stream.seek(0, os.SEEK_END):
            raise _cut_off(root, file, fqn)
        stream.seek(offset)
        yield stream, file, length


def _place(root: Place, fqn: str, place: dict[str, Any]) -> tuple[str, int, int]:
    """File, first byte and length of an archive."""
    file, offset, length = place["relative_path"], place["offset"], place["length"]
    if not isinstance(file, str) or not all(type(n) is int and n >= 0 for n in (offset, length)):
        raise CorruptCheckpointError(f"{root / METADATA}: {fqn} has no place in a file")
    return file, offset, length


def _dtype(properties: Any) -> str:
    given: Any = properties.state[0] if isinstance(properties.state, tuple) else properties.state["dtype"]
    return _text(given.name).removeprefix("torch.")


def _text(given: Any) -> str:
    if not isinstance(given, str):
        raise TypeError(f"{shown(given)} is no text")
    return given
