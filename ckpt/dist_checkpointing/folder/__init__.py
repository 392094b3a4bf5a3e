"""Save into an existing folder, load from it, and remove tensors from it. A load also recognizes checkpoints of Megatron-Core.

Files:

    saving                  the state to be saved, and the steps of a save
    destination, save_marker   the folder as the destination of a save; the marker of a save that has begun
    address                 an address in an object store as the destination
    loading                 a load
    removing                removal of tensors from a checkpoint
"""
