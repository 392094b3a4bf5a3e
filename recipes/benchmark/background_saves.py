"""measure=background: every contender saves beside training steps; the stall and the slow-down of training."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist

from ckpt.errors import ConfigurationError, CorruptCheckpointError
from ckpt.ranks.topology import Topology
from recipes.benchmark import harness
from recipes.benchmark.background_contenders import DCP, IN_MEMORY, NOTHING, OURS, Saving, saving_of
from recipes.benchmark.harness import Figures
from recipes.benchmark.host_memory import memory_folder
from recipes.benchmark.measuring import PeakMemory, gathered, largest, wait_for_ranks
from recipes.benchmark.tables import Rows, quotients
from recipes.benchmark.training_step import TrainingStep
from recipes.benchmark.workloads import Workload, described, facts_of, prepared

WORKLOADS = ("gpt2_fsdp", "gpt2_ddp", "gpt2_tp_fsdp")

COLUMNS = {
    "first stall s": "first_stall_s",
    "stall s": "stall_s",
    "steps, times": "slow_down",
    "durable s": "durable_s",
    "lost s": "lost_s",
    "steps with a save after each, times": "each_times",
    "stall s of each": "each_stall_s",
}
"""Figures that are compared, by their headings."""

PATIENCE_S = 300.0
"""A save that is not durable by then is waited for without steps; if it has failed, it raises then."""

BEFORE_FIRST = 5
"""A run trains for a while before it saves; ours, meanwhile, allocate and touch the memory for copies, at a low priority."""

WARM, COUNTED = "checkpoint-1", "checkpoint-2"
"""Folders of the two saves of a turn."""

IN_TURN = ("checkpoint-3", "checkpoint-4")
"""Folders of the saves after each step."""

RankTimes = dict[str, Any]
"""One rank's times of its later save: `call_s`, `finish_s`, `durable_s`, `peak_mib`; `before_s` of the steps before it; and `beside`, for
each step beside it, its begin and end in seconds after the call, and its `wait_s`. With `first_stall_s` of the first save; and of saves in
memory, and without any, `each_s` and `each_stall_s` of steps with a save after each."""


def _check(keys: dict[str, Any]) -> None:
    harness.require_choice("workload", keys["workload"], WORKLOADS)
    if not keys["step_s"] > 0:
        raise ConfigurationError(f"benchmark.step_s={keys['step_s']}: expected more than 0 seconds")
    capped = [name for name in keys["contenders"] if name.endswith("/capped")]
    if capped and keys["writer_cores"] is None and keys["writer_mib_s"] is None:
        raise ConfigurationError(
            f"benchmark.contenders: {capped[0]} has no cap: give benchmark.writer_cores=<cores> or benchmark.writer_mib_s=<MiB/s>"
        )


def benchmark(cfg: dict[str, Any], topology: Topology) -> Figures:
    if topology.world_size == 1:
        raise ConfigurationError("background saves are measured on ranks that train together: launch.nproc_per_node=2 or more")
    keys = cfg["benchmark"]
    with prepared(cfg, topology) as workload, harness.scratch_folder(cfg, topology) as folders:
        step = TrainingStep(workload.saved, keys["stepped_mib"] << 20)
        facts = facts_of(cfg, workload) | {cap: keys[cap] for cap in ("writer_cores", "writer_mib_s")}
        facts["compute_s"] = step.calibrate(keys["step_s"])
        what = f"{described(facts)}; a step computes for {facts['compute_s']:.3f} s"
        harness.announce(what, keys["contenders"], keys, topology)

        def take_turn(name: str, number: int) -> Figures:
            is_in_memory = name.endswith(IN_MEMORY)
            place = memory_folder(keys["memory"], topology) if is_in_memory else harness.turn_folder(folders, name, number, topology)
            with (
                place as folder,
                closing(saving_of(name, cfg, workload, folder)) as saving,
            ):
                times = _measured(name, saving, keys["steps"], workload, step, folder, compares=number == 1)
                written = times.pop("written_bytes")
                return figures_of(gathered(times, topology)) | {"written_bytes": gathered(written, topology)[0]}

        rounds = harness.interleaved(keys["contenders"], keys["repeats"], take_turn, topology, _line)
    return facts | {"rounds": rounds}


def _measured(
    name: str, saving: Saving, num_steps: int, workload: Workload, step: TrainingStep, folder: Path, *, compares: bool
) -> RankTimes:
    """Take one turn: the first save of a run, of which only the stall counts, and a later one.

    Args:
        num_steps: made, and timed, before the later save; `BEFORE_FIRST` times as many before the first one.
        compares: load it afterwards, and compare it with the state at the call.
    """
    state, topology = workload.saved, workload.saved.topology
    memory = PeakMemory()
    for _ in range(num_steps * BEFORE_FIRST):
        step()
    first = _save_beside_steps(saving, folder / WARM, step, topology)
    before = [step()[0] for _ in range(num_steps)]
    saved = state.fingerprint() if compares else ""
    rank_times = _save_beside_steps(saving, folder / COUNTED, step, topology)
    rank_times["first_stall_s"] = _stall_of(first)
    rank_times["before_s"] = [times.ended - times.began for times in before]
    rank_times["peak_mib"] = memory.mib() + _mib_of_children()
    rank_times["written_bytes"] = sum(file.stat().st_size for file in saving.place_of(folder / COUNTED).rglob("*") if file.is_file())
    if compares and name != NOTHING:
        changed = state.fingerprint() != saved
        state.scramble()
        saving.load(folder / COUNTED)
        state.device.synchronize()
        with topology.phase("compare"):
            assert changed, "every step changes what every rank holds"
            if state.fingerprint() != saved:
                raise CorruptCheckpointError(f"{name}: what was loaded is not what the state was when the save was called")
    if name == NOTHING or name.endswith(IN_MEMORY):
        rank_times |= _save_after_each_step(saving, folder, step, num_steps, topology)
    return rank_times


def _save_after_each_step(saving: Saving, folder: Path, step: TrainingStep, num_steps: int, topology: Topology) -> RankTimes:
    """Save after each step, once the save before is durable."""
    wait_for_ranks(topology)
    dist.barrier()
    stalls, began = [], time.perf_counter()
    for number in range(num_steps):
        wait_s = step()[0].wait_s
        called = time.perf_counter()
        saving.finish()
        saving.save(folder / IN_TURN[number % len(IN_TURN)])
        stalls.append(wait_s + time.perf_counter() - called)
    each_s = (time.perf_counter() - began) / num_steps
    saving.finish()
    saving.durable_s()  # which raises if it failed
    return {"each_s": each_s, "each_stall_s": statistics.median(stalls)}


def _save_beside_steps(saving: Saving, folder: Path, step: TrainingStep, topology: Topology) -> RankTimes:
    """Save, and train until all ranks know that the save is durable."""
    wait_for_ranks(topology)
    dist.barrier()
    began = time.perf_counter()
    saving.save(folder)
    called = time.perf_counter()
    beside: list[list[float]] = []
    all_done = False
    while not all_done:
        is_late = time.perf_counter() - began > PATIENCE_S
        times, all_done = step(done=saving.is_done() or is_late)
        beside.append([times.began - began, times.ended - began, times.wait_s])
    dist.barrier()
    stopped = time.perf_counter()
    saving.finish()
    finish_s = time.perf_counter() - stopped
    return {"call_s": called - began, "finish_s": finish_s, "durable_s": saving.durable_s(), "beside": beside}


def _mib_of_children() -> float:
    """Memory of the processes below this one, without pages that they share: these count here already."""
    total = 0
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            memory = child.memory_info()
            total += memory.rss - memory.shared
    return total / 2**20


def figures_of(ranks: Sequence[RankTimes]) -> Figures:
    """Return the cost of one save, from the times of all ranks.

    - `stall_s`: seconds that the rank with the longest stall stood still: in the call, before an optimizer's step, and for the report
      at the end. `first_stall_s`: the same of the run's first save.
    - `slow_down`: the time of the steps that ended before the save was durable on all ranks, without the stall, over the time of as
      many steps before the save. If none ended by then, the first one counts; a save that leaves no step beside it has no `slow_down`.
    - `lost_s`: the delay of training by the whole save.
    - `each_times`: the time of steps with a save after each, the wait for the save before included, over that of the steps without;
      `each_stall_s`: the median of their stalls. Of saves in memory alone.
    """
    step_s = statistics.mean(seconds for times in ranks for seconds in times["before_s"])
    names, num_steps = ("first_stall_s", "call_s", "finish_s", "durable_s", "peak_mib", "each_s", "each_stall_s"), len(ranks[0]["beside"])
    figures: Figures = largest(
        [
            {"stall_s": _stall_of(times), "wait_s": _wait_of(times)} | {name: times[name] for name in names if times.get(name) is not None}
            for times in ranks
        ]
    )
    figures |= {
        "lost_s": max(times["beside"][-1][1] for times in ranks) - num_steps * step_s + figures["finish_s"],
        "step_s": step_s,
        "steps": num_steps,
        "peak_mib_of_ranks": [times["peak_mib"] for times in ranks],
    }
    if "each_s" in figures:
        figures["each_times"] = figures["each_s"] / step_s
    counted = _num_counted(ranks, figures.get("durable_s"))
    if counted:
        end = max(times["beside"][counted - 1][1] for times in ranks)
        stall = max(times["call_s"] + _wait_of(times) for times in ranks)
        figures["slow_down"] = (end - stall) / (counted * step_s)
    return figures


def _wait_of(times: RankTimes) -> float:
    return float(sum(wait_s for *_, wait_s in times["beside"]))


def _stall_of(times: RankTimes) -> float:
    """Seconds that a rank stood still for one save."""
    return float(times["call_s"] + _wait_of(times) + times["finish_s"])


def _num_counted(ranks: Sequence[RankTimes], durable_s: float | None) -> int:
    """Count the steps that were beside the save from beginning to end; without a save, all that were to be.

    The last step is left out: it began when all ranks knew already that the save was durable.
    """
    steps = list(zip(*(times["beside"][:-1] for times in ranks), strict=True))
    if durable_s is None:
        return len(steps)
    whole = sum(all(of_rank[1] <= durable_s for of_rank in of_ranks) for of_ranks in steps)
    return whole or min(1, len(steps))


def compared(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return `ratios` of medians, of each of ours to each of DCP's."""
    medians, columns = result["medians"], COLUMNS.values()
    peers = {name: row for name, row in medians.items() if name in DCP}
    return {
        "ratios": {
            name: {peer: quotients(own, row, columns) for peer, row in peers.items()}
            for name, own in medians.items()
            if name in OURS
        }
    }


