"""Checkpoints of other programs: read like those of this package, written, compared. Nothing is unpickled that could run code.

Files:

    programs                the table: how a path is found to be of one, its reader, its writer, its name
    dcp/, megatron/, safetensors/, orbax/, torch_save/, deepspeed/, torch_checkpointing/   one program each: reads its checkpoints, and
                            writes some
    unpickling, pickle_cost   read pickles without running their code; bound what that takes
    other_source            what such a checkpoint holds of a component
    exported                an export of a checkpoint of ours in another program's format
    registry                opens a checkpoint of any format; registers the programs for loads
    recognised              what is at a path that holds no checkpoint that is read
    opened                  a checkpoint of any format: its values, and its tensors box by box
    comparing               compares two checkpoints of any formats
    new_files               creates a directory atomically; writes files in pieces, which are read back
    importing               writes a checkpoint of another program as one of ours
    rewriting               rewrites a checkpoint of ours in the format of another backend
"""
