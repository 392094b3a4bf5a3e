"""Configs of the training command, and of those made of it, for tests, composed as the commands compose them."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra._internal import config_loader_impl, defaults_list
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository, ConfigRepository
from hydra._internal.defaults_list import DefaultsList
from hydra.core.default_element import ResultDefault
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig

from recipes.benchmark.harness import measurement_of
from recipes.support import CONF
from recipes.support.config import GIVEN, checked, given_keys


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
    """Inside, Hydra parses each file of conf/, and of its own, once in this process, and merges once those that a choice of files takes.

    That is most of the time of a command that is refused. Values are put in anew each time, and folders of a user's own read anew.
    """
    merge = ConfigLoaderImpl._compose_config_from_defaults_list

    def load_config(repository: ConfigRepository, config_path: str) -> Any:
        key = _places(repository), config_path
        return _once(_parsed, key, lambda: _load_config(repository, config_path))

    def create_defaults_list(
        repo: CachingConfigRepository, config_name: str | None, overrides_list: list[Override], **how: bool
    ) -> DefaultsList:
        choices = [one for one in overrides_list if repo.group_exists(one.key_or_group)]
        if any(isinstance(one.value(), dict) for one in choices):  # which are values
            return defaults_list.create_defaults_list(repo, config_name, overrides_list, **how)
        key = _places(repo), config_name, tuple(one.input_line for one in choices), *how.items()
        found: DefaultsList = _once(
            _listed, key, lambda: defaults_list.create_defaults_list(repo, config_name, choices, **how)
        )
        values = [one for one in overrides_list if one not in choices and not one.is_sweep_override()]
        return replace(found, config_overrides=values)

    def compose_from(self: ConfigLoaderImpl, defaults: list[ResultDefault], repo: CachingConfigRepository) -> Any:
        return _once(_merged, (_places(repo), repr(defaults)), lambda: merge(self, defaults, repo))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ConfigRepository, "load_config", load_config)
        patch.setattr(config_loader_impl, "create_defaults_list", create_defaults_list)
        patch.setattr(ConfigLoaderImpl, "_compose_config_from_defaults_list", compose_from)
        yield


_load_config = ConfigRepository.load_config
_Kept = dict[tuple[Any, ...], bytes]

_parsed: _Kept = {}
"""(where Hydra looks, name) -> what it found there."""

_listed: _Kept = {}
"""(where, name, choices...) -> the files that Hydra takes, in their order."""

_merged: _Kept = {}
"""(where, files) -> what they say together."""


def _places(repository: ConfigRepository | CachingConfigRepository) -> tuple[Any, ...]:
    """The folders in which Hydra looks."""
    return tuple((source.scheme(), source.path) for source in repository.get_sources())


def _once(kept: _Kept, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
    """The object of this key, pickled, because Hydra writes into it; made each time for a config folder of the user's."""
    places = key[0]
    if not {path for scheme, path in places if scheme == "file"} <= {str(CONF)}:
        return make()
    if key not in kept:
        made = make()
        if made is None:
            return None
        kept[key] = pickle.dumps(made)
    return pickle.loads(kept[key])


def _is_choice(override: str) -> bool:
    """Whether it is for Hydra itself, or takes a file of a group. All others are put in afterwards, as Hydra does it."""
    name = override.lstrip("+~").partition("=")[0].partition("@")[0]
    return name.startswith("hydra") or (CONF / name).is_dir()


def config(run_dir: Path, *overrides: str, num_ranks: int | None = None) -> dict[str, Any]:
    """Return the checked, plain config; the run's folder exists, as it does after Hydra."""
    run_dir.mkdir(parents=True, exist_ok=True)
    return checked(composed(run_dir, *overrides), num_ranks=num_ranks) | {GIVEN: given_keys(overrides)}


def benchmark_config(run_dir: Path, *overrides: str) -> dict[str, Any]:
    """Return the config of the benchmark that `measure=` names, with its own keys under `benchmark`, checked as the command checks them."""
    run_dir.mkdir(parents=True, exist_ok=True)
    measured = [one.partition("=")[2] for one in overrides if one.startswith("measure=")] or ["saves"]
    return measurement_of(measured[0]).checked(composed(run_dir, *overrides, root="benchmark"))
