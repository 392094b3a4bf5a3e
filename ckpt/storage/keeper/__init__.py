"""Saves of one host that outlive its ranks: a small process serves them to the hosts of the job, and takes copies from these.

Files:

    wire                    what both sides say: the proof that a connection is of the job, requests and answers
    server                  the keeper's process
    client                  starts a host's keeper, and asks those of other hosts
    hosts                   the files of all hosts as one store, each byte from the nearest
"""
