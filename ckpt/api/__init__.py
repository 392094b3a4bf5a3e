"""For programs of one's own: a training loop that saves and resumes in three lines, and one state dict saved under a path.

Files:

    checkpointer            `Checkpointer`: finds devices, groups and sharing patterns, saves due steps, restores, retires
    adapters                `ckpt.load_adapter`: an adapter of PEFT into a model in use
    state_dicts             `ckpt.save` and `ckpt.load`: a nested dict of tensors and plain values, and a path
"""
