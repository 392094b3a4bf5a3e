"""Storage backends, one storage format each. `base` is the contract; docs/adding-a-backend.md shows how to add one.

Files, in the order in which data travels:

    base, registry          the contract; the backends by name and by store
    zarr, directory, zarr_format                Zarr v3 as a directory of chunk files
    tensorstore, ocdbt_format, linked_values    Zarr v3 in an OCDBT database
    kimi_engine, safetensors_format             safetensors files: one for each rank, folder and data type
    decoded_size            bounds the size of a compressed chunk before a library decodes it
"""
