"""Bytes and files of any format: records read and checked, tensors read into memory, written past the page cache, synced once.

Files:

    files_of                the files of a checkpoint, wherever it is: checkpoint_files or objects/files
    sink                    what writes the files of a rank in one save: file_sink or objects/sink
    objects/                object stores
    checkpoint_files        opens files below one checkpoint folder, and none outside of it
    stored, metadata        reads and checks the records of a committed checkpoint; metadata.json
    hub_snapshots           finds the files of a snapshot in Hugging Face's cache, which are links
    durable, removal        writes small files durably; deletes what is shown to be this package's own
    files                   errors that name the file, makes all files of a save durable with one sync
    pieces                  the bytes of a chunk, padded, and digested once on their way to storage
    direct_io, file_sink    appends to files, by writer threads; all files of a rank in one save
    host_memory, pool       maps host memory; keeps the files of the newest save in it
    held                    reads these files from there
    extents                 reads from (file, offset, length), and compares bytes with their digests
    checked_blocks          the blocks that some rank of this host has checked, which the others do not hash again
    wanted_bytes, runs      puts the bytes of a chunk into the tensors that want them; many small tensors together
"""
