"""Read checkpoints that Megatron-Core's zarr strategy wrote.

Its format torch_dist: `ckpt.loading.other_formats.megatron_folders`.

Files:

    layout                  files of such a checkpoint; metadata of its arrays
    zarr                    reads arrays, also for loading strategies, and pickled parts
"""
