"""What two-stage loading in device memory asks of its ranks, and what it may not wait for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ckpt
import ckpt.memory.device
from ckpt import dist_checkpointing
from ckpt.dist_checkpointing import ShardedTensor
from ckpt.dist_checkpointing.strategies.two_stage import TwoStageDataParallelLoadShardedStrategy
from ckpt.errors import ConfigurationError
from ckpt.loading.two_stage.slots import DeviceSlots
from ckpt.loading.two_stage.spread_worker import SpreadWorker
from ckpt.ranks.topology import Topology
from tests.device.devices import ADVERSARY
from tests.device.memory import AWKWARD, Memory, values_of
from tests.device.saves import Saved, coordinator, torch_device
from tests.support.covering import sampled
from tests.support.ranks import run_ranks
from tests.support.states import Fitted, spreading

pytestmark = pytest.mark.npu


@sampled("cpu_transfer", [False, True], ids=["by the device", "by the host"])
def test_once_ranks_wait_for_each_other_none_waits_for_its_whole_device(saved: Saved, cpu_transfer: bool) -> None:
    """There the network may be at work for a rank that is gone, and nobody would hear of it."""
    path = saved(AWKWARD, 2)
    run_ranks(2, _load_and_watch, path, cpu_transfer, nodes=[1, 1], process_group=True, device="npu", environment=ADVERSARY)  # fmt: skip


def _load_and_watch(topology: Topology, path: Path, cpu_transfer: bool) -> None:
    memory = Memory(AWKWARD, 1, torch_device("npu", topology))
    strategy = spreading(cpu_transfer=cpu_transfer, in_flight_bytes=8 << 20)
    loader = coordinator(topology, path.parent, Fitted(memory.tensors()), device="npu", strategy=strategy)
    run, wait_for = SpreadWorker.run, ckpt.memory.device.wait_for
    waited: list[torch.device] = []

    def watched(worker: SpreadWorker) -> None:
        ckpt.memory.device.wait_for = waited.append
        try:
            run(worker)
        finally:
            ckpt.memory.device.wait_for = wait_for

    SpreadWorker.run = watched  # type: ignore[method-assign]
    for _ in range(2):
        loader.load_checkpoint(path)
        assert waited == []
    memory.require_filled(values_of(AWKWARD, 2), around=1)


def test_ranks_that_load_into_different_memory_are_told_so(tmp_path: Path) -> None:
    said = run_ranks(2, _load_into_host_and_device, tmp_path, process_group=True, device="npu")
    assert (
        said
        == [
            "cpu_transfer=False: rank 0 into npu memory, rank 1 into cpu memory; bytes cannot travel between them; give "
            "cpu_transfer=True"
        ]
        * 2
    )


def _load_into_host_and_device(topology: Topology, root: Path) -> str:
    values = torch.arange(60_000.0).view(300, 200)
    root = root / "saved"
    if topology.is_lead:
        root.mkdir()
    dist.barrier()
    dist_checkpointing.save({"w": ShardedTensor.from_rank_offsets("w", values, replica_id=topology.rank)}, root)
    out = torch.zeros(300, 200, device="cpu" if topology.rank else torch_device("npu", topology))
    wanted = {"w": ShardedTensor.from_rank_offsets("w", out, replica_id=topology.rank)}
    with pytest.raises(ConfigurationError) as refused:
        dist_checkpointing.load(
            wanted, root, TwoStageDataParallelLoadShardedStrategy(dist.group.WORLD, cpu_transfer=False)
        )
    return str(refused.value).partition(": ")[2]


def test_no_copy_is_under_way_to_slots_that_are_let_go_of() -> None:
    run_ranks(1, _bring_and_close, device="npu", environment=ADVERSARY)


def _bring_and_close(topology: Topology) -> None:
    slots = DeviceSlots(torch.zeros(1 << 20, dtype=torch.uint8, device="npu"))
    values = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8).pin_memory()
    slots.bring(0, values, slots.memory)
    slots.close()
    host, other = torch.empty(1 << 20, dtype=torch.uint8, pin_memory=True), torch.npu.Stream()
    with torch.npu.stream(other):
        host.copy_(slots.memory, non_blocking=True)
    other.synchronize()
    assert torch.equal(host, values)


def test_the_network_does_not_wait_for_what_the_program_has_queued_since() -> None:
    """That may hold collectives, which wait for other ranks."""
    found = run_ranks(2, _carry_beside_the_program, process_group=True, device="npu", environment=ADVERSARY)
    assert found == [("carried", 0.0, 1.0)] * 2


def _carry_beside_the_program(topology: Topology) -> tuple[str, float, float]:
    where = torch_device("npu", topology)
    slots = DeviceSlots(torch.full((1 << 10,), topology.rank, dtype=torch.uint8, device=where))
    other, ones = torch.zeros(5, device=where), torch.ones(5).pin_memory()
    torch.npu.synchronize()
    other.copy_(ones, non_blocking=True)
    slots.carry(lambda: _begun(slots.memory))()
    with torch.npu.stream(torch.npu.Stream()):
        carried, found = slots.memory.cpu(), float(other.max().cpu())
    torch.npu.synchronize()
    assert not carried.any(), "it is that of rank 0"
    return "carried", found, float(other.max())


def _begun(memory: torch.Tensor) -> Callable[[], None]:
    work = dist.broadcast(memory, 0, async_op=True)
    assert work is not None
    return work.wait
