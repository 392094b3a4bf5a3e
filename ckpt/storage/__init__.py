"""Bytes and files of any format: records read and checked, tensors read into memory, written past the page cache, synced once.

Files:

    sink                    what writes the files of a rank in one save, in pieces that are digested once: into a folder, or by objects/sink
    objects/                object stores
    keeper/                 files of one host, for the other hosts of a job
    checkpoint_files        the files of a checkpoint: opens those below its folder, and none outside of it, or by objects/files
    stored, metadata        reads and checks the records of a committed checkpoint; metadata.json
    hub_snapshots           finds the files of a snapshot in Hugging Face's cache, which are links
    files                   errors that name the file, one sync for a save, small durable files; deletes what is shown to be ours
    direct_io               appends to files, by writer threads
    host_memory, pool       maps host memory, and reads the files of the newest save there; keeps these
    extents                 reads from (file, offset, length), and compares bytes with their digests, each block once on a host
    wanted_bytes            puts the bytes of a chunk into the tensors that want them; many small tensors together
"""
