"""How weights travel: cut into buckets, held in host memory, sent over groups of our own, and checked.

Files, in the order in which data travels:

    layout, delta           where each weight lies in the stream of buckets; which parts of a bucket have changed
    pool                    host memory of both ends
    buckets                 how large they are, and the device memory that they pass through
    group, ring, transfer, parts   process groups, and buckets on their way
    transport               the same for two-stage loads
"""
