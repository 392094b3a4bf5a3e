"""Committed checkpoints: their folders, the owners of folders, their verification, and the files they share.

Files:

    owner                   a locked owner file, so that only one run uses a folder
    committed               what a manifest's head says of its checkpoint, the order of commits, and what both catalogs have in common
    ledger                  checkpoint folders: the rename to `checkpoint-<id>` is the commit; the newest is found here (no file `latest`)
    object_ledger, lease    the same in an object store: a conditional put is the commit; a heartbeat instead of a lock
    catalog                 the one or the other, by where the root is
    retention               which checkpoints of a run stay after a save
    removing                parts of a committed checkpoint are taken out of its records
    incremental             files of an earlier checkpoint that a save may link
    verify                  reads every byte of a checkpoint and lists problems
    copying                 a checkpoint from any storage to any other
"""
