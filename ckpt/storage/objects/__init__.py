"""Object stores: S3, Google Cloud Storage, Azure, and memory for tests.

Files:

    store                   the requests, by obstore, which no other file imports; its errors as ours
    sink                    writes the files of one rank in one save, as whole objects
    files                   reads objects below one checkpoint
"""
