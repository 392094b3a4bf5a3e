"""Put the bytes of one chunk into the tensors that want them: any range of the chunk's bytes, in any order.

A wanted box is cut into spans, ranges of the chunk without a large gap inside. A span that is contiguous in the tensor, too, is read or
copied there; any other is scattered with strides.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np
import torch

from ckpt.errors import CorruptCheckpointError
from ckpt.format.box import Box, flat_boxes, overlap, whole
from ckpt.format.dtypes import bits_of, raw_bytes
from ckpt.format.gc_pause import gc_paused
from ckpt.format.records import ALIGNMENT, ChunkExtent
from ckpt.storage.runs import TensorRun, WantedBox, find_runs

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
