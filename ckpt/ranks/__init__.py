"""ckpt/ranks"""
