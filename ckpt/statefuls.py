"""The objects a training run saves, as components: a module, an optimizer by parameter name, the random generators.

Each gives out the memory it really uses, so a load fills it in place, and `load_state_dict` then has next to nothing to do.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import torch

from ckpt.device import Device
from ckpt.dtypes import torch_dtype
from ckpt.errors import ConfigurationError
from ckpt.flatten import TensorLeaf
from ckpt.manifest import ArrayEntry
from ckpt.mapping import ShardedTensor, local_tensor
from ckpt.sharing import Stateful

_OF_THIS_RUN = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")
"""Options of a parameter group that say how this machine computes, not what: a checkpoint holds no device."""


class Prepared(Protocol):
    """A stateful that knows exactly which keys it wants. Others are given whatever was saved."""

    def prepare_to_load(self, saved: Mapping[str, ArrayEntry]) -> None:
        """Make the tensors that a load will fill. Called on every rank before `state_dict()`, with the saved keys."""


class ModelState:
    """A module's parameters and persistent buffers, by name. Give the module itself, not its DDP wrapper.

    Args:
        module: may declare `tied_names`, {alias: first name}, for weights that are tied across ranks.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module

    @property
    def tied_names(self) -> dict[str, str]:
        return dict(getattr(self.module, "tied_names", None) or {})

    def prepare_to_load(self, saved: Mapping[str, ArrayEntry]) -> None:
        """A module has its tensors already; it wants these and no others."""

    def state_dict(self) -> dict[str, Any]:
        return dict(self.module.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what is not in the module's memory already: buffers kept elsewhere, `get_extra_state` values."""
        current = self.module.state_dict()
        elsewhere = {key: value for key, value in state_dict.items() if not _same_memory(current.get(key), value)}
        if elsewhere:
            self.module.load_state_dict(elsewhere, strict=False)


class OptimizerState:
    """An optimizer's state under `state.<parameter name>.<field>` and `param_groups.<parameter name>.<option>`.

    Names outlive a change of parameter order, of groups, of pipeline stages; positions do not.

    Args:
        module: where the names come from; None if the optimizer was made from `module.named_parameters()`.

    Raises:
        ConfigurationError: a parameter has no name.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, module: torch.nn.Module | None = None) -> None:
        self.optimizer = optimizer
        names = {parameter: name for name, parameter in module.named_parameters()} if module is not None else {}
        self._names: dict[torch.Tensor, str] = {}
        for group in optimizer.param_groups:
            own_names = group.get("param_names") or [None] * len(group["params"])
            for parameter, own_name in zip(group["params"], own_names, strict=True):
                name = names.get(parameter, own_name)
                if name is None:
                    raise ConfigurationError(
                        f"the optimizer holds a parameter of shape {list(parameter.shape)} without a name; optimizer state is kept by "
                        "name, so give OptimizerState(optimizer, module) the module it belongs to, or make the optimizer "
                        "from module.named_parameters()"
                    )
                self._names[parameter] = name

    def prepare_to_load(self, saved: Mapping[str, ArrayEntry]) -> None:
        """Make the state tensors of parameters that have not been stepped yet, like the parameter where shapes agree."""
        parameters = {name: (parameter, group) for parameter, name, group in self._parameters()}
        for key, entry in saved.items():
            name, _, state_field = key.removeprefix("state.").rpartition(".")
            if not key.startswith("state.") or name not in parameters:
                continue
            parameter, group = parameters[name]
            if state_field not in self.optimizer.state[parameter]:
                self.optimizer.state[parameter][state_field] = _state_tensor(parameter, group, entry)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {}
        groups: dict[str, Any] = {}
        for parameter, name, group in self._parameters():
            if self.optimizer.state.get(parameter):
                state[name] = dict(self.optimizer.state[parameter])
            groups[name] = {option: value for option, value in group.items() if option not in _OF_THIS_RUN}
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over plain state and group options; tensors are in place already.

        Raises:
            ConfigurationError: parameters that share a group here had different options when they were saved.
        """
        saved = state_dict.get("param_groups", {})
        for group in self.optimizer.param_groups:
            members = [self._names[parameter] for parameter in group["params"]]
            options: dict[str, Any] = saved.get(members[0], {}) if members else {}
            for name in members[1:]:
                other = saved.get(name, options)
                if not _equal_options(options, other):
                    raise ConfigurationError(
                        f"optimizer: {members[0]} and {name} share a parameter group in this run, but were saved with different "
                        f"options, {options} and {other}; make the same groups as the run that saved them"
                    )
            group.update({option: value for option, value in options.items() if option not in _OF_THIS_RUN})
        for parameter, name, _ in self._parameters():
            for state_field, value in state_dict.get("state", {}).get(name, {}).items():
                current = self.optimizer.state[parameter].get(state_field)
                if not _same_memory(current, value):
                    self.optimizer.state[parameter][state_field] = value

    def _parameters(self) -> Iterator[tuple[torch.Tensor, str, dict[str, Any]]]:
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                yield parameter, self._names[parameter], group


class RNGState:
    """Every random generator a rank draws from: Python, NumPy, torch on the CPU and on each device of the rank.

    All of it is plain, opaque bytes. The coordinator restores it after everything else, so that no other component's
    loading can draw from it.
    """

    restored_last = True

    def __init__(self, device: Device) -> None:
        self._device = device

    def state_dict(self) -> dict[str, Any]:
        return {
            "python": random.getstate(),
            "numpy": np.random.get_state(legacy=False),
            "torch": {name: bytes(state.tolist()) for name, state in self._device.rng_state().items()},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        random.setstate(state_dict["python"])
        np.random.set_state(state_dict["numpy"])
        states = {name: torch.tensor(list(state), dtype=torch.uint8) for name, state in state_dict["torch"].items()}
        self._device.set_rng_state(states)


def as_stateful(stateful: Any) -> Stateful:
    """Wrap a bare module or optimizer, so that its state is kept by name and filled in place."""
    if isinstance(stateful, torch.nn.Module):
        return ModelState(stateful)
    if isinstance(stateful, torch.optim.Optimizer):
        return OptimizerState(stateful)
    wrapped: Stateful = stateful
    return wrapped


def _state_tensor(parameter: torch.Tensor, group: Mapping[str, Any], entry: ArrayEntry) -> torch.Tensor:
    dtype = torch_dtype(entry.dtype)
    if entry.shape == tuple(parameter.shape) and parameter.dim() > 0:
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    on_device = group.get("capturable") or group.get("fused")
    return torch.empty(entry.shape, dtype=dtype, device=parameter.device if on_device else "cpu")


def _same_memory(current: Any, loaded: Any) -> bool:
    if not isinstance(current, torch.Tensor) or not isinstance(loaded, torch.Tensor):
        return False
    mine, theirs = local_tensor(current), local_tensor(loaded)
    return (mine.data_ptr(), mine.shape, mine.stride(), mine.dtype) == (
        theirs.data_ptr(),
        theirs.shape,
        theirs.stride(),
        theirs.dtype,
    )


def _equal_options(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    def comparable(value: Any) -> Any:
        return value.tolist() if isinstance(value, TensorLeaf) and not isinstance(value, ShardedTensor) else value

    return {k: comparable(v) for k, v in a.items()} == {k: comparable(v) for k, v in b.items()}
