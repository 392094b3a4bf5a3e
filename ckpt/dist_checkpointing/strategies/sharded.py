"""Base classes of the strategies for sharded tensors: one engine, with a backend for each strategy."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections import deque
from contextlib import ExitStack
from functools import partial
from typing import ClassVar

import torch

from ckpt.backends.base import Backend
from ckpt.dist_checkpointing.folder.loading import TensorSource, load_tensors, open_tensors, tensors_in
from ckpt.dist_checkpointing.folder.removing import remove_tensors
from ckpt.dist_checkpointing.folder.saving import FolderSave, destination_at, rank_state_of, require_alike
from ckpt.dist_checkpointing.mapping import ShardedStateDict
from ckpt.dist_checkpointing.strategies.base import AsyncSaveShardedStrategy, DeclaredFormats, LoadShardedStrategy
from ckpt.format.dtypes import torch_dtype
from ckpt.format.places import Place, local_path, place_of
from ckpt.interop.megatron.zarr import Library
from ckpt.loading.direct import DirectLoad
from ckpt.loading.strategy import LoadingStrategy
from ckpt.memory.device import device_of
from ckpt.memory.host import Arena, staging_memory
from ckpt.ranks.default_topology import current_topology
from ckpt.ranks.merging import alike
from ckpt.ranks.topology import Topology
from ckpt.saving.background.async_utils import AsyncRequest
from ckpt.saving.saver import Planner
from ckpt.state.sharded_tensor import ShardedTensor

_log = logging.getLogger("ckpt")


class SaveTensors(AsyncSaveShardedStrategy):
    """Saves ShardedTensors into a folder: every shard once, one writer per chunk, the manifest last.

    Args:
        backend, version: recorded in metadata.json.
        spread_replicas: any rank that holds a shard may write it, so that replicas share the work; they must be cut like the
            main ones, and equal. Otherwise only main replicas are written, and the others are not compared.
    """

    def __init__(self, backend: str, version: int, *, spread_replicas: bool = False) -> None:
        super().__init__(backend, version)
        self._spread_replicas = spread_replicas
        self._idle: deque[Arena] = deque()

    @property
    def described(self) -> str:
        plain = (str, int, float, list, dict, type(None))
        settings = [f"{name.strip('_')}={value!r}" for name, value in vars(self).items() if isinstance(value, plain)]
        return f"{type(self).__name__}({', '.join(sorted(settings))})"

    @abstractmethod
    def _storage(self) -> Backend:
        """The backend that writes."""

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Place) -> None:
        """Save the tensors of all ranks. Collective; the folder exists.

        Raises:
            CheckpointExistsError: the folder holds a checkpoint, or something else under the names of a save.
            ShardingError: the shards leave a hole or overlap.
            ShapeMismatchError: the ranks disagree about a tensor.
        """
        self._save_of(sharded_state_dict, place_of(checkpoint_dir)).run()

    def async_save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Place) -> AsyncRequest:
        """Plan, copy this rank's part to host memory, and return the rest of the save as a request. Collective.

        The next save of this object reuses the memory of the copy, if the request has been written by then.
        """
        save = self._save_of(sharded_state_dict, place_of(checkpoint_dir))
        arena = self._idle.pop() if self._idle else Arena(staging_memory)
        lent = ExitStack()
        lent.callback(self._idle.append, arena)
        give_back = lent.close  # once: a save is abandoned, too, whose last agreement fails after its finalizers
        try:
            with current_topology().operation(f"save into {checkpoint_dir}"):
                save.prepare(arena)
        except BaseException:
            save.abandon()
            give_back()
            raise
        return AsyncRequest(
            save.write,
            (),
            [save.finish, give_back],
            what=f"save into {checkpoint_dir}",
            abandon_fns=[save.abandon, give_back],
        )

    def _save_of(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Place) -> FolderSave:
        topology = current_topology()
        with topology.operation(f"save into {checkpoint_dir}"), topology.phase("look at the tensors") as phase:
            tensors = tensors_in(sharded_state_dict, "saves")
            mine = rank_state_of(tensors, spread_replicas=self._spread_replicas)
            device = device_of(tensor.data for tensor in tensors if tensor.data is not None)
            phase.merge = {"sharded_strategy": alike(self.described)}
            phase.answer = lambda: require_alike(phase.merged)
        planner = Planner(topology, self._storage(), device, pack_below_bytes=0)
        return FolderSave(destination_at(checkpoint_dir), mine, planner)


class LoadTensors(DeclaredFormats, LoadShardedStrategy):
    """Loads ShardedTensors from a folder that any strategy here, or Megatron-Core's zarr strategy, wrote.

    Args:
        load_directly_on_device: read into the tensors that the state dict holds; the result contains these tensors. None: where it
            holds any.
    """

    library: ClassVar[Library] = "zarr"
    backends: ClassVar[tuple[str, ...]] = ("zarr", "tensorstore")
    versions = (1,)

    def __init__(self, load_directly_on_device: bool | None = False) -> None:
        self.load_directly_on_device = load_directly_on_device
        self._has_told = False

    def load(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Place) -> ShardedStateDict:
        """Replace every ShardedTensor, in place, by the tensor it describes; return the state dict. Collective.

        Raises: those of `ckpt.dist_checkpointing.folder.loading.load_tensors`.
        """
        topology = self._topology()
        return load_tensors(
            sharded_state_dict,
            place_of(checkpoint_dir),
            open_source=partial(self._open, place_of(checkpoint_dir), topology, self._strategy()),
            into_data=self.load_directly_on_device,
            topology=topology,
        )

    def _open(self, checkpoint_dir: Place, topology: Topology, strategy: LoadingStrategy) -> TensorSource:
        """Open the tensors of a checkpoint. Collective."""
        return open_tensors(checkpoint_dir, self.library, topology, strategy)

    def _strategy(self) -> LoadingStrategy:
        """The loading strategy."""
        return DirectLoad()

    def _topology(self) -> Topology:
        """The topology of this job. Its lead logs the class at the first load."""
        topology = current_topology()
        if topology.is_lead and not self._has_told:
            _log.info("sharded tensors are loaded by %s", type(self).__name__)
        self._has_told = True
        return topology

    def load_tensors_metadata(self, checkpoint_dir: Place) -> ShardedStateDict:
        """Key -> ShardedTensor without data and uncut, of every tensor in the checkpoint. Not collective."""
        stored = self._open(place_of(checkpoint_dir), Topology.alone(), DirectLoad()).stored
        return {key: uncut(key, torch_dtype(array.dtype), array.shape) for key, array in stored.items()}

    def remove_sharded_tensors(self, checkpoint_dir: str | Place, key_prefix: str) -> None:
        """Remove every tensor whose key starts with `key_prefix`; the rest is a whole checkpoint. Collective."""
        remove_tensors(local_path(checkpoint_dir, "checkpoint_dir"), key_prefix, current_topology())


def uncut(key: str, dtype: torch.dtype, shape: tuple[int, ...]) -> ShardedTensor:
    """Describe a whole tensor, without data."""
    return ShardedTensor(key, None, dtype, shape, shape, (0,) * len(shape), (1,) * len(shape))
