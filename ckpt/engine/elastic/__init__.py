"""ckpt/engine/elastic"""
