"""All ranks succeed or all fail: the job's key-value store, heartbeats, agreements, and SIGTERM.

Files, in the order in which data travels:

    waiting                 waits that end when the other side is gone
    addresses, stores       this machine's addresses; the server and the clients of the store
    store_client            values of any size in the store
    heartbeat               who lives, and when a silent rank counts as absent
    agreement               one verdict of each rank, one result for all
    topology                ranks, hosts, process groups and phases: what the rest of the package uses
    sigterm                 SIGTERM, put off while a save or a load is under way
    job                     the topology of calls that name none
"""
