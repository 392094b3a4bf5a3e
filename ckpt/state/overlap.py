"""What only a step of an optimizer changes can be copied while training goes on: the step waits until it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ckpt.state.address import local_tensor
from ckpt.state.sharing import StateComponent


class Optimizers:
    """The optimizers among the state components, and what goes before their steps.

    Args:
        components: of a component's object, or of its attribute `optimizer`, what is an optimizer counts; of one that wraps another
            (Accelerate's does), the inner one.
    """

    def __init__(self, components: Iterable[StateComponent]) -> None:
        found = (optimizer_of(component.stateful) for component in components)
        self._optimizers = list({id(one): one for one in found if one is not None}.values())
        self._hooks: list[Any] = []

    def before_steps(self, wait: Callable[[], object]) -> None:
        """Have `wait` called before each step of each of them, in the thread that makes the step."""
        for optimizer in self._optimizers:
            self._hooks.append(optimizer.register_step_pre_hook(_calling(wait)))

    @torch.no_grad()
    def watch(self) -> Watched:
        """Look at what they hold now."""
        return Watched(self._optimizers)

    def close(self) -> None:
        """Let them step as if nobody watched."""
        while self._hooks:
            self._hooks.pop().remove()


class Watched:
    """The tensors that optimizers hold, parameters and state, and how often each had been written to when it was asked about.

    Torch counts the operations that write to a tensor, but not what goes through `.data`, NumPy or a pointer, nor steps of its fused
    optimizers, which only the wait before them keeps off.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._by_storage: dict[int, list[torch.Tensor]] = {}
        for tensor in (tensor for optimizer in optimizers for tensor in _tensors_of(optimizer)):
            local = local_tensor(tensor)
            if local.numel() and not tensor.is_inference():
                self._by_storage.setdefault(local.untyped_storage().data_ptr(), []).append(tensor)
        self._versions: dict[tuple[str, int], list[tuple[torch.Tensor, tuple[int, int]]]] = {}

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the memory of a tensor is a parameter's or a part of an optimizer's state."""
        return _storage(tensor) in self._by_storage

    def note(self, name: str, tensor: torch.Tensor) -> None:
        """Remember, under a name, how often a tensor that is held has been written to."""
        at = _storage(tensor)
        if (name, at) not in self._versions:
            self._versions[name, at] = [(one, _version(one)) for one in self._by_storage[at]]

    @torch.no_grad()
    def changed(self) -> list[str]:
        """The names of tensors that have been written to since."""
        return [name for (name, _), seen in self._versions.items() if any(_version(one) != then for one, then in seen)]


def _calling(wait: Callable[[], object]) -> Callable[..., None]:
    """A hook that changes no argument."""

    def hook(*_: Any) -> None:
        wait()

    return hook


def optimizer_of(stateful: Any) -> torch.optim.Optimizer | None:
    """The optimizer that an object of a component is or has, and whose steps can be waited for; None: there is none."""
    found: Any = stateful if isinstance(stateful, torch.optim.Optimizer) else getattr(stateful, "optimizer", None)
    while isinstance(getattr(found, "optimizer", None), torch.optim.Optimizer):
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
        for one in value.values():
            yield from _tensors_in(one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors_in(one)


def _storage(tensor: torch.Tensor) -> int:
    return local_tensor(tensor).untyped_storage().data_ptr()


def _version(tensor: torch.Tensor) -> tuple[int, int]:
    """Of the tensor, and of its local part: what writes to the one need not count for the other."""
    return tensor._version, local_tensor(tensor)._version
