"""Saves into a folder that is there already, by all ranks or none: what the first reference's strategies do with a directory.

The coordinator saves under a name that is published by a rename. Here the user has made the folder, so the manifest, written
last, is all that makes a checkpoint of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ckpt.backends.base import Backend
from ckpt.dist_checkpointing.folder.destination import require_free
from ckpt.dist_checkpointing.folder.save_marker import SaveMarker, given_mark
from ckpt.dist_checkpointing.mapping import is_main_replica
from ckpt.errors import (
    ConfigurationError,
    ShardingError,
)
from ckpt.format.box import Box, whole
from ckpt.format.dtypes import zarr_name
from ckpt.format.manifest import COMMON, MANIFEST_NAME, OBJECTS, SHARDED
from ckpt.memory.arena import Arena
from ckpt.memory.device import Device, device_of
from ckpt.planning.plan import PACK_BELOW_BYTES
from ckpt.planning.tables import Address, Table, TablePart
from ckpt.ranks.topology import Topology, first_difference
from ckpt.saving.background.snapshot import Snapshot, arena_bytes
from ckpt.saving.gathering import ByteSource, LiveTensors
from ckpt.saving.manifest_writer import ManifestWriter
from ckpt.saving.planner import agreed_plan
from ckpt.saving.saver import require_reachable
from ckpt.saving.writing import RankWritePlan, WriteJob, WriteResult, plain_files
from ckpt.state.collect import RankState, collect, settle_plain
from ckpt.state.sharded_tensor import ShardedTensor
from ckpt.state.sharing import SharingPattern, StateComponent


class FolderSave:
    """One save of what the ranks contribute into a folder. The steps, in order: `prepare`, `write`, `finish`.

    All are called by all ranks, but only the first and the last talk to the others: `write` may run in another thread.

    Args:
        folder: exists, and holds no checkpoint.
        takes_folder: mark the folder as being saved into; False where who calls has done so.
        arena: where `prepare` copies the tensors, so that they may change from then on. None: they stay as they are until `write` is over.
    """

    def __init__(
        self,
        folder: Path,
        mine: RankState,
        *,
        topology: Topology,
        backend: Backend,
        device: Device,
        pack_below_bytes: int = PACK_BELOW_BYTES,
        takes_folder: bool = True,
        arena: Arena | None = None,
    ) -> None:
        self._arena = arena
        self._source: ByteSource | None = None
        self._folder = folder
        self._takes_folder = takes_folder
        self._mine = mine
        self._topology = topology
        self._backend = backend
        self._device = device
        self._pack_below_bytes = pack_below_bytes
        self._plain: Mapping[str, Mapping[str, Any]] = {}
        self._slivers: dict[int, bytes] = {}
        self._vote: WriteResult | None = None
        self._mark: SaveMarker | None = None
        self._own_mark: SaveMarker | None = None

    def prepare(self) -> None:
        """Agree on who writes what, and exchange the slivers. Collective.

        Raises:
            CheckpointExistsError: a checkpoint, or a part of one, lies in the folder.
            ShardingError, ShapeMismatchError, ReplicationError: what the ranks hold does not make up one state.
        """
        topology = self._topology
        with topology.phase("open"):
            if topology.is_lead:
                require_free(self._folder, list(self._mine.components))
                if self._takes_folder:
                    self._mark = given_mark(self._folder)
                    if self._mark is None:
                        self._mark = self._own_mark = SaveMarker(self._folder)
        with topology.phase("reach"):
            require_reachable(self._folder, topology)
        with topology.phase("collect") as phase:
            phase.payload = self._mine.summary()
        self._plain = settle_plain(self._mine, phase.payloads, topology)
        digests = [said["table"] for said in phase.payloads]
        self._plan, tasks = agreed_plan(self._mine, digests, topology, pack_below_bytes=self._pack_below_bytes)
        self._share = RankWritePlan(self._plan, tasks, self._mine.components, topology, store=self._backend.store)
        self._files = plain_files(self._plain, self._mine.components, topology)
        self._source = source = self._gathered()
        if self._share.sends_slivers:
            self._slivers = topology.exchange("slivers", source.sends(), self._share.sources)

    def write(self) -> None:
        """Write this rank's share, durably. Talks to nobody."""
        assert self._source is not None, "write comes after prepare"
        job = WriteJob(self._folder, self._backend, self._files, self._slivers)
        self._vote = self._share.write(job, self._source.items(), self._topology.progress)

    def _gathered(self) -> ByteSource:
        """The tensors, or a copy of them."""
        if self._arena is None:
            return LiveTensors(self._share, self._plan, self._mine, self._device.pinned_bytes)
        snapshot = Snapshot(self._share, self._plan, self._mine, self._arena, watched=None, pinned_bytes=None)
        _, num_bytes = arena_bytes(self._share, is_pinned=self._device.type != "cpu")
        self._arena.grow(num_bytes, lambda: None)
        snapshot.take()
        return snapshot

    def finish(self) -> None:
        """Put the save on record, when all ranks have written. Collective.

        Raises:
            CheckpointExistsError: another save into the folder has begun since this one did.
        """
        with self._topology.phase("votes") as phase:
            assert self._vote is not None, "finish comes after write"
            phase.payload = self._vote.to_json()
        votes = [WriteResult(**tree) for tree in phase.payloads]
        with self._topology.phase("record"):
            if self._topology.is_lead:
                if self._mark is not None:
                    self._mark.require()
                record = ManifestWriter(
                    self._folder,
                    self._plan,
                    self._mine.components,
                    votes,
                    topology=self._topology,
                    backend=self._backend,
                    beside=[
                        path
                        for name in (COMMON, OBJECTS)
                        if (self._folder / (path := f"{name}/{MANIFEST_NAME}")).is_file()
                    ],
                )
                record.write(self._folder.name)
                if self._own_mark is not None:
                    self._own_mark.remove()

    def run(self) -> None:
        """All three steps, as one operation."""
        with self.abandoning(), self._topology.operation(f"save into {self._folder}"):
            self.prepare()
            with self._topology.phase("write"):
                self.write()
            self.finish()

    @contextmanager
    def abandoning(self) -> Iterator[None]:
        """Abandon the save if anything in the block fails."""
        try:
            yield
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """The save has failed, on this rank or another: let others have the folder, and the memory."""
        if isinstance(self._source, Snapshot):
            self._source.give_up()
        if self._own_mark is not None:
            self._own_mark.remove()


