"""Write a checkpoint of another program as one of ours. Every rank reads and writes a part, chunk by chunk, and reads it back."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from functools import partial
from itertools import accumulate

from ckpt.backends.base import Backend
from ckpt.format.box import whole
from ckpt.format.dtypes import torch_dtype
from ckpt.format.places import Place
from ckpt.interop.opened import Opened, ahead, read_into
from ckpt.loading.sources import CheckpointSource, ManifestSource
from ckpt.memory.host import Scratch
from ckpt.planning.plan import Address, SavePlan, Table, TablePart
from ckpt.ranks.topology import Topology
from ckpt.saving.new_folder import NewFolder, prepare
from ckpt.saving.prepared_save import SaveReport
from ckpt.saving.writing import Item, Pack, RankWritePlan, Staged
from ckpt.state.collect import RankState
from ckpt.state.sharing import SharingPattern, StateComponent
from ckpt.state.statefuls import Given


def import_checkpoint(source: CheckpointSource, dst: Place, topology: Topology, backend: Backend) -> SaveReport:
    """Write a checkpoint of another program as one of ours, read it back, and then rename it to `dst`. Collective.

    It becomes one state dict, as `ckpt.save` writes it, with its values, types, order and containers; a run loads its components from that
    as from `src` (`ckpt.loading.parts_of_state`). An export of ours becomes the checkpoint that it was made of, with the ranks, sharing
    patterns, copies and notes of that.

    Args:
        source: opened by `ckpt.interop.registry.source_at`, on every rank.
        dst: nothing is there, or an empty folder.

    Raises:
        CheckpointExistsError: there is something at `dst`.
        CorruptCheckpointError: a part of the source is missing or damaged.
        ConfigurationError: a value of the source is neither a tensor nor plain.
        StorageError: what was written is not what is read back.
    """
    started = time.perf_counter()
    like = source.manifest if isinstance(source, ManifestSource) else None
    has_config = like is not None and like.training_args_hash is not None
    place = NewFolder(dst, validate=True, like=like, config_text=source.config_text if has_config else None)
    with place.discarding(), topology.operation(place.what):
        save = prepare(place, topology, backend, lambda: _state_of(source, topology))
        if isinstance(source, ManifestSource) and topology.is_lead:
            save.plain = source.plain_files()
        stored = _StoredTensors(source, save.write_plan, save.plan)
        save.run(topology, stored, RankWritePlan.write, started=started)
    assert place.report is not None, "it is published"
    return place.report


def _state_of(source: CheckpointSource, topology: Topology) -> RankState:
    """Describe the tensors of a checkpoint as a state that every rank holds; they are read when they are written.

    The copies of a component lie in folders of their own, as those of single ranks do. Of an export of ours, ranks that the checkpoint did
    not have hold nothing, since it can have no index of theirs.
    """
    found = RankState()
    parts: list[TablePart] = []
    aliases: list[tuple[str, str]] = []
    is_ours = isinstance(source, ManifestSource)
    holds = not isinstance(source, ManifestSource) or topology.rank < source.manifest.world_size
    opened = Opened(source)
    for key in opened.keys:
        copies = opened.copies(key)
        pattern = SharingPattern.SHARDED if copies == [""] else SharingPattern.PER_RANK
        component = StateComponent(key, Given(), pattern)
        entries = {
            f"{key}/{prefix}{name}": entry
            for prefix in copies
            for name, entry in source.entries(component, prefix).items()
            if holds
        }
        parts.append(
            TablePart.of(
                Address(name, entry.dtype, entry.shape, whole(entry.shape))
                for name, entry in entries.items()
                if entry.alias_of is None
            )
        )
        aliases += [(name, entry.alias_of) for name, entry in entries.items() if entry.alias_of is not None]
        found.components[key] = component
        if not is_ours:
            found.plain[key] = dict(source.rows(component, ""))
    found.table = Table(tuple(parts), tuple(aliases))
    return found


class _StoredTensors:
    """The checkpoint as the source of a save, see `ckpt.saving.prepared_save.ByteSource`. While one item is written, the next is read."""

    def __init__(self, source: CheckpointSource, write_plan: RankWritePlan, plan: SavePlan) -> None:
        self._source = source
        self._write_plan = write_plan
        self._plan = plan

    def sends(self) -> dict[int, bytes]:
        """See `ByteSource.sends`: every rank can read whole chunks."""
        return {}

    def items(self) -> Iterator[Staged]:
        memories = Scratch(), Scratch()
        return ahead(
            partial(self._read, number, item, memories[number % 2]) for number, item in enumerate(self._write_plan.items)
        )

    def check(self) -> None:
        """See `ByteSource.check`: its digests, if it has any, were checked."""

    def _read(self, number: int, item: Item, memory: Scratch) -> Staged:
        """Read an item into memory: the tensors of a pack end to end."""
        boxes = item.tasks if isinstance(item, Pack) else [(item.name, box) for box in item.own]
        dtype = torch_dtype(self._plan.arrays[boxes[0][0]].dtype)
        flat = memory.empty((sum(math.prod(box.shape) for _, box in boxes),), dtype)
        ends = list(accumulate(box.num_elements for _, box in boxes))
        wanted = (
            (name, box, flat[end - box.num_elements : end].view(box.shape))
            for (name, box), end in zip(boxes, ends, strict=True)
        )
        read_into(self._source, wanted)
        return Staged(number, [flat] if isinstance(item, Pack) else [flat.view(boxes[0][1].shape)])
