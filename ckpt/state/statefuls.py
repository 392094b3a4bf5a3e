"""Components for the usual objects of a training run: a module, an optimizer by parameter name, the random generators.

Their `state_dict` returns the tensors in use, so a load fills these in place, and `load_state_dict` only sets the rest.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from glob import escape
from typing import Any

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from ckpt.errors import CheckpointError, ConfigurationError, CorruptCheckpointError, ShapeMismatchError, sentence
from ckpt.format.dtypes import torch_dtype
from ckpt.format.manifest import ArrayEntry
from ckpt.memory.device import Device, telling_of_room
from ckpt.state.abilities import tied_names
from ckpt.state.address import local_tensor
from ckpt.state.sharing import Stateful
from ckpt.state.wrappers import Unwrapping, saved_under

_MACHINE_OPTIONS = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")
"""Options of a parameter group that depend on this run's machine. Not saved."""
_DEFAULT_MACHINE_OPTIONS = {"foreach": None, "fused": None, "capturable": False, "differentiable": False}


@contextmanager
def _refusing_state(what: str) -> Iterator[None]:
    """Turn errors of applying a saved state into a `CorruptCheckpointError`: this module wrote it, so it must be damaged."""
    try:
        yield
    except CheckpointError:
        raise
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RuntimeError) as error:
        raise CorruptCheckpointError(f"{what} cannot load the saved state: {sentence(error)}") from error


