"""Copies between host and device, on the stand-in: its copies are late and its fresh memory is poisoned, so what nobody waits for shows."""

from __future__ import annotations

import math
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckpt.errors import DeviceMemoryError
from ckpt.format.box import whole
from ckpt.format.digests import BlockDigests
from ckpt.format.dtypes import contiguous, raw_bytes
from ckpt.format.records import ChunkExtent
from ckpt.memory import copies
from ckpt.memory.copies import BUCKET_MIN_BYTES, Filling, Halves, Staging
from ckpt.memory.device import SideStream
from ckpt.ranks.topology import Topology
from ckpt.storage import wanted_bytes
from ckpt.storage.extents import ExtentReader
from ckpt.storage.wanted_bytes import WantedBox, WantedBytes
from tests.device.devices import ADVERSARY
from tests.device.memory import Filled, Heard
from tests.support.ranks import run_ranks
from tests.support.states import ALL_DTYPES
from tests.unit.storage.test_extents import reads, store

MIB = 1 << 20


def run_late(fn: Any, *args: Any, **environment: str) -> Any:
    """Run `fn(topology, *args)` in a process of its own that works on a device whose copies are late."""
    return run_ranks(1, fn, *args, device="npu", environment=ADVERSARY | environment)[0]


def random_tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    bits = torch.randint(0, 2 if dtype == torch.bool else 256, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8)
    return bits.view(dtype).view(shape)


def bits(tensor: torch.Tensor) -> bytes:
    return raw_bytes(contiguous(tensor.cpu())).numpy().tobytes()


# To the host


def stage_many(topology: Topology, pinned_bytes: int, copies_hurry: bool) -> None:
    items = [
        [random_tensor(100, 300)],
        [random_tensor(7), random_tensor(0, 4), random_tensor(3, 5), random_tensor()],
        *([random_tensor(13, 17, dtype=dtype)] for dtype in ALL_DTYPES),
        [random_tensor(40, 50).t()],
        [random_tensor(40, 50)[:, 3:9], random_tensor(64, 2)[::2]],
        [random_tensor(9, 2, dtype=torch.complex64).conj()],
        [random_tensor(100, 300)],
        [random_tensor(10, 30) for _ in range(300)],
    ]
    on_device = [[_moved(tensor) for tensor in tensors] for tensors in items]
    seen = []
    for number, hosts in Staging(Halves(pinned_bytes)).ahead(enumerate(on_device)):
        assert [host.device.type for host in hosts] == ["cpu"] * len(items[number])
        assert [host.shape for host in hosts] == [tensor.shape for tensor in items[number]]
        if copies_hurry:
            torch.npu.synchronize()  # now those of the next item are over, too
        assert list(map(bits, hosts)) == list(map(bits, items[number]))
        seen.append(number)
    assert seen == list(range(len(items)))


