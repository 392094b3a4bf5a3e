"""torch.npu: of the real module's names those that a program which trains and saves uses."""

from __future__ import annotations

from types import SimpleNamespace, TracebackType

import torch

from torch_npu import _C

Device = torch.device | str | int | None


def is_available() -> bool:
    return _C.device_count() > 0


def is_initialized() -> bool:
    return _C.in_use() and not _C.forked()


def init() -> None:
    set_device(current_device())


def _lazy_init() -> None:
    init()


def _is_in_bad_fork() -> bool:
    return _C.forked()


def device_count() -> int:
    return _C.device_count()


def current_device() -> int:
    return _C.current_device()


def set_device(device: Device) -> None:
    _C.set_device(_index(device))


def get_device_name(device: Device = None) -> str:
    return get_device_properties(device).name


def get_device_properties(device: Device = None) -> SimpleNamespace:
    return SimpleNamespace(name="stand-in NPU on memory of the host", total_memory=mem_get_info(device)[1])


def synchronize(device: Device = None) -> None:
    torch.accelerator.synchronize(_index(device))


def _index(device: Device) -> int:
    index = device if isinstance(device, int) or device is None else torch.device(device).index
    if index is None:
        return current_device()
    if not 0 <= index < device_count():
        raise RuntimeError(f"npu device index {index} is out of range: there are {device_count()}")
    return index


# ---------------------------------------------------------------- memory


def empty_cache() -> None:
    torch.accelerator.empty_cache()


def host_empty_cache() -> None:
    torch._C._accelerator_emptyHostCache()


def ipc_collect() -> None:
    """Nothing is kept for other processes beyond the tensors themselves."""


def mem_get_info(device: Device = None) -> tuple[int, int]:
    return torch.accelerator.get_memory_info(_index(device))


def memory_allocated(device: Device = None) -> int:
    return torch.accelerator.memory_allocated(_index(device))


def max_memory_allocated(device: Device = None) -> int:
    return torch.accelerator.max_memory_allocated(_index(device))


def memory_reserved(device: Device = None) -> int:
    return torch.accelerator.memory_reserved(_index(device))


def max_memory_reserved(device: Device = None) -> int:
    return torch.accelerator.max_memory_reserved(_index(device))


def reset_peak_memory_stats(device: Device = None) -> None:
    torch.accelerator.reset_peak_memory_stats(_index(device))


# ---------------------------------------------------------------- random numbers

default_generators = tuple(_C.default_generator(index) for index in range(device_count()))


def get_rng_state(device: Device = "npu") -> torch.Tensor:
    return default_generators[_index(device)].get_state()


def set_rng_state(state: torch.Tensor, device: Device = "npu") -> None:
    default_generators[_index(device)].set_state(state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [generator.get_state() for generator in default_generators]


def set_rng_state_all(states: list[torch.Tensor]) -> None:
    for generator, state in zip(default_generators, states, strict=True):
        generator.set_state(state)


def manual_seed(seed: int) -> None:
    default_generators[current_device()].manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for generator in default_generators:
        generator.manual_seed(seed)


def initial_seed() -> int:
    return default_generators[current_device()].initial_seed()


# ---------------------------------------------------------------- data types


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]


def is_bf16_supported() -> bool:
    return True


# ---------------------------------------------------------------- streams and events

_PRIVATEUSE1 = 20  # of c10::DeviceType


class Stream(torch.Stream):
    def __new__(cls, device: Device = None, priority: int = 0, **known: int) -> Stream:
        if known:
            return super().__new__(cls, priority=priority, **known)
        return super().__new__(cls, device=torch.device("npu", _index(device)), priority=priority)


class Event(torch.Event):
    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Event:
        return super().__new__(
            cls, device="npu", enable_timing=enable_timing, blocking=blocking, interprocess=interprocess
        )

    def elapsed_time(self, other: torch.Event) -> float:
        return _C.elapsed_ms(self.event_id, other.event_id)  # torch's own takes no event of a subclass


def current_stream(device: Device = None) -> torch.Stream:
    return torch.accelerator.current_stream(_index(device))


def default_stream(device: Device = None) -> Stream:
    return Stream(stream_id=0, device_index=_index(device), device_type=_PRIVATEUSE1)


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


class stream:
    """Makes a stream the current one of its device, and its device the current one."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> torch.Stream | None:
        if self.stream is not None:
            self._before = current_stream(), current_stream(self.stream.device)
            set_stream(self.stream)
        return self.stream

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.stream is not None:
            set_stream(self._before[1])
            set_stream(self._before[0])


StreamContext = stream


class device:
    """Makes a device the current one."""

    def __init__(self, device: Device) -> None:
        self._index = _index(device)

    def __enter__(self) -> None:
        self._before = current_device()
        set_device(self._index)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        set_device(self._before)
