"""Megatron-Core's `dist_checkpointing`, name for name: `megatron.core.dist_checkpointing.X` is `ckpt.dist_checkpointing.X`.

Files, in the order in which data travels:

    serialization           save, load and what one may ask of a checkpoint
    validation, mapping, utils, dict_utils, optimizer, core   upstream's modules of these names
    strategies/             upstream's strategies and their registry
    state/                  checks over all ranks' shards, factories and objects
    folder/                 a save into a folder that is there already, and a load from it
    megatron/               checkpoints that upstream itself wrote
"""
