"""Tensors that lie in device memory in every awkward way, copies into them that come late, and a look at them at once."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import numpy as np
import torch

from tests.support.states import same_bits

Lay = Callable[[torch.Tensor], torch.Tensor]
"""Makes a tensor of flat memory: a view of all of it, or of some."""


class Kind(NamedTuple):
    """One tensor of a state, and the memory it lies in."""

    dtype: torch.dtype
    num_elements: int
    lay: Lay


_AWKWARD = {
    "large": Kind(torch.float32, 5 << 18, lambda flat: flat.view(5, 256, 1024)),  # 5 MiB: two blocks
    "long": Kind(torch.bfloat16, (5 << 17) + 3, lambda flat: flat[3:]),  # 1.2 MiB, not from the start of its memory
    "every second": Kind(torch.float32, 2 << 18, lambda flat: flat.view(512, 1024)[:, ::2]),
    "transposed": Kind(torch.float32, 600 * 451, lambda flat: flat.view(600, 451).t()),
    "inside": Kind(torch.float64, 250 * 200, lambda flat: flat.view(250, 200)[7:-5, 3:-9]),
    "channels last": Kind(torch.uint8, 2 * 64 * 48 * 3, lambda flat: flat.view(2, 64, 48, 3).permute(0, 3, 1, 2)),
    "few columns": Kind(torch.int64, 3000 * 7, lambda flat: flat.view(3000, 7)[:, 2:5]),
    "fp8": Kind(torch.float8_e4m3fn, 37 * 1001, lambda flat: flat.view(37, 1001)),
    "fp8 transposed": Kind(torch.float8_e5m2, 61 * 33, lambda flat: flat.view(61, 33).t()),
    "bf16 transposed": Kind(torch.bfloat16, 700 * 301, lambda flat: flat.view(700, 301).t()),
    "bool": Kind(torch.bool, 37 * 1001, lambda flat: flat.view(37, 1001)),
    "bool, every third": Kind(torch.bool, 3000, lambda flat: flat[::3]),
    "complex": Kind(torch.complex64, 65 * 33, lambda flat: flat.view(65, 33)),
    "complex transposed": Kind(torch.complex128, 65 * 33, lambda flat: flat.view(65, 33).t()),
    "half": Kind(torch.float16, 5, lambda flat: flat),
    "0-dim": Kind(torch.float32, 3, lambda flat: flat[1]),
    "0-dim bf16": Kind(torch.bfloat16, 1, lambda flat: flat[0]),
    "empty": Kind(torch.float32, 0, lambda flat: flat.view(0, 7)),
    "empty within": Kind(torch.int8, 12, lambda flat: flat.view(3, 4)[1:1]),
}
_TINY = {f"tiny {n}": Kind(torch.float32, 1 + n % 7, lambda flat: flat) for n in range(40)}
AWKWARD: dict[str, Kind] = _AWKWARD | _TINY
"""Large and tiny, dense and strided, of most data types, with nothing and with one thing in it."""


def tiny(count: int) -> dict[str, Kind]:
    """Very many small tensors, of which every eleventh has gaps."""
    return {f"h.{n}": Kind(torch.float32, 3 + n % 29, _every_second if n % 11 == 0 else _all) for n in range(count)}


def _all(flat: torch.Tensor) -> torch.Tensor:
    return flat


def _every_second(flat: torch.Tensor) -> torch.Tensor:
    return flat[::2]


class Memory:
    """The memory of one state, on one device, or on several in turn.

    Args:
        seed: what it holds at first.
        devices: the first tensor lies on the first of them, and so on.
    """

    def __init__(self, kinds: Mapping[str, Kind], seed: int, *devices: torch.device) -> None:
        self._kinds = kinds
        self._devices = [device for device in devices if device.type != "cpu"]
        values = _shown(kinds, seed)
        self._flat = {key: one.to(devices[n % len(devices)], copy=True) for n, (key, one) in enumerate(values.items())}
        self.synchronize()

    def tensors(self) -> dict[str, torch.Tensor]:
        return _laid(self._kinds, self._flat)

    def change(self, seed: int, *, late: bool = True, on_new_streams: bool = False) -> None:
        """Copy other values into all of it: late, on the streams that are in use or on others, that is after this has returned."""
        with ExitStack() as streams:
            for device in self._devices:
                streams.enter_context(_stream(device, is_new=on_new_streams))
                if late and device.type == "cuda":
                    torch.cuda._sleep(100_000_000)  # cycles; the stand-in is late by itself
            for key, value in _shown(self._kinds, seed).items():
                if late and self._flat[key].device.type != "cpu":
                    self._flat[key].copy_(value.pin_memory(), non_blocking=True)
                else:
                    self._flat[key].copy_(value)

    def now(self) -> dict[str, torch.Tensor]:
        """All of it as it is at this moment, read on streams that wait for no other; both ends of each memory first."""
        with ExitStack() as streams:
            for device in self._devices:
                streams.enter_context(_stream(device, is_new=True))
            ends = {key: (one[:16].cpu(), one[-16:].cpu()) for key, one in self._flat.items()}
            found = {key: one.to("cpu", copy=True) for key, one in self._flat.items()}
        for key, (first, last) in ends.items():
            whole = found[key]
            assert same_bits(first, whole[:16]) and same_bits(last, whole[-16:]), f"{key} was still being written"
        return found

    def synchronize(self) -> None:
        for device in self._devices:
            torch.get_device_module(device).synchronize(device)

    def require_filled(self, values: Mapping[str, torch.Tensor], around: int) -> None:
        """The tensors hold these values, the memory between and beside them still that of a seed; at once, and in the end."""
        wanted = host_memory(self._kinds, around)
        for key, tensor in _laid(self._kinds, wanted).items():
            tensor.copy_(values[key])
        require_same(self.now(), wanted)
        self.synchronize()
        require_same(self.now(), wanted)


def host_memory(kinds: Mapping[str, Kind], seed: int) -> dict[str, torch.Tensor]:
    """The flat memory of every tensor with the values of a seed: random bits of its type, different for every seed and tensor."""
    return {key: one.clone() for key, one in _shown(kinds, seed).items()}


def _shown(kinds: Mapping[str, Kind], seed: int) -> dict[str, torch.Tensor]:
    """The same to look at and to copy from: it lies in memory that all seeds share."""
    return {key: _bits(kind, seed * len(kinds) + number) for number, (key, kind) in enumerate(kinds.items())}


def _bits(kind: Kind, number: int) -> torch.Tensor:
    """A stretch of one pool of random bits, which is made faster than new ones."""
    start = number * 4099 % (_STARTS // 16) * 16
    bits = _pool()[start : start + kind.num_elements * kind.dtype.itemsize]
    return bits.bitwise_and(1).view(torch.bool) if kind.dtype is torch.bool else bits.view(kind.dtype)


_STARTS = 2 << 20
_LONGEST = 6 << 20


@functools.cache
def _pool() -> torch.Tensor:
    return torch.frombuffer(bytearray(np.random.default_rng(7).bytes(_STARTS + _LONGEST)), dtype=torch.uint8)


def values_of(kinds: Mapping[str, Kind], seed: int) -> dict[str, torch.Tensor]:
    """What the tensors of a state hold, on the host, to be looked at: they lie in memory that all states share."""
    return _laid(kinds, _shown(kinds, seed))


def state_of(kinds: Mapping[str, Kind], seed: int) -> dict[str, torch.Tensor]:
    """The same in memory of its own."""
    return _laid(kinds, host_memory(kinds, seed))


def require_same(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    """Compare every bit; say which tensors differ, and where they begin to."""
    assert found.keys() == wanted.keys()
    wrong = [key for key, tensor in wanted.items() if not same_bits(found[key], tensor)]
    assert not wrong, f"{len(wrong)} of {len(wanted)} tensors differ: {', '.join(wrong[:5])}"


def _laid(kinds: Mapping[str, Kind], flat: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: kind.lay(flat[key]) for key, kind in kinds.items()}


@contextmanager
def _stream(device: torch.device, *, is_new: bool) -> Iterator[None]:
    """Work on a new stream of a device; or on the one in use."""
    module = torch.get_device_module(device)
    if not is_new:
        yield
        return
    with module.stream(module.Stream(device=device)):
        yield


class Filled:
    """Fills a device, until it is let go of, so that just a little more than so many bytes are free."""

    def __init__(self, device: torch.device, room: int) -> None:
        self._module = torch.get_device_module(device)
        self._device = device
        self._module.empty_cache()
        self._memory: list[torch.Tensor] = []
        num_bytes = 256 << 20
        while num_bytes >= 512:
            try:
                has_room = self.free() - num_bytes >= room
                more = [torch.empty(num_bytes, dtype=torch.uint8, device=device)] if has_room else []
            except torch.OutOfMemoryError:  # a block of the device's allocator is larger
                more = []
            self._memory += more
            num_bytes = num_bytes if more else num_bytes // 2

    def free(self) -> int:
        return int(self._module.mem_get_info(self._device)[0])

    def let_go(self) -> None:
        self._memory.clear()
        self._module.empty_cache()


class Heard(logging.Handler):
    """Keeps what the library logs from now on."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        logging.getLogger("ckpt").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
