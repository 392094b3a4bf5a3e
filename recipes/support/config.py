"""The schema of the config. It is checked here, before any process starts.

The dataclasses below have the recipe's own keys. The keys of a node with a `_target_` are the arguments of the class or function
that it names.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from collections.abc import Collection, Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field, fields, make_dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from hydra.utils import instantiate
from omegaconf import MISSING, DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from ckpt.catalog.retention import Retention
from ckpt.cli.config_text import by_dotted_key
from ckpt.errors import ConfigurationError, import_failure
from ckpt.format.places import as_place, local_path
from ckpt.memory.device import Device
from ckpt.run.arguments import as_backend, as_settings, as_strategy
from ckpt.saving.host_cache import memories_of
from ckpt.saving.save_settings import OF_A_ROOT, SaveSettings
from ckpt.state.sharing import check_component
from ckpt.storage.pool import Memories
from recipes.support.keys import OF_USERS, moved, shown
from recipes.support.metrics import check_loggers
from recipes.support.sentences import wrong_value
from recipes.training.model import seeded
from recipes.training.parallel.base import Layout

OWN_COMPONENTS = ("model", "optimizer", "scheduler", "dataset", "rng")
"""The components that the recipe makes; any other component names its class by `_target_`."""

AT_RUN_TIME: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("ckpt", "strategy", "device", "parallel", "model", "data"), ()),
    "optimizer": ("params",),
    "schedule": ("optimizer",),
    "coordinator": ("state_components", "process_groups", "topology", "config_text"),
}
"""The nodes with a `_target_`, and the arguments that each gets when the ranks run."""
_WITH_PLUS = ("components", "callbacks", "logger")
"""Top keys below which a command line adds keys with `+`; a key of any other node is an argument of its target."""

OFFERED: dict[str, tuple[str, ...]] = {
    "model": ("seed",),
    "data": ("rank_batch_size", "share", "seed", "model", "device", "topology", "context"),
}
"""Arguments that a target gets when the ranks run, if it names them and the config does not give them."""

GIVEN = "given_on_the_command_line"
"""The key of a checked config that holds `given_keys`."""
LINES_TO = "file_of_its_lines"
"""The key of a checked config that holds the file of the run's lines, if it is a job of a sweep; None: stdout."""
OF_THIS_START = (GIVEN, LINES_TO)
"""Keys that are of no other start of the run; a checkpoint does not store them."""
JOB_LOG = "job.log"

_HYDRAS_OWN = ("_target_", "_partial_", "_convert_", "_recursive_")

_SECONDS = {"s": 1, "min": 60, "h": 3600}
_OWN_SAVE_KEYS: dict[str, Any] = {
    "every": Any,
    "keep_last": "int | None",
    "keep_best": "int | None",
    "keep_last_of": dict[str, Any],
    "on_sigterm": "bool",
}


@dataclass
class TrainKeys:
    steps: int = MISSING
    seed: int = MISSING
    batch_size: int = MISSING


SaveKeys = make_dataclass(
    "SaveKeys",
    [(name, kind, field(default=None if name == "keep_best" else MISSING)) for name, kind in _OWN_SAVE_KEYS.items()]
    + [(setting.name, setting.type, field(default=MISSING)) for setting in fields(SaveSettings) if setting.name not in OF_A_ROOT],
)
"""The keys of `save`: the recipe's own, and the fields of `SaveSettings` that have no key elsewhere."""


@dataclass
class LoadKeys:
    verify: bool = MISSING
    strict: bool = MISSING
    cast: Any = MISSING
    allow_pickle: bool = MISSING
    reread: bool | None = MISSING


@dataclass
class AgreeKeys:
    timeout_s: float = MISSING


@dataclass
class LedgerKeys:
    stale_s: float = MISSING


@dataclass
class StorageKeys:
    retry_s: float = MISSING


