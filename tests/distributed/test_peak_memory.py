"""What a save and a direct load take on top of the state is bounded by settings, however large the state is."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch

from ckpt import CheckpointCoordinator, StateComponent
from ckpt.backends.base import Backend
from ckpt.backends.kimi_engine import KimiEngineBackend
from ckpt.backends.tensorstore import TensorStoreBackend
from ckpt.backends.zarr import ZarrBackend
from ckpt.loading.direct import DirectLoad
from ckpt.ranks.topology import Topology
from recipes.benchmark.measuring import PeakMemory
from tests.support.covering import sampled
from tests.support.ranks import run_ranks
from tests.support.states import Fitted, coordinator, random_bits

BUFFER_MIB = PACKED_MIB = IN_FLIGHT_MIB = 8
SLACK_MIB = 10  # Python's own
MIB = 1 << 20
_M_MMAP_THRESHOLD = -3  # malloc.h: what is larger goes back to the system when it is freed, and is not kept for later


def _backend(name: str) -> Backend:
    if name == "zarr":
        return ZarrBackend(buffer_mib=BUFFER_MIB)
    if name == "safetensors":
        return KimiEngineBackend(buffer_mib=BUFFER_MIB, pool=False)
    return TensorStoreBackend(kvstore=name, buffer_mib=BUFFER_MIB)


def _grown(topology: Topology, root: Path, backend: str) -> tuple[float, float]:
    """Save and load 112 MiB, of which 32 are small tensors and 32 are transposed; return what each took, in MiB."""
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, MIB)
    state = {f"large {n}": random_bits((64, 1 << 16), torch.float32, n) for n in range(3)}
    state |= {f"small {n}": random_bits((4096,), torch.float32, n) for n in range(2048)}
    state |= {f"transposed {n}": random_bits((1 << 9, 1 << 12), torch.float32, n).t() for n in range(4)}
    tiny = _coordinator(topology, root / "tiny", {"w": torch.arange(9)}, backend)
    tiny.load_checkpoint(tiny.save_checkpoint(checkpoint_id="1"))  # what is imported and made once is there now
    made = _coordinator(topology, root, state, backend)
    memory = PeakMemory()
    path = made.save_checkpoint(checkpoint_id="1")
    saving = memory.mib()
    memory = PeakMemory()
    made.load_checkpoint(path)
    return saving, memory.mib()


def _coordinator(topology: Topology, root: Path, state: dict[str, torch.Tensor], backend: str) -> CheckpointCoordinator:
    return coordinator(
        topology,
        root,
        [StateComponent("model", Fitted(state), "per_rank")],
        backend=_backend(backend),
        strategy=DirectLoad(max_in_flight_mib=IN_FLIGHT_MIB),
        packed_mib=PACKED_MIB,
        pattern_check="off",
    )


@sampled("backend", ["zarr", pytest.param("ocdbt", marks=pytest.mark.full), "safetensors"])
def test_a_save_takes_its_buffers_and_a_load_its_slab(tmp_path: Path, backend: str) -> None:
    for saving, loading in run_ranks(2, _grown, tmp_path, backend, is_only=True):
        copied = 8  # one tensor that is not contiguous
        assert saving <= BUFFER_MIB + PACKED_MIB + copied + SLACK_MIB
        assert loading <= IN_FLIGHT_MIB + SLACK_MIB
