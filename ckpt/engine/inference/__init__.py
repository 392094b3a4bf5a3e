"""ckpt/engine/inference"""
