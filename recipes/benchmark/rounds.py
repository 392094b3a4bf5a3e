"""The benchmark's rounds: in each, every contender saves and loads once, in turn, so that a busy hour is everybody's."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ckpt.errors import CorruptCheckpointError
from ckpt.ranks.topology import Topology
from recipes.benchmark.benchmarking import SCRATCH
from recipes.benchmark.comparison import compared, show
from recipes.benchmark.contender import Contender
from recipes.benchmark.contenders import contenders_of
from recipes.benchmark.keys import EXTRA, check_benchmark, has_matplotlib
from recipes.benchmark.measuring import PeakMemory, forget_cache, timed, together
from recipes.benchmark.scratch import scratch, turn
from recipes.benchmark.workloads import State, Workload, prepared

__all__ = ["benchmark", "check_benchmark", "show"]

Figures = dict[str, Any]


def benchmark(cfg: dict[str, Any], topology: Topology) -> dict[str, Any]:
    """Run all rounds and return the figures; the lead leaves benchmark.json, and benchmark.png. Every rank calls it."""
    run_dir = Path(cfg["run_dir"])
    with prepared(cfg, topology) as workload, scratch(run_dir / SCRATCH, topology) as folders:
        contenders, left_out = contenders_of(cfg, workload, folders)
        identity = workload.saved_identity()
        _tell(_beginning(cfg, workload, contenders, left_out), topology)
        rounds: dict[str, list[Figures]] = {name: [] for name in contenders}
        repeats = cfg["benchmark"]["repeats"]
        for number in range(repeats):
            for name, contender in contenders.items():
                with turn(folders / f"{name.replace('/', '-')}-{number}", topology) as folder:
                    rounds[name].append(_measured(name, contender, folder, workload, identity))
                _tell(f"round {number + 1}/{repeats} {name}: {_line(rounds[name][-1])}", topology)
        result = _facts(cfg, workload) | {"left_out": left_out, "rounds": rounds} | compared(rounds)
    if topology.is_lead:
        _leave(result, run_dir, cfg["benchmark"]["plot"])
    return result


def _measured(name: str, contender: Contender, folder: Path, workload: Workload, identity: str) -> Figures:
    """One round of one contender: seconds of the slowest rank, and the most memory that each rank took on top of the state."""
    topology, loaded = workload.saved.topology, workload.loaded
    mine: Figures = {}
    if "save" in contender.measures:
        together(topology)
        memory = PeakMemory()
        mine["save_s"] = timed(lambda: contender.save(folder), topology)
        mine["save_peak_mib"] = memory.mib()
    for load in [load for load in contender.measures if load != "save"]:
        if load == "load_cold":
            forget_cache(folder, topology)
        if contender.fills and loaded is not None:
            loaded.scramble()
            loaded.device.synchronize()
        memory = PeakMemory()
        if loaded is not None:
            figures: Figures = {}
            mine[f"{load}_s"] = timed(
                lambda into=figures: into.update(_loaded(contender, folder, loaded)), loaded.topology, loaded.group
            )
            mine |= figures
            mine["load_peak_mib"] = max(mine.get("load_peak_mib", 0.0), memory.mib())
        if contender.fills:
            _require_identity(f"{name}, {load}", workload, identity)
    return _of_all_ranks(mine, topology)


def _loaded(contender: Contender, folder: Path, state: State) -> dict[str, int]:
    """Load, and wait until everything is where it belongs."""
    figures = contender.load(folder)
    state.device.synchronize()
    return figures


def _require_identity(what: str, workload: Workload, identity: str) -> None:
    found = workload.loaded_identity()
    with workload.saved.topology.phase("compare"):
        if found not in (None, identity):
            raise CorruptCheckpointError(f"{what}: what was loaded is not what was saved")


def _of_all_ranks(mine: Figures, topology: Topology) -> Figures:
    """The largest of each figure; and the memory of every rank, None of one that did not load."""
    with topology.phase("figures") as phase:
        phase.payload = mine
    of_ranks: list[Figures] = phase.payloads
    names = dict.fromkeys(name for figures in of_ranks for name in figures)
    largest = {name: max(figures[name] for figures in of_ranks if name in figures) for name in names}
    each = {f"{name}_of_ranks": [figures.get(name) for figures in of_ranks] for name in names if name.endswith("_mib")}
    return largest | each


def _facts(cfg: Mapping[str, Any], workload: Workload) -> dict[str, Any]:
    """What was measured, and where."""
    keys = cfg["benchmark"]
    return {
        "workload": keys["workload"],
        "layout": workload.layout,
        "model": None if keys["small_tensors"] else cfg["model"]["size"],
        "ranks": workload.saved.topology.world_size,
        "load_ranks": workload.num_loading,
        "state_bytes": workload.state_bytes,
        "loaded_bytes": workload.loaded_bytes,
        "tensors": workload.num_tensors,
        "store_mib_s": keys["store_mib_s"],
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "device": str(workload.saved.device.torch_device),
    }


def _beginning(
    cfg: Mapping[str, Any], workload: Workload, contenders: Mapping[str, Contender], left_out: Mapping[str, str]
) -> str:
    keys = cfg["benchmark"]
    lines = [
        f"{keys['workload']}: {workload.state_bytes / 1e9:.2f} GB in {workload.num_tensors:,} tensors, {workload.layout} on "
        f"{workload.saved.topology.world_size} ranks, loaded on {workload.num_loading}; {keys['repeats']} rounds of "
        + ", ".join(contenders)
    ]
    lines += [f"left out: {name}: {reason}" for name, reason in left_out.items()]
    if keys["plot"] is None and not has_matplotlib():
        lines.append(f"there will be no benchmark.png: matplotlib is not installed: {EXTRA}")
    return "\n".join(lines)


def _leave(result: Mapping[str, Any], run_dir: Path, plot: bool | None) -> None:
    (run_dir / "benchmark.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if plot or (plot is None and has_matplotlib()):
        from recipes.benchmark.plot import draw

        draw(result, run_dir / "benchmark.png")


def _tell(text: str, topology: Topology) -> None:
    if topology.is_lead:
        print(text, flush=True)


def _line(figures: Figures) -> str:
    parts = [
        f"{name.removesuffix('_s').replace('_', ' ')} {value:.3f} s"
        for name, value in figures.items()
        if name.endswith("_s")
    ]
    return ", ".join(parts)
