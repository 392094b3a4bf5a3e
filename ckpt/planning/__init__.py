"""ckpt/planning"""
