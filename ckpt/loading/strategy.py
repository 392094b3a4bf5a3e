"""Interfaces of loading strategies: the boxes a rank wants, a stored checkpoint that locates their chunks, and prepared readings of them.

Tensors that a load converts to another data type are read in batches that share scratch memory, each converted before the next is read
(`batches_of`, `readings_of`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch

from ckpt.backends.base import DATABASE, Backend
from ckpt.backends.registry import backend_of_store
from ckpt.errors import Argument, refused
from ckpt.format.box import Box, overlap, whole
from ckpt.format.consistency import check_whole
from ckpt.format.dtypes import item_bytes
from ckpt.format.manifest import ArrayEntry, CheckpointManifest, Index
from ckpt.format.places import Place
from ckpt.format.records import ArraySpec, ChunkExtent, stored_shape
from ckpt.format.strict_json import refusing
from ckpt.memory.device import Device, telling_of_room, wait_for_all
from ckpt.planning.plan import needed_chunks
from ckpt.ranks.topology import Topology
from ckpt.storage.checkpoint_files import files_below
from ckpt.storage.extents import CheckedBlocks
from ckpt.storage.host_memory import NOTHING_HELD, HeldFiles
from ckpt.storage.stored import files_root, read_index
from ckpt.storage.wanted_bytes import WantedBox


@dataclass(slots=True)  # not frozen: there may be very many, and a frozen one takes three times as long to make
class ReadRequest:
    """One box of one array, and the memory to read it into.

    Attributes:
        name: of the array in the manifest; never an alias.
        label: of the tensor for messages, such as "model: h.0.attn.weight".
        box: in global coordinates.
        out: shape `box.shape`, the stored data type, any device, any strides.
    """

    name: str
    label: str
    box: Box
    out: torch.Tensor


@dataclass(slots=True)  # not frozen: see ReadRequest
class StoredPart:
    """A part of a request that lies in one chunk.

    Attributes:
        chunk: the place of the chunk's bytes.
        part: the bytes that are wanted of them, and their memory.
        array, store, source: the same for the format's own library: `source` is a box of `array`, and has the shape of
            `part.out` or, in a packed array, the 1-D extent of `part.region`.
    """

    chunk: ChunkExtent
    part: WantedBox
    array: ArraySpec
    store: str
    source: Box


class Stored(Protocol):
    """A checkpoint whose arrays lie in chunks, open for reading by one rank.

    Attributes:
        root: the place of its files, to which all paths are relative.
        has_digests: its chunks can be checked.
        held: the files that are in memory of this host, too.
        checked: the blocks that ranks of this host have checked in this load; None: each rank checks what it reads.
    """

    has_digests: bool
    held: HeldFiles
    checked: CheckedBlocks | None

    @property
    def root(self) -> Place: ...

    def parts(self, request: ReadRequest) -> Iterable[StoredPart]:
        """Return the parts of the wanted box, one for each chunk that it meets, in storage order.

        Raises:
            CorruptCheckpointError: chunks are not where they must be.
        """

    def decode(self, stored: StoredPart, box: Box, out: torch.Tensor) -> None:
        """Fill `out` (host, shape box.shape) with a box of the part's array, by its format's own library."""


class StoredCheckpoint:
    """A committed checkpoint, open for reading by one rank. See `Stored`. An index is read, and checked, when first needed.

    Attributes:
        place: of the checkpoint, where its manifest is; `root` is where its files are.
    """

    has_digests = True

    def __init__(
        self,
        root: Place,
        manifest: CheckpointManifest,
        held: HeldFiles = NOTHING_HELD,
        checked: CheckedBlocks | None = None,
    ) -> None:
        self.place = root
        self.root = files_root(root, manifest)
        self.held = held
        self.checked = checked
        self.manifest = manifest
        self._indexes: dict[int, Index] = {}
        self._packed: dict[str, tuple[ArraySpec, ChunkExtent, int]] = {}
        self._regular: set[str] = set()

    def index(self, rank: int) -> Index:
        """The index of a writing rank.

        Raises:
            CorruptCheckpointError: it is missing or not as it was written.
        """
        if rank not in self._indexes:
            self._indexes[rank] = read_index(self.place, self.manifest, rank, self.held)
        return self._indexes[rank]

    def require_chunks(self) -> None:
        """Check, by all indexes, that the stored chunks hold the elements that the manifest claims. Before work in proportion to these.

        Raises:
            CorruptCheckpointError
        """
        for rank in self.manifest.index_ranks():
            self.index(rank)

    def parts(self, request: ReadRequest) -> Iterable[StoredPart]:
        """See `Stored.parts`.

        Raises:
            CorruptCheckpointError: an index is damaged, or does not list what the manifest says.
        """
        entry = self.manifest.arrays[request.name]
        if 0 in request.box.shape:
            return ()
        return self._packed_parts(request, entry) if entry.grid is None else self._own_parts(request, entry)

    def _own_parts(self, request: ReadRequest, entry: ArrayEntry) -> Iterator[StoredPart]:
        """The parts of a box of an array with chunks of its own."""
        assert entry.path is not None and entry.store is not None and entry.grid is not None
        spec = ArraySpec(entry.path, entry.dtype, entry.shape, entry.grid)
        for number, chunk_box, wanted in needed_chunks(entry.shape, entry.grid, request.box):
            rank = entry.writer_of(number)
            chunk = self.index(rank).chunks[entry.path][number]
            out = request.out[wanted.relative_to(request.box).slices]
            region = stored_shape(entry.store, entry.grid, chunk_box.shape)
            part = WantedBox(0, region, wanted.relative_to(chunk_box), out, request.label)
            yield StoredPart(chunk, part, spec, entry.store, wanted)

    def decode(self, stored: StoredPart, box: Box, out: torch.Tensor) -> None:
        """See `Stored.decode`."""
        self.read_encoded(stored.store, stored.array, box, out)

    def read_encoded(self, store: str, array: ArraySpec, box: Box, out: torch.Tensor) -> None:
        """Fill `out` (host, shape box.shape) with a box of an array, by the library of its store, which opens files on its own.

        Raises:
            CorruptCheckpointError: it cannot be read, or a file in the folder that it is read from is no regular one.
        """
        self._require_regular(DATABASE if store == "ocdbt" else array.path.partition("/")[0])
        backend_of_store(store).read(self.root, array, box, out)

    def _require_regular(self, path: str) -> None:
        """Refuse links in a folder, once: a library would follow them out of the checkpoint."""
        if path not in self._regular:
            with files_below(self.root) as folder:
                folder.require_regular_below(path)
            self._regular.add(path)

    def _packed_array(self, index: Index, path: str, dtype: str) -> tuple[ArraySpec, ChunkExtent, int]:
        """A packed array, its one chunk and the bytes of an element; looked up once for all pieces in it."""
        if path not in self._packed:
            spec = ArraySpec(path, dtype, (index.packed[path],), (index.packed[path],))
            self._packed[path] = spec, index.chunks[path][0], item_bytes(dtype)
        return self._packed[path]

    def _packed_parts(self, request: ReadRequest, entry: ArrayEntry) -> list[StoredPart]:
        assert entry.store is not None
        parts = []
        if len(entry.packed_in) > 1:  # in one index they have been checked
            with refusing(str(self.root)):
                check_whole(
                    request.name, entry, [p for rank in entry.packed_in for p in self.index(rank).pieces[request.name]]
                )
        for rank in entry.packed_in:
            index = self.index(rank)
            for packed, _, box, first in index.pieces[request.name]:
                wanted = overlap(box, request.box)
                if wanted is None:
                    continue
                out, inside = request.out, whole(wanted.shape)
                if wanted is not request.box:
                    out = out[wanted.relative_to(request.box).slices]
                if wanted != box:
                    inside = wanted.relative_to(box)
                spec, chunk, item = self._packed_array(index, packed, entry.dtype)
                part = WantedBox(first * item, box.shape, inside, out, request.label)
                source = Box((first,), (box.num_elements,))
                parts.append(StoredPart(chunk, part, spec, entry.store, source))
        return parts


@dataclass(frozen=True, slots=True)
class ReadStats:
    """Bytes that one rank read from storage, and bytes it needed."""

    bytes_read: int
    bytes_needed: int


class Reading(Protocol):
    """The prepared load of one rank: only the bytes are still to be moved."""

    def run(self) -> ReadStats:
        """Fill every request's `out`, once, and close. All ranks call it, inside one phase, also after an earlier reading has failed.

        Raises:
            CorruptCheckpointError: bytes are missing or not as they were written.
            OSError: the file system failed.
            RankLeftError: another rank, which this one needed, has gone.
        """

    def close(self) -> None:
        """Let go of files, sockets and memory; also of a reading that has not run."""


class LoadingStrategy(Protocol):
    """Decides which rank reads which bytes, and how they get to the other ranks."""

    def prepare(
        self,
        requests: Sequence[ReadRequest],
        checkpoint: Stored,
        topology: Topology,
        device: Device,
        *,
        verify: bool,
    ) -> Reading:
        """Plan the read. All ranks call it, outside of a phase, each with its own requests, which may be none."""

    def bind(self, backend: Backend) -> None:
        """Use the transport that a run's backend brings, unless one has been chosen."""

    def close(self) -> None:
        """Let go of what is kept from load to load. No load is under way."""


