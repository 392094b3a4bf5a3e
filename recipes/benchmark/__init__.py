"""Measurements beside others and beside the machine: each command is a file that `python -m recipes.benchmark` or `recipes.benchmark.X` runs."""
