"""Storage backends, one storage format each. `base` is the contract; docs/adding-a-backend.md shows how to add one.

Files:

    base, registry          the contract; the backend of a name, and of the format that a manifest names
    zarr                                        Zarr v3 as a directory of chunk files
    tensorstore, ocdbt_format, linked_values    Zarr v3 in an OCDBT database
    kimi_engine, safetensors_format             safetensors files: one for each rank, folder and data type
    decoded_size            limits the memory that a compressed chunk may decode to
"""
