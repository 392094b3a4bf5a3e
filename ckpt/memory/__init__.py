"""Devices and host memory, and copies between them.

Files:

    budget                  the budget for host memory beside the state, shared out over what takes it
    device                  memory, streams, random generators and collectives of a device; no other file names devices
    host                    host memory on huge pages, reused by the next save, or mapped by another process, too
    copies                  copies between host and device on separate streams, in parallel with other work
"""
