"""All ranks succeed or all fail: the job's key-value store, heartbeats, agreements, and SIGTERM.

Files:

    waiting                 waits that stop if the other process has died
    addresses, stores       this machine's addresses; servers of the store, and connections to it
    store_client, mail      values of any size in the store, and queues; messages between ranks
    meeting                 names the part of the store that this life of a job uses
    heartbeat               signs of life of each rank
    merging                 reductions of what ranks say at the end of a phase
    agreement, agreeing     each rank reports success or an error, or is absent; all get the same result: the machine; its driver
    topology                ranks, hosts, process groups and phases: what the rest of the package uses
    sigterm                 delays SIGTERM while a save or a load is under way
    default_topology        the default topology, for calls that are given none
"""
