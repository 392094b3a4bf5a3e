"""Save the state of a run as a committed checkpoint. Every step ends in an agreement of all ranks.

Files, in the order in which data travels:

    arguments, save_settings   checks of a caller's arguments
    run_history             the checkpoints that the run knows in its output_dir
    saver                   prepares the saves of one run
    planner                 all ranks agree on plain values and on the plan of planning/plan.py, reused while they hold the same
    prepared_save           a save that is agreed on, and the interface of its destination
    gathering               the tensors of each item, brought to the host
    writing                 one rank's share: chunks, packs, plain values, index
    checkpoint_root         the usual destination: one rename makes the folder visible, which is the commit
    new_folder              the destination of one state dict: a folder of its own
    folder_saves            save after save into folders that a framework names and retires, also beside training
    manifest_writer         the lead's part: the manifest
    stale_state_check       warns if saved tensors have not changed since an earlier step
    host_cache, weights_to_rollouts   the newest save in host memory; sends its weights to rollouts
    background/             saves that go on beside training
"""
