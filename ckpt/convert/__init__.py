"""One format into another: a whole new checkpoint, or nothing.

Files, in the order in which data travels:

    atomic_directory        a folder that is there when all of it is there
    rewriting               a checkpoint in the format of another backend
    exporting               its tensors as plain safetensors files
"""
