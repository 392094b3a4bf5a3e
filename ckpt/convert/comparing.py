"""Compare two checkpoints of any formats: tensors bit by bit, plain values, and how components were saved. One process, bounded memory."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ckpt.convert.opened import Opened, OpenedTensor, slabs
from ckpt.format.dtypes import as_integers, item_bytes, raw_bytes
from ckpt.format.manifest import STATE
from ckpt.loading.sources import CheckpointSource

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
    sources = [Opened(a), Opened(b)]
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
            a_tensors, b_tensors = (one.tensors(key, prefix) for one in sources)
            yield from _tensors(where, a_tensors, b_tensors, progress)


def _plain(where: str, a: dict[str, Any], b: dict[str, Any]) -> Iterator[Difference]:
    for name in dict.fromkeys((*a, *b)):
        if name not in a or name not in b:
            yield Difference(where, name, f"only in {'a' if name in a else 'b'}", a.get(name), b.get(name))
        elif json.dumps(a[name]) != json.dumps(
            b[name]
        ):  # Python takes true and 1, 1 and 1.0, or 0.0 and -0.0 for equal
            yield Difference(where, name, "value", a[name], b[name])


def _tensors(
    where: str, a: Mapping[str, OpenedTensor], b: Mapping[str, OpenedTensor], progress: Callable[[int], object]
) -> Iterator[Difference]:
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


def _bits(
    where: str, name: str, mine: OpenedTensor, other: OpenedTensor, progress: Callable[[int], object]
) -> Difference | None:
    """Compare two tensors of one type and shape, a slab after the other."""
    num_differ, largest, squares = 0, 0.0, [0.0, 0.0]
    item = item_bytes(mine.entry.dtype)
    for box in slabs(mine.entry, _AT_ONCE_BYTES):
        a, b = mine.read(box), other.read(box)
        if not torch.equal(raw_bytes(a), raw_bytes(b)):
            unlike = (raw_bytes(a).view(-1, item) != raw_bytes(b).view(-1, item)).any(1)
            num_differ += int(unlike.sum())
            left, right = (_numbers(as_integers(one.flatten())[unlike].view(one.dtype)) for one in (a, b))
            largest = max(largest, float((left - right).abs().max()), key=lambda x: (math.isnan(x), x))
        squares = [was + float(_numbers(one).square().sum()) for was, one in zip(squares, (a, b), strict=True)]
        progress(2 * a.nbytes)
    if not num_differ:
        return None
    norm_a, norm_b = (math.sqrt(one) for one in squares)
    return Difference(where, name, "bits", norm_a, norm_b, num_differ, largest)


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).to(torch.float64)
