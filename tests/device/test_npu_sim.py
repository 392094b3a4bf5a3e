"""The stand-in for an NPU: does it do what a device does, and is it as unforgiving?

All checks run in one other process, in which "npu" is a device; pytest's own never hears of it.
"""

from __future__ import annotations

import copy
import ctypes
import io
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import AbstractContextManager
from importlib import metadata
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from ckpt.ranks.topology import Topology
from tests.npu_sim.checks import FOLDER, Checks, settings
from tests.npu_sim.npu_sim_build import BuildError, build
from tests.support.ranks import run_ranks

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.bool,
    torch.complex64,
]
FRESH, FREED = 0xCB, 0xFD

check = Checks()


def _late(microseconds: int = 200_000) -> AbstractContextManager[None]:
    """Copies that nobody waits for are so late that a busy machine looks before them."""
    return settings(NPU_SIM_COPY_DELAY_US=microseconds)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8)


def _random(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    return (
        torch.randint(0, 2 if dtype is torch.bool else 256, (num_bytes,), dtype=torch.uint8).view(dtype).reshape(shape)
    )


def _pinned(*shape: int, value: int = 0) -> torch.Tensor:
    return torch.full(shape, value, dtype=torch.uint8).pin_memory()


def _numbers(count: int = 1 << 12, device: str = "npu") -> torch.Tensor:
    return (torch.arange(count) % 251 + 1).to(torch.uint8).to(device)


def _as_seen_elsewhere(tensor: torch.Tensor) -> torch.Tensor:
    """What a reader finds who waits for another stream than the current one."""
    with torch.npu.stream(torch.npu.Stream()):
        return tensor.cpu()


# ---------------------------------------------------------------- tensors


@check
def _a_tensor_lies_where_it_was_made() -> None:
    assert torch.empty(3, 5, device="npu").is_npu
    assert torch.zeros(4, device="npu:2").device == torch.device("npu:2")
    assert torch.equal(torch.arange(5, device="npu").cpu(), torch.arange(5))
    assert torch.get_device_module("npu") is torch.npu
    assert torch.accelerator.current_accelerator() == torch.device("npu")
    with pytest.raises(RuntimeError, match="out of range"):
        torch.npu.set_device(8)


@check
def _host_and_device_do_not_mix() -> None:
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        torch.ones(3) + torch.ones(3, device="npu")
    with pytest.raises(TypeError, match="can't convert npu:0 device type tensor to numpy"):
        torch.ones(3, device="npu").numpy()


@check
def _every_data_type_keeps_its_bits() -> None:
    for dtype in DTYPES:
        given = _random(dtype, 3, 64)
        there = torch.empty_like(given, device="npu").copy_(given)
        back = torch.empty_like(given).copy_(there)
        assert torch.equal(_bits(back), _bits(given)), dtype
        assert torch.equal(_bits(there.clone()), _bits(given)), dtype
        late = there.to("cpu", non_blocking=True)
        torch.npu.synchronize()
        assert torch.equal(_bits(late), _bits(given)), dtype


_LAYOUTS = (
    lambda flat: flat,
    lambda flat: flat.view(12, 20).t(),
    lambda flat: flat.view(12, 20)[2:9:3, 1::2],
    lambda flat: flat[17],
    lambda flat: flat[5:5],
)


@check
def _every_layout_is_copied_both_ways() -> None:
    for layout in _LAYOUTS:
        for non_blocking in (False, True):
            host = layout(torch.arange(240, dtype=torch.int32).pin_memory())
            there = layout(torch.zeros(240, dtype=torch.int32, device="npu"))
            there.copy_(host, non_blocking=non_blocking)
            torch.npu.synchronize()
            assert torch.equal(there.cpu(), host)
            within = layout(torch.zeros(240, dtype=torch.int32, device="npu")).copy_(there)
            back = layout(torch.zeros(240, dtype=torch.int32).pin_memory()).copy_(within, non_blocking=non_blocking)
            torch.npu.synchronize()
            assert torch.equal(back, host)


@check
def _copies_convert_broadcast_and_conjugate() -> None:
    there = torch.empty(4, 6, device="npu", dtype=torch.bfloat16).copy_(
        torch.arange(6.0).pin_memory(), non_blocking=True
    )
    assert torch.equal(there.cpu(), torch.arange(6.0).bfloat16().expand(4, 6))
    assert torch.equal(there.double().cpu(), torch.arange(6.0).double().expand(4, 6))
    given = torch.complex(torch.arange(8.0), torch.arange(8.0, 16.0))
    assert torch.equal(given.npu().conj().cpu().resolve_conj(), given.conj().resolve_conj())
    assert torch.equal(torch.empty(8, dtype=torch.complex64).copy_(given.npu().conj()), given.conj().resolve_conj())
    assert torch.equal(given.npu().conj().imag.cpu(), given.conj().imag)  # a view that is negative
    assert torch.equal(torch.view_as_complex(torch.view_as_real(given.npu())).cpu(), given)


@check
def _views_share_memory() -> None:
    table = torch.arange(24.0, device="npu").view(4, 6)
    assert torch.equal(table[1:3, ::2].cpu(), torch.arange(24.0).view(4, 6)[1:3, ::2])
    assert torch.equal(table.t().contiguous().cpu(), torch.arange(24.0).view(4, 6).t())
    assert torch.equal(table.as_strided((3, 2), (7, 1), 1).cpu(), torch.arange(24.0).as_strided((3, 2), (7, 1), 1))
    table[0].fill_(7)
    assert table.cpu()[0].eq(7).all()
    assert table.view(torch.uint8).shape == (4, 24)
    raw = torch.zeros(64, dtype=torch.uint8, device="npu")
    raw[8:24].view(torch.float32).copy_(torch.arange(4.0))
    assert torch.equal(raw.cpu()[8:24].view(torch.float32), torch.arange(4.0))
    parts = table.view(-1).split_with_sizes([10, 0, 14])
    assert [part.data_ptr() - table.data_ptr() for part in (parts[0], parts[2])] == [0, 40]


@check
def _many_small_tensors_are_joined_and_copied_together() -> None:
    values = [torch.arange(i, i + 3.0) for i in range(8192)]
    there = list(torch.cat(values).npu().view(-1, 3))
    assert torch.equal(torch.cat(there).cpu(), torch.cat(values))
    copies = [torch.empty_like(value) for value in there]
    torch._foreach_copy_(copies, there, non_blocking=True)
    assert torch.equal(torch.stack(copies).cpu(), torch.stack(values))


@check
def _a_storage_grows_and_shrinks() -> None:
    there = torch.arange(100, device="npu")
    storage = there.untyped_storage()
    storage.resize_(1600)
    storage.resize_(800)
    assert storage.nbytes() == 800 and torch.equal(there.cpu(), torch.arange(100))
    storage.resize_(0)
    assert storage.nbytes() == 0
    other = torch.empty(0, device="npu:1").resize_(3, 4).fill_(1)
    assert other.shape == (3, 4) and str(other.untyped_storage().device) == "npu:1" and other.sum() == 12


@check
def _tensors_survive_files_and_pickles() -> None:
    state = {"w": torch.arange(6.0, device="npu:1"), "b": torch.ones(2, dtype=torch.bfloat16, device="npu")}
    for where, expected in ((None, "npu:1"), ("cpu", "cpu"), ("npu:0", "npu:0")):
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        loaded = torch.load(file, map_location=where)
        assert str(loaded["w"].device) == expected and torch.equal(loaded["w"].cpu(), torch.arange(6.0))
    for copied in (copy.deepcopy(state["w"]), pickle.loads(pickle.dumps(state["w"]))):
        assert copied.device == state["w"].device and torch.equal(copied.cpu(), torch.arange(6.0))
    with NamedTemporaryFile(suffix=".safetensors") as file:
        safetensors.torch.save_file({"w": state["w"]}, file.name)
        loaded = safetensors.torch.load_file(file.name, device="npu")["w"]
    assert str(loaded.device) == "npu:0" and torch.equal(loaded.cpu(), torch.arange(6.0))


# ---------------------------------------------------------------- training


@check
def _a_model_trains_as_on_the_host() -> None:
    torch.manual_seed(0)
    host = nn.Sequential(nn.Embedding(10, 16), nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 10))
    there = copy.deepcopy(host).to("npu")
    tokens = torch.randint(0, 10, (2, 5))
    for kind in (torch.optim.SGD, torch.optim.AdamW):
        optimizers = kind(host.parameters(), lr=0.01), kind(there.parameters(), lr=0.01)
        for _ in range(2):
            for model, optimizer, device in zip((host, there), optimizers, ("cpu", "npu"), strict=True):
                optimizer.zero_grad()
                given = tokens.to(device)
                nn.functional.cross_entropy(model(given).flatten(0, 1), given.flatten()).backward()
                optimizer.step()
    for name, value in there.state_dict().items():
        assert value.is_npu
        torch.testing.assert_close(value.cpu(), host.state_dict()[name], rtol=0, atol=1e-6)
    there.load_state_dict(host.state_dict())
    assert all(torch.equal(value.cpu(), host.state_dict()[name]) for name, value in there.state_dict().items())


