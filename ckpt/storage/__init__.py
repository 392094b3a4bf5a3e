"""Bytes and files of any format: read into tensors, written past the page cache, synced once.

Files:

    files                   errors that name the file, makes all files of a save durable with one sync
    pieces                  the bytes of a chunk, padded, and digested once on their way to storage
    direct_io, file_sink    appends to files, by writer threads; all files of a rank in one save
    host_memory, pool       maps host memory; keeps the files of the newest save in it
    extents                 reads from (file, offset, length), and compares bytes with their digests
    checked_blocks          the blocks that some rank of this host has checked, which the others do not hash again
    wanted_bytes, runs      puts the bytes of a chunk into the tensors that want them; many small tensors together
"""
