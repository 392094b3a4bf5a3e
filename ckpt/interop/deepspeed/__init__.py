"""Universal checkpoints of DeepSpeed.

Files:

    reading                 of ZeRO stages 1 to 3
"""
