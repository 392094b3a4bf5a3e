"""A checkpoint of another program: its tensors are raw bytes at known places in files, or read by a library. Any rank, alone.

Loads do not know other programs by name: who knows them registers what finds and opens their checkpoints (`register`).
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch

from ckpt.errors import CheckpointError, CorruptCheckpointError, StorageError, sentence
from ckpt.format.box import Box, first_overlap, overlap, whole
from ckpt.format.dtypes import item_bytes, torch_dtype
from ckpt.format.export_records import ExportRecords
from ckpt.format.places import Place
from ckpt.format.records import ArraySpec, ChunkExtent
from ckpt.format.unknown import shown
from ckpt.loading.sources import CheckpointSource
from ckpt.loading.strategy import LoadingStrategy, ReadRequest, StoredPart
from ckpt.memory.device import Device
from ckpt.planning.plan import needed_chunks
from ckpt.ranks.topology import Topology
from ckpt.state.flatten import Path as StatePath
from ckpt.storage.checkpoint_files import Files, files_below
from ckpt.storage.extents import CheckedBlocks
from ckpt.storage.host_memory import NOTHING_HELD
from ckpt.storage.wanted_bytes import WantedBox

MAP_FROM_BYTES = 64 << 10
_ALIGNED_BYTES = 16
"""A multiple of every element's size."""
_NO_ARRAY = ArraySpec("", "", (), ())
"""In the place of the array of a part whose bytes are raw: no library decodes it."""
_MOST_DEPTH = 128
_CHUNK_BITS = 36
"""A tensor has fewer chunks than 2^36, and a checkpoint fewer tensors than 2^26."""


@dataclass(slots=True)  # not frozen: see ReadRequest
class FilePiece:
    """A part of a tensor that lies in one file.

    Attributes:
        box: in global coordinates.
        file: path below the checkpoint.
        offset: of the first byte of its elements, row-major and little-endian.
        stored: shape of what lies there, of which the piece is the beginning along each axis; None: the piece alone.
    """

    box: Box
    file: str
    offset: int
    stored: tuple[int, ...] | None = None

    def __call__(self) -> list[FilePiece]:
        """See `OtherTensor.pieces`."""
        return [self]


@dataclass(frozen=True, slots=True)
class Encoded:
    """A tensor whose bytes do not lie raw in a file.

    Attributes:
        file: path below the checkpoint of a file that it needs.
        grid: shape of a chunk, in elements; it is decoded whole by two-stage loads.
        read: fills a host tensor of shape `box.shape`, with any strides, with a box of the tensor.
        extent: where the chunk of a number lies, if each has a file of its own, which need not be encoded; None: it is not known.
    """

    file: str
    grid: tuple[int, ...]
    read: Callable[[Box, torch.Tensor], None]
    extent: Callable[[int], ChunkExtent] | None = None

    def __call__(self) -> Encoded:
        """See `OtherTensor.pieces`."""
        return self


@dataclass(slots=True)  # not frozen: see ReadRequest
class OtherTensor:
    """A tensor of the checkpoint.

    Attributes:
        path: steps from the whole state dict to it.
        dtype: a Zarr v3 data type name.
        pieces: finds its pieces; called once, when they are first read. They tile the tensor, or the checkpoint is damaged. It may
            be the one piece itself.
        memory: equal for tensors that are one, as tied weights are; None: it is not known.
        kind: what it is beside its values, as the last step of a path (`ckpt.state.tensor_classes`); None: nothing.
    """

    path: StatePath
    dtype: str
    shape: tuple[int, ...]
    pieces: Callable[[], list[FilePiece] | Encoded]
    memory: Hashable = None
    kind: tuple[str, str] | None = None


def given(value: Any) -> Callable[[], Any]:
    """Return a function that returns a value, see `OtherCheckpoint.values`."""
    return lambda: value


@contextmanager
def refusing(where: Place, program: str) -> Iterator[None]:
    """Turn errors of reading what a program should have written into a `CorruptCheckpointError`."""
    try:
        yield
    except CheckpointError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        raise CorruptCheckpointError(f"{where} is not what {program} writes: {type(error).__name__} {shown(error.args)}") from None


@contextmanager
def folder_with(root: Place, file: str) -> Iterator[Files]:
    """Open a checkpoint's folder, for one of its files.

    Raises:
        CorruptCheckpointError: the file is missing.
    """
    try:
        with files_below(root) as folder:
            yield folder
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CorruptCheckpointError(f"{root / file} is missing", file=file) from error