@dataclass
class LaunchKeys:
    nproc_per_node: int = MISSING
    name: str = "local"
    least_ranks: int = 1
    max_restarts: int = 0
    address: str | None = None
    cpus_per_rank: float = 1
    gpus_per_rank: float = 0
    resources: dict[str, float] = field(default_factory=dict)


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
    storage: StorageKeys = field(default_factory=StorageKeys)
    launch: LaunchKeys = field(default_factory=LaunchKeys)
    pattern_check: str = MISSING
    logger: dict[str, Any] = field(default_factory=dict)
    callbacks: dict[str, Any] = field(default_factory=dict)
    tags: list[str] = field(default_factory=list)
    profile: bool = False
    ckpt: dict[str, Any] = MISSING
    strategy: dict[str, Any] = MISSING
    device: dict[str, Any] = MISSING
    parallel: dict[str, Any] = MISSING
    model: dict[str, Any] = MISSING
    data: dict[str, Any] = MISSING
    optimizer: dict[str, Any] = MISSING
    schedule: dict[str, Any] = field(default_factory=lambda: {"_target_": "recipes.training.schedule.inverse_square_root"})
    loss: dict[str, Any] | None = None
    tiers: dict[str, Any] | None = None
    coordinator: dict[str, Any] = MISSING
    components: dict[str, Any] = MISSING


Keys = TypeVar("Keys")
Kind = TypeVar("Kind")


def command_keys(cfg: DictConfig, schema: type[Keys]) -> Keys:
    """Return the config of a command that works on checkpoints or files, checked.

    Args:
        schema: dataclass of its keys, as `ckpt.cli.arguments` describes.

    Raises:
        ConfigurationError: a key without a default is not given, or the keys' own `validate` refuses a value.
    """
    for key in fields(schema):
        if "help" in key.metadata and OmegaConf.is_missing(cfg, key.name):
            raise ConfigurationError(f"no {key.name} is given; add {key.name}=<{key.metadata['help']}>")
    keys = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), cfg))
    assert isinstance(keys, schema)
    if (validate := getattr(keys, "validate", None)) is not None:
        validate()
    return keys


def retention(save: Mapping[str, Any]) -> Retention:
    """Return the coordinator's argument `keep_last`, from the keys of `save`."""
    best = save.get("keep_best")
    metric = None if best is None else "loss"
    return Retention(keep_last=save["keep_last"], keep_best=best, metric=metric, keep_last_of=save.get("keep_last_of"))


def popped_keys(cfg: DictConfig, schema: type[Keys]) -> Keys:
    """Take a command's own keys out of the config, and return them as `command_keys` does. The rest is the config of a run."""
    names = [key.name for key in fields(schema)]  # type: ignore[arg-type]
    own = OmegaConf.masked_copy(cfg, names)
    with open_dict(cfg):
        for name in names:
            del cfg[name]
    return command_keys(own, schema)


def save_settings(save: Mapping[str, Any], **others: Any) -> SaveSettings:
    """Return the coordinator's argument `saves`, from the keys of `save`, and fields that have a key elsewhere."""
    if not isinstance(save, Mapping):
        raise _unlike("coordinator.saves.save", save, "the keys of save; leave it at ${save}")
    return SaveSettings(**{setting.name: save[setting.name] for setting in fields(SaveSettings) if setting.name in save}, **others)


def checked(cfg: DictConfig, *, num_ranks: int | None = None) -> dict[str, Any]:
    """Return the run's config as a plain dictionary, resolved, with absolute paths and typed values.

    Backend and strategy are made once, because their constructors check their arguments; so are the parts of `check_training`.

    Args:
        num_ranks: ranks of the run; None: `launch.nproc_per_node`.

    Raises:
        ConfigurationError, OmegaConfBaseException: a key or a value is wrong; names it and the next step.
        DeviceUnavailableError: this machine does not have the device.
    """
    run = resolved(RunKeys, cfg)
    counts = ("train.steps", "train.batch_size", "save.keep_last", "save.keep_best", "launch.nproc_per_node")
    least = dict.fromkeys(counts, 1) | {"train.seed": 0, "save.grace_s": 0, "launch.least_ranks": 1, "launch.max_restarts": 0}
    require_numbers(run, least, seconds=("agree.timeout_s", "ledger.stale_s", "storage.retry_s"))
    Every.of(run["save"]["every"])
    check_logging(run)
    _check_start(run)
    for name, tier in (run["tiers"] or {}).items():
        if str((tier or {}).get("_target_")).endswith(".remote"):
            raise ConfigurationError(f"tiers.{name} is the checkpoint root, which a recipe has in checkpoint_root and save: leave it out")
    ranks = num_ranks or run["launch"]["nproc_per_node"]
    if (ranks > 1 or run["launch"]["name"] == "ray") and str(run["checkpoint_root"]).startswith("memory:"):
        has = f"{ranks} ranks" if ranks > 1 else "its rank in another"
        raise ConfigurationError(
            f"checkpoint_root={run['checkpoint_root']} is in the memory of one process, and this run has {has}: give a folder, or the "
            "address of a store"
        )
    if (least_ranks := run["launch"]["least_ranks"]) > ranks:
        raise _unlike("launch.least_ranks", least_ranks, f"at most launch.nproc_per_node={ranks}")
    layout = check_training(run, ranks)
    for name in ("ckpt", "strategy", "coordinator"):  # the coordinator last: its nodes repeat others
        bind(run[name], name, AT_RUN_TIME[name])
    kept_memories(run)
    as_strategy(made(run["strategy"]))
    _require_group("strategy.group", run["strategy"].get("group"), layout.axes)
    if run["load"]["reread"] is None:
        run["load"]["reread"] = HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN
    run["components"] = {key: _component(key, node, layout.axes) for key, node in run["components"].items()}
    return run | {GIVEN: keys_of_command_line(), LINES_TO: file_of_lines(run["run_dir"])}


