"""A device that is nearly full: a load takes a smaller bucket, a save goes part by part, and what cannot be is one error of all ranks.

A state is smaller than what it is loaded through, so the room beside it is what may be missing. Only the stand-in can be made so small.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt.errors import DeviceMemoryError
from ckpt.loading.direct import DirectLoad
from ckpt.loading.strategy import LoadingStrategy
from ckpt.ranks.topology import Topology
from tests.device.devices import ADVERSARY
from tests.device.memory import AWKWARD, Filled, Heard, Memory, values_of
from tests.device.saves import Saved, coordinator, require_saved, torch_device
from tests.support.ranks import run_ranks
from tests.support.states import Fitted, sized, spreading

pytestmark = pytest.mark.npu

SMALL_DEVICE = ADVERSARY | {"NPU_SIM_MEMORY": f"{64 << 20}"}
ENOUGH = 200 << 10
"""For the smallest bucket, and not for the next one."""


@pytest.mark.parametrize(
    "strategy", [sized(DirectLoad(), in_flight_bytes=1 << 20), spreading(in_flight_bytes=8 << 20)], ids=["direct", "two-stage"]
)
def test_a_load_takes_a_smaller_bucket_and_says_so(saved: Saved, strategy: LoadingStrategy) -> None:
    path = saved(AWKWARD, 2)
    for said in run_ranks(2, _load_with_little_room, path, strategy, device="npu", environment=SMALL_DEVICE):
        assert sum("has no room for a bucket of" in line for line in said) == 1, said


def _load_with_little_room(topology: Topology, path: Path, strategy: LoadingStrategy) -> list[str]:
    device, heard = torch_device("npu", topology), Heard()
    memory = Memory(AWKWARD, 1, device)
    loader = coordinator(topology, path.parent, Fitted(memory.tensors()), device="npu", strategy=strategy)
    filled = Filled(device, ENOUGH)
    loader.load_checkpoint(path)
    assert filled.free() < 2 * ENOUGH, "it would have had room"
    memory.require_filled(values_of(AWKWARD, 2), around=1)
    return heard.lines


def test_a_device_without_any_room_is_one_error_of_all_ranks_and_the_next_load_succeeds(saved: Saved) -> None:
    said = run_ranks(2, _load_where_rank_1_is_full, saved(AWKWARD, 2), device="npu", environment=SMALL_DEVICE)
    assert said[0] == said[1]
    assert "rank 1" in said[0] and "device=npu: npu:1 has no room for " in said[0]


def _load_where_rank_1_is_full(topology: Topology, path: Path) -> str:
    device = torch_device("npu", topology)
    memory = Memory(AWKWARD, 1, device)
    loader = coordinator(topology, path.parent, Fitted(memory.tensors()), device="npu")
    filled = Filled(device, 0 if topology.rank == 1 else 32 << 20)
    with pytest.raises(DeviceMemoryError) as caught:
        loader.load_checkpoint(path)
    filled.let_go()
    loader.load_checkpoint(path)
    memory.require_filled(values_of(AWKWARD, 2), around=1)
    return str(caught.value)


def test_a_save_needs_no_room_on_the_device(tmp_path: Path) -> None:
    """Small tensors are joined there, and strided ones laid out, only where there is room."""
    (path,) = run_ranks(1, _save_without_room, tmp_path, device="npu", environment=SMALL_DEVICE)
    require_saved(path, AWKWARD, 3)


def _save_without_room(topology: Topology, root: Path) -> str:
    device = torch_device("npu", topology)
    memory = Memory(AWKWARD, 1, device)
    saver = coordinator(topology, root, Fitted(memory.tensors()), device="npu")
    memory.change(3, on_new_streams=True)
    filled = Filled(device, 0)
    path = saver.save_checkpoint(checkpoint_id="3")
    filled.let_go()
    return path


def test_an_optional_component_is_read_beside_its_memory_on_the_host_if_need_be(saved: Saved) -> None:
    run_ranks(1, _load_optional_without_room, saved(AWKWARD, 2), device="npu", environment=SMALL_DEVICE)


def _load_optional_without_room(topology: Topology, path: Path) -> None:
    device = torch_device("npu", topology)
    memory = Memory(AWKWARD, 1, device)
    loader = coordinator(topology, path.parent, Fitted(memory.tensors()), device="npu", component={"required": False})
    filled = Filled(device, 2 << 20)  # for a bucket, and not for the largest tensor once more
    loader.load_checkpoint(path)
    assert filled.free() < 5 << 20
    memory.require_filled(values_of(AWKWARD, 2), around=1)
