"""Nested state dict <-> leaves. A leaf is a tensor, or a plain value (`ckpt.state.plain`). Tensors are stored as arrays.

Containers that hold a tensor, and dictionaries, are entered. Each of their leaves has a path, which names the containers on the way, so
that a load makes the same ones, with their entries in the order in which they were given.
"""

from __future__ import annotations

import functools
import json
import re
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ckpt.errors import ConfigurationError, CorruptCheckpointError, ShardingError
from ckpt.format.dtypes import is_dtensor
from ckpt.format.strict_json import Refused, corrupt, fit, parse, refusing
from ckpt.state.plain import (
    FACTORIES,
    IN_JSON,
    NAMESPACES,
    factory_name,
    filled,
    from_json,
    refusing_values,
    to_json,
    with_attributes,
)
from ckpt.state.sharded_tensor import ShardedTensor
from ckpt.state.tensor_classes import (
    as_kind,
    is_kind_step,
    is_ordinary,
    is_wrapper,
    is_wrapper_step,
    kind_step,
    parts_of,
    require_dense,
    wrapped,
)

PathPart = str | int | tuple[int | str, str]
"""Step into a nested state dict: a key of a dictionary, (JSON of a key of another type, "key"), or (position, key or attribute, container)
of another container, such as (0, "list"), ("lr", "Namespace"), ("w", "OrderedDict") and (0, "deque(5)"). "defaultdict(int)/key" says that
the first is the JSON of a key, "OrderedDict/attribute" that it is an attribute and no item.
Steps of tensors: `ckpt.state.tensor_classes`."""
Path = tuple[PathPart, ...]
TensorLeaf = torch.Tensor | ShardedTensor
_TENSORS = (torch.Tensor, ShardedTensor)
_SEQUENCES = (list, tuple, deque)
_DICTIONARIES = (dict, OrderedDict, Counter, defaultdict)
_CONTAINER = re.compile(
    r"(?P<list>list|tuple|deque\((?P<most>[0-9]{0,18})\))|(?P<attribute>Namespace|SimpleNamespace|OrderedDict/attribute)|"
    r"(?:OrderedDict|Counter|defaultdict\((?P<factory>\w*)\))(?:/key)?"
)


@dataclass(slots=True)
class Leaves:
    """A state dict, flattened.

    Attributes:
        tensors: joined key -> tensor object of the state dict.
        plain: joined key -> plain value.
        paths: joined key -> path in the nested dict, in the order of the state dict.
    """

    tensors: dict[str, TensorLeaf]
    plain: dict[str, Any]
    paths: dict[str, Path]


def flatten(state_dict: Mapping[Any, Any], label: str) -> Leaves:
    """Flatten a nested state dict; keys are joined with `.`.

    Enters dictionaries, and lists, tuples, deques and namespaces that hold a tensor at any depth: a list of numbers stays one leaf.

    Args:
        label: name of the component, for messages.

    Raises:
        ShardingError: two leaves have one joined key.
        ConfigurationError: a leaf is neither a tensor nor plain, or a container is not one of Python's own.

    Example:
        >>> flatten({"a": {"b": 1, 2: [3.0, 4]}}, "x").plain
        {'a.b': 1, 'a.2': [3.0, 4]}
    """
    leaves = Leaves({}, {}, {})
    given: Any = state_dict  # an object may return something else, such as None
    if isinstance(given, Mapping) and not isinstance(given, dict):
        given = dict(given)
    if type(given) is dict and not given:
        return leaves
    try:
        if _is_entered(given):
            _flatten_into(leaves, given, "", (), label)
        else:
            _add_leaf(leaves, given, "", (), label)
    except RecursionError:
        raise ConfigurationError(f"{label} is nested too deeply, or holds itself; give it in another form") from None
    return leaves


