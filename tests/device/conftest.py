"""For tests of devices: the stand-in is compiled before their time counts, and what the host saved is saved once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from ckpt.ranks.topology import Topology
from tests.device import devices
from tests.device.memory import Kind, state_of
from tests.device.saves import Saved, coordinator
from tests.support.states import Held


@pytest.fixture(autouse=True)
def _device_is_ready(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("npu") is not None:
        devices.prepare("npu")


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """See `Saved`; by this process, which has no device, and once for all tests."""
    made: dict[tuple[tuple[str, ...], int, str], Path] = {}

    def save(kinds: Mapping[str, Kind], seed: int, backend: str = "zarr") -> Path:
        key = tuple(kinds), seed, backend
        if key not in made:
            root = tmp_path_factory.mktemp("saved")
            host = coordinator(Topology.alone(), root, Held(state_of(kinds, seed)), backend=backend)
            made[key] = Path(host.save_checkpoint(checkpoint_id=f"{seed}"))
        return made[key]

    return save
