"""Read raw chunks from (file, offset, length) straight into tensors, and check digests while the bytes are in the cache.

One reader serves the raw chunks of every backend. It reads each block of a chunk once, however many parts need it: bytes that are
contiguous in the file and in the tensor are read there by `preadv`, all others through one small scratch buffer.

    parts -> spans (no large gap inside) -> slabs (whole blocks, 8 MiB) -> preadv -> digest -> strided copies

Bytes of a chunk that come another way, such as from another rank, are put in place by `WantedBytes`.
"""

from __future__ import annotations

import math
import os
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import torch

from ckpt.errors import CorruptCheckpointError
from ckpt.format.blocks import BlockDigests
from ckpt.format.box import Box, flat_boxes, overlap, whole
from ckpt.format.checkpoint_files import CheckpointFolder
from ckpt.format.dtypes import bits_of, raw_bytes
from ckpt.format.gc_pause import gc_paused
from ckpt.format.held import NOTHING_HELD, HeldFiles
from ckpt.format.records import ChunkExtent
from ckpt.storage.runs import TensorRun, find_runs

SLAB_BYTES = 8 << 20
"""Default bytes per read, and size of the scratch buffer (larger only where one block of a chunk is)."""

HOT_BYTES = 1 << 20
"""Bytes per read of `fetch`, at least a block: still in the processor's cache when they are digested."""

DIRECT_BYTES = 256 << 10
"""Runs of a part from this size on are read into the tensor itself; smaller ones are cheaper to copy. A part that is one run is
always read into the tensor."""

GAP_BYTES = 1 << 20
"""Gaps between wanted bytes from this size on are skipped."""

MAX_OPEN_FILES = 64
ALIGNMENT = 16
"""Slabs start at multiples of the largest element size, so that no element is split."""

_Array = np.ndarray[Any, Any]


@dataclass(slots=True)
class WantedBox:
    """A wanted box of one chunk, and its destination.

    Attributes:
        base: byte in the chunk where the region begins.
        region: shape of the row-major region at `base`: of the chunk as stored, or of a packed piece.
        box: wanted part, in the region's coordinates.
        out: tensor of shape `box.shape` and the stored data type, with any strides.
        name: for errors, such as "model: h.0.attn.weight".
    """

    base: int
    region: tuple[int, ...]
    box: Box
    out: torch.Tensor
    name: str


@dataclass(slots=True)
class _Span:
    """A range [start, stop) of the chunk, in bytes, that holds `box` of a part's region.

    `memory` is the destination of these bytes if they are contiguous there, too, else None. `out` is the part's `out` for that box: a
    NumPy array on the host, a tensor on a device.
    """

    start: int
    stop: int
    part: WantedBox
    box: Box
    out: Any
    memory: memoryview | torch.Tensor | None


def _nothing(num_bytes: int) -> None:
    """Default `progress`."""


ReadAt = Callable[[int, Sequence[memoryview], int], int]
"""A function like `os.preadv`: fills buffers in turn from an offset of an open file; returns the number of bytes."""


