"""Devices and host memory, and copies between them.

Files:

    budget                  the budget for host memory beside the state, shared out over what takes it
    device                  memory, streams, random generators and collectives of a device; no other file names devices
    huge_pages, arena         allocates host memory on huge pages; memory for copies of the state, reused by the next save
    shared_memory           host memory that another process can map
    copies                  copies between host and device on separate streams, in parallel with other work
"""
