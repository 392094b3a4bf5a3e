"""Save, load and shrink one checkpoint in a folder that the user has made.

Files, in the order in which data travels:

    folder                  the state to be saved, and the steps of a save
    destination, save_marker   the folder as the destination of a save; the marker of a save that has begun
    loading                 a load
    removing                removal of tensors from a checkpoint
"""
