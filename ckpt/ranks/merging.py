"""Reductions of what the ranks say in a phase: associative, and independent of the order in which parts are merged.

A rank wraps its values (`phase.merge = {"seconds": most(took), "bytes": total(num_bytes)}`); after the phase all ranks have the merged
values, without the wrapping. What a phase carries so does not grow with the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple


class Alike(NamedTuple):
    """Whether the ranks that gave a value gave the same.

    Attributes:
        value: that of the lowest of these ranks.
        odd_rank: the lowest rank with another value; None: all are alike.
        odd_value: its value.
    """

    value: Any
    odd_rank: int | None
    odd_value: Any

    @property
    def is_alike(self) -> bool:
        return self.odd_rank is None


class Merged(NamedTuple):
    """A value on its way: the name of its reduction, and what has been merged so far, as JSON."""

    kind: str
    value: Any


def total(value: Any) -> Merged:
    """Add numbers; of lists and dictionaries, entry by entry."""
    return Merged("total", value)


def most(value: Any) -> Merged:
    """The largest number, or list of numbers."""
    return Merged("most", value)


def least(value: Any) -> Merged:
    """The smallest number, or list of numbers."""
    return Merged("least", value)


def alike(value: Any) -> Merged:
    """Compare JSON values; the result is an `Alike`."""
    return Merged("alike", value)


def alike_by_name(values: Mapping[str, Any]) -> Merged:
    """Compare JSON values by name, each between the ranks that have it; the result is {name: Alike}."""
    return Merged("alike by name", values)


def first(values: Mapping[str, Any]) -> Merged:
    """Of each key the value of the lowest rank that has it; the result is {key: (rank, value)}, in the order of ranks and then of keys."""
    return Merged("first", values)


def slowest(seconds: float, rank: int) -> Merged:
    """The most seconds, and the lowest rank that took them; the result is [seconds, -rank]."""
    return most([seconds, -rank])


def first_difference(values: Mapping[str, Alike]) -> tuple[str, int, Any, Any] | None:
    """Return the first value that differs on a rank from that on the lowest one: name, rank, its value, that one's; None: all are alike."""
    found = [(merge.odd_rank, name, merge.odd_value, merge.value) for name, merge in values.items() if merge.odd_rank is not None]
    if not found:
        return None
    rank, name, value, there = min(found, key=lambda one: one[0])
    return name, rank, value, there


def merged(reports: Iterable[tuple[Mapping[str, Sequence[Any]], int, int]]) -> dict[str, Sequence[Any]]:
    """Merge what ranks have sent: {name: `Merged`} as JSON. A name that some ranks leave out is merged over the others.

    Args:
        reports: what some ranks have sent, the lowest of them, and how many they are: of thousands most say the same.
    """
    found: dict[str, Sequence[Any]] = {}
    for part, rank, num_ranks in reports:
        for name, (kind, value) in part.items():
            known, begun = found.get(name), _KINDS[kind].begin(value, rank, num_ranks)
            found[name] = (kind, begun if known is None else _KINDS[kind].join(known[1], begun))
    return found


def ended(values: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Return the results by name."""
    return {name: _KINDS[kind].end(value) for name, (kind, value) in values.items()}


class _Kind(NamedTuple):
    """How a reduction begins with the value of ranks, the lowest of which is given and their number, joins two parts, and ends."""

    join: Callable[[Any, Any], Any]
    begin: Callable[[Any, int, int], Any] = lambda value, _rank, _num_ranks: value
    end: Callable[[Any], Any] = lambda value: value


def _sum(one: Any, other: Any) -> Any:
    if isinstance(one, Mapping):
        return {**other, **{key: _sum(value, other[key]) if key in other else value for key, value in one.items()}}
    if isinstance(one, Sequence):
        return [_sum(*pair) for pair in zip(one, other, strict=True)]
    return one + other


def _times(value: Any, _rank: int, num_ranks: int) -> Any:
    if isinstance(value, Mapping):
        return {key: _times(inner, _rank, num_ranks) for key, inner in value.items()}
    if isinstance(value, Sequence):
        return [_times(inner, _rank, num_ranks) for inner in value]
    return value * num_ranks


def _compare(one: list[Any], other: list[Any]) -> list[Any]:
    """Join two of [lowest rank, its value, lowest rank with another value, that value]."""
    low, high = sorted((one, other), key=lambda part: int(part[0]))
    odd = [low[2:], high[2:] if high[1] == low[1] else high[:2]]
    return [*low[:2], *min((part for part in odd if part[0] is not None), key=lambda part: int(part[0]), default=[None, None])]


def _keep_lowest(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    return {**one, **{key: value for key, value in other.items() if key not in one or value[0] < one[key][0]}}


_KINDS = {
    "total": _Kind(_sum, _times),
    "most": _Kind(max),
    "least": _Kind(min),
    "alike": _Kind(_compare, lambda value, rank, _: [rank, value, None, None], lambda value: Alike(*value[1:])),
    "alike by name": _Kind(
        lambda one, other: {**one, **{key: _compare(one[key], value) if key in one else value for key, value in other.items()}},
        lambda values, rank, _: {key: [rank, value, None, None] for key, value in values.items()},
        lambda values: {key: Alike(*value[1:]) for key, value in values.items()},
    ),
    "first": _Kind(
        _keep_lowest,
        lambda values, rank, _: {key: (rank, value) for key, value in values.items()},
        lambda values: dict(sorted(((key, tuple(value)) for key, value in values.items()), key=lambda one: (one[1][0], one[0]))),
    ),
}
