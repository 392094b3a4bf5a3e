"""What lies on disk: names, shapes, digests and records of a checkpoint. It knows no ranks, no devices and no backend.

Files, in the order in which data travels:

    box, names, dtypes      rectangles of a global array; names of files; data types and their Zarr names
    zarr_dtypes             the data types that zarr-python lacks
    records                 what is on record of an array, a chunk and a file
    manifest, metadata      the manifest and the indexes as objects; metadata.json
    strict_json, manifest_parsing, consistency   the same from text that a stranger may have written
    blocks                  digests of bytes
    checkpoint_files        opens the files below one checkpoint folder, and none outside of it
    durable, stored         small files that survive a power cut; the records of a committed checkpoint, read and checked
    held                    files of a checkpoint that are in the memory of this host, too
    unpickling              the one door to pickled files of others
    gc_pause                pauses Python's garbage collector around bursts of small objects
"""
