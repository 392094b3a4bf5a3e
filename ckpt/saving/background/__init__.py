"""Saves that go on beside training: the state is copied, and a thread writes the copy.

Files, in the order in which data travels:

    background              the unfinished saves of one coordinator, and the limit of their memory
    snapshot                a copy of one rank's part in host memory
    priority                CPU priority, cores and bytes a second of the writer
    async_utils             requests, and the queue that makes all ranks finish them in the same order
"""
