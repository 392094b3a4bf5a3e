"""Bytes that several ranks need are read once, by one of these ranks, and sent to the others.

Files, in the order in which data travels:

    two_stage               the loading strategy: ranks agree on a plan
    spread_blocks           the bytes that each rank wants, and the plan: which rank reads which bytes for which ranks
    spread_worker           reads, sends, receives and places blocks; seconds of each step
    slots                   fixed memory for blocks, which limits how many are under way, and the link between the ranks of a host
    network                 between hosts
"""
