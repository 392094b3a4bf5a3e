"""Load checkpoints of Megatron-Core's `torch_dist`, resharded. Nothing is saved in this format."""

from __future__ import annotations

from ckpt.dist_checkpointing.dict_utils import dict_list_map_inplace, extract_matching_values, merge, nested_values
from ckpt.dist_checkpointing.folder.loading import TensorSource
from ckpt.dist_checkpointing.mapping import ShardedObject, ShardedStateDict
from ckpt.dist_checkpointing.strategies.base import StrategyAction, register_default_strategy
from ckpt.dist_checkpointing.strategies.common import tell_of_unknown
from ckpt.dist_checkpointing.strategies.sharded import LoadTensors
from ckpt.errors import ConfigurationError, MissingStateError
from ckpt.format.places import Place, local_path
from ckpt.interop.megatron.reading import open_sharded
from ckpt.interop.programs import PROGRAMS
from ckpt.loading.other_checkpoint import OtherCheckpoint
from ckpt.loading.strategy import LoadingStrategy
from ckpt.ranks.default_topology import current_topology
from ckpt.ranks.topology import Topology
from ckpt.storage.metadata import TORCH_DIST


def register_default_torch_strategies() -> None:
    """Register the strategy that loads ("torch_dist", 1) with pickles refused."""
    register_default_strategy(StrategyAction.LOAD_SHARDED, TORCH_DIST, 1, TorchDistLoadShardedStrategy())


class TorchDistLoadShardedStrategy(LoadTensors):
    """Loads tensors and objects of a `torch_dist` checkpoint; the bytes of the tensors are read where they lie.

    Args:
        allow_pickle: read `.metadata` and the objects, which are pickles; otherwise they are refused.
        load_directly_on_device: see `LoadTensors`.
    """

    backends = (TORCH_DIST,)

    def __init__(self, load_directly_on_device: bool | None = False, *, allow_pickle: bool = False) -> None:
        super().__init__(load_directly_on_device)
        self._allow_pickle = allow_pickle

    @property
    def can_handle_sharded_objects(self) -> bool:
        return True

    def load(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Place) -> ShardedStateDict:
        """Replace every ShardedTensor and ShardedObject by what it describes; return the state dict. Collective.

        Raises: those of `LoadTensors.load`, and
            MissingStateError: there is no such object.
        """
        objects, tensors = extract_matching_values(sharded_state_dict, lambda one: isinstance(one, ShardedObject))
        topology = current_topology()
        with topology.operation(f"load of {checkpoint_dir}"), topology.phase("objects"):
            if any(True for _ in nested_values(objects)):
                checkpoint = self._opened(checkpoint_dir)
                dict_list_map_inplace(lambda one: _object(checkpoint, one.unique_key), objects)
        loaded = super().load(tensors, checkpoint_dir)
        merge(loaded, objects)
        return loaded

    def load_sharded_metadata(self, checkpoint_dir: Place) -> ShardedStateDict:
        """Return the tensors by key and the objects by unique key, without data. Not collective."""
        keys = [str(key) for (key,) in self._opened(checkpoint_dir).values]
        objects = {key: ShardedObject.empty_from_unique_key(key) for key in keys}
        return {**self.load_tensors_metadata(checkpoint_dir), **objects}

    def remove_sharded_tensors(self, checkpoint_dir: str | Place, key_prefix: str) -> None:
        """Refuse: several tensors lie in one file.

        Raises:
            ConfigurationError: always.
        """
        raise ConfigurationError(f"{checkpoint_dir} is a {TORCH_DIST} checkpoint, of which no tensors are removed")

    def _open(self, checkpoint_dir: Place, topology: Topology, strategy: LoadingStrategy) -> TensorSource:
        with topology.phase("open"):
            checkpoint = self._opened(checkpoint_dir)
        return TensorSource(checkpoint.tensors, checkpoint, "", strategy, topology)

    def _opened(self, checkpoint_dir: Place) -> OtherCheckpoint:
        folder = local_path(checkpoint_dir, "checkpoint_dir")
        PROGRAMS["megatron"].require_allowed(folder, allow_pickle=self._allow_pickle)
        return open_sharded(folder)


def _object(checkpoint: OtherCheckpoint, unique_key: str) -> object:
    if (unique_key,) not in checkpoint.values:
        raise MissingStateError(
            f"object {unique_key} is not in {checkpoint.root}. Objects cannot be resharded: request the objects that were saved."
        )
    found = checkpoint.values[unique_key,]()
    tell_of_unknown({unique_key: found}, checkpoint.root)
    return found
