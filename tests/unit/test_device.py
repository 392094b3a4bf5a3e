from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch

from ckpt.device import Device
from ckpt.errors import ConfigurationError, DeviceUnavailableError

CPU = {"type": "cpu", "collectives": "gloo"}


class FakeAccelerator:
    """What `torch.get_device_module` returns for a device, of which this host has two."""

    def __init__(self) -> None:
        self.current: torch.device | None = None
        self.states = [torch.arange(16, dtype=torch.uint8) + i for i in range(2)]

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 2

    def set_device(self, device: torch.device) -> None:
        self.current = device

    def get_rng_state(self, index: int) -> torch.Tensor:
        return self.states[index].clone()

    def set_rng_state(self, state: torch.Tensor, index: int) -> None:
        self.states[index] = state.clone()


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> FakeAccelerator:
    fake = FakeAccelerator()
    monkeypatch.setattr(torch, "get_device_module", lambda type: fake)
    return fake


def write_plugin(folder: Path, name: str, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, name, raising=False)
    importlib.invalidate_caches()


def test_a_contiguous_host_tensor_is_staged_as_itself() -> None:
    tensor = torch.arange(60.0).reshape(12, 5)
    (staged,) = Device(**CPU).stage([tensor])
    assert staged.data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(60).reshape(12, 5).t(),
        torch.arange(60).reshape(12, 5)[:, 1:3],
        torch.arange(120.0).reshape(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.arange(5).expand(3, 5),
        torch.complex(torch.arange(6.0), torch.arange(6.0) + 0.5).conj(),
    ],
    ids=["transposed", "sliced", "channels last", "expanded", "conjugated lazily"],
)
def test_a_staged_tensor_is_c_contiguous_and_has_the_same_values(tensor: torch.Tensor) -> None:
    (staged,) = Device(**CPU).stage([tensor])
    assert staged.is_contiguous() and not staged.is_conj()
    torch.testing.assert_close(staged, tensor.resolve_conj(), rtol=0, atol=0)


def test_staging_and_filling_leave_autograd_out() -> None:
    parameter = torch.nn.Parameter(torch.arange(6.0))
    device = Device(**CPU)
    (staged,) = device.stage([parameter])
    assert not staged.requires_grad
    device.fill(parameter, torch.arange(6.0) * 7)
    assert parameter.tolist() == [0, 7, 14, 21, 28, 35] and parameter.grad_fn is None


def test_filling_a_strided_tensor_touches_its_own_elements_only() -> None:
    whole = torch.zeros(4, 6)
    Device(**CPU).fill(whole[:, 2:4], torch.arange(8.0).reshape(4, 2))
    assert whole[:, 2:4].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert whole[:, :2].eq(0).all() and whole[:, 4:].eq(0).all()


def test_the_cpu_is_always_there_and_every_rank_has_it() -> None:
    device = Device(**CPU)
    device.require()
    device.use(7)
    device.synchronize()
    assert device.torch_device == torch.device("cpu")


def test_random_numbers_repeat_after_their_state_is_restored() -> None:
    device = Device(**CPU)
    state = device.rng_state()
    drawn = torch.rand(5)
    device.set_rng_state(state)
    assert list(state) == ["cpu"]
    torch.testing.assert_close(torch.rand(5), drawn, rtol=0, atol=0)


def test_every_visible_device_keeps_its_own_generator(accelerator: FakeAccelerator) -> None:
    device = Device(type="cuda", collectives="gloo")
    states = device.rng_state()
    assert list(states) == ["cpu", "cuda:0", "cuda:1"]
    saved = [state.clone() for state in accelerator.states]
    accelerator.states = [torch.zeros(16, dtype=torch.uint8)] * 2
    device.set_rng_state(states)
    assert [state.tolist() for state in accelerator.states] == [state.tolist() for state in saved]


