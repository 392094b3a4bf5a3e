"""ckpt/convert"""
