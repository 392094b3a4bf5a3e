"""What a validation level or the doctor adds to a save, measured beside the save itself and a bare hash of the same bytes."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import statistics
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import xxhash
from hydra.utils import instantiate
from rich.console import Console
from rich.table import Table

from ckpt import CheckpointCoordinator, StateComponent
from ckpt.format.dtypes import raw_bytes
from ckpt.ranks.topology import Topology
from ckpt.state.address import local_tensor
from ckpt.state.collect import collect, settle_plain
from ckpt.state.flatten import flatten
from ckpt.state.pattern_check import examine
from ckpt.state.replication import ValidationLevel
from ckpt.state.sharing import EQUAL_COPIES
from recipes.benchmark.benchmarking import require_counts, typed_keys
from recipes.benchmark.measuring import timed
from recipes.training.training import Training


@dataclasses.dataclass
class ValidationBenchmarkKeys:
    repeats: int


def check_benchmark(wanted: Any) -> dict[str, Any]:
    """Return the benchmark's own keys with their right types.

    Raises:
        ConfigurationError: there is no such key, it has another type, or is too small.
    """
    keys = typed_keys(ValidationBenchmarkKeys, wanted)
    require_counts(keys)
    return keys


def benchmark(cfg: dict[str, Any], topology: Topology) -> dict[str, Any]:
    """Run all rounds and return the figures. Every rank calls it."""
    training = Training(cfg, topology, instantiate(cfg["device"]))
    training.join()
    training.step()
    components = training.components()
    coordinator: CheckpointCoordinator = instantiate(cfg["coordinator"])(
        state_components=components,
        process_groups=training.layout.process_groups(topology),
        topology=topology,
        pattern_check="off",
    )
    work: dict[str, Callable[[], None]] = {
        level.value: partial(_compare, [_at(level, one) for one in components], topology) for level in ValidationLevel
    }
    work["doctor"] = partial(_look, components, topology)
    work["bare hash"] = partial(_hash, components)
    work["save"] = partial(coordinator.save_checkpoint, checkpoint_id="1")
    seconds: dict[str, list[float]] = {name: [] for name in work}
    try:
        for _ in range(cfg["benchmark"]["repeats"]):
            for name, call in work.items():
                seconds[name].append(timed(call, topology))
    finally:
        if topology.is_lead:
            shutil.rmtree(cfg["checkpoint_root"], ignore_errors=True)
    result = {
        "parallel": training.layout.name,
        "ranks": topology.world_size,
        "bytes_per_rank": sum(one.nbytes for one in _tensors(components)),
        "tensors_per_rank": len(_tensors(components)),
        "cores": os.cpu_count(),
        "rounds": seconds,
        "medians": {name: statistics.median(of_round) for name, of_round in seconds.items()},
    }
    if topology.is_lead:
        where = Path(cfg["run_dir"]) / "benchmark_validation.json"
        where.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return result


def show(result: Mapping[str, Any]) -> None:
    """Print the medians, and what each thing adds to what a save without any comparison does, as a table."""
    medians, gigabytes = result["medians"], result["bytes_per_rank"] / 1e9
    where = "on 1 rank" if result["ranks"] == 1 else f"on each of {result['ranks']} ranks"
    title = (
        f"{gigabytes:.2f} GB in {result['tensors_per_rank']} tensors {where}, {result['parallel']}, "
        f"{result['cores']} cores, medians of {len(result['rounds']['none'])} rounds"
    )
    table = Table(title=title)
    table.add_column("")
    for heading in ("s", "s more than none", "s per GB", "of a save"):
        table.add_column(heading, justify="right")
    for name, median in medians.items():
        more = median if name in ("bare hash", "save") else median - medians["none"]
        share = "" if name == "save" else f"{more / medians['save']:.1%}"
        table.add_row(name, f"{median:.4f}", f"{more:.4f}", f"{more / gigabytes:.4f}", share)
    Console().print(table)


def _at(level: ValidationLevel, component: StateComponent) -> StateComponent:
    if component.pattern not in EQUAL_COPIES:
        return component
    return dataclasses.replace(component, validate_replication=True, validation_level=level.value)


def _compare(components: list[StateComponent], topology: Topology) -> None:
    """What a save does until the ranks know that their copies are equal, and at the level "full" after the write."""
    with topology.operation("benchmark"):
        with topology.phase("collect") as phase:
            mine = collect(components, topology)
            phase.payload = mine.summary()
        settle_plain(mine, phase.payloads, topology)
        mine.require_unchanged()


def _look(components: list[StateComponent], topology: Topology) -> None:
    with topology.operation("benchmark"):
        with topology.phase("collect") as phase:
            mine = collect([_at(ValidationLevel.NONE, one) for one in components], topology, look=True)
            phase.payload = mine.summary()
        settle_plain(mine, phase.payloads, topology)
        examine(mine.components, mine.seen, topology)


def _hash(components: list[StateComponent]) -> None:
    """The machine's limit: the same bytes through the same hash, and nothing else."""
    for tensor in _tensors(components):
        xxhash.xxh3_128_digest(raw_bytes(tensor.cpu().contiguous()).numpy().data)


def _tensors(components: list[StateComponent]) -> list[Any]:
    return [
        local_tensor(leaf)
        for component in components
        for leaf in flatten(component.stateful.state_dict(), component.key).tensors.values()
    ]
