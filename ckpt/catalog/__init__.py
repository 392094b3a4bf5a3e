"""Committed checkpoints: where they lie, who owns the folder, which are whole, and what they share.

Files, in the order in which data travels:

    owner                   claims on folders
    ledger                  unpublished, committed, replaced, quarantined, removed: each step one rename
    incremental             what a save takes over from an earlier checkpoint
    verify                  reads a checkpoint whole, and says what is wrong with it
"""
