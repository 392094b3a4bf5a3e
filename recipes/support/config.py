"""The config's schema. Everything that can be wrong with a command line is found here, before any process starts.

Keys of the recipe are the dataclasses below. Keys of a node with a `_target_` are the keywords of what it names.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, make_dataclass
from functools import partial
from importlib import import_module
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from hydra.utils import instantiate
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ckpt.errors import ConfigurationError, CorruptCheckpointError
from ckpt.format.names import local_path
from ckpt.saving.host_cache import memories_of
from ckpt.saving.save_settings import SaveSettings
from ckpt.state.pattern_check import check_choice
from ckpt.state.sharing import check_component
from ckpt.storage.pool import Memories
from recipes.training.parallel.base import Layout

OWN_COMPONENTS = ("model", "optimizer", "scheduler", "dataset", "rng")
"""The components that the recipe itself has; any other brings its object, by `_target_`."""

AT_RUN_TIME: dict[str, tuple[str, ...]] = {
    "ckpt": (),
    "strategy": (),
    "device": (),
    "parallel": (),
    "data": (),
    "model": ("seed",),
    "optimizer": ("params",),
    "coordinator": ("state_components", "process_groups", "topology", "config_text"),
}
"""The nodes with a `_target_`, and the arguments that each is given only once the ranks run."""

GIVEN = "given_on_the_command_line"
"""The key of a checked config under which `given_keys` are; a checkpoint does not store it."""

_HYDRAS_OWN = ("_target_", "_partial_", "_convert_", "_recursive_")

_MOST_CONFIG_CHARS, _MOST_LEVELS = 1 << 20, 64
_OPENING = (
    yaml.FlowSequenceStartToken,
    yaml.FlowMappingStartToken,
    yaml.BlockSequenceStartToken,
    yaml.BlockMappingStartToken,
)
_CLOSING = (yaml.FlowSequenceEndToken, yaml.FlowMappingEndToken, yaml.BlockEndToken)


@dataclass
class TrainKeys:
    steps: int = MISSING
    seed: int = MISSING
    batch_size: int = MISSING


SaveKeys = make_dataclass(
    "SaveKeys",
    [
        (name, kind, field(default=MISSING))
        for name, kind in {
            "every": "int",
            "keep_last": "int | None",
            "on_sigterm": "bool",
            **{one.name: one.type for one in fields(SaveSettings)},
        }.items()
    ],
)
"""The keys below `save`: the recipes' own, and those of `SaveSettings`."""


@dataclass
class LoadKeys:
    verify: bool = MISSING
    strict: bool = MISSING
    allow_pickle: bool = MISSING
    reread: bool | None = MISSING


@dataclass
class AgreeKeys:
    timeout_s: float = MISSING


@dataclass
class LedgerKeys:
    stale_s: float = MISSING


@dataclass
class LaunchKeys:
    nproc_per_node: int = MISSING


@dataclass
class ComponentKeys:
    sharing_pattern: str | None = None
    process_group_name: str | None = None
    required: bool = True
    validate_replication: bool = False
    validation_level: str | None = None
    elastic: str | None = None


COMPONENT_KEYS = tuple(f.name for f in fields(ComponentKeys))


@dataclass
class RunKeys:
    run_name: str = MISSING
    output_dir: str = MISSING
    run_dir: str = MISSING
    checkpoint_root: str = MISSING
    resume: str | None = MISSING
    overwrite: bool = MISSING
    shared_root: bool = MISSING
    train: TrainKeys = field(default_factory=TrainKeys)
    save: SaveKeys = field(default_factory=SaveKeys)  # type: ignore[valid-type]
    load: LoadKeys = field(default_factory=LoadKeys)
    agree: AgreeKeys = field(default_factory=AgreeKeys)
    ledger: LedgerKeys = field(default_factory=LedgerKeys)
    launch: LaunchKeys = field(default_factory=LaunchKeys)
    pattern_check: str = MISSING
    ckpt: dict[str, Any] = MISSING
    strategy: dict[str, Any] = MISSING
    device: dict[str, Any] = MISSING
    parallel: dict[str, Any] = MISSING
    model: dict[str, Any] = MISSING
    data: dict[str, Any] = MISSING
    optimizer: dict[str, Any] = MISSING
    coordinator: dict[str, Any] = MISSING
    components: dict[str, Any] = MISSING


def save_settings(save: Mapping[str, Any]) -> SaveSettings:
    """Make the coordinator's argument `saves` of the keys below `save`."""
    return SaveSettings(**{one.name: save[one.name] for one in fields(SaveSettings)})


