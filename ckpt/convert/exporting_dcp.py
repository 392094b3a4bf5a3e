"""Export a checkpoint as one of `torch.distributed.checkpoint`. That package writes its own format; tensors are read when it asks for them.

A large tensor becomes several pieces, as a sharded one has, so that memory is needed for one piece.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save

from ckpt.convert.atomic_directory import shared_directory
from ckpt.convert.opened import Opened, OpenedTensor, ahead, read_into, slabs
from ckpt.errors import CheckpointError, ConfigurationError, StorageError
from ckpt.format.box import Box
from ckpt.format.dtypes import raw_bytes, torch_dtype, zarr_name
from ckpt.format.unpickling import unknown_in
from ckpt.loading.direct import DirectLoad
from ckpt.loading.other_formats.dcp_folders import open_dcp
from ckpt.loading.sources import CheckpointSource
from ckpt.loading.strategy import ReadRequest
from ckpt.memory.device import device_of
from ckpt.ranks.topology import Topology
from ckpt.state.statefuls import optimizer_in_groups

_PIECE_BYTES = 8 << 20
"""The largest piece of a tensor: memory for one is needed."""


def export_dcp(source: CheckpointSource, dst: Path, topology: Topology) -> None:
    """Write a checkpoint of any format as one of `torch.distributed.checkpoint`, read it back, and then rename it to `dst`. Collective.

    Its keys are those under which `dcp.save` would have saved the same nested state dict; components are the first step of a path. An
    optimizer gets the form of `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`.

    Args:
        source: opened by `ckpt.loading.loader.source_at`, on every rank.
        dst: nothing is there, or an empty folder.
        topology: more than one rank needs torch's default process group, of the same ranks.

    Raises:
        CheckpointExistsError: there is something at `dst`.
        CorruptCheckpointError: a part of the source is missing or damaged.
        ConfigurationError: a plain value is an object that this process does not know.
        StorageError: what was written is not what is read back.
    """
    with topology.operation(f"export to {dst}"):
        with topology.phase("state"):
            planner = _Planner(source, topology)
        with shared_directory(dst, topology) as folder:
            with topology.phase("write"):
                writer = FileSystemWriter(folder, overwrite=False)
                _save(writer, planner, no_dist=topology.world_size == 1)
            with topology.phase("read back"):
                _require_read_back(folder, dst, planner.digests, topology)


def _save(writer: FileSystemWriter, planner: SavePlanner, *, no_dist: bool) -> None:
    """Call DCP, and raise the error of the first rank that failed as it was."""
    try:
        save({}, storage_writer=writer, planner=planner, no_dist=no_dist)
    except CheckpointException as error:  # which is no `Exception`
        first, _ = next(iter(error.failures.values()))
        raise first from None if isinstance(first, CheckpointError) else error


class _Planner(SavePlanner):
    """Tells DCP what this rank writes: pieces of tensors, in the order of the checkpoint, and, on the lead, all plain values.

    Attributes:
        digests: of the pieces that this rank has written.
    """

    def __init__(self, source: CheckpointSource, topology: Topology) -> None:
        flat, self._paths = flatten_state_dict({key: _as_of_dcp(one) for key, one in Opened(source).state().items()})
        self._source = source
        self.tensors: dict[str, OpenedTensor] = {key: one for key, one in flat.items() if isinstance(one, OpenedTensor)}
        self._values = {key: value for key, value in flat.items() if key not in self.tensors}
        if unknown := unknown_in(self._values):
            raise ConfigurationError(
                f"{next(iter(unknown))} is an object of a class that is not known here, and cannot be written"
            )
        self.num_bytes = sum(one.entry.num_bytes for one in self.tensors.values())
        self.digests: dict[tuple[str, Box, str], str] = {}
        self._topology = topology
        self._coming: Iterator[tuple[tuple[str, Box, str], torch.Tensor]] = iter(())

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """See `SavePlanner`: everything is known already."""

    def create_local_plan(self) -> SavePlan:
        """See `SavePlanner`. Ranks write about the same number of bytes each."""
        rank, world_size = self._topology.rank, self._topology.world_size
        items, at = [], 0
        for name, tensor in self.tensors.items():
            for box in slabs(tensor.entry, _PIECE_BYTES):
                if at * world_size // max(self.num_bytes, 1) == rank:
                    items.append(_item_of(name, tensor, box))
                at += box.num_elements * torch_dtype(tensor.entry.dtype).itemsize
        if self._topology.is_lead:
            items += [WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO) for key in self._values]
        return SavePlan(items, planner_data=self._paths)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """See `SavePlanner`."""
        plans, metadata = create_default_global_save_plan(all_plans)
        return plans, dataclasses.replace(metadata, planner_data=self._paths)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """See `SavePlanner`."""
        pieces = [_piece_of(item) for item in new_plan.items if item.tensor_data is not None]
        read = ahead(partial(self._read, batch) for batch in _batches(pieces))
        self._coming = (one for batch in read for one in batch)
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """See `SavePlanner`. It is asked for the tensors in the order of the plan."""
        if write_item.tensor_data is None:
            stream = io.BytesIO()
            torch.save(self._values[write_item.index.fqn], stream)
            return stream
        piece, tensor = next(self._coming)
        assert piece == _piece_of(write_item), "DCP's writer keeps the order of the plan"
        self.digests[piece] = _digest(tensor)
        self._topology.progress(tensor.nbytes)
        return tensor

    def _read(self, batch: Sequence[tuple[str, Box, str]]) -> list[tuple[tuple[str, Box, str], torch.Tensor]]:
        found = [torch.empty(box.shape, dtype=torch_dtype(dtype)) for _, box, dtype in batch]
        names = (self.tensors[name].name for name, _, _ in batch)
        boxes = (box for _, box, _ in batch)
        read_into(self._source, zip(names, boxes, found, strict=True))
        return list(zip(batch, found, strict=True))


def _as_of_dcp(state: Any) -> Any:
    """Give an optimizer's state of ours the form in which programs of DCP ask for it; return all else as it is."""
    is_optimizer = isinstance(state, dict) and isinstance(state.get("param_groups"), dict)
    return optimizer_in_groups(state) if is_optimizer else state


