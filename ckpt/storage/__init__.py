"""Bytes and files of any format: read into tensors, written past the page cache, synced once.

Files, in the order in which data travels:

    files                   errors that name the file, one sync for all files of a save
    pieces                  the bytes of a chunk, padded, and digested once on their way to storage
    direct_io, file_sink    appends to files, by writer threads; all files of a rank in one save
    host_memory, pool       maps host memory; keeps the files of the newest save in it
    extents                 reads from (file, offset, length), with digest checks
    wanted_bytes, runs      puts the bytes of a chunk into the tensors that want them; many small tensors together
"""