def unflatten(leaves: Mapping[str, Any], paths: Mapping[str, Path], where: str = "a path in plain.json") -> Any:
    """Rebuild the nested state dict from leaves and their paths, in the order of the paths. `where` names a path in errors.

    Raises:
        CorruptCheckpointError: a path is invalid, or two contradict each other.
    """
    if paths.get("", True) == () and "" in leaves:
        return leaves[""]
    root = _Parts()
    kinds: dict[tuple[int, PathPart], Any] = {}  # a parameter of two names is one
    dictionaries: dict[Path, _Parts] = {}  # those that a path has led into, so that their other entries need no walk
    with refusing_values(where):
        for key, path in paths.items():
            if key not in leaves:
                continue
            value = leaves[key]
            if path and type(path[-1]) is tuple and is_kind_step(path[-1]):
                once, path = (id(value), path[-1]), path[:-1]
                if once not in kinds:
                    kinds[once] = as_kind(value, once[1])  # type: ignore[arg-type]
                value = kinds[once]
                if not path:
                    return value
            here = dictionaries.get(path[:-1])
            if here is not None and type(path[-1]) in (str, int) and not _is_empty(value):
                if path[-1] in here:
                    _require_new(here, path[-1], path)
                here[path[-1]] = value
            elif (here := _put(root, path, value)).container == "dict":
                dictionaries[path[:-1]] = here
        return _close(root)


def steps_into(value: Any, label: str) -> list[tuple[PathPart, Any]]:
    """Return (step, what is there) of a container that a path can lead into; [] for all else.

    Raises:
        ConfigurationError: a key is no plain value; `label` names the container.
    """
    if type(value) in _DICTIONARIES or _is_entered_for_tensors(value):
        return list(_children(value, label))
    return []


def leaves_apart(node: Any, is_apart: Callable[[Any], bool], path: Path = ()) -> list[tuple[Path, Any]]:
    """Return the leaves of a nested state for which `is_apart` holds, and the outermost values beside them that hold none of these.

    Enters the dictionaries of a state dict and of its entries. A container with a key that is no plain value is a leaf.
    """
    try:
        steps = [] if is_apart(node) else steps_into(node, "")
    except ConfigurationError:
        steps = []
    if not steps:
        return [(path, node)]
    found = [leaf for step, inner in steps for leaf in leaves_apart(inner, is_apart, (*path, step))]
    is_entered = len(path) < 2 and isinstance(node, dict)
    return found if is_entered or any(is_apart(leaf) for _, leaf in found) else [(path, node)]


def key_of(step: PathPart) -> Any:
    """Return the key, position or attribute that a step leads to."""
    return step if type(step) in (str, int) else _read_step(step).key


def joined_key(path: Path) -> str:
    """Return the joined key of a path."""
    return ".".join([part if type(part) is str else _step_text(part) for part in without_kind(path)])


def without_kind(path: Path) -> Path:
    """Return a path without the step that tells what a tensor is."""
    return path[:-1] if path and type(path[-1]) is tuple and is_kind_step(path[-1]) else path


def path_to_json(path: Path) -> list[Any]:
    """Convert a path to JSON: keys as they are, [position, key or attribute, container] where that is no dictionary."""
    return [list(part) if type(part) is tuple else part for part in path]


def path_from_json(parts: list[Any]) -> Path:
    """Undo `path_to_json`."""
    return tuple([tuple(part) if type(part) is list else part for part in parts])


def rows_of(leaves: Leaves, label: str, *, paths_of: Collection[str] = ()) -> dict[str, list[Any]]:
    """Return joined key -> [path, value] of plain values as JSON, and [path] of the tensors in `paths_of`, in the order of the paths."""
    rows: dict[str, list[Any]] = {}
    for key, path in leaves.paths.items():
        if key in leaves.plain:
            rows[key] = [path_to_json(path), to_json(leaves.plain[key], f"{label}: {key}")]
        elif key in paths_of:
            rows[key] = [path_to_json(path)]
    return rows


def rows_from_json(data: bytes, where: str) -> dict[str, list[Any]]:
    """Parse a file of plain values into joined key -> [path, value] or [path]. `where` names the file in errors.

    Raises:
        CorruptCheckpointError: invalid file.
    """
    rows = fit(parse(data, where), list[list[Any]], where)
    with refusing(where):
        found = {_joined_key(row): row for row in rows}
        if len(found) != len(rows):
            raise Refused("two of its values have one key")
    return found


