"""What runs beside the real torch_npu: `python -m tests.torch_npu_stub.cases <file for the result> <function> <arguments>`.

On the stub libraries a device's work is late, as it is on a device: ACL_STUB_COPY_DELAY_US says by how much.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ckpt import CheckpointCoordinator, StateComponent, dist_checkpointing
from ckpt.dist_checkpointing import ShardedTensor
from ckpt.dist_checkpointing.strategies.tensorstore import (
    TensorStoreLoadShardedStrategy,
    TensorStoreSaveShardedStrategy,
)
from ckpt.dist_checkpointing.strategies.zarr import ZarrLoadShardedStrategy, ZarrSaveShardedStrategy
from ckpt.errors import CheckpointError, DeviceMemoryError
from ckpt.loading.direct import DirectLoad
from ckpt.loading.strategy import LoadingStrategy
from ckpt.loading.two_stage.two_stage import TwoStageLoad
from ckpt.memory.device import Device, SideStream, device_memory, pinned, wait_for, wait_for_accelerator
from ckpt.ranks.topology import Topology
from ckpt.state.state_digest import state_digest
from ckpt.state.statefuls import RNGState
from tests.support.states import ALL_DTYPES, Held, backend_named, random_bits, same_bits, sized

MIB = 1 << 20
STRATEGIES = {
    "zarr": (ZarrSaveShardedStrategy, ZarrLoadShardedStrategy),
    "tensorstore": (TensorStoreSaveShardedStrategy, TensorStoreLoadShardedStrategy),
}


def npu(local_rank: int = 0, **options: Any) -> Device:
    """The real device, in use."""
    device = Device(type="npu", collectives="hccl", plugin="torch_npu", **options)
    device.use(local_rank)
    return device


def require(got: torch.Tensor, want: torch.Tensor, what: object) -> None:
    assert got.device.type == "cpu" and same_bits(got, want), f"{what}: other bits"


# ---- the device


def what_the_wheel_is() -> list[str]:
    device = npu()
    import torch_npu

    assert torch.get_device_module("npu") is torch.npu is torch_npu.npu
    return [torch.__version__.partition("+")[0], torch_npu.__version__, str(device.torch_device), device.backends]


def each_rank_has_its_device() -> str:
    """Of two devices; returns what a third rank is told."""
    device = npu(1)
    assert device.torch_device == torch.device("npu", 1)
    assert torch.npu.current_device() == 1 and torch.npu.device_count() == 2
    assert torch.empty(3, device="npu").device == device.torch_device
    return sentence_of(lambda: npu(2))


def why_there_is_none() -> list[Any]:
    """The sentence, and whether torch_npu was imported on the way to it."""
    return [sentence_of(npu), "torch_npu" in sys.modules]


def memory_is_counted() -> None:
    """On a device of 256 MiB."""
    device = npu()
    before = device.memory()
    assert before.total == 256 * MIB and before.free == before.total and before.allocated == before.peak == 0
    held = device_memory(32 * MIB, device.torch_device)
    during = device.memory()
    assert 32 * MIB <= during.allocated < 33 * MIB, "a wheel's allocation is longer by its padding only"
    assert 32 * MIB <= before.free - during.free <= 34 * MIB
    del held
    torch.npu.empty_cache()
    after = device.memory()
    assert after.free == before.free and after.allocated == 0 and after.peak == during.allocated


def memory_that_is_not_there() -> str:
    device = npu()
    return sentence_of(lambda: device_memory(512 * MIB, device.torch_device))


def random_state(root: str) -> None:
    """The generator of the device comes back by value, and through a checkpoint; torch.manual_seed reaches it."""
    device = npu()
    torch.manual_seed(5)
    states = device.rng_state()
    assert list(states) == ["cpu", "npu[0]"] and len(states["npu[0]"]) == 16
    save(device, root, rng=RNGState(device))
    torch.manual_seed(6)
    other = device.rng_state()
    assert not torch.equal(other["npu[0]"], states["npu[0]"])
    device.set_rng_state(states)
    require(device.rng_state()["npu[0]"], states["npu[0]"], "set")
    device.set_rng_state(other)
    load(device, root, rng=RNGState(device))
    for name, state in device.rng_state().items():
        require(state, states[name], f"loaded {name}")


def collectives_are_named_as_torch_takes_them() -> None:
    """One rank: tensors of the host have gloo. HCCL itself is not there to be asked."""
    device = npu()
    dist.init_process_group(device.backends, store=dist.HashStore(), rank=0, world_size=1)
    tensor = torch.arange(5)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [0, 1, 2, 3, 4]
    group = dist.distributed_c10d._get_default_group()
    assert type(group._get_backend(torch.device("npu"))).__name__ == "ProcessGroupHCCL"
    dist.destroy_process_group()


# ---- copies


def pinned_memory() -> None:
    npu()
    assert pinned(1000).is_pinned() and pinned(0).numel() == 0
    assert pinned(1000)[17:900].is_pinned(), "a part of it, which is what copies use"
    assert torch.arange(5).pin_memory().is_pinned() and not torch.arange(5).is_pinned()


def every_data_type_there_and_back() -> None:
    """Blocking and not, whole and through strides, each bit for bit."""
    device = npu().torch_device
    for number, dtype in enumerate(ALL_DTYPES):
        host = random_bits((96, 80), dtype, number)
        require(host.to(device).cpu(), host, f"{dtype} blocking")
        require(through_pinned(host, device), host, f"{dtype} by way of pinned memory")
        require(host.to(device)[:, 3:41].cpu(), host[:, 3:41], f"{dtype} columns from the device")
        require(host.to(device).t().cpu(), host.t(), f"{dtype} transposed from the device")
        columns = torch.zeros_like(host).to(device)
        columns[:, 3:41].copy_(host[:, 3:41])
        want = torch.zeros_like(host)
        want[:, 3:41] = host[:, 3:41]
        require(columns.cpu(), want, f"{dtype} columns to the device")


def through_pinned(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """There and back on a side stream, both copies queued before the first is done."""
    going, coming = (pinned(host.nbytes).view(host.dtype).view(host.shape) for _ in range(2))
    going.copy_(host)
    coming.view(torch.uint8).fill_(0xEE)
    side = SideStream(device, "test")
    with side:
        there = torch.empty_like(host, device=device).copy_(going, non_blocking=True)
        coming.copy_(there, non_blocking=True)
        mark = side.mark()
    mark.wait()
    return coming.clone()


def a_copy_to_the_host_is_late() -> None:
    """Each way to wait, waits: without it the memory still holds what it held. A device that is late by 0.3 s."""
    device = npu().torch_device
    host = torch.arange(1 << 16)
    there = host.to(device)
    side = SideStream(device, "test")
    for name in ("mark", "side stream", "device", "accelerator", "wait_stream", "wait_event"):
        waiting_for(name, side, there, host)


def waiting_for(name: str, side: SideStream, there: torch.Tensor, host: torch.Tensor) -> None:
    landing = pinned(host.nbytes).view(torch.long).fill_(-1)
    with side:
        landing.copy_(there, non_blocking=True)
        mark = side.mark()
    assert landing.eq(-1).all(), f"{name}: the copy was not late, so this shows nothing"
    if name == "mark":
        mark.wait()
    elif name == "side stream":
        side.wait()
    elif name == "device":
        wait_for(there.device)
    elif name == "accelerator":
        wait_for_accelerator()
    else:
        second = torch.npu.Stream(device=there.device)
        second.wait_stream(side._stream) if name == "wait_stream" else second.wait_event(mark._event)
        second.synchronize()
    require(landing, host, name)


def a_copy_to_the_device_is_late() -> None:
    """What is queued reads pinned memory when its turn comes: writing to it before the mark changes what arrives."""
    device = npu().torch_device
    source = pinned(MIB).fill_(1)
    there = torch.zeros(MIB, dtype=torch.uint8).to(device)
    side = SideStream(device, "test")
    for careful, arrives in ((True, 1), (False, 2)):
        source.fill_(1)
        with side:
            there.copy_(source, non_blocking=True)
            mark = side.mark()
        if careful:
            mark.wait()
        source.fill_(2)
        mark.wait()
        assert there.cpu().eq(arrives).all(), f"careful={careful}"


def a_side_stream_begins_behind_what_was_queued() -> None:
    """On any stream: the program's late write is in what the side stream copies."""
    device = npu().torch_device
    source = pinned(MIB).fill_(7)
    there = torch.zeros(MIB, dtype=torch.uint8).to(device)
    wait_for(device)
    users = torch.npu.Stream(device=device)
    with torch.npu.stream(users):
        for _ in range(4):  # so that they are done long after one copy on the side stream would be
            there.copy_(source, non_blocking=True)
    side = SideStream(device, "test")
    landing = pinned(MIB).fill_(0)
    with side:
        landing.copy_(there, non_blocking=True)
    assert torch.npu.current_stream(device) == torch.npu.default_stream(device)
    side.wait()
    assert landing.eq(7).all()