def checked(cfg: DictConfig, *, num_ranks: int | None = None) -> dict[str, Any]:
    """Return the run's config as a plain dictionary, resolved, with absolute paths and right types.

    What costs next to nothing is made once for its own checks: device, backend, strategy, layout, data.

    Args:
        num_ranks: of the run, if known; otherwise `launch.nproc_per_node`.

    Raises:
        ConfigurationError, OmegaConfBaseException: naming the key, what was found and the way out.
        DeviceUnavailableError: this machine does not have the device.
    """
    typed = OmegaConf.merge(_structured(RunKeys), cfg)
    run: dict[str, Any] = OmegaConf.to_container(typed, resolve=True, throw_on_missing=True)  # type: ignore[assignment]
    _check_numbers(run)
    check_choice(run["pattern_check"])
    _check_start(run)
    for name, given in AT_RUN_TIME.items():
        bind(run[name], name, given)
    made(run["device"]).require()
    kept_memories(run)
    made(run["strategy"])
    made(run["data"])
    layout = made(run["parallel"])
    ranks = num_ranks or run["launch"]["nproc_per_node"]
    layout.check(ranks)
    check_batch(run, layout, ranks)
    if run["load"]["reread"] is None:
        run["load"]["reread"] = HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN
    run["components"] = {key: _component(key, node, layout.axes) for key, node in run["components"].items()}
    return run | {GIVEN: given_keys(HydraConfig.get().overrides.task) if HydraConfig.initialized() else []}


def given_keys(overrides: Iterable[str]) -> list[str]:
    """Return the dotted keys of values on the command line; choices of files, such as `ckpt=zarr`, count as keys, too."""
    keys = []
    for one in OverridesParser.create().parse_overrides(list(overrides)):
        name = one.get_key_element().lstrip("+~")
        keys += [f"{name}.{key}" for key in one.value()] if isinstance(one.value(), dict) else [name]
    return keys


def values_of(text: str) -> dict[str, Any]:
    """Return the values of a checkpoint's config.yaml by dotted key; none of a checkpoint without one.

    Raises:
        CorruptCheckpointError: it is no config that a run wrote. None has an alias: five lines of them can stand for gigabytes.
    """
    try:
        _require_plain_yaml(text)
        return by_dotted_key(OmegaConf.to_container(OmegaConf.create(text), resolve=False)) if text else {}
    except (yaml.YAMLError, OmegaConfBaseException, ValueError, RecursionError) as error:
        raise CorruptCheckpointError(
            f"the checkpoint's config.yaml is not the config of a run: {' '.join(str(error).split()):.200}"
        ) from error


def _require_plain_yaml(text: str) -> None:
    depth = 0
    if len(text) > _MOST_CONFIG_CHARS:
        raise yaml.YAMLError("it is too long for one")
    for token in yaml.scan(text):
        depth += isinstance(token, _OPENING) - isinstance(token, _CLOSING)
        if isinstance(token, yaml.AliasToken) or depth > _MOST_LEVELS:
            raise yaml.YAMLError("it has aliases, or is nested too deeply")


