from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch

from ckpt.errors import ConfigurationError, DeviceUnavailableError
from ckpt.memory.device import Device, device_of, wait_for_all

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

    def current_device(self) -> int:
        return self.current.index if self.current else 0

    def get_rng_state(self, device: torch.device) -> torch.Tensor:
        return self.states[device.index].clone()

    def set_rng_state(self, state: torch.Tensor, device: torch.device) -> None:
        self.states[device.index] = state.clone()


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


def test_a_process_that_works_on_all_devices_keeps_the_generator_of_each(accelerator: FakeAccelerator) -> None:
    device = Device(type="cuda", collectives="gloo")
    states = device.rng_state()
    assert list(states) == ["cpu", "cuda[0]", "cuda[1]"]
    saved = [state.clone() for state in accelerator.states]
    accelerator.states = [torch.zeros(16, dtype=torch.uint8)] * 2
    device.set_rng_state(states)
    assert [state.tolist() for state in accelerator.states] == [state.tolist() for state in saved]


def test_a_rank_keeps_the_generator_of_its_own_device_wherever_that_lies_when_it_is_restored(
    accelerator: FakeAccelerator,
) -> None:
    """A checkpoint holds no device: the rank on the second one may go on on the first."""
    there, here = Device(type="cuda", collectives="gloo"), Device(type="cuda", collectives="gloo")
    there.use(1)
    states = there.rng_state()
    assert list(states) == ["cpu", "cuda[0]"]
    assert torch.equal(states["cuda[0]"], accelerator.states[1])
    here.use(0)
    untouched = accelerator.states[1].clone()
    here.set_rng_state(states)
    assert torch.equal(accelerator.states[0], states["cuda[0]"]) and torch.equal(accelerator.states[1], untouched)


def test_generator_states_of_other_devices_are_refused_before_any_is_set(accelerator: FakeAccelerator) -> None:
    device = Device(type="cuda", collectives="gloo")
    states = device.rng_state()
    before = torch.get_rng_state()
    del states["cuda[1]"]
    expected = r"generators cpu, cuda\[0\], this rank has cpu, cuda\[0\], cuda\[1\]: .*elastic=derive .*leave component rng out"
    with pytest.raises(ConfigurationError, match=expected):
        device.set_rng_state(states | {"cpu": torch.zeros_like(before)})
    assert torch.equal(torch.get_rng_state(), before)


def test_a_rank_works_on_the_device_of_its_local_number(accelerator: FakeAccelerator) -> None:
    device = Device(type="cuda", collectives="gloo")
    device.use(1)
    assert device.torch_device == accelerator.current == torch.device("cuda", 1)


def test_more_ranks_than_devices_are_refused_with_the_number_that_fits(accelerator: FakeAccelerator) -> None:
    with pytest.raises(DeviceUnavailableError, match="local rank 2 .* shows 2; start at most 2 ranks here"):
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
        DeviceUnavailableError, match=r"^device=warp: torch .* knows no such device; .* registers it as plugin$"
    ):
        Device(type="warp", collectives="gloo").require()


def test_a_plugin_that_is_not_installed_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpt.memory.device.find_spec", lambda name: None)
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


@pytest.mark.parametrize(
    ("wants", "fits"),
    [
        ("torch==2.13.0.*", False),
        ("torch==2.14.0", True),
        ("torch>=2.13", True),
        ("torch<2.14", False),
        ("numpy<1", True),
        ('torch<2; extra == "old"', True),
    ],
)
def test_a_plugin_for_another_torch_is_refused_before_it_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wants: str, fits: bool
) -> None:
    write_plugin(tmp_path, "torch_npu", "raise ImportError('imported')", monkeypatch)
    about = tmp_path / "torch_npu-9.9.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch_npu\nVersion: 9.9\nRequires-Dist: {wants}\n")
    monkeypatch.setattr(torch, "__version__", "2.14.0+cpu")
    expected = (
        "imported"
        if fits
        else r"torch_npu 9\.9 is for torch .*, and this is torch 2\.14\.0\+cpu: install the two together"
    )
    with pytest.raises(DeviceUnavailableError, match=expected):
        Device(type="npu", collectives="hccl", plugin="torch_npu").require()


def test_host_tensors_always_have_collectives_beside_those_of_the_device() -> None:
    assert Device(**CPU).backends == "gloo"
    assert Device(type="cuda", collectives="nccl").backends == "cpu:gloo,cuda:nccl"
    assert Device(type="npu", collectives="hccl", plugin="torch_npu").backends == "cpu:gloo,npu:hccl"


def test_the_memory_of_the_host_is_that_of_the_machine_and_this_process() -> None:
    kept = torch.ones(8 << 20, dtype=torch.uint8)
    memory = Device(**CPU).memory()
    assert kept.nbytes < memory.allocated <= memory.peak and 0 < memory.free < memory.total


def test_the_device_of_tensors_is_the_one_that_is_not_the_host() -> None:
    assert device_of([torch.zeros(1)]).type == device_of([]).type == "cpu"
    found = device_of([torch.zeros(1), torch.empty(1, device="meta")])
    assert (found.type, found.torch_device) == ("meta", torch.device("meta"))


def test_nothing_is_ever_queued_for_tensors_without_memory() -> None:
    wait_for_all([torch.empty(3, device="meta"), torch.zeros(3)])


def test_a_device_that_was_not_given_out_is_the_current_one(accelerator: FakeAccelerator) -> None:
    device = Device(type="cuda", collectives="nccl")
    assert device.torch_device == torch.device("cuda", 0)
    accelerator.set_device(torch.device("cuda", 1))
    assert device.torch_device == torch.device("cuda", 1)