class OtherCheckpoint:
    """See `ckpt.loading.strategy.Stored`. Its bytes have no digests: only what is missing is found.

    Args:
        root: its folder.
        tensors: name -> tensor, in the same order on all ranks.
        values: path -> a function that returns the plain value there.
        paths: of all tensors and values, and of what is unread, in the order of the state dict; (): it has none.
        named_by: a folder whose name ends in the step; None: the path that was given to open it.
        described_in: the file below `root` that describes the values, if some hold tensors.
        unread: path -> why a tensor there cannot be loaded. Those among `tensors`, too, are their bytes alone.

    Attributes:
        program: that wrote it, for messages.
        has_order: whether entries have an order that a program chose.
        records: of the checkpoint of ours that it was made of; None: it was made of none, or changed since.

    Raises:
        CorruptCheckpointError: a path has more steps than any state dict.
    """

    program = ""
    has_digests = False
    held = NOTHING_HELD
    checked: CheckedBlocks | None = None
    records: ExportRecords | None = None

    def __init__(
        self,
        root: Place,
        tensors: Mapping[str, OtherTensor],
        values: Mapping[StatePath, Callable[[], Any]],
        *,
        paths: Sequence[StatePath] = (),
        named_by: Place | None = None,
        described_in: str = "",
        unread: Mapping[StatePath, str] = MappingProxyType({}),
    ) -> None:
        self.has_order = bool(paths)
        self.paths = paths or [*(tensor.path for tensor in tensors.values()), *values, *unread]
        if max(map(len, self.paths), default=0) > _MOST_DEPTH:
            raise CorruptCheckpointError(f"{root} holds a value that is nested deeper than {_MOST_DEPTH} containers")
        self.root = root
        self.named_by = named_by
        self.described_in = described_in
        self.tensors = dict(tensors)
        self.values = values
        self.unread = unread
        self._pieces: dict[str, list[FilePiece] | Encoded] = {}
        self._maps: dict[str, mmap.mmap | bytearray] = {}
        self._chunks: dict[tuple[str, int], ChunkExtent] = {}
        self._encoded: dict[tuple[str, int], ChunkExtent] = {}

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.tensors)}

    def parts(self, request: ReadRequest) -> Iterable[StoredPart]:
        """See `Stored.parts`.

        Raises:
            CorruptCheckpointError: the pieces do not tile the box.
        """
        piece, box, out = self.tensors[request.name].pieces, request.box, request.out
        if type(piece) is FilePiece and piece.box == box and out.nbytes:  # a fast path, for many small tensors
            chunk = self._chunk_around(piece.file, piece.offset, out.nbytes)
            part = WantedBox(piece.offset - chunk.offset, box.shape, whole(box.shape), out, request.label)
            return (StoredPart(chunk, part, _NO_ARRAY, "raw", box),)
        pieces = self._pieces_of(request.name)
        return self._encoded_parts(request, pieces) if isinstance(pieces, Encoded) else self._raw_parts(request, pieces)

    def hold(self, name: str, path: StatePath, tensor: torch.Tensor) -> None:
        """Add a tensor that a value holds, and that has been read with it. All ranks that read it add the same, in the same order."""

        def read(box: Box, out: torch.Tensor) -> None:
            out.copy_(tensor.detach()[box.slices])

        encoded = Encoded(self.described_in, tuple(max(1, side) for side in tensor.shape), read)
        shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        self._numbers[name] = len(self._numbers)
        self.tensors[name] = OtherTensor(path, dtype, shape, encoded)

    def mapped(self, name: str) -> list[tuple[Box, torch.Tensor]]:
        """Return a tensor's pieces as views of their files, at any alignment; one that is not raw, or empty, whole and in memory.

        It lies in a folder. Views are private mappings: writes to them do not reach the files. They are valid until
        somebody else changes the files.

        Raises:
            CorruptCheckpointError: a file is missing or too short, or pieces overlap.
            StorageError: a file cannot be mapped.
        """
        tensor, pieces = self.tensors[name], self._pieces_of(name)
        if isinstance(pieces, Encoded) or 0 in tensor.shape:
            values = torch.empty(tensor.shape, dtype=torch_dtype(tensor.dtype), device="cpu")
            if isinstance(pieces, Encoded):
                pieces.read(whole(tensor.shape), values)
            return [(whole(tensor.shape), values)]
        return [(piece.box, self._view(piece, torch_dtype(tensor.dtype))) for piece in pieces if piece.box.num_elements]

    def _view(self, piece: FilePiece, dtype: torch.dtype) -> torch.Tensor:
        """A piece in memory. Small files are read instead of mapped: Linux limits the mapped files of a process (65,530 by default)."""
        file, stored = piece.file, piece.stored or piece.box.shape
        self._chunk_around(file, piece.offset, math.prod(stored) * dtype.itemsize)
        if file not in self._maps:
            with folder_with(self.root, file) as folder, folder.stream(file) as stream:
                try:
                    is_small = os.fstat(stream.fileno()).st_size < MAP_FROM_BYTES
                    mapped = bytearray(stream.read()) if is_small else mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
                except OSError as error:
                    raise StorageError(
                        f"{self.root / file} cannot be mapped: {sentence(error)}. Linux lets a process map vm.max_map_count files."
                    ) from error
                self._maps[file] = mapped
        flat = torch.frombuffer(self._maps[file], dtype=dtype, count=math.prod(stored), offset=piece.offset)
        return flat.view(stored)[tuple(slice(0, side) for side in piece.box.shape)]

    def _raw_parts(self, request: ReadRequest, pieces: Sequence[FilePiece]) -> Iterator[StoredPart]:
        tensor = self.tensors[request.name]
        num_found = 0
        for piece in pieces:
            wanted = overlap(piece.box, request.box)
            if wanted is None:
                continue
            num_found += wanted.num_elements
            out = request.out if wanted == request.box else request.out[wanted.relative_to(request.box).slices]
            inside = whole(wanted.shape) if wanted == piece.box else wanted.relative_to(piece.box)
            chunk = self._chunk_around(piece.file, piece.offset, piece.box.num_elements * item_bytes(tensor.dtype))
            part = WantedBox(piece.offset - chunk.offset, piece.box.shape, inside, out, request.label)
            yield StoredPart(chunk, part, _NO_ARRAY, "raw", wanted)
        if num_found != request.box.num_elements:
            raise CorruptCheckpointError(
                f"{request.label}: the pieces in {self.root} hold {num_found} of the {request.box.num_elements} elements of {request.box}"
            )

    def _encoded_parts(self, request: ReadRequest, encoded: Encoded) -> Iterator[StoredPart]:
        tensor = self.tensors[request.name]
        spec = ArraySpec(request.name, tensor.dtype, tensor.shape, encoded.grid)
        for number, chunk_box, wanted in needed_chunks(tensor.shape, encoded.grid, request.box):
            if encoded.extent is not None:
                chunk = encoded.extent(number)
            else:  # no bytes are read by their place: a negative one, the same on all ranks, tells it from all other chunks of the file
                place = -1 - (self._numbers[request.name] << _CHUNK_BITS) - number
                new = ChunkExtent(encoded.file, place, 0, (), raw=False)
                chunk = self._encoded.setdefault((request.name, number), new)
            out = request.out[wanted.relative_to(request.box).slices]
            part = WantedBox(0, encoded.grid, wanted.relative_to(chunk_box), out, request.label)
            yield StoredPart(chunk, part, spec, "encoded", wanted)

    def decode(self, stored: StoredPart, box: Box, out: torch.Tensor) -> None:
        """See `Stored.decode`."""
        encoded = self._pieces_of(stored.array.path)
        assert isinstance(encoded, Encoded), "raw chunks are not decoded"
        encoded.read(box, out)

    def _chunk_around(self, file: str, offset: int, num_bytes: int) -> ChunkExtent:
        """Take as a chunk all of the file in which elements are aligned like this piece: neighbours are read at once.

        Raises:
            CorruptCheckpointError: the file is missing, or too short.
        """
        at = file, offset % _ALIGNED_BYTES
        chunk = self._chunks.get(at)
        if chunk is None:
            with folder_with(self.root, file) as folder:
                size = folder.size(file)
            chunk = self._chunks[at] = ChunkExtent(*at, max(0, size - at[1]), ())
        if offset + num_bytes > chunk.offset + chunk.length:
            raise CorruptCheckpointError(f"{self.root / file} was cut off", file=file)
        return chunk

    def _pieces_of(self, name: str) -> list[FilePiece] | Encoded:
        pieces = self._pieces.get(name)
        if pieces is None:
            pieces = self.tensors[name].pieces()
            if (
                isinstance(pieces, list)
                and len(pieces) > 1
                and (meeting := first_overlap([piece.box for piece in pieces]))
            ):
                raise CorruptCheckpointError(
                    f"{self.root}: of {name} two pieces overlap: {meeting[0]} and {meeting[1]}"
                )
            self._pieces[name] = pieces
        return pieces


