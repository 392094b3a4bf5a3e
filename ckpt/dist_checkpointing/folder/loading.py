"""Load a sharded state dict from a folder that this library, or Megatron-Core's own zarr strategy, wrote."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ckpt.dist_checkpointing.dict_utils import dict_list_map_inplace, nested_values
from ckpt.dist_checkpointing.mapping import ShardedStateDict
from ckpt.errors import ConfigurationError, MissingStateError, ShapeMismatchError
from ckpt.format.box import Box, overlap, whole
from ckpt.format.dtypes import torch_dtype
from ckpt.format.manifest import MANIFEST_NAME, SHARDED, ArrayEntry
from ckpt.format.manifest_parsing import parse_manifest
from ckpt.format.places import Place
from ckpt.interop.megatron.zarr import Library, MegatronZarr, is_megatron_zarr
from ckpt.loading.direct import DirectLoad
from ckpt.loading.other_checkpoint import OtherCheckpoint, OtherTensor
from ckpt.loading.report import some_of
from ckpt.loading.sources import CommittedSource
from ckpt.loading.state_matching import SavedCopy, match_changed
from ckpt.loading.strategy import LoadingStrategy, Reading, ReadRequest, StoredCheckpoint
from ckpt.memory.device import device_of, wait_for_all
from ckpt.memory.host import HostMemory
from ckpt.ranks.topology import Topology
from ckpt.state.flatten import path_from_json, unflatten
from ckpt.state.sharded_tensor import ShardedTensor
from ckpt.state.sharing import SharingPattern, StateComponent
from ckpt.state.statefuls import Given
from ckpt.storage.checkpoint_files import names_below
from ckpt.storage.metadata import parts_at
from ckpt.storage.stored import read_manifest, read_manifest_bytes, require_place

_log = logging.getLogger("ckpt")


StoredArray = ArrayEntry | OtherTensor
"""Data type, by Zarr's name, and global shape of a tensor in a checkpoint."""
Wanted = tuple[str, Box, torch.Tensor]
"""(Key, box in global coordinates, memory of the box's shape and the stored data type)."""


@dataclass(frozen=True, slots=True)
class TensorSource:
    """The sharded tensors of one checkpoint, open for reading by one rank.

    Attributes:
        stored: key -> stored tensor.
        above: prefix of the keys in the checkpoint.
    """

    stored: Mapping[str, StoredArray]
    checkpoint: StoredCheckpoint | OtherCheckpoint
    above: str
    strategy: LoadingStrategy
    topology: Topology

    def prepare(self, wanted: Sequence[Wanted]) -> Reading:
        """Plan the reading of the boxes of all ranks. Collective, outside of a phase; each rank gives its own boxes."""
        requests = [ReadRequest(f"{self.above}{key}", key, box, out) for key, box, out in wanted]
        device = device_of(out for _, _, out in wanted)
        verify = self.checkpoint.has_digests
        return self.strategy.prepare(requests, self.checkpoint, self.topology, device, verify=verify)


def load_tensors(
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: Place,
    *,
    open_source: Callable[[], TensorSource],
    into_data: bool | None,
    topology: Topology,
) -> ShardedStateDict:
    """Replace every ShardedTensor of a nested state dict, in place, by the tensor it describes. Collective.

    Args:
        open_source: opens the checkpoint, on all ranks.
        into_data: read into the memory of `ShardedTensor.data`, and put that tensor into the dict. Otherwise new tensors
            of the stored data type are made, on the host. None: into data where a ShardedTensor has any.

    Raises:
        MissingStateError: the checkpoint does not hold a key.
        ShapeMismatchError: it holds it in another global shape, and the tensor does not allow that.
        ConfigurationError: `into_data`, and a tensor has no data.
        CorruptCheckpointError: bytes are missing or changed.
    """
    with topology.operation(f"load of {checkpoint_dir}"):
        source = open_source()
        with topology.phase("check"):
            memory = HostMemory()
            tensors = tensors_in(sharded_state_dict, "loads")
            wait_for_all(tensor.data for tensor in tensors if tensor.data is not None)
            loads = {
                id(tensor): _Load(
                    tensor,
                    _require_stored(tensor, source.stored, checkpoint_dir),
                    memory,
                    into_data=tensor.data is not None if into_data is None else into_data,
                )
                for tensor in tensors
            }
        reading = source.prepare([wanted for load in loads.values() for wanted in load.wanted])
        with closing(reading), topology.phase("read"):
            reading.run()
            for load in loads.values():
                load.finish()
    dict_list_map_inplace(lambda one: loads[id(one)].result, sharded_state_dict)
    return sharded_state_dict


