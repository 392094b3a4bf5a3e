"""An optimizer's state by the names of its parameters."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ckpt.errors import ConfigurationError, ShapeMismatchError
from ckpt.format.dtypes import are_castable, torch_dtype, zarr_name
from ckpt.format.manifest import ArrayEntry
from ckpt.memory.device import telling_of_room
from ckpt.state.abilities import refusing_state, tied_names
from ckpt.state.address import local_tensor, place_of
from ckpt.state.flatten import Path, flatten, unflatten
from ckpt.state.tensor_classes import empty_tensor, is_kind_step, without_plain_kind
from ckpt.state.wrappers import Unwrapping, saved_under

_MACHINE_OPTIONS = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")
"""Options of a parameter group that depend on this run's machine. Not saved."""
_STATE, _GROUPS, _OTHERS = "state", "param_groups", "other_state"
_NAMED = frozenset((_STATE, _GROUPS))
_LOAD_HOOKS = ("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks")
_DEFAULT_MACHINE_OPTIONS = {"foreach": None, "fused": None, "capturable": False, "differentiable": False}


class OptimizerState:
    """An optimizer's state under `state.<parameter name>.<field>` and `param_groups.<parameter name>.<option>`.

    Names stay valid when the order of parameters, the groups or the pipeline stages change; positions do not. State of a weight
    that is tied across ranks is saved under the weight's first name on every rank. Names are free of wrappers.

    The optimizer's own `state_dict` and `load_state_dict` decide what there is. State under keys that are no parameters is kept as
    `other_state`, and all that a class or a hook adds under its own key. A state dict that is not of torch.optim's form is kept as it is.
    Of a `ZeroRedundancyOptimizer` each rank keeps the part that it holds, for any number of ranks to load.

    Args:
        module: source of the names and of `tied_names`, {alias: first name}; or several by key: one that holds all parameters gives the
            names, or else each those of its own, behind its key. None if the optimizer was made from `module.named_parameters()`.

    Raises:
        ConfigurationError: a parameter has no name.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, module: torch.nn.Module | Mapping[str, torch.nn.Module] | None = None
    ) -> None:
        self._around = _zero_around(optimizer)  # has the options, and hands them to the optimizer of this rank at each step
        self.optimizer: Any = optimizer if self._around is None else self._around.optim
        self._modules = module if isinstance(module, Mapping) else {} if module is None else {"": module}
        self._names: dict[torch.Tensor, str] = {}
        self._saved_as: dict[str, str] = {}  # name -> saved name, during a load
        self._prepared: dict[str, Any] | None = None  # what a load fills, in the form of `state_dict`
        self._known: Collection[str] = ()  # names in the newest `state_dict`
        self._in_order_of_groups = False  # the states to load; otherwise in the order of what is given
        self._find_names()

    def prepare_from(
        self,
        saved: Mapping[str, ArrayEntry],
        plain: Mapping[str, Any],
        paths: Mapping[str, Path],
        *,
        cast: bool = False,
    ) -> None:
        """Make the state for a load to fill: that of the checkpoint. Tensors of the optimizer are used where they fit; it is not changed.

        Args:
            cast: new tensors of a parameter's state have its data type, as torch's `load_state_dict` gives them, but for `step`.

        Raises:
            ConfigurationError: parameters that share a group in this run had different options when they were saved.
            CorruptCheckpointError: what was saved are no options by the names of parameters.
        """
        self.forget_prepared()
        bare = {key.removeprefix("state.").rpartition(".")[0] for key in saved if key.startswith("state.")}
        self._find_names()
        with refusing_state("the optimizer"):
            options = _below(unflatten({key: value for key, value in plain.items() if paths[key][:1] == (_GROUPS,)}, paths), _GROUPS)
            self._saved_as = saved_under(lambda: set(self._names.values()), {*bare, *options})
            self._require_equal(options)
        here = {name: (parameter, group) for parameter, name, group in self._parameters()}
        places = {key: paths.get(key) or _place_of(key, here) for key in saved}
        known = {*options, *(place[1] for place in places.values() if place[0] in _NAMED and len(place) > 2)}
        of_run = self.state_dict()
        if _GROUPS in of_run:
            of_run[_GROUPS] = {name: of_name for name, of_name in of_run[_GROUPS].items() if name not in known}
        own = flatten(of_run, "the optimizer")
        self._in_order_of_groups = not all(key in paths for key in saved)
        wanted: dict[str, Any] = {}
        for key, entry in saved.items():
            place = places[key]
            if place[0] in _NAMED and len(place) > 2 and place[1] not in here:
                continue  # of another rank, or of no parameter here
            wanted[key] = own.tensors.get(key)
            dtype, shape = ("", entry.shape) if wanted[key] is None else place_of(wanted[key], key)[:2]
            beside = here.get(str(place[1])) if place[0] == _STATE and len(place) > 1 else None
            if cast and beside is not None and place[2:] != ("step",) and are_castable(torch_dtype(entry.dtype), beside[0].dtype):
                if dtype:
                    continue
                entry = replace(entry, dtype=zarr_name(beside[0].dtype))
            if dtype != entry.dtype and shape == entry.shape:  # another shape is one that does not fit
                wanted[key] = empty_tensor(entry, place) if beside is None else _state_tensor(*beside, place, entry)
        for key, path in own.paths.items():
            if len(path) > 1 and path[0] in _NAMED and path[1] not in known:
                places[key] = path
                wanted[key] = own.tensors.get(key, own.plain.get(key))
        self._prepared = unflatten(wanted, places)

    def forget_prepared(self) -> None:
        """Drop what `prepare_from` made."""
        self._prepared = None
        self._in_order_of_groups = False
        self._saved_as = {}

    def paths_to_save(self, tensors: Collection[str], paths: Mapping[str, Path]) -> Collection[str]:
        """Return the keys of tensors that lie beside plain values, or whose paths do not follow from the names of parameters."""
        states = {key: path for key, path in paths.items() if path[0] == _STATE and len(path) > 1}
        names = dict.fromkeys([path[1] for path in states.values()])
        if [*names] != [name for name in self._known if name in names]:
            return tensors
        found = {key for key in tensors if key in states and without_plain_kind(paths[key]) == _place_of(key, self._known)}
        mixed = {path[1] for key, path in states.items() if key not in found}
        return [key for key in tensors if key not in states or paths[key][1] in mixed]

    def state_dict(self) -> dict[str, Any]:
        if self._prepared is not None:
            return self._prepared
        if self._around is not None:
            _hand_options_on(self._around.param_groups, self.optimizer.param_groups)
        given: dict[str, Any] = self.optimizer.state_dict()
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
            else:
                state[positions[key]] = dict(fields) if isinstance(fields, dict) else fields
        self._known = groups
        added = {key: value for key, value in given.items() if key not in _NAMED}
        if _OTHERS in added:
            raise ConfigurationError(f"the optimizer's state dict has an entry {_OTHERS}, which is taken: give it another name")
        before = {_OTHERS: others} if others and next(iter(given[_STATE])) in others else {}
        return {**before, _STATE: state, _GROUPS: groups, **added, **({_OTHERS: others} if others else {})}

    @refusing_state("the optimizer")
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
        if not isinstance(saved_groups, dict) or not isinstance(saved_state, dict):
            raise TypeError("it is not by the names of parameters")
        if self._prepared is None:
            self._require_equal(saved_groups)
        known = {*saved_groups, *saved_state}
        found = {name: position for position, name in positions.items()}
        names = found if self._in_order_of_groups else {**dict.fromkeys(n for n in saved_state if n in found), **found}
        state = {found[name]: saved_state[name] for name in names if name in saved_state}
        state |= {key: fields for key, fields in given[_STATE].items() if key in positions and positions[key] not in known}
        groups = []
        for group, old in zip(optimizer.param_groups, given[_GROUPS], strict=True):
            members = [saved_groups[name] for name in map(self._name_of, group["params"]) if name in saved_groups]
            options = members[0] if members else old
            places = {option: old if option in _MACHINE_OPTIONS else options for option in old}
            places |= {option: options for option in options if option not in _MACHINE_OPTIONS}
            groups.append({option: of[option] for option, of in places.items() if option in of})
        added = {key: value for key, value in state_dict.items() if key not in (*_NAMED, _OTHERS)}
        others = state_dict.get(_OTHERS, {})
        state = others | state if next(iter(state_dict)) == _OTHERS else state | others
        if _loads_as_torch(optimizer) and not added:
            self._set(state, groups)
        else:
            optimizer.load_state_dict({_STATE: state, _GROUPS: groups, **added})
        if self._around is not None:
            _hand_options_on(optimizer.param_groups, self._around.param_groups)
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
        own = self._groups()
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
        groups = self._groups()
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
        for group in self._groups():
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

    def _groups(self) -> list[dict[str, Any]]:
        """The groups of parameters; none of a wrapper that has them elsewhere."""
        return getattr(self.optimizer, "param_groups", [])

    def _parameters(self) -> Iterator[tuple[torch.Tensor, str, dict[str, Any]]]:
        for group in self._groups():
            for parameter in group["params"]:
                yield parameter, self._name_of(parameter), group

    def _name_of(self, parameter: torch.Tensor) -> str:
        name = self._names[parameter]
        return self._saved_as.get(name, name)


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
    tied, names = ties_of(module), Unwrapping(module)
    return {parameter: tied.get(name := names.name(given), name) for given, parameter in module.named_parameters()}


def ties_of(module: torch.nn.Module) -> dict[str, str]:
    """Return the module's declared ties, {alias: first name}, by names without wrappers."""
    names = Unwrapping(module)
    return {names.name(alias): names.name(first) for alias, first in tied_names(names.inner).items()}


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