class ModelState:
    """A module's parameters and persistent buffers, by name.

    Names are free of wrappers (`wrappers`): a checkpoint of a compiled module or of one in DDP loads into the bare module, and
    vice versa. Checkpoints of earlier versions, whose names may contain parts of wrappers, load too.

    Args:
        module: may declare `tied_names`, {alias: first name}, for weights that are tied across ranks.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self._saved_as: dict[str, str] = {}  # name -> saved name, during a load

    @property
    def tied_names(self) -> dict[str, str]:
        tied = _tied_names(self.module)
        return {self._saved_as.get(a, a): self._saved_as.get(b, b) for a, b in tied.items()}

    @property
    def rank_private(self) -> list[str]:
        """Names of the buffers that DDP gives to all ranks from rank 0, at each forward pass: copies of these differ until then."""
        names = Unwrapping(self.module)
        ddp = next((one for one in names.wrappers if isinstance(one, DistributedDataParallel)), None)
        if ddp is None or not ddp.broadcast_buffers:
            return []
        return [escape(names.name(given)) for given, _ in self.module.named_buffers()]

    def prepare_to_load(self, saved: Mapping[str, ArrayEntry]) -> None:
        """Match names that an earlier version saved. The module's tensors exist already."""
        self._saved_as = {}
        self._saved_as = saved_under(lambda: self.state_dict().keys(), saved.keys())

    def forget_prepared(self) -> None:
        """Return to the module's own names."""
        self._saved_as = {}

    def state_dict(self) -> dict[str, Any]:
        state = self.module.state_dict()
        names = self._names(state)
        return dict(state) if names is None else {names[key]: value for key, value in state.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the values that were not loaded in place: buffers kept elsewhere, `get_extra_state` values."""
        current = self.module.state_dict()
        given = {name: key for key, name in (self._names(current) or {}).items()}
        named = {given.get(name, name): value for name, value in state_dict.items()}
        elsewhere = {name: value for name, value in named.items() if not _same_memory(current.get(name), value)}
        if elsewhere:
            self.module.load_state_dict(elsewhere, strict=False)
        self.forget_prepared()

    def _names(self, given: Collection[str]) -> dict[str, str] | None:
        """Return names of the module -> names in the checkpoint; None if all are equal."""
        unwrapping = Unwrapping(self.module)
        if not unwrapping.is_needed and not self._saved_as:
            return None
        return {one: self._saved_as.get(name := unwrapping.name(one), name) for one in given}


class OptimizerState:
    """An optimizer's state under `state.<parameter name>.<field>` and `param_groups.<parameter name>.<option>`.

    Names stay valid when the order of parameters, the groups or the pipeline stages change; positions do not. State of a weight
    that is tied across ranks is saved under the weight's first name on every rank. Names are free of wrappers.

    Args:
        module: source of the names and of `tied_names`, {alias: first name}; None if the optimizer was made from
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
        self._saved_as: dict[str, str] = {}  # name -> saved name, during a load

    def prepare_to_load(self, saved: Mapping[str, ArrayEntry]) -> None:
        """Make the state tensors of parameters without state. Where shapes agree, they are laid out like the parameter."""
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
        """Remove the state tensors made by `prepare_to_load`, which hold no values."""
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
            groups[name] = {option: value for option, value in group.items() if option not in _MACHINE_OPTIONS}
        return {"state": state, "param_groups": groups}

    @_refusing_state("the optimizer")
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set plain state and group options; tensors are loaded in place already.

        Raises:
            ConfigurationError: parameters that share a group in this run had different options when they were saved.
            CorruptCheckpointError: invalid states or options.
        """
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
            group.update({option: value for option, value in options.items() if option not in _MACHINE_OPTIONS})
        for parameter, name, _ in self._parameters():
            for state_field, value in state_dict.get("state", {}).get(name, {}).items():
                current = self.optimizer.state[parameter].get(state_field)
                if not _same_memory(current, value):
                    self.optimizer.state[parameter][state_field] = value
        self._prepared.clear()
        self._saved_as = {}

    def named_from_positions(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Convert a state dict of `torch.optim`, by position, to one by name, for `load_state_dict`. Changes nothing.

        One that is by name already, as `torch.distributed.checkpoint` saves it, loses the options of the machine.

        Names in the groups are used if there are any. Otherwise position n stands for the n-th parameter here, provided that the
        groups have the same sizes and every state tensor has the shape of its parameter. Swapped parameters of one shape are not
        detected: keep the order of the model that saved the state.

        Raises:
            ShapeMismatchError: group sizes or shapes differ, so the parameters cannot be identified.
        """
        if (by_name := optimizer_by_name(saved)) is not None:
            return by_name
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
                options = {option: value for option, value in group.items() if option not in _MACHINE_OPTIONS}
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
    """All random generators of a rank: Python, NumPy, torch on the CPU and on each device of the rank.

    The states are plain bytes. The coordinator restores them after all other components, whose loads may draw numbers.

    A saved state fits only the rank that saved it. If a run continues on other ranks under `elastic=derive`, every rank seeds its
    generators from the run's seed, its stream and the step.

    Args:
        seed: of the run; None: the states can be restored but not derived.
        stream: (number, count): this rank's stream of random numbers, of all streams of the run. Ranks that must draw equal
            numbers, such as those of one tensor-parallel group, share a stream.
        step: returns the number of steps that the run has made.
    """

    restored_last = True
    sharing_pattern = "per_rank"

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

    @_refusing_state("the random generators")
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore saved states, and the seed of the run that saved them.

        Raises:
            CorruptCheckpointError: a generator refuses its state.
        """
        self._adopt_seed(state_dict)
        random.setstate(state_dict["python"])
        np.random.set_state(state_dict["numpy"])
        states = {name: torch.tensor(list(state), dtype=torch.uint8) for name, state in state_dict["torch"].items()}
        self._device.set_rng_state(states)

    @_refusing_state("the random generators")
    def fits(self, saved: Mapping[str, Any]) -> bool:
        """Whether a saved state has the stream and the kinds of devices of this rank."""
        same_stream = list(saved.get("stream", self._stream)) == list(self._stream)
        return same_stream and set(saved["torch"]) == set(self._device.rng_state())

    @_refusing_state("the random generators")
    def load_changed(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Derive the state from the seed and step of a saved one, and this rank's stream.

        Raises:
            ConfigurationError: the states were saved without a seed.
        """
        if "seed" not in saved[0]:
            raise ConfigurationError(
                "the random generators were saved without the run's seed, so no state for other ranks follows from them; "
                "make RNGState(device, seed=..., stream=..., step=...), or load on the ranks that saved"
            )
        self._adopt_seed(saved[0])
        self.seed(saved[0]["seed"], saved[0]["step"])

    def _adopt_seed(self, saved: Mapping[str, Any]) -> None:
        if self._seed is not None:
            self._seed = saved.get("seed", self._seed)

    def seed(self, seed: int, step: int = 0) -> None:
        """Seed all generators of this rank: equal for equal (seed, stream, step), unrelated otherwise."""
        own = int(np.random.SeedSequence([seed, *self._stream, step]).generate_state(1)[0])
        random.seed(own)
        np.random.seed(own)
        torch.manual_seed(own)


class Given:
    """A nested state dict as the object of a component. A load takes whatever was saved.

    Attributes:
        loaded: what a load has given it.
    """

    def __init__(self, state: Mapping[str, Any] | None = None) -> None:
        self._state = dict(state or {})
        self.loaded: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loaded = state_dict


class Filled(Given):
    """A nested state dict whose tensors a load fills in place. Its keys must match the saved ones."""

    def prepare_to_load(self, saved: Mapping[str, ArrayEntry]) -> None:
        """Do nothing: the tensors exist already."""


def _names_of_parameters(module: torch.nn.Module) -> dict[torch.Tensor, str]:
    """Return the name of every parameter; for a weight that is tied across ranks, its first name."""
    tied, names = _tied_names(module), Unwrapping(module)
    return {parameter: tied.get(name := names.name(given), name) for given, parameter in module.named_parameters()}


def _tied_names(module: torch.nn.Module) -> dict[str, str]:
    names = Unwrapping(module)
    return {names.name(alias): names.name(first) for alias, first in tied_names(names.inner).items()}


def as_stateful(stateful: Any) -> Stateful:
    """Wrap a bare module or optimizer, to save its state by name and load it in place."""
    if isinstance(stateful, torch.nn.Module):
        return ModelState(stateful)
    if isinstance(stateful, torch.optim.Optimizer):
        return OptimizerState(stateful)
    wrapped: Stateful = stateful
    return wrapped


def _state_tensor(parameter: torch.Tensor, group: Mapping[str, Any], entry: ArrayEntry) -> torch.Tensor:
    """Allocate a tensor of an optimizer's state, on the device that the optimizer would use.

    Raises:
        DeviceMemoryError: the parameter's device is out of memory.
    """
    dtype = torch_dtype(entry.dtype)
    with telling_of_room(parameter.device, local_tensor(parameter).numel() * dtype.itemsize):
        if entry.shape == tuple(parameter.shape) and parameter.dim() > 0:
            return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        on_device = group.get("capturable") or group.get("fused")
        return torch.empty(entry.shape, dtype=dtype, device=parameter.device if on_device else "cpu")


def optimizer_by_name(saved: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return an optimizer's state by name, in the form of `OptimizerState`, if it was saved by name; None: it is by position.

    DCP's `get_optimizer_state_dict` lists the names of each group, or joins all keys: "state.<name>.<field>".
    """
    groups = saved.get("param_groups")
    if groups is None:
        named: dict[str, dict[str, Any]] = {"state": {}, "param_groups": {}}
        for key, value in saved.items():
            kind, _, rest = key.partition(".")
            name, _, option = rest.rpartition(".")
            named.setdefault(kind, {}).setdefault(name, {})[option] = value
    else:
        if isinstance(groups, list):
            if not all(isinstance(name, str) for group in groups for name in group["params"]):
                return None
            groups = {name: group for group in groups for name in group["params"]}
        named = {"state": dict(saved.get("state", {})), "param_groups": groups}
    named["param_groups"] = {
        name: {option: value for option, value in options.items() if option not in _MACHINE_OPTIONS}
        for name, options in named["param_groups"].items()
    }
    return named


def optimizer_in_groups(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return a saved state of `OptimizerState` in the form of DCP's `get_optimizer_state_dict`, which lists the names of each group.

    Parameters with equal options are a group. Options of the machine, which programs of DCP ask for, are torch's defaults.

    Args:
        saved: nested, or with tensors under their joined keys "state.<name>.<field>".
    """
    groups: list[tuple[dict[str, Any], list[str]]] = []
    for name, options in saved["param_groups"].items():
        members = next((names for other, names in groups if _equal_options(other, options)), None)
        if members is None:
            groups.append((options, [name]))
        else:
            members.append(name)
    state = {name: dict(fields) for name, fields in saved.get("state", {}).items()}
    for key, value in saved.items():
        if key.startswith("state."):
            name, _, state_field = key.removeprefix("state.").rpartition(".")
            state.setdefault(name, {})[state_field] = value
    listed = [{**_DEFAULT_MACHINE_OPTIONS, **options, "params": names} for options, names in groups]
    return {"state": state, "param_groups": listed}


def _as_step(value: Any) -> Any:
    """Convert a step count of old torch versions, a plain number, to a 0-dim tensor."""
    return torch.tensor(float(value)) if isinstance(value, int | float) else value


def _same_memory(current: Any, loaded: Any) -> bool:
    mine, theirs = current, loaded
    if not type(mine) is type(theirs) is torch.Tensor:
        if not isinstance(mine, torch.Tensor) or not isinstance(theirs, torch.Tensor):
            return False
        mine, theirs = local_tensor(mine), local_tensor(theirs)
    return (
        mine.data_ptr() == theirs.data_ptr()
        and mine.dtype == theirs.dtype
        and mine.shape == theirs.shape
        and mine.stride() == theirs.stride()
    )


def _equal_options(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    def comparable(value: Any) -> Any:
        return value.tolist() if isinstance(value, torch.Tensor) else value

    return {k: comparable(v) for k, v in a.items()} == {k: comparable(v) for k, v in b.items()}