def open_tensors(checkpoint_dir: Place, library: Library, topology: Topology, strategy: LoadingStrategy) -> TensorSource:
    """Open a checkpoint's tensors. Collective: the lead reads the manifest for all ranks.

    Args:
        library: decodes the chunks of Megatron-Core's arrays that are encoded.
    """
    with topology.phase("open") as phase:
        if topology.is_lead and not (isinstance(checkpoint_dir, Path) and is_megatron_zarr(checkpoint_dir)):
            phase.from_lead = read_manifest_bytes(checkpoint_dir).decode()
    if phase.from_lead is None:
        assert isinstance(checkpoint_dir, Path), "Megatron-Core writes folders"
        # Arrays without metadata are damage: absent keys, which a load may ignore, are another matter.
        checkpoint = MegatronZarr(checkpoint_dir, library).require_whole()
        return TensorSource(checkpoint.tensors, checkpoint, "", strategy, topology)
    manifest = parse_manifest(phase.from_lead.encode(), str(checkpoint_dir / MANIFEST_NAME))
    if manifest.data is not None:  # of an object store, or a copy out of it
        with topology.phase("parts"):
            if topology.is_lead and (place := parts_at(checkpoint_dir).get(SHARDED)):
                require_place(checkpoint_dir, manifest, place)
    ours = StoredCheckpoint(checkpoint_dir, manifest)
    return TensorSource(manifest.arrays_of(SHARDED), ours, f"{SHARDED}/", strategy, topology)


def tensors_in(sharded_state_dict: ShardedStateDict, does: str) -> list[ShardedTensor]:
    """The ShardedTensors of a nested state dict, which must hold no other values.

    Args:
        does: "saves" or "loads", for the error.
    """
    tensors = list(nested_values(sharded_state_dict))
    for value in tensors:
        if not isinstance(value, ShardedTensor):
            raise ConfigurationError(
                f"a sharded strategy {does} ShardedTensors, and was given a {type(value).__name__}"
            )
    return tensors


def load_state(
    folder: Place,
    key: str,
    *,
    only: Sequence[str] | None = None,
    first: int = 0,
    progress: Callable[[int], None] | None = None,
) -> dict[Any, Any]:
    """Read a nested state dict that `folder.save_state` wrote, into new memory. Any process, alone.

    Args:
        only: entries of the outermost dictionary to read; None: all.
        first: the rank whose part is read first; the others' parts are read only if `only` is not complete then.
        progress: called as bytes arrive.

    Raises:
        CheckpointNotFoundError: there is no such checkpoint.
        CorruptCheckpointError: it is damaged.
    """
    source, component = _open_state(folder, key, progress)
    prefixes = source.prefixes(component)
    state: dict[Any, Any] = {}
    for prefix in [*prefixes[first : first + 1], *prefixes[:first], *prefixes[first + 1 :]]:
        if only is not None and all(name in state for name in only):
            break
        state |= _read_part(source, component, prefix, only)
    return state


