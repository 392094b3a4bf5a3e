"""Copies of tensors during training: an optimizer's step waits until its tensors are copied, and writes to them are detected."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from ckpt.format.dtypes import is_dtensor
from ckpt.state.abilities import HasOptimizer, offers
from ckpt.state.address import local_tensor
from ckpt.state.sharing import StateComponent


class Optimizers:
    """Optimizers of the state components, with hooks before their steps. See `optimizer_of`."""

    def __init__(self, components: Iterable[StateComponent]) -> None:
        found = (optimizer_of(component.stateful) for component in components)
        self._optimizers = list({id(optimizer): optimizer for optimizer in found if optimizer is not None}.values())
        self._hooks: list[Any] = []

    def before_steps(self, wait: Callable[[], object]) -> None:
        """Call `wait` before each optimizer step, in the thread that makes the step."""
        for optimizer in self._optimizers:
            self._hooks.append(optimizer.register_step_pre_hook(_calling(wait)))

    @torch.no_grad()
    def foreseen_bytes(self, world_size: int) -> int:
        """Estimate this rank's part of a save: parameters of the optimizers, and their states, or those that a first step will make."""
        found = 0.0
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    num_bytes, states = _bytes_of(parameter), list(_tensors_in(optimizer.state.get(parameter, {})))
                    state_bytes = sum(map(_bytes_of, states)) if states else _num_states(group) * num_bytes
                    found += (num_bytes + state_bytes) / _num_copies(parameter, world_size)
        return int(found)

    @torch.no_grad()
    def watch(self) -> Watched:
        """Record the tensors that the optimizers hold now."""
        return Watched(self._optimizers)

    def close(self) -> None:
        """Remove the hooks."""
        while self._hooks:
            self._hooks.pop().remove()


class Watched:
    """Parameters and state tensors of optimizers, with torch's count of writes to each.

    The count misses writes through `.data`, NumPy or a pointer, and steps of fused optimizers, which the hooks before steps cover.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._by_storage: dict[int, list[torch.Tensor]] = {}
        for tensor in (tensor for optimizer in optimizers for tensor in _tensors_of(optimizer)):
            local = local_tensor(tensor)
            if local.numel() and not tensor.is_inference():
                self._by_storage.setdefault(local.untyped_storage().data_ptr(), []).append(tensor)
        self._versions: dict[tuple[str, int], list[tuple[torch.Tensor, tuple[int, int]]]] = {}

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor shares memory with a parameter or an optimizer state."""
        return _storage(tensor) in self._by_storage

    def note(self, name: str, tensor: torch.Tensor) -> None:
        """Record the write counts of a held tensor under a name."""
        at = _storage(tensor)
        if (name, at) not in self._versions:
            self._versions[name, at] = [(tensor, _version(tensor)) for tensor in self._by_storage[at]]

    @torch.no_grad()
    def changed(self) -> list[str]:
        """Return the names of tensors that have been written to since `note`."""
        return [name for (name, _), seen in self._versions.items() if any(_version(tensor) != then for tensor, then in seen)]


def _bytes_of(tensor: torch.Tensor) -> int:
    """The bytes of this rank's part; 0 of a tensor without memory yet, or one that is not strided."""
    return local_tensor(tensor).nbytes if tensor.layout is torch.strided and not is_lazy(tensor) else 0


def _num_states(group: Mapping[str, Any]) -> int:
    """The tensors of a parameter's size that an optimizer with these options will make: Adam's two moments, or a momentum."""
    return 2 if "betas" in group else 1 if group.get("momentum") else 0


def _num_copies(parameter: Any, world_size: int) -> int:
    """The ranks that hold equal copies of a parameter's local part; of an ordinary tensor all are supposed to."""
    if not is_dtensor(parameter):
        return world_size
    return math.prod(parameter.device_mesh.size(dim) for dim, placement in enumerate(parameter.placements) if placement.is_replicate())


def _calling(wait: Callable[[], object]) -> Callable[..., None]:
    """Make a hook that ignores its arguments and changes none."""

    def hook(*_: Any) -> None:
        wait()

    return hook


def optimizer_of(stateful: Any) -> torch.optim.Optimizer | None:
    """Return the optimizer that a component's object is, or has as `optimizer`, if its steps take hooks; else None.

    Of an optimizer around another (Accelerate's), the inner one.
    """
    found = stateful
    if offers(stateful, HasOptimizer) and not isinstance(stateful, torch.optim.Optimizer):
        found = stateful.optimizer
    while offers(found, HasOptimizer) and isinstance(found.optimizer, torch.optim.Optimizer):
        found = found.optimizer
    takes_hooks = isinstance(found, torch.optim.Optimizer) and hasattr(found, "_optimizer_step_pre_hooks")
    return found if takes_hooks else None


def _tensors_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
    yield from _tensors_in(list(optimizer.state.values()))


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _tensors_in(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _tensors_in(inner)


def _storage(tensor: torch.Tensor) -> int:
    return local_tensor(tensor).untyped_storage().data_ptr()


def _version(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the write counts of a tensor and of its local part, which torch counts separately."""
    return tensor._version, local_tensor(tensor)._version
