"""For unit tests: examples in turns, and a collector that looks at what is new alone."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", params=[1, *(pytest.param(turn, marks=pytest.mark.full) for turn in (2, 3, 4))])
def turns(request: pytest.FixtureRequest) -> None:
    """For tests of random examples that take long: a number of them by default, four times as many in full."""


@pytest.fixture(scope="module")
def quick_collector() -> Iterator[None]:
    """`gc.collect` does not look through what was there before this module began."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
