"""Export a checkpoint as one file of `torch.save`, which `torch.load` reads with `weights_only=True`.

torch lays the file out without the tensors' bytes, which are then written to their places piece by piece: memory for a few is needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.serialization import skip_data

from ckpt.convert.atomic_directory import atomic_directory
from ckpt.convert.opened import (
    PIECE_BYTES,
    Opened,
    OpenedTensor,
    Piece,
    digest_of_piece,
    read_pieces,
    require_known,
    slabs,
)
from ckpt.errors import StorageError
from ckpt.format.dtypes import item_bytes, raw_bytes, torch_dtype
from ckpt.loading.other_formats.other_checkpoint import Step
from ckpt.loading.other_formats.torch_files import open_torch_file, steps_into
from ckpt.loading.sources import CheckpointSource
from ckpt.storage.files import WriteOnce, read_once


def export_torch(
    source: CheckpointSource, dst: Path, *, progress: Callable[[int], object] = lambda num_bytes: None
) -> None:
    """Write a checkpoint of any format as one file of `torch.save`, read it back, and then rename it to `dst`.

    It holds the nested state dict that `ckpt.load` returns; an optimizer has the form of DCP's `get_optimizer_state_dict`.

    Args:
        source: opened by `ckpt.loading.loader.source_at`.
        dst: nothing is there.
        progress: called with the number of bytes that have moved.

    Raises:
        CheckpointExistsError: there is something at `dst`.
        CorruptCheckpointError: a part of the source is missing or damaged.
        ConfigurationError: a plain value is an object that this process does not know.
        StorageError: what was written is not what is read back.
    """
    state = Opened(source).state(optimizers_in_groups=True)
    with atomic_directory(dst, is_file=True) as file:
        tensors = _lay_out(state, file)
        pieces = [
            Piece(name, box, one.entry.dtype) for name, one in tensors.items() for box in slabs(one.entry, PIECE_BYTES)
        ]
        places = _places(file, tensors)
        digests = {}
        with file.open("r+b", buffering=0) as stream:
            fd = stream.fileno()
            out = WriteOnce(fd)
            for piece, tensor in read_pieces(source, pieces, tensors):
                digests[piece] = digest_of_piece(tensor)
                out.write(_bytes(tensor), places[piece.name] + _offset(piece, tensors[piece.name]))
                progress(tensor.nbytes)
            out.close()
            for piece, digest in digests.items():
                found = piece.empty()
                read_once(fd, [_bytes(found)], places[piece.name] + _offset(piece, tensors[piece.name]))
                if digest_of_piece(found) != digest:
                    raise StorageError(f"what was written for {dst} is not what is read back: {piece.name} was changed")
                progress(found.nbytes)


def _lay_out(state: dict[str, Any], file: Path) -> dict[str, OpenedTensor]:
    """Write the file without the bytes of its tensors; return these by their names in it, tied ones once."""
    fakes: dict[int, torch.Tensor] = {}
    with FakeTensorMode():
        described = _with_fakes(state, fakes)
    require_known(described)
    with skip_data(materialize_fake_tensors=True):
        torch.save(described, file)
    named = {one.name: (repr(path), one) for path, one in reversed(list(_leaves(state, ())))}
    return dict(named.values())


def _with_fakes(node: Any, fakes: dict[int, torch.Tensor]) -> Any:
    """Copy a nested state, with tensors without memory."""
    if isinstance(node, OpenedTensor):
        if id(node) not in fakes:
            fakes[id(node)] = torch.empty(node.entry.shape, dtype=torch_dtype(node.entry.dtype))
        return fakes[id(node)]
    if type(node) is dict:
        return {key: _with_fakes(one, fakes) for key, one in node.items()}
    if type(node) in (list, tuple):
        return type(node)(_with_fakes(one, fakes) for one in node)
    return node


def _leaves(node: Any, path: tuple[Step, ...]) -> Iterator[tuple[tuple[Step, ...], OpenedTensor]]:
    if isinstance(node, OpenedTensor):
        yield path, node
        return
    for step, inner in steps_into(node):
        yield from _leaves(inner, (*path, step))


def _places(file: Path, tensors: Mapping[str, OpenedTensor]) -> dict[str, int]:
    """Name of a tensor -> its first byte in the file."""
    stored = open_torch_file(file, allow_pickle=True).tensors
    places = {}
    for name in tensors:
        pieces = stored[name].pieces()
        assert isinstance(pieces, list), "they are row-major"
        places[name] = pieces[0].offset if pieces else 0
    return places


def _bytes(tensor: torch.Tensor) -> memoryview:
    bits: Any = raw_bytes(tensor.reshape(-1)).numpy()
    return memoryview(bits)


def _offset(piece: Piece, tensor: OpenedTensor) -> int:
    """The first byte of a piece, a run of consecutive elements, in its tensor."""
    strides = (math.prod(tensor.entry.shape[at + 1 :]) for at in range(len(tensor.entry.shape)))
    first = sum(offset * stride for offset, stride in zip(piece.box.offsets, strides, strict=True))
    return first * item_bytes(tensor.entry.dtype)
