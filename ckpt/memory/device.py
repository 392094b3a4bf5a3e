"""Devices: memory, streams, random generators, collectives. The only file that names kinds of devices.

Uses `torch.get_device_module`, whose functions have the same names for every kind of device.
"""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from importlib import import_module, metadata
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NamedTuple

import psutil
import torch
from packaging.requirements import InvalidRequirement, Requirement

from ckpt.errors import (
    Argument,
    ConfigurationError,
    DeviceMemoryError,
    DeviceUnavailableError,
    declare,
    leave_out,
    unlike,
)

_EXTRAS = {"torch_npu": "npu"}
"""Plugins that an extra of this package installs."""

_RUNTIMES = {"torch_npu": ("CANN", "install the CANN toolkit and source its set_env.sh")}
"""Plugin -> the runtime that it needs beside its Python package, and how to install it."""

_VISIBLE = {"cuda": ("CUDA_VISIBLE_DEVICES",), "npu": ("ASCEND_RT_VISIBLE_DEVICES", "ASCEND_VISIBLE_DEVICES")}
"""Environment variables that hide devices."""

KNOWN = {"cpu": ("gloo", None), "cuda": ("nccl", None), "npu": ("hccl", "torch_npu")}
"""Device type -> its collectives and its plugin."""

OTHER_NAMES = {
    "gpu": "cuda",
    "nvidia": "cuda",
    "rocm": "cuda",
    "hip": "cuda",
    "ascend": "npu",
    "cann": "npu",
}
"""What people call a device -> its type."""

NOT_SUPPORTED = frozenset({"mps", "tpu", "xla", "xpu", "hpu", "mlu", "musa"})
"""Devices, of which none is like a known one."""

OWN_DEVICE = "CKPT_OWN_DEVICE"
"""Environment variable: 1 says that this rank sees its own device alone, and the other ranks of the host theirs. Launchers set it."""

INTERFACE_VARIABLES = ("NCCL_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME")
"""Environment variables that name the network interfaces of a device's collectives."""


class Memory(NamedTuple):
    """Memory of one device, in bytes.

    Attributes:
        free, total: of the device, over all processes.
        allocated, peak: of this process's tensors, now and at most so far; for the host, of the whole process.
    """

    free: int
    total: int
    allocated: int
    peak: int