class Opening(NamedTuple):
    """How a load opens a checkpoint.

    Attributes:
        is_state_alone: the load is of one state dict, not of components.
    """

    strategy: LoadingStrategy
    device: Device
    allow_pickle: bool
    is_state_alone: bool


class Programs(Protocol):
    """What a load asks of the formats of other programs."""

    def found_at(self, path: Place, *, allow_pickle: bool) -> Any:
        """What is at a path, as JSON that the lead tells all ranks; None: there is a checkpoint of this package, or none that is known.

        Raises:
            CheckpointNotFoundError: it holds pickles, and these are not allowed.
        """

    def opened(self, path: Place, found: Any, topology: Topology, opening: Opening) -> CheckpointSource:
        """Open what the lead has found, on every rank. Collective.

        Raises:
            CheckpointNotFoundError: as `found_at`.
            CorruptCheckpointError: what describes it is damaged.
        """

    def advice(self, path: Place) -> str | None:
        """A sentence about a path without a checkpoint that is read: what is there, and what to do; None: no more is known."""


_KNOWN: list[Programs] = []


def register(programs: Programs) -> None:
    """Register what knows other programs, in this process. Replaces an earlier registration."""
    _KNOWN[:] = [programs]


def programs() -> Programs:
    """What is registered: by `ckpt.interop.registry.register_programs`, before a path is loaded that may be of another program."""
    assert _KNOWN, "nobody has called ckpt.interop.registry.register_programs()"
    return _KNOWN[0]
