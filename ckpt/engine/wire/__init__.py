"""The transfer of weights. All weights are one stream of bytes, cut into buckets, which are broadcast and verified by digest.

Files, in the order in which data travels:

    layout, delta           the place of each weight in the stream; the parts of each bucket that have changed
    pool                    host memory of trainers, to send, and of rollouts, to receive
    receivers               rollouts that receive, and those that read another one's memory
    group                   process groups that do not depend on torch's default group
    buffers                 the size of buckets, and the memory that they pass through
    transfer                buckets on their way, and their digests
    load_transport          broadcasts for two-stage loads
"""
