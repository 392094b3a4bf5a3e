"""Bytes and files, whatever their format: read into tensors, written past the page cache, synced once.

Files, in the order in which data travels:

    files                   pieces with progress, errors that name the file, one sync for everything
    pieces                  the bytes of a chunk on their way to storage, digested once
    direct_io, file_sink    files that grow, written by threads; all files of a rank in one save
    host_memory, pool       maps host memory; host memory that keeps the files of the newest save
    extents, runs           from (file, offset, length) into the memory of tensors, checked on the way
"""
