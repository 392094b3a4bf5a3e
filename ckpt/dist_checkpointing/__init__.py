"""Megatron-Core's `dist_checkpointing`, name for name: `megatron.core.dist_checkpointing.X` is `ckpt.dist_checkpointing.X`.

Files:

    mapping, optimizer      ShardedTensor, ShardedObject and factories; the sharding of an optimizer's state
    serialization           save, load, and metadata of a checkpoint
    utils, dict_utils       splitting of sharded state dicts; nested dictionaries and lists
    validation              choice of a load's strategies; missing and unexpected keys
    core                    metadata.json
    strategies/             Megatron-Core's strategies and their registry

Files without a counterpart of that name in Megatron-Core:

    global_metadata, integrity   metadata of all ranks; the check that exactly one rank saves each element
    common_state            differences between the ranks' common states
    folder/                 a save into an existing folder, and a load from it
"""

from ckpt.dist_checkpointing import optimizer as optimizer
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
