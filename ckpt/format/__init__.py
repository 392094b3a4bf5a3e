"""ckpt/format"""
