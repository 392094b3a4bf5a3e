"""Adapters: each file lets another library save and load checkpoints of this package.

Files:

    dcp                     `torch.distributed.checkpoint.save` and `load`, by one argument
"""