@check
def _attention_is_the_hosts() -> None:
    host = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    there, given = copy.deepcopy(host).to("npu"), torch.randn(3, 5, 16)
    host(given).pow(2).sum().backward()
    there(given.npu()).pow(2).sum().backward()
    for mine, others in zip(there.parameters(), host.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.cpu(), others.grad, rtol=1e-4, atol=1e-4)


@check
def _gradients_come_on_the_stream_of_the_forward_pass() -> None:
    weight = torch.ones(1000, device="npu", requires_grad=True)
    side = torch.npu.Stream()
    side.wait_stream(torch.npu.current_stream())
    with _late(), torch.npu.stream(side):
        (weight.clone() * torch.arange(1000.0).npu()).sum().backward()
    torch.npu.current_stream().wait_stream(side)
    assert torch.equal(weight.grad.cpu(), torch.arange(1000.0))


@check
def _autocast_runs_without_casting() -> None:
    with torch.autocast("npu", dtype=torch.bfloat16):
        assert nn.Linear(4, 4).npu()(torch.ones(2, 4, device="npu")).dtype is torch.float32


# ---------------------------------------------------------------- late copies


@check
def _a_copy_to_the_host_is_late_until_somebody_waits() -> None:
    there, expected = _numbers(), _numbers(device="cpu")
    event = torch.npu.Event()
    side = torch.npu.Stream()
    waits = (
        lambda: torch.npu.synchronize(),
        lambda: torch.accelerator.synchronize(),
        lambda: torch.npu.current_stream().synchronize(),
        lambda: event.synchronize(),
        lambda: (side.wait_event(event), side.synchronize()),
        lambda: (side.wait_stream(torch.npu.current_stream()), side.synchronize()),
        lambda: there[0].item(),
        lambda: there.cpu(),
        lambda: time.sleep(0.5),
    )
    with _late():
        for wait in waits:
            host = _pinned(len(there)).copy_(there, non_blocking=True)
            event.record()
            assert not event.query() and not torch.npu.current_stream().query() and not host.any()
            wait()
            assert event.query() and torch.equal(host, expected)


