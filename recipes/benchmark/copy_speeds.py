"""How fast a save's and a load's copies are between a device and the host, beside plain copies of page-locked memory."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from rich.table import Table

from ckpt.errors import ConfigurationError, CorruptCheckpointError
from ckpt.format.box import whole
from ckpt.format.dtypes import raw_bytes
from ckpt.format.records import ChunkExtent
from ckpt.memory.copies import Filling, Halves, Staging
from ckpt.memory.device import Device, pinned
from ckpt.ranks.topology import Topology
from ckpt.saving.writing import PACKED_BYTES
from ckpt.storage.extents import SLAB_BYTES, WantedBox, WantedBytes
from recipes.benchmark.benchmarking import require_counts, typed_keys
from recipes.benchmark.comparison import print_table
from recipes.benchmark.measuring import timed

MIB = 1 << 20


@dataclass
class DeviceBenchmarkKeys:
    repeats: int
    mib: int


def check_benchmark(wanted: Any) -> dict[str, Any]:
    """Return the benchmark's own keys with their right types.

    Raises:
        ConfigurationError: there is no such key, it has another type, or is too small.
    """
    keys = typed_keys(DeviceBenchmarkKeys, wanted)
    require_counts(keys)
    return keys


def benchmark(cfg: dict[str, Any], topology: Topology) -> dict[str, Any]:
    """Run all rounds and return the figures. Every rank calls it.

    Raises:
        ConfigurationError: the device is the host itself.
    """
    device: Device = instantiate(cfg["device"])
    if device.type == "cpu":
        raise ConfigurationError("device=cpu has no copies to measure: choose another device")
    device.use(topology.local_rank)
    num_bytes = cfg["benchmark"]["mib"] * MIB
    kinds = {name: Kind(make(num_bytes, device.torch_device), device) for name, make in STATES.items()}
    for kind in kinds.values():
        kind.check()
    work: dict[tuple[str, str], Callable[[], None]] = {
        (name, way): partial(call, kind)
        for name, kind in kinds.items()
        for way, call in {
            "save": Kind.stage,
            "plain save": Kind.copy_out,
            "load": Kind.fill,
            "plain load": Kind.copy_in,
        }.items()
    }
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in work}
    for _ in range(cfg["benchmark"]["repeats"]):
        for key, call in work.items():
            seconds[key].append(timed(call, topology))
    result = {
        "device": str(device.torch_device),
        "name": torch.get_device_module(device.torch_device).get_device_name(device.torch_device),
        "ranks": topology.world_size,
        "torch": torch.__version__,
        "repeats": cfg["benchmark"]["repeats"],
        "states": {name: _figures(name, kind, seconds) for name, kind in kinds.items()},
    }
    if topology.is_lead:
        where = Path(cfg["run_dir"]) / "benchmark_device.json"
        where.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return result


def show(result: Mapping[str, Any]) -> None:
    """Print speeds and ratios as a table."""
    where = "1 rank" if result["ranks"] == 1 else f"{result['ranks']} ranks"
    table = Table(
        title=f"{result['name']}, {where}, medians of {result['repeats']} rounds; GB/s of a rank, and the share of a plain copy"
    )
    for heading in ("", "tensors", "MiB", "to the host", "", "to the device", ""):
        table.add_column(heading, justify="right" if heading else "left")
    for name, row in result["states"].items():
        speeds = [
            text
            for way in ("save", "load")
            for text in (f"{row['gb_s'][way]:.1f} of {row['gb_s'][f'plain {way}']:.1f}", f"{row['ratios'][way]:.2f}")
        ]
        table.add_row(name, f"{row['tensors']:,}", f"{row['bytes'] / MIB:.0f}", *speeds)
    print_table(table)


class Kind:
    """Tensors of one device, and each way to copy them. Every call returns when the bytes are where they belong."""

    def __init__(self, tensors: Sequence[torch.Tensor], device: Device) -> None:
        self.tensors = tensors
        self.num_bytes = sum(tensor.nbytes for tensor in tensors)
        self._device = device
        self._groups = _packed(tensors)
        self._plain = [pinned(min(device.pinned_bytes // 2, self.num_bytes)) for _ in range(2)]
        self._there = torch.empty(len(self._plain[0]), dtype=torch.uint8, device=device.torch_device)
        parts, base = [], 0
        for tensor in tensors:
            parts.append(WantedBox(base, tuple(tensor.shape), whole(tuple(tensor.shape)), tensor, "state"))
            base += tensor.nbytes
        self._wanted = WantedBytes(ChunkExtent("state", 0, base, ()), parts)

    def stage(self) -> None:
        for _ in Staging(Halves(self._device.pinned_bytes)).ahead(enumerate(self._groups)):
            pass

    def fill(self, source: torch.Tensor | None = None) -> None:
        """Take bytes to the tensors, as a load does.

        Args:
            source: where they come from; None: they are whatever lies in the pinned memory.
        """
        with Filling(SLAB_BYTES) as filling:
            for start in range(0, self.num_bytes, SLAB_BYTES):
                stop = min(start + SLAB_BYTES, self.num_bytes)
                memory = filling.take(stop - start)
                if source is not None:
                    memory.copy_(source[start:stop])
                filling.place(self._wanted, start, stop, memory)

    def copy_out(self) -> None:
        for number, count in enumerate(self._pieces()):
            self._plain[number % 2][:count].copy_(self._there[:count], non_blocking=True)
        self._device.synchronize()

    def copy_in(self) -> None:
        for number, count in enumerate(self._pieces()):
            self._there[:count].copy_(self._plain[number % 2][:count], non_blocking=True)
        self._device.synchronize()

    def check(self) -> None:
        """Make sure that what is measured is right: there and back again.

        Raises:
            CorruptCheckpointError: bytes changed on the way.
        """
        staged = [
            host.reshape(-1).view(torch.uint8).clone()
            for _, hosts in Staging(Halves(self._device.pinned_bytes)).ahead(enumerate(self._groups))
            for host in hosts
        ]
        expected = torch.cat([raw_bytes(tensor.cpu().contiguous()) for tensor in self.tensors])
        for tensor in self.tensors:
            tensor.zero_()
        self.fill(expected)
        back = torch.cat([raw_bytes(tensor.cpu().contiguous()) for tensor in self.tensors])
        if not torch.equal(torch.cat(staged), expected) or not torch.equal(back, expected):
            raise CorruptCheckpointError(f"copies from and to {self._device.torch_device} change bytes")

    def _pieces(self) -> list[int]:
        step = len(self._plain[0])
        return [min(step, self.num_bytes - at) for at in range(0, self.num_bytes, step)]


def _packed(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """What a save copies at once: large tensors alone, small ones together."""
    groups: list[list[torch.Tensor]] = []
    room = 0
    for tensor in tensors:
        if not groups or tensor.nbytes > room:
            groups.append([])
            room = PACKED_BYTES
        groups[-1].append(tensor)
        room -= tensor.nbytes
    return groups


def _random(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32).to(device)


def _large(num_bytes: int, device: torch.device) -> list[torch.Tensor]:
    return [_random((min(64 * MIB, num_bytes - at) // 4,), device) for at in range(0, num_bytes, 64 * MIB)]


def _small(num_bytes: int, device: torch.device) -> list[torch.Tensor]:
    count = min(max(num_bytes // 4096, 1), 20_000)
    return list(_random((count, 1024), device).unbind())


def _columns(num_bytes: int, device: torch.device) -> list[torch.Tensor]:
    """Transposed matrices, which lie in another order than they are stored."""
    side = math.isqrt(min(16 * MIB, num_bytes) // 4)
    return [_random((side, side), device).t() for _ in range(max(num_bytes // (4 * side * side), 1))]


STATES: dict[str, Callable[[int, torch.device], list[torch.Tensor]]] = {
    "large tensors": _large,
    "tensors of 4 KiB": _small,
    "transposed": _columns,
}


def _figures(name: str, kind: Kind, seconds: Mapping[tuple[str, str], Sequence[float]]) -> dict[str, Any]:
    medians = {way: statistics.median(seconds[name, way]) for way in ("save", "plain save", "load", "plain load")}
    return {
        "bytes": kind.num_bytes,
        "tensors": len(kind.tensors),
        "rounds": {way: seconds[name, way] for way in medians},
        "medians": medians,
        "gb_s": {way: kind.num_bytes / median / 1e9 for way, median in medians.items()},
        "ratios": {way: medians[f"plain {way}"] / medians[way] for way in ("save", "load")},
    }
