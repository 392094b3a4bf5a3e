"""What the benchmark commands have in common: the keys under `benchmark` are checked apart, then all ranks measure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from types import ModuleType
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from ckpt.errors import ConfigurationError

SCRATCH = "scratch"
"""The folder in a run's own in which benchmarks save; gone when they end."""


def measure(cfg: DictConfig, home: ModuleType) -> None:
    """Measure on the ranks that the config asks for, and show the result on the one that prints.

    Args:
        home: has `check_benchmark(keys)`, which returns them checked; `benchmark(config, topology)`; and `show(result)`.
    """
    from recipes.support.config import checked
    from recipes.support.launch import launch
    from recipes.support.run_folder import RunFolder

    folder = RunFolder(cfg, temporary=SCRATCH)
    with open_dict(cfg):
        wanted = OmegaConf.to_container(cfg.pop("benchmark"))
    run = checked(cfg) | {"benchmark": home.check_benchmark(wanted)}
    result = launch(home.benchmark, run, folder)
    if result is not None:
        home.show(result)


def typed_keys(kind: type, wanted: Any) -> dict[str, Any]:
    """Return a benchmark's own keys with the types that a dataclass gives them.

    Raises:
        ConfigurationError: there is no such key, it has another type, or is missing.
    """
    try:
        keys = OmegaConf.to_container(OmegaConf.merge(OmegaConf.structured(kind), wanted), throw_on_missing=True)
    except OmegaConfBaseException as error:
        known = ", ".join(f"benchmark.{one.name}" for one in fields(kind))
        raise ConfigurationError(f"{str(error).splitlines()[0]}; the benchmark has {known}") from error
    assert isinstance(keys, dict)
    return {str(key): value for key, value in keys.items()}


def require_counts(keys: Mapping[str, int | None]) -> None:
    """Make sure that there is at least one of each, where a number is given.

    Raises:
        ConfigurationError: there is not.
    """
    for name, value in keys.items():
        if value is not None and value < 1:
            raise ConfigurationError(f"benchmark.{name}={value}: expected at least 1")