def _read_part(
    source: CommittedSource, component: StateComponent, prefix: str, only: Sequence[str] | None
) -> dict[Any, Any]:
    """Read one part of a nested state dict: that of one rank, or of all ranks together."""
    rows = source.rows(component, prefix)
    if only is not None:
        rows = {name: row for name, row in rows.items() if path_from_json(row[0])[0] in only}
    entries = {name: entry for name, entry in source.entries(component, prefix).items() if name in rows}
    match = match_changed(component, [SavedCopy.of(f"{component.key}/{prefix}", entries, rows)])
    source.prepare(match.requests).run()
    assert match.copies is not None
    copy = match.copies[0]
    leaves = copy.tensors | copy.plain
    nested: dict[Any, Any] = unflatten({name: leaves[name] for name in rows}, copy.paths)
    return nested


def state_keys(folder: Place, key: str) -> list[str]:
    """The entries of the outermost dictionary that `folder.save_state` wrote, in order. Any process, alone."""
    source, component = _open_state(folder, key, None)
    rows = [row for prefix in source.prefixes(component) for row in source.rows(component, prefix).values()]
    return list(dict.fromkeys(str(row[0][0]) for row in rows))


def _open_state(
    folder: Place, key: str, progress: Callable[[int], None] | None
) -> tuple[CommittedSource, StateComponent]:
    manifest = read_manifest(folder)
    checkpoint = StoredCheckpoint(folder, manifest)
    source = CommittedSource(checkpoint, "", Topology.alone(progress), DirectLoad(), device_of(()), verify=True)
    return source, StateComponent(key, Given({}), SharingPattern(manifest.components[key].sharing_pattern))


class _Load:
    """The load of one ShardedTensor.

    Attributes:
        wanted: boxes to read.
        result: replaces it in the state dict; complete after `finish`.
    """

    def __init__(self, tensor: ShardedTensor, array: StoredArray, memory: HostMemory, *, into_data: bool) -> None:
        if into_data and tensor.data is None:
            raise ConfigurationError(
                f"{tensor.key}: load_directly_on_device=True fills the tensor that a ShardedTensor holds, and this one holds none; "
                "give it data (init_data), or load without"
            )
        self._tensor = tensor
        own = tensor.data if into_data else None
        dtype = torch_dtype(array.dtype)
        if own is not None and own.dtype == dtype:
            self._memory = own
        else:
            self._memory = memory.empty(tensor.data_shape, dtype)
        self.result = self._memory if own is None else own
        self.wanted = self._boxes(array)

    def finish(self) -> None:
        """Convert to the data type of the caller's tensor, if the bytes were read into memory of the stored one."""
        if self.result is not self._memory:
            self.result.detach().copy_(self._memory)

    def _boxes(self, array: StoredArray) -> list[Wanted]:
        """The boxes of this shard inside the stored array; the rest, at the far ends, is zeros."""
        memory = self._memory.detach()
        pieces = replace(self._tensor, data=memory, dtype=memory.dtype).pieces()
        if array.shape == tuple(self._tensor.global_shape):
            return [(self._tensor.key, box, out) for box, out in pieces]
        memory.zero_()
        wanted = []
        for box, out in pieces:
            there = overlap(whole(array.shape), box)
            if there is not None:
                wanted.append((self._tensor.key, there, out[there.relative_to(box).slices]))
        return wanted


def _require_stored(tensor: ShardedTensor, stored: Mapping[str, StoredArray], checkpoint_dir: Place) -> StoredArray:
    array = stored.get(tensor.key)
    if array is None:
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug("%s holds %s", checkpoint_dir, names_below(checkpoint_dir))
        raise MissingStateError(
            f"{tensor.key} is asked for, and {checkpoint_dir} does not hold it; it holds {some_of(sorted(stored)) or 'no tensor'}. "
            "Leave it out, or load with a `strict` that lets unexpected keys go, such as 'log_unexpected'."
        )
    wanted = tuple(tensor.global_shape)
    if array.shape != wanted and not (tensor.allow_shape_mismatch and len(array.shape) == len(wanted)):
        raise ShapeMismatchError(
            f"{tensor.key}: the checkpoint holds global shape {list(array.shape)}, the sharded state dict asks for {list(wanted)}. Ask "
            "for what was saved, or set allow_shape_mismatch=True for a tensor that is padded to fit."
        )
    return array
