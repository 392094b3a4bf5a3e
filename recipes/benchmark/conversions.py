"""measure=convert: conversions between formats on one rank and on all, beside copies of the files."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate

import ckpt
from ckpt.catalog.copying import copy_checkpoint
from ckpt.cli.converting import DESTINATIONS, ConvertKeys, convert_on_ranks, run_of
from ckpt.cli.tables import counted
from ckpt.ranks.topology import Topology
from recipes.benchmark import harness
from recipes.benchmark.harness import Figures
from recipes.benchmark.measuring import PeakMemory, forget_cache, gathered, make_durable, timed
from recipes.benchmark.tables import quotients

COPY, VERIFIED = "cp -r", "ckpt copy"
MIB = 1 << 20


def benchmark(cfg: dict[str, Any], topology: Topology) -> Figures:
    keys = cfg["benchmark"]
    with harness.scratch_folder(cfg, topology) as scratch:
        source = scratch / "source"
        backend = instantiate(cfg["ckpt"])
        report = ckpt.save(_tensors(keys, topology), source, format=backend, topology=topology)
        work: dict[str, Callable[[Path], object]] = {COPY: partial(_copy, source, topology)}
        work[VERIFIED] = partial(_verified_copy, source, topology)
        for to in keys["to"]:
            for ranks in dict.fromkeys((1, topology.world_size)):
                work[f"{to}, {counted(ranks, 'rank')}"] = partial(_convert, source, to, topology, ranks)

        def take_turn(name: str, number: int) -> Figures:
            forget_cache(source, topology)
            with harness.turn_folder(scratch, name, number, topology) as folder:
                memory = PeakMemory()
                seconds = timed(partial(work[name], folder), topology)
                return {"convert_s": seconds, "peak_mib": max(gathered(memory.mib(), topology))}

        rounds = harness.interleaved(work, keys["repeats"], take_turn, topology)
    return {
        "from": str(backend.store),
        "layout": f"saved as {backend.store}",
        "tensors": _num_tensors(keys, topology),
        "bytes": report.bytes,
        "ranks": topology.world_size,
        "repeats": keys["repeats"],
        "rounds": rounds,
    }


def compared(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return `ratios`: the speed of each, over that of a copy."""
    medians = result["medians"]
    return {"ratios": {name: quotients(medians[COPY], row, ["convert_s"]) for name, row in medians.items()}}


def _tensors(keys: Mapping[str, Any], topology: Topology) -> dict[str, torch.Tensor]:
    """Return this rank's part of the tensors."""
    shape = (256, keys["tensor_mib"] * MIB // 1024)
    return {
        f"w{at}": torch.rand(shape) for at in range(topology.rank, _num_tensors(keys, topology), topology.world_size)
    }


def _num_tensors(keys: Mapping[str, Any], topology: Topology) -> int:
    return int(max(keys["mib"] // keys["tensor_mib"], topology.world_size))


def _copy(source: Path, topology: Topology, folder: Path) -> None:
    if topology.is_lead:
        subprocess.run(["cp", "-r", source, folder / "copy"], check=True)
        make_durable(folder)


def _verified_copy(source: Path, topology: Topology, folder: Path) -> None:
    if topology.is_lead:
        copy_checkpoint(source, folder / "copy", progress=topology.progress)


def _convert(source: Path, to: str, topology: Topology, ranks: int, folder: Path) -> None:
    if topology.rank < ranks:
        run = run_of(ConvertKeys(src=str(source), dst=str(folder / "dst"), to=to, component=None))
        convert_on_ranks(run, topology if ranks > 1 else Topology.alone(topology.progress))


MEASUREMENT = harness.Measurement(
    {"repeats": int, "mib": int, "tensor_mib": int, "to": list[str]},
    benchmark,
    lambda result: f"{result['bytes'] / 1e9:.2f} GB of {result['from']}, saved by {counted(result['ranks'], 'rank')}",
    {"s": "convert_s", "of cp's speed": "convert_s_ratio", "MiB of a rank": "peak_mib"},
    compare=compared,
    check=lambda keys: harness.require_some("benchmark.to", keys["to"], DESTINATIONS),
    scratch=True,
)
