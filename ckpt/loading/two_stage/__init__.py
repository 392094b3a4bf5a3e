"""Bytes that several ranks need are read once, by one of these ranks, and sent to the others.

Files, in the order in which data travels:

    two_stage               the loading strategy: ranks agree on a plan
    wants                   the bytes that one rank wants, by chunk
    spread_blocks           the plan: which rank reads which bytes for which ranks
    spread_worker           reads, sends, receives and places blocks
    slots                   fixed memory for blocks, which limits how many are under way
    host_link, network      between the ranks of a host; between hosts
    timing                  seconds of each step
"""
