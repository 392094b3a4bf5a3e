"""Put the bytes of one chunk into the tensors that want them: any range of the chunk's bytes, in any order.

A wanted box is cut into spans, ranges of the chunk without a large gap inside. A span that is contiguous in the tensor, too, is read or
copied there; any other is scattered with strides. Runs of small boxes are copied together: 20,000 tensors cost little more than their
bytes.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from ckpt.errors import CorruptCheckpointError, private_name
from ckpt.format.box import Box, flat_boxes, overlap, whole
from ckpt.format.dtypes import as_integers, bits_of, raw_bytes
from ckpt.format.gc_pause import gc_paused
from ckpt.format.records import ALIGNMENT, ChunkExtent

SMALL_BYTES = 64 << 10
"""Up to this size a tensor is cheaper to copy than to read into."""

FEW = 4
"""Fewer tensors are not worth a run."""


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


class TensorRun:
    """Small adjacent regions of one chunk, of one data type and one device.

    Args:
        parts: in the order of the chunk; each wants its whole region, in contiguous memory.

    Attributes:
        start, stop: where the run lies in the chunk, in bytes.
        part: the first one of `parts`.
        memory: None: files cannot be read into a run directly.
    """

    memory: None = None

    def __init__(self, parts: Sequence[WantedBox]) -> None:
        self.part = parts[0]
        self.start: int = parts[0].base
        self.parts = parts
        self._starts: list[int] = [part.base for part in parts]
        self.stop = self._starts[-1] + parts[-1].out.nbytes

    def name_of(self, begin: int) -> str:
        """Return the name of the part at byte `begin` of the chunk, or of the first part after it."""
        return str(self.parts[max(bisect_right(self._starts, begin) - 1, 0)].name)

    def place(self, start: int, stop: int, memory: torch.Tensor) -> None:
        """Copy the chunk's bytes [start, stop) to the parts that they belong to.

        Args:
            memory: those bytes: 1-D uint8, aligned to an element.
        """
        first = max(bisect_right(self._starts, start) - 1, 0)
        last = bisect_left(self._starts, stop)
        begins = self._starts[first]
        ends = self._starts[last] if last < len(self._starts) else self.stop
        if begins < start:
            self._place_piece(first, start, stop, memory)
            first += 1
        if ends > stop and first < last:
            last -= 1
            self._place_piece(last, start, stop, memory)
        if first >= last:
            return
        begins = self._starts[first] - start
        ends = (self._starts[last] if last < len(self._starts) else self.stop) - start
        outs = [part.out for part in self.parts[first:last]]
        # Loops in C++: a few kernels on a device, and on the host half of the time of a loop here.
        unflatten = private_name("torch._C", "_nn", "place what is read").unflatten_dense_tensors
        values = unflatten(memory[begins:ends].view(self.part.out.dtype), outs)
        if self.part.out.device.type != "cpu" and memory.device.type != "cpu":
            torch._foreach_copy_([as_integers(out.detach()) for out in outs], [as_integers(value) for value in values])
        else:
            torch._foreach_copy_(outs, values)

    def _place_piece(self, number: int, start: int, stop: int, memory: torch.Tensor) -> None:
        """Copy to one part that is only partly in these bytes."""
        begins = self._starts[number]
        first, last = max(begins, start), min(begins + self.parts[number].out.nbytes, stop)
        if first < last:
            raw_bytes(self.parts[number].out)[first - begins : last - begins].copy_(
                memory[first - start : last - start]
            )


def find_runs(parts: Iterable[WantedBox]) -> tuple[list[TensorRun], list[WantedBox]]:
    """Separate the runs of small adjacent parts from all other parts, which come in the order of the chunk.

    The caller checks that the runs lie inside of the chunk.
    """
    runs: list[TensorRun] = []
    others: list[WantedBox] = []
    run: list[WantedBox] = []
    dtype: torch.dtype | None = None
    device: torch.device | None = None
    at = 0
    for part in sorted(parts, key=attrgetter("base")):
        out = part.out
        num_bytes = out.nbytes
        if 0 < num_bytes <= SMALL_BYTES and part.box == whole(part.region) and out.is_contiguous():
            if part.base != at or out.dtype != dtype or out.device != device:
                _close(run, runs, others)
                run, dtype, device = [], out.dtype, out.device
            run.append(part)
            at = part.base + num_bytes
        else:
            others.append(part)
    _close(run, runs, others)
    return runs, others


def _close(run: list[WantedBox], runs: list[TensorRun], others: list[WantedBox]) -> None:
    if len(run) < FEW:
        others += run
    else:
        runs.append(TensorRun(run))


DIRECT_BYTES = 256 << 10
"""Runs of a part from this size on are read into the tensor itself; smaller ones are cheaper to copy. A part that is one run is
always read into the tensor."""

GAP_BYTES = 1 << 20
"""Gaps between wanted bytes from this size on are skipped."""

_Array = np.ndarray[Any, Any]


@dataclass(slots=True)
class Span:
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


class WantedBytes:
    """The parts of one chunk that one rank wants; puts any range of the chunk's bytes in place.

    Args:
        chunk: with the `length` of the delivered bytes: decoded, if the chunk is encoded.

    Attributes:
        spans: of all parts, in the order of the chunk.

    Raises:
        CorruptCheckpointError: a part does not lie in the chunk.
    """

    def __init__(self, chunk: ChunkExtent, parts: Sequence[WantedBox]) -> None:
        self._length = chunk.length
        self.spans = _spans_in(chunk, parts)

    @cached_property
    def _by_device(self) -> dict[torch.device, list[Span | TensorRun]]:
        found: dict[torch.device, list[Span | TensorRun]] = defaultdict(list)
        for span in self.spans:
            found[span.part.out.device].append(span)
        return found

    @property
    def devices(self) -> Collection[torch.device]:
        """Devices of the wanted parts."""
        return self._by_device.keys()

    def stretches(self, unit: int) -> list[tuple[int, int]]:
        """Return ascending ranges [start, stop) that hold all parts, in whole units but at the end of the chunk."""
        return list(_stretches(self.spans, self._length, unit)) if self.spans else []

    def name_of(self, begin: int, end: int) -> str:
        """Return the name of the first part that wants some of the bytes [begin, end)."""
        return first_name(self.spans, begin, end)

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
        host: Any = memory.numpy() if is_on_host(memory) else None
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
                scatter(span, host, start, stop)

    def _here(self, start: int, stop: int, device: torch.device | None) -> list[Span | TensorRun]:
        spans = self.spans if device is None else self._by_device[device]
        return [span for span in spans if span.start < stop and span.stop > start]


@gc_paused()
def _spans_in(chunk: ChunkExtent, parts: Sequence[WantedBox]) -> list[Span | TensorRun]:
    """Return the spans of all parts, in the order of the chunk. Runs of small adjacent parts are one span."""
    runs, others = find_runs(parts)
    spans: list[Span | TensorRun] = []
    for run in runs:
        if run.start < 0 or run.stop > chunk.length or run.start % run.part.out.element_size():
            others += run.parts  # `_check_part` refuses one of them
        else:
            spans.append(run)
    spans += [span for part in others for span in _spans_of(part, chunk)]
    return sorted(spans, key=lambda span: span.start)


def _spans_of(part: WantedBox, chunk: ChunkExtent) -> Iterator[Span]:
    """Cut a part into spans: one for each long run that can be read in place, else one between any two large gaps."""
    item_bytes = part.out.element_size()
    _check_part(part, chunk, item_bytes)
    if part.out.numel() == 0:
        return
    strides = [stride * item_bytes for stride in _row_major(part.region)]
    if not is_on_host(part.out):
        span = _one_span(part, part.box, part.out.detach(), strides, item_bytes)
        if span.stop - span.start == part.out.nbytes and part.out.is_contiguous():
            span.memory = raw_bytes(part.out)
        yield span
        return
    out = bits_of(part.out)
    if part.box.shape == part.region and out.flags.c_contiguous:  # a fast path, for most parts
        yield Span(part.base, part.base + out.nbytes, part, part.box, out, memory_of(out))
        return
    run_dim, run_bytes = _run(part, item_bytes)
    in_place = (run_bytes >= DIRECT_BYTES or run_bytes == out.nbytes) and out[(0,) * run_dim].flags.c_contiguous
    cut_dims = run_dim if in_place else _dims_before_gap(part.box.shape, strides, item_bytes)
    for index in product(*(range(n) for n in part.box.shape[:cut_dims])):
        box, here = (part.box, out) if not index else _at(part.box, out, index)
        span = _one_span(part, box, here, strides, item_bytes)
        span.memory = memory_of(here) if in_place else None
        yield span


def _one_span(part: WantedBox, box: Box, out: Any, strides: Sequence[int], item_bytes: int) -> Span:
    """Return the span from the first byte of a box to its last."""
    start = part.base + sum(o * stride for o, stride in zip(box.offsets, strides, strict=True))
    reach = item_bytes + sum((n - 1) * stride for n, stride in zip(box.shape, strides, strict=True))
    return Span(start, start + reach, part, box, out, None)


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


def first_name(active: Sequence[Span | TensorRun], begin: int, end: int) -> str:
    """Return the name of the first part that wants some of the bytes [begin, end) of the chunk; in a gap, of the first part."""
    first = next((span for span in active if span.start < end and span.stop > begin), active[0])
    return first.name_of(begin) if isinstance(first, TensorRun) else first.part.name


def _stretches(spans: Sequence[Span | TensorRun], length: int, unit: int) -> Iterator[tuple[int, int]]:
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


def scatter(span: Span, scratch: _Array, start: int, stop: int) -> None:
    """Copy the part of a span in the slab [start, stop), which is in `scratch`, to its destination.

    Uses NumPy: torch would start threads for these few MiB, which on a busy machine takes three times as long.
    """
    out = span.out
    strides = [stride * out.itemsize for stride in _row_major(span.part.region)]
    for box in _boxes_here(span, start, stop, out.itemsize):
        at = span.part.base - start + sum(o * stride for o, stride in zip(box.offsets, strides, strict=True))
        source: _Array = np.ndarray(box.shape, out.dtype, buffer=scratch, offset=at, strides=strides)
        out[box.relative_to(span.box).slices] = source


def _scatter_on_device(span: Span, memory: torch.Tensor, start: int, stop: int) -> None:
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


def _boxes_here(span: Span, start: int, stop: int, item_bytes: int) -> Iterator[Box]:
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


def is_on_host(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu


def memory_of(array: _Array) -> memoryview:
    """Return the bytes of a C-contiguous array, flat."""
    flat: Any = array.reshape(-1).view(np.uint8)  # Any: not every NumPy declares the buffer protocol
    return memoryview(flat)
