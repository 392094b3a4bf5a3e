"""ckpt/engine/wire"""
