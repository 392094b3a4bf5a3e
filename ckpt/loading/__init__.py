"""Load a committed checkpoint into the objects of a run, after every rank has checked that it fits.

Files, in the order in which data travels:

    loader                  the steps, in order
    sources, torch_save_folders, other_formats/   describe what a checkpoint contains: a committed one; folders and files of other programs
    parts_of_state          describes the components in a state dict that was saved alone
    exported                describes an export of a checkpoint of ours in another program's format
    casting                 tensors that are converted to another data type
    compatibility, state_matching   decide whether a component is loaded; match its tensors with the saved ones
    strategy                interfaces of loading strategies, and a checkpoint that knows where its chunks lie
    direct, two_stage/      the strategies: each rank reads what it wants; ranks read for each other
    chunk_reader            reads chunks from storage, for both
    report, forecast        what a load did; what it would do
"""
