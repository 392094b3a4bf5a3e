"""Components for the usual objects of a training run: a module, an optimizer by parameter name, the random generators.

Their `state_dict` returns the tensors in use, so a load fills these in place, and `load_state_dict` only sets the rest.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from glob import escape
from typing import Any

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from ckpt.errors import (
    CheckpointError,
    ConfigurationError,
    CorruptCheckpointError,
    MissingStateError,
    ShapeMismatchError,
    sentence,
)
from ckpt.format.dtypes import torch_dtype
from ckpt.format.manifest import ArrayEntry
from ckpt.memory.device import Device, telling_of_room
from ckpt.state.abilities import tied_names
from ckpt.state.address import local_tensor, place_of
from ckpt.state.flatten import Path, flatten, unflatten
from ckpt.state.sharing import Stateful
from ckpt.state.wrappers import Unwrapping, saved_under

_MACHINE_OPTIONS = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")
"""Options of a parameter group that depend on this run's machine. Not saved."""
_STATE, _GROUPS, _OTHERS = "state", "param_groups", "other_state"
_NAMED = frozenset((_STATE, _GROUPS))
_LOAD_HOOKS = ("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks")
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
        self._prepared: dict[str, Any] | None = None  # what a load fills, if the module itself makes its entries of those

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

    def prepare_from(
        self, saved: Mapping[str, ArrayEntry], plain: Mapping[str, Any], paths: Mapping[str, Path]
    ) -> None:
        """Match names that an earlier version saved. The module's tensors exist already.

        A module whose own code takes part in a load, such as a hook that renames old entries, is given the entries that were saved if
        these are others than its own.
        """
        self.forget_prepared()
        self._saved_as = saved_under(lambda: self.state_dict().keys(), saved.keys())
        if not loads_by_own_code(self.module):
            return
        own = {key: value for key, value in self.state_dict().items() if isinstance(value, torch.Tensor)}
        if own.keys() != saved.keys():
            self._prepared = {}
            for key, entry in saved.items():
                fits = key in own and place_of(own[key], key)[:2] == (entry.dtype, entry.shape)
                self._prepared[key] = own[key] if fits else _new_tensor(entry)

    def forget_prepared(self) -> None:
        """Return to the module's own names and entries."""
        self._saved_as = {}
        self._prepared = None

    def is_named(self, key: str, path: Path) -> bool:
        """Whether a tensor is an entry of the state dict itself."""
        return path == (key,)

    def state_dict(self) -> dict[str, Any]:
        if self._prepared is not None:
            return self._prepared
        state = self.module.state_dict()
        names = self._names(state)
        return dict(state) if names is None else {names[key]: value for key, value in state.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the values that were not loaded in place: buffers kept elsewhere, `get_extra_state` values.

        A module whose own code takes part in a load is given all of them.
        """
        current = self.module.state_dict()
        given = {name: key for key, name in (self._names(current) or {}).items()}
        named = {given.get(name, name): value for name, value in state_dict.items()}
        if self._prepared is not None:
            try:
                self.module.load_state_dict(named)
            except RuntimeError as error:
                raise MissingStateError(f"the module does not take what was saved: {sentence(error)}") from error
        elif loads_by_own_code(self.module, beside_torch=True):
            self.module.load_state_dict(named, strict=False)
        elif elsewhere := {name: value for name, value in named.items() if not _same_memory(current.get(name), value)}:
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

    The optimizer's own `state_dict` and `load_state_dict` decide what there is. State under keys that are no parameters is kept as
    `other_state`, and all that a class or a hook adds under its own key. A state dict that is not of torch.optim's form is kept as it is.

    Args:
        module: source of the names and of `tied_names`, {alias: first name}; or several by key: one that holds all parameters gives the
            names, or else each those of its own, behind its key. None if the optimizer was made from `module.named_parameters()`.

    Raises:
        ConfigurationError: a parameter has no name.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, module: torch.nn.Module | Mapping[str, torch.nn.Module] | None = None
    ) -> None:
        self.optimizer = optimizer
        self._modules = module if isinstance(module, Mapping) else {} if module is None else {"": module}
        self._names: dict[torch.Tensor, str] = {}
        self._saved_as: dict[str, str] = {}  # name -> saved name, during a load
        self._prepared: dict[str, Any] | None = None  # what a load fills, in the form of `state_dict`
        self._known: Collection[str] = ()  # names in the newest `state_dict`
        self._find_names()

    def prepare_from(
        self, saved: Mapping[str, ArrayEntry], plain: Mapping[str, Any], paths: Mapping[str, Path]
    ) -> None:
        """Make the state for a load to fill: that of the checkpoint. Tensors of the optimizer are used where they fit; it is not changed.

        Raises:
            ConfigurationError: parameters that share a group in this run had different options when they were saved.
        """
        self.forget_prepared()
        options = _below(unflatten({key: value for key, value in plain.items() if paths[key][:1] == (_GROUPS,)}, paths), _GROUPS)
        bare = {key.removeprefix("state.").rpartition(".")[0] for key in saved if key.startswith("state.")}
        self._find_names()
        self._saved_as = saved_under(lambda: set(self._names.values()), {*bare, *options})
        self._require_equal(options)
        own = flatten(self.state_dict(), "the optimizer")
        here = {name: (parameter, group) for parameter, name, group in self._parameters()}
        places = {key: paths.get(key) or _place_of(key, here) for key in saved}
        known = {*options, *(place[1] for place in places.values() if place[0] in _NAMED and len(place) > 2)}
        wanted: dict[str, Any] = {}
        for key, entry in saved.items():
            place = places[key]
            if place[0] in _NAMED and len(place) > 2 and place[1] not in here:
                continue  # of another rank, or of no parameter here
            wanted[key] = own.tensors.get(key)
            dtype, shape = ("", entry.shape) if wanted[key] is None else place_of(wanted[key], key)[:2]
            if dtype != entry.dtype and shape == entry.shape:  # another shape is one that does not fit
                beside = here.get(str(place[1])) if place[0] == _STATE else None
                wanted[key] = _new_tensor(entry) if beside is None else _state_tensor(*beside, place[-1], entry)
        for key, path in own.paths.items():
            if len(path) > 1 and path[0] in _NAMED and path[1] not in known:
                places[key] = path
                wanted[key] = own.tensors.get(key, own.plain.get(key))
        self._prepared = unflatten(wanted, places)

    def forget_prepared(self) -> None:
        """Drop what `prepare_from` made."""
        self._prepared = None
        self._saved_as = {}

    def is_named(self, key: str, path: Path) -> bool:
        """Whether the place of a tensor follows from its joined key and the names of parameters."""
        return path == _place_of(key, self._known)

    def state_dict(self) -> dict[str, Any]:
        if self._prepared is not None:
            return self._prepared
        given = self.optimizer.state_dict()
        positions = self._positions_in(given)
        if positions is None:
            self._known = ()
            return given
        state: dict[str, Any] = {}
        others: dict[Any, Any] = {}
        groups: dict[str, Any] = {}
        for group in given[_GROUPS]:
            options = {option: value for option, value in group.items() if option not in _MACHINE_OPTIONS}
            groups |= {positions[position]: dict(options) for position in group["params"]}
        for key, fields in given[_STATE].items():
            if key not in positions:
                others[key] = fields
            elif fields:
                state[positions[key]] = dict(fields) if isinstance(fields, dict) else fields
        self._known = groups
        added = {key: value for key, value in given.items() if key not in _NAMED}
        if _OTHERS in added:
            raise ConfigurationError(f"the optimizer's state dict has an entry {_OTHERS}, which is taken: give it another name")
        return {_STATE: state, _GROUPS: groups, **added, **({_OTHERS: others} if others else {})}

    @_refusing_state("the optimizer")
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Give the optimizer a state that was saved: what that lacks of a parameter that it knows is removed.

        Raises:
            CorruptCheckpointError: invalid states or options.
        """
        optimizer = self.optimizer
        given = optimizer.state_dict()
        positions = self._positions_in(given)
        if positions is None or _NAMED.isdisjoint(state_dict):
            optimizer.load_state_dict(state_dict)
            self.forget_prepared()
            return
        saved_groups, saved_state = state_dict.get(_GROUPS, {}), state_dict.get(_STATE, {})
        self._require_equal(saved_groups)
        known = {*saved_groups, *saved_state}
        state = {
            position: saved_state.get(name, {}) if name in known else given[_STATE].get(position, {})
            for position, name in positions.items()
        }
        groups = []
        for group, old in zip(optimizer.param_groups, given[_GROUPS], strict=True):
            members = [saved_groups[name] for name in map(self._name_of, group["params"]) if name in saved_groups]
            options = members[0] if members else old
            kept = {option: value for option, value in old.items() if option in _MACHINE_OPTIONS}
            groups.append({option: value for option, value in options.items() if option not in _MACHINE_OPTIONS} | kept)
        added = {key: value for key, value in state_dict.items() if key not in (*_NAMED, _OTHERS)}
        state = {position: fields for position, fields in state.items() if fields} | state_dict.get(_OTHERS, {})
        if _loads_as_torch(optimizer) and not added:
            self._set(state, groups)
        else:
            optimizer.load_state_dict({_STATE: state, _GROUPS: groups, **added})
        self.forget_prepared()

    def _set(self, state: Mapping[Any, Any], groups: Sequence[dict[str, Any]]) -> None:
        """Do what torch's `load_state_dict` does, but for its conversions to the parameter's data type, which lose bits."""
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        found: defaultdict[Any, Any] = defaultdict(dict)
        for key, fields in state.items():
            found[parameters[key] if type(key) is int else key] = fields
        for group, options in zip(self.optimizer.param_groups, groups, strict=True):
            members = group["params"]
            group.clear()
            group.update(options | {"params": members})
        self.optimizer.__setstate__({"state": found, "param_groups": self.optimizer.param_groups})

    def _positions_in(self, given: Any) -> dict[int, str] | None:
        """Return position -> name of the parameters in an optimizer's own state dict; None: it is not of torch.optim's form."""
        self._find_names()
        groups = given.get(_GROUPS) if isinstance(given, Mapping) and isinstance(given.get(_STATE), Mapping) else None
        own = self.optimizer.param_groups
        if not isinstance(groups, list) or len(groups) != len(own):
            return None
        found: dict[int, str] = {}
        for group, here in zip(groups, own, strict=True):
            if len(group.get("params", ())) != len(here["params"]):
                return None
            found.update(zip(group["params"], map(self._name_of, here["params"]), strict=True))
        return found if all(type(position) is int for position in found) else None

    def _find_names(self) -> None:
        """Name parameters that have no name yet: of groups that were added since.

        Raises:
            ConfigurationError: one has none.
        """
        groups = self.optimizer.param_groups
        if all(parameter in self._names for group in groups for parameter in group["params"]):
            return
        names = _names_in(self._modules, [parameter for group in groups for parameter in group["params"]])
        for group in groups:
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

    def _require_equal(self, saved: Mapping[str, Any]) -> None:
        """Require that the parameters of each group were saved with equal options."""
        for group in self.optimizer.param_groups:
            members = [name for name in map(self._name_of, group["params"]) if name in saved]
            for name in members[1:]:
                if not _equal_options(saved[members[0]], saved[name]):
                    raise ConfigurationError(
                        f"optimizer: {members[0]} and {name} share a parameter group in this run, but were saved with different "
                        f"options, {saved[members[0]]} and {saved[name]}; make the same groups as the run that saved them"
                    )

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
        states = {name: torch.tensor(list(state), dtype=torch.uint8, device="cpu") for name, state in state_dict["torch"].items()}
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


def loads_by_own_code(module: torch.nn.Module, *, beside_torch: bool = False) -> bool:
    """Whether code of a module's classes, or hooks, take part in its `load_state_dict`.

    Args:
        beside_torch: other code than torch's own, whose hooks prepare modules of FSDP and whose classes fill in what old files lack.
    """
    for one in module.modules():
        hooks = (*one._load_state_dict_pre_hooks.values(), *one._load_state_dict_post_hooks.values())
        found = [getattr(hook, "hook", hook) for hook in hooks]
        kind = type(one)
        for name in ("load_state_dict", "_load_from_state_dict"):
            if (own := getattr(kind, name)) is not getattr(torch.nn.Module, name):
                found.append(own)
        if any(not (beside_torch and str(getattr(code, "__module__", "")).startswith("torch.")) for code in found):
            return True
    return False


def _names_in(modules: Mapping[str, torch.nn.Module], parameters: Sequence[torch.Tensor]) -> dict[torch.Tensor, str]:
    """Return the names of parameters, of the module that holds them all, or behind the keys of several modules."""
    named = {key: _names_of_parameters(module) for key, module in modules.items()}
    for names in named.values():
        if all(parameter in names for parameter in parameters):
            return names
    joined: dict[torch.Tensor, str] = {}
    for key, names in named.items():
        for parameter, name in names.items():
            joined.setdefault(parameter, f"{key}.{name}" if key else name)
    return joined


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


def _below(nested: Mapping[str, Any], key: str) -> dict[str, Any]:
    found = nested.get(key, {})
    return found if isinstance(found, dict) else {}


def _place_of(key: str, names: Collection[str]) -> Path:
    """Return the path of a tensor from its joined key: the parameter is the longest known name, and what follows is a path in its state."""
    kind, _, rest = key.partition(".")
    if kind not in _NAMED or not rest:
        return (key,)
    name, _, fields = rest.rpartition(".")
    longest = name
    while longest and longest not in names:
        longest = longest.rpartition(".")[0]
    return (kind, longest, *rest[len(longest) + 1 :].split(".")) if longest else (kind, name, fields)


def _loads_as_torch(optimizer: torch.optim.Optimizer) -> bool:
    """Whether nothing but torch's own code runs in an optimizer's `load_state_dict`."""
    is_own = type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict
    return is_own and "load_state_dict" not in vars(optimizer) and not any(vars(optimizer).get(one) for one in _LOAD_HOOKS)


def _new_tensor(entry: ArrayEntry) -> torch.Tensor:
    return torch.empty(entry.shape, dtype=torch_dtype(entry.dtype), device="cpu")


def _state_tensor(parameter: torch.Tensor, group: Mapping[str, Any], field: Any, entry: ArrayEntry) -> torch.Tensor:
    """Allocate a tensor of an optimizer's state, where torch's `load_state_dict` would put it; laid out like the parameter if shapes agree.

    Raises:
        DeviceMemoryError: the parameter's device is out of memory.
    """
    dtype = torch_dtype(entry.dtype)
    with telling_of_room(parameter.device, local_tensor(parameter).numel() * dtype.itemsize):
        if entry.shape == tuple(parameter.shape) and parameter.dim() > 0:
            return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        is_on_host = field == "step" and not (group.get("capturable") or group.get("fused"))
        return torch.empty(entry.shape, dtype=dtype, device="cpu" if is_on_host else parameter.device)


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
    return torch.tensor(float(value), dtype=torch.float32, device="cpu") if isinstance(value, int | float) else value


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
