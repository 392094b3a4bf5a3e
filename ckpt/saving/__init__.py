"""Save the state of a run as a committed checkpoint. Every step ends in an agreement of all ranks.

Files, in the order in which data travels:

    arguments, save_settings   checks of a caller's arguments
    run_history             the checkpoints that the run knows in its output_dir
    saver                   the saves of one run, up to the plan
    planner                 agreement on plain values and on the plan, reused while the ranks hold the same
    prepared_save           a save that is agreed on, and the interface of its destination
    gathering               the tensors of each item, brought to the host
    writing                 one rank's share: chunks, packs, plain values, index
    checkpoint_root         the destination that a rename publishes
    manifest_writer         the lead's part: the manifest
    stale_state_check       alarms about checkpoints that hold the tensors of an earlier step
    host_cache, publishing  the newest save in host memory; its weights sent from there
    background/             saves that go on beside training
"""
