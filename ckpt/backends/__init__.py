"""One storage format a file. `base` is the contract; a new backend implements it and is registered in `registry`.

Files, in the order in which data travels:

    base, registry          the contract, and which backend reads which store
    zarr, directory, zarr_format                Zarr v3 as a directory of chunk files
    tensorstore, ocdbt_format, linked_values    Zarr v3 in an OCDBT database
    kimi_engine, safetensors_format             safetensors files, one for each rank, folder and data type
    decoded_size            the size of a compressed chunk, before room is made for it
"""
