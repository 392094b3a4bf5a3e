"""Measurements beside others and beside the machine: `python -m recipes.benchmark` of saves and loads, `recipes.benchmark.X` of others."""
