"""Nested state dict <-> leaves. A leaf is a tensor, or a plain value that JSON can hold without loss.

Plain values (numbers, strings, lists, RNG states) are stored as typed JSON, which keeps tuples, bytes, integer keys and non-finite
floats. Tensors are stored as arrays. All other values are refused: nothing is pickled.
"""

from __future__ import annotations

import argparse
import base64
import enum
import functools
import io
import json
import logging
import math
import re
import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch

from ckpt.errors import ConfigurationError, CorruptCheckpointError, ShardingError, sentence
from ckpt.format.strict_json import Refused, Shape, corrupt, fit, parse, refusing
from ckpt.state.sharded_tensor import ShardedTensor

if TYPE_CHECKING:
    from ckpt.format.unpickling import UnknownObject

_log = logging.getLogger("ckpt")

PathPart = str | int | tuple[int | str, str]
"""Step into a nested state dict: a dictionary key, (position, "list" | "tuple"), (attribute, "Namespace" | "SimpleNamespace"), or
(JSON of a key of another type, "key")."""
Path = tuple[PathPart, ...]
TensorLeaf = torch.Tensor | ShardedTensor
_TENSORS = (torch.Tensor, ShardedTensor)


@dataclass(slots=True)
class Leaves:
    """A state dict, flattened.

    Attributes:
        tensors: joined key -> tensor object of the state dict.
        plain: joined key -> plain value.
        paths: joined key -> path in the nested dict.
    """

    tensors: dict[str, TensorLeaf]
    plain: dict[str, Any]
    paths: dict[str, Path]


def flatten(state_dict: Mapping[Any, Any], label: str) -> Leaves:
    """Flatten a nested state dict; keys are joined with `.`.

    Enters dictionaries, and lists, tuples and namespaces that hold a tensor at any depth: a list of numbers stays one leaf.

    Args:
        label: name of the component, for messages.

    Raises:
        ShardingError: two leaves have one joined key.
        ConfigurationError: a leaf is neither a tensor nor plain.

    Example:
        >>> flatten({"a": {"b": 1, 2: [3.0, 4]}}, "x").plain
        {'a.b': 1, 'a.2': [3.0, 4]}
    """
    leaves = Leaves({}, {}, {})
    given: Any = state_dict  # an object may return something else, such as None
    if isinstance(given, Mapping) or _is_entered(given):
        _flatten_into(leaves, given, "", (), label)
    else:
        _add_leaf(leaves, given, "", (), label)
    return leaves


def unflatten(leaves: Mapping[str, Any], paths: Mapping[str, Path]) -> dict[Any, Any]:
    """Rebuild the nested dict from leaves and their paths.

    Raises:
        CorruptCheckpointError: a path is invalid, or two contradict each other.
    """
    root: dict[Any, Any] = {}
    with _refusing("a path in plain.json"):
        for key, value in leaves.items():
            path = paths[key]
            if len(path) == 1 and type(path[0]) is str and type(value) is not dict:  # a fast path, for most tensors
                if path[0] in root:
                    _require_new(root, path[0], path)
                root[path[0]] = value
            else:
                _put(root, path, value)
        return {key: _close(child) if isinstance(child, dict) else child for key, child in root.items()}


def path_to_json(path: Path) -> list[Any]:
    """Convert a path to JSON: keys as they are, [position or attribute, kind] for an element of a list, tuple or namespace."""
    return [list(part) if type(part) is tuple else part for part in path]


def path_from_json(parts: list[Any]) -> Path:
    """Undo `path_to_json`."""
    return tuple([tuple(part) if type(part) is list else part for part in parts])


def rows_of(leaves: Leaves, label: str, *, paths_of: Collection[str] = ()) -> dict[str, list[Any]]:
    """Return joined key -> [path, value] of plain values as JSON, and [path] of the tensors in `paths_of`."""
    rows = {
        key: [path_to_json(leaves.paths[key]), to_json(value, f"{label}: {key}")] for key, value in leaves.plain.items()
    }
    return rows | {key: [path_to_json(leaves.paths[key])] for key in paths_of}


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


