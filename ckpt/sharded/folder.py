"""Saves into a folder that is there already, by all ranks or none: what the first reference's strategies do with a directory.

The coordinator saves under a name that is published by a rename. Here the user has made the folder, so the manifest, written
last, is all that makes a checkpoint of it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from ckpt.address import Address
from ckpt.backends.base import DATABASE, Backend
from ckpt.backends.zarr_format import DOCUMENT
from ckpt.box import Box, whole
from ckpt.collect import Contribution, collect, settle_plain
from ckpt.core import CONFIG_FNAME
from ckpt.device import Device
from ckpt.dtypes import zarr_name
from ckpt.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigurationError,
    CorruptCheckpointError,
    ShardingError,
)
from ckpt.manifest import COMMON, MANIFEST_NAME, OBJECTS, SHARDED
from ckpt.mapping import ShardedTensor, is_main_replica
from ckpt.plan import PACK_BELOW_BYTES
from ckpt.planner import Planner
from ckpt.recording import Record
from ckpt.saving import require_reachable
from ckpt.sharded.mark import MARK, Mark, given_mark
from ckpt.sharing import SharingPattern, StateComponent
from ckpt.stored import read_manifest
from ckpt.tables import Table, TablePart
from ckpt.topology import Topology
from ckpt.writing import Share, Vote

INDEX_FILES = "index-[0-9][0-9][0-9][0-9][0-9]*.json"
BESIDE_FILES = (f".{MANIFEST_NAME}.*", f".{CONFIG_FNAME}.*", f"{MARK}*")
"""Files that are about to take the place of another one, or say that a save has begun."""


class FolderSave:
    """One save of what the ranks contribute into a folder. The steps, in order: `prepare`, `write`, `finish`.

    All are called by all ranks, but only the first and the last talk to the others: `write` may run in another thread.

    Args:
        folder: exists, and holds no checkpoint.
        takes_folder: mark the folder as being saved into; False where who calls has done so.
    """

    def __init__(
        self,
        folder: Path,
        mine: Contribution,
        *,
        topology: Topology,
        backend: Backend,
        device: Device,
        pack_below_bytes: int = PACK_BELOW_BYTES,
        takes_folder: bool = True,
    ) -> None:
        self._folder = folder
        self._takes_folder = takes_folder
        self._mine = mine
        self._topology = topology
        self._backend = backend
        self._device = device
        self._planner = Planner(pack_below_bytes=pack_below_bytes)
        self._plain: Mapping[str, Mapping[str, Any]] = {}
        self._slivers: dict[int, memoryview] = {}
        self._vote: Vote | None = None
        self._mark: Mark | None = None
        self._own_mark: Mark | None = None

    def prepare(self) -> None:
        """Agree on who writes what, and exchange the slivers. Collective.

        Raises:
            CheckpointExistsError: a checkpoint, or a part of one, lies in the folder.
            ShardingError, ShapeMismatchError, ReplicationError: what the ranks hold does not make up one state.
        """
        topology = self._topology
        with topology.phase("open"):
            if topology.is_lead:
                _require_free(self._folder, list(self._mine.components))
                if self._takes_folder:
                    self._mark = given_mark(self._folder)
                    if self._mark is None:
                        self._mark = self._own_mark = Mark(self._folder)
        with topology.phase("reach"):
            require_reachable(self._folder, topology)
        with topology.phase("collect") as phase:
            phase.payload = self._mine.summary()
        self._plain = settle_plain(self._mine, phase.payloads, topology)
        self._plan, tasks = self._planner.plan(self._mine, [said["table"] for said in phase.payloads], topology)
        self._share = Share(self._plan, tasks, self._mine, topology, self._device)
        self._slivers = self._share.exchange_slivers()

    def write(self) -> None:
        """Write this rank's share, durably. Talks to nobody."""
        self._vote = self._share.write(self._folder, self._backend, self._plain, self._slivers)

    def finish(self) -> None:
        """Put the save on record, when all ranks have written. Collective.

        Raises:
            CheckpointExistsError: another save into the folder has begun since this one did.
        """
        with self._topology.phase("votes") as phase:
            assert self._vote is not None, "finish comes after write"
            phase.payload = self._vote.to_json()
        votes = [Vote(**tree) for tree in phase.payloads]
        with self._topology.phase("record"):
            if self._topology.is_lead:
                if self._mark is not None:
                    self._mark.require()
                record = Record(
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
        try:
            with self._topology.operation(f"save into {self._folder}"):
                self.prepare()
                with self._topology.phase("write"):
                    self.write()
                self.finish()
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """The save has failed, on this rank or another: let others have the folder."""
        if self._own_mark is not None:
            self._own_mark.remove()


def require_alike(said: Sequence[Mapping[str, Any]]) -> None:
    """Refuse ranks that call a save differently. Every rank finds the same in what all have said.

    Raises:
        ConfigurationError: it names the first difference.
    """
    for rank, one in enumerate(said):
        for name, value in one.items():
            if value != said[0][name]:
                raise ConfigurationError(
                    f"{name} is {value} on rank {rank} and {said[0][name]} on rank 0; all ranks must save alike"
                )


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


def contribution_of(tensors: Iterable[ShardedTensor], *, spread_replicas: bool, copied: bool = False) -> Contribution:
    """What this rank gives of a sharded state dict's tensors.

    Args:
        spread_replicas: give replicas, too, so that any of the ranks that hold a shard may write it. Without, only the main
            ones: nobody checks that the others hold equal bits.
        copied: copy the values to memory of their own, so that the tensors may change from now on.

    Raises:
        ShardingError: a main replica has no data.
    """
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
            values = values.detach()
            held.setdefault(name, []).append((box, values.to("cpu", copy=True) if copied else values))
    component = StateComponent(SHARDED, Given({}), SharingPattern.SHARDED)
    return Contribution(
        components={SHARDED: component},
        held={name: tuple(boxes) for name, boxes in held.items()},
        table=Table((TablePart.of(addresses),)),
    )


def leftovers(folder: Path) -> list[Path]:
    """What a save of a sharded state dict that did not end has left in a folder.

    Raises:
        CheckpointExistsError: under a name that such a save uses lies a checkpoint of another kind, or something else that it
            would not have made.
    """
    _require_no_other_checkpoint(folder)
    found = [path for name in (COMMON, OBJECTS, SHARDED, DOCUMENT) if (path := folder / name).exists()]
    for path in found:
        if not _is_of_a_save(path):
            raise CheckpointExistsError(
                f"{path} is in the way, and no save has made it; save into a folder of its own, such as an empty one"
            )
    found += [path for name in (DATABASE, MANIFEST_NAME) if (path := folder / name).exists()]
    return found + [path for pattern in (*BESIDE_FILES, INDEX_FILES) for path in sorted(folder.glob(pattern))]


def _require_no_other_checkpoint(folder: Path) -> None:
    """Refuse what has a manifest and is whole, for all that it has no metadata.json: the coordinator's checkpoints."""
    try:
        components = read_manifest(folder).components
    except CheckpointNotFoundError:
        return
    except CorruptCheckpointError as error:  # not half written: it comes by a rename
        raise CheckpointExistsError(
            f"{folder} holds a checkpoint already, and a damaged one ({error}); save into another folder, or remove this one"
        ) from error
    if list(components) != [SHARDED]:
        raise CheckpointExistsError(
            f"{folder} holds a checkpoint already, of {', '.join(components) or 'nothing'}; save into another folder"
        )


def _is_of_a_save(path: Path) -> bool:
    """Whether a folder by one of our names has in it what we put there, and nothing else; and the group's document what we say."""
    if path.name == DOCUMENT:
        return _is_bare_group(path)
    if not path.is_dir():
        return False
    inside = list(path.iterdir())
    if path.name == SHARDED:
        return all(one.name == DOCUMENT or holds_array(one) for one in inside)
    ours = (path.name, DOCUMENT, MANIFEST_NAME, *BESIDE_FILES, INDEX_FILES)
    return all(any(fnmatchcase(one.name, pattern) for pattern in ours) for one in inside)


def _is_bare_group(document: Path) -> bool:
    """Whether a Zarr group has nothing to say that would be lost with its document, which is empty while it is being written."""
    try:
        found = json.loads(document.read_bytes() or b"{}")
    except (ValueError, OSError):
        return False
    return isinstance(found, dict) and not (found.get("attributes") or found.get("consolidated_metadata"))


def holds_array(path: Path) -> bool:
    """Whether this is the folder of a Zarr v3 array, or what is left of one, and nothing else."""
    return path.is_dir() and set(os.listdir(path)) <= {"c", DOCUMENT}


def _all_of_nothing(tensor: ShardedTensor) -> list[tuple[Box, torch.Tensor]]:
    """A run without elements is no box; but where the whole tensor has none, this is what says that there is such a tensor."""
    shape = tuple(tensor.global_shape)
    return [(whole(shape), torch.empty(shape, dtype=tensor.dtype))] if 0 in shape else []


def device_of(tensors: Iterable[torch.Tensor]) -> Device:
    """The device that tensors lie on, as far as moving them to the host goes."""
    types = sorted({tensor.device.type for tensor in tensors} - {"cpu"})
    return Device(type=types[0] if types else "cpu", collectives="gloo")


def _require_free(folder: Path, components: Sequence[str]) -> None:
    if not folder.is_dir():
        raise CheckpointNotFoundError(f"{folder} does not exist: make the folder that a checkpoint is to be saved into")
    if (folder / MANIFEST_NAME).exists():
        raise CheckpointExistsError(
            f"{folder} holds a checkpoint already; save into another folder, or remove this one"
        )
    # Whichever backend saved before: what is left of it must not be taken for a part of this checkpoint.
    left = [*(folder / component for component in components), folder / DATABASE, *folder.glob(INDEX_FILES)]
    for path in left:
        if path.exists():
            raise CheckpointExistsError(
                f"{path} exists already, of a save that did not finish; remove it, or save through ckpt.save, which does"
            )


class Given:
    """A state dict as the object behind a component."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._state = dict(state)

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing: what is saved from a given state dict is loaded into a new one."""
