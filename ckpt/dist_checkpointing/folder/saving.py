"""Save into a folder that the user has made, on all ranks or on none. Used by Megatron-Core's strategies."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from ckpt.backends.base import Backend
from ckpt.dist_checkpointing.folder.address import GivenAddress
from ckpt.dist_checkpointing.folder.destination import GivenFolder
from ckpt.dist_checkpointing.mapping import is_main_replica
from ckpt.errors import ConfigurationError, ShardingError
from ckpt.format.box import Box, whole
from ckpt.format.manifest import SHARDED
from ckpt.format.places import Place
from ckpt.memory.host import Arena
from ckpt.ranks.merging import Alike, first_difference
from ckpt.ranks.topology import Topology
from ckpt.saving.background.snapshot import Snapshot, arena_bytes
from ckpt.saving.prepared_save import PreparedSave, Written
from ckpt.saving.saver import Planner
from ckpt.saving.writing import RankWritePlan
from ckpt.state.collect import RankState, collect
from ckpt.state.sharded_tensor import ShardedTensor
from ckpt.state.sharing import SharingPattern, StateComponent
from ckpt.state.statefuls import Given


class FolderSave:
    """One save of the ranks' tensors into a folder: `run`, or in steps `prepare`, `write`, `finish`.

    All ranks call all steps. `write` communicates with no other rank, and may run in another thread.
    """

    def __init__(self, folder: GivenFolder | GivenAddress, mine: RankState, planner: Planner) -> None:
        self._folder = folder
        self._mine = mine
        self._planner = planner
        self._topology = planner.topology
        self._snapshot: Snapshot | None = None

    def run(self) -> None:
        """Save at once. Collective.

        Raises: as `prepare` and `finish`.
        """
        started = time.perf_counter()
        with self._folder.discarding(), self._topology.operation(self._folder.what):
            save: PreparedSave[Any] = self._planner.collect_and_prepare(self._folder, self._mine)
            save.run(self._topology, save.live_tensors(), RankWritePlan.write, started=started)

    def prepare(self, arena: Arena) -> None:
        """Plan the save, copy this rank's part to the arena, and exchange partial chunks. Collective.

        Raises:
            CheckpointExistsError: a checkpoint, or a part of one, is in the folder.
            ShardingError, ShapeMismatchError, ReplicationError: the states of the ranks do not make up one.
        """
        self._save: PreparedSave[Any] = self._planner.collect_and_prepare(self._folder, self._mine)
        save = self._save
        snapshot = Snapshot(save.write_plan, save.plan, save.mine, arena, watched=None, pinned_bytes=None)
        _, num_bytes = arena_bytes(save.write_plan, is_pinned=save.device.type != "cpu")
        arena.grow(num_bytes, lambda: None)
        snapshot.take()
        self._snapshot = snapshot  # not before: `give_up` waits for the end of `take`
        save.open(self._topology, snapshot)

    def write(self) -> None:
        """Write this rank's part durably. Communicates with no other rank."""
        assert self._snapshot is not None, "it is prepared"
        self._result = self._save.write(self._snapshot, RankWritePlan.write, self._topology)

    def finish(self) -> None:
        """Write the manifest, once all ranks have written. Collective.

        Raises:
            CheckpointExistsError: a later save has taken over the folder.
        """
        with self._topology.phase("votes") as phase:
            Written.say(self._result, phase, self._topology.rank)
        self._save.publish(Written.heard(self._result, phase, self._topology), self._topology)

    def abandon(self) -> None:
        """Release the folder and the memory of a save that has failed after `prepare` began, on this rank or another."""
        if self._snapshot is not None:
            self._snapshot.give_up()
        self._folder.discard()


def require_alike(arguments: Mapping[str, Alike]) -> None:
    """Require the same arguments of a save on all ranks.

    Raises:
        ConfigurationError: it names the first difference.
    """
    if (difference := first_difference(arguments)) is not None:
        name, rank, here, on_lead = difference
        raise ConfigurationError(f"{name} is {here} on rank {rank} and {on_lead} on rank 0; all ranks must save alike")


def destination_at(place: Place, *, is_part: bool = False) -> GivenFolder | GivenAddress:
    """Return the destination of a save into a folder, or to an address.

    Args:
        is_part: see `GivenFolder`.
    """
    return GivenFolder(place, is_part=is_part) if isinstance(place, Path) else GivenAddress(place)


def save_state(
    folder: Place, key: str, state: Mapping[str, Any], pattern: SharingPattern, topology: Topology, backend: Backend
) -> None:
    """Save one nested state dict as a checkpoint with the only component `key`. Collective.

    Args:
        pattern: GLOBAL, or PER_RANK if the ranks hold different keys.
    """
    with topology.phase("collect"):
        mine = collect([StateComponent(key, Given(state), pattern)], topology)
    place = destination_at(folder, is_part=True)
    FolderSave(place, mine, Planner(topology, backend, mine.device)).run()


def rank_state_of(tensors: Iterable[ShardedTensor], *, spread_replicas: bool) -> RankState:
    """Describe the tensors of a sharded state dict as this rank's state.

    Args:
        spread_replicas: include replicas, so that any rank that holds a shard may write it. Otherwise only main replicas are
            included, and the bits of the others are not compared.

    Raises:
        ShardingError: a main replica has no data.
    """
    pieces = []
    for tensor in tensors:
        is_main = is_main_replica(tensor.replica_id)
        if not (is_main or (spread_replicas and tensor.data is not None)):
            continue
        if tensor.data is None:
            raise ShardingError(f"{tensor.key}: the main replica of a shard has no data to save")
        for box, values in tensor.pieces() or _all_of_nothing(tensor):
            pieces.append((tensor.key, tensor.global_shape, box, values))
    return RankState.of_pieces(StateComponent(SHARDED, Given({}), SharingPattern.SHARDED), pieces)


def _all_of_nothing(tensor: ShardedTensor) -> list[tuple[Box, torch.Tensor]]:
    """The box of a tensor without elements, so that the checkpoint lists it; otherwise an empty flattened range is no box."""
    shape = tuple(tensor.global_shape)
    return [(whole(shape), torch.empty(shape, dtype=tensor.dtype, device="cpu"))] if 0 in shape else []
