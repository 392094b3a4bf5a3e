"""States and coordinators for tests of whole saves and loads."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from ckpt import CheckpointCoordinator, StateComponent
from ckpt.backends.base import Backend
from ckpt.backends.kimi_engine import KimiEngineBackend
from ckpt.backends.tensorstore import TensorStoreBackend
from ckpt.backends.zarr import ZarrBackend
from ckpt.format.dtypes import raw_bytes
from ckpt.loading.direct import DirectLoad
from ckpt.loading.strategy import LoadingStrategy
from ckpt.loading.two_stage.two_stage import TwoStageLoad
from ckpt.memory.budget import MemoryBudget
from ckpt.memory.device import Device
from ckpt.ranks.topology import Topology

BACKENDS = ("zarr", "ocdbt", "file", "safetensors")
ALL_DTYPES = (
    torch.bool, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
    torch.float16, torch.float32, torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2, torch.complex32, torch.complex64, torch.complex128,
)  # fmt: skip


class Held:
    """A stateful that holds a nested dict, copies what it is given into its tensors, and remembers it."""

    def __init__(self, state: dict[Any, Any]) -> None:
        self.state = state
        self.loaded: dict[Any, Any] | None = None

    def state_dict(self) -> dict[Any, Any]:
        return self.state

    def load_state_dict(self, state_dict: dict[Any, Any]) -> None:
        self.loaded = state_dict
        _copy_into(self.state, state_dict)


class Fitted(Held):
    """One that says what a load gives it, as a module does."""

    def prepare_to_load(self, saved: Any) -> None:
        """Do nothing: the tensors exist already."""


def _copy_into(own: dict[Any, Any], given: dict[Any, Any]) -> None:
    for key, value in given.items():
        mine = own.get(key)
        if isinstance(mine, dict) and isinstance(value, dict):
            _copy_into(mine, value)
        elif isinstance(mine, torch.Tensor) and isinstance(value, torch.Tensor) and mine is not value and mine.shape == value.shape:
            mine.detach().copy_(value)


def backend_named(name: str) -> Backend:
    if name == "safetensors":
        return KimiEngineBackend(pool=False)  # so that a load in the same process goes by the files
    return ZarrBackend() if name == "zarr" else TensorStoreBackend(kvstore=name)


def cpu() -> Device:
    return Device(type="cpu", collectives="gloo")


Sized = TypeVar("Sized")


def sized(made: Sized, **sizes: int) -> Sized:
    """A backend's buffers, a strategy or a device, of another size than it has by itself."""
    for name, num_bytes in sizes.items():
        setattr(made, name, num_bytes)
    return made


def buffered(backend: Any, **sizes: int) -> Any:
    """A backend whose writers have buffers of another size."""
    sized(backend.buffers, **sizes)
    return backend


def staging(mib: int | None) -> MemoryBudget | None:
    """So much memory for copies of the state, and the usual for all else."""
    return None if mib is None else MemoryBudget(staging=mib << 20)


def spreading(*, in_flight_bytes: int = TwoStageLoad.in_flight_bytes, **options: Any) -> TwoStageLoad:
    """A two-stage load whose ranks spread what they share, also if the page cache has it: that is asked about `os.preadv` alone."""
    return sized(TwoStageLoad(read_at=_read_at, **options), in_flight_bytes=in_flight_bytes)


def _read_at(fd: int, buffers: Sequence[memoryview], at: int) -> int:
    return os.preadv(fd, buffers, at)


def coordinator(
    topology: Topology,
    root: Path,
    components: Sequence[StateComponent],
    *,
    backend: str | Backend = "zarr",
    process_groups: dict[str, Any] | None = None,
    strategy: LoadingStrategy | None = None,
    **options: Any,
) -> CheckpointCoordinator:
    made = backend_named(backend) if isinstance(backend, str) else backend
    strategy = strategy or DirectLoad()
    return CheckpointCoordinator(
        components, process_groups or {}, topology, root, backend=made, strategy=strategy, device=cpu(), **options
    )


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Any bits at all of a type, NaN payloads and negative zeros included; a bool is 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    words = torch.empty(-(-num_bytes // 8), dtype=torch.int64).random_(-(2**63), None, generator=generator)
    return words.view(torch.uint8)[:num_bytes].view(dtype).view(shape)


def zero_bits(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros of a type for which torch may have no `zeros`."""
    return torch.zeros(torch.Size(shape).numel() * dtype.itemsize, dtype=torch.uint8).view(dtype).view(shape)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bool(
        torch.equal(raw_bytes(a.contiguous()), raw_bytes(b.contiguous()))
    )  # fmt: skip


def global_index(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """An array whose value is its own row-major index: an element in the wrong place names the place it came from."""
    return torch.arange(torch.Size(shape).numel()).to(dtype).view(shape)


def require_equal_states(one: Any, other: Any) -> None:
    """Two nested states have the same keys, in their order, and equal values; tensors to the bit."""
    leaves, others = [*_leaves(one)], [*_leaves(other)]
    assert [path for path, _ in leaves] == [path for path, _ in others]
    for (path, value), (_, there) in zip(leaves, others, strict=True):
        assert same_bits(value, there) if isinstance(value, torch.Tensor) else value == there, (path, value, there)


def _leaves(state: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    inside = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list | tuple) else None
    if inside is None:
        yield path, state
    for key, value in inside or ():
        yield from _leaves(value, f"{path}/{key}")
