"""The stand-in between processes: its collectives, what torch builds on them, and memory that is opened elsewhere.

All checks run on one pair of ranks, each on a device of its own.
"""

from __future__ import annotations

import copy
import os
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor import randn as distributed_randn
from torch.multiprocessing import reductions
from torch.nn.parallel import DistributedDataParallel

from ckpt.ranks.topology import Topology
from tests.npu_sim.checks import Checks, settings
from tests.support.ranks import Dead, run_ranks

WORLD = 2

check = Checks()


def _full(value: float, count: int = 1 << 10) -> torch.Tensor:
    made = torch.full((count,), float(value), device="npu")
    torch.npu.current_stream().synchronize()  # some of them are read on another stream
    return made


# ---------------------------------------------------------------- collectives


@check
def _the_devices_collectives_are_hccl_beside_gloo(rank: int, _folder: Path) -> None:
    assert dist.Backend.default_device_backend_map["npu"] == "hccl"
    group = dist.group.WORLD
    assert group._get_backend(torch.device("npu")).name() == "hccl"
    assert group._get_backend(torch.device("cpu")).name() == "gloo"
    host = torch.full((3,), float(rank))
    dist.all_reduce(host)
    assert host.eq(1).all()
    said: list[object] = [None] * WORLD
    dist.all_gather_object(said, {"rank": rank})
    assert said == [{"rank": 0}, {"rank": 1}]


@check
def _every_collective_moves_the_right_bytes(rank: int, _folder: Path) -> None:
    mine, other = rank + 1.0, 2.0 - rank
    got = _full(mine)
    dist.broadcast(got, src=1)
    assert got.eq(2).all()
    dist.all_reduce(got, dist.ReduceOp.MAX)
    assert got.eq(2).all()
    dist.reduce(total := _full(mine), dst=0)
    assert rank == 1 or total.eq(3).all()
    parts = [_full(0) for _ in range(WORLD)]
    dist.all_gather(parts, _full(mine))
    assert [part[0].item() for part in parts] == [1, 2]
    dist.all_gather_single(joined := _full(0, 8), _full(mine, 4))
    assert joined.tolist() == [1] * 4 + [2] * 4
    dist.reduce_scatter_single(share := _full(0, 4), joined)
    assert share.eq(2 * mine).all()
    dist.reduce_scatter(share, [_full(5, 4), _full(6, 4)])
    assert share.eq(10 + 2 * rank).all()
    dist.all_to_all_single(swapped := _full(0, 4), _full(mine, 4))
    assert swapped.tolist() == [1, 1, 2, 2]
    gathered = [_full(0, 4) for _ in range(WORLD)] if rank == 0 else None
    dist.gather(_full(mine, 4), gathered, dst=0)
    assert gathered is None or [part[0].item() for part in gathered] == [1, 2]
    dist.scatter(share, [_full(7, 4), _full(8, 4)] if rank == 0 else None, src=0)
    assert share.eq(7 + rank).all()
    if rank == 0:
        dist.send(_full(mine), 1)
    else:
        dist.recv(got, 0)
        assert got.eq(other).all()
    dist.barrier()


@check
def _both_may_send_before_they_receive(rank: int, _folder: Path) -> None:
    mine, got = _full(rank + 1, 1 << 20), _full(0, 1 << 20)
    works = [dist.isend(mine, 1 - rank), dist.irecv(got, 1 - rank)]
    for work in works:
        work.wait()
    assert got.eq(2 - rank).all()
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, got, 1 - rank), dist.P2POp(dist.irecv, mine, 1 - rank)]):
        work.wait()
    assert mine.eq(rank + 1).all()


@check
def _what_hccl_does_not_move_is_refused(_rank: int, _folder: Path) -> None:
    group = dist.new_group([0, 1], backend="hccl")
    for refused, why in (
        (torch.ones(4), "No backend type associated with device type cpu"),
        (torch.ones(4, device="npu").to(torch.float8_e4m3fn), "Unsupported data type for HCCL .*Float8_e4m3fn"),
        (torch.ones(4, 4, device="npu").t()[1:], "Tensors must be contiguous"),
    ):
        with pytest.raises(RuntimeError, match=why):
            dist.broadcast(refused, 0, group=group)
    host = dist.new_group([0, 1], backend="gloo")
    with pytest.raises(RuntimeError, match="No backend type associated with device type npu"):
        dist.broadcast(_full(1), 0, group=host)
    dist.broadcast(bits := torch.ones(4, device="npu").to(torch.float8_e4m3fn).view(torch.uint8), 0, group=group)
    assert bits.view(torch.float8_e4m3fn).float().eq(1).all()
    dist.barrier(group=group)


# ---------------------------------------------------------------- when they happen


@check
def _a_collective_comes_after_what_is_queued_before_it(rank: int, _folder: Path) -> None:
    given, host = _full(0), torch.full((1 << 10,), rank + 1.0).pin_memory()
    torch.npu.synchronize()
    with settings(NPU_SIM_COPY_DELAY_US=200_000):
        given.copy_(host, non_blocking=True)
        dist.all_reduce(given)
        assert given.eq(3).all()


