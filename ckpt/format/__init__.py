"""The on-disk format: names, shapes, digests and records of a checkpoint. No files, no ranks, no devices, no backend.

Files:

    box, dtypes             rectangles of a global array; data types and their Zarr names
    places                  paths, and addresses in object stores; names of files
    zarr_dtypes             the data types that zarr-python lacks
    records                 records of an array, a chunk and a file
    manifest                the manifest and the indexes as objects; metrics and metadata that a program keeps with a checkpoint
    export_records          what an export in another program's format carries of the checkpoint that it was made of
    strict_json, manifest_parsing, consistency   parse and check both; the files are untrusted
    digests                 digests of blocks of bytes
    file_kinds              names a file that is no checkpoint, by its first bytes
    unknown                 stand-ins for objects of classes that are not built
    gc_pause                pauses Python's garbage collector around bursts of small objects
"""
