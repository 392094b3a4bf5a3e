"""From the objects of a training run to leaves with addresses, and what is true of their copies.

Files, in the order in which data travels:

    statefuls, wrappers     modules, optimizers and random generators as components; names without wrappers
    sharing, provider       who holds a component; trainers that describe themselves
    abilities               what an object of a component may offer beside its state
    flatten                 nested state dicts and their leaves
    sharded_base, sharded_tensor   tensors that say which piece of a global one they are
    address                 which piece of which global array a leaf is
    collect                 what one rank brings to a save
    replication, digest     are copies equal; one number for a whole state
    doctor, pattern_check   which sharing pattern is true, for one component and over all ranks
    overlap                 what an optimizer's step waits for while a copy is taken
"""