@check
def _who_waits_is_not_kept_waiting() -> None:
    there, hosts = _numbers(), [_pinned(1 << 12) for _ in range(50)]
    start = time.monotonic()
    with _late(10_000_000):
        for host in hosts:
            host.copy_(there, non_blocking=True)
        torch.npu.synchronize()
    assert time.monotonic() - start < 5
    assert all(torch.equal(host, there.cpu()) for host in hosts)


@check
def _to_wait_for_one_stream_hurries_no_other() -> None:
    there, mine, others = _numbers(), _pinned(1 << 12), _pinned(1 << 12)
    with _late():
        with torch.npu.stream(torch.npu.Stream()):
            others.copy_(there, non_blocking=True)
        mine.copy_(there, non_blocking=True)
        torch.npu.current_stream().synchronize()
        assert torch.equal(mine, there.cpu()) and not others.any()
        torch.npu.synchronize()
    assert torch.equal(others, there.cpu())


@check
def _operators_and_blocking_copies_see_only_what_their_stream_waits_for() -> None:
    there, host = torch.zeros(1 << 12, dtype=torch.uint8, device="npu"), _pinned(1 << 12, value=5)
    side = torch.npu.Stream()
    torch.npu.synchronize()
    with _late():
        with torch.npu.stream(side):
            there.copy_(host, non_blocking=True)
        assert not (there + 0).any() and not there.cpu().any()
        torch.npu.current_stream().wait_stream(side)
        assert there.eq(5).all()