def bytes_of(requests: Sequence[ReadRequest]) -> int:
    """The bytes that requests want."""
    return sum([request.out.nbytes for request in requests])


def by_chunk(requests: Sequence[ReadRequest], checkpoint: Stored) -> list[list[StoredPart]]:
    """The parts of all requests, grouped by chunk, the chunks in storage order."""
    groups: dict[tuple[str, int], list[StoredPart]] = defaultdict(list)
    last: ChunkExtent | None = None
    here: list[StoredPart] = []
    for request in requests:
        for part in checkpoint.parts(request):
            if part.chunk is not last:
                last = part.chunk
                here = groups[last.file, last.offset]
            here.append(part)
    return [groups[at] for at in sorted(groups)]


SCRATCH_BYTES = 64 << 20
"""Of a batch; more where a component would have more than `MOST_BATCHES`, each of which is a reading of its own."""
MOST_BATCHES = 16
_ALIGNED = 64

Components = bool | Collection[str]
"""Which components a load may convert: True: all, but optimizers keep the data types of their state; or the keys of those."""


class Cast(NamedTuple):
    """A box to read, and to convert into memory of another data type.

    Attributes:
        request: `out` is the memory to convert into.
        dtype: that was saved.
    """

    request: ReadRequest
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """As it was saved."""
        return self.request.out.numel() * self.dtype.itemsize