def file_of_lines(run_dir: str) -> str | None:
    """Return the file that a job of a sweep prints its lines to; None, for stdout: of a run, and with `hydra.verbose`."""
    if not HydraConfig.initialized() or HydraConfig.get().mode != RunMode.MULTIRUN or HydraConfig.get().verbose:
        return None
    return str(Path(run_dir, JOB_LOG))


def check_logging(run: Mapping[str, Any]) -> None:
    """Check the loggers of a run.

    Raises:
        ConfigurationError: a key is wrong, or a package is not installed.
    """
    for name, node in run["logger"].items():
        bind(node, f"logger.{name}", ("run", "first_step"))
    check_loggers(run["logger"])


@dataclass(frozen=True)
class Every:
    """What `save.every` counts: steps, seconds or epochs."""

    number: int
    unit: str

    @classmethod
    def of(cls, value: Any) -> Every:
        """Parse a value.

        Raises:
            ConfigurationError: it is neither a number of steps, nor a time or epochs.
        """
        found = re.fullmatch(r"(-?\d+) ?([a-z]*)", str(value))
        unit = {"": "steps", "step": "steps", "epoch": "epochs"}.get(found[2], found[2]) if found else ""
        if found is None or isinstance(value, bool) or unit not in ("steps", "epochs", *_SECONDS):
            raise ConfigurationError(
                f"save.every={shown(value)}: expected a whole number of steps, or a time or epochs, such as 30s, 10min, 2h or 1epochs"
            )
        number = int(found[1])
        if number < 1:
            raise ConfigurationError(f"save.every={value}: expected at least 1")
        return cls(number * _SECONDS[unit], "seconds") if unit in _SECONDS else cls(number, unit)


def check_training(run: Mapping[str, Any], num_ranks: int) -> Layout:
    """Check the parts that train, of which device, data and layout are made once; return the layout.

    Raises:
        ConfigurationError: a key or a value is wrong, or does not go with this number of ranks.
        DeviceUnavailableError: this machine does not have the device.
    """
    leave_out_unset(run)
    leave_to_targets(run, keys_of_command_line())
    for name, node in run.get("callbacks", {}).items():
        bind(node, f"callbacks.{name}")
    for name in ("device", "parallel", "model", "data", "optimizer", "schedule"):
        bind(run[name], name, AT_RUN_TIME[name], OFFERED.get(name, ()))
    if run["loss"] is not None:
        bind(run["loss"], "loss", is_partial=not inspect.isclass(target_of(run["loss"], "loss")))
    device = made_as(Device, "device", run["device"])
    if run.get("launch", {}).get("name") != "ray":  # whose nodes may have what this machine has not: the ranks look
        device.require()
    data = target_of(run["data"], "data")
    if inspect.isclass(data):  # of what a function makes the ranks look
        require_data(data, run["data"])
    if hasattr(data, "loader"):  # what it makes is cheap, and checks its arguments
        made(run["data"])
    layout = made_as(Layout, "parallel", run["parallel"])
    if inspect.isclass(model := target_of(run["model"], "model")):
        layout.require_plan(model, model.__name__)
    _check_ranks(run, layout, num_ranks)
    return layout


