"""Load a committed checkpoint into the objects of a run, once every rank has found that it fits.

Files, in the order in which data travels:

    loader                  the steps, in order
    sources, legacy         answer what a checkpoint holds: a committed one; a folder of torch.save files
    compatibility, state_matching   decide whether a component is loaded; match its tensors with the saved ones
    strategy                interfaces of loading strategies, and a committed checkpoint that locates its chunks
    direct, two_stage/      the strategies: each rank reads what it wants; ranks read for each other
    chunk_reader            reads chunks from storage, for both
    report, forecast        what a load did; what it would do
"""