def a_kernel_that_nobody_wrote_is_an_error() -> str:
    tensor = torch.arange(8.0).to(npu().torch_device)
    try:
        (tensor + tensor).cpu()
    except RuntimeError as error:
        return str(error)
    return ""


# ---- checkpoints


def tensors(seed: int) -> dict[str, dict[str, torch.Tensor]]:
    """The state that checkpoints hold, by component, on the host: arrays of their own, strided ones, and what is packed."""
    large = {f"{dtype}": random_bits((130, 1031), dtype, seed + n) for n, dtype in enumerate(ALL_DTYPES)}
    large["several chunks"] = random_bits((1200, 4099), torch.float32, seed + 20)
    strided = {
        "transposed": random_bits((300, 200), torch.float32, seed + 21).t(),
        "columns": random_bits((200, 400), torch.bfloat16, seed + 22)[:, 7:307],
        "channels last": random_bits((2, 3, 40, 50), torch.float16, seed + 23).to(memory_format=torch.channels_last),
    }
    small = {f"{dtype}": random_bits((3, 5), dtype, seed + 30 + n) for n, dtype in enumerate(ALL_DTYPES)}
    small |= {f"many {n}": random_bits((n,), torch.float32, seed + 50 + n) for n in range(60)}
    small |= {"0-dim": random_bits((), torch.float32, seed + 300), "empty": torch.empty(0, 7)}
    return {"large": large, "strided": strided, "small": small}


