"""Convert checkpoints between formats, into a new folder which appears complete or not at all, and compare them.

Files:

    atomic_directory        creates a directory atomically
    checked_writes          writes pieces of files, and compares what is read back
    opened                  a checkpoint of any format: its values, and its tensors box by box
    rewriting               rewrites a checkpoint in the format of another backend
    importing               writes a checkpoint of another program as one of ours
    exporting_safetensors   exports tensors as plain safetensors files
    exporting_dcp           exports a checkpoint as one of torch.distributed.checkpoint
    exporting_torch         exports a checkpoint as one file of torch.save
    comparing               compares two checkpoints of any formats
"""
