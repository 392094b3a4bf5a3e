"""ckpt/storage"""
