"""Commands that read, compare or convert checkpoints.

reading         inspect, verify
planning        plan
patterns        doctor
comparing       diff
converting, converting_megatron   convert
"""
