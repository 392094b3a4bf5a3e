"""Open checkpoints of Megatron-Core's `torch_dist`: a checkpoint of DCP, `common.pt` for what is not sharded, and `metadata.json`.

Tensors, objects and the entries of the common state are at the top, under the names that Megatron-Core gives them. An object's is
`<key>/shard_<offset>_<shape>`. Versions before 0.14 store flattened ranges of a tensor of several dimensions as another one, whose last
dimension is the elements of a chunk; they are read as what they are parts of.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ckpt.errors import CheckpointError, CorruptCheckpointError
from ckpt.format.box import Box, flat_boxes
from ckpt.format.dtypes import item_bytes
from ckpt.interop.dcp.reading import METADATA, described_dcp
from ckpt.interop.dcp.reading import is_at as is_dcp
from ckpt.interop.torch_save.archives import sizes_in
from ckpt.interop.unpickling import require_small, unpickle
from ckpt.loading.other_checkpoint import FilePiece, OtherCheckpoint, OtherTensor, folder_with, given, refusing
from ckpt.state.flatten import Path as StatePath
from ckpt.state.flatten import key_of, steps_into
from ckpt.storage.metadata import TORCH_DIST, maybe_load_config

COMMON = "common.pt"


def is_at(path: Path) -> bool:
    """Whether a folder holds a `torch_dist` checkpoint."""
    try:
        config = maybe_load_config(path)
    except CheckpointError:  # somebody else's file of that name
        return False
    return config is not None and config.sharded_backend == TORCH_DIST and is_dcp(path)


def open_at(root: Path) -> OtherCheckpoint:
    """Open it. Reads `.metadata` and `common.pt`.

    Raises: those of `ckpt.interop.dcp.reading.open_at`, also for `common.pt`.
    """
    sharded = open_sharded(root)
    steps = steps_into(dict(common_state(root)), str(root / COMMON))
    common: dict[StatePath, Callable[[], Any]] = {(step,): given(value) for step, value in steps}
    twice = [path[0] for path in common if path[0] in sharded.tensors or path in sharded.values]
    if twice:
        raise CorruptCheckpointError(f"{root} holds {twice[0]} twice: in {COMMON} and in {METADATA}")
    values = {**sharded.values, **common}
    return OtherCheckpoint(root, sharded.tensors, values, described_in=METADATA, unread=sharded.unread)


def open_sharded(root: Path) -> OtherCheckpoint:
    """Open its sharded tensors and objects alone."""
    dcp, metadata = described_dcp(root)
    with refusing(root / METADATA, "DCP"):
        shapes = {
            name: sizes_in(described["nd_reformulated_orig_global_shape"])
            for name, described in (metadata.get("mcore_data") or {}).items()
            if described
        }
        tensors = {
            name: replace(_unflattened(root, name, tensor, shapes.get(name)), path=(name,))
            for name, tensor in dcp.tensors.items()
        }
    values: dict[StatePath, Callable[[], Any]] = {
        ("".join(map(str, map(key_of, path))),): partial(_object, root, path, read) for path, read in dcp.values.items()
    }
    return OtherCheckpoint(root, tensors, values, unread=dcp.unread)


def common_state(root: Path) -> dict[Any, Any]:
    """Read `common.pt`; an inert `UnknownObject` is in the place of each object of a class that is not built.

    Raises:
        CorruptCheckpointError: it is missing, damaged, or no dictionary.
    """
    with folder_with(root, COMMON) as folder:
        folder.require_regular(COMMON)
    common = unpickle(root / COMMON, unknown="keep")
    require_small(common, str(root / COMMON))
    if not isinstance(common, dict):
        raise CorruptCheckpointError(f"{root / COMMON} holds a {type(common).__name__}, where a state dict should be")
    return common


def _unflattened(root: Path, name: str, stored: OtherTensor, shape: tuple[int, ...] | None) -> OtherTensor:
    """The tensor of this shape, whose chunks are stored as rows of elements; None: it is stored as it is."""
    if shape is None:
        return stored
    counts, row = stored.shape[:-1], stored.shape[-1]
    chunk = tuple(side // max(count, 1) for side, count in zip(shape, counts, strict=True))
    if tuple(map(math.prod, zip(chunk, counts, strict=True))) != shape or math.prod(chunk) != row:
        raise CorruptCheckpointError(
            f"{root}: {name} of shape {list(shape)} is not what {list(stored.shape)} are chunks of"
        )
    return replace(stored, shape=shape, pieces=partial(_placed, root, name, stored, chunk))


def _placed(root: Path, name: str, stored: OtherTensor, chunk: tuple[int, ...]) -> list[FilePiece]:
    """The pieces of a tensor that is stored as rows of its chunks' elements, where they belong in the tensor."""
    rows = stored.pieces()
    assert isinstance(rows, list), "DCP stores raw bytes"
    placed = []
    for piece in rows:
        *numbers, start = piece.box.offsets
        if set(piece.box.shape[:-1]) - {1}:
            raise CorruptCheckpointError(f"{root}: a piece of {name} is part of several chunks")
        for box, at in flat_boxes(chunk, start, start + piece.box.shape[-1]):
            offsets = (n * side + inside for n, side, inside in zip(numbers, chunk, box.offsets, strict=True))
            placed.append(
                FilePiece(Box(tuple(offsets), box.shape), piece.file, piece.offset + at * item_bytes(stored.dtype))
            )
    return placed


def _object(root: Path, path: StatePath, read: Callable[[], Any]) -> Any:
    """The one object that a rank has stored under a unique key, in a list."""
    found = read()
    if not isinstance(found, list) or len(found) != 1:
        raise CorruptCheckpointError(f"{root}: {path[-1]} is no list of one object")
    return found[0]
