"""Publish weights from the host memory of the trainers that saved them, through an engine: no file and no device is read.

Training may go on meanwhile, and so may the next save: it takes new memory while the old one is read.
"""

from __future__ import annotations

import asyncio
import math
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from ckpt.errors import Argument, CorruptCheckpointError, MissingStateError
from ckpt.format.box import whole
from ckpt.format.digests import BlockDigests, digest_of
from ckpt.format.dtypes import torch_dtype
from ckpt.format.manifest import ArrayEntry, CheckpointManifest, index_name
from ckpt.format.places import step_of
from ckpt.format.records import ChunkExtent
from ckpt.loading.strategy import ReadRequest, StoredCheckpoint
from ckpt.memory.host import Scratch
from ckpt.ranks.topology import Topology
from ckpt.state.sharing import OWN_COPIES, SharingPattern
from ckpt.storage.host_memory import FilesInMemory, HeldFiles
from ckpt.storage.stored import read_manifest, read_manifest_bytes

IN_MEMORY = Argument("in_memory", None, "backend=KimiEngineBackend(pool=True)")
"""The advice to keep saves in memory."""


class InMemory(Protocol):
    """A committed checkpoint in memory, such as a `HeldStep`."""

    @property
    def checkpoint_id(self) -> str: ...

    @property
    def path(self) -> Path: ...

    @property
    def manifest_digest(self) -> str: ...

    def manifest(self) -> CheckpointManifest: ...

    def files_on(self, ranks: Sequence[int]) -> HeldFiles: ...


class StepInMemory(NamedTuple):
    """A save in the memory of the hosts, as a first tier keeps it. See `InMemory`."""

    checkpoint_id: str
    path: Path

    @property
    def manifest_digest(self) -> str:
        return digest_of(read_manifest_bytes(self.path))

    def manifest(self) -> CheckpointManifest:
        return read_manifest(self.path)

    def files_on(self, ranks: Sequence[int]) -> HeldFiles:
        return FilesInMemory(self.path)


class WeightSender(Protocol):
    """An engine of ckpt/engine, or a trainer's own."""

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> dict[str, Any]:
        """See `ckpt.engine.base.CheckpointEngine.send_weights`."""


class HostMemoryMap:
    """Maps the memory of this host's ranks; mappings stay from one publication to the next, while they are used.

    Attributes:
        scratch: for tensors that are assembled.
    """

    def __init__(self) -> None:
        self._mapped: dict[tuple[str, int], torch.Tensor] = {}
        self._used: set[tuple[str, int]] = set()
        self.scratch = Scratch()

    def of(self, file: str, held: HeldFiles) -> torch.Tensor | None:
        """The bytes of a file, flat; None: it is not held. They change when its rank saves again."""
        place = held.place(file)
        if place is None:
            return None
        key = place.name, place.size
        if key not in self._mapped:
            fd = held.open(file)
            if fd is None:
                return None
            try:
                # Private, so that nobody can write to another rank's memory by mistake.
                self._mapped[key] = torch.frombuffer(
                    mmap.mmap(fd, place.size, access=mmap.ACCESS_COPY), dtype=torch.uint8
                )
            finally:
                os.close(fd)
        self._used.add(key)
        return self._mapped[key]

    def forget_unused(self) -> None:
        """Unmap files that were not used since the last call."""
        self._mapped = {key: memory for key, memory in self._mapped.items() if key in self._used}
        self._used = set()