class Device:
    """A device type, and on each rank the one device that the rank works on.

    Args:
        type: the type of torch.device, such as "cpu", "cuda" or "npu".
        collectives: the torch.distributed backend that moves tensors of this device.
        plugin: the package that registers `type` with torch when it is imported; None if torch itself knows it.

    Attributes:
        pinned_bytes: of page-locked host memory for a save's copies from the device, kept for the next save: room for two chunks.
    """

    pinned_bytes = 128 << 20

    def __init__(self, *, type: str, collectives: str, plugin: str | None = None) -> None:
        self.type = type
        self.collectives = collectives
        self.plugin = plugin
        self._own: torch.device | None = None

    @classmethod
    def of_type(cls, type: str) -> Device:
        """Return a device of a known type, with its collectives and plugin.

        Raises:
            ConfigurationError: the type is unknown, or has a device number.
        """
        if type not in KNOWN:
            raise unlike("device", type, f"one of {', '.join(KNOWN)}, without a number, or Device(type=..., collectives=...)")
        collectives, plugin = KNOWN[type]
        return cls(type=type, collectives=collectives, plugin=plugin)

    @property
    def torch_device(self) -> torch.device:
        """The device of `use`; without it, torch's current one of this type."""
        if self.type == "cpu":
            return torch.device("cpu")
        return self._own or torch.device(self.type, self._module().current_device())

    @property
    def backends(self) -> str:
        """The backend string for torch.distributed: gloo for host tensors, beside the device's own collectives."""
        return self.collectives if self.type == "cpu" else f"cpu:gloo,{self.type}:{self.collectives}"

    def require(self) -> None:
        """Check that this machine has such a device. Called before any rank starts, and by each rank in `use`.

        Raises:
            DeviceUnavailableError: it has none; the message names the missing part and a way to go on.
        """
        if self.plugin is not None:
            _import_plugin(self.type, self.plugin)
        if self.type == "cpu":
            return
        module = self._module()
        if not module.is_available():
            raise _absent(self.type, f"{_why_absent(self.type)}; choose device=cpu")
        if not torch.distributed.is_backend_available(self.collectives):
            found = f"torch {torch.__version__} has no {self.collectives} collectives; install one that has, or give "
            raise _absent(self.type, found, Argument("device.collectives", "gloo", "the device collectives=gloo"))

    def use(self, local_rank: int) -> None:
        """Select the device of this local rank, for `torch_device` and as torch's current device; the first one if it sees but its own.

        Raises:
            DeviceUnavailableError: the host has fewer devices than ranks, or none.
        """
        self.require()
        if self.type == "cpu":
            return
        module = self._module()
        num_devices = module.device_count()
        if os.environ.get(OWN_DEVICE) == "1":
            local_rank = 0
        if local_rank >= num_devices:
            found = f"local rank {local_rank} has no device of its own, this host shows {num_devices}; "
            raise _absent(self.type, found, Argument("world_size", num_devices, f"start at most {num_devices} ranks here"))
        self._own = torch.device(self.type, local_rank)
        module.set_device(self._own)

    def synchronize(self) -> None:
        """Wait for all work queued on this rank's device, on all streams."""
        wait_for(self.torch_device)

    def memory(self) -> Memory:
        """Return the figures of this rank's device, which may be the host."""
        if self.torch_device.type == "cpu":
            host, now = psutil.virtual_memory(), psutil.Process().memory_info().rss
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
            return Memory(host.available, host.total, now, max(now, peak))
        module = self._module()
        free, total = module.mem_get_info(self.torch_device)
        allocated, peak = (f(self.torch_device) for f in (module.memory_allocated, module.max_memory_allocated))
        return Memory(free, total, allocated, peak)

    def telling_of_room(self) -> AbstractContextManager[None]:
        """See the function of that name."""
        return telling_of_room(self)

    def rng_state(self) -> dict[str, torch.Tensor]:
        """Return torch's generator states by name: "cpu", and "<type>[i]" of each device that the rank works on.

        That is the device of `use`, whatever its number; without `use`, all devices that the process sees.
        """
        states = {"cpu": torch.get_rng_state()}
        return states | {name: self._module().get_rng_state(at) for name, at in self._generators().items()}

    def set_rng_state(self, states: Mapping[str, torch.Tensor]) -> None:
        """Set the generators to the result of `rng_state`, from a rank with the same kind of devices.

        Raises:
            ConfigurationError: the states are of other devices; no generator is set.
        """
        generators = self._generators()
        if set(states) != {"cpu", *generators}:
            raise ConfigurationError(
                f"the checkpoint holds the states of the generators {_listed(states)}, this rank has "
                f"{_listed(('cpu', *generators))}: ",
                declare("rng", elastic="derive"), " to go on from others that follow from the run's seed, resume on as many ",
                "devices of the same type, or ", leave_out("rng"),
            )
        torch.set_rng_state(states["cpu"].cpu())
        for name, at in generators.items():
            self._module().set_rng_state(states[name].cpu(), at)

    def _generators(self) -> dict[str, torch.device]:
        if self.type == "cpu":
            return {}
        if self._own is not None:
            return {f"{self.type}[0]": self._own}
        return {f"{self.type}[{i}]": torch.device(self.type, i) for i in range(self._module().device_count())}

    def _module(self) -> Any:
        try:
            return torch.get_device_module(self.type)
        except RuntimeError as error:
            found = f"torch {torch.__version__} knows no such device"
            raise _absent(self.type, f"{found}; choose device=cpu, or give the device the package that registers it as plugin") from error


def device_of(tensors: Iterable[torch.Tensor]) -> Device:
    """Return the device of tensors, with torch's default collectives for it; the first by name, if there are several."""
    found = min((tensor.device for tensor in tensors if tensor.device.type != "cpu"), key=str, default=None)
    if found is None:
        return Device(type="cpu", collectives="gloo")
    device = Device(
        type=found.type, collectives=torch.distributed.Backend.default_device_backend_map.get(found.type, "gloo")
    )
    device._own = found
    return device


