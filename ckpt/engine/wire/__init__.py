"""The transfer of weights: one stream of bytes, cut into buckets, held in host memory, broadcast, and verified by digests.

Files, in the order in which data travels:

    layout, delta           the place of each weight in the stream; the parts of each bucket that have changed
    pool                    host memory of both ends
    group                   process groups beside torch's
    buffers                 the size of buckets, and the memory that they pass through
    transfer                buckets on their way, and their digests
    transport               broadcasts for two-stage loads
"""
