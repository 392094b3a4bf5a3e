"""Compare two checkpoints of any formats: tensors bit by bit, plain values, and how components were saved. One process, bounded memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ckpt.format.box import Box
from ckpt.format.dtypes import item_bytes, raw_bytes, torch_dtype
from ckpt.format.manifest import STATE, ArrayEntry
from ckpt.loading.sources import CheckpointSource
from ckpt.loading.strategy import ReadRequest
from ckpt.state.sharing import Sharing, SharingPattern, StateComponent
from ckpt.state.statefuls import Given

_AT_ONCE_BYTES = 32 << 20
"""Bytes of one tensor that are in memory, of each checkpoint."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference between two checkpoints, a and b.

    Attributes:
        component: key, with the prefix of a copy: "rng/rank-00003".
        name: of a tensor or plain value in it; "": the component as a whole.
        what: "only in a", "only in b", "data type", "shape", "bits" or "value".
        a, b: data types, shapes, or plain values as JSON; for "bits" the Euclidean norms.
        num_differ: for "bits", the number of elements.
        largest: for "bits", the largest absolute difference in double precision; NaN where one of the numbers is none.
    """

    component: str
    name: str
    what: str
    a: Any = None
    b: Any = None
    num_differ: int | None = None
    largest: float | None = None


def compare(
    a: CheckpointSource, b: CheckpointSource, *, progress: Callable[[int], object] = lambda num_bytes: None
) -> Iterator[Difference]:
    """Yield the differences, component by component.

    Where one checkpoint is of a single state dict, as `ckpt.save` or another program writes it, the other one is taken as one, too.

    Args:
        a, b: opened by `ckpt.loading.loader.source_at`.
        progress: called with the bytes that were compared.

    Raises:
        CorruptCheckpointError: bytes are missing or changed.
    """
    sources = [_Opened(a), _Opened(b)]
    keys = [one.keys for one in sources]
    if (keys[0] == [STATE]) != (keys[1] == [STATE]):
        keys = [[STATE] if one.source.holds(STATE) else one.keys for one in sources]
    for key in dict.fromkeys((*keys[0], *keys[1])):
        if missing := [name for name, held in zip("ba", reversed(keys), strict=True) if key not in held]:
            yield Difference(key, "", f"only in {'a' if missing == ['b'] else 'b'}")
            continue
        of_a, of_b = (one.copies(key) for one in sources)
        for prefix in dict.fromkeys((*of_a, *of_b)):
            where = f"{key}/{prefix}".removesuffix("/")
            if prefix not in of_a or prefix not in of_b:
                yield Difference(where, "", f"only in {'a' if prefix in of_a else 'b'}")
                continue
            yield from _plain(where, *(one.plain(key, prefix) for one in sources))
            yield from _tensors(where, sources, key, prefix, progress)


class _Opened:
    """A checkpoint to compare."""

    def __init__(self, source: CheckpointSource) -> None:
        self.source = source
        self.keys = list(source.component_keys())

    def copies(self, key: str) -> list[str]:
        return self.source.prefixes(self.component(key))

    def plain(self, key: str, prefix: str) -> dict[str, Any]:
        rows = self.source.rows(self.component(key), prefix)
        return {name: row[1] for name, row in rows.items() if len(row) == 2}

    def tensors(self, key: str, prefix: str) -> dict[str, _Tensor]:
        found = self.source.entries(self.component(key), prefix)
        start = f"{key}/{prefix}"
        firsts = {name: one.alias_of or f"{start}{name}" for name, one in found.items()}
        return {name: _Tensor(self.source, first, found[first.removeprefix(start)]) for name, first in firsts.items()}

    def component(self, key: str) -> StateComponent:
        component = StateComponent(key, Given(), SharingPattern.REPLICATED)
        return component.with_sharing(self.source.saved_sharing(component) or Sharing(SharingPattern.REPLICATED))


class _Tensor(NamedTuple):
    """A tensor of a checkpoint. Second names of a tensor have name and entry of the first."""

    source: CheckpointSource
    name: str
    entry: ArrayEntry

    def read(self, box: Box) -> torch.Tensor:
        out = torch.empty(box.shape, dtype=torch_dtype(self.entry.dtype))
        reading = self.source.prepare([ReadRequest(self.name, self.name, box, out)])
        try:
            reading.run()
        finally:
            reading.close()
        return out


def _plain(where: str, a: dict[str, Any], b: dict[str, Any]) -> Iterator[Difference]:
    for name in dict.fromkeys((*a, *b)):
        if name not in a or name not in b:
            yield Difference(where, name, f"only in {'a' if name in a else 'b'}", a.get(name), b.get(name))
        elif a[name] != b[name]:
            yield Difference(where, name, "value", a[name], b[name])


def _tensors(
    where: str, sources: Sequence[_Opened], key: str, prefix: str, progress: Callable[[int], object]
) -> Iterator[Difference]:
    a, b = (one.tensors(key, prefix) for one in sources)
    for name in dict.fromkeys((*a, *b)):
        if name not in a or name not in b:
            yield Difference(where, name, f"only in {'a' if name in a else 'b'}")
            continue
        mine, other = a[name].entry, b[name].entry
        if mine.dtype != other.dtype:
            yield Difference(where, name, "data type", mine.dtype, other.dtype)
        elif mine.shape != other.shape:
            yield Difference(where, name, "shape", list(mine.shape), list(other.shape))
        elif (found := _bits(where, name, a[name], b[name], progress)) is not None:
            yield found


def _bits(where: str, name: str, mine: _Tensor, other: _Tensor, progress: Callable[[int], object]) -> Difference | None:
    """Compare two tensors of one type and shape, a slab after the other."""
    num_differ, largest, squares = 0, 0.0, [0.0, 0.0]
    item = item_bytes(mine.entry.dtype)
    for box in _slabs(mine.entry):
        a, b = mine.read(box), other.read(box)
        if not torch.equal(raw_bytes(a), raw_bytes(b)):
            unlike = (raw_bytes(a).view(-1, item) != raw_bytes(b).view(-1, item)).any(1)
            num_differ += int(unlike.sum())
            left, right = (_numbers(one.flatten()[unlike]) for one in (a, b))
            largest = max(largest, float((left - right).abs().max()), key=lambda x: (math.isnan(x), x))
        squares = [was + float(_numbers(one).square().sum()) for was, one in zip(squares, (a, b), strict=True)]
        progress(2 * a.nbytes)
    if not num_differ:
        return None
    norm_a, norm_b = (math.sqrt(one) for one in squares)
    return Difference(where, name, "bits", norm_a, norm_b, num_differ, largest)


def _slabs(entry: ArrayEntry) -> Iterator[Box]:
    """Cut a tensor into boxes of whole rows that fit into memory; a row that does not fit is cut along the next dimension."""
    yield from _cut((), entry.shape, max(1, _AT_ONCE_BYTES // item_bytes(entry.dtype)))


def _cut(start: tuple[int, ...], shape: tuple[int, ...], most: int) -> Iterator[Box]:
    rest = shape[len(start) :]
    if math.prod(rest) <= most:
        yield Box((*start, *(0 for _ in rest)), (*(1 for _ in start), *rest))
        return
    row = math.prod(rest[1:])
    if row > most:
        for at in range(rest[0]):
            yield from _cut((*start, at), shape, most)
        return
    step = max(1, most // max(row, 1))
    for first in range(0, rest[0], step):
        yield Box((*start, first, *(0 for _ in rest[1:])), (*(1 for _ in start), min(step, rest[0] - first), *rest[1:]))


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).to(torch.float64)