def _joined_key(row: list[Any]) -> str:
    if not 1 <= len(row) <= 2 or type(row[0]) is not list:
        raise Refused(f"{row!r:.80} is neither [path, value] nor [path]")
    return ".".join([part if type(part) is str else _step_text(part) for part in row[0]])


def _step_text(part: Any) -> str:
    """Convert a step that is not a string to its part of the joined key."""
    if type(part) is int:
        return str(part)
    match part:
        case [step, "list" | "tuple"] if type(step) is int:
            return str(step)
        case [str() as step, "key" | "Namespace" | "SimpleNamespace"]:
            return step
    raise Refused(f"{part!r:.80} is not a step of a path")


def to_json(value: Any, label: str) -> Any:
    """Return JSON that `from_json` turns back into an equal value of equal type.

    Raises:
        ConfigurationError: the value holds an object that is not plain, or an enum member that a load would not find; the message
            names it by `label` and the path below.
    """
    try:
        return _json(value, label)
    except ConfigurationError:
        leaf, steps = _refused_in(value)
        return _json(leaf, label + steps)


def _refused_in(value: Any) -> tuple[Any, str]:
    """Return the innermost value that `_json` refuses, and its path, such as `.sub[0].x`."""
    for step, inner in _steps_into(value):
        try:
            _json(inner, "")
        except ConfigurationError:
            leaf, steps = _refused_in(inner)
            return leaf, step + steps
    return value, ""


def _steps_into(value: Any) -> Iterator[tuple[str, Any]]:
    if type(value) in _NAMESPACES:
        value = vars(value)
    if isinstance(value, dict):
        yield from ((f".{key}", inner) for key, inner in value.items())
    elif type(value) in (list, tuple, set, frozenset):
        yield from ((f"[{number}]", inner) for number, inner in enumerate(value))


def _json(value: Any, label: str) -> Any:
    if type(value) in _EXACT_IN_JSON:
        return value
    if isinstance(value, enum.Enum):
        return {"~enum": _enum_to_json(value, label)}
    if isinstance(value, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"~float": repr(value)}
    if type(value) is list:
        return [_json(item, label) for item in value]
    if type(value) is tuple:
        return {"~tuple": [_json(item, label) for item in value]}
    if type(value) is torch.Size:
        return {"~Size": list(value)}
    if type(value) in (set, frozenset):  # sorted, so that all ranks write one order
        return {f"~{type(value).__name__}": sorted((_json(item, label) for item in value), key=json.dumps)}
    if type(value) in _NAMESPACES:
        return {f"~{type(value).__name__}": _json(vars(value), label)}
    if isinstance(value, torch.dtype):
        return {"~dtype": str(value).removeprefix("torch.")}
    if type(value) is io.BytesIO:
        return {"~BytesIO": base64.b64encode(value.getvalue()).decode("ascii")}
    if isinstance(value, dict):
        if all(type(key) is str and not key.startswith("~") for key in value):
            return {key: _json(item, label) for key, item in value.items()}
        return {"~dict": [[_json(key, label), _json(item, label)] for key, item in value.items()]}
    if isinstance(value, bytes):
        return {"~bytes": base64.b64encode(value).decode("ascii")}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode("ascii")
        return {"~ndarray": [value.dtype.str, list(value.shape), data]}
    if isinstance(value, np.generic) and value.dtype.kind in "biufc":
        return {"~scalar": [value.dtype.str, base64.b64encode(value.tobytes()).decode("ascii")]}
    if type(value) is complex:
        return {"~complex": [repr(value.real), repr(value.imag)]}
    if type(value) in _UNKNOWN_ENUMS:
        return {"~enum": [*_UNKNOWN_ENUMS[type(value)], value.args[0]]}
    raise ConfigurationError(
        f"{label} is a {type(value).__module__}.{type(value).__qualname__}, which is neither a tensor nor plain (None, bool, number, "
        "str, bytes, list, tuple, set, dict, namespace, enum member, torch.dtype, NumPy array). Give it as one of these, "
        "or leave it out; nothing is pickled."
    )


