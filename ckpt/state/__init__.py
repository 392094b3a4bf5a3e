"""ckpt/state"""
