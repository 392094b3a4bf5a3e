"""Export a checkpoint as one file of `torch.save`, which `torch.load` reads with `weights_only=True`.

torch lays the file out without the tensors' bytes, which the ranks then write to their places piece by piece: memory for a few is needed.
"""

from __future__ import annotations

import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.serialization import skip_data

from ckpt.errors import needing, private_name
from ckpt.format.digests import digest_of
from ckpt.format.dtypes import torch_dtype
from ckpt.format.export_records import RECORDS_NAME
from ckpt.interop.exported import records_of
from ckpt.interop.new_files import PlacedBytes, require_read_back, shared_directory, write_pieces
from ckpt.interop.opened import (
    PIECE_BYTES,
    Opened,
    OpenedTensor,
    Piece,
    bytes_of_piece,
    leaves_of,
    read_pieces,
    require_known,
    share_of,
    slabs,
    with_tensors,
)
from ckpt.interop.torch_save.reading import open_at
from ckpt.loading.sources import CheckpointSource
from ckpt.ranks.topology import Topology
from ckpt.state.tensor_classes import leaf_of
from ckpt.storage.files import make_durable


def export_torch(source: CheckpointSource, dst: Path, topology: Topology) -> None:
    """Write a checkpoint of any format as one file of `torch.save`, read it back, and then rename it to `dst`. Collective.

    It holds the nested state dict that `ckpt.load` returns; an optimizer has the form of DCP's `get_optimizer_state_dict`. A checkpoint of
    ours leaves its records in a member of the zip that torch ignores (`ckpt.format.export_records`).

    Args:
        source: opened by `ckpt.interop.registry.source_at`, on every rank.
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
                needing(dst.name, lambda: sum(tensor.entry.num_bytes for tensor in tensors.values())),
            ):
                runs = write_pieces(_pieces(source, file, tensors, topology), topology.progress)
            with topology.phase("read back"):
                require_read_back(runs, dst, topology.progress)


def _pieces(
    source: CheckpointSource, file: Path, tensors: Mapping[str, OpenedTensor], topology: Topology
) -> Iterator[PlacedBytes]:
    """Return the pieces of this rank's part, and their places."""
    starts = _starts(file, tensors)
    placed: list[tuple[int, Piece]] = []
    for name in sorted(tensors, key=starts.__getitem__):
        start = starts[name]
        for box in slabs(tensors[name].entry, PIECE_BYTES):
            piece = Piece(name, box, tensors[name].entry.dtype)
            placed.append((start, piece))
            start += piece.num_bytes
    mine = share_of(placed, [piece.num_bytes for _, piece in placed], topology)
    read = read_pieces(source, (piece for _, piece in mine), tensors)
    return (PlacedBytes(file, start, bytes_of_piece(tensor)) for (start, _), (_, tensor) in zip(mine, read, strict=True))


def _lay_out(state: Any, file: Path) -> None:
    """Write the file without the bytes of its tensors."""
    with private_name("torch._subclasses.fake_tensor", "FakeTensorMode", "write torch files piece by piece")():
        described = with_tensors(state, _empty())
    require_known(described)
    with skip_data(materialize_fake_tensors=True):
        torch.save(described, file)


def _empty() -> Callable[[OpenedTensor], Any]:
    """Return a function that makes a tensor without values; tied ones, as a parameter and its `data` are, are of one memory."""
    once: dict[str, torch.Tensor] = {}

    def made(one: OpenedTensor) -> Any:
        if one.name not in once:
            once[one.name] = torch.empty(one.entry.shape, dtype=torch_dtype(one.entry.dtype), device="cpu")
        is_parameter, wants_gradient = leaf_of(one.kind)
        tensor = once[one.name].detach()
        wants_gradient = wants_gradient and (tensor.is_floating_point() or tensor.is_complex())
        return _Parameter(tensor, wants_gradient) if is_parameter else tensor.requires_grad_(wants_gradient)

    return made


class _Parameter(NamedTuple):
    """Is pickled as a parameter: in a `FakeTensorMode` there are none."""

    tensor: torch.Tensor
    wants_gradient: bool

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        rebuild = private_name("torch._utils", "_rebuild_parameter", "write parameters to torch files")
        return rebuild, (*self, OrderedDict())


def _add_records(source: CheckpointSource, tensors: Mapping[str, OpenedTensor], file: Path) -> None:
    """Add what the format has no place for as a last member of the zip, which `torch.load` does not read."""
    with zipfile.ZipFile(file, "a") as archive:
        described = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
        names = {tensor.name: name for name, tensor in tensors.items()}
        records = records_of(source, names, digest_of(archive.read(described)))
        if records is not None:
            member = zipfile.ZipInfo(described.removesuffix("data.pkl") + RECORDS_NAME)  # dated 1980, so that equal states are equal files
            archive.writestr(member, records.to_bytes())


def _by_name(state: Any) -> dict[str, OpenedTensor]:
    """Return the tensors by their names in the file, tied ones once."""
    found = [(repr(path), leaf) for path, leaf in leaves_of(state) if isinstance(leaf, OpenedTensor)]
    named = {leaf.name: (path, leaf) for path, leaf in reversed(found)}
    return dict(named.values())


def _starts(file: Path, tensors: Mapping[str, OpenedTensor]) -> dict[str, int]:
    """Name of a tensor -> its first byte in the file."""
    stored = open_at(file).tensors
    starts = {}
    for name in tensors:
        pieces = stored[name].pieces()
        assert isinstance(pieces, list), "they are row-major"
        starts[name] = pieces[0].offset if pieces else 0
    return starts
