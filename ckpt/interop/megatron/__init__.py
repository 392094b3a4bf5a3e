"""Checkpoints of Megatron-Core: of `torch_dist`, and of its zarr strategy.

Files:

    reading                 `torch_dist`: a checkpoint of DCP, and `common.pt`
    writing                 what makes a checkpoint of DCP one of `torch_dist`
    layout                  files of a checkpoint of the zarr strategy; metadata of its arrays
    zarr                    reads its arrays, also for loading strategies, and its pickled parts
"""