@check
def _copies_and_fills_on_the_device_are_late_too() -> None:
    source, target = _numbers(), torch.zeros(1 << 12, dtype=torch.uint8, device="npu")
    expected = _numbers(device="cpu")
    torch.npu.synchronize()
    with _late():
        target.copy_(source)
        assert not _as_seen_elsewhere(target).any()
        assert torch.equal(target.cpu(), expected)
        target.fill_(9)
        assert torch.equal(_as_seen_elsewhere(target), expected)
        assert target.eq(9).all()
        target.zero_()
        assert _as_seen_elsewhere(target).eq(9).all()
        assert not target.any()


@check
def _copies_between_devices_keep_the_order_of_both() -> None:
    one, other = torch.zeros(1 << 12, device="npu:0"), torch.zeros(1 << 12, device="npu:1")
    with _late():
        one.fill_(3)
        other.fill_(4)
        other.copy_(one)
        one.fill_(5)
        assert other.cpu().eq(3).all() and one.cpu().eq(5).all()
        host = torch.zeros(1 << 12).pin_memory().copy_(one, non_blocking=True)
        torch.npu.synchronize(1)
        assert not host.any()
        torch.npu.synchronize(0)
        assert host.eq(5).all()


@check
def _pageable_memory_is_free_when_the_call_returns() -> None:
    host, there = torch.arange(1 << 12), torch.empty(1 << 12, dtype=torch.int64, device="npu")
    with _late():
        there.copy_(host, non_blocking=True)
        host.zero_()
        assert torch.equal(host.copy_(there, non_blocking=True), torch.arange(1 << 12))
        strided = torch.zeros(1 << 13, dtype=torch.int64).pin_memory()[::2]  # no device scatters in memory of the host
        assert torch.equal(strided.copy_(there, non_blocking=True), torch.arange(1 << 12))


@check
def _pinned_memory_is_read_when_the_copy_runs() -> None:
    host, there = _pinned(1 << 12, value=1), torch.empty(1 << 12, dtype=torch.uint8, device="npu")
    with _late():
        there.copy_(host, non_blocking=True)
        host.fill_(2)
        assert there.eq(2).all()


@check
def _events_tell_how_long_it_took() -> None:
    start, stop = torch.npu.Event(enable_timing=True), torch.npu.Event(enable_timing=True)
    host, there = _pinned(1 << 12), _numbers()
    with _late():
        start.record()
        host.copy_(there, non_blocking=True)
        stop.record()
        time.sleep(0.25)
    with pytest.raises(RuntimeError, match="both events must be recorded"):
        start.elapsed_time(torch.npu.Event(enable_timing=True))
    stop.synchronize()
    assert 20 < start.elapsed_time(stop) < 5000


class _Watching(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func._schema.name)
        return func(*args, **(kwargs or {}))


