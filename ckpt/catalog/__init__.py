"""ckpt/catalog"""
