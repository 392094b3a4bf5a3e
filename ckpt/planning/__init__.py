"""Plans: which rank writes and reads which box. Pure functions of all ranks' addresses (the position of
each tensor in its global array), with equal results on every rank.

Files:

    plan                    which ranks hold each box; assigns the chunks and packs (small tensors in one array) of a save to ranks
"""
