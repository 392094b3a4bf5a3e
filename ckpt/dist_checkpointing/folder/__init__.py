"""One checkpoint in a folder that the user has made: saved, loaded, and made smaller.

Files, in the order in which data travels:

    destination, save_marker   what may lie in the folder; the sign that a save has begun
    folder                  a save by all ranks or none
    loading                 a load
    removing, removing_shards   takes tensors out of a checkpoint
"""