@check
def _what_runs_late_is_not_seen_by_the_waiters_modes() -> None:
    there, host = torch.arange(2000.0, device="npu").view(40, 50).t(), torch.zeros(50, 40).pin_memory()
    with _late(), torch.no_grad(), _Watching() as watching:
        host.copy_(there, non_blocking=True)
        torch.npu.synchronize()
    assert watching.seen == ["aten::copy_"]
    assert torch.equal(host, there.cpu())


@check
def _what_goes_wrong_late_is_raised_where_it_is_waited_for() -> None:
    flags = torch.zeros(10, dtype=torch.complex64, device="npu")
    side = torch.npu.Stream()
    torch.npu.synchronize()
    with torch.npu.stream(side):
        torch.zeros(10, device="npu").fill_(1j)
    torch.npu.current_stream().wait_stream(side)
    with pytest.raises(RuntimeError, match="without overflow"):
        flags.cpu()
    assert not flags.cpu().any()


# ---------------------------------------------------------------- memory


@check
def _pinned_memory_is_known_as_such() -> None:
    host = torch.empty(1000, pin_memory=True)
    assert host.is_pinned() and host[10:].is_pinned() and torch.ones(3).pin_memory().is_pinned()
    assert not torch.ones(3).is_pinned() and not torch.ones(3, device="npu").is_pinned()
    assert next(iter(DataLoader(torch.ones(8, 2), batch_size=4, pin_memory=True))).is_pinned()


@check
def _pinned_memory_is_not_given_out_again_while_a_copy_uses_it() -> None:
    there = torch.zeros(50_000, dtype=torch.uint8, device="npu")
    host = _pinned(50_000, value=1)
    address = host.data_ptr()
    with _late():
        there[100:].copy_(host[100:], non_blocking=True)
        del host
        following = [_pinned(50_000, value=2) for _ in range(3)]
        assert address not in [one.data_ptr() for one in following]
        assert there[100:].eq(1).all()
    assert _pinned(50_000).data_ptr() == address


@check
def _device_memory_is_given_out_again_at_once_to_its_stream() -> None:
    first = torch.empty(1 << 20, dtype=torch.uint8, device="npu")
    address = first.data_ptr()
    del first
    with torch.npu.stream(torch.npu.Stream()):
        assert torch.empty(1 << 20, dtype=torch.uint8, device="npu").data_ptr() != address
    assert torch.empty(1 << 20, dtype=torch.uint8, device="npu").data_ptr() == address


@check
def _memory_used_on_another_stream_is_lost_unless_recorded() -> None:
    for recorded, expected in ((False, 9), (True, 1)):
        there = torch.ones(100_000, dtype=torch.uint8, device="npu")
        host, side = _pinned(100_000), torch.npu.Stream()
        torch.npu.synchronize()
        with _late(), torch.npu.stream(side):
            host.copy_(there, non_blocking=True)
        if recorded:
            there.record_stream(side)
        del there
        torch.empty(100_000, dtype=torch.uint8, device="npu").fill_(9).cpu()
        side.synchronize()
        assert host.eq(expected).all()


@check
def _poison_shows_what_was_never_written_and_what_was_freed() -> None:
    torch.npu.empty_cache()
    torch.npu.host_empty_cache()
    kinds = (lambda size: torch.empty(size, device="npu"), lambda size: torch.empty(size, pin_memory=True))
    with settings(NPU_SIM_POISON=1):
        for make in kinds:
            for size in (1000, 300_000):
                made = make(size)
                assert _bits(made).eq(FRESH).all()
                made.fill_(1)
                torch.npu.synchronize()
                address = made.data_ptr()
                del made
                torch.npu.synchronize()
                assert ctypes.string_at(address, 100) == bytes([FREED] * 100)
                made = make(size)
                assert made.data_ptr() == address and _bits(made).eq(FREED).all()
    torch.npu.empty_cache()
    torch.npu.host_empty_cache()


