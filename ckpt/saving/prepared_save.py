"""One save that all ranks have agreed on, and the place that it goes to: every save of the library is one of these.

| place | the ranks write into | published by |
|---|---|---|
| `ckpt.saving.checkpoint_root.CheckpointRoot` | a new folder, which readers pass over | a rename |
| `ckpt.dist_checkpointing.folder.destination.GivenFolder` | a folder that the user has made | its manifest, written last |
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from ckpt.backends.base import Backend, Previous
from ckpt.errors import StorageError
from ckpt.memory.device import Device
from ckpt.planning.plan import SavePlan
from ckpt.ranks.topology import Topology
from ckpt.saving.gathering import ByteSource, LiveTensors
from ckpt.saving.writing import PlainFiles, RankWritePlan, Write, WriteJob, WriteResult
from ckpt.state.collect import RankState

Place = TypeVar("Place", bound="Destination")


class Destination(ABC):
    """The place that one save goes to. Every rank has one; `open` and `publish` are collective.

        new --open--> open --publish--> published
         |             |
         +-------------+--discard--> discarded

    Attributes:
        what: the save, for errors; equal on all ranks.
        folder: what the ranks write into. Known once it is open.
    """

    what: str
    folder: Path

    @abstractmethod
    def open(self, topology: Topology) -> None:
        """Make the folder ready, and see that every rank reaches it."""

    @abstractmethod
    def publish(self, save: PreparedSave[Any], votes: Sequence[WriteResult], topology: Topology) -> None:
        """Make a checkpoint of what all ranks have written durably: last comes what readers know it by."""

    @abstractmethod
    def discard(self, error: BaseException | None = None) -> None:
        """The save has failed, on this rank or another: let others have the place. May be called again."""

    def previous(self, rank: int) -> Previous | None:
        """An earlier checkpoint; of what it holds, chunks that a rank would write again are linked. None: nothing is linked."""
        return None

    @contextmanager
    def discarding(self) -> Iterator[None]:
        """Discard the save if anything in the block fails. Around its operation: by then all ranks have stopped writing."""
        try:
            yield
        except BaseException as error:
            self.discard(error)
            raise


@dataclass
class PreparedSave(Generic[Place]):
    """One save, from the exchange of slivers to what the ranks wrote. `ckpt.saving.planner.Planner` makes the plan.

    Attributes:
        plain: what this rank writes of plain values, as they were at the call.
        slivers: sender -> all that it sent here, of chunks that this rank writes.
    """

    destination: Place
    mine: RankState
    plan: SavePlan
    share: RankWritePlan
    plain: PlainFiles
    backend: Backend
    device: Device
    slivers: Mapping[int, bytes] = field(default_factory=dict)

    def live_tensors(self) -> ByteSource:
        """The state itself, which must not change until the save is over."""
        return LiveTensors(self.share, self.plan, self.mine, self.device.pinned_bytes)

    def exchange_slivers(self, topology: Topology, source: ByteSource) -> None:
        """Send the parts of chunks that other ranks write, and receive those of this rank's. Collective."""
        if self.share.sends_slivers:
            self.slivers = topology.exchange("slivers", source.sends(), self.share.sources)

    def write(self, source: ByteSource, write: Write, topology: Topology) -> WriteResult:
        """Write this rank's share, durably. Talks to no other rank; in any thread."""
        place = self.destination
        job = WriteJob(place.folder, self.backend, self.plain, self.slivers, place.previous(topology.rank))
        vote = write(self.share, job, source.items(), topology.progress)
        source.check()
        return vote

    def run(self, topology: Topology, source: ByteSource, write: Write, *, started: float) -> None:
        """Open, write and publish. Collective over the topology; by any thread of the rank.

        Args:
            started: when this rank was called, by `time.perf_counter`.
        """
        with self.destination.discarding(), topology.operation(self.destination.what):
            self.destination.open(topology)
            self.exchange_slivers(topology, source)
            with topology.phase("write") as phase:
                vote = self.write(source, write, topology)
                vote.write_s = time.perf_counter() - started
                phase.payload = vote.to_json()
            self.destination.publish(self, [WriteResult(**tree) for tree in phase.payloads], topology)


def require_reachable(folder: Path, topology: Topology) -> None:
    """Wait, a little, until the lead's new folder is seen here; network file systems show it late, other disks never."""
    deadline = time.monotonic() + min(topology.timeout_s / 2, 30.0)
    while not folder.is_dir():
        if time.monotonic() > deadline:
            raise StorageError(
                f"checkpoint root {folder.parent} is not shared by the ranks: rank {topology.rank} "
                "does not see the folder that rank 0 made "
                "there. Put output_dir on a file system that all hosts mount."
            )
        os.listdir(folder.parent)  # makes NFS clients ask again
        time.sleep(0.05)
