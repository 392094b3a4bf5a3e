"""The peers: torch.distributed.checkpoint, and safetensors files. With their defaults, and made as durable as ours."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from ckpt.format.box import Box, overlap
from recipes.benchmark.measuring import sync_entries, sync_file
from recipes.benchmark.places import Place, by_name, first, lay_out, least_laden, sources_of
from recipes.benchmark.workloads import Contender, Workload


class Dcp(Contender):
    """torch.distributed.checkpoint with its defaults: copies deduplicated, one file per rank, fsync of each; no digests."""

    def __init__(self, workload: Workload) -> None:
        self._saved = workload.saved
        self._loaded = workload.loaded

    def save(self, folder: Path) -> None:
        with _one_rank_is_meant():
            dcp.save(dict(self._saved.tree), checkpoint_id=folder / "dcp", no_dist=not dist.is_initialized())
        sync_entries(folder, self._saved.topology)

    def load(self, folder: Path) -> dict[str, int]:
        assert self._loaded is not None
        with _one_rank_is_meant():
            dcp.load(
                dict(self._loaded.tree),
                checkpoint_id=folder / "dcp",
                process_group=self._loaded.group,
                no_dist=not dist.is_initialized(),
            )
        return {}


class Safetensors(Contender):
    """One safetensors file per rank that writes, with fsync; a load copies out of the mapped files what the rank holds.

    Args:
        choose: which of the ranks that hold a tensor writes it.
    """

    def __init__(self, workload: Workload, choose: Callable[[Sequence[int], Sequence[int]], int]) -> None:
        self._topology = workload.saved.topology
        layout = lay_out(workload.holdings, self._topology.world_size, choose)
        self._writes = {
            _name(place): workload.saved.places[place]
            for place, lying in layout.items()
            if lying.writer == self._topology.rank
        }
        self._reads: dict[int, list[tuple[Place, Box, torch.Tensor]]] = defaultdict(list)
        saved = by_name(layout)
        for place, tensor in ({} if workload.loaded is None else workload.loaded.places).items():
            for box, lying in sources_of(place, saved):
                self._reads[lying.writer].append((place, box, tensor))

    @classmethod
    def of_each_rank(cls, workload: Workload) -> Safetensors:
        """Of equal copies the rank writes that has the least to write."""
        return cls(workload, least_laden)

    @classmethod
    def of_first_holders(cls, workload: Workload) -> Safetensors:
        """Of equal copies the first rank writes: a replicated state is one file, as one writer makes it."""
        return cls(workload, first)

    def save(self, folder: Path) -> None:
        from safetensors.torch import save_file

        if self._writes:
            path = folder / f"{self._topology.rank}.safetensors"
            save_file(self._writes, path)
            sync_file(path)
        sync_entries(folder, self._topology)

    def load(self, folder: Path) -> dict[str, int]:
        from safetensors import safe_open

        turns = self._topology.world_size
        for writer in sorted(self._reads, key=lambda writer: (writer - self._topology.rank) % turns):
            with safe_open(folder / f"{writer}.safetensors", framework="pt") as file:
                for (name, wanted), box, tensor in self._reads[writer]:
                    _fill(tensor, wanted, file, (name, box))
        return {}


@contextmanager
def _one_rank_is_meant() -> Iterator[None]:
    """Silence the warning of torch.distributed.checkpoint that there is one rank, which it gives with `no_dist=True` too."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized", UserWarning)
        yield


def _fill(tensor: torch.Tensor, wanted: Box, file: Any, saved: Place) -> None:
    """Copy the overlap of a saved box and a wanted one from the file into the wanted tensor."""
    _, box = saved
    if box == wanted:
        tensor.copy_(file.get_tensor(_name(saved)))
        return
    both = overlap(box, wanted)
    assert both is not None, "sources_of gives overlapping boxes only"
    there, here = both.relative_to(box).slices, both.relative_to(wanted).slices
    tensor[here].copy_(file.get_slice(_name(saved))[there])


def _name(place: Place) -> str:
    name, box = place
    return f"{name}@{','.join(map(str, box.offsets))}"
