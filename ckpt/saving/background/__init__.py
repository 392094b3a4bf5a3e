"""Saves that go on beside training: a copy is taken, and written by a thread or by a process.

Files, in the order in which data travels:

    background              the saves of one coordinator that are under way
    snapshot                a copy of one rank's share in host memory
    priority                how much of the machine the writer may take
    async_utils             requests, and the queue in which all ranks finish theirs in one order
    writer_process, writer_child, serialized_errors   a process that writes, the program that it runs, errors between the two
"""
