"""Compare two checkpoints of any formats: tensors bit by bit, plain values, and how components were saved. One process, bounded memory."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch

from ckpt.format.dtypes import as_integers, item_bytes, raw_bytes, real_numbers
from ckpt.format.manifest import STATE
from ckpt.interop.opened import Opened, OpenedTensor, slabs
from ckpt.loading.sources import CheckpointSource
from ckpt.state.flatten import Path, container_of, joined_key, key_of
from ckpt.state.tensor_classes import is_kind_step

_AT_ONCE_BYTES = 32 << 20
"""Bytes of one tensor that are in memory, of each checkpoint."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference between two checkpoints, a and b.

    Attributes:
        component: key, with the prefix of a copy: "rng/rank-00003".
        name: of a tensor or plain value in it; "": the component as a whole.
        what: "only in a", "only in b", "removed from a" or "removed from b" (by retention), "class" (of a tensor), "container" (of this
            name), "key" (such as 1 and "1"), "order" (from this entry on), "data type", "shape", "bits" or "value".
        a, b: classes, containers, keys, entries in that place, data types, shapes, or plain values as JSON; for "bits" the Euclidean norms.
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

    Where one checkpoint has components, and the other is of a single state dict, as `ckpt.save` or another program writes it, this one is
    taken as the components that a run finds in it.

    Args:
        a, b: opened by `ckpt.interop.registry.source_at`.
        progress: called with the bytes that were compared.

    Raises:
        CorruptCheckpointError: bytes are missing or changed.
    """
    sources = [Opened(a), Opened(b)]
    if (sources[0].keys == [STATE]) != (sources[1].keys == [STATE]):
        sources = [Opened(place, by_component=True) for place in (a, b)]
    keys = [source.keys for source in sources]
    for key in dict.fromkeys((*keys[0], *keys[1])):
        if missing := [name for name, held in zip("ba", reversed(keys), strict=True) if key not in held]:
            is_removed = (a if missing == ["a"] else b).why_removed(key) is not None
            yield Difference(key, "", f"removed from {missing[0]}" if is_removed else f"only in {'a' if missing == ['b'] else 'b'}")
            continue
        of_a, of_b = (source.copies(key) for source in sources)
        for prefix in dict.fromkeys((*of_a, *of_b)):
            where = f"{key}/{prefix}".removesuffix("/")
            if prefix not in of_a or prefix not in of_b:
                yield Difference(where, "", f"only in {'a' if prefix in of_a else 'b'}")
                continue
            yield from _structure(where, *(source.paths(key, prefix) for source in sources))
            if a.has_order and b.has_order:
                yield from _order(where, *(source.in_order(key, prefix) for source in sources))
            yield from _plain(where, *(source.plain(key, prefix) for source in sources))
            a_tensors, b_tensors = (source.tensors(key, prefix) for source in sources)
            yield from _tensors(where, a_tensors, b_tensors, progress)


def _structure(where: str, a: Mapping[str, Path], b: Mapping[str, Path]) -> Iterator[Difference]:
    """Compare the containers, each once, and the keys on the way to entries that have one name in both."""
    reported: set[tuple[str, str, str, str]] = set()
    for name in a:
        if name not in b or a[name] == b[name]:
            continue
        at, (mine, other) = next(
            (at, pair) for at, pair in enumerate(zip_longest(a[name], b[name])) if pair[0] != pair[1]
        )
        of_tensor = any(is_kind_step(step) for step in (mine, other))
        kinds = ["" if step is None else step[1] if of_tensor else container_of(step) for step in (mine, other)]  # type: ignore[index]
        found = joined_key(a[name][:at]), "class" if of_tensor else "container", kinds[0], kinds[1]
        if kinds[0] == kinds[1]:
            found = joined_key(a[name][: at + 1]), "key", repr(key_of(mine)), repr(key_of(other))
        if found not in reported:
            reported.add(found)
            yield Difference(where, *found)


def _order(where: str, a: Collection[str], b: Collection[str]) -> Iterator[Difference]:
    """Yield the first of the entries that both have in another place."""
    pairs = zip([name for name in a if name in b], [name for name in b if name in a], strict=True)
    for mine, other in pairs:
        if mine != other:
            yield Difference(where, mine, "order", mine, other)
            return


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
            left, right = (real_numbers(as_integers(side.flatten())[unlike].view(side.dtype)) for side in (a, b))
            largest = max(largest, float((left - right).abs().max()), key=lambda x: (math.isnan(x), x))
        squares = [was + float(real_numbers(side).square().sum()) for was, side in zip(squares, (a, b), strict=True)]
        progress(2 * a.nbytes)
    if not num_differ:
        return None
    norm_a, norm_b = (math.sqrt(square) for square in squares)
    return Difference(where, name, "bits", norm_a, norm_b, num_differ, largest)
