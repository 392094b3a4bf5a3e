"""Places of a state's bytes: the ranks that hold each box of a tensor, its writer, and its offset in the writer's file."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import sub
from typing import Any, NamedTuple

import numpy as np
import torch

from ckpt.format.box import Box, overlap
from ckpt.ranks.topology import Topology
from ckpt.state.address import address_of, local_tensor
from ckpt.state.flatten import flatten
from ckpt.state.sharing import Stateful, find_aliases
from recipes.benchmark.measuring import gathered

Place = tuple[str, Box]
"""Name of a tensor, and the part of it that a rank holds."""

Choice = Callable[[Sequence[int], Sequence[int]], int]
"""Returns the writer among the ranks that hold a place, given the bytes that each rank writes already."""


class Holding(NamedTuple):
    """The ranks that hold a place, and its bytes."""

    num_bytes: int
    ranks: tuple[int, ...]


class FileLocation(NamedTuple):
    """A place in files: its bytes begin at byte `offset` of the file that rank `writer` writes."""

    writer: int
    offset: int


class Source(NamedTuple):
    """A saved box, and a wanted box of the same tensor that overlaps it.

    Attributes:
        location: of the saved box.
        tensor: the memory of the wanted box.
    """

    name: str
    saved: Box
    location: FileLocation
    wanted: Box
    tensor: torch.Tensor


class ByteRun(NamedTuple):
    """Bytes that are contiguous both in the box that was saved and in the one that is wanted."""

    saved_at: int
    wanted_at: int
    num_bytes: int


def places_of(statefuls: Mapping[str, Stateful]) -> dict[Place, torch.Tensor]:
    """Return the tensors of this rank by their places; tied ones once, empty ones not at all."""
    found: dict[Place, torch.Tensor] = {}
    for component, stateful in statefuls.items():
        tensors = flatten(stateful.state_dict(), component).tensors
        tied = find_aliases(tensors, getattr(stateful, "tied_names", None) or {})
        for key, leaf in tensors.items():
            name = f"{component}/{tied.get(key, key)}"
            local = local_tensor(leaf)
            if local.numel():
                found[name, address_of(leaf, name).box] = local
    return found


def holders_of(mine: Mapping[Place, torch.Tensor], topology: Topology) -> dict[Place, Holding]:
    """Return every place of the whole state, by the boxes that all ranks give. Collective."""
    rows: list[list[Any]] = [[name, box.offsets, box.shape, tensor.nbytes] for (name, box), tensor in mine.items()]
    found: dict[Place, Holding] = {}
    with topology.operation("the benchmark"):
        rows_of_ranks = gathered(rows, topology)
    for rank, of_rank in enumerate(rows_of_ranks):
        for name, offsets, shape, num_bytes in of_rank:
            place = name, Box(tuple(offsets), tuple(shape))
            found[place] = Holding(num_bytes, (*(found[place].ranks if place in found else ()), rank))
    return found


def least_loaded(holders: Sequence[int], written: Sequence[int]) -> int:
    """Choose the holder that has the least to write so far."""
    return min(holders, key=lambda rank: written[rank])


def first(holders: Sequence[int], written: Sequence[int]) -> int:
    """Choose the first holder: rank 0 writes all of a replicated state."""
    return holders[0]


def lay_out(holdings: Mapping[Place, Holding], num_ranks: int, choose: Choice) -> dict[Place, FileLocation]:
    """Give every place one writer, and its bytes an offset in that writer's file. The same on every rank."""
    written = [0] * num_ranks
    found: dict[Place, FileLocation] = {}
    for place, holding in sorted(holdings.items(), key=lambda entry: (-entry[1].num_bytes, entry[0][0])):
        writer = choose(holding.ranks, written)
        found[place] = FileLocation(writer, written[writer])
        written[writer] += holding.num_bytes
    return found


def sources_of(wanted: Mapping[Place, torch.Tensor], layout: Mapping[Place, FileLocation]) -> Iterator[Source]:
    """Yield every saved box that a wanted one overlaps."""
    saved: dict[str, list[tuple[Box, FileLocation]]] = defaultdict(list)
    for (name, box), location in layout.items():
        saved[name].append((box, location))
    for (name, box), tensor in wanted.items():
        for of_name, location in saved[name]:
            if of_name == box or overlap(of_name, box) is not None:
                yield Source(name, of_name, location, box, tensor)


def runs_of(saved: Box, wanted: Box, item_bytes: int) -> Iterator[ByteRun]:
    """Yield the runs that two row-major boxes share.

    Example:
        >>> [*runs_of(Box((0, 0), (4, 5)), Box((3, 0), (3, 5)), 4)]
        [ByteRun(saved_at=60, wanted_at=0, num_bytes=20)]
    """
    both = overlap(saved, wanted)
    if both is None:
        return
    sides = list(zip(both.shape, saved.shape, wanted.shape, strict=True))
    dim = next((dim for dim in reversed(range(len(sides))) if len(set(sides[dim])) > 1), 0)  # from the one behind it on, all is shared
    for index in np.ndindex(both.shape[:dim]):
        at = [offset + step for offset, step in zip(both.offsets, (*index, *[0] * len(sides)), strict=False)]
        saved_at, wanted_at = (_number(box, at) * item_bytes for box in (saved, wanted))
        yield ByteRun(saved_at, wanted_at, math.prod(both.shape[dim:]) * item_bytes)


def _number(box: Box, at: Sequence[int]) -> int:
    return int(np.ravel_multi_index(tuple(map(sub, at, box.offsets)), box.shape))
