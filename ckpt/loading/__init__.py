"""Load a committed checkpoint into the objects of a run, after every rank has checked that it fits.

Files, in the order in which data travels:

    load_settings           settings of loads, and their checks
    loader                  the steps, in order
    sources                 describes what a committed checkpoint contains
    other_checkpoint        what a checkpoint of another program is read as: raw bytes in files, or tensors that are decoded; who opens it
    parts_of_state          describes the components in a state dict: one that was saved alone, or of another program
    compatibility, state_matching   decide whether a component is loaded; match its tensors with the saved ones
    strategy                interfaces of strategies, and a checkpoint that knows where its chunks lie; tensors that are converted
    direct, two_stage/      reads chunks from storage, and the strategies: each rank reads what it wants; ranks read for each other
    report, forecast        what a load did; what it would do
"""
