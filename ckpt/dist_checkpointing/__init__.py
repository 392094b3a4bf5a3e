"""ckpt/dist_checkpointing"""
