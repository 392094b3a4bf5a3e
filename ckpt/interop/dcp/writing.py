"""Export a checkpoint as one of `torch.distributed.checkpoint`. That package writes its own format; tensors are read when it asks for them.

A large tensor becomes several pieces, as a sharded one has, so that memory is needed for one piece.
"""

from __future__ import annotations

import dataclasses
import io
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save

from ckpt.errors import CheckpointError, ConfigurationError, StorageError
from ckpt.format.box import Box, whole
from ckpt.format.digests import digest_of
from ckpt.format.dtypes import item_bytes, torch_dtype, zarr_name
from ckpt.format.export_records import RECORDS_NAME, ExportRecords
from ckpt.format.manifest import SHARDED, STATE, ArrayEntry, CheckpointManifest, ComponentManifest
from ckpt.format.places import PLAIN_NAME
from ckpt.interop.dcp.reading import METADATA, open_at
from ckpt.interop.exported import records_of
from ckpt.interop.megatron.writing import ShardedParts, write_common
from ckpt.interop.new_files import shared_directory
from ckpt.interop.opened import (
    PIECE_BYTES,
    Opened,
    OpenedTensor,
    Piece,
    batches,
    digest_of_piece,
    leaves_of,
    read_pieces,
    require_known,
    share_of,
    slabs,
    with_tensors,
)
from ckpt.loading.direct import DirectLoad
from ckpt.loading.sources import CheckpointSource, ManifestSource
from ckpt.loading.strategy import ReadRequest
from ckpt.memory.device import device_of
from ckpt.ranks.topology import Topology
from ckpt.saving.writing import plain_to_bytes
from ckpt.state.flatten import joined_key
from ckpt.state.sharing import SharingPattern, StateComponent
from ckpt.state.statefuls import Given
from ckpt.storage.files import WriteOnce, read_once, write_durably

if TYPE_CHECKING:
    from typing_extensions import Buffer


def export_dcp(source: CheckpointSource, dst: Path, topology: Topology, *, sharded: ShardedParts | None = None) -> None:
    """Write a checkpoint of any format as one of `torch.distributed.checkpoint`, read it back, and then rename it to `dst`. Collective.

    Its keys are those under which `dcp.save` would have saved the same nested state dict; components are the first step of a path. An
    optimizer gets the form of `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`. Records lie in a file that DCP ignores
    (`ckpt.format.export_records`): DCP knows dictionaries with texts as keys, and lists. The way back restores all of it.

    Args:
        source: opened by `ckpt.interop.registry.source_at`, on every rank.
        dst: nothing is there, or an empty folder.
        topology: more than one rank needs torch's default process group, of the same ranks.
        sharded: what is beside the tensors, if the source holds a sharded state dict. That becomes Megatron-Core's `torch_dist`: tensors
            and objects under their own keys, the common state in `common.pt`.

    Raises:
        CheckpointExistsError: there is something at `dst`.
        CorruptCheckpointError: a part of the source is missing or damaged.
        ConfigurationError: a plain value is an object that this process does not know, or two entries have one key for DCP.
        StorageError: what was written is not what is read back.
    """
    with topology.operation(f"export to {dst}"):
        with topology.phase("state"):
            planner = _Planner(source, topology, sharded)
        with shared_directory(dst, topology) as folder:
            with topology.phase("write"):
                writer = FileSystemWriter(folder, overwrite=False, per_thread_copy_ahead=0)  # one tensor at a time
                writer.fs = _Files()
                _save(writer, planner, no_dist=topology.world_size == 1)
                if topology.is_lead:
                    if sharded is not None:
                        write_common(sharded.common(), folder)
                    else:
                        _write_records(source, planner.names(), folder)
            with topology.phase("read back"):
                _require_read_back(folder, dst, planner.digests, topology)


