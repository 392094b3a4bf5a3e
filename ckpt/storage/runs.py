"""The wanted boxes of a chunk, and runs of small ones, which are copied together: 20,000 tensors cost little more than their bytes."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch

from ckpt.errors.imports import private_name
from ckpt.format.box import Box, whole
from ckpt.format.dtypes import as_integers, raw_bytes

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
