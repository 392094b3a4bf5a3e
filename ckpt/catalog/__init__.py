"""Committed checkpoints: their folders, the owners of folders, their verification, and the files they share.

Files, in the order in which data travels:

    owner                   claims on folders, by locked owner files
    ledger                  unpublished, committed, replaced, quarantined, removed: each step one rename
    incremental             files of an earlier checkpoint that a save may link
    verify                  reads every byte of a checkpoint and lists problems
"""
