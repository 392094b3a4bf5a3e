"""Load a committed checkpoint into the objects of a run, after every rank has checked that it fits.

Files, in the order in which data travels:

    load_settings           settings of loads, and their checks
    loader                  the steps, in order
    sources                 describes what a committed checkpoint contains
    programs                who finds and opens checkpoints of other programs
    other_checkpoint        what each of their formats is read as: tensors that are raw bytes at known places in files, or are decoded
    parts_of_state          describes the components in a state dict: one that was saved alone, or of another program
    casting                 tensors that are converted to another data type
    compatibility, state_matching   decide whether a component is loaded; match its tensors with the saved ones
    strategy                interfaces of loading strategies, and a checkpoint that knows where its chunks lie
    direct, two_stage/      the strategies: each rank reads what it wants; ranks read for each other
    chunk_reader            reads chunks from storage, for both
    report, forecast        what a load did; what it would do
"""