@check
def _the_host_does_not_wait_for_the_others_but_later_work_does(rank: int, _folder: Path) -> None:
    for waits in (False, True):
        got, seen = _full(rank + 5), torch.zeros(1 << 10).pin_memory()
        dist.barrier()
        if rank == 0:
            time.sleep(0.6)
        start = time.monotonic()
        work = dist.all_reduce(got, async_op=True)
        if waits:
            work.wait()
        assert time.monotonic() - start < 0.4
        if rank == 1:
            assert not work.is_completed()
            with torch.npu.stream(torch.npu.Stream()):  # waits for nothing
                seen.copy_(got)
            assert seen.eq(6).all()
        if waits:
            assert (got * 2).eq(22).all()
        torch.npu.synchronize()
        assert work.is_completed() and got.eq(11).all()


@check
def _other_threads_go_on_while_one_waits(rank: int, _folder: Path) -> None:
    waits = (
        lambda got: torch.npu.synchronize(),
        lambda got: torch.npu.current_stream().synchronize(),
        lambda got: torch.npu.current_stream().record_event().synchronize(),
        lambda got: got.cpu(),
        lambda got: got[0].item(),
        lambda got: torch.empty(3, device="npu").copy_(torch.ones(3)),
    )
    for wait in waits:
        got, over = _full(rank), threading.Event()
        ticks: list[float] = []
        thread = threading.Thread(target=_tick, args=(over, ticks))
        dist.barrier()
        if rank == 0:
            time.sleep(0.2)
        thread.start()
        dist.all_reduce(got)
        wait(got)
        over.set()
        thread.join()
        assert rank == 0 or len(ticks) > 3


def _tick(over: threading.Event, ticks: list[float]) -> None:
    while not over.wait(0.01):
        ticks.append(time.monotonic())


@check
def _a_wait_with_a_limit_keeps_the_host(rank: int, _folder: Path) -> None:
    got = _full(rank)
    dist.barrier()
    if rank == 0:
        time.sleep(0.6)
    work = dist.all_reduce(got, async_op=True)
    if rank == 1:
        with pytest.raises(RuntimeError, match="not over within 100 ms"):
            work.wait(timedelta(milliseconds=100))
    work.wait(timedelta(seconds=20))
    assert work.is_completed() and got.eq(1).all()


@check
def _a_collective_is_late_by_itself_and_at_once_for_who_waits(rank: int, _folder: Path) -> None:
    got = _full(rank + 1)
    dist.barrier()
    with settings(NPU_SIM_COPY_DELAY_US=8_000_000):
        start = time.monotonic()
        work = dist.all_reduce(got, async_op=True)
        time.sleep(0.3)
        assert not work.is_completed()
        with torch.npu.stream(torch.npu.Stream()):  # waits for nothing
            assert got.cpu().eq(rank + 1).all()
        torch.npu.synchronize()
        assert time.monotonic() - start < 6
    assert got.eq(3).all()


@check
def _an_aborted_group_keeps_nobody_waiting_and_its_memory_to_itself(rank: int, _folder: Path) -> None:
    group = dist.new_group([0, 1], backend="hccl", timeout=timedelta(seconds=12))
    got = _full(rank + 1, 1 << 17)
    dist.all_reduce(got, group=group)
    assert got[0].item() == 3
    if rank == 1:
        works = [dist.all_reduce(got, group=group, async_op=True) for _ in range(2)]  # the other one never takes part
        time.sleep(0.2)
        address = got.data_ptr()
        del got
        start = time.monotonic()
        group.abort()
        torch.npu.synchronize()
        assert time.monotonic() - start < 6
        for work in works:
            with pytest.raises(RuntimeError, match="the communicator was aborted"):
                work.wait()
        assert _full(9, 1 << 17).data_ptr() != address
    dist.barrier()
    dist.destroy_process_group(group)  # closes the other one's connections, and what it began ends


@check
def _memory_of_a_pending_collective_is_not_given_out_again(rank: int, _folder: Path) -> None:
    got = _full(rank + 1, 1 << 16)
    address = got.data_ptr()
    dist.barrier()
    if rank == 0:
        time.sleep(0.3)
    dist.all_reduce(got, async_op=True)
    del got
    assert rank == 0 or _full(9, 1 << 16).data_ptr() != address
    dist.barrier()
    torch.npu.synchronize()
    addresses = [one.data_ptr() for one in [_full(9, 1 << 16) for _ in range(2)]]
    assert address in addresses


# ---------------------------------------------------------------- what torch builds on them


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 4))


