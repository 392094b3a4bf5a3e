"""Checkpoints of Orbax, JAX's library.

Files:

    reading                 OCDBT databases or folders of Zarr arrays
"""