def each(state: dict[str, dict[str, torch.Tensor]]) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yield (component, key, tensor)."""
    for name, held in state.items():
        for key, tensor in held.items():
            yield name, key, tensor


def on(device: Device, state: dict[str, dict[str, torch.Tensor]]) -> dict[str, Held]:
    """The same on a device, with the same strides."""

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        there = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device.torch_device)
        return there.copy_(tensor)

    return {name: Held({key: moved(one) for key, one in held.items()}) for name, held in state.items()}


def coordinator(device: Device, root: str, held: dict[str, Any], **options: Any) -> CheckpointCoordinator:
    components = [StateComponent(name, one, "global") for name, one in held.items()]
    options = {"backend": backend_named("zarr"), "strategy": sized(DirectLoad(), in_flight_bytes=4 << 20)} | options
    return CheckpointCoordinator(components, {}, Topology.alone(), root, device=device, **options)


def save(device: Device, root: str, backend: str = "zarr", **held: Any) -> str:
    made = coordinator(device, root, held, backend=backend_named(backend))
    return made.save_checkpoint(checkpoint_id="1", validate=True)


def load(device: Device, root: str, strategy: LoadingStrategy | None = None, **held: Any) -> None:
    options = {} if strategy is None else {"strategy": strategy}
    coordinator(device, root, held, **options).load_checkpoint()


def saved(root: str, backend: str, seed: str) -> str:
    """Save the state from a device whose last copies into it are still under way; return its digest."""
    device = sized(npu(), pinned_bytes=1 << 20)
    want = tensors(int(seed))
    held = on(device, tensors(int(seed) + 1000))
    for name, key, tensor in each(want):
        late = pinned(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
        held[name].state[key].copy_(late.copy_(tensor), non_blocking=True)
    save(device, root, backend, **held)
    return state_digest(held, Topology.alone())


def loaded(root: str, strategy: str, seed: str) -> str:
    """Load to a device over other values; compare every bit; return the digest."""
    device = npu()
    want = tensors(int(seed))
    held = on(device, tensors(int(seed) + 1000))
    load(device, root, TwoStageLoad() if strategy == "two-stage" else None, **held)
    for name, key, tensor in each(want):
        got = held[name].state[key]
        assert got.device == device.torch_device and got.stride() == tensor.stride()
        require(got.cpu(), tensor, f"{name} {key}")
    return state_digest(held, Topology.alone())


def waited_for(root: str) -> None:
    """Saves and loads wait for what is under way before them, a load also for its own. A device that is late by 0.3 s."""
    device = npu()
    want = random_bits((300, 200), torch.float32, 1).t()
    there = torch.empty_strided(want.shape, want.stride(), device=device.torch_device).copy_(torch.zeros_like(want))
    there.copy_(want.contiguous().pin_memory(), non_blocking=True)
    save(device, root, model=Held({"t": there}))
    there.copy_(torch.zeros_like(want).contiguous().pin_memory(), non_blocking=True)
    load(device, root, model=Held({"t": there}))
    side = torch.npu.Stream(device=device.torch_device)
    with torch.npu.stream(side):  # which waits for no other
        require(there.t().cpu(), want.t(), "loaded")


def sharded(root: str, library: str) -> None:
    """The strategies that the first reference's users call, by name: directly to the device, and to the host."""
    device = npu().torch_device
    saver, loader = STRATEGIES[library]
    want = {f"{dtype}": random_bits((40, 30), dtype, n) for n, dtype in enumerate(ALL_DTYPES)}
    want["columns"] = random_bits((300, 200), torch.float32, 100)[:, 10:60]
    there = {
        key: torch.empty_like(one, device=device).copy_(one.pin_memory(), non_blocking=True)
        for key, one in want.items()
    }
    dist_checkpointing.save(shards(there), root, saver())
    filled = {
        key: torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device=device) for key, one in want.items()
    }
    direct = dist_checkpointing.load(shards(filled), root, loader(load_directly_on_device=True))
    host = dist_checkpointing.load(shards(there), root, loader())
    for key, tensor in want.items():
        assert direct[key].data_ptr() == filled[key].data_ptr()
        require(direct[key].cpu(), tensor, f"{key} on the device")
        require(host[key], tensor, f"{key} on the host")


