"""The kinds of values in a sharded state dict, and what must hold over all ranks.

Files, in the order in which data travels:

    factories, objects      values that are stored in another form; values that are no tensors
    parting                 a state dict, taken apart by kinds of value
    global_metadata, integrity   what all ranks hold; do their shards make up one state
    common_state, strictness     do ranks agree on the rest; keys that only one side has
"""