def from_json(value: Any) -> Any:
    """Undo `to_json`. Returns an `UnknownObject` for an enum member that this process does not have.

    Raises:
        CorruptCheckpointError: `to_json` does not produce such a value.
    """
    if type(value) in _SAME_IN_JSON:
        return value
    with _refusing("a plain value"):
        return _value(value)


def _value(value: Any) -> Any:
    if isinstance(value, list):
        return [_value(item) for item in value]
    if not isinstance(value, dict):
        return value
    tags = [key for key in value if key[:1] == "~"]
    if not tags:
        return {key: _value(item) for key, item in value.items()}
    if len(value) > 1 or tags[0] not in _FROM_TAG:
        raise Refused(f"{tags[0]!r:.40} is not a known kind of plain value")
    return _FROM_TAG[tags[0]](value[tags[0]])


@contextmanager
def _refusing(label: str) -> Iterator[None]:
    """Turn errors of rebuilding saved values into a `CorruptCheckpointError`."""
    try:
        yield
    except RecursionError:
        raise CorruptCheckpointError(f"{label} is nested too deeply") from None
    except (msgspec.MsgspecError, *_INVALID_DATA) as error:
        if isinstance(error, CorruptCheckpointError):
            raise
        reason = str(error) if isinstance(error, Refused) else sentence(error)
        raise CorruptCheckpointError(f"{label} is invalid: {reason}") from error


def _enum_to_json(member: enum.Enum, label: str) -> list[Any]:
    """Return [module, class, name] of a member; for combined flags, such as A | B, the value instead of the name."""
    kind = type(member)
    given = int(member.value) if isinstance(member, enum.Flag) and member.name not in kind.__members__ else member.name
    if _enum_member(kind.__module__, kind.__qualname__, given) is not member:
        raise ConfigurationError(
            f"{label} is {given!r} of the enum {kind.__qualname__}, which a load would not find under that name in module "
            f"{kind.__module__}; define the enum at the top level of its module, under its own name, or give the member's value"
        )
    return [kind.__module__, kind.__qualname__, given]


def _enum_from_json(data: Any) -> enum.Enum | UnknownObject:
    module, qualname, given = msgspec.convert(data, tuple[str, str, str | int])
    member = _enum_member(module, qualname, given)
    return _unknown_member(module, qualname, given) if member is None else member


def _enum_member(module: str, qualname: str, given: str | int) -> enum.Enum | None:
    """Return the member of this name, or the flags of this value, of a class that this process has imported; None if not found.

    Loading a checkpoint must not import anything. So this reads `__dict__`: a module's `__getattr__` may import.
    """
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, "__dict__", {}).get(part)
    if not (isinstance(found, type) and issubclass(found, enum.Enum)):
        return None
    if isinstance(given, str):
        return found.__members__.get(given)
    if not issubclass(found, enum.Flag):
        return None
    try:
        flags = found(given)
    except ValueError:  # the class has lost a bit
        return None
    return flags if flags.value == given else None  # some classes drop unknown bits silently


@functools.cache  # one object for equal members, which may be keys of a dictionary
def _unknown_member(module: str, qualname: str, given: str | int) -> UnknownObject:
    """Make the substitute for a member of an enum that this process does not have."""
    return _unknown_enum(module, qualname)(given)


@functools.cache
def _unknown_enum(module: str, qualname: str) -> type[UnknownObject]:
    """Make the substitute for an enum class, and log a warning."""
    from ckpt.format.unpickling import UnknownObject

    _log.warning(
        "the checkpoint holds members of the enum %s of %s, which this process does not have; an inert UnknownObject stands in for "
        "each. Import %s before the load, in a version that has it, to get the members.",
        qualname, module, module,
    )  # fmt: skip
    body = {"name": f"{module}.{qualname}", "__module__": module, "__reduce__": _reduce_unknown}
    made = type(qualname.rpartition(".")[2], (UnknownObject,), body)
    _UNKNOWN_ENUMS[made] = module, qualname
    return made


