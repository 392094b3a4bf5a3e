"""Commands that read or convert checkpoints.

reading         inspect, verify
planning        plan
patterns        doctor
converting, converting_megatron   convert
"""
