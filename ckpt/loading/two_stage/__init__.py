"""What several ranks want is read once, by one of them, and spread to the others.

Files, in the order in which data travels:

    two_stage               the loading strategy
    spread_blocks           who reads which bytes for whom
    endpoints               where the bytes of a rank come from, and where they belong
    spread_worker, slots    reads, sends and receives blocks; the memory that bounds it
    host, network           between the ranks of a host; between hosts
    timing                  how long each step took
"""