class WantedBytes:
    """The parts of one chunk that one rank wants; puts any range of the chunk's bytes in place.

    Args:
        chunk: with the `length` of the delivered bytes: decoded, if the chunk is encoded.

    Raises:
        CorruptCheckpointError: a part does not lie in the chunk.
    """

    def __init__(self, chunk: ChunkExtent, parts: Sequence[WantedBox]) -> None:
        self._length = chunk.length
        self._spans = _spans_in(chunk, parts)
        self._by_device: dict[torch.device, list[_Span | TensorRun]] = defaultdict(list)
        for span in self._spans:
            self._by_device[span.part.out.device].append(span)

    @property
    def devices(self) -> Collection[torch.device]:
        """Devices of the wanted parts."""
        return self._by_device.keys()

    def stretches(self, unit: int) -> list[tuple[int, int]]:
        """Return ascending ranges [start, stop) that hold all parts, in whole units but at the end of the chunk."""
        return list(_stretches(self._spans, self._length, unit)) if self._spans else []

    def name_of(self, begin: int, end: int) -> str:
        """Return the name of the first part that wants some of the bytes [begin, end)."""
        return _name_of(self._spans, begin, end)

    def wants(self, start: int, stop: int, device: torch.device) -> bool:
        """Whether a part on this device wants some of the bytes [start, stop)."""
        return bool(self._here(start, stop, device))

    def lies_in_order(self, start: int, stop: int, device: torch.device) -> bool:
        """Whether all parts on this device want contiguous ranges of the bytes [start, stop), so that plain copies suffice."""
        return all(span.memory is not None for span in self._here(start, stop, device))

    def place(self, start: int, stop: int, memory: torch.Tensor, device: torch.device | None = None) -> None:
        """Copy the chunk's bytes [start, stop) to the parts that want them.

        Copies to a device are queued on its current stream; unless `lies_in_order`, `memory` must be on that device. For parts on the
        host `memory` must be on the host.

        Args:
            memory: these bytes: 1-D uint8, aligned to an element.
            device: fill its parts only; None: all parts.
        """
        host: Any = memory.numpy() if _is_on_host(memory) else None
        for span in self._here(start, stop, device):
            if isinstance(span, TensorRun):
                span.place(start, stop, memory)
                continue
            first, last = max(span.start, start), min(span.stop, stop)
            if isinstance(span.memory, torch.Tensor):
                there = span.memory[first - span.start : last - span.start]
                there.copy_(memory[first - start : last - start], non_blocking=True)
            elif isinstance(span.out, torch.Tensor):
                _scatter_on_device(span, memory, start, stop)
            elif span.memory is not None:
                into = np.frombuffer(span.memory, np.uint8)
                into[first - span.start : last - span.start] = host[first - start : last - start]
            else:
                _scatter(span, host, start, stop)

    def _here(self, start: int, stop: int, device: torch.device | None) -> list[_Span | TensorRun]:
        spans = self._spans if device is None else self._by_device[device]
        return [span for span in spans if span.start < stop and span.stop > start]


class Landing(Protocol):
    """Copies bytes that were read to tensors on devices. See `ckpt.memory.copies.Filling`."""

    def take(self, num_bytes: int) -> torch.Tensor:
        """Return host memory to read into."""

    def place(self, wanted: WantedBytes, start: int, stop: int, memory: torch.Tensor) -> None:
        """Copy the bytes [start, stop) of a chunk from `memory` to the parts that want them."""


