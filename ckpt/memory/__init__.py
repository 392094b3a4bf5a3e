"""ckpt/memory"""