def require_data(kind: type, node: Mapping[str, Any]) -> None:
    """Refuse a class, of what the `_target_` of `data` makes, that can yield no batches.

    Raises:
        ConfigurationError: it is refused.
    """
    yields = ("loader", "next_batch", "__iter__", "__getitem__")
    if issubclass(kind, (Mapping, str)) or not any(hasattr(kind, name) for name in yields):
        raise ConfigurationError(
            f"data: {node['_target_']} makes a {kind.__name__}; expected a dataset with __len__ and __getitem__, a DataLoader, or an "
            "iterable of batches with state_dict and load_state_dict"
        )


def leave_out_unset(run: dict[str, Any]) -> None:
    """Replace nodes with neither target nor arguments, such as `parallel.plan` as it stands in conf/, by null."""
    for nodes, key in ((run, "loss"), *((run["parallel"], key) for key in run["parallel"])):
        if isinstance(nodes[key], Mapping) and nodes[key].get("_target_", "") is None and not _arguments(nodes[key]):
            nodes[key] = None


def leave_to_targets(run: Mapping[str, Any], given: Collection[str]) -> None:
    """Where the command line names another `_target_`, leave out the keys of the chosen file that this one does not take.

    Args:
        given: dotted keys of the command line, all of which stay.
    """
    for name in OF_USERS:
        node = run.get(name) or {}
        if f"{name}._target_" not in given or "_target_" not in node:
            continue
        parameters = _parameters(target_of(node, name))
        known = {p.name for p in _by_name(parameters)}
        for key in _arguments(node):
            if key not in known and not _is_open(parameters) and f"{name}.{key}" not in given:
                del node[key]


def _arguments(node: Mapping[str, Any]) -> list[str]:
    """The keys of a node that are not Hydra's own."""
    return [str(key) for key in node if key not in _HYDRAS_OWN]


def _check_ranks(run: Mapping[str, Any], layout: Layout, num_ranks: int) -> None:
    layout.check(num_ranks)
    check_batch(run, layout, num_ranks)


def fits(run: Mapping[str, Any], num_ranks: int) -> bool:
    """Whether the run's layout and batch divide over this number of ranks. What does not train fits on any."""
    if "parallel" not in run or "train" not in run:
        return True
    try:
        _check_ranks(run, made(run["parallel"]), num_ranks)
    except ConfigurationError:
        return False
    return True


def resolved(kind: type, cfg: DictConfig | dict[str, Any]) -> dict[str, Any]:
    """Return a config as a plain dictionary, resolved, with the types that a dataclass gives its keys.

    Raises:
        OmegaConfBaseException: a key is unknown, missing, or of another type.
    """
    merged = OmegaConf.merge(_structured(kind), cfg)
    return OmegaConf.to_container(merged, resolve=True, throw_on_missing=True)  # type: ignore[return-value]


def given_keys(overrides: Iterable[str]) -> list[str]:
    """Return the dotted keys that a command line sets, choices of files such as `ckpt=zarr` included."""
    keys = []
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        name = override.get_key_element().lstrip("+~")
        keys += [f"{name}.{key}" for key in override.value()] if isinstance(override.value(), dict) else [name]
    return keys


def keys_of_command_line() -> list[str]:
    """Return the `given_keys` of this job; none of a config that no command composed."""
    return given_keys(HydraConfig.get().overrides.task) if HydraConfig.initialized() else []


def config_text(run: Mapping[str, Any]) -> str:
    """Return the text of config.yaml in a checkpoint."""
    return OmegaConf.to_yaml(OmegaConf.create({key: value for key, value in run.items() if key not in OF_THIS_START}))


def kept_memories(run: Mapping[str, Any]) -> Memories | None:
    """Return the host memory in which the run's backend keeps its saves, or None. Makes backend and settings, which are checked.

    Raises:
        ConfigurationError: a setting of saves contradicts another one, or the backend.
    """
    node = run["coordinator"]
    groups = {name: made(node[name]) for name in ("saves", "loads") if name in node}
    known = (*_HYDRAS_OWN, *_parameters(target_of(node, "coordinator")))
    alone = {key: value for key, value in node.items() if key not in known}
    as_settings(None, groups.get("saves", "sync"), groups.get("loads"), alone)
    return memories_of(as_backend(made(run["ckpt"])))


