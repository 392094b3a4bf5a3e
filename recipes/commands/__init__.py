"""Commands that read, compare or convert checkpoints.

reading, reading_others   inspect, verify
planning        plan
patterns        doctor
comparing       diff
bisecting       bisect
converting, converting_megatron   convert
"""
