"""Save into an existing folder, load from it, and remove tensors from it. A load also recognizes checkpoints of Megatron-Core.

Files:

    saving                  the state to be saved, and the steps of a save
    claim                   the claim of one save on a folder or an address
    destination             the folder as the destination of a save; leftovers of interrupted saves
    address                 an address in an object store as the destination
    loading                 a load
    removing                removal of tensors from a checkpoint
"""
