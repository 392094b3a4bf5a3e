"""From the objects of a run to a committed checkpoint. Every step ends in an agreement of all ranks.

Files, in the order in which data travels:

    arguments, save_settings   what a caller may give
    saver                   the saves of one run, up to the plan
    planner                 plain values and the plan, agreed by all ranks, and kept while they hold the same
    prepared_save           a save that is agreed on, and the interface of the places that it may go to
    gathering               where the bytes come from
    writing                 one rank's share: chunks, packs, plain values, index
    checkpoint_root         the place that a rename publishes
    manifest_writer         the lead's part: the manifest
    stale_state_check       alarms about checkpoints that hold the tensors of an earlier step
    host_cache, publishing  the newest save in host memory; weights out of it
    background/             saves that go on beside training
"""
