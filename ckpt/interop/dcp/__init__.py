"""Checkpoints of `torch.distributed.checkpoint`.

Files:

    reading                 `.metadata`, and the `.distcp` files of the ranks
    writing                 exports a checkpoint as one of DCP
"""
