"""For tests of configs and commands: each file of conf/ is parsed once, and the collector looks at what is new alone."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tests.conf.configs import parsed_once


@pytest.fixture(scope="package", autouse=True)
def _quick_to_compose() -> Iterator[None]:
    """Hydra makes so many objects that the collector often looks through all there is."""
    gc.collect()
    gc.freeze()
    with parsed_once():
        yield
    gc.unfreeze()
