"""Checkpoints of Meta's torch_checkpointing.

Files:

    shards                  which boxes of a tensor a rank's part of it holds: its sharding metadata, and the specs of DTensors
    reading                 those that its CheckpointManager writes
"""