def _trained(model: nn.Module, device: str, rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        optimizer.zero_grad()
        model((torch.arange(16.0).view(2, 8) + rank + step).to(device)).pow(2).mean().backward()
        optimizer.step()
    return model, optimizer


def _assert_same(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.cpu(), other, rtol=0, atol=1e-6)


def _mesh(device: str) -> DeviceMesh:
    return init_device_mesh(device, (WORLD,))


@check
def _data_parallel_training_is_the_hosts(rank: int, _folder: Path) -> None:
    host, _ = _trained(DistributedDataParallel(_model()), "cpu", rank)
    there, _ = _trained(DistributedDataParallel(_model().npu()), "npu", rank)
    _assert_same(list(there.parameters()), list(host.parameters()))


@check
def _sharded_training_is_the_hosts_and_survives_a_checkpoint(rank: int, folder: Path) -> None:
    host = _model()
    fully_shard(host, mesh=_mesh("cpu"))
    there = _model().npu()
    for layer in (there[0], there[3], there):
        fully_shard(layer, mesh=_mesh("npu"))
    with settings(NPU_SIM_POISON=1, NPU_SIM_COPY_DELAY_US=20_000):
        _trained(host, "cpu", rank)
        there, optimizer = _trained(there, "npu", rank)
    whole = [tensor.full_tensor() for tensor in there.state_dict().values()]
    _assert_same(whole, [tensor.full_tensor() for tensor in host.state_dict().values()])
    model_state, optimizer_state = get_state_dict(there, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder / "saved")
    dcp.async_save({"model": model_state}, checkpoint_id=folder / "async").result()
    for parameter in there.parameters():
        parameter.detach().to_local().zero_()
    for name in ("saved", "async"):
        wanted = {"model": copy.deepcopy(model_state)}
        dcp.load(wanted, checkpoint_id=folder / name)
        set_state_dict(there, optimizer, model_state_dict=wanted["model"], optim_state_dict=optimizer_state)
        for found, before in zip(there.state_dict().values(), whole, strict=True):
            assert torch.equal(found.full_tensor(), before)


@check
def _distributed_tensors_are_laid_out_and_gathered(_rank: int, _folder: Path) -> None:
    mesh, whole = _mesh("npu"), torch.arange(30.0).view(5, 6)
    rows = distribute_tensor(whole.npu(), mesh, [Shard(0)])
    assert rows.to_local().is_npu and torch.equal(rows.full_tensor().cpu(), whole)
    assert torch.equal(rows.redistribute(mesh, [Shard(1)]).full_tensor().cpu(), whole)
    assert torch.equal((rows + 1).redistribute(mesh, [Replicate()]).to_local().cpu(), whole + 1)
    torch.npu.manual_seed(7)
    drawn = distributed_randn(6, 4, device_mesh=mesh, placements=[Shard(0)]).full_tensor().cpu()
    assert len(drawn.unique()) == 24


# ---------------------------------------------------------------- memory opened elsewhere


@check
def _memory_can_be_opened_by_another_process(rank: int, _folder: Path) -> None:
    mine = (torch.arange(1 << 16, dtype=torch.int32) * (rank + 1)).npu().view(256, 256)
    handles: list[tuple[Callable[..., torch.Tensor], tuple[object, ...]]] = [None] * WORLD  # type: ignore[list-item]
    dist.all_gather_object(handles, reductions.reduce_tensor(mine.t()[3:]))
    rebuild, arguments = handles[1 - rank]
    assert arguments[6] == 1 - rank
    seen = rebuild(*arguments[:6], rank, *arguments[7:])  # on this rank's device
    expected = (torch.arange(1 << 16, dtype=torch.int32) * (2 - rank)).view(256, 256).t()[3:]
    assert seen.device.index == rank and torch.equal(seen.cpu(), expected)
    dist.barrier()
    seen.fill_(-1 - rank)
    torch.npu.synchronize()
    dist.barrier()
    assert mine.t()[3:].eq(rank - 2).all() and torch.equal(mine.t()[:3].cpu() // (rank + 1), _first_columns())
    with pytest.raises(RuntimeError, match="only allocations of 65536 bytes and more can be shared"):
        reductions.reduce_tensor(torch.ones(3, device="npu"))
    dist.barrier()


def _first_columns() -> torch.Tensor:
    return torch.arange(1 << 16, dtype=torch.int32).view(256, 256).t()[:3]


# ---------------------------------------------------------------- the tests


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    folder = tmp_path_factory.mktemp("ranks")
    return run_ranks(WORLD, _all_checks, folder, device="npu", process_group=True, timeout_s=120)


def _all_checks(topology: Topology, folder: Path) -> dict[str, str]:
    return check.run(topology.rank, folder)


@pytest.mark.npu
@pytest.mark.parametrize("name", check.names)
def test_on_two_ranks(outcomes: list[dict[str, str]], name: str) -> None:
    assert [found[name] for found in outcomes] == ["", ""]


@pytest.mark.npu
def test_a_rank_that_is_gone_shows_where_its_part_is_waited_for() -> None:
    assert run_ranks(WORLD, _second_rank_leaves, device="npu", process_group=True, expect_dead={1})[1] == Dead(3)


def _second_rank_leaves(topology: Topology) -> None:
    dist.all_reduce(_full(1))
    torch.npu.synchronize()
    if topology.rank == 1:
        os._exit(3)
    got = _full(1)
    dist.all_reduce(got)
    with pytest.raises(RuntimeError, match="Connection closed by peer|Connection reset by peer"):
        got.cpu()
    assert _full(4).eq(4).all()
