"""measure=device: copies of a save and of a load between device and host, beside plain copies of pinned memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from hydra.utils import instantiate

from ckpt.cli.tables import counted
from ckpt.errors import ConfigurationError, CorruptCheckpointError
from ckpt.format.box import whole
from ckpt.format.dtypes import raw_bytes
from ckpt.format.records import ChunkExtent
from ckpt.memory.copies import Filling, Halves, Staging
from ckpt.memory.device import Device, pinned
from ckpt.ranks.topology import Topology
from ckpt.saving.writing import PACKED_BYTES
from ckpt.storage.extents import SLAB_BYTES
from ckpt.storage.wanted_bytes import WantedBox, WantedBytes
from recipes.benchmark import harness
from recipes.benchmark.harness import Figures
from recipes.benchmark.measuring import timed
from recipes.benchmark.tables import Rows, rounds_of

MIB = 1 << 20


def benchmark(cfg: dict[str, Any], topology: Topology) -> Figures:
    device: Device = instantiate(cfg["device"])
    if device.type == "cpu":
        raise ConfigurationError("device=cpu has no copies to measure: choose another device")
    device.use(topology.local_rank)
    keys = cfg["benchmark"]
    states = {
        name: DeviceTensors(make(keys["mib"] * MIB, device.torch_device), device) for name, make in STATES.items()
    }
    for state in states.values():
        state.check()

    def take_turn(name: str, number: int) -> Figures:
        return {way: timed(work, topology) for way, work in states[name].ways().items()}

    return {
        "device": str(device.torch_device),
        "ranks": topology.world_size,
        "repeats": keys["repeats"],
        "rounds": harness.interleaved(states, keys["repeats"], take_turn, topology),
        "states": {name: {"bytes": state.num_bytes, "tensors": len(state.tensors)} for name, state in states.items()},
    }


def compared(result: Mapping[str, Any]) -> dict[str, Any]:
    """Add the medians of each state to it, as GB/s, and the share of a plain copy's speed."""

    def with_speeds(state: Mapping[str, Any], medians: Mapping[str, float]) -> dict[str, Any]:
        speeds = {way: state["bytes"] / seconds / 1e9 for way, seconds in medians.items()}
        ratios = {way: medians[f"plain {way}"] / medians[way] for way in ("save", "load")}
        return {**state, "medians": medians, "gb_s": speeds, "ratios": ratios}

    return {"states": {name: with_speeds(state, result["medians"][name]) for name, state in result["states"].items()}}


def _tables(result: Mapping[str, Any]) -> dict[str, Rows]:
    rows = {}
    for name, state in result["states"].items():
        rows[name] = {"tensors": f"{state['tensors']:,}", "MiB": f"{state['bytes'] / MIB:.0f}"}
        for way, heading in (("save", "to the host"), ("load", "to the device")):
            rows[name][f"{heading}, GB/s of a rank"] = f"{state['gb_s'][way]:.1f} of {state['gb_s'][f'plain {way}']:.1f}"
            rows[name][f"{heading}, share of a plain copy"] = f"{state['ratios'][way]:.2f}"
    return {f"{result['machine']['accelerator']}, {counted(result['ranks'], 'rank')}, {rounds_of(result)}": rows}


class DeviceTensors:
    """Tensors of one device, and each way to copy them. A copy returns when it is complete."""

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

    def ways(self) -> dict[str, Callable[[], None]]:
        """Return the copies that are timed, by name."""
        return {"save": self.stage, "plain save": self.copy_out, "load": self.fill, "plain load": self.copy_in}

    def stage(self) -> None:
        """Copy to the host as a save does."""
        for _ in self._staged():
            pass

    def _staged(self) -> Iterator[tuple[int, Sequence[torch.Tensor]]]:
        return Staging(Halves(self._device.pinned_bytes)).ahead(enumerate(self._groups))

    def fill(self, source: torch.Tensor | None = None) -> None:
        """Copy to the tensors as a load does.

        Args:
            source: flat host bytes; None: whatever is in the pinned memory.
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
        """Compare all bytes after a copy to the host, and after one back.

        Raises:
            CorruptCheckpointError: bytes changed on the way.
        """
        staged = [host.reshape(-1).view(torch.uint8).clone() for _, hosts in self._staged() for host in hosts]
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
    """Group tensors as a save copies them at once: large ones alone, small ones together."""
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
    """Transposed matrices: their order in memory is not that of storage."""
    side = math.isqrt(min(16 * MIB, num_bytes) // 4)
    return [_random((side, side), device).t() for _ in range(max(num_bytes // (4 * side * side), 1))]


STATES: dict[str, Callable[[int, torch.device], list[torch.Tensor]]] = {
    "large tensors": _large,
    "tensors of 4 KiB": _small,
    "transposed": _columns,
}


MEASUREMENT = harness.Measurement(
    {"repeats": int, "mib": int}, benchmark, lambda result: result["device"], {}, compare=compared, tables=_tables
)
