"""Saves of a device's tensors into memory that is kept, and loads from there: the bits of the call, though copies come late."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt import CheckpointCoordinator, StateComponent
from ckpt.backends.kimi_engine import KimiEngineBackend
from ckpt.loading.direct import DirectLoad
from ckpt.ranks.topology import Topology
from ckpt.saving.save_settings import SaveSettings
from tests.device.devices import ADVERSARY, CUDA, NPU, made
from tests.device.memory import AWKWARD, Memory, require_same, values_of
from tests.device.saves import require_saved, torch_device
from tests.support.ranks import run_ranks
from tests.support.states import Held, sized

pytestmark = pytest.mark.parametrize("device", [NPU, CUDA])


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_what_is_kept_is_what_was_on_its_way_at_the_call(tmp_path: Path, device: str, mode: str) -> None:
    (paths,) = run_ranks(1, _change_save_and_load, tmp_path, device, mode, device=device, environment=ADVERSARY)
    for seed, path in zip((2, 3, 4), paths, strict=True):
        require_saved(path, AWKWARD, seed)


def _change_save_and_load(topology: Topology, root: Path, device: str, mode: str) -> list[str]:
    memory = Memory(AWKWARD, 1, torch_device(device, topology))
    held, on, paths = Held(memory.tensors()), made(device, pinned_mib=32), []
    on.use(topology.local_rank)
    with CheckpointCoordinator(
        [StateComponent("model", held, "replicated")],
        {},
        topology,
        root,
        backend=KimiEngineBackend(),
        strategy=sized(DirectLoad(), in_flight_bytes=1 << 20),
        device=on,
        saves=SaveSettings(mode=mode),
    ) as checkpoints:
        for seed in (2, 3, 4):
            memory.change(seed, on_new_streams=seed == 3)
            paths.append(str(checkpoints.save_checkpoint(checkpoint_id=f"{seed}")))
            memory.change(98, on_new_streams=False)
            if seed == 3:
                checkpoints.load_checkpoint(paths[-1])
                assert checkpoints.last_load is not None and checkpoints.last_load.bytes_read == 0
                require_same(held.state, values_of(AWKWARD, 3))
    return paths
