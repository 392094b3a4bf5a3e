"""One save that all ranks have agreed on, and its destination. Every save of the library is a `PreparedSave`.

| destination | the ranks write into | published by |
|---|---|---|
| `ckpt.saving.checkpoint_root.CheckpointRoot` | a new folder, which readers ignore | a rename |
| `ckpt.saving.new_folder.NewFolder` | a new folder, beside the path that the user has given | a rename |
| `ckpt.dist_checkpointing.folder.destination.GivenFolder` | a folder that the user has made | its manifest, written last |

Its bytes come from a `ByteSource`: `LiveTensors` brings the tensors of each item to the host while training waits, and
`ckpt.saving.background.snapshot` copies them instead.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import starmap
from typing import Any, Generic, Protocol, TypeVar

import torch

from ckpt.backends.base import Backend, Previous
from ckpt.errors import StorageError
from ckpt.format.box import Box
from ckpt.format.dtypes import contiguous, raw_bytes, torch_dtype
from ckpt.format.places import ObjectPath, Place, place_of
from ckpt.memory.copies import Halves, Staging
from ckpt.memory.device import Device
from ckpt.planning.plan import SavePlan
from ckpt.ranks.merging import slowest, total
from ckpt.ranks.topology import Phase, Topology
from ckpt.saving.writing import Item, Pack, PlainFiles, RankWritePlan, Staged, Write, WriteJob, WriteResult
from ckpt.state.collect import RankState
from ckpt.storage.objects.store import Counts, transfer_figures


class ByteSource(Protocol):
    """The source of the bytes of a write plan in one save. Called by the thread that writes them: `sends`, `items`, `check`."""

    def sends(self) -> dict[int, bytes]:
        """Rank -> the partial chunks for it, end to end."""

    def items(self) -> Iterator[Staged]:
        """Yield every item once, in any order. Its memory is valid until the next one is requested."""

    def check(self) -> None:
        """Raise if the state has changed since the save began."""


class Regions:
    """Finds the memory of this rank behind a box of a global array."""

    def __init__(self, plan: SavePlan, rank_state: RankState) -> None:
        self._plan = plan
        self._rank_state = rank_state
        self._by_box: dict[str, dict[Box, torch.Tensor]] = {}

    def of_item(self, item: Item) -> list[torch.Tensor]:
        """The tensors of an item: this rank's boxes of a chunk, or those of a pack."""
        if isinstance(item, Pack):
            return [self.of(name, box) for name, box in item.tasks]
        return [self.of(item.name, box) for box in item.own]

    def of(self, name: str, box: Box) -> torch.Tensor:
        """The part of an array in a box; on its own device, with its own strides."""
        if 0 in box.shape:
            return torch.empty(box.shape, dtype=torch_dtype(self._plan.arrays[name].dtype), device="cpu")
        held, local = self._held(name, box)
        return local if box == held else local[box.relative_to(held).slices]

    def _held(self, name: str, box: Box) -> tuple[Box, torch.Tensor]:
        """The piece of this rank's memory that contains a box. A whole piece, the usual case, is found in constant time."""
        pieces = self._rank_state.held[name]
        if len(pieces) == 1:
            return pieces[0]
        if name not in self._by_box:
            self._by_box[name] = dict(pieces)
        if box in self._by_box[name]:
            return box, self._by_box[name][box]
        return next(piece for piece in pieces if piece[0].contains(box))


class LiveTensors:
    """The state itself as the source of a save: host tensors are not copied, and device tensors come while the one before is written."""

    def __init__(self, write_plan: RankWritePlan, plan: SavePlan, rank_state: RankState, pinned_bytes: int) -> None:
        self._write_plan = write_plan
        self._rank_state = rank_state
        self._regions = Regions(plan, rank_state)
        self._staging = Staging(Halves(pinned_bytes))

    def sends(self) -> dict[int, bytes]:
        return sent(self._write_plan, self._regions, self._staging)

    def items(self) -> Iterator[Staged]:
        numbered = ((number, self._regions.of_item(item)) for number, item in enumerate(self._write_plan.items))
        return starmap(Staged, self._staging.ahead(numbered))

    def check(self) -> None:
        self._rank_state.require_unchanged()


def sent(write_plan: RankWritePlan, regions: Regions, staging: Staging) -> dict[int, bytes]:
    """Rank -> copies of the partial chunks that it writes, end to end."""
    outgoing: dict[int, list[bytes]] = defaultdict(list)
    tensors = ((send.to, [regions.of(send.name, send.box)]) for send in write_plan.sends)
    for to, (host,) in staging.ahead(tensors):
        outgoing[to].append(raw_bytes(contiguous(host)).numpy().tobytes())
    return {to: b"".join(parts) for to, parts in outgoing.items()}


