"""Plans: which rank writes and reads which box. Pure functions of all ranks' addresses, with equal results on every rank.

Files, in the order in which data travels:

    tables                  the address table of each rank; which ranks hold each box
    plan                    assigns the chunks and packs of a save to ranks; lists the chunks that a load needs
"""
