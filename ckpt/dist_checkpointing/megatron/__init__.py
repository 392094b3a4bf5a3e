"""Checkpoints written by Megatron-Core's zarr strategy. Read only.

Files, in the order in which data travels:

    layout                  files of such a checkpoint; metadata of its arrays
    zarr                    reads arrays and pickled parts
    chunks                  its chunks, for loading strategies
"""