def current_device() -> Device:
    """Return this process's current accelerator, with torch's default collectives for it; the host, if it has none."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return Device(type="cpu", collectives="gloo")
    return device_of([torch.empty(0, device=torch.device(accelerator.type, torch.accelerator.current_device_index()))])


def wait_for(device: torch.device) -> None:
    """Wait for all work queued on a device, on all streams. Returns at once for host and meta tensors."""
    if device.type not in ("cpu", "meta"):
        torch.get_device_module(device).synchronize(device)


def wait_for_all(tensors: Iterable[torch.Tensor]) -> None:
    """Wait for every device of the tensors, so that their values are complete."""
    for device in {tensor.device for tensor in tensors}:
        wait_for(device)


def wait_for_accelerator() -> None:
    """Wait for this process's current accelerator, if it uses one, so that a thread does not read an incomplete copy."""
    module = _accelerator_in_use()
    if module is not None:
        module.synchronize()


def same_device() -> Callable[[], None]:
    """Return a function that selects this thread's device in the thread that calls it. New threads begin on the first device."""
    module = _accelerator_in_use()
    return partial(module.set_device, module.current_device()) if module is not None else lambda: None


def uses_accelerator() -> bool:
    """Whether this process has an accelerator and has initialized it."""
    return _accelerator_in_use() is not None


def _accelerator_in_use() -> Any:
    """Return the torch module of this process's accelerator; None: there is none, or it is not initialized, which takes memory."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return None
    module = torch.get_device_module(accelerator)
    return module if getattr(module, "is_initialized", lambda: True)() else None


def pinned(num_bytes: int) -> torch.Tensor:
    """Return page-locked host memory as flat uint8. torch caches freed memory for the next call."""
    return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)


_streams: dict[tuple[torch.device, str], Any] = {}
"""Registry: device and role -> stream. Kept for the process: torch's allocator caches memory for each stream."""


class SideStream:
    """A stream on one device, beside the program's streams. As a context manager it is the current stream.

    The constructor waits for all work queued on the device.

    Args:
        role: purpose; each device has one stream for each role.
    """

    def __init__(self, device: torch.device, role: str) -> None:
        self.device = device
        self._module = torch.get_device_module(device)
        wait_for(device)
        if (device, role) not in _streams:
            _streams[device, role] = self._module.Stream(device=device)
        self._stream = _streams[device, role]
        self._entered: list[ExitStack] = []

    def __enter__(self) -> None:
        # The device first: else leaving the stream would select the first device in a new thread, and take memory there.
        with ExitStack() as contexts:
            contexts.enter_context(self._module.device(self.device))
            contexts.enter_context(self._module.stream(self._stream))
            self._entered.append(contexts.pop_all())

    def __exit__(self, *raised: Any) -> None:
        self._entered.pop().__exit__(*raised)

    def mark(self) -> StreamEvent:
        """Return an event after all work queued on it so far."""
        event = self._module.Event()
        event.record(self._stream)
        return StreamEvent(event)

    def wait(self) -> None:
        """Wait for all work queued on it."""
        self._stream.synchronize()


class StreamEvent:
    """An event on a stream."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def wait(self) -> None:
        """Wait for all work before it. Any thread."""
        self._event.synchronize()


def device_memory(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Return memory of a device as flat uint8.

    Raises:
        DeviceMemoryError: the device has too little memory left.
    """
    with telling_of_room(device, num_bytes):
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)


