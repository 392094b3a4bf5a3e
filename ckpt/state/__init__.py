"""From the objects of a training run to tensors with addresses; comparison of equal copies.

Files:

    statefuls, optimizer_state, wrappers   modules, optimizers and random generators as components; names without wrappers
    sharing, provider       sharing patterns, which say what ranks hold a component; trainers that declare their components
    abilities               optional methods and attributes of a component's object
    flatten, plain          flattens nested state dicts and rebuilds them; plain values as JSON
    tensor_classes          tensors of other classes than torch's own, kept or refused
    sharded_base, sharded_tensor, sharded_object   tensors with their position in a global tensor, and objects
    address                 position of a leaf in its global array
    collect                 the state of one rank for a save; exchange of plain values and address tables
    replication, state_digest   comparison of equal copies; one digest for a whole state
    adapters                adapters of a PEFT model, and the base below them
    pattern_check           sharing patterns compared with the state of all ranks; those of components that are declared "auto"
    overlap                 delays the optimizer's step until copies are complete
"""