To = TypeVar("To", bound="Destination")

_MOST_OF_A_SAVE = 0.9
"""A save that copies more than this while training waits is not meant to copy beside it."""


@dataclass(frozen=True, slots=True)
class SaveReport:
    """The result of a committed save.

    Attributes:
        path: of the committed checkpoint.
        bytes: of all files.
        save_s: seconds from the first rank's call to the commit.
        blocked_s: seconds that training waited; `save_s`, unless the save went on in the background.
        blocked_bytes: bytes of tensors, of all ranks, that were copied before the call of a save in the background returned. With `overlap`
            these are the ones that no optimizer is known to change, and small tensors. 0: the save was not in the background.
        written_bytes: those of `bytes` that this save has written; the others are linked to an earlier checkpoint.
        alarms: sentences about tensors that equal those of an earlier checkpoint, though training has changed them.
        slowest_rank: whose bytes took longest to be durable; None: there is one rank.
        requests: to the object store, of all ranks: kind, such as "put" -> their number, and the bytes that they carried. Empty for a
            folder. Whatever else a rank's process asked of the store meanwhile counts, too.
    """

    path: str
    checkpoint_id: str
    bytes: int
    save_s: float
    blocked_s: float
    written_bytes: int = 0
    alarms: tuple[str, ...] = ()
    slowest_rank: int | None = None
    blocked_bytes: int = 0
    requests: Counts = field(default_factory=dict)

    def __str__(self) -> str:
        """One line.

        Example:
            >>> print(SaveReport("runs/checkpoint-2", "2", 4_800_000, 0.5, 0.125, written_bytes=4_000_000))
            saved checkpoint-2: 0.500 s, 4.8 MB, 0.01 GB/s, 0.8 MB linked, of which training waited 0.125 s
        """
        figures = transfer_figures(self.bytes, self.save_s, self.requests, self.slowest_rank)
        linked = f", {(self.bytes - self.written_bytes) / 1e6:.1f} MB linked" if self.written_bytes < self.bytes else ""
        waited = f", of which training waited {self.blocked_s:.3f} s" if self.blocked_s < self.save_s else ""
        if 0 < self.blocked_bytes < self.bytes * _MOST_OF_A_SAVE:
            waited += f"; {self.blocked_bytes / 1e6:.1f} MB could not be copied beside it"
        return f"saved {place_of(self.path).name}: {figures}{linked}{waited}"


@dataclass(frozen=True, slots=True)
class Written:
    """What all ranks have written durably.

    Attributes:
        mine: the result of this rank.
        results: of every rank, in order. On the lead; empty elsewhere.
        write_s: of the slowest rank.
        slowest_rank: None: there is one rank.
        linked_bytes: of all ranks.
        requests: of all ranks.
    """

    mine: WriteResult
    results: Sequence[WriteResult]
    write_s: float
    slowest_rank: int | None
    linked_bytes: int
    requests: Counts

    @staticmethod
    def say(mine: WriteResult, phase: Phase, rank: int) -> None:
        """Say in a phase what this rank has written."""
        phase.to_lead = mine.to_json()
        phase.merge = {
            "slowest": slowest(mine.write_s, rank),
            "linked": total(mine.linked_bytes),
            "requests": total(mine.requests),
        }

    @classmethod
    def heard(cls, mine: WriteResult, phase: Phase, topology: Topology) -> Written:
        """Return what all ranks have said in the phase."""
        write_s, rank = phase.merged["slowest"]
        return cls(
            mine,
            [WriteResult(**tree) for tree in phase.gathered],
            write_s,
            -rank if topology.world_size > 1 else None,
            phase.merged["linked"],
            phase.merged["requests"],
        )


