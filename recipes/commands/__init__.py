"""Commands that read, compare or convert checkpoints.

reading, reading_others   inspect, verify
inspect_page, checkpoint_page, treemap, sharding_pictures   the page of inspect
planning        plan
patterns        doctor
comparing       diff
bisecting       bisect
converting, converting_megatron   convert
"""
