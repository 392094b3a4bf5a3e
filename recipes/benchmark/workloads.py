"""The state that contenders save and load, on the ranks that save it and on those that load it; and the interface of a contender."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hydra.utils import instantiate

from ckpt import StateComponent
from ckpt.errors import ConfigurationError
from ckpt.format.digests import StreamDigest
from ckpt.format.dtypes import raw_bytes
from ckpt.memory.device import Device
from ckpt.ranks.topology import Topology
from ckpt.state.address import address_of, local_tensor
from ckpt.state.sharing import Stateful
from ckpt.state.state_digest import state_digest
from recipes.benchmark.measuring import gathered
from recipes.benchmark.places import Choice, Holding, Place, Source, holders_of, lay_out, places_of, sources_of
from recipes.benchmark.weights import NamedTensors
from recipes.training.parallel.base import Layout
from recipes.training.training import Training

RESHARDABLE = ("fsdp", "hsdp", "tp_fsdp", "ddp_tp")
"""Layouts whose process groups are all those of their mesh, so that a part of the ranks can be laid out by themselves."""

SHARINGS = ("replicated", "sharded")
"""Of small tensors: every rank holds all of them, or every world_size-th."""


class Contender:
    """One way to save a state, and to load it back into the same memory. Every method is collective.

    Attributes:
        measures: which of "save", "load_cold" and "load_warm" it takes part in.
        fills: whether a load fills the state, which is scrambled before and compared afterwards.
    """

    measures: tuple[str, ...] = ("save", "load_cold", "load_warm")
    fills = True

    def save(self, folder: Path) -> None:
        """Write the state to a folder that exists; all bytes and entries below it are on the disk when the lead returns."""

    def load(self, folder: Path) -> dict[str, int] | None:
        """Read the state, on the ranks that load. Returns further figures, of all these ranks together, if there are any."""


@dataclass(frozen=True)
class State:
    """The state of one rank, seen by each contender in its own way. All views are of the same memory.

    Attributes:
        group: torch's process group of the topology's ranks; None: the default one.
        components: for our coordinator.
        process_groups: named groups of the layout.
        statefuls: what of it is tensors that are compared.
        tree: for torch.distributed.checkpoint: nested dictionaries of tensors.
    """

    topology: Topology
    group: dist.ProcessGroup | None
    device: Device
    components: Sequence[StateComponent]
    process_groups: Mapping[str, Sequence[int]]
    statefuls: Mapping[str, Stateful]
    tree: Mapping[str, Any]

    @cached_property
    def places(self) -> dict[Place, torch.Tensor]:
        return places_of(self.statefuls)

    def scramble(self) -> None:
        """Overwrite every byte, so that the comparison finds a byte that a load misses."""
        for tensor in self.places.values():
            raw_bytes(tensor).fill_(255)

    def fingerprint(self) -> str:
        """Return a digest of every byte that this rank holds."""
        digest = StreamDigest()
        for tensor in self.places.values():
            digest.update(raw_bytes(tensor).cpu().numpy().data)
        return digest.hexdigest()

    def digest(self) -> str:
        """Return a digest of the state as a whole, equal however it is laid out. Collective over the state's ranks."""
        return state_digest(self.statefuls, self.topology)


@dataclass(frozen=True)
class Workload:
    """A state as it is saved on all ranks, and as it is loaded.

    Attributes:
        loaded: `saved` itself; or the same model, of other values, on fewer ranks; None on the others.
        holdings: every place of the saved state.
        loaded_bytes: that all ranks which load hold, copies included.
    """

    layout: str
    saved: State
    loaded: State | None
    num_loading: int
    holdings: Mapping[Place, Holding]
    loaded_bytes: int

    @property
    def state_bytes(self) -> int:
        """Of the whole state, copies not counted."""
        return sum(holding.num_bytes for holding in self.holdings.values())

    @property
    def num_tensors(self) -> int:
        return len({name for name, _ in self.holdings})

    def in_files(self, choose: Choice) -> tuple[dict[Place, int], dict[int, list[Source]]]:
        """Lay the state out in a file of each writer.

        Returns:
            the places that this rank writes, in the order of its file, with their offsets; and by writer the boxes that it reads, none on
            a rank that does not load. Ranks begin at different files, so that a disk serves them side by side.
        """
        rank, num_ranks = self.saved.topology.rank, self.saved.topology.world_size
        layout = lay_out(self.holdings, num_ranks, choose)
        mine = {place: location.offset for place, location in layout.items() if location.writer == rank}
        sources = sources_of({} if self.loaded is None else self.loaded.places, layout)
        reads: dict[int, list[Source]] = {}
        for source in sorted(sources, key=lambda source: (source.location.writer - rank) % num_ranks):
            reads.setdefault(source.location.writer, []).append(source)
        return mine, reads

    def identity(self, state: State) -> str:
        """Digest a state, saved or loaded: each rank's own bytes, or the state as a whole if it is resharded. Collective over its ranks."""
        return state.fingerprint() if self.num_loading == self.saved.topology.world_size else state.digest()


