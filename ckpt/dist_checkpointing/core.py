"""`metadata.json`, which names the formats of a checkpoint. Re-exports `ckpt.format.metadata` under Megatron-Core's module name."""

from ckpt.format.metadata import CheckpointingConfig as CheckpointingConfig
from ckpt.format.metadata import CheckpointingException as CheckpointingException
from ckpt.format.metadata import check_is_distributed_checkpoint as check_is_distributed_checkpoint
from ckpt.format.metadata import maybe_load_config as maybe_load_config
from ckpt.format.metadata import save_config as save_config
