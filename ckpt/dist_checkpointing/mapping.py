"""What one rank says of its part of a global tensor or object, and where it lies. Names follow Megatron-Core."""

from __future__ import annotations

import logging

from ckpt.dist_checkpointing.state.factories import (
    FactoryBuildFn,
    FactoryMergeFn,
    ShardedTensorFactory,
    apply_factories,
    apply_factory_merges,
)
from ckpt.dist_checkpointing.state.objects import LocalNonpersistentObject, LocalNonpersitentObject, ShardedObject
from ckpt.state.sharded_base import (
    CommonStateDict,
    ReplicaId,
    ShardedBase,
    ShardedStateDict,
    StateDict,
    is_main_replica,
)
from ckpt.state.sharded_tensor import ShardedTensor

__all__ = [
    "CommonStateDict",
    "FactoryBuildFn",
    "FactoryMergeFn",
    "LocalNonpersistentObject",
    "LocalNonpersitentObject",
    "ReplicaId",
    "ShardedBase",
    "ShardedObject",
    "ShardedStateDict",
    "ShardedTensor",
    "ShardedTensorFactory",
    "StateDict",
    "apply_factories",
    "apply_factory_merges",
    "is_main_replica",
]

logger = logging.getLogger(__name__)