@contextmanager
def prepared(cfg: Mapping[str, Any], topology: Topology, made: State | None = None) -> Iterator[Workload]:
    """Make the state that `cfg["benchmark"]` asks for. Collective.

    Args:
        made: it is there already.

    Raises:
        ConfigurationError: fewer ranks shall load than there are, and this layout cannot be made of a part of the ranks.
    """
    keys = cfg["benchmark"]
    layout: Layout = instantiate(cfg["parallel"])
    small = keys.get("small_tensors")
    num_loading = keys.get("load_ranks") or topology.world_size
    if num_loading != topology.world_size:
        _check_ranks(num_loading, topology, layout, "small tensors" if small is not None else None if made is None else "an adapter")
    saved = made or (_training_state(cfg, topology, None) if small is None else _small_tensors(cfg, topology, **small))
    if num_loading == topology.world_size:
        yield _workload(small["sharing"] if small else layout.name, saved, saved, num_loading)
        return
    is_loading = topology.rank < num_loading
    with topology.part("ranks that load", range(num_loading)) if is_loading else nullcontext() as part:
        yield _workload(layout.name, saved, state_on(part, num_loading, cfg, saved.device), num_loading)


def state_on(part: Topology | None, num_ranks: int, cfg: Mapping[str, Any], device: Device) -> State | None:
    """Make the state of a model anew on the first ranks, and return it there. Collective over all ranks.

    Args:
        part: the topology of these ranks; None on the others.
    """
    group = dist.new_group(list(range(num_ranks)))
    if part is not None:
        return _training_state(cfg, part, group)
    instantiate(cfg["parallel"]).mesh(device.torch_device, num_ranks)  # the groups of a mesh are made by all ranks together
    return None


def facts_of(cfg: Mapping[str, Any], workload: Workload) -> dict[str, Any]:
    """Return the facts of a run that its figures depend on: the state, the layout and the device."""
    keys = cfg["benchmark"]
    return {
        "workload": keys["workload"],
        "layout": workload.layout,
        "model": None if keys.get("small_tensors") or keys.get("adapters") else cfg["model"]["size"],
        "ranks": workload.saved.topology.world_size,
        "state_bytes": workload.state_bytes,
        "tensors": workload.num_tensors,
        "device": str(workload.saved.device.torch_device),
    }


def described(facts: Mapping[str, Any]) -> str:
    """Return the facts as the beginning of a title."""
    return (
        f"{facts['workload']}: {facts['state_bytes'] / 1e9:.2f} GB in {facts['tensors']:,} tensors, {facts['layout']} on "
        f"{facts['ranks']} ranks"
    )


def _check_ranks(num_loading: int, topology: Topology, layout: Layout, other: str | None) -> None:
    if num_loading > topology.world_size:
        raise ConfigurationError(
            f"benchmark.load_ranks={num_loading}: there are {topology.world_size} ranks; give launch.nproc_per_node="
            f"{num_loading} or more"
        )
    if other or layout.name not in RESHARDABLE:
        what = other or f"parallel={layout.name}"
        raise ConfigurationError(
            f"benchmark.load_ranks={num_loading}: {what} cannot be laid out on a part of the {topology.world_size} ranks; choose "
            f"parallel=<one of {', '.join(RESHARDABLE)}>, or benchmark.load_ranks=null"
        )


def _workload(layout: str, saved: State, loaded: State | None, num_loading: int) -> Workload:
    holdings = holders_of(saved.places, saved.topology)
    loaded_bytes = 0 if loaded is None else sum(tensor.nbytes for tensor in loaded.places.values())
    return Workload(layout, saved, loaded, num_loading, holdings, sum(gathered(loaded_bytes, saved.topology)))


def _training_state(cfg: Mapping[str, Any], topology: Topology, group: dist.ProcessGroup | None) -> State:
    training = Training(cfg, topology, instantiate(cfg["device"]))
    training.join()
    fill_optimizer(training.model, training.optimizer)
    model, optimizer, groups = training.model_state, training.optimizer_state, training.layout.process_groups(topology)
    tree = {"model": model.state_dict(), "optimizer": optimizer.state_dict()["state"]}
    statefuls = {"model": model, "optimizer": optimizer}
    return State(topology, group, training.device, training.components(), groups, statefuls, tree)


def fill_optimizer(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Give an optimizer its state by one step on made-up gradients, equal where ranks hold the same part of a tensor."""
    tied = getattr(model, "tied_names", {})
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        place = f"{tied.get(name, name)} {address_of(parameter, name).box}"
        generator = torch.Generator().manual_seed(zlib.crc32(place.encode()))
        parameter.grad = torch.zeros_like(parameter)
        grad = local_tensor(parameter.grad)
        grad.copy_(torch.randn(grad.shape, generator=generator))
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _small_tensors(cfg: Mapping[str, Any], topology: Topology, *, count: int, elements: int, sharing: str) -> State:
    """Make `count` float32 tensors of random bits that follow from their numbers.

    Args:
        sharing: "replicated": every rank holds all; "sharded": each rank holds every world_size-th.
    """
    device: Device = instantiate(cfg["device"])
    device.use(topology.local_rank)
    whole = torch.randn(count, elements, generator=torch.Generator().manual_seed(0)).to(device.torch_device)
    mine = range(count) if sharing == "replicated" else range(topology.rank, count, topology.world_size)
    stateful = NamedTensors({f"{number:06d}": whole[number].clone() for number in mine})
    components, tree = [StateComponent("tensors", stateful, sharing)], {"tensors": stateful.state_dict()}
    return State(topology, None, device, components, {}, {"tensors": stateful}, tree)
