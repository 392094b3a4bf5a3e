"""Device memory <-> host memory, and the random generators of a rank. The only file where a device has a name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch

from ckpt.errors import ConfigurationError, DeviceUnavailableError

_EXTRAS = {"torch_npu": "npu"}
"""Plugins that an extra of this package installs."""

_RUNTIMES = {"torch_npu": ("CANN", "install the CANN toolkit and source its set_env.sh")}
"""What a plugin needs beside its Python package, and how one gets it."""


class Device:
    """One kind of device memory, and on every rank the one device that the rank works on.

    Args:
        type: the type of torch.device, such as "cpu", "cuda" or "npu".
        collectives: the torch.distributed backend that moves tensors of this device.
        plugin: the package that registers `type` with torch when it is imported; None if torch itself knows it.
    """

    def __init__(self, *, type: str, collectives: str, plugin: str | None = None) -> None:
        self.type = type
        self.collectives = collectives
        self.plugin = plugin
        self.torch_device = torch.device("cpu")  # until `use`: before its plugin is imported, torch knows no such type

    def require(self) -> None:
        """Make sure that this machine has such a device. Called before any rank starts, and by each rank in `use`.

        Raises:
            DeviceUnavailableError: it has not; the sentence says what is missing and how to go on.
        """
        if self.plugin is not None:
            _import_plugin(self.type, self.plugin)
        if self.type == "cpu":
            return
        module = self._module()
        if not module.is_available():
            raise DeviceUnavailableError(f"device={self.type}: {_why_absent(self.type)}; choose device=cpu")
        if not torch.distributed.is_backend_available(self.collectives):
            raise DeviceUnavailableError(
                f"device={self.type}: torch {torch.__version__} has no {self.collectives} collectives; install one that has, "
                "or give device.collectives=gloo"
            )

    def use(self, local_rank: int) -> None:
        """Work on the device of this local rank from now on: `torch_device`, and torch's current device.

        Raises:
            DeviceUnavailableError: the host has fewer devices than ranks, or none.
        """
        self.require()
        if self.type == "cpu":
            return
        module = self._module()
        num_devices = module.device_count()
        if local_rank >= num_devices:
            raise DeviceUnavailableError(
                f"device={self.type}: local rank {local_rank} has no device of its own, this host shows {num_devices}; "
                f"start at most {num_devices} ranks here: launch.nproc_per_node={num_devices}"
            )
        self.torch_device = torch.device(self.type, local_rank)
        module.set_device(self.torch_device)

    def stage(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors in host memory, C-contiguous, all copies finished.

        A contiguous host tensor is returned itself, not copied. Copies from a device go to page-locked memory, all of
        them under way together.
        """
        staged = [self._to_host(tensor.detach().resolve_conj().resolve_neg()) for tensor in tensors]
        if any(tensor.device.type != "cpu" for tensor in tensors):
            self.synchronize()
        return staged

    def fill(self, out: torch.Tensor, host: torch.Tensor) -> None:
        """Copy a host tensor into `out`, on the device or on the host. When this returns, `host` may be reused."""
        out.detach().copy_(host)

    def synchronize(self) -> None:
        """Wait until everything queued on this rank's device is done."""
        if self.type != "cpu":
            self._module().synchronize()

    def rng_state(self) -> dict[str, torch.Tensor]:
        """Return torch's generator states by name: "cpu", and "<type>:<i>" of every device that this rank sees."""
        states = {"cpu": torch.get_rng_state()}
        if self.type != "cpu":
            module = self._module()
            states |= {f"{self.type}:{i}": module.get_rng_state(i) for i in range(module.device_count())}
        return states

    def set_rng_state(self, states: Mapping[str, torch.Tensor]) -> None:
        """Set the generators to what `rng_state` returned, on a rank that sees the same devices.

        Raises:
            ConfigurationError: the states are of other devices than this rank's; nothing is set.
        """
        own = set(self.rng_state())
        if set(states) != own:
            raise ConfigurationError(
                f"the checkpoint holds the states of the generators {_listed(states)}, this rank has {_listed(own)}: "
                "resume on as many devices of the same type, or leave the component out with ~components.rng"
            )
        torch.set_rng_state(states["cpu"].cpu())
        for name in own - {"cpu"}:
            self._module().set_rng_state(states[name].cpu(), int(name.rpartition(":")[2]))

    def _to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type == "cpu":
            return tensor.contiguous()
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    def _module(self) -> Any:
        try:
            return torch.get_device_module(self.type)
        except RuntimeError as error:
            raise DeviceUnavailableError(
                f"device.type={self.type}: torch {torch.__version__} knows no such device; choose device=cpu, or name "
                "the package that registers it in device.plugin"
            ) from error


def _import_plugin(type: str, plugin: str) -> ModuleType:
    """Import the package that registers a device type, telling a missing package from a missing runtime."""
    if find_spec(plugin) is None:
        extra = f"'{_distribution()}[{_EXTRAS[plugin]}]'" if plugin in _EXTRAS else plugin
        raise DeviceUnavailableError(
            f"device={type}: {plugin} is not installed: pip install {extra}, or choose device=cpu"
        )
    try:
        return import_module(plugin)
    except (ImportError, OSError, RuntimeError) as error:
        library = re.search(r"lib[\w.+-]*\.so[\w.]*", str(error))
        missing = f"{library[0]} cannot be loaded" if library else " ".join(str(error).split())
        runtime, remedy = _RUNTIMES.get(plugin, ("its runtime", "install what it loads"))
        raise DeviceUnavailableError(
            f"device={type}: {plugin} is installed without {runtime} ({missing}): {remedy}, or choose device=cpu"
        ) from error


def _why_absent(type: str) -> str:
    if type == "cuda" and torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is built without CUDA"
    return f"torch {torch.__version__} sees no {type} device on this machine"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


def _distribution() -> str:
    """The name under which this package was installed, for a line to copy."""
    from importlib.metadata import packages_distributions

    return next(iter(packages_distributions().get("ckpt", ())), ".")
