"""`python -m recipes.benchmark.validation`: the cost of each validation level and of the doctor, beside a save and a bare hash."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import xxhash
from hydra.utils import instantiate

from ckpt import StateComponent
from ckpt.format.dtypes import raw_bytes
from ckpt.ranks.topology import Topology
from ckpt.state.address import local_tensor
from ckpt.state.collect import collect, settle_plain
from ckpt.state.flatten import flatten
from ckpt.state.pattern_check import examine
from ckpt.state.replication import ValidationLevel
from ckpt.state.sharing import EQUAL_COPIES
from recipes.benchmark import harness
from recipes.benchmark.harness import Figures
from recipes.benchmark.measuring import timed
from recipes.benchmark.tables import print_table, rounds_text, summarized
from recipes.training.training import Training


@dataclasses.dataclass
class ValidationBenchmarkKeys:
    repeats: int


def check_benchmark(wanted: Any) -> dict[str, Any]:
    """Return the keys under `benchmark` with their right types.

    Raises:
        ConfigurationError: there is no such key, it has another type, or is too small.
    """
    return harness.checked_keys(ValidationBenchmarkKeys, wanted)


def benchmark(cfg: dict[str, Any], topology: Topology) -> Figures:
    """Run all rounds and return the figures; the lead leaves benchmark_validation.json. Every rank calls it."""
    training = Training(cfg, topology, instantiate(cfg["device"]))
    training.join()
    training.step()
    components = training.components()
    coordinator = training.coordinated(instantiate(cfg["coordinator"], pattern_check="off"))
    work: dict[str, Callable[[], object]] = {
        level.value: partial(_compare, [_at(level, one) for one in components], topology) for level in ValidationLevel
    }
    work["doctor"] = partial(work["none"], look=True)
    work["bare hash"] = partial(_hash, components)
    work["save"] = partial(coordinator.save_checkpoint, checkpoint_id="1")
    try:
        repeats = cfg["benchmark"]["repeats"]
        rounds = harness.interleaved(work, repeats, lambda name, _: {"s": timed(work[name], topology)}, topology)
    finally:
        if topology.is_lead:
            shutil.rmtree(cfg["checkpoint_root"], ignore_errors=True)
    result = {
        "parallel": training.layout.name,
        "ranks": topology.world_size,
        "bytes_per_rank": sum(one.nbytes for one in _tensors(components)),
        "tensors_per_rank": len(_tensors(components)),
        "rounds": rounds,
        "medians": {name: row["s"] for name, row in summarized(rounds)["medians"].items()},
    }
    return harness.write_result(result, cfg, "benchmark_validation", topology)


def show(result: Mapping[str, Any]) -> None:
    """Print the medians, and the time that each adds to a save without any comparison, as a table."""
    medians, gigabytes = result["medians"], result["bytes_per_rank"] / 1e9
    where = "on 1 rank" if result["ranks"] == 1 else f"on each of {result['ranks']} ranks"
    rows = []
    for name, median in medians.items():
        more = median if name in ("bare hash", "save") else median - medians["none"]
        share = "" if name == "save" else f"{more / medians['save']:.1%}"
        rows.append((name, f"{median:.4f}", f"{more:.4f}", f"{more / gigabytes:.4f}", share))
    print_table(
        f"{gigabytes:.2f} GB in {result['tensors_per_rank']} tensors {where}, {result['parallel']}, {result['machine']['cores']} cores, "
        f"{rounds_text(len(result['rounds']['none']))}",
        ["", "s", "s more than none", "s per GB", "of a save"],
        rows,
    )


def _at(level: ValidationLevel, component: StateComponent) -> StateComponent:
    if component.pattern not in EQUAL_COPIES:
        return component
    return dataclasses.replace(component, validate_replication=True, validation_level=level.value)


def _compare(components: Sequence[StateComponent], topology: Topology, *, look: bool = False) -> None:
    """Collect as a save does until the ranks know that their copies are equal, and at the level "full" after the write.

    Args:
        look: also examine the sharing patterns, as the doctor does in the first save.
    """
    with topology.operation("benchmark"):
        with topology.phase("collect") as phase:
            mine = collect(components, topology, look=look)
            phase.payload = mine.summary()
        settle_plain(mine, phase.payloads, topology)
        if look:
            examine(mine.components, mine.seen, topology)
        mine.require_unchanged()


def _hash(components: list[StateComponent]) -> None:
    """Hash the same bytes by the same function, and do nothing else: the machine's limit."""
    for tensor in _tensors(components):
        xxhash.xxh3_128_digest(raw_bytes(tensor.cpu().contiguous()).numpy().data)


def _tensors(components: list[StateComponent]) -> list[Any]:
    return [
        local_tensor(leaf)
        for component in components
        for leaf in flatten(component.stateful.state_dict(), component.key).tensors.values()
    ]