def shards(tensors: dict[str, torch.Tensor]) -> dict[str, ShardedTensor]:
    return {key: ShardedTensor.from_rank_offsets(key, one) for key, one in tensors.items()}


def loaded_where_a_bucket_has_no_room(root: str, seed: str) -> list[str]:
    """Returns the warnings of the load. A device of so little memory that the wheel has no 20 MiB to cut a bucket from."""
    device = npu()
    want = tensors(int(seed))
    held = on(device, tensors(int(seed) + 1000))
    torch.npu.empty_cache()
    filler = [device_memory(device.memory().free - 3 * MIB, device.torch_device)]
    with warnings_of("ckpt") as said:
        load(device, root, sized(DirectLoad(), in_flight_bytes=8 << 20), **held)
    del filler
    for name, key, tensor in each(want):
        require(held[name].state[key].cpu(), tensor, f"{name} {key}")
    return said


def loaded_where_nothing_has_room(root: str) -> str:
    """Returns what a load says on a device without a byte to spare: a transposed tensor can only pass through a bucket."""
    device = npu()
    held = Held({"t": torch.empty(1000, 3000, device=device.torch_device).t()})
    everything = []
    num_bytes = device.memory().total
    while num_bytes >= 512:
        try:
            everything.append(device_memory(num_bytes, device.torch_device))
        except DeviceMemoryError:
            num_bytes //= 2
    return sentence_of(lambda: load(device, root, model=held))


@contextmanager
def warnings_of(name: str) -> Iterator[list[str]]:
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(name).addHandler(handler)
    try:
        yield said
    finally:
        logging.getLogger(name).removeHandler(handler)


def sentence_of(call: Any) -> str:
    try:
        call()
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("there was no error")


def main() -> None:
    """Run one function and write what it returns, as JSON, to the file named first."""
    path, name, *args = sys.argv[1:]
    Path(path).write_text(json.dumps(globals()[name](*args)))


if __name__ == "__main__":
    main()
