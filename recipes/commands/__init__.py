"""Commands that need the recipes: they make the objects of a run. What works on checkpoints alone is in `ckpt.cli`.

planning        plan
patterns        doctor
bisecting       bisect
"""
