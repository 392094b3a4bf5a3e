"""What the benchmark commands have in common: the keys under `benchmark` are checked apart, then all ranks measure."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import ModuleType

from omegaconf import DictConfig, OmegaConf, open_dict

SCRATCH = "scratch"
"""The folder in a run's own in which benchmarks save; gone when they end."""


def measure(cfg: DictConfig, home: ModuleType) -> None:
    """Measure on the ranks that the config asks for, and show the result on the one that prints.

    Args:
        home: has `check_benchmark(keys)`, which returns them checked; `benchmark(config, topology)`; and `show(result)`.
    """
    from recipes.config import checked
    from recipes.launch import launch
    from recipes.ranks import rank_of_environment

    with open_dict(cfg):
        wanted = OmegaConf.to_container(cfg.pop("benchmark"))
    run = checked(cfg) | {"benchmark": home.check_benchmark(wanted)}
    try:
        result = launch(home.benchmark, run)
    finally:
        if rank_of_environment() == 0:  # ranks that were ended in the middle have left it
            shutil.rmtree(Path(run["run_dir"], SCRATCH), ignore_errors=True)
    if result is not None:
        home.show(result)