def test_generator_states_of_other_devices_are_refused_before_any_is_set(accelerator: FakeAccelerator) -> None:
    device = Device(type="cuda", collectives="gloo")
    states = device.rng_state()
    before = torch.get_rng_state()
    del states["cuda:1"]
    with pytest.raises(ConfigurationError, match=r"cpu, cuda:0, this rank has cpu, cuda:0, cuda:1: .*~components\.rng"):
        device.set_rng_state(states | {"cpu": torch.zeros_like(before)})
    assert torch.equal(torch.get_rng_state(), before)


def test_a_rank_works_on_the_device_of_its_local_number(accelerator: FakeAccelerator) -> None:
    device = Device(type="cuda", collectives="gloo")
    device.use(1)
    assert device.torch_device == accelerator.current == torch.device("cuda", 1)


def test_more_ranks_than_devices_are_refused_with_the_number_that_fits(accelerator: FakeAccelerator) -> None:
    with pytest.raises(DeviceUnavailableError, match="local rank 2 .* shows 2; .*launch.nproc_per_node=2"):
        Device(type="cuda", collectives="gloo").use(2)


def test_collectives_that_torch_does_not_have_are_refused(accelerator: FakeAccelerator) -> None:
    with pytest.raises(DeviceUnavailableError, match="has no pigeons collectives"):
        Device(type="cuda", collectives="pigeons").require()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_cuda_device_is_one_sentence() -> None:
    with pytest.raises(DeviceUnavailableError, match=r"^device=cuda: torch .*; choose device=cpu$"):
        Device(type="cuda", collectives="nccl").require()


def test_a_device_type_that_torch_does_not_know_is_one_sentence() -> None:
    with pytest.raises(
        DeviceUnavailableError, match=r"^device\.type=warp: torch .* knows no such device; .*device\.plugin$"
    ):
        Device(type="warp", collectives="gloo").require()


def test_a_plugin_that_is_not_installed_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpt.device.find_spec", lambda name: None)
    with pytest.raises(
        DeviceUnavailableError, match=r"^device=npu: torch_npu is not installed: pip install '.*\[npu\]', or"
    ):
        Device(type="npu", collectives="hccl", plugin="torch_npu").require()


def test_a_plugin_without_its_driver_is_told_from_one_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusal = "libascendcl.so: cannot open shared object file: No such file or directory"
    write_plugin(tmp_path, "torch_npu", f"raise ImportError({refusal!r})", monkeypatch)
    expected = r"^device=npu: torch_npu is installed without CANN \(libascendcl\.so cannot be loaded\): install .*CANN"
    with pytest.raises(DeviceUnavailableError, match=expected):
        Device(type="npu", collectives="hccl", plugin="torch_npu").require()


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64])
def test_bits_survive_the_way_to_the_host_and_back(dtype: torch.dtype) -> None:
    device = Device(type="cuda", collectives="nccl")
    device.use(0)
    bits = (
        torch.randint(0, 2, (12, 40), dtype=torch.uint8)
        if dtype == torch.bool
        else torch.randint(0, 256, (12, 40), dtype=torch.uint8)
    )
    values = bits.view(dtype)
    on_device = values.to(device.torch_device)
    strided = on_device.t()
    staged, staged_strided = device.stage([on_device, strided])
    assert staged.is_pinned() and staged_strided.is_contiguous()
    assert torch.equal(staged.view(torch.uint8), bits)
    assert torch.equal(staged_strided.t().contiguous().view(torch.uint8), bits)
    filled = torch.empty_like(on_device)
    device.fill(filled, staged)
    assert torch.equal(filled.cpu().view(torch.uint8), bits)


@pytest.mark.cuda
def test_a_real_generator_repeats_on_its_device() -> None:
    device = Device(type="cuda", collectives="nccl")
    device.use(0)
    states = device.rng_state()
    drawn = torch.rand(5, device=device.torch_device).cpu()
    device.set_rng_state(states)
    assert torch.equal(torch.rand(5, device=device.torch_device).cpu(), drawn)