class ExtentReader:
    """Reads raw chunks of one checkpoint, for one rank and one load. A context manager: it keeps files open.

    Args:
        root: the checkpoint folder, to which extents are relative.
        verify: read whole blocks and compare their digests; if not, read little more than what is wanted.
        progress: called with a number of bytes as they arrive.
        read_at: reads an open file, as `os.preadv` does.
        slab_bytes: bytes per read; None: `SLAB_BYTES`.
        landing: copies bytes to tensors on devices; None: all tensors are on the host.
        held: files in memory, which are not read from the folder.

    Attributes:
        bytes_read: bytes read from the file system so far, without those from memory.
    """

    def __init__(
        self,
        root: Path,
        *,
        verify: bool = True,
        progress: Callable[[int], None] = _nothing,
        read_at: ReadAt = os.preadv,
        slab_bytes: int | None = None,
        landing: Landing | None = None,
        held: HeldFiles = NOTHING_HELD,
    ) -> None:
        self._held = held
        self._slab_bytes = slab_bytes or SLAB_BYTES
        self._landing = landing
        self.bytes_read = 0
        self._read_at = read_at
        self._root = root
        self._folder = CheckpointFolder(root)
        self._verify = verify
        self._progress = progress
        self._files: OrderedDict[str, int] = OrderedDict()
        self._scratch = np.empty(0, np.uint8)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files and free the scratch buffer."""
        while self._files:
            os.close(self._files.popitem()[1])
        self._folder.close()
        self._scratch = np.empty(0, np.uint8)

    def read(
        self, chunk: ChunkExtent, parts: Sequence[WantedBox], stretches: Sequence[tuple[int, int]] | None = None
    ) -> None:
        """Fill the `out` of every part. Parts may overlap, in the chunk but not in memory.

        Args:
            stretches: some of the ranges that `WantedBytes.stretches(unit_of(chunk))` returns: read only these; None: read all.

        Raises:
            CorruptCheckpointError: the file is missing or too short, a block does not match its digest, or a part lies outside of
                the chunk. Some parts may have been filled.
            OSError: another failure of the file system; it names the file.
        """
        assert chunk.raw, "an encoded chunk is read by its backend"
        self._or_disk(chunk, lambda: self._read(chunk, parts, stretches))

    def _read(
        self, chunk: ChunkExtent, parts: Sequence[WantedBox], stretches: Sequence[tuple[int, int]] | None
    ) -> None:
        if not all(_is_on_host(part.out) for part in parts):
            self._read_for_devices(chunk, parts, stretches)
            return
        spans = _spans_in(chunk, parts)
        if not spans:
            return
        _read_shared_bytes_once(spans)
        if stretches is None:
            stretches = list(_stretches(spans, chunk.length, self.unit_of(chunk)))
        self._sweep(chunk, spans, stretches)

    def unit_of(self, chunk: ChunkExtent) -> int:
        """Return the granularity of reads of a chunk, in bytes: a block under one digest, if digests are checked."""
        return chunk.block_bytes if self._verify else ALIGNMENT

    def fetch(self, chunk: ChunkExtent, start: int, memory: memoryview, name_of: Callable[[int, int], str]) -> None:
        """Read and check whole units of a chunk into intermediate memory.

        Args:
            start: the first byte, a multiple of the unit.
            memory: for the bytes, of their length.
            name_of: returns the name of the part that wants bytes [begin, end) of the chunk, for errors.

        Raises:
            CorruptCheckpointError, OSError: as for `read`.
        """
        assert chunk.raw and start % self.unit_of(chunk) == 0
        self._or_disk(chunk, lambda: self._fetch(chunk, start, memory, name_of))

    def _or_disk(self, chunk: ChunkExtent, read: Callable[[], None]) -> None:
        """Read; if the file's memory proves damaged, read once more from the disk."""

        def attempt() -> None:
            try:
                read()
            except BaseException:
                if chunk.file in self._files:
                    os.close(self._files.pop(chunk.file))
                raise

        self._held.or_disk(chunk.file, attempt)

    def _fetch(self, chunk: ChunkExtent, start: int, memory: memoryview, name_of: Callable[[int, int], str]) -> None:
        name = name_of(start, start + len(memory))
        fd = self._open(chunk.file, name)
        step = -(-HOT_BYTES // chunk.block_bytes) * chunk.block_bytes
        for at in range(0, len(memory), step):
            piece = memory[at : at + step]
            self._fill(fd, chunk, start + at, [piece], name)
            if self._verify:
                self._check_blocks(chunk, start + at, [piece], name_of)
            self._progress(len(piece))

    def _read_for_devices(
        self, chunk: ChunkExtent, parts: Sequence[WantedBox], stretches: Sequence[tuple[int, int]] | None
    ) -> None:
        """Read for tensors on devices, through host memory: one slab is copied while the next one is read."""
        assert self._landing is not None, "a reader without a landing fills host tensors alone"
        wanted = WantedBytes(chunk, parts)
        unit = self.unit_of(chunk)
        for start, stop in _slabs(wanted.stretches(unit) if stretches is None else stretches, unit, self._slab_bytes):
            memory = self._landing.take(stop - start)
            self._fetch(chunk, start, _memory(memory.numpy()), wanted.name_of)
            self._landing.place(wanted, start, stop, memory)

    def check(self, chunk: ChunkExtent, name: str) -> None:
        """Check the digests of a whole chunk: of an encoded one, before its backend decodes it.

        Without `verify` only check that the file is long enough, by reading its last byte.

        Raises:
            CorruptCheckpointError: as for `read`.
        """
        self._or_disk(chunk, lambda: self._check(chunk, name))

    def _check(self, chunk: ChunkExtent, name: str) -> None:
        fd = self._open(chunk.file, name)
        step = max(self._slab_bytes // chunk.block_bytes, 1) * chunk.block_bytes
        for start in range(0 if self._verify else max(chunk.length - 1, 0), chunk.length, step):
            stop = min(start + step, chunk.length)
            pieces = self._pieces(start, stop, ())
            self._fill(fd, chunk, start, pieces, name)
            if self._verify:
                self._check_blocks(chunk, start, pieces, lambda begin, end: name)
            self._progress(stop - start)

    def _sweep(
        self, chunk: ChunkExtent, spans: Sequence[_Span | TensorRun], stretches: Sequence[tuple[int, int]]
    ) -> None:
        """Read the slabs of some ranges, in ascending order, each for the spans that overlap it."""
        fd = self._open(chunk.file, spans[0].part.name)
        active: list[_Span | TensorRun] = []
        coming = 0
        for start, stop in _slabs(stretches, self.unit_of(chunk), self._slab_bytes):
            while coming < len(spans) and spans[coming].start < stop:
                active.append(spans[coming])
                coming += 1
            active = [span for span in active if span.stop > start]
            pieces = self._pieces(start, stop, active)
            self._fill(fd, chunk, start, pieces, (active or spans)[0].part.name)
            if self._verify:
                self._check_blocks(chunk, start, pieces, partial(_name_of, active or spans))
            for span in active:
                if isinstance(span, TensorRun):
                    span.place(start, stop, torch.from_numpy(self._scratch[: stop - start]))
                elif span.memory is None:
                    _scatter(span, self._scratch, start, stop)
            self._progress(stop - start)

    def _pieces(self, start: int, stop: int, active: Sequence[_Span | TensorRun]) -> list[memoryview]:
        """Return memory for the bytes [start, stop): the tensors' own where it is contiguous, scratch in between."""
        scratch = _memory(self._scratch_of(stop - start))
        pieces = []
        at = start
        for span in active:
            if not isinstance(span.memory, memoryview):
                continue
            first, last = max(span.start, start), min(span.stop, stop)
            if at < first:
                pieces.append(scratch[at - start : first - start])
            pieces.append(span.memory[first - span.start : last - span.start])
            at = last
        if at < stop:
            pieces.append(scratch[at - start : stop - start])
        return pieces

    def _scratch_of(self, num_bytes: int) -> _Array:
        if len(self._scratch) < num_bytes:
            # torch aligns memory to 64 bytes. NumPy's begins 16 bytes past a page, where Linux copies half as fast.
            self._scratch = torch.empty(max(num_bytes, self._slab_bytes), dtype=torch.uint8).numpy()
        return self._scratch[:num_bytes]

    def _fill(self, fd: int, chunk: ChunkExtent, start: int, pieces: Sequence[memoryview], name: str) -> None:
        """Fill all of `pieces` with the chunk's bytes from `start` on."""
        path = self._root / chunk.file
        at = chunk.offset + start
        missing = list(pieces)
        is_held = chunk.file in self._held
        read_at = self._held.read_at(chunk.file) if is_held else self._read_at
        while missing:
            try:
                got = read_at(fd, missing[:1024], at)
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(path)) from error
            if got == 0:
                raise CorruptCheckpointError(
                    f"{name}: {path} ends at byte {at}, where bytes {chunk.offset} to {chunk.offset + chunk.length} "
                    "were saved. Load an earlier checkpoint.",
                    file=chunk.file,
                )
            at += got
            self.bytes_read += 0 if is_held else got
            missing = _after(missing, got)

    def _check_blocks(
        self, chunk: ChunkExtent, start: int, pieces: Sequence[memoryview], name_of: Callable[[int, int], str]
    ) -> None:
        """Compare the digests of the blocks in `pieces`, which begin at byte `start` of the chunk."""
        stream = BlockDigests(chunk.block_bytes)
        for piece in pieces:
            stream.update(piece)
        for number, found in enumerate(stream.close(), start // chunk.block_bytes):
            if found != chunk.digests[number]:
                begin = number * chunk.block_bytes
                end = min(begin + chunk.block_bytes, chunk.length)
                raise CorruptCheckpointError(
                    f"{name_of(begin, end)}: bytes {chunk.offset + begin} to {chunk.offset + end} of "
                    f"{self._root / chunk.file} are not those that were saved. Load an earlier checkpoint.",
                    file=chunk.file,
                )

    def _open(self, file: str, name: str) -> int:
        """Return a descriptor of `file`, kept open while it is among the last `MAX_OPEN_FILES` used."""
        if file in self._files:
            self._files.move_to_end(file)
            return self._files[file]
        try:
            fd = self._held.open(file)
            if fd is None:
                fd = self._folder.open(file)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise CorruptCheckpointError(
                f"{name}: {self._root / file} is missing. Load an earlier checkpoint.", file=file
            ) from error
        except CorruptCheckpointError as error:
            raise CorruptCheckpointError(f"{name}: {error}", file=file) from error
        if len(self._files) >= MAX_OPEN_FILES:
            os.close(self._files.popitem(last=False)[1])
        self._files[file] = fd
        return fd


@gc_paused()
def _spans_in(chunk: ChunkExtent, parts: Sequence[WantedBox]) -> list[_Span | TensorRun]:
    """Return the spans of all parts, in the order of the chunk. Runs of small adjacent parts are one span."""
    runs, others = find_runs(parts)
    spans: list[_Span | TensorRun] = []
    for run in runs:
        if run.start < 0 or run.stop > chunk.length or run.start % run.part.out.element_size():
            others += run.parts  # `_check_part` refuses one of them
        else:
            spans.append(run)
    spans += [span for part in others for span in _spans_of(part, chunk)]
    return sorted(spans, key=lambda span: span.start)


def _spans_of(part: WantedBox, chunk: ChunkExtent) -> Iterator[_Span]:
    """Cut a part into spans: one for each long run that can be read in place, else one between any two large gaps."""
    item_bytes = part.out.element_size()
    _check_part(part, chunk, item_bytes)
    if part.out.numel() == 0:
        return
    strides = [stride * item_bytes for stride in _row_major(part.region)]
    if not _is_on_host(part.out):
        span = _one_span(part, part.box, part.out.detach(), strides, item_bytes)
        if span.stop - span.start == part.out.nbytes and part.out.is_contiguous():
            span.memory = raw_bytes(part.out)
        yield span
        return
    out = bits_of(part.out)
    if part.box.shape == part.region and out.flags.c_contiguous:  # a fast path, for most parts
        yield _Span(part.base, part.base + out.nbytes, part, part.box, out, _memory(out))
        return
    run_dim, run_bytes = _run(part, item_bytes)
    in_place = (run_bytes >= DIRECT_BYTES or run_bytes == out.nbytes) and out[(0,) * run_dim].flags.c_contiguous
    cut_dims = run_dim if in_place else _dims_before_gap(part.box.shape, strides, item_bytes)
    for index in product(*(range(n) for n in part.box.shape[:cut_dims])):
        box, here = (part.box, out) if not index else _at(part.box, out, index)
        span = _one_span(part, box, here, strides, item_bytes)
        span.memory = _memory(here) if in_place else None
        yield span


def _one_span(part: WantedBox, box: Box, out: Any, strides: Sequence[int], item_bytes: int) -> _Span:
    """Return the span from the first byte of a box to its last."""
    start = part.base + sum(o * stride for o, stride in zip(box.offsets, strides, strict=True))
    reach = item_bytes + sum((n - 1) * stride for n, stride in zip(box.shape, strides, strict=True))
    return _Span(start, start + reach, part, box, out, None)


def _is_on_host(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


def _check_part(part: WantedBox, chunk: ChunkExtent, item_bytes: int) -> None:
    """Refuse a part that does not lie in the chunk."""
    assert tuple(part.out.shape) == part.box.shape
    end = part.base + math.prod(part.region) * item_bytes
    if part.base < 0 or end > chunk.length or not whole(part.region).contains(part.box):
        raise CorruptCheckpointError(
            f"{part.name}: the index places {part.box} of a region {part.region} at bytes {part.base} to {end} of a "
            f"chunk of {chunk.length} bytes in {chunk.file}"
        )
    if part.base % item_bytes or chunk.block_bytes % ALIGNMENT:
        raise CorruptCheckpointError(
            f"{part.name}: the index places elements of {item_bytes} bytes at byte {part.base} of a chunk in "
            f"{chunk.file}, with blocks of {chunk.block_bytes} bytes; both would cut elements in two"
        )


def _run(part: WantedBox, item_bytes: int) -> tuple[int, int]:
    """Return how many leading dimensions number the contiguous runs of the wanted box, and the bytes of one run."""
    dim = len(part.region)
    run_bytes = item_bytes
    while dim > 0:
        dim -= 1
        run_bytes *= part.box.shape[dim]
        if part.box.shape[dim] != part.region[dim]:
            break
    return dim, run_bytes


def _dims_before_gap(shape: Sequence[int], strides: Sequence[int], item_bytes: int) -> int:
    """Return the number of leading dimensions along which neighbours lie more than `GAP_BYTES` apart."""
    reach = item_bytes
    deepest = 0
    for dim in reversed(range(len(shape))):
        if shape[dim] > 1 and strides[dim] - reach >= GAP_BYTES:
            deepest = max(deepest, dim + 1)
        reach += (shape[dim] - 1) * strides[dim]
    return deepest


def _at(box: Box, out: _Array, index: tuple[int, ...]) -> tuple[Box, _Array]:
    """Return the sub-box of `box`, and of its array, at one index of the leading dimensions."""
    dims = len(index)
    offsets = tuple(o + i for o, i in zip(box.offsets, index, strict=False)) + box.offsets[dims:]
    return Box(offsets, (1,) * dims + box.shape[dims:]), out[tuple(slice(i, i + 1) for i in index)]


def _name_of(active: Sequence[_Span | TensorRun], begin: int, end: int) -> str:
    """Return the name of the first part that wants some of the bytes [begin, end) of the chunk; in a gap, of the first part."""
    first = next((span for span in active if span.start < end and span.stop > begin), active[0])
    return first.name_of(begin) if isinstance(first, TensorRun) else first.part.name


def _read_shared_bytes_once(spans: Sequence[_Span | TensorRun]) -> None:
    """Route overlapping spans through scratch: their bytes have two destinations. `spans` are sorted."""
    furthest = spans[0]
    for span in spans[1:]:
        if span.start < furthest.stop:
            span.memory = furthest.memory = None
        if span.stop > furthest.stop:
            furthest = span


def _slabs(stretches: Sequence[tuple[int, int]], unit: int, at_once: int) -> Iterator[tuple[int, int]]:
    """Yield ascending [start, stop) of whole units (a chunk's last may be short) that together make up the stretches."""
    slab_bytes = max(at_once // unit, 1) * unit
    for start, stop in stretches:
        for at in range(start, stop, slab_bytes):
            yield at, min(at + slab_bytes, stop)


def _stretches(spans: Sequence[_Span | TensorRun], length: int, unit: int) -> Iterator[tuple[int, int]]:
    """Yield the union of the spans, rounded out to whole units, with small gaps filled."""
    start = stop = 0
    for span in spans:
        first = span.start // unit * unit
        if first - stop >= GAP_BYTES or start == stop:
            if start < stop:
                yield start, stop
            start = first
        stop = max(stop, min(-(-span.stop // unit) * unit, length))
    yield start, stop


def _scatter(span: _Span, scratch: _Array, start: int, stop: int) -> None:
    """Copy the part of a span in the slab [start, stop), which is in `scratch`, to its destination.

    Uses NumPy: torch would start threads for these few MiB, which on a busy machine takes three times as long.
    """
    out = span.out
    strides = [stride * out.itemsize for stride in _row_major(span.part.region)]
    for box in _boxes_here(span, start, stop, out.itemsize):
        at = span.part.base - start + sum(o * stride for o, stride in zip(box.offsets, strides, strict=True))
        source: _Array = np.ndarray(box.shape, out.dtype, buffer=scratch, offset=at, strides=strides)
        out[box.relative_to(span.box).slices] = source


def _scatter_on_device(span: _Span, memory: torch.Tensor, start: int, stop: int) -> None:
    """Copy likewise from memory on a device to a tensor there, queued on its current stream."""
    out: torch.Tensor = span.out
    strides = _row_major(span.part.region)
    typed = memory[: memory.numel() // out.element_size() * out.element_size()].view(out.dtype)
    for box in _boxes_here(span, start, stop, out.element_size()):
        at = (span.part.base - start) // out.element_size() + sum(
            o * n for o, n in zip(box.offsets, strides, strict=True)
        )
        source = typed.as_strided(box.shape, strides, typed.storage_offset() + at)
        out[box.relative_to(span.part.box).slices].copy_(source)


def _boxes_here(span: _Span, start: int, stop: int, item_bytes: int) -> Iterator[Box]:
    """Yield boxes that together are the part of the span's box in the bytes [start, stop) of the chunk."""
    if start <= span.start and span.stop <= stop:
        yield span.box
        return
    first = max(start - span.part.base, 0) // item_bytes
    last = min((stop - span.part.base) // item_bytes, math.prod(span.part.region))
    if first >= last:
        return
    for box, _ in flat_boxes(span.part.region, first, last):
        here = overlap(box, span.box)
        if here is not None:
            yield here


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides, in elements, of a C-contiguous array."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 1, 0, -1):
        strides[dim - 1] = strides[dim] * shape[dim]
    return tuple(strides)


def _memory(array: _Array) -> memoryview:
    """Return the bytes of a C-contiguous array, flat."""
    flat: Any = array.reshape(-1).view(np.uint8)  # Any: not every NumPy declares the buffer protocol
    return memoryview(flat)


def _after(pieces: list[memoryview], num_bytes: int) -> list[memoryview]:
    """Return `pieces` without their first `num_bytes` bytes."""
    for number, piece in enumerate(pieces):
        if num_bytes < len(piece):
            return [piece[num_bytes:], *pieces[number + 1 :]]
        num_bytes -= len(piece)
    return []
