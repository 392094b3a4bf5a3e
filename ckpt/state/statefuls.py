"""The objects a training run saves, as components: a module, an optimizer by parameter name, the random generators.

Each gives out the memory it really uses, so a load fills it in place, and `load_state_dict` then has next to nothing to do.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from ckpt.errors import CheckpointError, ConfigurationError, CorruptCheckpointError, ShapeMismatchError, sentence
from ckpt.format.dtypes import torch_dtype
from ckpt.format.manifest import ArrayEntry
from ckpt.memory.device import Device, telling_of_room
from ckpt.state.abilities import tied_names
from ckpt.state.address import local_tensor
from ckpt.state.flatten import TensorLeaf
from ckpt.state.sharded_tensor import ShardedTensor
from ckpt.state.sharing import Stateful
from ckpt.state.wrappers import Unwrapping, saved_under

_OF_THIS_RUN = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")
"""Options of a parameter group that say how this machine computes, not what: a checkpoint holds no device."""


class ModelState:
    """A module's parameters and persistent buffers, by name.

    Wrappers have no part in names (`wrappers`): a checkpoint of a module that is compiled, or in DDP, loads into the bare one, and
    the other way round. One of an earlier version may have their parts in its names; it loads, too.

    Args:
        module: may declare `tied_names`, {alias: first name}, for weights that are tied across ranks.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self._saved_as: dict[str, str] = {}  # of a load that is under way

    @property
    def tied_names(self) -> dict[str, str]:
        tied = _tied_names(self.module)
        return {self._saved_as.get(a, a): self._saved_as.get(b, b) for a, b in tied.items()}

    def prepare_to_load(self, saved: Mapping[str, ArrayEntry]) -> None:
        """A module has its tensors already; it wants these and no others."""
        self._saved_as = {}
        self._saved_as = saved_under(lambda: self.state_dict().keys(), saved.keys())

    def forget_prepared(self) -> None:
        """Go by the module's own names again."""
        self._saved_as = {}

    def state_dict(self) -> dict[str, Any]:
        state = self.module.state_dict()
        names = self._names(state)
        return dict(state) if names is None else {names[key]: value for key, value in state.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what is not in the module's memory already: buffers kept elsewhere, `get_extra_state` values."""
        current = self.module.state_dict()
        given = {name: key for key, name in (self._names(current) or {}).items()}
        elsewhere = {
            given.get(name, name): value
            for name, value in state_dict.items()
            if not _same_memory(current.get(given.get(name, name)), value)
        }
        if elsewhere:
            self.module.load_state_dict(elsewhere, strict=False)
        self.forget_prepared()

    def _names(self, given: Collection[str]) -> dict[str, str] | None:
        """The module's names of its tensors -> ours; None: they are the same."""
        unwrapping = Unwrapping(self.module)
        if not unwrapping.is_needed and not self._saved_as:
            return None
        return {one: self._saved_as.get(name := unwrapping.name(one), name) for one in given}


class OptimizerState:
    """An optimizer's state under `state.<parameter name>.<field>` and `param_groups.<parameter name>.<option>`.

    Names outlive a change of parameter order, of groups, of pipeline stages; positions do not. State of a weight that is
    tied across ranks goes by the weight's first name, also on a rank that holds it under another only. Wrappers have no part in names.

    Args:
        module: where the names come from, and `tied_names`, {alias: first name}; None if the optimizer was made from
            `module.named_parameters()`.

    Raises:
        ConfigurationError: a parameter has no name.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, module: torch.nn.Module | None = None) -> None:
        self.optimizer = optimizer
        names = _names_of_parameters(module) if module is not None else {}
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
        self._prepared: list[tuple[torch.Tensor, str]] = []
        self._saved_as: dict[str, str] = {}  # of a load that is under way

    def prepare_to_load(self, saved: Mapping[str, ArrayEntry]) -> None:
        """Make the state tensors of parameters that have not been stepped yet, like the parameter where shapes agree."""
        stepped = {key.removeprefix("state.").rpartition(".")[0] for key in saved if key.startswith("state.")}
        self._saved_as = saved_under(lambda: set(self._names.values()), stepped)
        parameters = {name: (parameter, group) for parameter, name, group in self._parameters()}
        for key, entry in saved.items():
            name, _, state_field = key.removeprefix("state.").rpartition(".")
            if not key.startswith("state.") or name not in parameters:
                continue
            parameter, group = parameters[name]
            if state_field not in self.optimizer.state[parameter]:
                self.optimizer.state[parameter][state_field] = _state_tensor(parameter, group, entry)
                self._prepared.append((parameter, state_field))

    def forget_prepared(self) -> None:
        """Remove what was made for a load that did not come: it holds no values."""
        for parameter, state_field in self._prepared:
            self.optimizer.state[parameter].pop(state_field, None)
            if not self.optimizer.state[parameter]:
                del self.optimizer.state[parameter]
        self._prepared.clear()
        self._saved_as = {}

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
            CorruptCheckpointError: there are no states and options by parameter name in it.
        """
        with _refusing_state("the optimizer"):
            self._load(state_dict)

    def _load(self, state_dict: dict[str, Any]) -> None:
        saved = state_dict.get("param_groups", {})
        for group in self.optimizer.param_groups:
            members = [self._name_of(parameter) for parameter in group["params"]]
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
        self._prepared.clear()
        self._saved_as = {}

    def named_from_positions(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Turn a state dict that `torch.optim` wrote, by position, into one by name, for `load_state_dict`. Changes nothing.

        Where the groups hold names, those count. Where they do not, position n is taken for the n-th parameter here, and only
        if the groups have the same sizes and every state tensor has the shape of its parameter. Two parameters of one
        shape that have changed places cannot be told apart, so keep the order of the model that saved it.

        Raises:
            ShapeMismatchError: groups, names or shapes differ, so it is not clear whose state is whose.
        """
        mine = [[(self._names[p], p) for p in group["params"]] for group in self.optimizer.param_groups]
        sizes = [len(group["params"]) for group in saved["param_groups"]]
        if sizes != [len(group) for group in mine]:
            raise ShapeMismatchError(
                f"optimizer: the state was saved by position for groups of {sizes} parameters, this optimizer has groups of "
                f"{[len(group) for group in mine]}; make the groups of the run that saved it, or leave the optimizer out"
            )
        shapes = {name: tuple(parameter.shape) for group in mine for name, parameter in group}
        named: dict[str, Any] = {"state": {}, "param_groups": {}}
        for group, here in zip(saved["param_groups"], mine, strict=True):
            names = group.get("param_names") or [name for name, _ in here]
            known = {old: name for name, old in saved_under(lambda: self._names.values(), names).items()}
            names = [known.get(name, name) for name in names]
            for name, position in zip(names, group["params"], strict=True):
                options = {option: value for option, value in group.items() if option not in _OF_THIS_RUN}
                named["param_groups"][name] = options
                state = saved["state"].get(position, {})
                for state_field, value in state.items():
                    if isinstance(value, torch.Tensor) and value.dim() and tuple(value.shape) != shapes.get(name):
                        raise ShapeMismatchError(
                            f"optimizer: {state_field} at position {position} was saved with shape {list(value.shape)}, but {name} "
                            f"has {list(shapes.get(name, ()))} here; keep the order of the parameters, or leave the optimizer out"
                        )
                if state:
                    named["state"][name] = {f: _as_step(v) if f == "step" else v for f, v in state.items()}
        return named

    def _parameters(self) -> Iterator[tuple[torch.Tensor, str, dict[str, Any]]]:
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                yield parameter, self._name_of(parameter), group

    def _name_of(self, parameter: torch.Tensor) -> str:
        name = self._names[parameter]
        return self._saved_as.get(name, name)


class RNGState:
    """Every random generator a rank draws from: Python, NumPy, torch on the CPU and on each device of the rank.

    All of it is plain, opaque bytes. The coordinator restores it after everything else, so that no other component's
    loading can draw from it.

    Where a run goes on with other ranks, the saved states belong to nobody: under `elastic=derive` every rank then starts
    a generator that follows from the run's seed, its stream and the step.

    Args:
        seed: of the run; None: the states cannot be derived, only restored.
        stream: (number, count): which of the run's streams of random numbers this rank draws from. Ranks that must draw
            alike, such as those of one tensor-parallel group, have one stream.
        step: returns how many steps the run has made.
    """

    restored_last = True

    def __init__(
        self,
        device: Device,
        *,
        seed: int | None = None,
        stream: tuple[int, int] = (0, 1),
        step: Callable[[], int] = lambda: 0,
    ) -> None:
        self._device = device
        self._seed = seed
        self._stream = stream
        self._step = step

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            "python": random.getstate(),
            "numpy": np.random.get_state(legacy=False),
            "torch": {name: bytes(state.tolist()) for name, state in self._device.rng_state().items()},
        }
        if self._seed is not None:
            state |= {"seed": self._seed, "stream": list(self._stream), "step": self._step()}
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on with saved states, and with the seed of the run that saved them.

        Raises:
            CorruptCheckpointError: a generator does not take what is given as its state.
        """
        with _refusing_state("the random generators"):
            self._adopt_seed(state_dict)
            random.setstate(state_dict["python"])
            np.random.set_state(state_dict["numpy"])
            states = {name: torch.tensor(list(state), dtype=torch.uint8) for name, state in state_dict["torch"].items()}
            self._device.set_rng_state(states)

    def fits(self, saved: Mapping[str, Any]) -> bool:
        """Whether a saved state is of the stream that this rank draws from, and of the kinds of devices that this rank has."""
        with _refusing_state("the random generators"):
            same_stream = list(saved.get("stream", self._stream)) == list(self._stream)
            return same_stream and set(saved["torch"]) == set(self._device.rng_state())

    def load_changed(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Derive the state from the seed and the step of any saved one, and from this rank's stream.

        Raises:
            ConfigurationError: the states were saved without a seed.
        """
        if "seed" not in saved[0]:
            raise ConfigurationError(
                "the random generators were saved without the run's seed, so no state for other ranks follows from them; "
                "make RNGState(device, seed=..., stream=..., step=...), or load on the ranks that saved"
            )
        with _refusing_state("the random generators"):
            self._adopt_seed(saved[0])
            self.seed(saved[0]["seed"], saved[0]["step"])

    def _adopt_seed(self, saved: Mapping[str, Any]) -> None:
        if self._seed is not None:
            self._seed = saved.get("seed", self._seed)

    def seed(self, seed: int, step: int = 0) -> None:
        """Start all generators of this rank anew: equal for equal (seed, stream, step), unrelated for others."""
        own = int(np.random.SeedSequence([seed, *self._stream, step]).generate_state(1)[0])
        random.seed(own)
        np.random.seed(own)
        torch.manual_seed(own)


def _names_of_parameters(module: torch.nn.Module) -> dict[torch.Tensor, str]:
    """Every parameter's name, the first one of a weight that is tied across ranks."""
    tied, names = _tied_names(module), Unwrapping(module)
    return {parameter: tied.get(name := names.name(given), name) for given, parameter in module.named_parameters()}


def _tied_names(module: torch.nn.Module) -> dict[str, str]:
    names = Unwrapping(module)
    return {names.name(alias): names.name(first) for alias, first in tied_names(names.inner).items()}


def as_stateful(stateful: Any) -> Stateful:
    """Wrap a bare module or optimizer, so that its state is kept by name and filled in place."""
    if isinstance(stateful, torch.nn.Module):
        return ModelState(stateful)
    if isinstance(stateful, torch.optim.Optimizer):
        return OptimizerState(stateful)
    wrapped: Stateful = stateful
    return wrapped


@contextmanager
def _refusing_state(what: str) -> Iterator[None]:
    """Make a `CorruptCheckpointError` of a saved state that is none: what is applied here has been written by nobody else."""
    try:
        yield
    except CheckpointError:
        raise
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RuntimeError) as error:
        raise CorruptCheckpointError(f"{what} cannot have had the state that was saved: {sentence(error)}") from error


def _state_tensor(parameter: torch.Tensor, group: Mapping[str, Any], entry: ArrayEntry) -> torch.Tensor:
    """Memory for a tensor of an optimizer's state, where the optimizer would make it.

    Raises:
        DeviceMemoryError: the parameter's device has no room for it.
    """
    dtype = torch_dtype(entry.dtype)
    with telling_of_room(parameter.device, local_tensor(parameter).numel() * dtype.itemsize):
        if entry.shape == tuple(parameter.shape) and parameter.dim() > 0:
            return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        on_device = group.get("capturable") or group.get("fused")
        return torch.empty(entry.shape, dtype=dtype, device=parameter.device if on_device else "cpu")


def _as_step(value: Any) -> Any:
    """Torch counted steps in plain numbers once, and does in 0-dim tensors now."""
    return torch.tensor(float(value)) if isinstance(value, int | float) else value


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
