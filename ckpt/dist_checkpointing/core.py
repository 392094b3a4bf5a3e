"""`metadata.json`, which names the formats of a checkpoint. Re-exports `ckpt.storage.metadata` under Megatron-Core's module name."""

from ckpt.storage.metadata import CheckpointingConfig as CheckpointingConfig
from ckpt.storage.metadata import CheckpointingException as CheckpointingException
from ckpt.storage.metadata import check_is_distributed_checkpoint as check_is_distributed_checkpoint
from ckpt.storage.metadata import maybe_load_config as maybe_load_config
from ckpt.storage.metadata import save_config as save_config
