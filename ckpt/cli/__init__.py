"""The command `ckpt`, and what it shares with the recipes: each command is a function that takes a dataclass of keys.

Files:

    main                    the program: options made of the keys, errors as one sentence
    arguments               keys as fields of a dataclass
    listing                 ls
    reading                 show, verify
    reading_others          checkpoints of other programs
    comparing               diff
    converting, converting_megatron   convert
    copying                 copy
    removing                rm
    bisecting               bisect
    serving                 serve
    environment             how a command imports torch
    config_text             the config in a checkpoint
    tables, progress        what a terminal shows
    pages/                  what a browser shows
"""
