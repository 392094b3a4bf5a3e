"""Rounds in which every contender updates the rollouts once, in turn, so that a busy moment is everybody's."""

from __future__ import annotations

import gc
import json
import os
import platform
from collections.abc import Mapping
from contextlib import ExitStack
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from ckpt.errors import CorruptCheckpointError
from ckpt.memory.device import Device
from ckpt.ranks.topology import Topology
from ckpt.version import __version__
from recipes.benchmark.measuring import together
from recipes.benchmark.sync_contender import Clock, Contender, Seconds, UpdateEndpoints, slowest
from recipes.benchmark.sync_contenders import contender_of
from recipes.benchmark.sync_figures import compared, line
from recipes.benchmark.sync_model import described, made_of, rows_of
from recipes.support.config import made
from recipes.training.roles import require_ranks

MIB = 1 << 20
LEFT = "sync.json"


def benchmark(cfg: dict[str, Any], topology: Topology) -> dict[str, Any]:
    """Run all rounds and return the figures; the lead leaves sync.json. Every rank calls it.

    Raises:
        ConfigurationError: there are not as many ranks as the roles take.
        CorruptCheckpointError: a rollout holds other bits than were sent.
    """
    keys = cfg["benchmark"]
    with ExitStack() as open_contenders:
        ends = _ends(cfg, topology)
        _tell(_beginning(cfg, ends), topology)
        # The package collects garbage four times in each update. What that takes depends on what else the process holds, which is not
        # its fault, and can be had for next to nothing: so it is, for all.
        open_contenders.callback(gc.unfreeze)
        contenders: dict[str, Contender] = {}
        for name in keys["contenders"]:
            contenders[name] = contender_of(name, ends)
            open_contenders.callback(contenders[name].close)
        first: dict[str, Seconds] = {}
        rounds: dict[str, list[Seconds]] = {name: [] for name in contenders}
        for step in range(1, keys["repeats"] + 2):
            if step <= 2:  # what an update makes for the first time is there after it
                gc.freeze()
            for name, contender in contenders.items():
                seconds = _turn(name, contender, step)
                if step == 1:
                    first[name] = seconds
                else:
                    rounds[name].append(seconds)
                number = f"round {step - 1}/{keys['repeats']}" if step > 1 else "first"
                _tell(f"{number} {name}: {line(seconds)}", topology)
        buckets = {name: contender.num_buckets for name, contender in contenders.items()}
        sent = {name: contender.sent_bytes for name, contender in contenders.items()}
    result = _facts(cfg, ends) | {"buckets": buckets, "sent_bytes": sent, "first": first, "rounds": rounds}
    result |= compared(first, rounds, result["bytes"])
    if topology.is_lead:
        where = Path(cfg["run_dir"]) / LEFT
        where.parent.mkdir(parents=True, exist_ok=True)
        where.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return result


def _ends(cfg: Mapping[str, Any], topology: Topology) -> UpdateEndpoints:
    keys = cfg["benchmark"]
    roles = keys["roles"]
    trainers = range(roles["trainer"])
    rollouts = range(roles["trainer"], roles["trainer"] + roles["rollout"])
    require_ranks(roles, rollouts.stop, topology)
    device: Device = made(cfg["device"])
    device.use(topology.local_rank)
    rows = rows_of(keys["mib"] * MIB, keys["width"], keys["dtypes"])
    is_trainer = topology.rank in trainers
    with topology.phase("make the weights"), device.telling_of_room():
        weights = made_of(rows, device.torch_device, seed=0 if is_trainer else 1)
    return UpdateEndpoints(
        topology=topology,
        device=device,
        source=weights if is_trainer else None,
        live=None if is_trainer else weights,
        rows=rows,
        trainers=trainers,
        rollouts=rollouts,
        bucket_bytes=keys["bucket_mib"] * MIB,
        timeout_s=cfg["agree"]["timeout_s"],
        frozen=keys["frozen"],
    )


def _turn(name: str, contender: Contender, step: int) -> Seconds:
    """One update of one contender: seconds of the slowest rank, all in all and by its parts. What came is compared afterwards."""
    topology = contender.ends.topology
    contender.get_ready()
    together(topology)
    dist.barrier()
    clock = Clock()
    parts = contender.update(step)
    parts["update_s"] = clock.lap()
    held = contender.held()
    with topology.phase("figures") as phase:
        phase.payload = [parts, held]
    _require_equal(name, contender.ends, [held for _, held in phase.payloads])
    return slowest([parts for parts, _ in phase.payloads])


def _require_equal(name: str, ends: UpdateEndpoints, held: list[dict[str, str]]) -> None:
    sent = {what: digest for rank in ends.trainers for what, digest in held[rank].items()}
    for rank in [*ends.trainers, *ends.rollouts]:
        wrong = [what for what, digest in held[rank].items() if digest != sent.get(what)]
        if wrong or (rank in ends.rollouts and held[rank].keys() != sent.keys()):
            raise CorruptCheckpointError(f"{name}: rank {rank} holds other bits than were sent")


def _facts(cfg: Mapping[str, Any], ends: UpdateEndpoints) -> dict[str, Any]:
    """What was measured, and where."""
    keys, weights = cfg["benchmark"], ends.source if ends.source is not None else ends.live
    assert weights is not None, "a rank is a trainer or a rollout"
    return {
        "trainers": len(ends.trainers),
        "rollouts": len(ends.rollouts),
        "bytes": weights.num_bytes,
        "tensors": len(ends.rows),
        "dtypes": described(ends.rows),
        "bucket_bytes": ends.bucket_bytes,
        "repeats": keys["repeats"],
        "frozen": keys["frozen"],
        "device": _device_name(ends.device),
        "collectives": ends.device.collectives,
        "machine": {
            "nodes": len(ends.topology.nodes),
            "processor": _processor(),
            "cores": os.cpu_count(),
            "memory_bytes": psutil.virtual_memory().total,
            "system": platform.platform(),
        },
        "versions": {
            "ckpt": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "checkpoint-engine": _version("checkpoint-engine"),
        },
    }


def _device_name(device: Device) -> str:
    if device.type == "cpu":
        return "cpu"
    name = getattr(torch.get_device_module(device.torch_device), "get_device_name", None)
    return device.type if name is None else str(name(device.torch_device))


def _processor() -> str:
    """What the kernel calls it, where it says so."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((text.partition(":")[2].strip() for text in lines if text.startswith("model name")), platform.machine())


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _beginning(cfg: Mapping[str, Any], ends: UpdateEndpoints) -> str:
    weights = ends.source if ends.source is not None else ends.live
    assert weights is not None, "a rank is a trainer or a rollout"
    return (
        f"{weights.num_bytes / 1e9:.2f} GB in {len(ends.rows)} tensors, {len(ends.trainers)} trainers, {len(ends.rollouts)} rollouts, "
        f"buckets of {ends.bucket_bytes / MIB:.0f} MiB; {cfg['benchmark']['repeats']} rounds of "
        + ", ".join(cfg["benchmark"]["contenders"])
    )


def _tell(text: str, topology: Topology) -> None:
    if topology.is_lead:
        print(text, flush=True)