CAST = Argument("load.cast", True)
"""The advice to convert."""


def check_cast(cast: object, components: Collection[str]) -> None:
    """Check the argument `cast` of a load.

    Raises:
        ConfigurationError: it is neither a truth value nor keys of components.
    """
    if isinstance(cast, bool):
        return
    if isinstance(cast, str) or not isinstance(cast, Collection) or not all(key in components for key in cast):
        raise refused("load.cast", cast, f"True, False, or keys of components, which are {', '.join(components)}")


def batches_of(casts: Sequence[Cast]) -> list[list[Cast]]:
    """Divide what is to be converted into batches, the boxes of large tensors by rows. Of one rank: others may have more."""
    limit = max(SCRATCH_BYTES, -(-sum(cast.num_bytes for cast in casts) // MOST_BATCHES))
    batches: list[list[Cast]] = []
    left = 0
    for piece in (piece for cast in casts for piece in _by_rows(cast, limit)):
        if not batches or piece.num_bytes > left:
            batches.append([])
            left = limit
        batches[-1].append(piece)
        left -= piece.num_bytes + _ALIGNED
    return batches


def readings_of(batches: Sequence[Sequence[Cast]]) -> list[tuple[list[ReadRequest], Callable[[], None]]]:
    """Return the requests of each batch, into scratch memory, and what converts them when they are filled.

    Raises:
        DeviceMemoryError: a device has no room for a batch.
    """
    sizes: dict[torch.device, int] = {}
    for batch in batches:
        for device in {cast.request.out.device for cast in batch}:
            here = sum(cast.num_bytes + _ALIGNED for cast in batch if cast.request.out.device == device)
            sizes[device] = max(sizes.get(device, 0), here)
    scratch = {}
    for device, num_bytes in sizes.items():
        with telling_of_room(device, num_bytes):
            scratch[device] = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    return [_reading_of(batch, scratch) for batch in batches]


def _reading_of(batch: Sequence[Cast], scratch: dict[torch.device, torch.Tensor]) -> tuple[list[ReadRequest], Callable[[], None]]:
    begins = dict.fromkeys(scratch, 0)
    requests = []
    for request, dtype in batch:
        begin = begins[request.out.device]
        end = begin + request.out.numel() * dtype.itemsize
        begins[request.out.device] = -(-end // _ALIGNED) * _ALIGNED
        memory = scratch[request.out.device][begin:end].view(dtype).view(request.out.shape)
        requests.append(replace(request, out=memory))

    def convert() -> None:
        convert_into((cast.request.out for cast in batch), (request.out for request in requests))

    return requests, convert


@torch.no_grad()
def convert_into(outs: Iterable[torch.Tensor], read: Iterable[torch.Tensor]) -> None:
    """Copy tensors into others, which may have other data types, and wait for it."""
    outs = list(outs)
    for out, tensor in zip(outs, read, strict=True):
        if out is not tensor:
            out.copy_(tensor)
    wait_for_all(outs)


def _by_rows(cast: Cast, limit: int) -> Iterator[Cast]:
    """Cut a box along its first axis into pieces of at most `limit` bytes, or of one row."""
    request, box = cast.request, cast.request.box
    if cast.num_bytes <= limit or not box.shape:
        yield cast
        return
    rows = max(1, limit * box.shape[0] // cast.num_bytes)
    for begin in range(0, box.shape[0], rows):
        out = request.out[begin : begin + rows]
        piece = Box((box.offsets[0] + begin, *box.offsets[1:]), tuple(out.shape))
        yield Cast(replace(request, box=piece, out=out), cast.dtype)
