"""Megatron-Core's `dist_checkpointing`, name for name: `megatron.core.dist_checkpointing.X` is `ckpt.dist_checkpointing.X`.

Files, in the order in which data travels:

    serialization           save, load and what one may ask of a checkpoint
    core, dict_utils, mapping, optimizer, utils, validation   upstream's modules of these names
    strategies/             upstream's strategies and their registry
    state/                  checks over all ranks' shards, factories and objects
    folder/                 a save into a folder that is there already, and a load from it
    megatron/               checkpoints that upstream itself wrote
"""

from ckpt.dist_checkpointing.core import CheckpointingException, check_is_distributed_checkpoint
from ckpt.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    LocalNonpersitentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from ckpt.dist_checkpointing.serialization import (
    load,
    load_common_state_dict,
    load_plain_tensors,
    load_sharded_metadata,
    load_tensors_metadata,
    remove_sharded_tensors,
    save,
)
from ckpt.dist_checkpointing.validation import StrictHandling

__all__ = [
    "CheckpointingException",
    "LocalNonpersistentObject",
    "LocalNonpersitentObject",
    "ShardedObject",
    "ShardedTensor",
    "ShardedTensorFactory",
    "StrictHandling",
    "check_is_distributed_checkpoint",
    "load",
    "load_common_state_dict",
    "load_plain_tensors",
    "load_sharded_metadata",
    "load_tensors_metadata",
    "remove_sharded_tensors",
    "save",
]
