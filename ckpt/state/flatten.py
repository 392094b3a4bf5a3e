"""Nested state dict <-> leaves. A leaf is a tensor, or a plain value (`ckpt.state.plain`). Tensors are stored as arrays.

Containers that hold a tensor, and dictionaries, are entered. Each of their leaves has a path, which names the containers on the way, so
that a load makes the same ones, with their entries in the order in which they were given.
"""

from __future__ import annotations

import functools
import json
import re
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ckpt.errors import ConfigurationError, CorruptCheckpointError, ShardingError
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
)
from ckpt.state.sharded_tensor import ShardedTensor

PathPart = str | int | tuple[int | str, str]
"""Step into a nested state dict: a key of a dictionary, (JSON of a key of another type, "key"), or (position, key or attribute, container)
of another container, such as (0, "list"), ("lr", "Namespace"), ("w", "OrderedDict") and (0, "deque(5)"). "defaultdict(int)/key" says that
the first is the JSON of a key, "OrderedDict/attribute" that it is an attribute and no item."""
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


def unflatten(leaves: Mapping[str, Any], paths: Mapping[str, Path]) -> Any:
    """Rebuild the nested state dict from leaves and their paths, in the order of the paths.

    Raises:
        CorruptCheckpointError: a path is invalid, or two contradict each other.
    """
    if paths.get("", True) == () and "" in leaves:
        return leaves[""]
    root = _Parts()
    with refusing_values("a path in plain.json"):
        for key, path in paths.items():
            if key not in leaves:
                continue
            value = leaves[key]
            if len(path) == 1 and type(path[0]) is str and type(value) is not dict:  # a fast path, for most tensors
                if path[0] in root:
                    _require_new(root, path[0], path)
                root[path[0]] = value
            else:
                _put(root, path, value)
        return _close(root)


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
    return _read_step(path[0]).container if path else ""


def is_attribute(path: Path) -> bool:
    """Whether a leaf belongs to an attribute of a container, such as the versions of modules that torch keeps at a state dict."""
    return any(type(part) is tuple and str(part[1]).endswith("/attribute") for part in path)


def _joined_key(row: list[Any]) -> str:
    if not 1 <= len(row) <= 2 or type(row[0]) is not list:
        raise Refused(f"{row!r:.80} is neither [path, value] nor [path]")
    return ".".join([part if type(part) is str else _step_text(tuple(part) if type(part) is list else part) for part in row[0]])


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
            return _Step(container, part[0], how == "attribute" and container not in _NAMESPACE_OF)
    raise Refused(f"{part!r:.80} is not a step of a path")


_KEY_TYPES: dict[str, tuple[type, ...]] = {"position": (int,), "attribute": (str,), "key": (str, int), "json": ()}


@functools.lru_cache(maxsize=4096)
def _container(named: str) -> tuple[str, str] | None:
    """Return the container in the name of a step, and what the step gives of it: "position", "attribute", "key" or "json" of a key."""
    if named == "key":
        return "dict", "json"
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
        if type(child) not in IN_JSON and not isinstance(child, _TENSORS) and _is_entered(child):
            _flatten_into(leaves, child, f"{key}.", below, label)
        else:
            _add_leaf(leaves, child, key, below, label)


def _add_leaf(leaves: Leaves, value: Any, key: str, path: Path, label: str) -> None:
    if key in leaves.paths:
        raise ShardingError(
            f"{label}: two entries of the state dict have the joined key {key!r}; rename one of them: tensors of a checkpoint are "
            "identified by this key"
        )
    leaves.paths[key] = path
    if isinstance(value, _TENSORS):
        leaves.tensors[key] = value
    else:
        to_json(value, f"{label}: {key}" if key else label)
        leaves.plain[key] = value


def _children(value: Any, label: str) -> Iterable[tuple[PathPart, Any]]:
    kind = type(value)
    if kind is dict:
        return ((_step(key), child) for key, child in value.items())
    name = kind.__name__
    if kind in _DICTIONARIES:
        container = f"defaultdict({factory_name(value, label)})" if kind is defaultdict else name
        items = ((_step_of(key, container), child) for key, child in value.items())
        attributes = getattr(value, "__dict__", None)
        return _with_attributes(items, attributes) if attributes else items
    if kind in NAMESPACES:
        return (((attribute, name), child) for attribute, child in vars(value).items())
    container = f"deque({'' if value.maxlen is None else value.maxlen})" if kind is deque else name
    return (((position, container), child) for position, child in enumerate(value))


def _with_attributes(
    items: Iterable[tuple[PathPart, Any]], attributes: Mapping[str, Any]
) -> Iterator[tuple[PathPart, Any]]:
    yield from items
    for name, child in attributes.items():
        yield (name, "OrderedDict/attribute"), child


def _is_entered(value: Any) -> bool:
    """Whether to flatten a value that is no tensor: a dictionary with entries, or another container that holds a tensor."""
    if type(value) in _DICTIONARIES:
        return bool(value)
    return _is_entered_for_tensors(value) and _holds_tensor(value)


def _is_entered_for_tensors(value: Any) -> bool:
    """Whether a value is a sequence, or a namespace whose attributes have names that a path can hold."""
    if type(value) in NAMESPACES:
        return all(type(name) is str for name in vars(value))
    return type(value) in _SEQUENCES


def _step(key: Any) -> PathPart:
    return key if type(key) in (str, int) else (_odd(key), "key")


def _step_of(key: Any, container: str) -> PathPart:
    return (key, container) if type(key) in (str, int) else (_odd(key), f"{container}/key")


def _odd(key: Any) -> str:
    return json.dumps(to_json(key, "a state dict's key"))


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, _TENSORS):
        return True
    if type(value) in _DICTIONARIES:
        return any(_holds_tensor(child) for child in value.values())
    return _is_entered_for_tensors(value) and any(_holds_tensor(child) for _, child in _children(value, ""))


class _Parts(dict[Any, Any]):
    """A container under construction: key, position or attribute -> value.

    Attributes:
        container: its kind; "": not known yet.
        attributes: of a dictionary.
    """

    def __init__(self) -> None:
        super().__init__()
        self.container = ""
        self.attributes: dict[str, Any] = {}


def _put(root: _Parts, path: Path, value: Any) -> None:
    here: Any = root
    for at, part in enumerate(path, start=1):
        step = _read_step(part)
        if here.container not in ("", step.container) or (here and not here.container and step.container != "dict"):
            raise TypeError(f"{list(path)!r:.80} leads into a {step.container}, where a {here.container or 'dict'} is")
        here.container = step.container
        entries = here.attributes if step.is_attribute else here
        if at == len(path):
            if _is_empty(value):  # on one rank; others may have entries there
                entries.setdefault(step.key, value)
            else:
                _require_new(entries, step.key, path)
                entries[step.key] = value
            return
        if step.key not in entries or _is_empty(entries[step.key]):
            entries[step.key] = _Parts()
        here = entries[step.key]
        if type(here) is not _Parts:
            raise TypeError(f"{list(path)!r:.80} leads through a value")


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
    return filled(OrderedDict(entries), {name: _close(child) for name, child in value.attributes.items()})