def _moved(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the device, with the strides it has here."""
    if tensor.is_conj():
        return _moved(tensor.conj()).conj()
    moved = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="npu")
    moved.copy_(tensor)
    return moved


@pytest.mark.npu
@pytest.mark.parametrize("copies_hurry", [False, True], ids=["late", "early"])
@pytest.mark.parametrize("pinned_bytes", [16 * MIB, 2 * 100 * 300 * 4, 4096, 0])
def test_tensors_come_to_the_host_bit_for_bit_whatever_room_there_is(pinned_bytes: int, copies_hurry: bool) -> None:
    """Whole, just fitting, most of them too large, and all of them; copies over at the last moment, and before anybody asks."""
    run_late(stage_many, pinned_bytes, copies_hurry, **({"NPU_SIM_COPY_DELAY_US": "0"} if copies_hurry else {}))


def stage_mixed(topology: Topology) -> None:
    here = [random_tensor(5, 6).t(), random_tensor(3)]
    there = [random_tensor(50, 60), random_tensor(8), random_tensor(2, 2)]
    second = random_tensor(20, 30)
    tensors = [there[0].npu(), here[0], second.to("npu:1"), there[1].npu(), here[1], there[2].npu()]
    expected = [there[0], here[0], second, there[1], here[1], there[2]]
    rounds = 0
    for _, hosts in Staging(Halves(MIB)).ahead((n, tensors) for n in range(5)):
        assert hosts[1] is here[0] and hosts[4] is here[1]
        assert list(map(bits, hosts)) == list(map(bits, expected))
        rounds += 1
    assert rounds == 5


@pytest.mark.npu
def test_an_item_may_lie_on_the_host_and_on_two_devices() -> None:
    run_late(stage_mixed)


def stage_after_queued_work(topology: Topology) -> None:
    """Work on the current stream, and on one that nobody waits for."""
    old, new = random_tensor(1000, 100), random_tensor(1000, 100)
    for stream in (torch.npu.current_stream(), torch.npu.Stream()):
        tensor = old.npu()
        torch.npu.synchronize()
        with torch.npu.stream(stream):
            tensor.copy_(new.pin_memory(), non_blocking=True)
        ((_, (host,)),) = Staging(Halves(4 * MIB)).ahead([(None, [tensor])])
        assert bits(host) == bits(new)


@pytest.mark.npu
def test_what_was_queued_before_is_in_what_comes_to_the_host() -> None:
    run_late(stage_after_queued_work)


def stage_ahead(topology: Topology) -> None:
    """What is overwritten when the one before it has come was on its way already."""
    values = [random_tensor(300, 100) for _ in range(5)]
    tensors = [value.npu() for value in values]
    for number, (host,) in Staging(Halves(4 * MIB)).ahead((n, [one]) for n, one in enumerate(tensors)):
        assert bits(host) == bits(values[number])
        torch.npu.synchronize()
        if number < 4:
            tensors[number + 1].zero_()


@pytest.mark.npu
def test_a_tensor_is_on_its_way_while_the_one_before_it_is_written() -> None:
    run_late(stage_ahead)


def stage_without_room(topology: Topology) -> None:
    columns = random_tensor(600, 700)
    small = [random_tensor(11, 40) for _ in range(900)]
    tensors = [_moved(columns), *(one.npu() for one in small)]
    heard, filled = Heard(), Filled(torch.device("npu", 0), 128 << 10)
    items = [[tensors[0][:, :300].t()], tensors[1:]]
    hosts = [list(map(bits, hosts)) for _, hosts in Staging(Halves(8 * MIB)).ahead(enumerate(items))]
    assert hosts == [[bits(columns[:, :300].t())], list(map(bits, small))]
    assert filled.free() < 160 << 10
    (line,) = heard.lines
    assert "saving them part by part" in line


@pytest.mark.npu
def test_a_device_without_room_for_joining_is_saved_part_by_part_and_says_so() -> None:
    run_late(stage_without_room, NPU_SIM_MEMORY=str(8 * MIB))


# To the device


def fill_any(topology: Topology) -> None:
    devices = ["cpu", "npu:0", "npu:1"]

    @given(case=reads(), data=st.data())
    @settings(max_examples=60, suppress_health_check=list(HealthCheck), database=None, deadline=None)
    def check(case: Any, data: st.DataObject) -> None:
        chunk, asked, verify, block_bytes = case
        parts = []
        for base, region, box, out in asked:
            device = data.draw(st.sampled_from(devices))
            there = torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device=device)
            parts.append(WantedBox(base, region, box, there, "model: w"))
        with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
            patch.setattr(wanted_bytes, "GAP_BYTES", 96)
            extent = store(Path(folder), chunk.tobytes(), block_bytes=block_bytes)
            slab = data.draw(st.sampled_from([64, 256, MIB]))
            with (
                Filling(data.draw(st.sampled_from([64, 256, MIB]))) as filling,
                ExtentReader(Path(folder), verify=verify, slab_bytes=slab, filling=filling) as reader,
            ):
                reader.read(extent, parts)
        for part in parts:
            source = chunk[part.base // 4 :][: math.prod(part.region)].reshape(part.region)[part.box.slices]
            np.testing.assert_array_equal(part.out.cpu().numpy(), source)

    check()


@pytest.mark.npu
def test_every_box_comes_to_every_device_as_numpy_slices_it() -> None:
    run_late(fill_any)


def wanted_of(*outs: torch.Tensor) -> tuple[ChunkExtent, WantedBytes, torch.Tensor]:
    """A chunk of random bytes that holds one tensor after the other, all wanted."""
    data = random_tensor(sum(out.nbytes for out in outs), dtype=torch.uint8)
    stream = BlockDigests(MIB)
    stream.update(memoryview(data.numpy()))
    extent = ChunkExtent("c", 0, len(data), stream.close(), MIB)
    parts, base = [], 0
    for out in outs:
        parts.append(WantedBox(base, tuple(out.shape), whole(tuple(out.shape)), out, "model: w"))
        base += out.nbytes
    return extent, WantedBytes(extent, parts), data


def fill_in_turn(topology: Topology) -> None:
    """More slabs than there are halves, each overwritten as soon as it may be."""
    out = torch.empty(16, 5000, device="npu")
    columns = torch.empty(5000, 16, device="npu").t()
    extent, wanted, data = wanted_of(out, columns)
    step = 20_000
    with Filling(step) as filling:
        for start in range(0, extent.length, step):
            memory = filling.take(step)
            memory.copy_(data[start : start + step])
            filling.place(wanted, start, start + step, memory)
    assert bits(out) + bits(columns) == data.numpy().tobytes()


@pytest.mark.npu
def test_memory_is_read_into_again_only_when_its_bytes_have_gone() -> None:
    run_late(fill_in_turn)


def fill_while_reading(topology: Topology) -> None:
    """The memory to read the next bytes into is given while the first ones have not come to the device yet."""
    out = torch.zeros(200, 100, device="npu")
    torch.npu.synchronize()
    extent, wanted, data = wanted_of(out)
    half = extent.length // 2
    with Filling(half) as filling:
        filling.place(wanted, 0, half, filling.take(half).copy_(data[:half]))
        filling.take(half)
        assert seen_from_elsewhere(out) == bytes(extent.length)
        filling.place(wanted, half, 2 * half, filling.take(half).copy_(data[half:]))
    assert seen_from_elsewhere(out) == data.numpy().tobytes()


def seen_from_elsewhere(tensor: torch.Tensor) -> bytes:
    """What a stream sees that waits for no other."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    other = torch.npu.Stream()
    with torch.npu.stream(other):
        host.copy_(tensor, non_blocking=True)
    other.synchronize()
    return bits(host)


@pytest.mark.npu
def test_bytes_are_on_their_way_while_the_next_are_read() -> None:
    run_late(fill_while_reading)


def fill_from_others(topology: Topology, on_device: bool, with_host: bool) -> None:
    """From memory of the caller's that is not pinned, or is on the device, and is spoilt at once."""
    out, columns = torch.empty(30, 1000, device="npu"), torch.empty(1000, 30, device="npu").t()
    tensors = [out, columns, *(torch.empty(10, 10, device="npu") for _ in range(50))]
    tensors += [torch.empty(5)] if with_host else []
    extent, wanted, data = wanted_of(*tensors)
    with Filling(64 << 10) as filling:
        for start in range(0, extent.length, 32_000):
            memory = data[start : start + 32_000].clone()
            memory = memory.npu() if on_device else memory
            place = filling.place_within if on_device else filling.place
            place(wanted, start, start + len(memory), memory)
            memory.fill_(0xAA)
            torch.npu.current_stream().synchronize()
    assert b"".join(map(bits, tensors)) == data.numpy().tobytes()


@pytest.mark.npu
@pytest.mark.parametrize("with_host", [False, True], ids=["all on the device", "some on the host"])
@pytest.mark.parametrize("on_device", [False, True], ids=["from the host", "from the device"])
def test_bytes_of_others_may_be_overwritten_as_soon_as_they_are_placed(on_device: bool, with_host: bool) -> None:
    run_late(fill_from_others, on_device, with_host)


def fill_over_queued_work(topology: Topology) -> None:
    for stream in (torch.npu.current_stream(), torch.npu.Stream()):
        out = torch.empty(300, 300, device="npu")
        _, wanted, data = wanted_of(out)
        with torch.npu.stream(stream):
            out.copy_(random_tensor(300, 300).pin_memory(), non_blocking=True)
        with Filling(MIB) as filling:
            memory = filling.take(len(data)).copy_(data)
            filling.place(wanted, 0, len(data), memory)
        assert seen_from_elsewhere(out) == data.numpy().tobytes()


@pytest.mark.npu
def test_what_was_queued_before_does_not_overwrite_what_is_filled_and_any_stream_sees_it() -> None:
    run_late(fill_over_queued_work)


def fill_strided(topology: Topology) -> None:
    out = torch.empty(40, 60, device="npu")
    values = random_tensor(40, 30)
    with torch.npu.stream(torch.npu.Stream()):
        out.copy_(random_tensor(40, 60).pin_memory(), non_blocking=True)
    with Filling(MIB) as filling:
        filling.fill(out[:, ::2], values)
        expected = bits(values)
        values.zero_()
    torch.npu.synchronize()
    assert bits(out[:, ::2]) == expected


@pytest.mark.npu
def test_a_decoded_tensor_goes_to_any_strides() -> None:
    run_late(fill_strided)


def fill_without_room(topology: Topology, leave_bytes: int) -> list[str]:
    columns = torch.empty(5000, 40, device="npu").t()
    _, wanted, data = wanted_of(columns)
    heard, filled = Heard(), Filled(torch.device("npu", 0), leave_bytes)
    with Filling(MIB) as filling:
        memory = filling.take(len(data)).copy_(data)
        filling.place(wanted, 0, len(data), memory)
    assert bits(columns) == data.numpy().tobytes()
    assert filled.free() < leave_bytes
    return heard.lines


@pytest.mark.npu
def test_the_bucket_shrinks_to_the_room_there_is_and_says_so() -> None:
    lines = run_late(fill_without_room, 320 << 10, NPU_SIM_MEMORY=str(8 * MIB))
    assert lines == ["npu:0 has no room for a bucket of 1.0 MiB: loading through one of 0.25 MiB, which takes longer"]


def fill_without_any_room(topology: Topology) -> str:
    with pytest.raises(DeviceMemoryError) as refused:
        fill_without_room(topology, BUCKET_MIN_BYTES // 2)
    return str(refused.value)


@pytest.mark.npu
def test_a_device_without_room_for_the_smallest_bucket_is_one_sentence() -> None:
    told = run_late(fill_without_any_room, NPU_SIM_MEMORY=str(8 * MIB))
    assert told.startswith(
        "device=npu: npu:0 has no room for 0.1 MiB more, 0.0 MiB of 8.0 MiB are free; shard over more ranks"
    )


def test_nothing_is_made_for_tensors_of_the_host() -> None:
    tensors = [torch.arange(6.0).view(2, 3).t(), torch.arange(3)]
    with Filling(1 << 50), pytest.MonkeyPatch.context() as patch:
        patch.setattr("ckpt.memory.copies.pinned", lambda num_bytes: pytest.fail("pinned memory was asked for"))
        ((_, hosts),) = Staging(Halves(1 << 50)).ahead([(None, tensors)])
    assert hosts[0] is tensors[0] and hosts[1] is tensors[1]


# What only a real device would punish


def fill_small_of_every_type(topology: Topology) -> None:
    """Kernels that take several tensors may convert them on the way, or not know their type: they are given integers."""
    seen: list[torch.dtype] = []
    foreach, cat = torch._foreach_copy_, torch.cat

    def spied_foreach(outs: list[torch.Tensor], values: list[torch.Tensor]) -> None:
        seen.extend(one.dtype for one in (*outs, *values))
        foreach(outs, values)

    def spied_cat(tensors: list[torch.Tensor], **options: Any) -> torch.Tensor:
        seen.extend(one.dtype for one in tensors if not one.is_cpu)
        return cat(tensors, **options)

    torch._foreach_copy_, torch.cat = spied_foreach, spied_cat  # type: ignore[assignment]
    for dtype in ALL_DTYPES:
        outs = [torch.empty(3 + number, dtype=dtype, device="npu") for number in range(9)]
        extent, wanted, data = wanted_of(*outs)
        if dtype == torch.bool:
            data &= 1
        with Filling(MIB) as filling:
            filling.place(wanted, 0, extent.length, filling.take(extent.length).copy_(data))
        assert b"".join(map(bits, outs)) == data.numpy().tobytes(), dtype
        ((_, hosts),) = Staging(Halves(MIB)).ahead([(None, outs)])
        assert b"".join(map(bits, hosts)) == data.numpy().tobytes(), dtype
        assert [host.dtype for host in hosts] == [dtype] * 9
    assert seen and all(dtype in _INTEGERS for dtype in seen if dtype != torch.complex128)


_INTEGERS = {torch.uint8, torch.int16, torch.int32, torch.int64}


@pytest.mark.npu
def test_small_tensors_of_every_type_keep_their_bits_as_integers() -> None:
    run_late(fill_small_of_every_type)


def use_in_a_new_thread(topology: Topology) -> None:
    """A thread begins on the first device; to put it back there would take memory of that device."""
    met: list[torch.device] = []
    set_stream = torch.npu.set_stream

    def spied(stream: torch.Stream) -> None:
        met.append(stream.device)
        set_stream(stream)

    vars(torch.npu)["set_stream"] = spied

    def work() -> None:
        with SideStream(torch.device("npu", 3), "test") as _:
            torch.empty(5, device="npu:3").zero_()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert met and set(met) == {torch.device("npu", 3)}


@pytest.mark.npu
def test_a_thread_that_uses_one_device_touches_no_other() -> None:
    run_late(use_in_a_new_thread)


def stage_and_fill_again_and_again(topology: Topology) -> None:
    tensors = [_moved(random_tensor(600, 700)).t(), *(random_tensor(11, 40).npu() for _ in range(900))]
    columns = torch.empty(5000, 40, device="npu").t()
    _, wanted, data = wanted_of(columns)
    free = []
    for _ in range(8):
        for _ in Staging(Halves(16 * MIB)).ahead([(None, tensors[:1]), (None, tensors[1:])]):
            pass
        with Filling(MIB) as filling:
            filling.place(wanted, 0, len(data), filling.take(len(data)).copy_(data))
        free.append(torch.npu.mem_get_info()[0])
    assert len(set(free[1:])) == 1, free


@pytest.mark.npu
def test_what_is_taken_on_the_device_is_the_same_memory_every_time() -> None:
    """An allocator keeps what it has for a stream: with a new stream for each save that would be more and more."""
    run_late(stage_and_fill_again_and_again)


@pytest.mark.parametrize(
    "tensor",
    [random_tensor(20_000, 64).t(), random_tensor(1, 400_000, 2)[:, :, 1], random_tensor(3, 5, 7)[:, ::2]],
    ids=["long rows", "one long stride", "small"],
)
def test_a_copy_in_parts_takes_no_more_parts_than_its_size_asks_for(
    tensor: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    whole = copies._copy_in_parts

    def counted(host: torch.Tensor, part: torch.Tensor) -> None:
        calls.append(part.nbytes)
        whole(host, part)

    monkeypatch.setattr(copies, "_copy_in_parts", counted)
    host = torch.empty(tensor.shape)
    copies._copy_in_parts(host, tensor)
    assert bits(host) == bits(tensor)
    assert len(calls) <= 3 * (tensor.nbytes // BUCKET_MIN_BYTES + 1)
