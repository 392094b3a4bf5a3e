"""Configs of the training command, and of those made of it, for tests, composed as the commands compose them."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf, open_dict

from recipes.benchmark_keys import check_benchmark
from recipes.cli import CONF
from recipes.config import GIVEN, checked, given_keys


def composed(run_dir: Path, *overrides: str, root: str = "train") -> DictConfig:
    """Return the config before any check. Under `compose` there is no `${hydra:...}`, so the run's folder is given."""
    given = [f"run_dir={run_dir}", *overrides]
    choices = [one for one in given if _is_choice(one)]
    values = OverridesParser.create().parse_overrides([one for one in given if one not in choices])
    if any(one.is_sweep_override() for one in values):  # which Hydra refuses
        return _compose(root, tuple(given))
    cfg: DictConfig = pickle.loads(_composed(root, tuple(choices)))
    ConfigLoaderImpl._apply_overrides_to_config(values, cfg)
    return cfg


@functools.cache
def _composed(root: str, choices: tuple[str, ...]) -> bytes:
    """Pickled: that takes half as long to copy."""
    return pickle.dumps(_compose(root, choices))


def _compose(root: str, overrides: tuple[str, ...]) -> DictConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose(root, list(overrides))


@contextmanager
def parsed_once() -> Iterator[None]:
    """Inside, Hydra parses each file of conf/, and of its own, once in this process; commands compose them as ever.

    That is a third of the time of a command that is refused. Folders of a user's own are read anew.
    """
    read = ConfigRepository.load_config

    def load_config(self: ConfigRepository, config_path: str) -> Any:
        places = tuple((source.scheme(), source.path) for source in self.sources)
        if not {path for scheme, path in places if scheme == "file"} <= {str(CONF)}:
            return read(self, config_path)
        if (places, config_path) not in _parsed:
            found = read(self, config_path)
            if found is None:
                return None
            _parsed[places, config_path] = pickle.dumps(found)
        return pickle.loads(_parsed[places, config_path])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ConfigRepository, "load_config", load_config)
        yield


_parsed: dict[tuple[Any, str], bytes] = {}
"""(where Hydra looks, name) -> what it found there, pickled: Hydra writes into what it is given."""


def _is_choice(override: str) -> bool:
    """Whether it is for Hydra itself, or takes a file of a group. All others are put in afterwards, as Hydra does it."""
    name = override.lstrip("+~").partition("=")[0].partition("@")[0]
    return name.startswith("hydra") or (CONF / name).is_dir()


def config(run_dir: Path, *overrides: str, num_ranks: int | None = None) -> dict[str, Any]:
    """Return the checked, plain config; the run's folder exists, as it does after Hydra."""
    run_dir.mkdir(parents=True, exist_ok=True)
    return checked(composed(run_dir, *overrides), num_ranks=num_ranks) | {GIVEN: given_keys(overrides)}


def benchmark_config(run_dir: Path, *overrides: str) -> dict[str, Any]:
    """Return the config of the benchmark, with its own keys under `benchmark`, checked as the command checks them."""
    run_dir.mkdir(parents=True, exist_ok=True)
    cfg = composed(run_dir, *overrides, root="benchmark")
    with open_dict(cfg):
        keys = OmegaConf.to_container(cfg.pop("benchmark"))
    return checked(cfg) | {"benchmark": check_benchmark(keys)}