def _reduce_unknown(member: UnknownObject) -> tuple[Any, ...]:
    """Copy and pickle a substitute as its name, to look it up again."""
    return from_json, (to_json(member, "an enum member"),)


def _filled(namespace: Any, attributes: Mapping[Any, Any]) -> Any:
    """Set a namespace's attributes. Its constructor refuses names such as `self`, or that are not strings."""
    vars(namespace).update(attributes)
    return namespace


def _attributes(data: Any) -> dict[Any, Any]:
    attributes = _value(data)
    if type(attributes) is not dict:
        raise Refused("the attributes of a namespace should be a dictionary")
    return attributes


def _items(data: Any) -> list[Any]:
    """Rebuild the values of a list."""
    return [_value(item) for item in msgspec.convert(data, list)]


def _pairs(data: Any) -> dict[Any, Any]:
    return dict(map(_items, msgspec.convert(data, list)))


def _bytes(data: Any) -> bytes:
    """Parse base64."""
    return msgspec.convert(data, bytes)


def _number_type(name: Any) -> np.dtype[Any]:
    """Parse a NumPy type of plain numbers: others may hold objects, or have any length."""
    if type(name) is not str or not re.fullmatch(r"[<>|=][biufc][0-9]{1,2}", name):
        raise Refused(f"{name!r:.40} is not a numeric data type")
    return np.dtype(name)


def _array(data: Any) -> np.ndarray[Any, Any]:
    name, shape, content = msgspec.convert(data, tuple[str, Shape, bytes])
    return np.frombuffer(content, _number_type(name)).reshape(shape).copy()


def _scalar(data: Any) -> Any:
    name, content = msgspec.convert(data, tuple[str, bytes])
    [scalar] = np.frombuffer(content, _number_type(name))
    return scalar


def _complex(data: Any) -> complex:
    real, imaginary = msgspec.convert(data, tuple[str, str])
    return complex(float(real), float(imaginary))


def _dtype(name: Any) -> torch.dtype:
    """Look up a data type by name in a table: torch's attributes include functions and modules."""
    found = _dtypes().get(name) if type(name) is str else None
    if found is None:
        raise Refused(f"{name!r:.40} is not a torch.dtype of this version of torch")
    return found


@functools.cache
def _dtypes() -> Mapping[str, torch.dtype]:
    return {str(one).removeprefix("torch."): one for one in vars(torch).values() if isinstance(one, torch.dtype)}


_UNKNOWN_ENUMS: dict[type[UnknownObject], tuple[str, str]] = {}
"""Substitutes of enum classes that this process does not have: substitute class -> (module, class) of the enum."""
_NAMESPACES = (argparse.Namespace, types.SimpleNamespace)
_NAMESPACE_OF: dict[str, type[Any]] = {kind.__name__: kind for kind in _NAMESPACES}
_INVALID_DATA = (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError)
_EXACT_IN_JSON = frozenset((str, int, bool, type(None)))
_SAME_IN_JSON = _EXACT_IN_JSON | {float}
_NOT_FINITE = {repr(number): number for number in (math.nan, math.inf, -math.inf)}
_FROM_TAG: dict[str, Callable[[Any], Any]] = {
    "~float": lambda data: _NOT_FINITE[data],
    "~tuple": lambda data: tuple(_items(data)),
    "~dict": _pairs,
    "~bytes": _bytes,
    "~ndarray": _array,
    "~scalar": _scalar,
    "~set": lambda data: set(_items(data)),
    "~frozenset": lambda data: frozenset(_items(data)),
    "~Size": lambda data: torch.Size(msgspec.convert(data, list[int])),
    "~Namespace": lambda data: _filled(argparse.Namespace(), _attributes(data)),
    "~SimpleNamespace": lambda data: _filled(types.SimpleNamespace(), _attributes(data)),
    "~dtype": _dtype,
    "~enum": _enum_from_json,
    "~BytesIO": lambda data: io.BytesIO(_bytes(data)),
    "~complex": _complex,
}