def _zero_around(optimizer: Any) -> Any:
    """Return a `ZeroRedundancyOptimizer`, whose own state dict is that of all ranks, on one of them; None: it is another.

    Raises:
        ConfigurationError: its steps run inside of the backward pass.
    """
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    if module is None or not isinstance(optimizer, module.ZeroRedundancyOptimizer):
        return None
    if not isinstance(getattr(optimizer, "optim", None), torch.optim.Optimizer):
        raise ConfigurationError("a ZeroRedundancyOptimizer with overlap_with_ddp=True is not kept: make it with overlap_with_ddp=False")
    return optimizer


def _hand_options_on(given: Sequence[dict[str, Any]], taken: Sequence[dict[str, Any]]) -> None:
    for group, options in zip(taken, given, strict=True):
        group.update({option: value for option, value in options.items() if option != "params"})


def _loads_as_torch(optimizer: torch.optim.Optimizer) -> bool:
    """Whether nothing but torch's own code runs in an optimizer's `load_state_dict`."""
    is_own = type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict
    return is_own and "load_state_dict" not in vars(optimizer) and not any(vars(optimizer).get(hooks) for hooks in _LOAD_HOOKS)


def _state_tensor(parameter: torch.Tensor, group: Mapping[str, Any], place: Path, entry: ArrayEntry) -> torch.Tensor:
    """Allocate a tensor of an optimizer's state, where torch's `load_state_dict` would put it, laid out as saved or like the parameter.

    Raises:
        DeviceMemoryError: the parameter's device is out of memory.
    """
    dtype = torch_dtype(entry.dtype)
    with telling_of_room(parameter.device, local_tensor(parameter).numel() * dtype.itemsize):
        if entry.shape == tuple(parameter.shape) and parameter.dim() > 0 and not is_kind_step(place[-1]):
            return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        is_on_host = place[2:] == ("step",) and not (group.get("capturable") or group.get("fused"))
        return empty_tensor(entry, place, "cpu" if is_on_host else parameter.device)


def _as_step(value: Any) -> Any:
    """Convert a step count of old torch versions, a plain number, to a 0-dim tensor."""
    return torch.tensor(float(value), dtype=torch.float32, device="cpu") if isinstance(value, int | float) else value


def _equal_options(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    def comparable(value: Any) -> Any:
        return value.tolist() if isinstance(value, torch.Tensor) else value

    if not any(isinstance(value, torch.Tensor) for value in a.values()):
        return a == b
    return {k: comparable(v) for k, v in a.items()} == {k: comparable(v) for k, v in b.items()}