@check
def _memory_is_counted_and_limited() -> None:
    where, mib = torch.device("npu:7"), 1 << 20
    with settings(NPU_SIM_MEMORY=8 * mib):
        held = torch.empty(4 * mib, dtype=torch.uint8, device=where)
        assert torch.npu.memory_allocated(where) == torch.accelerator.memory_allocated(where) == 4 * mib
        assert torch.npu.mem_get_info(where) == (4 * mib, 8 * mib)
        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 6291456 bytes. NPU 7 has a total capacity"):
            torch.empty(6 * mib, dtype=torch.uint8, device=where)
        del held
        assert torch.npu.memory_allocated(where) == 0 and torch.npu.max_memory_allocated(where) == 4 * mib
        assert torch.npu.mem_get_info(where) == (4 * mib, 8 * mib)  # what is cached is not free
        torch.empty(6 * mib, dtype=torch.uint8, device=where)  # but given back where memory is short
        assert torch.npu.max_memory_allocated(where) == 6 * mib
        torch.npu.reset_peak_memory_stats(where)
        assert torch.npu.max_memory_allocated(where) == 0
        torch.npu.empty_cache()
        assert torch.npu.memory_reserved(where) == 0 and torch.npu.mem_get_info(where) == (8 * mib, 8 * mib)


# ---------------------------------------------------------------- threads and processes


@check
def _a_new_thread_starts_at_the_first_device() -> None:
    seen: list[int] = []
    with torch.npu.device(3):
        thread = threading.Thread(target=lambda: seen.append(torch.npu.current_device()))
        thread.start()
        thread.join()
        assert torch.npu.current_device() == 3
    assert seen == [0] and torch.npu.current_device() == 0


@check
def _threads_with_a_stream_each_do_not_disturb_each_other() -> None:
    found: list[bool] = []

    def work(number: int) -> None:
        side = torch.npu.Stream()
        for turn in range(30):
            given = torch.full((3000,), number * 100 + turn).pin_memory()
            with torch.npu.stream(side):
                there = torch.empty(3000, dtype=torch.int64, device="npu").copy_(given, non_blocking=True)
                back = torch.empty(3000, dtype=torch.int64, pin_memory=True).copy_(there.clone(), non_blocking=True)
                del there
            side.record_event().synchronize()
            found.append(torch.equal(back, given))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    with settings(NPU_SIM_POISON=1):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == [True] * 120


@check
def _a_stream_brings_its_device() -> None:
    before = torch.npu.current_stream(2)
    side = torch.npu.Stream(device="npu:2")
    with torch.npu.stream(side):
        assert torch.npu.current_device() == 2 and torch.npu.current_stream() == side
        assert torch.empty(1, device="npu").device.index == 2
    assert torch.npu.current_device() == 0 and torch.npu.current_stream(2) == before


@check
def _a_forked_child_is_told_to_be_spawned() -> None:
    held = torch.ones(1000, device="npu")
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            del held
            torch.manual_seed(1)
            with pytest.raises(RuntimeError, match="Cannot re-initialize NPU in forked subprocess"):
                torch.empty(1, device="npu")
            code = int(torch.npu.is_initialized() or not torch.npu._is_in_bad_fork())
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    assert torch.npu.is_initialized() and not torch.npu._is_in_bad_fork()


# ---------------------------------------------------------------- random numbers

_DRAWS = (
    lambda: torch.rand(50, device="npu"),
    lambda: torch.randn(50, device="npu"),
    lambda: torch.randint(0, 1000, (50,), device="npu"),
    lambda: torch.randperm(50, device="npu"),
    lambda: torch.empty(50, device="npu").normal_(2, 3),
    lambda: torch.full((50,), 0.5, device="npu").bernoulli(),
    lambda: torch.ones(50, device="npu").multinomial(20),
    lambda: nn.functional.dropout(torch.ones(50, device="npu")),
)


@check
def _random_numbers_come_from_the_devices_own_generator() -> None:
    for draw in _DRAWS:
        host, state = torch.get_rng_state(), torch.npu.get_rng_state()
        first, second = draw(), draw()
        assert torch.equal(torch.get_rng_state(), host) and not torch.equal(first, second)
        assert not torch.equal(torch.npu.get_rng_state(), state)
        torch.npu.set_rng_state(state)
        assert torch.equal(draw(), first) and torch.equal(draw(), second)