def require_alike(said: Sequence[Mapping[str, Any]]) -> None:
    """Refuse ranks that call a save differently. Every rank finds the same in what all have said.

    Raises:
        ConfigurationError: it names the first difference.
    """
    if (difference := first_difference(said)) is not None:
        name, rank, here, on_lead = difference
        raise ConfigurationError(f"{name} is {here} on rank {rank} and {on_lead} on rank 0; all ranks must save alike")


def save_state(
    folder: Path, key: str, state: Mapping[str, Any], pattern: SharingPattern, topology: Topology, backend: Backend
) -> None:
    """Save one nested state dict as the component `key` of a checkpoint that is nothing else. Collective.

    Args:
        pattern: GLOBAL, or PER_RANK where the ranks hold different keys of it: then no rank looks at another's.
    """
    with topology.phase("make the folder"):
        if topology.is_lead:
            folder.mkdir(exist_ok=True)
    with topology.phase("collect"):
        mine = collect([StateComponent(key, Given(state), pattern)], topology)
    device = device_of(tensor for held in mine.held.values() for _, tensor in held if isinstance(tensor, torch.Tensor))
    FolderSave(folder, mine, topology=topology, backend=backend, device=device, takes_folder=False).run()


def contribution_of(tensors: Iterable[ShardedTensor], *, spread_replicas: bool) -> RankState:
    """What this rank gives of a sharded state dict's tensors.

    Args:
        spread_replicas: give replicas, too, so that any of the ranks that hold a shard may write it. Without, only the main
            ones: nobody checks that the others hold equal bits.

    Raises:
        ShardingError: a main replica has no data.
    """
    tensors = list(tensors)
    held: dict[str, list[tuple[Box, torch.Tensor]]] = {}
    addresses = []
    for tensor in tensors:
        is_main = is_main_replica(tensor.replica_id)
        if not (is_main or (spread_replicas and tensor.data is not None)):
            continue
        if tensor.data is None:
            raise ShardingError(f"{tensor.key}: the main replica of a shard has no data to save")
        name = f"{SHARDED}/{tensor.key}"
        for box, values in tensor.pieces() or _all_of_nothing(tensor):
            addresses.append(Address(name, zarr_name(tensor.dtype), tuple(tensor.global_shape), box))
            held.setdefault(name, []).append((box, values.detach()))
    component = StateComponent(SHARDED, Given({}), SharingPattern.SHARDED)
    return RankState(
        components={SHARDED: component},
        held={name: tuple(boxes) for name, boxes in held.items()},
        table=Table((TablePart.of(addresses),)),
    )


def _all_of_nothing(tensor: ShardedTensor) -> list[tuple[Box, torch.Tensor]]:
    """A run without elements is no box; but where the whole tensor has none, this is what says that there is such a tensor."""
    shape = tuple(tensor.global_shape)
    return [(whole(shape), torch.empty(shape, dtype=tensor.dtype))] if 0 in shape else []


class Given:
    """A state dict as the object behind a component."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._state = dict(state)

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing: what is saved from a given state dict is loaded into a new one."""
