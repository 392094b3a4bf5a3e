"""measure=sync: every contender brings the trainers' weights to the rollouts; the times of its parts."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import torch.distributed as dist
from omegaconf import MISSING, DictConfig

from ckpt.cli.tables import counted
from ckpt.engine.base import CheckpointEngineRegistry
from ckpt.errors import ConfigurationError, CorruptCheckpointError
from ckpt.format.dtypes import STORABLE, zarr_name
from ckpt.memory.device import Device
from ckpt.ranks.topology import Topology
from recipes.benchmark import harness
from recipes.benchmark.harness import Figures
from recipes.benchmark.measuring import gathered, largest, wait_for_ranks
from recipes.benchmark.tables import Rows
from recipes.benchmark.update_contenders import (
    CONTENDERS,
    OURS,
    PARTS,
    Contender,
    Ours,
    PerTensor,
    Raw,
    Stopwatch,
    UpdateEndpoints,
)
from recipes.benchmark.weights import described, made_of, rows_of
from recipes.support.config import AT_RUN_TIME, bind, made, make_absolute, resolved
from recipes.training.roles import AgreeWithGraceKeys, RoleKeys, check_roles, require_ranks

MIB = 1 << 20

UPDATE = "update_s"
SPEEDS = ("offload_s", "transfer_s", "reload_s", UPDATE)
"""The parts in which all bytes move."""

RATIOS: dict[str, tuple[str, str, str]] = {
    "of_raw": ("raw", "transfer_s", "transfer GB/s / raw"),
    "of_raw_all": ("raw-all", "transfer_s", "transfer GB/s / raw-all"),
    "offload": ("", "offload_s", "later offloads / first"),
    "reference": ("reference", UPDATE, "reference / ours"),
    "tuned": ("reference/tuned", UPDATE, "reference/tuned / ours"),
    "full": ("kimi", UPDATE, "everything / changes"),
}
"""Other contender, part, and heading, by the ratio's name. `offload` has no other: it is ours over our first one."""


@dataclass
class SyncRunKeys(harness.FolderKeys):
    roles: RoleKeys = field(default_factory=RoleKeys)
    agree: AgreeWithGraceKeys = field(default_factory=AgreeWithGraceKeys)
    device: dict[str, Any] = MISSING


def _check_run(cfg: DictConfig) -> dict[str, Any]:
    """Return the keys other than `benchmark` as a plain dictionary, resolved, with right types.

    Raises:
        ConfigurationError, OmegaConfBaseException: naming the key, what was found and the way out.
        DeviceUnavailableError: this machine does not have the device.
    """
    run = resolved(SyncRunKeys, cfg)
    make_absolute(run, "run_dir")
    check_roles(run)
    bind(run["device"], "device", AT_RUN_TIME["device"])
    made(run["device"]).require()
    return run | {"launch": {"nproc_per_node": run["roles"]["trainer"] + run["roles"]["rollout"]}}


def _check(keys: dict[str, Any]) -> None:
    if not 0 <= keys["frozen"] <= 1:
        raise ConfigurationError(f"benchmark.frozen={keys['frozen']}: expected a share from 0 to 1")
    floats = sorted(zarr_name(dtype) for dtype in STORABLE if dtype.is_floating_point)
    harness.require_some("benchmark.dtypes", keys["dtypes"], floats)
    if any(name.startswith(("kimi", "reference")) for name in keys["contenders"]):
        CheckpointEngineRegistry.get("kimi_ckpt_engine")  # raises if its package is missing


def benchmark(cfg: dict[str, Any], topology: Topology) -> Figures:
    """Run all rounds, behind one that is not counted, and return the figures.

    Raises:
        ConfigurationError: there are not as many ranks as the roles take.
        CorruptCheckpointError: a rollout holds other bits than were sent.
    """
    keys = cfg["benchmark"]
    names, repeats = keys["contenders"], keys["repeats"]
    with ExitStack() as opened:
        ends = _endpoints(cfg, topology)
        facts = _facts(cfg, ends)
        harness.announce(_title(facts), names, keys, topology)
        # checkpoint-engine collects garbage four times in each update. Its cost depends on what else the process holds, so what is
        # made before the first update, and by it, is taken out of the collector's sight, for all contenders.
        opened.callback(gc.unfreeze)
        contenders = {name: opened.enter_context(closing(contender_of(name, ends))) for name in names}
        gc.freeze()
        first = harness.interleaved(
            names, 1, lambda name, _: _measured(name, contenders[name], 1), topology, lambda seconds: f"{_line(seconds)}; not counted"
        )
        gc.freeze()
        rounds = harness.interleaved(
            names, repeats, lambda name, number: _measured(name, contenders[name], number + 1), topology, _line
        )
    return facts | {
        "buckets": {name: contender.num_buckets for name, contender in contenders.items()},
        "sent_bytes": {name: contender.sent_bytes for name, contender in contenders.items()},
        "first": {name: rows[0] for name, rows in first.items()},
        "rounds": rounds,
    }


def _endpoints(cfg: Mapping[str, Any], topology: Topology) -> UpdateEndpoints:
    keys, roles = cfg["benchmark"], cfg["roles"]
    trainers = range(roles["trainer"])
    rollouts = range(roles["trainer"], roles["trainer"] + roles["rollout"])
    require_ranks(roles, rollouts.stop, topology)
    device: Device = made(cfg["device"])
    device.use(topology.local_rank)
    rows = rows_of(keys["mib"] * MIB, keys["width"], keys["dtypes"])
    with topology.phase("make the weights"), device.telling_of_room():
        weights = made_of(rows, device.torch_device, seed=0 if topology.rank in trainers else 1)
    ranks = {"topology": topology, "trainers": trainers, "rollouts": rollouts, "timeout_s": cfg["agree"]["timeout_s"]}
    held = {"device": device, "weights": weights, "rows": rows, "bucket_bytes": keys["bucket_mib"] * MIB, "frozen": keys["frozen"]}
    return UpdateEndpoints(**ranks, **held)


