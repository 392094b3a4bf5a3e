"""Checkpoints without a manifest of ours, for `inspect` and `verify`: of all formats that `ckpt.load`, `diff` and `convert` read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from ckpt.catalog.catalog import catalog_at
from ckpt.catalog.verify import Verification
from ckpt.errors import CheckpointError, sentence
from ckpt.format.box import Box
from ckpt.format.manifest import STATE, ArrayEntry
from ckpt.format.places import Place
from ckpt.interop.megatron.zarr import MegatronZarr, is_megatron_zarr
from ckpt.interop.opened import PIECE_BYTES, Opened, Piece, batches, read_into, slabs
from ckpt.interop.other_source import OtherSource
from ckpt.interop.programs import format_at
from ckpt.interop.registry import source_at
from ckpt.interop.torch_save.old_folders import old_files
from ckpt.loading.direct import DirectLoad
from ckpt.loading.sources import CheckpointSource
from ckpt.memory.device import device_of
from ckpt.ranks.topology import Topology
from ckpt.storage.checkpoint_files import is_folder
from ckpt.storage.stored import has_manifest

_OLD = "files of torch.save"


@dataclass(frozen=True, slots=True)
class OtherAt:
    """A checkpoint of another program, or an old one of pickled files.

    Attributes:
        kind: its format.
        tensors: by the names that `ckpt.load` joins, or with their component where there are several.
        read: fills boxes of tensors: (name to read it by, box, memory).
        names: to read the tensors by.
        values: names of plain values.
        unread: what cannot be read of it, one sentence each.
    """

    path: Place
    kind: str
    tensors: dict[str, ArrayEntry]
    read: Callable[[Iterable[tuple[str, Box, torch.Tensor]]], object]
    names: dict[str, str] = field(default_factory=dict)
    values: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)

    def examined(self, progress: Callable[[int], object]) -> Verification:
        """Read every tensor, in pieces, and return what cannot be read, one sentence each."""
        found = Verification(list(self.unread))
        own = {name: entry for name, entry in self.tensors.items() if entry.alias_of is None}
        pieces = (Piece(name, box, entry.dtype) for name, entry in own.items() for box in slabs(entry, PIECE_BYTES))
        for batch in batches(pieces):
            if self._error(batch) is not None:
                for piece in batch:
                    if (error := self._error([piece])) is not None:
                        found.note(error, f"{piece.name}: ")
            progress(sum(piece.num_bytes for piece in batch))
        return found

    def _error(self, batch: Sequence[Piece]) -> CheckpointError | OSError | None:
        try:
            self.read([(self.names[piece.name], piece.box, piece.empty()) for piece in batch])
        except (CheckpointError, OSError) as error:
            return error
        return None


def other_at(path: Place, *, allow_pickle: bool) -> OtherAt | None:
    """Open what is at a path; None: a checkpoint of ours, a folder with some, or nothing that is read.

    Raises:
        CheckpointNotFoundError: it holds pickles, and these are not allowed.
        CorruptCheckpointError: what describes it is damaged.
    """
    if has_manifest(path) or (is_folder(path) and catalog_at(path).committed()):
        return None
    kind = format_at(path)
    objects: list[str] = []
    if kind is None and isinstance(path, Path) and path.is_dir() and is_megatron_zarr(path):
        stored = MegatronZarr(path)
        kind, objects = stored.program, stored.layout.objects
        source: CheckpointSource = OtherSource(path, stored, Topology.alone(), DirectLoad(), device_of(()))
    elif kind is None and not old_files(path, allow_pickle=True):
        return None
    else:
        source = source_at(path, Topology.alone(), DirectLoad(), allow_pickle=allow_pickle)
    if isinstance(source, OtherSource):
        source.leaves_out_unknown = True
    opened = Opened(source)
    found = OtherAt(path, kind or _OLD, {}, partial(read_into, source), values=objects)
    for key in [STATE] if source.holds(STATE) else opened.keys:
        try:
            for prefix in opened.copies(key):
                start = "" if key == STATE else f"{key}/{prefix}"
                for name, tensor in opened.tensors(key, prefix).items():
                    is_first = tensor.name == f"{key}/{prefix}{name}"
                    first = None if is_first else tensor.name.removeprefix(f"{STATE}/")
                    found.tensors[start + name] = ArrayEntry(tensor.entry.dtype, tensor.entry.shape, alias_of=first)
                    found.names[start + name] = tensor.name
                found.values.extend(start + name for name in opened.plain(key, prefix))
        except (CheckpointError, OSError) as error:
            found.unread.append(sentence(error))
    return found