class Destination(ABC):
    """The folder of one save. Every rank has one; `open` and `publish` are collective.

        new --open--> open --publish--> published
         |             |
         +-------------+--discard--> discarded

    Attributes:
        what: name of the save in errors; equal on all ranks.
        folder: the ranks write into it. Set by `open` at the latest.
        report: set by `publish`, if the destination makes one.
    """

    what: str
    folder: Place
    report: SaveReport | None = None

    @abstractmethod
    def claim(self, topology: Topology) -> None:
        """Claim the place, and refuse what cannot be stored there, before anything is written."""

    @contextmanager
    def unclaimed_if_refused(self) -> Iterator[None]:
        """If the block fails, leave the place as it was before."""
        yield

    def require_room(self, num_bytes: int, topology: Topology) -> None:
        """Refuse saves for which memory is missing, once for each plan. Collective.

        Args:
            num_bytes: that this rank writes.
        """
        return None

    @abstractmethod
    def open(self, topology: Topology) -> None:
        """Prepare the folder, and check that every rank sees it."""

    @abstractmethod
    def publish(self, save: PreparedSave[Any], written: Written, topology: Topology) -> None:
        """Make the folder a checkpoint, once all ranks have written durably. Its last step makes it visible to readers."""

    @abstractmethod
    def discard(self, error: BaseException | None = None) -> None:
        """Release the folder of a save that has failed, on this rank or another. May be called again."""

    def previous(self, rank: int) -> Previous | None:
        """The checkpoint that unchanged chunks are linked to; None: no chunk is linked."""
        return None

    def rooms(self, write_plan: RankWritePlan, backend: Backend) -> Mapping[int, torch.Tensor]:
        """Number of an item -> its place in memory that is kept, for a snapshot to copy it there."""
        return {}

    @contextmanager
    def discarding(self) -> Iterator[None]:
        """Discard the save if the block fails. Put it around the operation: when that has failed, all ranks have stopped writing."""
        try:
            yield
        except BaseException as error:
            self.discard(error)
            raise


@dataclass
class PreparedSave(Generic[To]):
    """One planned save: `run` opens its destination, writes and publishes. Made by `ckpt.saving.saver.Planner`.

    Attributes:
        plain: plain values that this rank writes, as they were at the call.
        received_parts: sender -> the partial chunks that it sent to this rank, end to end. Released by `write`.
    """

    destination: To
    mine: RankState
    plan: SavePlan
    write_plan: RankWritePlan
    plain: PlainFiles
    backend: Backend
    device: Device
    received_parts: Mapping[int, bytes] = field(default_factory=dict)

    def live_tensors(self) -> ByteSource:
        """The state itself as source; it must not change until the save is over."""
        return LiveTensors(self.write_plan, self.plan, self.mine, self.device.pinned_bytes)

    def open(self, topology: Topology, source: ByteSource) -> None:
        """Open the destination, and exchange partial chunks with the ranks that write them. Collective."""
        self.destination.open(topology)
        if self.write_plan.sends_parts:
            self.received_parts = topology.exchange("exchange", source.sends(), self.write_plan.sources)

    def write(self, source: ByteSource, write: Write, topology: Topology) -> WriteResult:
        """Write this rank's part durably, once. Communicates with no other rank; in any thread."""
        place = self.destination
        received_parts, self.received_parts = self.received_parts, {}
        job = WriteJob(place.folder, self.backend, self.plain, received_parts, place.previous(topology.rank))
        result = write(self.write_plan, job, source.items(), topology.progress)
        source.check()
        return result

    def run(self, topology: Topology, source: ByteSource, write: Write, *, started: float) -> None:
        """Open, write and publish. Collective over the topology; in any thread.

        Args:
            started: `time.perf_counter` at the call of this rank.
        """
        with self.destination.discarding(), topology.operation(self.destination.what):
            self.open(topology, source)
            with topology.phase("write") as phase:
                result = self.write(source, write, topology)
                result.write_s = time.perf_counter() - started
                Written.say(result, phase, topology.rank)
            self.publish(Written.heard(result, phase, topology), topology)

    def publish(self, written: Written, topology: Topology) -> None:
        """Make a checkpoint of the files of all ranks. Collective."""
        self.destination.publish(self, written, topology)


def require_reachable(root: Place, is_seen: Callable[[], bool], topology: Topology) -> None:
    """Wait at most 30 s until this rank sees what the lead has opened; network file systems show it late, a disk of another host never.

    Args:
        is_seen: see `ckpt.catalog.committed.Catalog.is_seen`.
    """
    deadline = time.monotonic() + min(topology.timeout_s / 2, 30.0)
    while not is_seen():
        if time.monotonic() > deadline:
            if isinstance(root, ObjectPath) and root.scheme == "memory":
                raise StorageError(f"{root} is in the memory of one process, and other ranks cannot save there: give a folder, or a store")
            raise StorageError(
                f"checkpoint root {root} is not shared by the ranks: rank {topology.rank} does not see what rank 0 made there. Put "
                "output_dir on a file system that all hosts mount, or into one object store."
            )
        time.sleep(0.05)
