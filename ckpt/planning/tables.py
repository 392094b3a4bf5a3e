"""What the ranks tell each other of the tensors they hold, and who holds what, worked out of that.

Ranks repeat each other, and so do the layers of a model. A table says everything once: names apart from places, so that what
ranks have in common is sent once, and looked at once. Pure: no files, no collectives.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ckpt.errors import ShapeMismatchError
from ckpt.format.box import Box, whole

Ranks = tuple[int, ...]
Names = tuple[tuple[str, int], ...]
"""(Array name, number of its place), in the order of the state."""
Whereabouts = tuple[tuple[int, int], ...]
"""Where a name stands: in which lists of names, and at which number of the places that go with each."""


class LeafPlacement(NamedTuple):
    """What tensors that are cut alike have in common on one rank: an address without its name."""

    dtype: str
    global_shape: tuple[int, ...]
    box: Box


@dataclass(frozen=True, slots=True)
class TablePart:
    """The tensors of one component on one rank, by name and by place.

    Two halves, because ranks repeat each other in halves: a sharding neighbour holds other places of the same names, another
    stage of a pipeline other names at the same places.

    Attributes:
        names: every tensor, with the number of its place.
        places: each once, in the order in which `names` first needs them.
    """

    names: Names
    places: tuple[LeafPlacement, ...]

    @classmethod
    def of(cls, addresses: Iterable[Address]) -> TablePart:
        places: dict[tuple[Any, ...], int] = {}
        names = tuple((address.name, places.setdefault(address[1:], len(places))) for address in addresses)
        return cls(names, tuple(LeafPlacement(*place) for place in places))


@dataclass(frozen=True, slots=True)
class Table:
    """What a rank, or several ranks alike, contribute: the addresses of their tensors and the aliases among them."""

    parts: tuple[TablePart, ...]
    aliases: tuple[tuple[str, str], ...] = ()


def table_to_json(table: Table) -> list[Any]:
    """The pieces of a table: the aliases, then for each component its names and its places."""
    pieces: list[Any] = [["aliases", table.aliases]]
    for part in table.parts:
        pieces.append(["names", [name for name, _ in part.names], [place for _, place in part.names]])
        pieces.append(["places", [[p.dtype, p.global_shape, p.box.offsets, p.box.shape] for p in part.places]])
    return pieces


def piece_from_json(tree: Any) -> tuple[Any, ...]:
    """A piece as a table holds it; pieces that several tables share are made once."""
    match tree:
        case ["names", names, places]:
            return tuple(zip(names, places, strict=True))
        case ["places", rows]:
            return tuple(
                LeafPlacement(dtype, tuple(shape), Box(tuple(offsets), tuple(sides)))
                for dtype, shape, offsets, sides in rows
            )
        case _:
            return tuple((alias, first) for alias, first in tree[1])


def table_of_pieces(pieces: Sequence[tuple[Any, ...]]) -> Table:
    """A table, from its pieces in the order of `table_to_json`."""
    aliases, *halves = pieces
    return Table(tuple(TablePart(*half) for half in zip(halves[::2], halves[1::2], strict=True)), aliases)


class Holdings:
    """Who holds what: all tables, turned around.

    Attributes:
        where: array name -> where it stands. Names that stand at the same places are arrays of one kind.
    """

    def __init__(self, tables: Sequence[Table], table_of_rank: Sequence[int]) -> None:
        ranks_of: list[list[int]] = [[] for _ in tables]
        for rank, number in enumerate(table_of_rank):
            ranks_of[number].append(rank)
        by_names: dict[Names, dict[tuple[LeafPlacement, ...], list[int]]] = {}
        for table, ranks in zip(tables, ranks_of, strict=True):
            for part in table.parts:
                by_names.setdefault(part.names, {}).setdefault(part.places, []).extend(ranks)
        found: dict[str, list[tuple[int, int]]] = {}
        for number, names in enumerate(by_names):
            for name, place in names:
                found.setdefault(name, []).append((number, place))
        self.where: dict[str, Whereabouts] = {name: tuple(at) for name, at in found.items()}
        self._places = [
            [(places, tuple(sorted(ranks))) for places, ranks in by_places.items()] for by_places in by_names.values()
        ]

    def look_up(self, name: str) -> tuple[str, tuple[int, ...], dict[Box, Ranks]]:
        """The data type, the global shape, and the ranks that hold each box; empty boxes of a larger array left out."""
        held = [(places[place], ranks) for number, place in self.where[name] for places, ranks in self._places[number]]
        (dtype, shape, _), first_ranks = held[0]
        holders: dict[Box, list[Ranks]] = {}
        for (other_dtype, other_shape, box), ranks in held:
            if (other_dtype, other_shape) != (dtype, shape):
                raise ShapeMismatchError(
                    f"{name} is {other_dtype} {list(other_shape)} on rank {ranks[0]} and {dtype} {list(shape)} on rank "
                    f"{first_ranks[0]}; the ranks must agree on what they save under one name"
                )
            if box.num_elements or 0 in shape:
                holders.setdefault(whole(shape) if 0 in shape else box, []).append(ranks)
        return dtype, shape, {box: _union(sets) for box, sets in holders.items()}


def _union(sets: Sequence[Ranks]) -> Ranks:
    return sets[0] if len(sets) == 1 else tuple(sorted({rank for ranks in sets for rank in ranks}))


class Address(NamedTuple):
    """One leaf of one rank in the one global picture. What a sharing pattern computes, and all that a plan sees.

    The fourth part of an address, the replica id, is not stored: it is the position of a rank among those that hold an
    equal (name, box), and plan.py counts it there.

    Attributes:
        name: `<component>/<prefix><key>`, unique in a checkpoint.
        dtype: Zarr v3 data type name.
        global_shape: of the whole array, in elements.
        box: the part this rank holds, in global coordinates.
    """

    name: str
    dtype: str
    global_shape: tuple[int, ...]
    box: Box
