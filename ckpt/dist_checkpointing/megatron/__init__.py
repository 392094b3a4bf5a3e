"""Read checkpoints that Megatron-Core's zarr strategy wrote. Its format torch_dist is not read.

Files:

    layout                  files of such a checkpoint; metadata of its arrays
    zarr                    reads arrays, also for loading strategies, and pickled parts
"""