def plain_and_paths(
    rows: Mapping[str, Sequence[Any]], where: str, tensors: Collection[str]
) -> tuple[dict[str, Any], dict[str, Path]]:
    """Return the plain values in rows of a file, by joined key, and the paths, those of tensors too.

    Args:
        where: names the file in errors.
        tensors: joined keys of the tensors saved beside it.

    Raises:
        CorruptCheckpointError: a value is none that was saved, or a tensor is not there.
    """
    plain, paths = {}, {}
    for key, row in rows.items():
        paths[key] = path_from_json(row[0])
        if len(row) == 2:
            try:
                plain[key] = from_json(row[1])
            except CorruptCheckpointError as error:
                raise corrupt(where, f"{key!r:.80}: {error}") from error
        elif key not in tensors:
            raise corrupt(where, f"{key!r:.80} should be a tensor, and the manifest has none of that name")
    return plain, paths


def check_plain_file(data: bytes, where: str, tensors: Collection[str]) -> None:
    """Check that a load can build a state dict from a file of plain values.

    Args:
        tensors: joined keys of the tensors saved beside it.

    Raises:
        CorruptCheckpointError: it cannot.
    """
    plain, paths = plain_and_paths(rows_from_json(data, where), where, tensors)
    try:
        unflatten({key: plain.get(key) for key in paths}, paths)
    except CorruptCheckpointError as error:
        raise corrupt(where, str(error)) from error


def root_container(path: Path) -> str:
    """Return the container that a path begins in, such as "dict" or "OrderedDict"; "" of a value that is not in one."""
    if not path or type(path[0]) is not tuple:
        return "dict" if path else ""
    return "" if is_kind_step(path[0]) else container_of(path[0])


def container_of(step: PathPart) -> str:
    """Return the container that a step leads into."""
    return _read_step(step).container


def is_position(step: PathPart) -> bool:
    """Whether a step leads into a list, tuple or deque."""
    of = _container(step[1]) if type(step) is tuple else None
    return of is not None and of[1] == "position"


def rerooted(path: Path, like: Path) -> Path:
    """Return a path whose first step leads into the dictionary that another path begins in, which may be an OrderedDict."""
    container, own = root_container(like), root_container(path)
    if container == own or not {container, own} <= {"dict", "OrderedDict"} or is_attribute(path[:1]):
        return path
    key = _read_step(path[0]).key
    return (_step(key, "") if container == "dict" else _step_of(key, container, ""), *path[1:])


def is_attribute(path: Path) -> bool:
    """Whether a leaf belongs to an attribute of a container, such as the versions of modules that torch keeps at a state dict."""
    return any(type(part) is tuple and str(part[1]).endswith("/attribute") for part in path)


def _joined_key(row: list[Any]) -> str:
    if not 1 <= len(row) <= 2 or type(row[0]) is not list:
        raise Refused(f"{row!r:.80} is neither [path, value] nor [path]")
    return joined_key(path_from_json(row[0]))


class _Step(NamedTuple):
    """A step of a path, understood.

    Attributes:
        container: that it leads into, such as "dict", "tuple", "deque(5)".
        key: position, key or attribute there.
        is_attribute: of a container that has items, too.
    """

    container: str
    key: Any
    is_attribute: bool = False


def _read_step(part: Any) -> _Step:
    if type(part) in (str, int):
        return _Step("dict", part)
    if type(part) is tuple and len(part) == 2 and type(part[1]) is str and (of := _container(part[1])) is not None:
        container, how = of
        if how == "json" and type(part[0]) is str:
            return _Step(container, from_json(json.loads(part[0])))
        if type(part[0]) in _KEY_TYPES[how]:
            return _Step(container, part[0], how == "attribute" and container == "OrderedDict")
    raise Refused(f"{part!r:.80} is not a step of a path")