class _Files(FileSystem):
    """DCP's files, which do not fill the page cache."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with _File(path, mode) if "w" in mode else super().create_stream(path, mode) as stream:
            yield stream


class _File(io.FileIO):
    """A new file. It has no buffer: `torch.save` writes large pieces."""

    def __init__(self, path: str | os.PathLike[str], mode: str) -> None:
        super().__init__(path, mode)
        self._out = WriteOnce(self.fileno())

    def write(self, piece: Buffer, /) -> int:
        with memoryview(piece) as bits:
            self._out.write(bits.cast("B"))
            return bits.nbytes

    def close(self) -> None:
        if not self.closed:
            self._out.close()
        super().close()


def _save(writer: FileSystemWriter, planner: SavePlanner, *, no_dist: bool) -> None:
    """Call DCP, and raise the error of the first rank that failed as it was."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process is meant
            save({}, storage_writer=writer, planner=planner, no_dist=no_dist)
    except CheckpointException as error:  # which is no `Exception`
        first, _ = next(iter(error.failures.values()))
        raise first from None if isinstance(first, CheckpointError) else error


class _Planner(SavePlanner):
    """Tells DCP what this rank writes: pieces of tensors, in the order of the checkpoint, and, on the lead, all plain values.

    Attributes:
        digests: of the pieces that this rank has written.
    """

    def __init__(self, source: CheckpointSource, topology: Topology, sharded: ShardedParts | None) -> None:
        flat: Mapping[str, Any]
        self._paths: Mapping[str, Any] | None = None
        self._opened: dict[int, tuple[OpenedTensor, torch.Tensor]] = {}  # of those that are inside of a value
        if sharded is None:
            flat, self._paths = self._flattened(Opened(source).state(optimizers_in_groups=True))
        else:
            flat = Opened(source).tensors(SHARDED, "") | (dict(sharded.objects()) if topology.is_lead else {})
        self._order = list(flat)
        self._source = source
        self.tensors: dict[str, OpenedTensor] = {key: leaf for key, leaf in flat.items() if isinstance(leaf, OpenedTensor)}
        self._values = {key: value for key, value in flat.items() if key not in self.tensors}
        require_known(self._values)
        self.digests: dict[Piece, str] = {}
        self._topology = topology
        self._coming: Iterator[tuple[Piece, torch.Tensor]] = iter(())

    def _flattened(self, state: Any) -> tuple[dict[str, Any], Mapping[str, Any]]:
        """Let DCP flatten a nested state. It keeps tuples, and other containers that it does not enter, as one value each."""

        def stand_in(one: OpenedTensor) -> torch.Tensor:
            made = torch.empty(one.entry.shape, dtype=torch_dtype(one.entry.dtype), device="meta")
            self._opened[id(made)] = one, made
            return made

        flattening = DefaultSavePlanner(flatten_sharded_tensors=False)
        try:
            flattening.set_up_planner(with_tensors(state, stand_in))
        except ValueError as error:
            raise ConfigurationError(
                f"DCP joins keys by dots, and cannot hold two entries of one joined key: {error}"
            ) from None
        flat = {key: self._opened.get(id(leaf), (leaf,))[0] for key, leaf in flattening.state_dict.items()}
        return flat, flattening.mappings

    def names(self) -> dict[str, str]:
        """Name of each tensor -> its name as a load has it (`OtherCheckpoint`), also of those inside of a value."""
        names = {tensor.name: key for key, tensor in self.tensors.items()}
        for key, value in self._values.items():
            for path, leaf in leaves_of(value, torch.Tensor):
                if isinstance(leaf, torch.Tensor):
                    names[self._opened[id(leaf)][0].name] = f"{STATE}: {key}.{joined_key(path)}"
        return names

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """See `SavePlanner`: everything is known already."""

    def create_local_plan(self) -> SavePlan:
        """See `SavePlanner`."""
        boxes = [(name, tensor, box) for name, tensor in self.tensors.items() for box in slabs(tensor.entry, PIECE_BYTES)]
        sizes = [box.num_elements * item_bytes(tensor.entry.dtype) for _, tensor, box in boxes]
        items = [_item_of(*mine) for mine in share_of(boxes, sizes, self._topology)]
        if self._topology.is_lead:
            items += [WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO) for key in self._values]
        return SavePlan(items, planner_data=self._paths)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """See `SavePlanner`."""
        plans, metadata = create_default_global_save_plan(all_plans)
        in_order = {key: metadata.state_dict_metadata[key] for key in self._order}
        return plans, dataclasses.replace(metadata, state_dict_metadata=in_order, planner_data=self._paths)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """See `SavePlanner`."""
        pieces = (_piece_of(item) for item in new_plan.items if item.tensor_data is not None)
        self._coming = read_pieces(self._source, pieces, self.tensors)
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """See `SavePlanner`. It is asked for the tensors in the order of the plan."""
        if write_item.tensor_data is None:
            stream = io.BytesIO()
            torch.save(with_tensors(self._values[write_item.index.fqn], self._read, torch.Tensor), stream)
            return stream
        piece, tensor = next(self._coming)
        assert piece == _piece_of(write_item), "DCP's writer keeps the order of the plan"
        self.digests[piece] = digest_of_piece(tensor)
        self._topology.progress(tensor.nbytes)
        return tensor

    def _read(self, stand_in: torch.Tensor) -> torch.Tensor:
        if id(stand_in) not in self._opened:  # an object of a sharded state dict has its own
            return stand_in
        tensor = self._opened[id(stand_in)][0]
        return tensor.read(whole(tensor.entry.shape))


