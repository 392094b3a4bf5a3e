"""Saves and loads of one component, on a device or on the host, for tests of what a device needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ckpt import CheckpointCoordinator, StateComponent
from ckpt.backends.zarr import ZarrBackend
from ckpt.loading.direct import DirectLoad
from ckpt.loading.strategy import LoadingStrategy
from ckpt.ranks.topology import Topology
from tests.device.devices import made
from tests.device.memory import Kind, require_same, state_of, values_of
from tests.support.states import Held, backend_named, sized

ZSTD = [{"name": "zstd", "configuration": {"level": 1, "checksum": False}}]


def coordinator(
    topology: Topology,
    root: Path,
    held: Held,
    *,
    device: str = "cpu",
    backend: str = "zarr",
    strategy: LoadingStrategy | None = None,
    pinned_mib: int = 32,
    pattern: str = "replicated",
    component: Mapping[str, Any] | None = None,
    **options: Any,
) -> CheckpointCoordinator:
    """One component on this rank's device; little memory on the way, so that all of it is used again and again."""
    on = made(device, pinned_mib=pinned_mib)
    on.use(topology.local_rank)
    return CheckpointCoordinator(
        [StateComponent("model", held, pattern, **component or {})],
        {},
        topology,
        root,
        backend=ZarrBackend(compressors=ZSTD) if backend == "zstd" else backend_named(backend),
        strategy=strategy or sized(DirectLoad(), in_flight_bytes=1 << 20),
        device=on,
        **options,
    )


def torch_device(device: str, topology: Topology) -> torch.device:
    return torch.device(device, topology.local_rank)


Saved = Callable[..., Path]
"""Makes a checkpoint on the host, from the values of a seed: (kinds, seed, backend="zarr")."""


def require_saved(path: str, kinds: Mapping[str, Kind], seed: int) -> None:
    """Load a checkpoint here, and compare every bit."""
    held = Held(state_of(kinds, 99))
    coordinator(Topology.alone(), Path(path).parent, held).load_checkpoint(path)
    assert held.loaded is not None
    require_same(held.loaded, values_of(kinds, seed))