def by_dotted_key(node: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten nested dictionaries: `{"a": {"b": 1}}` is `{"a.b": 1}`. An empty dictionary is a value."""
    if not (isinstance(node, Mapping) and node):
        return {prefix: node}
    found: dict[str, Any] = {}
    for key, value in node.items():
        found |= by_dotted_key(value, f"{prefix}.{key}" if prefix else str(key))
    return found


def config_text(run: Mapping[str, Any]) -> str:
    """What a checkpoint stores of the run's config."""
    return OmegaConf.to_yaml(OmegaConf.create({key: value for key, value in run.items() if key != GIVEN}))


def kept_memories(run: Mapping[str, Any]) -> Memories | None:
    """The memory in which the run's backend keeps its saves; None: it keeps none. Makes backend and settings, for their checks.

    Raises:
        ConfigurationError: a setting of saves does not go with another, or with the backend.
    """
    saves = made(run["coordinator"]["saves"]) if "saves" in run["coordinator"] else SaveSettings()
    return memories_of(made(run["ckpt"]), saves)


def made(node: Mapping[str, Any], **given: Any) -> Any:
    """Make the object of a node with `_target_`, with arguments that exist only at run time.

    The call is ours, not Hydra's, which would copy lists and dictionaries and wrap what the target raises.
    """
    make: partial[Any] = instantiate({**node, "_partial_": True, "_convert_": "all"})
    return make(**given)


def check_batch(run: Mapping[str, Any], layout: Layout, num_ranks: int) -> None:
    """Refuse a batch that the ranks cannot share evenly: the loss is a mean of means."""
    size, parts = run["train"]["batch_size"], layout.num_parts(num_ranks)
    if size % parts:
        raise ConfigurationError(
            f"train.batch_size={size} does not divide into the {parts} parts that parallel={layout.name} makes of a batch on "
            f"{num_ranks} ranks: give a multiple of {parts}, such as train.batch_size={-(-size // parts) * parts}"
        )


def bind(node: Mapping[str, Any], name: str, given: Collection[str] = ()) -> None:
    """Hold a node with a `_target_` against the signature of what it names; nodes inside it too.

    Values are converted to the types that the signature asks for, in place.

    Args:
        name: the node's key, for messages.
        given: arguments that it gets at run time.

    Raises:
        ConfigurationError: there is no such target, its package is missing, or its keywords are others.
    """
    if "_target_" not in node:
        raise ConfigurationError(f"{name} has no _target_, the class it should make; choose one with {name}=<choice>")
    target = _located(str(node["_target_"]), name)
    keys = [str(key) for key in node if key not in _HYDRAS_OWN]
    parameters = _parameters(target)
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    known = [p.name for p in parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    for key in [*keys, *given]:
        if key not in known and not open_ended:
            takes = ", ".join(k for k in known if k not in given) or "no keys at all"
            raise ConfigurationError(f"{name}.{key}: {node['_target_']} takes no {key}; it takes {takes}")
    for parameter in (parameters[key] for key in known):
        if parameter.default is parameter.empty and parameter.name not in (*keys, *given):
            raise ConfigurationError(
                f"{name}: {node['_target_']} needs {parameter.name}; give it with +{name}.{parameter.name}=<value>"
            )
    for key in keys:
        if isinstance(node[key], Mapping) and "_target_" in node[key]:
            bind(node[key], f"{name}.{key}")
    _convert(node, target, name)


def _makers(target: Any) -> list[Any]:
    """The functions that take a target's arguments: itself; of a class that hands keywords on, also those that it hands them to."""
    if not inspect.isclass(target):
        return [target]
    makers = []
    for kind in target.__mro__[:-1]:
        if "__init__" in vars(kind):
            makers.append(vars(kind)["__init__"])
            if all(p.kind is not p.VAR_KEYWORD for p in inspect.signature(makers[-1]).parameters.values()):
                break
    return makers if len(makers) > 1 else [target]


def _parameters(target: Any) -> dict[str, inspect.Parameter]:
    """All arguments of a target, by name."""
    taken = [inspect.signature(maker).parameters for maker in _makers(target)]
    is_open = any(p.kind is p.VAR_KEYWORD for p in taken[-1].values())  # nobody says to whom the rest is handed on
    found: dict[str, inspect.Parameter] = {}
    for parameters in reversed(taken):
        found |= {n: p for n, p in parameters.items() if n != "self" and (is_open or p.kind is not p.VAR_KEYWORD)}
    return found


def _hints(target: Any) -> dict[str, Any]:
    """The annotated types of all arguments, where they are known at run time."""
    makers = _makers(target)
    found: dict[str, Any] = {}
    for maker in reversed(makers):
        try:
            found |= get_type_hints(maker.__init__ if inspect.isclass(maker) else maker)
        except (NameError, TypeError):  # annotations that exist for type checkers only
            continue
    return found


def _located(path: str, name: str) -> Any:
    module, _, attribute = path.rpartition(".")
    try:
        return getattr(import_module(module), attribute)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module}.".startswith(f"{error.name}."):
            raise ConfigurationError(f"{name}._target_={path}: there is no module {error.name}") from error
        raise ConfigurationError(
            f"{name}: {path} needs the package {error.name}, which is not installed: pip install {error.name}"
        ) from error
    except ImportError as error:
        raise ConfigurationError(f"{name}: {error}") from error
    except (AttributeError, ValueError) as error:
        raise ConfigurationError(
            f"{name}._target_={path}: there is no {attribute} in {module or 'no module'}"
        ) from error


def _convert(node: Mapping[str, Any], target: Any, name: str) -> None:
    """Turn each value into the annotated type of its argument, where OmegaConf knows that type."""
    hints = _hints(target)
    for key in [key for key in node if key in hints and not isinstance(node[key], Mapping)]:
        written = _written(hints[key])
        if type(node[key]) in _choices(written):
            continue
        try:
            schema = _schema(written)
        except (OmegaConfBaseException, TypeError):  # a type of the target's own; or one without a hash
            continue
        try:
            typed = OmegaConf.merge(schema, {"value": node[key]})
        except OmegaConfBaseException as error:
            raise ConfigurationError(f"{name}.{key}={node[key]}: {str(error).strip().splitlines()[0]}") from error
        node[key] = OmegaConf.to_container(typed)["value"]  # type: ignore[index,call-overload]


def _choices(hint: Any) -> tuple[Any, ...]:
    """The types of a union, or the one type."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


@functools.cache
def _schema(hint: Any) -> Any:
    """A config of one value of this type."""
    return OmegaConf.structured(make_dataclass("Argument", [("value", hint)]))


@functools.cache
def _structured(kind: type) -> Any:
    """A config of a dataclass, which `OmegaConf.merge` copies."""
    return OmegaConf.structured(kind)


def _written(hint: Any) -> Any:
    """The part of a union that can be written in a config: float of `float | Tensor`."""
    plain = tuple(kind for kind in _choices(hint) if kind in (bool, int, float, str, NoneType))
    return Union[plain] if plain not in ((), (NoneType,)) else hint  # noqa: UP007  # of a tuple


def _component(key: str, node: Any, group_names: Collection[str]) -> dict[str, Any]:
    """Return one component's node with all its keys, having checked it as far as that goes without its object."""
    where = f"components.{key}"
    if not isinstance(node, Mapping):
        raise ConfigurationError(
            f"{where}={node}: expected its keys, as in {where}.sharing_pattern=replicated; leave it out with ~{where}"
        )
    rest = {k: v for k, v in node.items() if k not in COMPONENT_KEYS}
    if "_target_" in rest:
        bind(rest, where, ("model",))
    elif key not in OWN_COMPONENTS:
        raise ConfigurationError(
            f"{where} has no object: the recipe has {', '.join(OWN_COMPONENTS)}; any other is given with "
            f"+{where}={{_target_: <class>, sharing_pattern: <pattern>}}"
        )
    elif rest:
        raise ConfigurationError(
            f"{where}.{next(iter(rest))}: there is no such key; a component has {', '.join(COMPONENT_KEYS)}"
        )
    try:
        own = {k: v for k, v in node.items() if k in COMPONENT_KEYS}
        typed = OmegaConf.merge(_structured(ComponentKeys), own)
    except OmegaConfBaseException as error:
        raise ConfigurationError(f"{where}.{error.full_key}: {str(error).strip().splitlines()[0]}") from error
    keys: dict[str, Any] = OmegaConf.to_container(typed)  # type: ignore[assignment]
    _check_sharing(key, keys, group_names)
    return keys | rest


def _check_sharing(key: str, keys: Mapping[str, Any], group_names: Collection[str]) -> None:
    pattern, group = keys["sharing_pattern"], keys["process_group_name"]
    if pattern is None:
        if key in OWN_COMPONENTS and key != "dataset":
            raise ConfigurationError(
                f"components.{key}.sharing_pattern=null leaves it to the object, but only the dataset decides at run "
                "time; give a pattern, such as replicated"
            )
        return
    check_component(key, **{k: v for k, v in keys.items() if k != "required"})
    if group is not None and group not in group_names:
        has = f"has {', '.join(group_names)}" if group_names else "has none"
        raise ConfigurationError(
            f"components.{key}.process_group_name={group}: there is no such process group; the layout chosen with "
            f"parallel= {has}"
        )


def _check_numbers(run: Mapping[str, Any]) -> None:
    for key, least in {
        "train.steps": 1,
        "train.seed": 0,
        "train.batch_size": 1,
        "save.every": 1,
        "save.keep_last": 1,
        "save.grace_s": 0,
        "launch.nproc_per_node": 1,
    }.items():
        section, name = key.split(".")
        value = run[section][name]
        if value is not None and value < least:
            raise ConfigurationError(f"{key}={value}: expected at least {least}")
    for key in ("agree.timeout_s", "ledger.stale_s"):
        section, name = key.split(".")
        if not run[section][name] > 0:
            raise ConfigurationError(f"{key}={run[section][name]}: expected more than 0 seconds")


def require_names(run: Mapping[str, Any]) -> None:
    """Refuse names and paths that are empty, as those are of `resume=` without a value."""
    for key, wanted in {
        "resume": "latest, null or the path of a checkpoint",
        "run_name": "a name",
        "output_dir": "a folder",
        "checkpoint_root": "a folder",
    }.items():
        if key in run and run[key] is not None and not run[key].strip():
            raise ConfigurationError(f"{key}= has no value: it is {wanted}; leave the key out for its default")


def _check_start(run: dict[str, Any]) -> None:
    """Make the paths absolute: ranks may live elsewhere. Refuse two answers to where a run begins, and empty ones."""
    require_names(run)
    local_path(run["output_dir"], "output_dir")
    for key in ("run_dir", "checkpoint_root"):
        make_absolute(run, key)
    if run["resume"] == "latest" and run["overwrite"]:
        raise ConfigurationError(
            "resume=latest goes on from the newest checkpoint, so overwrite=true has nothing to overwrite: give one of the two"
        )
    if run["resume"] not in (None, "latest"):
        make_absolute(run, "resume")


def make_absolute(run: dict[str, Any], key: str) -> None:
    """Make a path in the config absolute.

    Raises:
        ConfigurationError: it is the address of an object store.
    """
    run[key] = str(local_path(run[key], key).absolute())
