"""Convert checkpoints between formats, into a new folder which appears complete or not at all, and compare them.

Files:

    atomic_directory        creates a directory atomically
    rewriting               rewrites a checkpoint in the format of another backend
    exporting               exports tensors as plain safetensors files
    comparing               compares two checkpoints of any formats
"""
