"""Tests of a device compile the stand-in once, before their time counts."""

from __future__ import annotations

import pytest

from tests.device import devices


@pytest.fixture(autouse=True)
def _device_is_ready(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("npu") is not None:
        devices.prepare("npu")
