"""One checkpoint in a folder that the user has made: saved, loaded, and made smaller.

Files, in the order in which data travels:

    folder                  what is saved, and the steps of a save
    destination, save_marker   the folder as the place of a save; the sign that one has begun
    loading                 a load
    removing                removes tensors from a checkpoint
"""
