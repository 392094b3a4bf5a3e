"""The on-disk format: names, shapes, digests and records of a checkpoint. No ranks, no devices, no backend.

Files:

    box, names, dtypes      rectangles of a global array; names of files; data types and their Zarr names
    zarr_dtypes             the data types that zarr-python lacks
    records                 records of an array, a chunk and a file
    manifest, metadata      the manifest and the indexes as objects; metadata.json
    notes                   metrics and metadata that a program keeps with a checkpoint
    export_records          what an export in another program's format carries of the checkpoint that it was made of
    strict_json, manifest_parsing, consistency   parse and check both; the files are untrusted
    digests                 digests of blocks of bytes
    checkpoint_files        opens files below one checkpoint folder, and none outside of it
    hub_snapshots           finds the files of a snapshot in Hugging Face's cache, which are links
    durable, stored         writes small files durably; reads and checks the records of a committed checkpoint
    removal                 deletes what is shown to be this package's own
    held                    files of the newest save, read from host memory
    pickle_cost             bounds what reading a pickle takes
    unpickling              reads pickled files of other programs without running their code
    gc_pause                pauses Python's garbage collector around bursts of small objects
"""
