"""Convert checkpoints between formats: into a new folder, atomically.

Files, in the order in which data travels:

    atomic_directory        creates a directory atomically
    rewriting               rewrites a checkpoint in the format of another backend
    exporting               exports tensors as plain safetensors files
"""
