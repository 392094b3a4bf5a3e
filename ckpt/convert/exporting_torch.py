"""Export a checkpoint as one file of `torch.save`, which `torch.load` reads with `weights_only=True`.

torch lays the file out without the tensors' bytes, which the ranks then write to their places piece by piece: memory for a few is needed.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.serialization import skip_data

from ckpt.convert.atomic_directory import shared_directory
from ckpt.convert.checked_writes import PlacedBytes, require_read_back, write_pieces
from ckpt.convert.opened import (
    PIECE_BYTES,
    Opened,
    OpenedTensor,
    Piece,
    read_pieces,
    require_known,
    share_of,
    slabs,
)
from ckpt.errors import needing
from ckpt.errors.imports import private_name
from ckpt.format.dtypes import item_bytes, raw_bytes, torch_dtype
from ckpt.format.export_records import RECORDS_NAME
from ckpt.format.manifest import digest_of
from ckpt.loading.exported import records_of
from ckpt.loading.other_formats.other_checkpoint import Step
from ckpt.loading.other_formats.torch_files import open_torch_file, steps_into
from ckpt.loading.sources import CheckpointSource
from ckpt.ranks.topology import Topology
from ckpt.storage.files import make_durable


def export_torch(source: CheckpointSource, dst: Path, topology: Topology) -> None:
    """Write a checkpoint of any format as one file of `torch.save`, read it back, and then rename it to `dst`. Collective.

    It holds the nested state dict that `ckpt.load` returns; an optimizer has the form of DCP's `get_optimizer_state_dict`. A checkpoint of
    ours leaves its records in a member of the zip that torch ignores (`ckpt.format.export_records`).

    Args:
        source: opened by `ckpt.loading.loader.source_at`, on every rank.
        dst: nothing is there.

    Raises:
        CheckpointExistsError: there is something at `dst`.
        CorruptCheckpointError: a part of the source is missing or damaged.
        ConfigurationError: a plain value is an object that this process does not know.
        StorageError: what was written is not what is read back.
    """
    with topology.operation(f"export to {dst}"):
        with topology.phase("state"):
            state = Opened(source).state(optimizers_in_groups=True)
            tensors = _by_name(state)
        with shared_directory(dst, topology, is_file=True) as file:
            with topology.phase("lay out"):
                if topology.is_lead:
                    _lay_out(state, file)
                    _add_records(source, tensors, file)
                    make_durable(file.parent, {file.name: 0}, [], topology.progress)
            with (
                topology.phase("write"),
                needing(dst.name, lambda: sum(one.entry.num_bytes for one in tensors.values())),
            ):
                runs = write_pieces(_pieces(source, file, tensors, topology), topology.progress)
            with topology.phase("read back"):
                require_read_back(runs, dst, topology.progress)


def _pieces(
    source: CheckpointSource, file: Path, tensors: Mapping[str, OpenedTensor], topology: Topology
) -> Iterator[PlacedBytes]:
    """Yield the pieces of this rank's share, and their places."""
    starts = _starts(file, tensors)
    pieces = [
        Piece(name, box, tensors[name].entry.dtype)
        for name in sorted(tensors, key=starts.__getitem__)
        for box in slabs(tensors[name].entry, PIECE_BYTES)
    ]
    mine = share_of(pieces, [piece.num_bytes for piece in pieces], topology)
    for piece, tensor in read_pieces(source, mine, tensors):
        yield PlacedBytes(file, starts[piece.name] + _offset(piece, tensors[piece.name]), _bytes(tensor))


def _lay_out(state: dict[str, Any], file: Path) -> None:
    """Write the file without the bytes of its tensors."""
    fakes: dict[int, torch.Tensor] = {}
    with private_name("torch._subclasses.fake_tensor", "FakeTensorMode", "write torch files piece by piece")():
        described = _with_fakes(state, fakes)
    require_known(described)
    with skip_data(materialize_fake_tensors=True):
        torch.save(described, file)


def _add_records(source: CheckpointSource, tensors: Mapping[str, OpenedTensor], file: Path) -> None:
    """Add what the format has no place for as a last member of the zip, which `torch.load` does not read."""
    with zipfile.ZipFile(file, "a") as archive:
        described = next(one for one in archive.namelist() if one.endswith("/data.pkl"))
        names = {one.name: name for name, one in tensors.items()}
        records = records_of(source, names, digest_of(archive.read(described)))
        if records is not None:
            member = zipfile.ZipInfo(described.removesuffix("data.pkl") + RECORDS_NAME)  # dated 1980, so that equal states are equal files
            archive.writestr(member, records.to_bytes())


def _by_name(state: dict[str, Any]) -> dict[str, OpenedTensor]:
    """Return the tensors by their names in the file, tied ones once."""
    named = {one.name: (repr(path), one) for path, one in reversed(list(_leaves(state, ())))}
    return dict(named.values())


def _with_fakes(node: Any, fakes: dict[int, torch.Tensor]) -> Any:
    """Copy a nested state, with tensors without memory."""
    if isinstance(node, OpenedTensor):
        if id(node) not in fakes:
            fakes[id(node)] = torch.empty(node.entry.shape, dtype=torch_dtype(node.entry.dtype), device="cpu")
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


def _starts(file: Path, tensors: Mapping[str, OpenedTensor]) -> dict[str, int]:
    """Name of a tensor -> its first byte in the file."""
    stored = open_torch_file(file, allow_pickle=True).tensors
    starts = {}
    for name in tensors:
        pieces = stored[name].pieces()
        assert isinstance(pieces, list), "they are row-major"
        starts[name] = pieces[0].offset if pieces else 0
    return starts


def _bytes(tensor: torch.Tensor) -> memoryview:
    bits: Any = raw_bytes(tensor.reshape(-1)).numpy()
    return memoryview(bits)


def _offset(piece: Piece, tensor: OpenedTensor) -> int:
    """The first byte of a piece, a run of consecutive elements, in its tensor."""
    strides = (math.prod(tensor.entry.shape[at + 1 :]) for at in range(len(tensor.entry.shape)))
    first = sum(offset * stride for offset, stride in zip(piece.box.offsets, strides, strict=True))
    return first * item_bytes(tensor.entry.dtype)