def _item_of(name: str, tensor: OpenedTensor, box: Box) -> WriteItem:
    offsets = torch.Size(box.offsets)
    described = TensorProperties(dtype=torch_dtype(tensor.entry.dtype))
    piece = ChunkStorageMetadata(offsets, torch.Size(box.shape))
    data = TensorWriteData(piece, described, torch.Size(tensor.entry.shape))
    return WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data)


def _piece_of(item: WriteItem) -> tuple[str, Box, str]:
    """Name, box and data type of an item that is a tensor."""
    data = item.tensor_data
    assert data is not None, "it is a tensor"
    return item.index.fqn, Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes)), zarr_name(data.properties.dtype)


def _digest(piece: torch.Tensor) -> str:
    bits: Any = raw_bytes(piece.reshape(-1)).numpy()
    return xxhash.xxh3_128_hexdigest(bits)


def _batches(pieces: Iterable[tuple[str, Box, str]]) -> Iterator[list[tuple[str, Box, str]]]:
    """Group pieces that are read together, so that small ones cost little: (name, box, data type)."""
    batch: list[tuple[str, Box, str]] = []
    num_bytes = 0
    for piece in pieces:
        size = piece[1].num_elements * torch_dtype(piece[2]).itemsize
        if batch and num_bytes + size > _PIECE_BYTES:
            yield batch
            batch, num_bytes = [], 0
        batch.append(piece)
        num_bytes += size
    if batch:
        yield batch


def _require_read_back(
    folder: Path, dst: Path, written: Mapping[tuple[str, Box, str], str], topology: Topology
) -> None:
    """Compare the pieces that this rank wrote with those that are there."""
    stored = open_dcp(folder, allow_pickle=True)
    for batch in _batches(written):
        found = [torch.empty(box.shape, dtype=torch_dtype(dtype)) for _, box, dtype in batch]
        requests = [ReadRequest(name, name, box, out) for (name, box, _), out in zip(batch, found, strict=True)]
        DirectLoad().prepare(requests, stored, topology, device_of(()), verify=False).run()
        for piece, one in zip(batch, found, strict=True):
            if _digest(one) != written[piece]:
                raise StorageError(f"what was written for {dst} is not what is read back: {piece[0]} was changed")
