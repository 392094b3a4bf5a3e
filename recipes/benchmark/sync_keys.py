"""The keys of the benchmark of weight updates, and who may take part: what can be wrong with them is found before any rank starts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from omegaconf import MISSING, DictConfig, OmegaConf, open_dict

from ckpt.engine.base import CheckpointEngineRegistry
from ckpt.errors import CheckpointError, ConfigurationError
from ckpt.format.dtypes import torch_dtype
from recipes.benchmark.benchmarking import require_counts, typed_keys
from recipes.support.config import AT_RUN_TIME, bind, made, make_absolute
from recipes.training.roles import AgreeWithGraceKeys, RoleKeys, check_roles

OURS: dict[str, tuple[str, dict[str, Any]]] = {
    "kimi": ("kimi_ckpt_engine", {"transport": "pipelined"}),
    "kimi/update": ("kimi_ckpt_engine", {"transport": "update"}),
    "broadcast": ("broadcast", {}),
    "kimi/delta": ("kimi_ckpt_engine", {"delta": True}),
}
"""Engine and its settings, by contender."""
DELTA, WITHOUT_DELTA = "kimi/delta", "kimi"
RAW = "raw"
RAW_ALL = "raw-all"
REFERENCE = "reference"
TUNED = "reference/tuned"
PER_TENSOR = "per-tensor"
OTHERS = (RAW, RAW_ALL, REFERENCE, TUNED, PER_TENSOR)

_NEEDS_PACKAGE = ("kimi", "kimi/update", DELTA, REFERENCE, TUNED)


@dataclass
class SyncRunKeys:
    run_name: str = MISSING
    output_dir: str = MISSING
    run_dir: str = MISSING
    roles: RoleKeys = field(default_factory=RoleKeys)
    agree: AgreeWithGraceKeys = field(default_factory=AgreeWithGraceKeys)
    device: dict[str, Any] = MISSING


@dataclass
class SyncBenchmarkKeys:
    mib: int
    width: int
    dtypes: list[str]
    bucket_mib: int
    repeats: int
    frozen: float
    contenders: list[str]


def checked_benchmark(cfg: DictConfig) -> dict[str, Any]:
    """Return the run's config as a plain dictionary, resolved, with right types.

    Raises:
        ConfigurationError, OmegaConfBaseException: naming the key, what was found and the way out.
        DeviceUnavailableError: this machine does not have the device.
    """
    with open_dict(cfg):
        wanted = OmegaConf.to_container(cfg.pop("benchmark"))
    typed = OmegaConf.merge(OmegaConf.structured(SyncRunKeys), cfg)
    run: dict[str, Any] = OmegaConf.to_container(typed, resolve=True, throw_on_missing=True)  # type: ignore[assignment]
    make_absolute(run, "run_dir")
    check_roles(run)
    roles = run.pop("roles")
    bind(run["device"], "device", AT_RUN_TIME["device"])
    made(run["device"]).require()
    return run | {
        "benchmark": check_benchmark(wanted) | {"roles": roles},
        "launch": {"nproc_per_node": roles["trainer"] + roles["rollout"]},
    }


def check_benchmark(wanted: Any) -> dict[str, Any]:
    """Return the benchmark's own keys with their right types.

    Raises:
        ConfigurationError: there is no such key, contender or data type, a number is too small, or a package is missing.
    """
    keys = typed_keys(SyncBenchmarkKeys, wanted)
    require_counts({name: keys[name] for name in ("mib", "width", "bucket_mib", "repeats")})
    if not 0 <= keys["frozen"] <= 1:
        raise ConfigurationError(f"benchmark.frozen={keys['frozen']}: expected a share from 0 to 1")
    _check_dtypes(keys["dtypes"])
    _check_contenders(keys["contenders"])
    return keys


def _check_dtypes(names: list[str]) -> None:
    try:
        are_right = bool(names) and all(torch_dtype(name).is_floating_point for name in names)
    except CheckpointError:
        are_right = False
    if not are_right:
        floats = [name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype) and _is_float(name)]
        raise ConfigurationError(f"benchmark.dtypes={names}: expected some of {', '.join(sorted(set(floats)))}")


def _is_float(name: str) -> bool:
    try:
        return torch_dtype(name).is_floating_point
    except CheckpointError:
        return False


def _check_contenders(names: list[str]) -> None:
    known = (*OURS, *OTHERS)
    if not names or len(set(names)) < len(names) or any(name not in known for name in names):
        raise ConfigurationError(f"benchmark.contenders={names}: expected some of {', '.join(known)}, each once")
    if any(name in _NEEDS_PACKAGE for name in names):
        CheckpointEngineRegistry.get("kimi_ckpt_engine")  # says which package is missing
