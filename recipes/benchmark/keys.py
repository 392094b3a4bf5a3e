"""The benchmark's own keys and the names of all who may take part: what can be wrong with them is found before any rank starts."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

from omegaconf import MISSING

from ckpt.errors import ConfigurationError
from recipes.benchmark.benchmarking import require_counts, typed_keys

BACKENDS = ("zarr", "tensorstore", "tensorstore-file", "kimi-engine", "kimi-engine-disk")
"""The last keeps nothing of a save in host memory, so that loads go by its files."""
STRATEGIES = ("direct", "two-stage")
PEERS = ("dcp", "safetensors", "safetensors-one-file")
RAW = ("raw", "raw-direct")
LIMITS = (*RAW, "memcpy", "broadcast")
SHARINGS = ("replicated", "sharded")
EXTRA = "pip install -e '.[benchmark]'"
"""What installs all that the benchmark can use beyond what the package itself needs."""


@dataclass
class SmallTensorKeys:
    count: int = MISSING
    elements: int = MISSING
    sharing: str = MISSING


@dataclass
class BenchmarkKeys:
    workload: str
    repeats: int
    contenders: list[str]
    load_ranks: int | None
    store_mib_s: float | None
    small_tensors: SmallTensorKeys | None
    plot: bool | None


def ours(name: str) -> tuple[str, str] | None:
    """Return backend and strategy of one of our contenders, named `<backend>` or `<backend>/<strategy>`; None of any other."""
    backend, _, strategy = name.partition("/")
    known = backend in BACKENDS and (strategy in STRATEGIES or "/" not in name)
    return (backend, strategy or STRATEGIES[0]) if known else None


def check_benchmark(wanted: Any) -> dict[str, Any]:
    """Return the benchmark's own keys with their right types.

    Raises:
        ConfigurationError: there is no such key or contender, a number is too small, or two keys do not go together.
    """
    keys = typed_keys(BenchmarkKeys, wanted)
    _check_numbers(keys)
    _check_contenders(keys)
    _check_plot(keys)
    return keys


def has_matplotlib() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def _check_numbers(keys: dict[str, Any]) -> None:
    small = keys["small_tensors"] or {}
    numbers = {"repeats": keys["repeats"], "load_ranks": keys["load_ranks"]}
    require_counts(numbers | {f"small_tensors.{n}": small.get(n) for n in ("count", "elements")})
    if keys["store_mib_s"] is not None and not keys["store_mib_s"] > 0:
        raise ConfigurationError(f"benchmark.store_mib_s={keys['store_mib_s']}: expected more than 0, or null")
    if small and small["sharing"] not in SHARINGS:
        raise ConfigurationError(
            f"benchmark.small_tensors.sharing={small['sharing']}: expected one of {', '.join(SHARINGS)}"
        )


def _check_contenders(keys: dict[str, Any]) -> None:
    names = keys["contenders"]
    unknown = [name for name in names if ours(name) is None and name not in (*PEERS, *LIMITS)]
    if unknown or not names or len(set(names)) < len(names):
        raise ConfigurationError(
            f"benchmark.contenders={names}: expected some of {', '.join((*PEERS, *LIMITS))}, or {', '.join(BACKENDS)}, each once; "
            f"of these also with /{STRATEGIES[1]}, as in zarr/{STRATEGIES[1]}"
        )
    others = [name for name in names if ours(name) is None]
    if keys["store_mib_s"] is not None and others:
        raise ConfigurationError(
            f"benchmark.store_mib_s={keys['store_mib_s']} slows the reads of our loads alone: leave {', '.join(others)} out of "
            "benchmark.contenders"
        )


def _check_plot(keys: dict[str, Any]) -> None:
    if keys["plot"] and not has_matplotlib():
        raise ConfigurationError(
            f"benchmark.plot=true needs the package matplotlib, which is not installed: {EXTRA}; or leave the plot out with "
            "benchmark.plot=false"
        )
