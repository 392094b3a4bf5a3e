"""Checkpoints that Megatron-Core wrote with its zarr strategy: read, never written.

Files, in the order in which data travels:

    layout                  what lies where
    chunks, zarr            its chunks, for loading strategies; the arrays and the pickled parts
"""
