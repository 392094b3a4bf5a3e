"""Parameters of a test that need not all be tried together: by default each choice of a few axes, in full more or all.

Most faults come of one choice, or of two that meet (Kuhn, Wallace and Gallo, "Software fault interactions", 2004).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pytest
from allpairspy import AllPairs


def covering(
    axes: Mapping[str, Iterable[Any]],
    *,
    default: int = 2,
    full: int | None = None,
    is_possible: Callable[..., bool] = lambda *_: True,
) -> pytest.MarkDecorator:
    """Parametrize a test; rows that only a run of everything tries are marked `full`.

    Args:
        axes: the name of each parameter, and its values.
        default: of how many axes all choices occur by default: 1, each value; 2, each pair of values.
        full: the same in full; None: the whole product.
        is_possible: whether the first few values of a row go together; rows of which it says no are left out.
    """
    values = {name: list(choices) for name, choices in axes.items()}
    return and_in_full(tuple(values), rows(values, default, is_possible), rows(values, full, is_possible))


def and_in_full(
    names: Sequence[str],
    by_default: Sequence[tuple[Any, ...]],
    full: Iterable[tuple[Any, ...]],
    *,
    ids: Callable[[Any], str] | None = None,
) -> pytest.MarkDecorator:
    """Parametrize a test by rows of its own choice; the others among `full` are marked so, each once."""
    rest: list[tuple[Any, ...]] = []
    for row in full:
        if row not in by_default and row not in rest:
            rest.append(row)
    marked = [pytest.param(*row, marks=pytest.mark.full) for row in rest]
    return pytest.mark.parametrize(tuple(names), [pytest.param(*row) for row in by_default] + marked, ids=ids)


def sampled(
    names: str | Sequence[str],
    rows: Iterable[Any],
    by_default: int = 1,
    *,
    ids: Iterable[str] | Callable[[Any], str] | None = None,
) -> pytest.MarkDecorator:
    """Parametrize a test by rows that differ in degree, not in kind: the first few run by default, the others are marked `full`."""
    params = [
        row if isinstance(row, type(pytest.param())) else pytest.param(*([row] if isinstance(names, str) else row))
        for row in rows
    ]
    rest = [pytest.param(*one.values, marks=[*one.marks, pytest.mark.full], id=one.id) for one in params[by_default:]]
    return pytest.mark.parametrize(names, [*params[:by_default], *rest], ids=ids)


def rows(
    values: Mapping[str, list[Any]], strength: int | None, is_possible: Callable[..., bool] = lambda *_: True
) -> list[tuple[Any, ...]]:
    """Rows in which every choice of `strength` axes (1 or 2) occurs; None: all rows."""
    if strength is None or len(values) < 2:
        return [row for row in itertools.product(*values.values()) if is_possible(*row)]
    assert strength in (1, 2), "each value, or each pair"
    return [tuple(row) for row in AllPairs(list(values.values()), lambda row: is_possible(*row), n=strength)]
