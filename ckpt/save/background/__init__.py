"""ckpt/save/background"""
