"""For unit tests: examples in turns."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module", params=[1, *(pytest.param(turn, marks=pytest.mark.full) for turn in (2, 3, 4))])
def turns(request: pytest.FixtureRequest) -> None:
    """For tests of random examples that take long: a number of them by default, four times as many in full."""