def device_memory_within(least: int, most: int, device: torch.device, *, unit: int = 1) -> torch.Tensor:
    """Return memory of a device as flat uint8: `most` bytes, or half of them, and so on down to `least`, as the device has room.

    Args:
        unit: both are multiples of it, and so is the result's size.

    Raises:
        DeviceMemoryError: there is no room for `least` bytes.
    """
    count = most // unit
    while True:
        try:
            return device_memory(count * unit, device)
        except DeviceMemoryError:
            if count <= least // unit:
                raise
            count = max(count // 2, least // unit)


def empty_beside(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return an uninitialized tensor like this one, on its device, or on the host if the device has no room.

    Args:
        dtype: None: its own.
    """
    try:
        return torch.empty_like(tensor, dtype=dtype)
    except torch.OutOfMemoryError:
        return torch.empty_like(tensor, dtype=dtype, device="cpu")


@contextmanager
def telling_of_room(device: torch.device | Device, num_bytes: int | None = None) -> Iterator[None]:
    """Turn torch's out-of-memory error inside the block into a `DeviceMemoryError`.

    Args:
        device: named in the error. A `Device` is resolved only when the error is raised.
        num_bytes: that the block allocates; None: unknown.

    Raises:
        DeviceMemoryError: the device had too little memory.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise _no_room(device.torch_device if isinstance(device, Device) else device, num_bytes) from error


def _no_room(device: torch.device, num_bytes: int | None) -> DeviceMemoryError:
    free, total = torch.get_device_module(device).mem_get_info(device)
    more = "" if num_bytes is None else f" for {_mib(num_bytes)} more"
    return DeviceMemoryError(
        f"device={device.type}: {device} has no room{more}, {_mib(free)} of {_mib(total)} are free; shard over more ranks, or "
        "free other memory on it"
    )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"


def _absent(type: str, *found: str) -> DeviceUnavailableError:
    return DeviceUnavailableError(f"device={type}: ", *found)


def _import_plugin(type: str, plugin: str) -> ModuleType:
    """Import the package that registers a device type. Errors tell a missing package from a missing runtime."""
    if find_spec(plugin) is None:
        extra = f"'{_distribution()}[{_EXTRAS[plugin]}]'" if plugin in _EXTRAS else plugin
        raise _absent(type, f"{plugin} is not installed: pip install {extra}, or choose device=cpu")
    _require_fitting(type, plugin)
    try:
        return import_module(plugin)
    except (ImportError, OSError, RuntimeError) as error:
        library = re.search(r"lib[\w.+-]*\.so[\w.]*", str(error))
        if library is None:
            reason = " ".join(str(error).split())
            raise _absent(type, f"{plugin} cannot be imported ({reason}); choose device=cpu") from error
        runtime, remedy = _RUNTIMES.get(plugin, ("its runtime", "install what it loads"))
        found = f"{plugin} is installed without {runtime} ({library[0]} cannot be loaded)"
        raise _absent(type, f"{found}: {remedy}, or choose device=cpu") from error


def _require_fitting(type: str, plugin: str) -> None:
    """Refuse a plugin that was built for another torch, before loading its libraries crashes the process."""
    try:
        distribution = metadata.distribution(plugin)
    except metadata.PackageNotFoundError:  # a plugin that no package manager installed
        return
    for text in distribution.requires or ():
        try:
            wanted = Requirement(text)
        except InvalidRequirement:
            continue
        applies = wanted.marker is None or wanted.marker.evaluate({"extra": ""})
        if wanted.name == "torch" and applies and not wanted.specifier.contains(torch.__version__, prereleases=True):
            found = f"{plugin} {distribution.version} is for torch {wanted.specifier}, and this is torch {torch.__version__}"
            raise _absent(type, f"{found}: install the two together (pip install torch {plugin}), or choose device=cpu")


def _why_absent(type: str) -> str:
    seen = f"torch {torch.__version__} sees no {type} device on this machine"
    hides = next((name for name in _VISIBLE.get(type, ()) if name in os.environ), None)
    if type == "cuda" and torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is built without CUDA"
    if hides is not None:
        return f"{seen}, where {hides} is {os.environ[hides]!r}"
    if type == "cuda" and getattr(torch._C, "_cuda_getDriverVersion", lambda: 1)() == 0:
        return f"{seen}, for it has no NVIDIA driver: nvidia-smi tells when it has one"
    return seen


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


def _distribution() -> str:
    """Return the name under which this package was installed, for a pip command."""
    return next(iter(metadata.packages_distributions().get("ckpt", ())), ".")
