"""What the benchmark commands have in common: the keys under `benchmark` are checked apart, then all ranks measure."""

from __future__ import annotations

from types import ModuleType

from omegaconf import DictConfig, OmegaConf, open_dict


def measure(cfg: DictConfig, home: ModuleType) -> None:
    """Measure on the ranks that the config asks for, and show the result on the one that prints.

    Args:
        home: has `check_benchmark(keys)`, which returns them checked; `benchmark(config, topology)`; and `show(result)`.
    """
    from recipes.config import checked
    from recipes.launch import launch

    with open_dict(cfg):
        wanted = OmegaConf.to_container(cfg.pop("benchmark"))
    result = launch(home.benchmark, checked(cfg) | {"benchmark": home.check_benchmark(wanted)})
    if result is not None:
        home.show(result)
