"""Read bytes that several ranks want once, by one of them, and spread them to the others.

Files, in the order in which data travels:

    two_stage               the loading strategy: ranks agree on a plan
    wants                   the bytes that one rank wants, by chunk
    spread_blocks           the plan: which rank reads which bytes for which ranks
    spread_worker           reads, sends, receives and places blocks
    slots                   the memory that blocks travel in, which bounds them
    host, network           between the ranks of a host; between hosts
    timing                  seconds of each step
"""
