"""Who takes part in the benchmark, and how each round is measured. Equal bytes, equal durability, the same memory."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import statistics
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hydra.utils import instantiate
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from rich.table import Table

from ckpt import CheckpointCoordinator
from ckpt.address import address_of, local_tensor
from ckpt.backends.tensorstore import TensorStoreBackend
from ckpt.backends.zarr import ZarrBackend
from ckpt.box import Box
from ckpt.errors import ConfigurationError, CorruptCheckpointError
from ckpt.flatten import flatten
from ckpt.sharing import find_aliases
from ckpt.topology import Topology
from recipes.measuring import PeakMemory, forget_cache, timed, together
from recipes.training import Training

READ_BYTES = 8 << 20
COLUMNS = ("save_s", "load_cold_s", "load_warm_s", "save_peak_mib", "load_peak_mib")


@dataclass
class BenchmarkKeys:
    repeats: int
    contenders: list[str]


class Contender(Protocol):
    """One way to save the training state to a folder and load it back into the same memory. Collective."""

    def save(self, folder: Path) -> None: ...

    def load(self, folder: Path) -> None: ...


class Ours:
    """The coordinator with one of our backends: every tensor and plain value, digests computed and checked."""

    def __init__(self, coordinator: CheckpointCoordinator) -> None:
        self._coordinator = coordinator

    def save(self, folder: Path) -> None:
        self._coordinator.save_checkpoint(folder / "checkpoint-1")

    def load(self, folder: Path) -> None:
        self._coordinator.load_checkpoint(folder / "checkpoint-1")


class Dcp:
    """torch.distributed.checkpoint with its defaults: replicas deduplicated, one file per rank, fsync; no digests."""

    def __init__(self, training: Training) -> None:
        optimizer = training.optimizer_state.state_dict()["state"]
        self._state = {"model": training.model_state.state_dict(), "optimizer": optimizer}

    def save(self, folder: Path) -> None:
        dcp.save(self._state, checkpoint_id=folder, no_dist=not dist.is_initialized())

    def load(self, folder: Path) -> None:
        dcp.load(self._state, checkpoint_id=folder, no_dist=not dist.is_initialized())


class Raw:
    """What the machine allows: every rank writes its part of the bytes to one file, with fsync, and reads what it holds.

    Of equal boxes one rank writes, the one that has the least to write. What DTensors say of themselves is believed.
    """

    def __init__(self, training: Training) -> None:
        self._rank = training.topology.rank
        self._writes: list[np.ndarray] = []
        self._reads: list[tuple[int, int, np.ndarray]] = []
        mine = {place: _bytes_of(tensor) for place, tensor in _places(training).items()}
        ends = [0] * training.topology.world_size
        for place, (num_bytes, holders) in sorted(_holders(training).items(), key=lambda entry: -entry[1][0]):
            writer = min(holders, key=lambda rank: ends[rank])
            if place in mine:
                self._reads.append((writer, ends[writer], mine[place]))
            if writer == self._rank:
                self._writes.append(mine[place])
            ends[writer] += num_bytes
        turns = len(ends)
        self._reads.sort(key=lambda read: ((read[0] - self._rank) % turns, read[1]))

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / str(self._rank)).open("wb", buffering=0) as file:
            for view in self._writes:
                for at in range(0, view.nbytes, READ_BYTES):
                    file.write(view[at : at + READ_BYTES].data)
            os.fsync(file.fileno())

    def load(self, folder: Path) -> None:
        for writer, reads in itertools.groupby(self._reads, key=lambda read: read[0]):
            with (folder / str(writer)).open("rb", buffering=0) as file:
                for _, offset, view in reads:
                    file.seek(offset)
                    for at in range(0, view.nbytes, READ_BYTES):
                        file.readinto(view[at : at + READ_BYTES].data)


def check_benchmark(wanted: Any) -> dict[str, Any]:
    """Return the benchmark's own keys with their right types.

    Raises:
        ConfigurationError: there is no such key or contender.
    """
    try:
        typed = OmegaConf.to_container(OmegaConf.merge(OmegaConf.structured(BenchmarkKeys), wanted))
    except OmegaConfBaseException as error:
        known = ", ".join(f"benchmark.{f.name}" for f in fields(BenchmarkKeys))
        raise ConfigurationError(f"{str(error).splitlines()[0]}; the benchmark has {known}") from error
    assert isinstance(typed, dict)
    unknown = set(typed["contenders"]) - set(_CONTENDERS)
    if unknown or typed["repeats"] < 1:
        raise ConfigurationError(
            f"benchmark.contenders={typed['contenders']} benchmark.repeats={typed['repeats']}: expected some of {', '.join(_CONTENDERS)}, "
            "and at least one repeat"
        )
    return {str(key): value for key, value in typed.items()}


def benchmark(cfg: dict[str, Any], topology: Topology) -> dict[str, Any]:
    """Run all rounds and return the figures. Every rank calls it."""
    training = Training(cfg, topology, instantiate(cfg["device"]))
    training.join()
    _fill_optimizer(training)
    reference = training.digest()
    contenders = {name: _CONTENDERS[name](training, cfg) for name in cfg["benchmark"]["contenders"]}
    scratch = Path(cfg["run_dir"]) / "scratch"
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
    try:
        for number in range(cfg["benchmark"]["repeats"]):
            for name, contender in contenders.items():
                folder = scratch / f"{name}-{number}"
                rounds[name].append(_measure(contender, folder, training))
                if training.digest() != reference:
                    raise CorruptCheckpointError(f"{name}: what was loaded is not what was saved")
                together(topology)
                if topology.is_lead:
                    print(f"round {number + 1} {name}: {_line(rounds[name][-1])}", flush=True)
                    shutil.rmtree(folder)
    finally:
        if topology.is_lead:
            shutil.rmtree(scratch, ignore_errors=True)
    state_bytes = sum(num_bytes for num_bytes, _ in _holders(training).values())
    result = {
        "parallel": training.layout.name,
        "ranks": topology.world_size,
        "state_bytes": state_bytes,
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "device": str(training.device.torch_device),
        "rounds": rounds,
        "medians": {name: {c: statistics.median(r[c] for r in rows) for c in COLUMNS} for name, rows in rounds.items()},
    }
    if topology.is_lead:
        (Path(cfg["run_dir"]) / "benchmark.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return result


def show(result: Mapping[str, Any]) -> None:
    """Print the medians as a table."""
    rounds = len(next(iter(result["rounds"].values())))
    on = f"{result['parallel']} on {result['ranks']} ranks, {result['cores']} cores"
    table = Table(title=f"{result['state_bytes'] / 1e9:.2f} GB of state, {on}, medians of {rounds} rounds")
    table.add_column("")
    for heading in ("save s", "load s, cold", "load s, warm", "save peak MiB", "load peak MiB"):
        table.add_column(heading, justify="right")
    for name, medians in result["medians"].items():
        table.add_row(name, *(f"{medians[c]:.2f}" if c.endswith("_s") else f"{medians[c]:.0f}" for c in COLUMNS))
    Console().print(table)


def _measure(contender: Contender, folder: Path, training: Training) -> dict[str, float]:
    """One save and two loads: seconds of the slowest rank, and the most memory that any rank took on top of the state."""
    topology = training.topology
    figures = {}
    together(topology)
    memory = PeakMemory()
    figures["save_s"] = timed(lambda: contender.save(folder), topology)
    figures["save_peak_mib"] = memory.mib()
    forget_cache(folder, topology)
    training.scramble()
    memory = PeakMemory()
    figures["load_cold_s"] = timed(lambda: contender.load(folder), topology)
    figures["load_peak_mib"] = memory.mib()
    training.scramble()
    figures["load_warm_s"] = timed(lambda: contender.load(folder), topology)
    with topology.phase("figures") as phase:
        phase.payload = figures
    return {name: max(rank[name] for rank in phase.payloads) for name in figures}


_Place = tuple[str, Box]
"""Name of a tensor of model or optimizer, and the part of it that a rank holds."""


def _places(training: Training) -> dict[_Place, torch.Tensor]:
    """The tensors of this rank by their places; tied ones once."""
    state = {"model": training.model_state, "optimizer": training.optimizer_state}
    found: dict[_Place, torch.Tensor] = {}
    for component, stateful in state.items():
        tensors = flatten(stateful.state_dict(), component).tensors
        tied = find_aliases(tensors, getattr(stateful, "tied_names", {}))
        for key, leaf in tensors.items():
            name = f"{component}/{tied.get(key, key)}"
            found[name, address_of(leaf, name).box] = local_tensor(leaf)
    return found


def _holders(training: Training) -> dict[_Place, tuple[int, list[int]]]:
    """Every place of the whole state, with its bytes and the ranks that hold it. Collective."""
    with training.topology.operation("the benchmark"), training.topology.phase("places") as phase:
        phase.payload = [[name, b.offsets, b.shape, t.nbytes] for (name, b), t in _places(training).items()]
    found: dict[_Place, tuple[int, list[int]]] = {}
    for rank, rows in enumerate(phase.payloads):
        for name, offsets, shape, num_bytes in rows:
            _, holders = found.setdefault((name, Box(tuple(offsets), tuple(shape))), (num_bytes, []))
            holders.append(rank)
    return found


def _bytes_of(tensor: torch.Tensor) -> np.ndarray:
    flat: np.ndarray = tensor.view(-1).view(torch.uint8).numpy()
    return flat


def _fill_optimizer(training: Training) -> None:
    """Give the optimizer its state by one step on made-up gradients, equal where ranks hold the same part of a tensor."""
    tied = getattr(training.model, "tied_names", {})
    for name, parameter in training.model.named_parameters():
        place = f"{tied.get(name, name)} {address_of(parameter, name).box}"
        generator = torch.Generator().manual_seed(zlib.crc32(place.encode()))
        parameter.grad = torch.zeros_like(parameter)
        grad = local_tensor(parameter.grad)
        grad.copy_(torch.randn(grad.shape, generator=generator))
    training.optimizer.step()
    training.optimizer.zero_grad(set_to_none=True)


def _ours(training: Training, cfg: Mapping[str, Any], backend: Any) -> Ours:
    make = instantiate(cfg["coordinator"])
    return Ours(
        make(
            state_components=training.components(),
            process_groups=training.layout.process_groups(training.topology),
            topology=training.topology,
            backend=backend,
            overwrite=False,
            config_text=OmegaConf.to_yaml(OmegaConf.create(dict(cfg))),
        )
    )


_CONTENDERS: dict[str, Callable[[Training, Mapping[str, Any]], Contender]] = {
    "raw": lambda training, cfg: Raw(training),
    "dcp": lambda training, cfg: Dcp(training),
    "zarr": lambda training, cfg: _ours(training, cfg, ZarrBackend()),
    "tensorstore": lambda training, cfg: _ours(training, cfg, TensorStoreBackend(kvstore="ocdbt")),
    "tensorstore-file": lambda training, cfg: _ours(training, cfg, TensorStoreBackend(kvstore="file")),
}


def _line(figures: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.3f}" for name, value in figures.items())
