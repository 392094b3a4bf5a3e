"""The peers: torch.distributed.checkpoint, and safetensors files. With their defaults, and made as durable as ours."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from ckpt.format.box import Box, overlap
from ckpt.integrations.dcp import CkptReader, CkptWriter
from recipes.benchmark.measuring import sync_entries, sync_file
from recipes.benchmark.places import Choice, Source
from recipes.benchmark.workloads import Contender, Workload


class Dcp(Contender):
    """torch.distributed.checkpoint with its defaults: copies deduplicated, one file per rank, fsync of each; no digests.

    Args:
        format: of our storage, for the same calls with our writer and reader; None: its own.
    """

    def __init__(self, workload: Workload, *, format: str | None = None) -> None:
        self._saved = workload.saved
        self._loaded = workload.loaded
        self._writer = CkptWriter(format=format, topology=workload.saved.topology) if format else None
        self._reader = CkptReader(topology=workload.loaded.topology) if format and workload.loaded else None

    def save(self, folder: Path) -> None:
        with _one_rank_is_meant():
            dcp.save(
                dict(self._saved.tree),
                checkpoint_id=folder / "dcp",
                storage_writer=self._writer,
                no_dist=not dist.is_initialized(),
            )
        if self._writer is None:  # ours is durable when it returns
            sync_entries(folder, self._saved.topology)

    def load(self, folder: Path) -> None:
        self.load_from(folder / "dcp")

    def load_from(self, path: Path) -> None:
        """Load what is saved at a path."""
        assert self._loaded is not None
        with _one_rank_is_meant():
            dcp.load(
                dict(self._loaded.tree),
                checkpoint_id=path,
                storage_reader=self._reader,
                process_group=self._loaded.group,
                no_dist=not dist.is_initialized(),
            )


class Safetensors(Contender):
    """One safetensors file per rank that writes, with fsync; a load copies the rank's tensors out of the mapped files."""

    def __init__(self, workload: Workload, *, choose: Choice) -> None:
        self._topology = workload.saved.topology
        mine, self._reads = workload.in_files(choose)
        self._writes = {_name(*place): workload.saved.places[place] for place in mine}

    def save(self, folder: Path) -> None:
        from safetensors.torch import save_file

        if self._writes:
            path = folder / f"{self._topology.rank}.safetensors"
            save_file(self._writes, path)
            sync_file(path)
        sync_entries(folder, self._topology)

    def load(self, folder: Path) -> None:
        from safetensors import safe_open

        for writer, sources in self._reads.items():
            with safe_open(folder / f"{writer}.safetensors", framework="pt") as file:
                for source in sources:
                    _fill(source, file)


@contextmanager
def _one_rank_is_meant() -> Iterator[None]:
    """Silence the warning of torch.distributed.checkpoint that there is one rank, which it gives with `no_dist=True` too."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized", UserWarning)
        yield


def _fill(source: Source, file: Any) -> None:
    """Copy the overlap of a saved box and a wanted one from the file into the wanted tensor."""
    name = _name(source.name, source.saved)
    if source.saved == source.wanted:
        source.tensor.copy_(file.get_tensor(name))
        return
    both = overlap(source.saved, source.wanted)
    assert both is not None, "boxes of a source overlap"
    there, here = both.relative_to(source.saved).slices, both.relative_to(source.wanted).slices
    source.tensor[here].copy_(file.get_slice(name)[there])


def _name(name: str, box: Box) -> str:
    return f"{name}@{','.join(map(str, box.offsets))}"
