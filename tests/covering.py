"""Parameters of a test that need not all be tried together: by default each choice of a few axes, in full more or all.

Most faults come of one choice, or of two that meet (Kuhn, Wallace and Gallo, "Software fault interactions", 2004).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
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
    by_default = rows(values, default, is_possible)
    rest = [row for row in rows(values, full, is_possible) if row not in by_default]
    params = [pytest.param(*row) for row in by_default]
    return pytest.mark.parametrize(tuple(values), params + [pytest.param(*row, marks=pytest.mark.full) for row in rest])


def rows(
    values: Mapping[str, list[Any]], strength: int | None, is_possible: Callable[..., bool] = lambda *_: True
) -> list[tuple[Any, ...]]:
    """Rows in which every choice of `strength` axes (1 or 2) occurs; None: all rows."""
    if strength is None or len(values) < 2:
        return [row for row in itertools.product(*values.values()) if is_possible(*row)]
    assert strength in (1, 2), "each value, or each pair"
    return [tuple(row) for row in AllPairs(list(values.values()), lambda row: is_possible(*row), n=strength)]
