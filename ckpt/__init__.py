"""Distributed checkpoints for PyTorch: standard files, committed by content, on all ranks or on none.

The public names are imported when they are first used: `import ckpt` alone does not import torch, so a command can look at the
machine, and explain itself, before torch and its plugins load.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckpt.coordinator import CheckpointCoordinator
    from ckpt.dist_checkpointing.mapping import (
        LocalNonpersistentObject,
        LocalNonpersitentObject,
        ShardedObject,
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
    from ckpt.format.manifest import CheckpointManifest, ComponentManifest
    from ckpt.format.metadata import CheckpointingException, check_is_distributed_checkpoint
    from ckpt.state.sharded_tensor import ShardedTensor
    from ckpt.state.sharing import SharingPattern, StateComponent
    from ckpt.version import __version__

_HOME = {
    "__version__": "ckpt.version",
    "CheckpointCoordinator": "ckpt.coordinator",
    "CheckpointManifest": "ckpt.format.manifest",
    "ComponentManifest": "ckpt.format.manifest",
    "CheckpointingException": "ckpt.format.metadata",
    "LocalNonpersistentObject": "ckpt.dist_checkpointing.mapping",
    "LocalNonpersitentObject": "ckpt.dist_checkpointing.mapping",
    "ShardedObject": "ckpt.dist_checkpointing.mapping",
    "ShardedTensor": "ckpt.dist_checkpointing.mapping",
    "ShardedTensorFactory": "ckpt.dist_checkpointing.mapping",
    "SharingPattern": "ckpt.state.sharing",
    "StateComponent": "ckpt.state.sharing",
    "StrictHandling": "ckpt.dist_checkpointing.validation",
    "check_is_distributed_checkpoint": "ckpt.format.metadata",
    "load": "ckpt.dist_checkpointing.serialization",
    "load_common_state_dict": "ckpt.dist_checkpointing.serialization",
    "load_plain_tensors": "ckpt.dist_checkpointing.serialization",
    "load_sharded_metadata": "ckpt.dist_checkpointing.serialization",
    "load_tensors_metadata": "ckpt.dist_checkpointing.serialization",
    "remove_sharded_tensors": "ckpt.dist_checkpointing.serialization",
    "save": "ckpt.dist_checkpointing.serialization",
}

__all__ = [
    "CheckpointCoordinator",
    "CheckpointManifest",
    "CheckpointingException",
    "ComponentManifest",
    "LocalNonpersistentObject",
    "LocalNonpersitentObject",
    "ShardedObject",
    "ShardedTensor",
    "ShardedTensorFactory",
    "SharingPattern",
    "StateComponent",
    "StrictHandling",
    "__version__",
    "check_is_distributed_checkpoint",
    "load",
    "load_common_state_dict",
    "load_plain_tensors",
    "load_sharded_metadata",
    "load_tensors_metadata",
    "remove_sharded_tensors",
    "save",
]


_MODULES = ("core", "dict_utils", "mapping", "optimizer", "serialization", "strategies", "utils", "validation")
"""Those that code written for Megatron-Core finds as attributes of the package."""


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"ckpt.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'ckpt' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