_KEY_TYPES: dict[str, tuple[type, ...]] = {"position": (int,), "attribute": (str,), "key": (str, int), "json": ()}


@functools.lru_cache(maxsize=4096)
def _container(named: str) -> tuple[str, str] | None:
    """Return the container in the name of a step, and what the step gives of it: "position", "attribute", "key" or "json" of a key."""
    if named == "key":
        return "dict", "json"
    if is_wrapper_step(named):
        return named, "attribute"
    container, _, what = named.partition("/")
    match = _CONTAINER.fullmatch(named)
    if match is None:
        return None
    if match["list"]:
        return container, "position"
    if match["attribute"]:
        return container, "attribute"
    return container, "json" if what else "key"


def _step_text(part: Any) -> str:
    """Convert a step to its part of the joined key."""
    step = _read_step(part)
    first = part[0] if type(part) is tuple else part
    return f"~{first}" if step.is_attribute else str(first)


def _flatten_into(leaves: Leaves, value: Any, start: str, path: Path, label: str) -> None:
    """Add the leaves below a container.

    Args:
        start: prefix of their joined keys: the container's own key and a dot, or "".
    """
    for step, child in _children(value, f"{label}: {start[:-1]}" if start else label):
        key = f"{start}{step if type(step) is not tuple else _step_text(step)}"
        below = (*path, step)
        if type(child) not in IN_JSON and type(child) is not torch.Tensor and _is_entered(child):
            _flatten_into(leaves, child, f"{key}.", below, label)
        else:
            _add_leaf(leaves, child, key, below, label)


def _add_leaf(leaves: Leaves, value: Any, key: str, path: Path, label: str) -> None:
    if key in leaves.paths:
        raise ShardingError(
            f"{label}: two entries of the state dict have the joined key {key!r}; rename one of them: tensors of a checkpoint are "
            "identified by this key"
        )
    if type(value) is torch.Tensor and is_ordinary(value):
        leaves.tensors[key] = value
    elif type(value) not in IN_JSON and isinstance(value, _TENSORS):
        local = value.data if isinstance(value, ShardedTensor) else value
        if local is not None and not is_dtensor(local):
            if not local.is_meta:  # a stand-in for a tensor of a file
                require_dense(local, f"{label}: {key}" if key else label)
            if local is value and (kind := kind_step(local, f"{label}: {key}")) is not None:
                path = (*path, kind)
        leaves.tensors[key] = value
    else:
        to_json(value, f"{label}: {key}" if key else label)
        leaves.plain[key] = value
    leaves.paths[key] = path


def _children(value: Any, label: str) -> Iterable[tuple[PathPart, Any]]:
    kind = type(value)
    if kind is dict:
        return ((_step(key, label), child) for key, child in value.items())
    name = kind.__name__
    if kind in _DICTIONARIES:
        container = f"defaultdict({factory_name(value, label)})" if kind is defaultdict else name
        items = ((_step_of(key, container, label), child) for key, child in value.items())
        attributes = getattr(value, "__dict__", None)
        if attributes and kind is not OrderedDict:
            raise with_attributes(value, label)
        return _with_attributes(items, attributes) if attributes else items
    if kind in NAMESPACES:
        return (((attribute, name), child) for attribute, child in vars(value).items())
    if isinstance(value, torch.Tensor):
        container, parts = parts_of(value, label)
        return (((attribute, container), child) for attribute, child in parts.items())
    container = f"deque({'' if value.maxlen is None else value.maxlen})" if kind is deque else name
    return (((position, container), child) for position, child in enumerate(value))


def _with_attributes(
    items: Iterable[tuple[PathPart, Any]], attributes: Mapping[str, Any]
) -> Iterator[tuple[PathPart, Any]]:
    yield from items
    for name, child in attributes.items():
        yield (name, "OrderedDict/attribute"), child


def _is_entered(value: Any) -> bool:
    """Whether to flatten a value: a dictionary with entries, another container that holds a tensor, a tensor that wraps others."""
    if isinstance(value, torch.Tensor):
        return is_wrapper(value)
    if type(value) in _DICTIONARIES:
        return bool(value) or holds_tensor(list(getattr(value, "__dict__", {}).values()))
    return _is_entered_for_tensors(value) and holds_tensor(value)