@check
def _generators_have_sixteen_bytes_and_one_each_device() -> None:
    torch.manual_seed(5)
    states = torch.npu.get_rng_state_all()
    assert len(states) == 8 and {state.numel() for state in states} == {16}
    first = torch.rand(9, device="npu:1")
    assert [torch.equal(a, b) for a, b in zip(states, torch.npu.get_rng_state_all(), strict=True)].count(False) == 1
    assert torch.equal(torch.rand(9, device="npu:0"), first.to("npu:0"))
    torch.npu.set_rng_state_all(states)
    assert torch.equal(torch.rand(9, device="npu:1"), first)
    with pytest.raises(RuntimeError, match="has 16 bytes, not 5056"):
        torch.npu.set_rng_state(torch.get_rng_state())
    before = torch.npu.get_rng_state()
    with torch.random.fork_rng(devices=[0], device_type="npu"):
        torch.rand(3, device="npu")
    assert torch.equal(torch.npu.get_rng_state(), before)
    torch.npu.manual_seed(6)
    assert torch.npu.initial_seed() == 6


@check
def _a_generator_of_ones_own_is_used() -> None:
    mine, state = torch.Generator(device="npu").manual_seed(3), torch.npu.get_rng_state()
    first = torch.randn(20, device="npu", generator=mine)
    assert torch.equal(torch.randn(20, device="npu", generator=mine.manual_seed(3)), first)
    assert torch.equal(torch.npu.get_rng_state(), state)
    with pytest.raises(RuntimeError, match="Expected a 'npu' device type for generator but found 'cpu'"):
        torch.randn(20, device="npu", generator=torch.Generator())


@check
def _random_numbers_look_random() -> None:
    torch.manual_seed(0)
    uniform = torch.cat([torch.rand(1000, device="npu") for _ in range(20)]).cpu()
    assert abs(uniform.mean() - 0.5) < 0.01 and len(uniform.unique()) > 19_000
    kept = nn.functional.dropout(torch.ones(20_000, device="npu"), 0.25).cpu()
    assert len(kept.unique()) == 2 and abs(kept.max() - 4 / 3) < 1e-6
    assert abs((kept != 0).float().mean() - 0.75) < 0.02


# ---------------------------------------------------------------- the tests


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    return run_ranks(1, _all_checks, device="npu", timeout_s=120)[0]


def _all_checks(_topology: Topology) -> dict[str, str]:
    return check.run()


@pytest.mark.npu
@pytest.mark.parametrize("name", check.names)
def test_on_the_stand_in(outcomes: dict[str, str], name: str) -> None:
    assert outcomes[name] == ""


# ---------------------------------------------------------------- finding and building it


@pytest.mark.npu
def test_a_plain_import_of_torch_finds_it(tmp_path: Path) -> None:
    build()
    program = "import torch; assert torch.npu.device_count() == 3; print(torch.arange(3, device='npu').sum().item())"
    environment = os.environ | {"PYTHONPATH": str(FOLDER), "NPU_SIM_DEVICES": "3"}
    environment.pop("TORCH_DEVICE_BACKEND_AUTOLOAD", None)
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.stdout, done.returncode) == ("3\n", 0), done.stderr


def test_it_has_the_entry_point_of_the_real_one() -> None:
    (distribution,) = metadata.distributions(path=[str(FOLDER)])
    assert [(point.group, point.name, point.value) for point in distribution.entry_points] == [
        ("torch.backends", "torch_npu", "torch_npu:_autoload")
    ]


@pytest.mark.npu
def test_npu_smi_shows_a_process_on_the_devices_that_it_has_set() -> None:
    (first, first_pid), (second, second_pid) = run_ranks(2, _asked_npu_smi, device="npu", is_only=True)
    assert [(npu, pid) for npu, _, pid in first] == [(0, first_pid)]
    assert [(npu, pid) for npu, _, pid in second] == [(1, second_pid), (2, second_pid)]
    assert first[0][1] != second[0][1]


