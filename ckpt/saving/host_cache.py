"""Keep the newest checkpoint in host memory, each rank its own files. The coordinator of each rank has one `HostCache`.

The last agreement of a save tells all ranks the places of all files. A load needs no further message: files of ranks on its own host are
read from their memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import psutil
import torch

from ckpt.backends.base import Backend
from ckpt.errors import Argument, ConfigurationError
from ckpt.format.digests import digest_of
from ckpt.format.manifest import CheckpointManifest
from ckpt.format.records import Expected
from ckpt.memory.budget import more_memory
from ckpt.ranks.topology import Topology
from ckpt.saving.save_settings import SaveSettings
from ckpt.saving.writing import Pack, RankWritePlan
from ckpt.storage.host_memory import NOTHING_HELD, HeldFiles, MemoryFile
from ckpt.storage.pool import Memories, Pool, PooledSave


class PlacingBackend(Protocol):
    """A backend that knows the places of chunks in advance, if they are written in the expected order, and none is linked."""

    def places(self, rank: int, chunks: Iterable[Expected]) -> Mapping[tuple[str, int], tuple[str, int]]:
        """(Path of the array, number of the chunk) -> (file, first byte in it)."""


class _Room(NamedTuple):
    """A range of bytes in a file."""

    file: str
    start: int
    stop: int


@dataclass(frozen=True)
class HeldStep:
    """A committed checkpoint in memory.

    Attributes:
        path: its folder.
        manifest_digest: of its manifest's bytes.
        manifest: makes the part of the manifest that every rank knows without reading it: id, arrays, indexes.
        places: rank -> file -> its place in memory.
        save: this rank's memory.
    """

    checkpoint_id: str
    path: Path
    manifest_digest: str
    manifest: Callable[[], CheckpointManifest]
    places: Sequence[Mapping[str, MemoryFile]]
    save: PooledSave

    def files_on(self, ranks: Sequence[int]) -> HeldFiles:
        """The files that these ranks hold."""
        places = {file: place for rank in ranks for file, place in self.places[rank].items()}
        return HeldFiles(places, {name: file.whole for name, file in self.save.files.items()})


class HostCache:
    """The memory of one rank's saves, kept for loads and publications.

    Args:
        memories: assigns memory to the backend's writers.
        most_bytes: of memory that it may take; None: as much as the host has free.
        num_copies: saves that may be in memory at a time.
    """

    def __init__(self, memories: Memories, *, most_bytes: int | None = None, num_copies: int = 1) -> None:
        self.pool = Pool()
        self._memories = memories
        self._most_bytes = most_bytes
        self._num_copies = num_copies
        self._places: tuple[RankWritePlan, dict[int, _Room]] | None = None
        self._held: HeldStep | None = None

    @property
    def held(self) -> HeldStep | None:
        """The newest checkpoint; None once the next save has taken its memory."""
        held = self._held
        return held if held is not None and held.save is self.pool.held else None

    def begin(self) -> PooledSave:
        """Return memory for a new save. Nothing is held until it is committed."""
        return self.pool.begin()

    def require_room(self, num_bytes: int, topology: Topology) -> None:
        """Require memory for the bytes that this rank writes in each save.

        Raises:
            ConfigurationError: the budget, or the free memory of the host, is smaller.
        """
        neighbours = len(topology.nodes[topology.node_rank])
        room = self._most_bytes
        if room is not None:
            what = f"the {room >> 20} MiB that the memory budget leaves for copies"
        else:
            room = self.pool.num_bytes + psutil.virtual_memory().available // neighbours
            what = f"the {room >> 20} MiB that this host has free for each of its ranks"
        wanted = self._num_copies * num_bytes
        if wanted > room:
            pool, none = (Argument("backend.pool", value, f"KimiEngineBackend(pool={value})") for value in (True, False))
            held = f" keeps what rank {topology.rank} writes in host memory, {wanted / 2**20:.0f} MiB, which is more than "
            more = more_memory() if self._most_bytes is not None else "memory"
            raise ConfigurationError(pool, held, what, ": give it more ", more, ", shard over more ranks, or take ", none)

    def rooms(self, save: PooledSave, write_plan: RankWritePlan, backend: Backend) -> Mapping[int, torch.Tensor]:
        """Item of a plan -> its place in the memory of a save that links nothing; only items without partial chunks of other ranks."""
        if self._places is None or self._places[0] is not write_plan:
            self._places = write_plan, _places_of(write_plan, backend)
        ends: dict[str, int] = {}
        for file, _, stop in self._places[1].values():
            ends[file] = max(stop, ends.get(file, 0))
        for file, end in ends.items():
            save.file(file).make_room(end)
        return {number: save.file(file).room(start, stop) for number, (file, start, stop) in self._places[1].items()}

    def assign(self, folder: Path, rank: int, save: PooledSave) -> None:
        """Have the writer of this rank in a folder keep its bytes in that memory."""
        self._memories.assign(folder, rank, save)

    def keep(self, step: HeldStep) -> None:
        """Hold a save that all ranks have committed."""
        self._held = step
        self.pool.keep(step.save, step.path)

    def drop(self, assigned: tuple[Path, int] | None, save: PooledSave) -> None:
        """Release the memory of a failed save that nothing writes any more. `assigned`: folder and rank of its call of `assign`, if any."""
        if assigned is not None:
            self._memories.take(*assigned)
        self.pool.drop(save)

    def files_of(self, manifest: bytes, topology: Topology) -> HeldFiles:
        """The files that the ranks of this host hold of the checkpoint with this manifest."""
        held = self.held
        if held is None or held.manifest_digest != digest_of(manifest):
            return NOTHING_HELD
        return held.files_on(topology.nodes[topology.node_rank])

    @contextmanager
    def reading(self) -> Iterator[HeldStep | None]:
        """Yield the checkpoint that is held, or None. Saves leave its memory unchanged inside the block."""
        with self.pool.reading() as save:
            held = self._held
            yield held if held is not None and held.save is save else None

    def close(self) -> None:
        """Release all memory."""
        self._held = None
        self.pool.close()


def memories_of(backend: Backend) -> Memories | None:
    """The memory in which a backend keeps saves; None: it keeps none."""
    # Not isinstance: from Python 3.12 on it misses attributes that a wrapper delegates by __getattr__.
    memories: Memories | None = getattr(backend, "memories", None)
    return memories


def copies_of(backend: Backend, saves: SaveSettings) -> int:
    """The most copies of what a rank saves that are in its memory at a time."""
    if memories_of(backend) is None and not saves.is_async:
        return 0
    num_copies = 2 if saves.when_busy == "queue" else 1
    if memories_of(backend) is not None and saves.is_async and saves.incremental:  # the copy that is compared takes other memory
        num_copies *= 2
    return num_copies


def host_cache_of(backend: Backend, saves: SaveSettings, most_bytes: int | None) -> HostCache | None:
    """The cache of saves through a backend; None: no save is kept."""
    memories = memories_of(backend)
    if memories is None:
        return None
    return HostCache(memories, most_bytes=most_bytes, num_copies=copies_of(backend, saves))


def _places_of(write_plan: RankWritePlan, backend: Any) -> dict[int, _Room]:
    """Item of a plan -> its bytes in a file, of items that this rank holds whole."""
    placing: PlacingBackend = backend
    places = placing.places(write_plan.rank, write_plan.expected())
    rooms = {}
    for number, item in enumerate(write_plan.items):
        if isinstance(item, Pack):
            place = places.get((item.path, 0))
        else:
            place = places.get((write_plan.arrays[item.name].path, item.number)) if item.own == (item.box,) else None
        if place is not None:
            rooms[number] = _Room(place[0], place[1], place[1] + write_plan.item_bytes(item))
    return rooms
