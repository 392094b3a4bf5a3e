"""measure=validation: the cost of each validation level and of the doctor, beside a save and a bare hash."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from hydra.utils import instantiate

from ckpt import StateComponent
from ckpt.format.digests import digest_bytes_of
from ckpt.format.dtypes import raw_bytes
from ckpt.ranks.topology import Topology
from ckpt.state.address import local_tensor
from ckpt.state.collect import Comparison, collect, settle_plain
from ckpt.state.flatten import flatten
from ckpt.state.pattern_check import examine
from ckpt.state.replication import ValidationLevel
from ckpt.state.sharing import EQUAL_COPIES
from recipes.benchmark import harness
from recipes.benchmark.harness import Figures
from recipes.benchmark.measuring import timed
from recipes.training.training import Training

LIMIT = "bare hash"
OURS = (*(level.value for level in ValidationLevel), "doctor", "save")


def benchmark(cfg: dict[str, Any], topology: Topology) -> Figures:
    training = Training(cfg, topology, instantiate(cfg["device"]))
    training.join()
    training.step()
    components = training.components()
    coordinator = training.coordinated(instantiate(cfg["coordinator"], pattern_check="off"))
    work: dict[str, Callable[[], object]] = {
        level.value: partial(_compare, [_at(level, component) for component in components], topology) for level in ValidationLevel
    }
    work["doctor"] = partial(work["none"], look=True)
    work[LIMIT] = partial(_hash, components)
    work["save"] = partial(coordinator.save_checkpoint, checkpoint_id="1")
    try:
        repeats = cfg["benchmark"]["repeats"]
        rounds = harness.interleaved(work, repeats, lambda name, _: {"total_s": timed(work[name], topology)}, topology)
    finally:
        if topology.is_lead:
            shutil.rmtree(cfg["checkpoint_root"], ignore_errors=True)
    held = _tensors(components)
    num_bytes = sum(tensor.nbytes for tensor in held)
    return {
        "layout": training.layout.name,
        "ranks": topology.world_size,
        "bytes": num_bytes,  # of one rank, like the tensors
        "tensors": len(held),
        "rounds": with_cost(rounds, num_bytes),
    }


def with_cost(rounds: Mapping[str, Sequence[Figures]], num_bytes: int) -> dict[str, list[Figures]]:
    """Add to each row the seconds that it adds to a save without any comparison, of the same round, and these per GB.

    The bare hash and the save stand for themselves.
    """

    def cost(name: str, row: Figures, none: Figures) -> Figures:
        more_s = row["total_s"] if name in (LIMIT, "save") else row["total_s"] - none["total_s"]
        return row | {"more_s": more_s, "per_gb_s": more_s / num_bytes * 1e9}

    return {
        name: [cost(name, *pair) for pair in zip(rows, rounds["none"], strict=True)] for name, rows in rounds.items()
    }


def compared(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return `ratios`: what each adds, over a save."""
    medians = result["medians"]
    return {"ratios": {name: {"more_s": row["more_s"] / medians["save"]["total_s"]} for name, row in medians.items()}}


def _title(result: Mapping[str, Any]) -> str:
    where = "on 1 rank" if result["ranks"] == 1 else f"on each of {result['ranks']} ranks"
    return f"{result['bytes'] / 1e9:.2f} GB in {result['tensors']} tensors {where}, {result['layout']}"


def _at(level: ValidationLevel, component: StateComponent) -> StateComponent:
    if component.pattern not in EQUAL_COPIES:
        return component
    return dataclasses.replace(component, validate_replication=True, validation_level=level.value)


def _compare(components: Sequence[StateComponent], topology: Topology, *, look: bool = False) -> None:
    """Collect as a save does until the ranks know that their copies are equal, and at the level "full" after the write.

    Args:
        look: also examine the sharing patterns, as the doctor does in the first save.
    """
    comparison = Comparison(topology)
    with topology.operation("benchmark"):
        with topology.phase("collect") as phase:
            mine = collect(components, topology, look=look)
            comparison.say(mine, phase)
        settle_plain(mine, comparison.heard(phase), topology)
        if look:
            examine(mine.components, mine.seen, topology)
        mine.require_unchanged()


def _hash(components: list[StateComponent]) -> None:
    """Hash the same bytes by the same function, and do nothing else: the machine's limit."""
    for tensor in _tensors(components):
        digest_bytes_of(raw_bytes(tensor.cpu().contiguous()).numpy().data)


def _tensors(components: list[StateComponent]) -> list[Any]:
    return [
        local_tensor(leaf)
        for component in components
        for leaf in flatten(component.stateful.state_dict(), component.key).tensors.values()
    ]


MEASUREMENT = harness.Measurement(
    {"repeats": int},
    benchmark,
    _title,
    {"s": "total_s", "s more than none": "more_s", "s per GB": "per_gb_s", "of a save": "more_s_ratio"},
    compare=compared,
    digits=4,
)