def _asked_npu_smi(topology: Topology) -> tuple[list[tuple[int, int, int]], int]:
    """(NPU, chip, process) of each NPU that has this process on it."""
    if topology.rank == 1:
        torch.ones(3, device="npu:2")
    found = []
    for npu in range(4):
        said = subprocess.run(
            ["npu-smi", "info", "-t", "proc-mem", "-i", str(npu)], capture_output=True, text=True, check=True
        ).stdout
        fields = dict(re.findall(r"(NPU ID|Chip Count|Process id|Chip ID)\s*:\s*(\d+)", said))
        assert int(fields["NPU ID"]) == npu
        if "Process id" in fields:
            found.append((npu, int(fields["Chip ID"]), int(fields["Process id"])))
    return found, os.getpid()


class _Compiler:
    """A program in the compiler's place, which keeps a list of its calls; `"$2"` is the file that it is to write."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = folder / "calls"
        self.cache = folder / "cache"
        self._program = folder / "c++"
        monkeypatch.setenv("CXX", str(self._program))
        monkeypatch.setenv("NPU_SIM_BUILD", str(self.cache))

    def becomes(self, action: str) -> None:
        lines = [
            'for one; do [ "$one" = --version ] && exit 0; done',
            f"echo $$ >> {self.calls}",
            'while [ "$1" != -o ]; do shift; done',
            action,
        ]
        self._program.write_text("\n".join(["#!/bin/sh", *lines]))
        self._program.chmod(0o755)


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> _Compiler:
    return _Compiler(tmp_path, monkeypatch)


def _start_build() -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, FOLDER / "npu_sim_build.py"], stdout=subprocess.PIPE, text=True)


def test_two_processes_that_build_at_once_compile_once(compiler: _Compiler) -> None:
    compiler.becomes('sleep 0.5; echo whole > "$2"')
    builds = [_start_build(), _start_build()]
    libraries = {one.communicate(timeout=30)[0].strip() for one in builds}
    assert [one.returncode for one in builds] == [0, 0]
    assert [Path(library).read_text() for library in libraries] == ["whole\n"]
    assert len(compiler.calls.read_text().splitlines()) == 1


def test_a_build_that_was_killed_does_not_stop_the_next(compiler: _Compiler) -> None:
    compiler.becomes('echo half > "$2"; exec sleep 60')
    killed = _start_build()
    while not list(compiler.cache.glob("*.unfinished")):
        time.sleep(0.01)
    killed.kill()
    os.kill(int(compiler.calls.read_text()), signal.SIGKILL)
    killed.communicate()
    compiler.becomes('echo whole > "$2"')
    assert build().read_text() == "whole\n"


def test_other_sources_or_another_compiler_are_another_library(
    compiler: _Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler.becomes('echo whole > "$2"')
    first = build()
    assert build() == first
    monkeypatch.setenv("CXX", f"{os.environ['CXX']} -g")
    assert build() != first
    assert len(compiler.calls.read_text().splitlines()) == 2


def test_a_source_that_does_not_compile_is_one_sentence(compiler: _Compiler) -> None:
    compiler.becomes("echo 'In file x'  >&2; echo 'module.cpp:7: error: no member named y' >&2; exit 1")
    with pytest.raises(BuildError, match=r"does not compile with torch 2\S+: module.cpp:7: error: no member named y$"):
        build()


def test_a_machine_without_a_compiler_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(
        ImportError, match=r"^the npu stand-in needs a C\+\+ compiler: install g\+\+, or name one in CXX$"
    ):
        build()


def test_a_cache_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_SIM_BUILD", "/proc/x")
    with pytest.raises(BuildError, match="cannot be built in /proc/x .*: name another in NPU_SIM_BUILD"):
        build()
