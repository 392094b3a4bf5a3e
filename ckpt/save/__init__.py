"""ckpt/save"""
