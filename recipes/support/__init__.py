"""Modules of every command: entry into Hydra, schema and checks of a config, ranks and their launcher, the folder of a run, reports.

cli             the decorator `recipe`, which runs a main function under Hydra
sentences       errors of Hydra and of the library as one sentence
path_values     paths on a command line, taken literally
config          the schema of a config, and its checks
run_folder      the folder of a run, and its lock
launch          joins ranks that exist, or starts them
ranks           one rank: its environment, device and process group
local_ranks, forkserver   ranks started on this machine
report          what a run prints, and summary.json
live_line       the line of a run on a terminal
metrics         figures for TensorBoard or W&B
sweep           the table of a sweep, and its files
"""

from pathlib import Path

CONF = Path(__file__).resolve().parent.parent.parent / "conf"
"""The config files, beside the package `recipes` in a checkout."""