class HeldWeights:
    """Iterates over (name, whole host tensor) of one component of a checkpoint in memory, under the names they were saved by.

    A tied tensor comes once, under its first name, as from `ckpt.engine.WholeWeights`. Copy a tensor before the next one is requested,
    and do not write to it: a tensor that one rank wrote in one piece is a view of its memory, and others are assembled in memory that
    is reused. Iterating communicates with no other rank.

    Attributes:
        tied_names: {alias: name under which it comes}.

    Raises:
        MissingStateError: not all of the component is in the memory of this host.
        CorruptCheckpointError: the memory of this rank has changed since the save.
    """

    def __init__(self, held: InMemory, component: str, topology: Topology, memory: HostMemoryMap) -> None:
        self._start = component + "/"
        self._files = held.files_on(topology.nodes[topology.node_rank])
        self._checkpoint = StoredCheckpoint(held.path, held.manifest(), self._files)
        self._memory = memory
        self._require_indexes()
        entries = self._checkpoint.manifest.arrays_of(component)
        self.tied_names = {
            key: entry.alias_of.removeprefix(self._start)
            for key, entry in entries.items()
            if entry.alias_of is not None
        }
        self._entries = {key: entry for key, entry in entries.items() if entry.alias_of is None}
        for key, entry in self._entries.items():
            nowhere = torch.empty(entry.shape, dtype=torch_dtype(entry.dtype), device="meta")
            for stored in self._checkpoint.parts(ReadRequest(self._start + key, key, whole(entry.shape), nowhere)):
                self._bytes_of(stored.chunk)
        self._verify(topology.rank)
        memory.forget_unused()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for key, entry in self._entries.items():
            yield key, self._whole(key, entry)

    def _whole(self, key: str, entry: ArrayEntry) -> torch.Tensor:
        dtype = torch_dtype(entry.dtype)
        out = self._memory.scratch.empty(entry.shape, dtype)
        for stored in self._checkpoint.parts(ReadRequest(self._start + key, key, whole(entry.shape), out)):
            part = stored.part
            region = self._bytes_of(stored.chunk)[part.base :][: math.prod(part.region) * dtype.itemsize]
            if region.storage_offset() % dtype.itemsize:  # in a database values lie anywhere
                region = region.clone()
            there = region.view(dtype).view(part.region)
            if tuple(part.out.shape) == entry.shape == part.region:
                return there
            part.out.copy_(there[part.box.slices])
        return out

    def _bytes_of(self, chunk: ChunkExtent) -> torch.Tensor:
        if not chunk.raw:
            raise self._out_of_reach(f"{chunk.file} is encoded")
        file = self._memory.of(chunk.file, self._files)
        if file is None:
            why = "is not in the memory of this host, but on another one, or was linked by an incremental save and not written"
            raise self._out_of_reach(f"{chunk.file} {why}")
        return file[chunk.offset : chunk.offset + chunk.length]

    def _require_indexes(self) -> None:
        """Require the indexes in memory too: they list the places of the tensors, and the disk is not read."""
        for rank in self._checkpoint.manifest.index_ranks():
            if index_name(rank) not in self._files:
                raise self._out_of_reach(f"rank {rank} wrote a part of it on another host, whose memory is out of reach")

    def _out_of_reach(self, why: str) -> MissingStateError:
        found = f"{self._checkpoint.root.name} cannot be published: {why}"
        return MissingStateError(f"{found}; give engine.send_weights the model's own weights")

    def _verify(self, rank: int) -> None:
        """Compare the digests of the bytes that this rank wrote. As all ranks do so, everything is checked once."""
        if rank not in self._checkpoint.manifest.index_ranks():
            return
        for path, by_number in self._checkpoint.index(rank).chunks.items():
            for chunk in by_number.values() if path.startswith(self._start) else ():
                digests = BlockDigests(chunk.block_bytes)
                flat: Any = self._bytes_of(chunk).numpy()
                digests.update(memoryview(flat))
                if digests.close() != chunk.digests:
                    raise CorruptCheckpointError(
                        f"{path} was changed in memory since it was saved, and is not published; save again, or load "
                        f"{self._checkpoint.root.name}"
                    )


class Publisher:
    """Publishes from the memory of this host's ranks. All ranks make one, in one order.

    Args:
        reading: yields the newest checkpoint in memory, which saves leave unchanged inside the block; None: there is none.
        patterns: returns the sharing pattern of each component, in the newest save.
        settled: returns when this rank has no unfinished save.
    """

    def __init__(
        self,
        topology: Topology,
        reading: Callable[[], AbstractContextManager[InMemory | None]],
        patterns: Callable[[], Mapping[str, SharingPattern]],
        settled: Callable[[], None],
    ) -> None:
        self._topology = topology
        self._reading = reading
        self._patterns = patterns
        self._settled = settled
        self._name = topology.name_branch()
        self._branch: Topology | None = None
        self._memory = HostMemoryMap()
        self._one_at_a_time = threading.Lock()  # a caller that was cancelled leaves its agreement behind

    async def publish(self, engine: WeightSender, step: int, component: str) -> dict[str, Any]:
        """See `CheckpointCoordinator.publish`."""
        await asyncio.to_thread(self._settled)
        with self._reading() as held:
            weights = await asyncio.to_thread(self._agreed, held, step, component)
            try:
                return await engine.send_weights(weights, step)
            finally:
                if isinstance(held, StepInMemory):  # the next save of a tier has other memory
                    self._memory = HostMemoryMap()

    def close(self) -> None:
        """Release what is kept from one publication to the next."""
        self._memory = HostMemoryMap()
        branch, self._branch = self._branch, None
        if branch is not None:
            branch.close()

    def _agreed(self, held: InMemory | None, step: int, component: str) -> HeldWeights:
        """Agree that all ranks hold the step, and return its weights. Collective; in a thread, as training and its event loop go on."""
        with self._one_at_a_time, self._joined().operation(f"publication of step {step}"):
            topology = self._joined()
            with topology.phase("look into memory") as phase:
                self._require_one_copy(component)
                phase.to_lead = [held.checkpoint_id, held.manifest_digest] if held is not None else None
                phase.answer = lambda: _require_held(phase.gathered, step, component)
            with topology.phase("open the memory"):
                assert held is not None, "all ranks hold it"
                return HeldWeights(held, component, topology, self._memory)

    def _joined(self) -> Topology:
        """The ranks' topology for publications, which stays open."""
        if self._branch is None:
            self._branch = self._topology.branch(self._name)
        return self._branch

    def _require_one_copy(self, component: str) -> None:
        patterns = self._patterns()
        if component not in patterns:
            has = ", ".join(sorted(patterns))
            raise MissingStateError(f"there is no component {component} to publish; this run has {has}")
        if (pattern := patterns[component]) in OWN_COPIES:
            raise MissingStateError(
                f"component {component} is {pattern.value}: there are several states of it, and none to publish"
            )


def _require_held(offers: Sequence[tuple[str, str] | None], step: int, component: str) -> None:
    """Require that all ranks hold one checkpoint, that of this step."""
    for rank, offer in enumerate(offers):
        found = "nothing" if offer is None else f"checkpoint-{offer[0]}"
        if offer is None or step_of(offer[0]) != step or offer != offers[0]:
            raise MissingStateError(
                f"{component} of step {step} cannot be published: rank {rank} holds {found} in memory. A step is there from the commit of ",
                "its save until the next save begins, with ", IN_MEMORY, ", or with memory() as the first of tiers",
            )
