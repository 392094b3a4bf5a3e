"""From a committed checkpoint into the objects of a run. Nothing is read before every rank has found that all fits.

Files, in the order in which data travels:

    loader                  the steps, in order
    sources, legacy         what a checkpoint answers: a committed one; a folder of torch.save files
    compatibility, state_matching   may a component be loaded here; what it wants against what was saved
    strategy, direct        what every loading strategy works with; each rank reads what it wants
    two_stage/              what several ranks want is read once and spread
    report, forecast        what a load did; what it would do
"""