def _tables(result: Mapping[str, Any]) -> dict[str, Rows]:
    seconds = {heading: column for heading, column in COLUMNS.items() if column.endswith("_s")}
    rows: dict[str, dict[str, str]] = {}
    for name, of_peers in result["ratios"].items():
        for peer, of in of_peers.items():
            rows.setdefault(peer, {})[name] = "  ".join(f"{of[c]:.2f}" if c in of else "-" for c in seconds.values())
    return {f"ours / theirs, of medians: {', '.join(seconds)}": rows}


def _title(result: Mapping[str, Any]) -> str:
    caps = {"cores": result["writer_cores"], "MiB/s": result["writer_mib_s"]}
    cap = " and ".join(f"{value} {unit}" for unit, value in caps.items() if value is not None)
    capped = f"; capped: {cap} for each rank" if cap else ""
    return f"{described(result)}{capped}"


def _line(figures: Figures) -> str:
    slow_down = f", steps beside {figures['slow_down']:.2f} times as long" if "slow_down" in figures else ""
    durable = f", durable after {figures['durable_s']:.2f} s" if "durable_s" in figures else ""
    first = f"first stall {figures['first_stall_s']:.3f} s, later "
    return f"{first}{figures['stall_s']:.3f} s{slow_down}{durable}, {figures['lost_s']:.2f} s lost in all"


MEASUREMENT = harness.Measurement(
    {
        "workload": str, "repeats": int, "contenders": list[str], "step_s": float, "steps": int, "stepped_mib": int, "memory": str,
        "writer_cores": int | None, "writer_mib_s": int | None, "plot": bool | None,
    },
    benchmark,
    _title,
    COLUMNS | {"call / wait": "call_s wait_s", "peak MiB": "peak_mib"},
    compare=compared,
    tables=_tables,
    contenders={"no save": [NOTHING], "torch.distributed.checkpoint": DCP, "ours": OURS},
    check=_check,
    scratch=True,
)