def _measured(name: str, contender: Contender, step: int) -> Figures:
    """One update of one contender: seconds of the slowest rank, as a whole and by its parts. All bits are compared afterwards."""
    ends = contender.ends
    contender.prepare()
    wait_for_ranks(ends.topology)
    dist.barrier()
    stopwatch = Stopwatch()
    parts = contender.update(step)
    parts[UPDATE] = stopwatch.lap()
    digests = gathered(contender.digests(), ends.topology)
    sent = {key: digest for rank in ends.trainers for key, digest in digests[rank].items()}
    for rank, held in enumerate(digests):
        if not (held.items() <= sent.items() if rank in ends.trainers else held == sent):
            raise CorruptCheckpointError(f"{name}: rank {rank} holds other bits than were sent")
    return largest(gathered(parts, ends.topology))


def _facts(cfg: Mapping[str, Any], ends: UpdateEndpoints) -> dict[str, Any]:
    """Return the facts of a run that its figures depend on: the weights, the ranks and the versions."""
    keys = cfg["benchmark"]
    return {
        "trainers": len(ends.trainers),
        "rollouts": len(ends.rollouts),
        "bytes": ends.weights.num_bytes,
        "tensors": len(ends.rows),
        "dtypes": described(ends.rows),
        "bucket_bytes": ends.bucket_bytes,
        "repeats": keys["repeats"],
        "frozen": keys["frozen"],
        "device": ends.device.type,
        "collectives": ends.device.collectives,
        "nodes": len(ends.topology.nodes),
        "versions": {"checkpoint-engine": _version("checkpoint-engine")},
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def compared(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return `gb_s` by contender and part, and `ratios` by the name of ours.

    Ratios are medians of the ratios within each round: a busy moment slows neighbours alike.

    - `of_raw`, `of_raw_all`: the bandwidth of our transfer over that of bare broadcasts; 1 is the limit.
    - `reference`, `tuned`: the time of their whole update over that of ours.
    - `offload`: our median offload over the first one.
    - `full`: of kimi/delta, which sends changes: the time of a whole update of kimi, which sends everything, over its own.
    """
    rounds, medians = result["rounds"], result["medians"]
    speeds = {
        name: {part: result["bytes"] / 1e9 / row[part] for part in SPEEDS if row.get(part)} for name, row in medians.items()
    }
    ratios: dict[str, dict[str, float]] = {}
    for name in [name for name in rounds if name in OURS]:
        ratios[name] = {"offload": medians[name]["offload_s"] / result["first"][name]["offload_s"]}
        for ratio, (other, part, _) in RATIOS.items():
            if other in rounds and (ratio != "full" or name == "kimi/delta"):
                pairs = zip(rounds[other], rounds[name], strict=True)
                ratios[name][ratio] = statistics.median(theirs[part] / ours[part] for theirs, ours in pairs)
    return {"gb_s": speeds, "ratios": ratios}


def _tables(result: Mapping[str, Any]) -> dict[str, Rows]:
    parts = PARTS | {"whole update": UPDATE}
    more = {
        name: {
            **{f"{heading}, GB/s": f"{speeds[part]:.2f}" for heading, part in parts.items() if part in speeds},
            "first offload s": f"{result['first'][name]['offload_s']:.3f}" if "offload_s" in result["first"][name] else "",
            "buckets": str(result["buckets"][name] or ""),
            "sent": "" if (sent := result["sent_bytes"][name]) is None else f"{sent / result['bytes']:.0%}",
        }
        for name, speeds in result["gb_s"].items()
    }
    ratios = {
        name: {heading: f"{of[ratio]:.2f}" for ratio, (*_, heading) in RATIOS.items() if ratio in of}
        for name, of in result["ratios"].items()
    }
    return {"of these medians": more, "medians of the rounds' ratios": ratios}


def _title(result: Mapping[str, Any]) -> str:
    ranks = f"{counted(result['trainers'], 'trainer')}, {counted(result['rollouts'], 'rollout')}"
    return (
        f"{result['bytes'] / 1e9:.2f} GB in {result['tensors']} tensors, buckets of {result['bucket_bytes'] / MIB:.0f} MiB, {ranks}, "
        f"{result['device']} by {result['collectives']}, {result['frozen']:.0%} frozen"
    )


def _line(seconds: Mapping[str, float]) -> str:
    parts = [f"{heading} {seconds[part]:.3f}" for heading, part in PARTS.items() if part in seconds]
    return f"update {seconds[UPDATE]:.3f} s ({', '.join(parts)})"


def contender_of(name: str, ends: UpdateEndpoints) -> Contender:
    """Make a contender by its name. Collective."""
    if name in OURS:
        return Ours(ends, name)
    if name.startswith("raw"):
        return Raw(ends, to_trainers=name == "raw-all")
    if name == "per-tensor":
        return PerTensor(ends)
    from recipes.benchmark.parameter_server import Reference  # its package may be missing

    return Reference(ends, is_tuned=name == "reference/tuned")


MEASUREMENT = harness.Measurement(
    {
        "mib": int, "width": int, "dtypes": list[str], "bucket_mib": int, "repeats": int, "frozen": float,
        "contenders": list[str],
    },
    benchmark,
    _title,
    {f"{heading} s": part for heading, part in PARTS.items()} | {"whole update s": UPDATE},
    compare=compared,
    tables=_tables,
    contenders=CONTENDERS,
    check=_check,
    check_run=_check_run,
    digits=3,
)
