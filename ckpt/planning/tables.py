"""Address tables that the ranks exchange, and the holders of each box computed from them.

Ranks repeat each other, and so do the layers of a model. A table stores names apart from places, each once, so that common halves
are sent once and processed once. Pure: no files, no collectives.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ckpt.errors import ShapeMismatchError
from ckpt.format import strict_json
from ckpt.format.box import Box, whole

Ranks = tuple[int, ...]
Names = tuple[tuple[str, int], ...]
"""(Array name, number of its place), in the order of the state."""
Whereabouts = tuple[tuple[int, int], ...]
"""Positions of a name: (number of the list of names, number of the place that goes with it)."""


class LeafPlacement(NamedTuple):
    """An address without its name. Tensors that are cut alike share it."""

    dtype: str
    global_shape: tuple[int, ...]
    box: Box


@dataclass(frozen=True, slots=True)
class TablePart:
    """The tensors of one component on one rank, by name and by place.

    Ranks repeat each other in halves: a sharding neighbour has the same names at other places, another pipeline stage other names at
    the same places.

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
    """The addresses and aliases of one rank, or of several ranks that hold alike."""

    parts: tuple[TablePart, ...]
    aliases: tuple[tuple[str, str], ...] = ()


def table_to_json(table: Table) -> list[Any]:
    """Split a table into pieces of JSON: the aliases, then for each component its names and its places."""
    pieces: list[Any] = [["aliases", table.aliases]]
    for part in table.parts:
        pieces.append(["names", [name for name, _ in part.names], [place for _, place in part.names]])
        pieces.append(["places", part.places])
    return pieces


def piece_from_json(tree: Any) -> tuple[Any, ...]:
    """Parse a piece of a table. The caller parses pieces that tables share once."""
    match tree:
        case ["names", names, places]:
            return tuple(zip(names, places, strict=True))
        case ["places", rows]:
            return strict_json.convert(rows, tuple[LeafPlacement, ...])
        case _:
            return tuple((alias, first) for alias, first in tree[1])


def table_of_pieces(pieces: Sequence[tuple[Any, ...]]) -> Table:
    """Join a table from its pieces, in the order of `table_to_json`."""
    aliases, *halves = pieces
    return Table(tuple(TablePart(*half) for half in zip(halves[::2], halves[1::2], strict=True)), aliases)


class Holdings:
    """The holders of each box, from the tables of all ranks.

    Attributes:
        where: array name -> its positions. Names with equal positions are cut and held alike.
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
        """Return data type, global shape, and box -> holding ranks, without the empty boxes of a larger array."""
        held = [(places[place], ranks) for number, place in self.where[name] for places, ranks in self._places[number]]
        (dtype, shape, _), first_ranks = held[0]
        holders: dict[Box, list[Ranks]] = {}
        for (other_dtype, other_shape, box), ranks in held:
            if (other_dtype, other_shape) != (dtype, shape):
                raise ShapeMismatchError(
                    f"{name} is {other_dtype} {list(other_shape)} on rank {ranks[0]} and {dtype} {list(shape)} on rank "
                    f"{first_ranks[0]}; all ranks must save the same data type and shape under one name"
                )
            if box.num_elements or 0 in shape:
                holders.setdefault(whole(shape) if 0 in shape else box, []).append(ranks)
        return dtype, shape, {box: _union(sets) for box, sets in holders.items()}


def _union(sets: Sequence[Ranks]) -> Ranks:
    return sets[0] if len(sets) == 1 else tuple(sorted({rank for ranks in sets for rank in ranks}))


class Address(NamedTuple):
    """The place of one rank's leaf in a global array. Sharing patterns compute it; plans see nothing else.

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
