"""Which formats a checkpoint was written in: upstream's module of this name. What is behind it is `ckpt.format.metadata`."""

from ckpt.format.metadata import (
    CheckpointingConfig,
    CheckpointingException,
    check_is_distributed_checkpoint,
    maybe_load_config,
    save_config,
)

__all__ = [
    "CheckpointingConfig",
    "CheckpointingException",
    "check_is_distributed_checkpoint",
    "maybe_load_config",
    "save_config",
]
