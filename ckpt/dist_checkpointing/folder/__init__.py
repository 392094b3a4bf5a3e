"""ckpt/dist_checkpointing/folder"""
