"""Rounds in which every contender saves beside steps of training, in turn, and what the steps felt of it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from ckpt.errors import ConfigurationError, CorruptCheckpointError
from ckpt.ranks.topology import Topology
from recipes.benchmark.async_contenders import Saving, saving_of
from recipes.benchmark.async_figures import Figures, Told, compared, figures_of, line, show
from recipes.benchmark.async_keys import NOTHING, check_benchmark
from recipes.benchmark.async_step import StepTimes, TrainingStep
from recipes.benchmark.benchmarking import SCRATCH
from recipes.benchmark.keys import EXTRA, has_matplotlib
from recipes.benchmark.measuring import PeakMemory, together
from recipes.benchmark.scratch import scratch, turn
from recipes.benchmark.workloads import Workload, prepared

__all__ = ["benchmark", "check_benchmark", "show"]

PATIENCE_S = 300.0
"""A save that is not durable by then is waited for without steps, and tells of its failure then, if it has failed."""

WARM, COUNTED = "warm", "dcp"


def benchmark(cfg: dict[str, Any], topology: Topology) -> dict[str, Any]:
    """Run all rounds and return the figures; the lead leaves benchmark_async.json, and the plot. Every rank calls it."""
    if topology.world_size == 1:
        raise ConfigurationError(
            "background saves are measured on ranks that train together: launch.nproc_per_node=2 or more"
        )
    run_dir, keys = Path(cfg["run_dir"]), cfg["benchmark"]
    whole = {**cfg, "benchmark": keys | {"load_ranks": None, "small_tensors": None}}
    with prepared(whole, topology) as workload, scratch(run_dir / SCRATCH, topology) as folder:
        step = TrainingStep(workload.saved, keys["stepped_mib"] << 20)
        compute_s = step.calibrate(keys["step_s"])
        facts = _facts(cfg, workload) | {"compute_s": compute_s}
        _tell(_beginning(facts, keys), topology)
        rounds: dict[str, list[Figures]] = {name: [] for name in keys["contenders"]}
        for number in range(keys["repeats"]):
            for name in rounds:
                with turn(folder / f"{name.replace('/', '-')}-{number}", topology) as own:
                    rounds[name].append(_turn(name, cfg, workload, step, own, compares=number == 0))
                _tell(f"round {number + 1}/{keys['repeats']} {name}: {line(rounds[name][-1])}", topology)
        result = facts | {"rounds": rounds} | compared(rounds)
    if topology.is_lead:
        _leave(result, run_dir, keys["plot"])
    return result


def _turn(
    name: str, cfg: Mapping[str, Any], workload: Workload, step: TrainingStep, folder: Path, *, compares: bool
) -> Figures:
    """One save of one contender that counts, after one that does not: memory is touched and processes are started by then.

    Args:
        compares: load it afterwards, and compare it with what the state was at the call.
    """
    state, topology = workload.saved, workload.saved.topology
    memory = PeakMemory()
    with closing(saving_of(name, cfg, workload, folder)) as saving:
        saving.save(folder / WARM)
        saving.finish()
        saving.durable_s()
        together(topology)
        before = [times for times, _ in _steps(step, cfg["benchmark"]["steps"])]
        then = state.fingerprint() if compares else ""
        told = _save_beside_steps(saving, folder / COUNTED, step, topology)
        told["before_s"] = [times.ended - times.began for times in before]
        told["peak_mib"] = memory.mib() + _mib_of_children()
        if compares and name != NOTHING:
            _compare(name, saving, folder / COUNTED, workload, then)
    with topology.phase("figures") as phase:
        phase.payload = told
    return figures_of(phase.payloads) | {"written_bytes": _bytes_in(folder, topology)}


def _save_beside_steps(saving: Saving, folder: Path, step: TrainingStep, topology: Topology) -> Told:
    """Save, and go on training until all ranks know that the save is durable; return what this rank saw of it."""
    together(topology)
    dist.barrier()
    began = time.perf_counter()
    saving.save(folder)
    called = time.perf_counter()
    beside: list[StepTimes] = []
    all_done = False
    while not all_done:
        is_late = time.perf_counter() - began > PATIENCE_S
        times, all_done = step(done=saving.is_done() or is_late)
        beside.append(times)
    dist.barrier()
    stopped = time.perf_counter()
    saving.finish()
    finished = time.perf_counter()
    return {
        "call_s": called - began,
        "finish_s": finished - stopped,
        "durable_s": saving.durable_s(),
        "beside": [[one.began - began, one.ended - began, *one[2:]] for one in beside],
    }


def _steps(step: TrainingStep, count: int) -> Iterator[tuple[StepTimes, bool]]:
    for _ in range(count):
        yield step()


def _compare(name: str, saving: Saving, folder: Path, workload: Workload, then: str) -> None:
    """Load over scrambled memory, and require every bit of the state at the call, which the steps have changed since."""
    state = workload.saved
    changed = state.fingerprint() != then
    state.scramble()
    saving.load(folder)
    state.device.synchronize()
    with state.topology.phase("compare"):
        assert changed, "every step changes what every rank holds"
        if state.fingerprint() != then:
            raise CorruptCheckpointError(f"{name}: what was loaded is not what the state was when the save was called")


def _mib_of_children() -> float:
    """Memory of their own that this process's processes have. What they share with it counts here already."""
    total = 0
    for child in psutil.Process().children(recursive=True):
        try:
            memory = child.memory_info()
            total += memory.rss - memory.shared
        except psutil.NoSuchProcess:
            continue
    return total / 2**20


def _bytes_in(folder: Path, topology: Topology) -> int:
    """The bytes of the save that counts."""
    with topology.phase("bytes") as phase:
        if topology.is_lead:
            folders = [folder / COUNTED, folder / f"checkpoint-{COUNTED}"]
            files = [file for one in folders for file in one.rglob("*") if file.is_file()]
            phase.payload = sum(file.stat().st_size for file in files)
    return int(phase.payloads[0])


def _facts(cfg: Mapping[str, Any], workload: Workload) -> dict[str, Any]:
    """What was measured, and where."""
    keys = cfg["benchmark"]
    return {
        "workload": keys["workload"],
        "layout": workload.layout,
        "model": cfg["model"]["size"],
        "ranks": workload.saved.topology.world_size,
        "state_bytes": workload.state_bytes,
        "tensors": workload.num_tensors,
        "writer_cores": keys["writer_cores"],
        "writer_mib_s": keys["writer_mib_s"],
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "device": str(workload.saved.device.torch_device),
    }


def _beginning(facts: Mapping[str, Any], keys: Mapping[str, Any]) -> str:
    lines = [
        f"{facts['workload']}: {facts['state_bytes'] / 1e9:.2f} GB in {facts['tensors']:,} tensors, {facts['layout']} on "
        f"{facts['ranks']} ranks; a step computes for {facts['compute_s']:.3f} s; {keys['repeats']} rounds of "
        + ", ".join(keys["contenders"])
    ]
    if keys["plot"] is None and not has_matplotlib():
        lines.append(f"there will be no benchmark_async.png: matplotlib is not installed: {EXTRA}")
    return "\n".join(lines)


def _leave(result: Mapping[str, Any], run_dir: Path, plot: bool | None) -> None:
    (run_dir / "benchmark_async.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if plot or (plot is None and has_matplotlib()):
        from recipes.benchmark.async_plot import draw

        draw(result, run_dir / "benchmark_async.png")


def _tell(text: str, topology: Topology) -> None:
    if topology.is_lead:
        print(text, flush=True)
