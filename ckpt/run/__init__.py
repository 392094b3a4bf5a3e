"""What `ckpt.coordinator` is made of, for saves and loads alike: a run, its checkpoints and its tiers.

Files:

    arguments               checks and converts the arguments of a coordinator
    run_history             the checkpoints that the run knows in its output_dir
    tiered                  the newest whole checkpoint of all tiers, and what goes on to later ones
    weights_to_rollouts     sends the weights of the newest save in host memory to rollouts
"""
