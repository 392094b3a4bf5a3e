"""Devices and host memory, and copies between them.

Files, in the order in which data travels:

    device                  memory, streams, random generators and collectives of a device; the only file that names devices
    memory, arena           new host memory on huge pages; the memory of snapshots, kept from save to save
    shared_memory           host memory that another process can map
    copies                  copies between host and device on side streams, beside other work
"""
