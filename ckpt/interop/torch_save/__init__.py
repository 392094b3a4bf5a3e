"""Files of `torch.save`.

Files:

    archives                tensors and values in the archives that `torch.save` writes: their places, and their types
    reading                 one file, or several with an index
    old_folders             folders of such files, as the third reference wrote before it had a manifest
    writing                 exports a checkpoint as one file
"""