def made(node: Mapping[str, Any], **given: Any) -> Any:
    """Call the `_target_` of a node, with arguments that exist only at run time.

    Hydra resolves the target, but does not call it: it would copy lists and dictionaries, and wrap the target's errors.
    """
    make: partial[Any] = instantiate({**node, "_partial_": True, "_convert_": "all"})
    return make(**given)


def made_with(node: Mapping[str, Any], offered: Mapping[str, Any]) -> Any:
    """Call the `_target_` of a node with its keys, and with those of the offered arguments that it names."""
    target = target_of(node, "")
    return made(node, **{name: value for name, value in named(target, offered).items() if name not in node})


def named(function: Any, offered: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the arguments that a class or function names."""
    return {p.name: offered[p.name] for p in _by_name(_parameters(function)) if p.name in offered}


def target_of(node: Mapping[str, Any], name: str) -> Any:
    """Return the class or function that the `_target_` of a node names.

    Raises:
        ConfigurationError: there is none.
    """
    if "_target_" not in node:
        raise ConfigurationError(f"{name} has no _target_, the class it should make; choose one with {name}=<choice>")
    path = node["_target_"]
    if not isinstance(path, str) or "." not in path:
        raise _unlike(f"{name}._target_", path, "the name of a class or function with its module, such as torch.optim.AdamW")
    return _located(path, name)


def made_model(node: Mapping[str, Any], seed: int) -> torch.nn.Module:
    """Make the model of a config: with equal first weights wherever the seed is equal. Global random generators do not change."""
    with seeded(seed):
        return require_kind(torch.nn.Module, "model", node, made_with(node, {"seed": seed}))


def loss_of(node: Mapping[str, Any] | None) -> Any:
    """Return the function of (output, target) that `loss` names: itself, or what the class makes."""
    if node is None:
        return None
    return made(node) if inspect.isclass(target_of(node, "loss")) else instantiate({**node, "_partial_": True, "_convert_": "all"})


def made_as(kind: type[Kind], name: str, node: Mapping[str, Any], **given: Any) -> Kind:
    """Return what the `_target_` of a node makes.

    Raises:
        ConfigurationError: it is no `kind`.
    """
    return require_kind(kind, name, node, made(node, **given))


def require_kind(kind: type[Kind], name: str, node: Mapping[str, Any], one: Any) -> Kind:
    """Return an object that the `_target_` of a node has made, if it is a `kind`; see `made_as`."""
    if not isinstance(one, kind):
        raise ConfigurationError(
            f"{name}: {node['_target_']} makes a {type(one).__name__}; expected a {kind.__module__}.{kind.__qualname__}"
        )
    return one


def check_batch(run: Mapping[str, Any], layout: Layout, num_ranks: int) -> None:
    """Refuse a batch that does not divide evenly over the ranks: the loss is a mean of means."""
    size, parts = run["train"]["batch_size"], layout.num_parts(num_ranks)
    if size % parts:
        raise ConfigurationError(
            f"train.batch_size={size} does not divide into the {parts} parts that parallel={layout.name} makes of a batch on "
            f"{num_ranks} ranks: give a multiple of {parts}, such as train.batch_size={-(-size // parts) * parts}"
        )


def bind(
    node: MutableMapping[str, Any], name: str, given: Collection[str] = (), offered: Collection[str] = (), *, is_partial: bool = False
) -> None:
    """Check a node with a `_target_`, and the nodes in it, against the target's signature.

    Converts values in place to the annotated types, where OmegaConf knows them.

    Args:
        name: the node's key, for messages.
        given: arguments that the target gets at run time.
        offered: arguments that it gets if it names them.
        is_partial: it gets others when it is called, which the config need not give.

    Raises:
        ConfigurationError: the target or its package is missing, or does not take a key, or needs another one.
    """
    target = target_of(node, name)
    keys = _arguments(node)
    parameters = _parameters(target)
    known = [p.name for p in _by_name(parameters)]
    for key in [*keys, *given]:
        if key in known:
            continue
        if (instead := moved(key)) is not None:
            raise ConfigurationError(f"{name}.{key}{instead}")
        if not _is_open(parameters):
            takes = [k for k in known if k not in (*given, *offered)]
            near = "".join(f"did you mean {k}? " for k in difflib.get_close_matches(key, takes, n=1))
            listed = ", ".join(takes) or "no keys at all"
            raise ConfigurationError(f"{name}.{key}: {node['_target_']} takes no {key}; {near}it takes {listed}")
    for parameter in (parameters[key] for key in known):
        if not is_partial and parameter.default is parameter.empty and parameter.name not in (*keys, *given, *offered):
            plus = "+" if name.partition(".")[0] in _WITH_PLUS else ""
            raise ConfigurationError(
                f"{name}: {node['_target_']} needs {parameter.name}; give it with {plus}{name}.{parameter.name}=<value>"
            )
    for key in keys:
        if isinstance(node[key], Mapping) and "_target_" in node[key]:
            bind(node[key], f"{name}.{key}", is_partial=bool(node[key].get("_partial_")))
        elif key in parameters:
            node[key] = _typed(node[key], parameters[key].annotation, f"{name}.{key}")


def _parameters(target: Any) -> dict[str, inspect.Parameter]:
    """The parameters of a target by name; of a class whose `__init__` takes `**keywords`, also those of its base classes."""
    signatures = []
    for kind in target.__mro__[:-1] if inspect.isclass(target) else ():
        if "__init__" in vars(kind):
            signatures.append(_signature(vars(kind)["__init__"]))
            if not _is_open(signatures[-1]):
                break
    signatures = signatures if len(signatures) > 1 else [_signature(target)]
    is_open = _is_open(signatures[-1])
    found: dict[str, inspect.Parameter] = {}
    for parameters in reversed(signatures):
        found |= {n: p for n, p in parameters.items() if n != "self" and (is_open or p.kind is not p.VAR_KEYWORD)}
    return found


def _by_name(parameters: Mapping[str, inspect.Parameter]) -> list[inspect.Parameter]:
    """The parameters that are given by name."""
    return [p for p in parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]


def _signature(function: Any) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function, eval_str=True).parameters
    except (NameError, TypeError):  # it has annotations that exist for type checkers only
        return inspect.signature(function).parameters
    except ValueError:  # of C, without a signature: only the call tells
        return {"keys": inspect.Parameter("keys", inspect.Parameter.VAR_KEYWORD)}


def _is_open(parameters: Mapping[str, inspect.Parameter]) -> bool:
    return any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _located(path: str, name: str) -> Any:
    module, _, attribute = path.rpartition(".")
    try:
        home = _class_at(module) or import_module(module or "builtins")
    except Exception as error:
        absent = error.name if isinstance(error, ModuleNotFoundError) else None
        if absent is not None and f"{module}.".startswith(f"{absent}."):
            raise ConfigurationError(f"{name}._target_={path}: there is no module {absent}") from error
        raise import_failure(f"{name}: {path}", error) from error
    if not module or not hasattr(home, attribute):
        raise ConfigurationError(f"{name}._target_={path}: there is no {attribute} in {module or 'no module'}")
    return getattr(home, attribute)


def _class_at(path: str) -> type | None:
    """The class of this name, whose methods make objects, such as `from_pretrained`; None if it is a module, or nothing."""
    module, _, name = path.rpartition(".")
    if not name[:1].isupper() or not module:
        return None
    found = getattr(import_module(module), name, None)
    return found if inspect.isclass(found) else None


def _typed(value: Any, hint: Any, key: str) -> Any:
    """Convert a value to the annotated type of its argument, if OmegaConf knows that type."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    plain = tuple(kind for kind in kinds if kind in (bool, int, float, str, NoneType))
    if type(value) in kinds or hint is inspect.Parameter.empty or (isinstance(value, Mapping) and not plain):
        return value
    try:  # of `float | Tensor` a config can hold the float
        schema = _schema(hint if plain in ((), (NoneType,)) else Union[plain])  # noqa: UP007
    except (OmegaConfBaseException, TypeError):  # a class of the target's own, or a type without a hash
        return value
    try:
        return OmegaConf.to_container(OmegaConf.merge(schema, {"value": value}))["value"]  # type: ignore[index,call-overload]
    except OmegaConfBaseException as error:
        raise ConfigurationError(wrong_value(error, key)) from error


@functools.cache
def _schema(hint: Any) -> Any:
    """The schema of one value of this type."""
    return OmegaConf.structured(make_dataclass("Argument", [("value", hint)]))


_structured = functools.cache(OmegaConf.structured)


def _component(key: str, node: Any, group_names: Collection[str]) -> dict[str, Any]:
    """Return a component's node with all its keys, checked as far as possible without its object."""
    where = f"components.{key}"
    if not isinstance(node, Mapping):
        raise _unlike(where, node, f"its keys, such as {where}.sharing_pattern; leave it out with ~{where}")
    rest = {k: v for k, v in node.items() if k not in COMPONENT_KEYS}
    if "_target_" in rest:
        bind(rest, where, ("model",))
    elif key not in OWN_COMPONENTS:
        raise ConfigurationError(
            f"{where} has no object: the recipe has {', '.join(OWN_COMPONENTS)}; give any other with "
            f"+{where}={{_target_: <class>, sharing_pattern: <pattern>}}"
        )
    elif rest:
        raise ConfigurationError(
            f"{where}.{next(iter(rest))}: there is no such key; a component has {', '.join(COMPONENT_KEYS)}"
        )
    try:
        keys = resolved(ComponentKeys, {k: v for k, v in node.items() if k in COMPONENT_KEYS})
    except OmegaConfBaseException as error:
        raise ConfigurationError(wrong_value(error, f"{where}.{error.full_key}")) from error
    _check_sharing(key, keys, group_names)
    return keys | rest


def _check_sharing(key: str, keys: Mapping[str, Any], group_names: Collection[str]) -> None:
    pattern, group = keys["sharing_pattern"], keys["process_group_name"]
    if pattern is None:
        if key in OWN_COMPONENTS and key != "dataset":
            raise ConfigurationError(
                f"components.{key}.sharing_pattern=null leaves it to the object, but only the dataset has one: give a pattern"
            )
        return
    check_component(key, **{k: v for k, v in keys.items() if k != "required"})
    _require_group(f"components.{key}.process_group_name", group, group_names)


def _require_group(key: str, group: Any, names: Collection[str]) -> None:
    if isinstance(group, str) and group not in names:
        has = f"has {', '.join(names)}" if names else "has none"
        raise ConfigurationError(
            f"{key}={group}: there is no such process group; the layout chosen with parallel= {has}"
        )


def require_numbers(run: Mapping[str, Any], least: Mapping[str, int], *, seconds: Collection[str] = ()) -> None:
    """Refuse numbers that are too small, or that no seed or counter can hold.

    Args:
        least: dotted key -> the smallest value; null is allowed where the schema allows it.
        seconds: dotted keys of times, which are more than 0.

    Raises:
        ConfigurationError: a number is too small or too large.
    """
    values = by_dotted_key(run)
    for key, minimum in least.items():
        if values[key] is not None and values[key] < minimum:
            raise _unlike(key, values[key], f"at least {minimum}")
        if values[key] is not None and values[key] >= 1 << 63:
            raise _unlike(key, values[key], "less than 2**63")
    for key in seconds:
        if not values[key] > 0:
            raise _unlike(key, values[key], "more than 0 seconds")


def _unlike(key: str, found: Any, expected: str) -> ConfigurationError:
    return ConfigurationError(f"{key}={shown(found)}: expected {expected}")


def require_names(run: Mapping[str, Any]) -> None:
    """Refuse empty names and paths, such as `resume=` without a value."""
    expected = {"resume": "latest, null or the path of a checkpoint", "run_name": "a name"}
    for key, wanted in (expected | dict.fromkeys(("output_dir", "checkpoint_root"), "a folder")).items():
        if key in run and run[key] is not None and not run[key].strip():
            raise ConfigurationError(f"{key}= has no value: it is {wanted}; leave the key out for its default")


def _check_start(run: dict[str, Any]) -> None:
    """Make paths absolute, because ranks may have other working folders. Refuse contradicting or empty keys of where a run begins."""
    require_names(run)
    local_path(run["output_dir"], "output_dir")
    make_absolute(run, "run_dir")
    make_absolute(run, "checkpoint_root", anywhere=True)
    if run["resume"] == "latest" and run["overwrite"]:
        raise ConfigurationError(
            "resume=latest goes on from the newest checkpoint, so overwrite=true has nothing to overwrite: give one of the two"
        )
    if run["resume"] not in (None, "latest"):
        make_absolute(run, "resume", anywhere=True)


def make_absolute(run: dict[str, Any], key: str, *, anywhere: bool = False) -> None:
    """Make a path in the config absolute.

    Args:
        anywhere: it may be an address in an object store.

    Raises:
        ConfigurationError: it is an address, where none may be.
    """
    run[key] = str((as_place if anywhere else local_path)(run[key], key).absolute())
