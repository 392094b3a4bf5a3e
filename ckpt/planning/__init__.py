"""Who writes and who reads which box: pure functions of everybody's addresses, equal on every rank.

Files, in the order in which data travels:

    tables                  what each rank says of its tensors, and who holds what
    plan                    the chunks and packs of a save, dealt to ranks; the chunks that a load needs
"""