def _is_entered_for_tensors(value: Any) -> bool:
    """Whether a value is a sequence, or a namespace whose attributes have names that a path can hold."""
    if type(value) in NAMESPACES:
        return all(type(name) is str for name in vars(value))
    return type(value) in _SEQUENCES


def _step(key: Any, label: str) -> PathPart:
    return key if type(key) in (str, int) else (_odd(key, label), "key")


def _step_of(key: Any, container: str, label: str) -> PathPart:
    return (key, container) if type(key) in (str, int) else (_odd(key, label), f"{container}/key")


def _odd(key: Any, label: str) -> str:
    return json.dumps(to_json(key, f"{label}: a key"))


def holds_tensor(value: Any) -> bool:
    """Whether a value is a tensor, or a container that `flatten` enters with one at any depth."""
    if isinstance(value, _TENSORS):
        return True
    if type(value) in _DICTIONARIES:
        return any(holds_tensor(child) for child in value.values())
    return _is_entered_for_tensors(value) and any(holds_tensor(child) for _, child in _children(value, ""))


class _Parts(dict[Any, Any]):
    """A container under construction: key, position or attribute -> value.

    Attributes:
        container: its kind; "": not known yet.
        attributes: of a dictionary; None: it has none.
    """

    container = ""
    attributes: dict[str, Any] | None = None


def _put(root: _Parts, path: Path, value: Any) -> _Parts:
    """Add a value; return the container that it is in."""
    here = root
    for at, part in enumerate(path, start=1):
        step = _read_step(part)
        if here.container not in ("", step.container) or (here and not here.container and step.container != "dict"):
            raise TypeError(f"{list(path)!r:.80} leads into a {step.container}, where a {here.container or 'dict'} is")
        here.container = step.container
        entries: dict[Any, Any] = here
        if step.is_attribute:
            entries = here.attributes = here.attributes or {}
        if at == len(path):
            if _is_empty(value):  # on one rank; others may have entries there
                entries.setdefault(step.key, value)
            else:
                _require_new(entries, step.key, path)
                entries[step.key] = value
            return here
        if step.key not in entries or _is_empty(entries[step.key]):
            entries[step.key] = _Parts()
        here = entries[step.key]
        if type(here) is not _Parts:
            raise TypeError(f"{list(path)!r:.80} leads through a value")
    return here


def _require_new(here: Mapping[Any, Any], key: Any, path: Path) -> None:
    """Refuse a second value at a place; an empty dictionary there is none."""
    if key in here and not _is_empty(here[key]):
        raise TypeError(f"{list(path)!r:.80} is the place of two values")


def _is_empty(value: Any) -> bool:
    """Whether a value is a dictionary without entries."""
    return type(value) in _DICTIONARIES and not value


_NAMESPACE_OF: dict[str, type[Any]] = {kind.__name__: kind for kind in NAMESPACES}


def _close(value: Any) -> Any:
    """Make the container of these parts, and those below."""
    if type(value) is not _Parts:
        return value
    entries = {key: _close(child) for key, child in value.items()}
    if value.container in ("", "dict"):
        return entries
    if is_wrapper_step(value.container):
        return wrapped(value.container, entries)
    match = _CONTAINER.fullmatch(value.container)
    if match is not None and match["list"]:
        items = [entries[position] for position in sorted(entries)]
        if match["most"] is not None:
            return deque(items, int(match["most"]) if match["most"] else None)
        return tuple(items) if value.container == "tuple" else items
    if value.container in _NAMESPACE_OF:
        return filled(_NAMESPACE_OF[value.container](), entries)
    if match is not None and match["factory"] is not None:
        return defaultdict(FACTORIES[match["factory"]] if match["factory"] else None, entries)
    if value.container == "Counter":
        return Counter(entries)
    return filled(OrderedDict(entries), {name: _close(child) for name, child in (value.attributes or {}).items()})
