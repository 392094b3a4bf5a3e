"""For tests of configs and commands: each file of conf/ is parsed once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conf.configs import parsed_once


@pytest.fixture(scope="package", autouse=True)
def _parsed_once() -> Iterator[None]:
    with parsed_once():
        yield
