"""Save the state of a run as a committed checkpoint. Every step ends in an agreement of all ranks.

Files, in the order in which data travels:

    save_settings           settings of saves, and their checks
    saver                   prepares the saves of one run: all ranks agree on plain values and on the plan, reused while they hold the same
    prepared_save           a save that is agreed on, the source of its bytes, and the interface of its destination
    writing                 one rank's part: chunks, packs, plain values, index
    checkpoint_root         the usual destination: a rename is the commit; warns if tensors have not changed since an earlier step
    new_folder              the destination of one state dict, a folder of its own; such saves of a framework, also beside training
    tiers, host_folder      places on the hosts before the checkpoint root, and a save into their folders
    drains                  copies saves from there to later tiers
    manifest_writer         the lead's part: the manifest
    host_cache              the newest save in host memory
    background/             saves that go on beside training
"""
