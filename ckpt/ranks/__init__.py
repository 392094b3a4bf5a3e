"""All ranks succeed or all fail: the job's key-value store, heartbeats, agreements, and SIGTERM.

Files, in the order in which data travels:

    waiting                 waits that end when the other side is gone
    addresses, stores       this machine's addresses; servers of the store, and connections to it
    store_client            values of any size in the store
    heartbeat               signs of life of each rank, and the detection of absent ranks
    agreement               one verdict of each rank, one result for all
    topology                ranks, hosts, process groups and phases: what the rest of the package uses
    sigterm                 deferral of SIGTERM while a save or a load is under way
    job                     the topology of calls that are given none
"""