def _flatten_into(leaves: Leaves, value: Any, start: str, path: Path, label: str) -> None:
    """Add the leaves below a dictionary, list or tuple.

    Args:
        start: prefix of their joined keys: the container's own key and a dot, or "".
    """
    for step, child in _children(value):
        key = f"{start}{step[0] if type(step) is tuple else step}"
        below = (*path, step)
        if type(child) not in _SAME_IN_JSON and not isinstance(child, _TENSORS) and _is_entered(child):
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
        to_json(value, f"{label}: {key}")
        leaves.plain[key] = value


def _children(value: Any) -> Iterable[tuple[PathPart, Any]]:
    if isinstance(value, Mapping):
        return ((_step(key), child) for key, child in value.items())
    if type(value) in _NAMESPACES:
        kind = type(value).__name__
        return (((name, kind), child) for name, child in vars(value).items())
    kind = "tuple" if isinstance(value, tuple) else "list"
    return (((position, kind), child) for position, child in enumerate(value))


def _is_entered(value: Any) -> bool:
    """Whether to flatten a value that is no tensor: a dictionary with entries, or a list or namespace that holds a tensor."""
    if isinstance(value, (dict, Mapping)):  # dict first: Mapping's own check is slow
        return bool(value)
    return _is_entered_for_tensors(value) and _holds_tensor(value)


def _is_entered_for_tensors(value: Any) -> bool:
    """Whether a value is a list, a tuple, or a namespace whose attributes have names that a path can hold."""
    if type(value) in _NAMESPACES:
        return all(type(name) is str for name in vars(value))
    return isinstance(value, list | tuple)


def _step(key: Any) -> PathPart:
    return key if type(key) in (str, int) else (json.dumps(to_json(key, "a state dict's key")), "key")


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, _TENSORS):
        return True
    if isinstance(value, Mapping):
        return any(_holds_tensor(child) for child in value.values())
    return _is_entered_for_tensors(value) and any(_holds_tensor(child) for _, child in _children(value))


class _Parts(dict[int | str, Any]):
    """List, tuple or namespace under construction: position or attribute -> value."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind


def _put(root: dict[Any, Any], path: Path, value: Any) -> None:
    if not path:
        return
    here: dict[Any, Any] = root
    *above, last = map(_key_of, path)
    for key, below in zip(above, path[1:], strict=True):
        if key not in here:
            here[key] = _Parts(below[1]) if isinstance(below, tuple) and below[1] != "key" else {}
        here = here[key]
        if not isinstance(here, dict):
            raise TypeError(f"{list(path)!r:.80} leads through a value")
    if type(value) is dict and not value:  # empty on one rank; others may have entries there
        here.setdefault(last, {})
    else:
        _require_new(here, last, path)
        here[last] = value


def _require_new(here: Mapping[Any, Any], key: Any, path: Path) -> None:
    """Refuse a second value at a place; an empty dict there is none."""
    if key in here and here[key] != {}:
        raise TypeError(f"{list(path)!r:.80} is the place of two values")


def _key_of(part: PathPart) -> Any:
    if not isinstance(part, tuple):
        return part
    return from_json(json.loads(str(part[0]))) if part[1] == "key" else part[0]


def _close(value: Any) -> Any:
    if isinstance(value, _Parts) and value.kind in _NAMESPACE_OF:
        if not all(type(name) is str for name in value):
            raise TypeError(f"{value.kind} has attributes that are not names: {list(value)!r:.80}")
        return _filled(_NAMESPACE_OF[value.kind](), {name: _close(child) for name, child in value.items()})
    if isinstance(value, _Parts):
        items = [_close(value[position]) for position in sorted(value)]
        return tuple(items) if value.kind == "tuple" else items
    return {key: _close(child) for key, child in value.items()} if type(value) is dict else value
