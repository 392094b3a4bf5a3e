"""The keys of the benchmark of background saves, and who may take part: what can be wrong with them is found before any rank starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ckpt.errors import ConfigurationError
from recipes.benchmark.benchmarking import require_counts, typed_keys
from recipes.benchmark.keys import EXTRA, has_matplotlib

NOTHING = "none"
WORKLOADS = ("gpt2_fsdp", "gpt2_ddp", "gpt2_tp_fsdp")
CAPPED = "/capped"
TUNED = "/tuned"


@dataclass(frozen=True)
class Way:
    """How a save goes on beside training.

    Attributes:
        writer: "thread" or "process"; None: there is none beside it, training waits for the whole save.
        overlap: whether the copy, too, goes on beside training, whose next optimizer step waits for it.
        is_capped: of ours: whether the writer keeps to `benchmark.writer_cores` and `benchmark.writer_mib_s`.
        is_tuned: of DCP's: whether it keeps memory and plans from save to save, which its defaults do not. To overlap it has to.
    """

    writer: str | None
    overlap: bool = False
    is_capped: bool = False
    is_tuned: bool = False


_BACKGROUND = {
    "thread": Way("thread"),
    "process": Way("process"),
    "thread-overlap": Way("thread", overlap=True),
    "process-overlap": Way("process", overlap=True),
}
OURS: dict[str, Way] = {
    "sync": Way(None),
    **_BACKGROUND,
    **{f"{name}{CAPPED}": Way(way.writer, way.overlap, is_capped=True) for name, way in _BACKGROUND.items()},
}
DCP: dict[str, Way] = {
    "dcp-thread": Way("thread"),
    "dcp-process": Way("process"),
    f"dcp-thread{TUNED}": Way("thread", is_tuned=True),
    f"dcp-process{TUNED}": Way("process", is_tuned=True),
    "dcp-thread-overlap": Way("thread", overlap=True, is_tuned=True),
    "dcp-process-overlap": Way("process", overlap=True, is_tuned=True),
}
"""torch.distributed.checkpoint.async_save, by the same words."""


@dataclass
class AsyncBenchmarkKeys:
    workload: str
    repeats: int
    contenders: list[str]
    step_s: float
    steps: int
    stepped_mib: int
    writer_cores: int | None
    writer_mib_s: int | None
    plot: bool | None


def check_benchmark(wanted: Any) -> dict[str, Any]:
    """Return the benchmark's own keys with their right types.

    Raises:
        ConfigurationError: there is no such key, contender or workload, or a number is too small.
    """
    keys = typed_keys(AsyncBenchmarkKeys, wanted)
    if keys["workload"] not in WORKLOADS:
        raise ConfigurationError(f"workload={keys['workload']}: expected one of {', '.join(WORKLOADS)}")
    _check_numbers(keys)
    _check_contenders(keys)
    if keys["plot"] and not has_matplotlib():
        raise ConfigurationError(
            f"benchmark.plot=true needs the package matplotlib, which is not installed: {EXTRA}; or benchmark.plot=false"
        )
    return keys


def _check_numbers(keys: dict[str, Any]) -> None:
    require_counts({name: keys[name] for name in ("repeats", "steps", "stepped_mib", "writer_cores", "writer_mib_s")})
    if not keys["step_s"] > 0:
        raise ConfigurationError(f"benchmark.step_s={keys['step_s']}: expected more than 0 seconds")


def _check_contenders(keys: dict[str, Any]) -> None:
    names = keys["contenders"]
    known = (NOTHING, *DCP, *OURS)
    if not names or len(set(names)) < len(names) or any(name not in known for name in names):
        raise ConfigurationError(f"benchmark.contenders={names}: expected some of {', '.join(known)}, each once")
    capped = [name for name in names if name in OURS and OURS[name].is_capped]
    if capped and keys["writer_cores"] is None and keys["writer_mib_s"] is None:
        raise ConfigurationError(
            f"benchmark.contenders: {capped[0]} has no cap: give benchmark.writer_cores=<cores> or benchmark.writer_mib_s=<MiB/s>"
        )