def _write_records(source: CheckpointSource, names: Mapping[str, str], folder: Path) -> None:
    """Write what DCP's format has no place for beside `.metadata`: of another program's checkpoint, the records that ours would have."""
    described_by = digest_of((folder / METADATA).read_bytes())
    records = records_of(source, names, described_by)
    if not isinstance(source, ManifestSource):
        component = StateComponent(STATE, Given(), SharingPattern.SHARDED)
        path, plain = f"{STATE}/{PLAIN_NAME}", plain_to_bytes(source.rows(component, ""))
        arrays = {
            f"{STATE}/{key}": ArrayEntry(
                entry.dtype, entry.shape, store=None if entry.alias_of else "zarr", alias_of=entry.alias_of
            )
            for key, entry in source.entries(component, "").items()
        }
        manifest = CheckpointManifest(
            source.checkpoint_id,
            datetime.now(UTC),
            1,
            {"nodes": [[0]], "groups": {}},
            {STATE: ComponentManifest(STATE, component.pattern.value, [0], plain_in={"": 0})},
            arrays,
            {path: (len(plain), digest_of(plain))},
        )
        records = ExportRecords(manifest.to_bytes().decode(), "", {path: plain.decode()}, dict(names), described_by)
    if records is not None:
        write_durably(folder / RECORDS_NAME, records.to_bytes())


def _item_of(name: str, tensor: OpenedTensor, box: Box) -> WriteItem:
    offsets = torch.Size(box.offsets)
    described = TensorProperties(dtype=torch_dtype(tensor.entry.dtype))
    piece = ChunkStorageMetadata(offsets, torch.Size(box.shape))
    data = TensorWriteData(piece, described, torch.Size(tensor.entry.shape))
    return WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data)


def _piece_of(item: WriteItem) -> Piece:
    """Name, box and data type of an item that is a tensor."""
    data = item.tensor_data
    assert data is not None, "it is a tensor"
    box = Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes))
    return Piece(item.index.fqn, box, zarr_name(data.properties.dtype))


def _require_read_back(folder: Path, dst: Path, written: Mapping[Piece, str], topology: Topology) -> None:
    """Compare the pieces that this rank wrote with those that are there."""
    stored = open_at(folder)
    for batch in batches(written):
        found = [piece.empty() for piece in batch]
        requests = [ReadRequest(piece.name, piece.name, piece.box, out) for piece, out in zip(batch, found, strict=True)]
        DirectLoad(read_at=read_once).prepare(requests, stored, topology, device_of(()), verify=False).run()
        for piece, tensor in zip(batch, found, strict=True):
            if digest_of_piece(tensor) != written[piece]:
                raise StorageError(f"what was written for {dst} is not what is read back: {piece.name} was changed")
