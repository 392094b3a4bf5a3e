"""Plain values <-> JSON, with value, type and order kept. What is not of a kind in `KINDS` is refused by name: nothing is pickled.

JSON itself holds None, booleans, integers, finite floats, strings, lists, and dictionaries whose keys are strings. Anything else is an
object with one key, a tag: {"~tuple": [1, 2]}.
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
import uuid
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from ckpt.errors import CheckpointError, ConfigurationError, CorruptCheckpointError, sentence
from ckpt.format.strict_json import Refused, Shape, fraction
from ckpt.format.unknown import UnknownObject

_log = logging.getLogger("ckpt")

NAMESPACES = (argparse.Namespace, types.SimpleNamespace)
IN_JSON = frozenset((str, int, bool, type(None), float))
"""Types that JSON has, but for floats that are not finite."""
FACTORIES: dict[str, Any] = {
    kind.__name__: kind
    for kind in (list, dict, set, int, float, str, tuple, bool, bytes, complex, frozenset, OrderedDict, Counter, deque)
}
"""What a `defaultdict` makes of a missing key, by name; beside None."""

_Write = Callable[[Any, str], Any]
_NOT_FINITE = {repr(number): number for number in (math.nan, math.inf, -math.inf)}
_INVALID_DATA = (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, ArithmeticError)
_NUMPY_KINDS = "biufcSUmM"
_NUMPY_TYPE = re.compile(r"[<>|=](?:[biufc][0-9]{1,2}|[SU][0-9]{1,9}|[mM]8(?:\[[0-9]{0,9}[A-Za-z]{1,7}\])?)")
_UNKNOWN_ENUMS: dict[type[UnknownObject], tuple[str, str]] = {}
"""Substitutes of enum classes that this process does not have: substitute class -> (module, class) of the enum."""


class Kind(NamedTuple):
    """How values of a type are held in JSON.

    Attributes:
        type: exact; a subclass is another type.
        write: returns the JSON below the tag; given the value, and its name for errors.
        read: undoes it.
        tag: without its `~`.
    """

    type: type[Any]
    write: _Write
    read: Callable[[Any], Any]
    tag: str


def to_json(value: Any, label: str) -> Any:
    """Return JSON that `from_json` turns back into an equal value of equal type, in the same order.

    Raises:
        ConfigurationError: the value holds an object that is not plain, or an enum member that a load would not find; the message
            names it by `label` and the path below.
    """
    try:
        return _json(value, label)
    except ConfigurationError:
        leaf, steps = _refused_in(value)
        return _json(leaf, label + steps)
    except RecursionError:
        raise ConfigurationError(f"{label} is nested too deeply, or holds itself; give it in another form") from None


def from_json(value: Any) -> Any:
    """Undo `to_json`. Returns an `UnknownObject` for an enum member that this process does not have.

    Raises:
        CorruptCheckpointError: `to_json` does not produce such a value.
    """
    if type(value) in IN_JSON:
        return value
    with refusing_values("a plain value"):
        return _value(value)


@contextmanager
def refusing_values(label: str) -> Iterator[None]:
    """Turn errors of rebuilding saved values into a `CorruptCheckpointError`."""
    try:
        yield
    except RecursionError:
        raise CorruptCheckpointError(f"{label} is nested too deeply") from None
    except (msgspec.MsgspecError, *_INVALID_DATA) as error:
        if isinstance(error, CheckpointError):
            raise
        reason = str(error) if isinstance(error, Refused) else sentence(error)
        raise CorruptCheckpointError(f"{label} is invalid: {reason}") from error


def filled(namespace: Any, attributes: Mapping[Any, Any]) -> Any:
    """Set attributes. The constructor of a namespace refuses names such as `self`, or that are not strings."""
    vars(namespace).update(attributes)
    return namespace


def imported(module: str, qualname: str) -> Any:
    """Return what a module that this process has imported holds under a name; None if there is nothing.

    Loading a checkpoint must not import anything. So this reads `__dict__`: a module's `__getattr__` may import.
    """
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, "__dict__", {}).get(part)
    return found


def factory_name(value: defaultdict[Any, Any], label: str) -> str:
    """Return the name in `FACTORIES` of what makes the missing values of a dictionary, "" for None.

    Raises:
        ConfigurationError: it has none.
    """
    factory = value.default_factory
    name = "" if factory is None else getattr(factory, "__name__", "")
    if factory is not FACTORIES.get(name):
        raise ConfigurationError(
            f"{label} is a defaultdict that makes its values by {factory!r:.80}; only None and types of Python are kept as such "
            f"({', '.join(FACTORIES)}): give it as a dict"
        )
    return name


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
    if type(value) in NAMESPACES:
        value = vars(value)
    if type(value) in (dict, OrderedDict, Counter, defaultdict):
        yield from ((f".{key}", inner) for key, inner in value.items())
    elif type(value) in (list, tuple, set, frozenset, deque):
        yield from ((f"[{number}]", inner) for number, inner in enumerate(value))


def _json(value: Any, label: str) -> Any:
    kind = type(value)
    if kind is float:
        return value if math.isfinite(value) else {"~float": repr(value)}
    if kind in IN_JSON:
        return value
    if kind is list:
        return [_json(item, label) for item in value]
    if kind is dict and all(type(key) is str and not key.startswith("~") for key in value):
        return {key: _json(item, label) for key, item in value.items()}
    known = _BY_TYPE.get(kind)
    if known is not None:
        return {f"~{known.tag}": known.write(value, label)}
    if isinstance(value, enum.Enum):
        return {"~enum": _enum_to_json(value, label)}
    if isinstance(value, np.generic) and value.dtype.kind in _NUMPY_KINDS:
        return {"~scalar": [value.dtype.str, _base64(value.tobytes(), label)]}
    if kind in _UNKNOWN_ENUMS:
        return {"~enum": [*_UNKNOWN_ENUMS[kind], value.args[0]]}
    raise _refusal(value, label)


def _refusal(value: Any, label: str) -> ConfigurationError:
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return ConfigurationError(
            f"{label} is a tensor inside of a set, or one that is a key: tensors are kept in lists, tuples, deques, namespaces, and as "
            "values of dictionaries"
        )
    advice = "Give it as one of these, or leave it out; nothing is pickled."
    if kind.__module__.partition(".")[0] == "omegaconf":
        advice = "Give OmegaConf.to_container of it."
    return ConfigurationError(
        f"{label} is a {kind.__module__}.{kind.__qualname__}, which is neither a tensor nor plain (None, bool, number, str, bytes, list, "
        "tuple, set, dict, OrderedDict, Counter, defaultdict, deque, namespace, enum member, Path, date, torch.dtype, torch.device, NumPy "
        f"array), and a subclass of these is not. {advice}"
    )


def _value(value: Any) -> Any:
    if isinstance(value, list):
        return [_value(item) for item in value]
    if not isinstance(value, dict):
        return value
    tags = [key for key in value if key[:1] == "~"]
    if not tags:
        return {key: _value(item) for key, item in value.items()}
    if len(value) > 1 or tags[0] not in _BY_TAG:
        raise Refused(f"{tags[0]!r:.40} is not a known kind of plain value")
    return _BY_TAG[tags[0]](value[tags[0]])


def _base64(value: Any, label: str) -> str:
    return base64.b64encode(value).decode("ascii")


def _bytes(data: Any) -> bytes:
    return msgspec.convert(data, bytes)


def _text(value: Any, label: str) -> str:
    return str(value)


def _of_text(make: Callable[[str], Any]) -> Callable[[Any], Any]:
    return lambda data: make(msgspec.convert(data, str))


def _list(value: Any, label: str) -> list[Any]:
    return [_json(item, label) for item in value]


def _items(data: Any) -> list[Any]:
    """Rebuild the values of a list."""
    return [_value(item) for item in msgspec.convert(data, list)]


def _sorted(value: Any, label: str) -> list[Any]:
    """The items of a set, in one order on all ranks."""
    return sorted(_list(value, label), key=json.dumps)


def with_attributes(value: Any, label: str) -> ConfigurationError:
    """The error for a dictionary that has attributes beside its items."""
    return ConfigurationError(f"{label} is a {type(value).__name__} with attributes of its own; give a plain one")


def _pairs(value: Any, label: str) -> list[Any]:
    if getattr(value, "__dict__", None):
        raise with_attributes(value, label)
    return [[_json(key, label), _json(item, label)] for key, item in value.items()]


def _from_pairs(data: Any) -> dict[Any, Any]:
    return dict(map(_items, msgspec.convert(data, list)))


def _ordered(value: Any, label: str) -> list[Any]:
    """The items of an OrderedDict, and its attributes: those of modules have their versions in one."""
    items = [[_json(key, label), _json(item, label)] for key, item in value.items()]
    return [items, _json(vars(value), label)] if vars(value) else [items]


def _from_ordered(data: Any) -> OrderedDict[Any, Any]:
    items, *attributes = msgspec.convert(data, list)
    if len(attributes) > 1:
        raise Refused("an OrderedDict has items and attributes")
    return filled(OrderedDict(_from_pairs(items)), _attributes(attributes[0] if attributes else {}))  # type: ignore[no-any-return]


def _from_defaults(data: Any) -> defaultdict[Any, Any]:
    name, items = msgspec.convert(data, tuple[str, list[Any]])
    return defaultdict(FACTORIES[name] if name else None, _from_pairs(items))


def _deque(value: Any, label: str) -> list[Any]:
    return [value.maxlen, _list(value, label)]


def _from_deque(data: Any) -> deque[Any]:
    most, items = msgspec.convert(data, tuple[int | None, list[Any]])
    return deque(_items(items), most)


def _vars(value: Any, label: str) -> Any:
    return _json(vars(value), label)


def _attributes(data: Any) -> dict[Any, Any]:
    attributes = _value(data)
    if type(attributes) is not dict:
        raise Refused("the attributes of a namespace should be a dictionary")
    return attributes


def _isoformat(value: Any, label: str) -> str:
    text: str = value.isoformat()
    back = type(value).fromisoformat(text)
    zones = [getattr(time, "tzinfo", None) for time in (value, back)]
    has_fold = getattr(value, "fold", 0) != getattr(back, "fold", 0)
    if has_fold or repr(zones[0]) != repr(zones[1]):
        what = "with fold=1" if has_fold else f"of the time zone {zones[0]!r}"
        raise ConfigurationError(
            f"{label} is a {type(value).__name__} {what}; give it without one, in UTC, or with a fixed offset"
        )
    return text


def _ndarray(value: Any, label: str) -> list[Any]:
    if value.dtype.kind not in _NUMPY_KINDS:
        raise ConfigurationError(
            f"{label} is a NumPy array of {value.dtype}, which is not kept: give numbers, text, bytes or times"
        )
    return [value.dtype.str, list(value.shape), _base64(np.ascontiguousarray(value).tobytes(), label)]


def _numpy_type(name: Any) -> np.dtype[Any]:
    """Parse a NumPy type of plain values: others may hold objects."""
    if type(name) is not str or not _NUMPY_TYPE.fullmatch(name):
        raise Refused(f"{name!r:.40} is not a plain data type of NumPy")
    return np.dtype(name)


def _from_ndarray(data: Any) -> np.ndarray[Any, Any]:
    name, shape, content = msgspec.convert(data, tuple[str, Shape, bytes])
    return np.frombuffer(content, _numpy_type(name)).reshape(shape).copy()


def _from_scalar(data: Any) -> Any:
    name, content = msgspec.convert(data, tuple[str, bytes])
    [scalar] = np.frombuffer(content, _numpy_type(name))
    return scalar


def _from_complex(data: Any) -> complex:
    real, imaginary = msgspec.convert(data, tuple[str, str])
    return complex(float(real), float(imaginary))


def _decimal(text: str) -> Decimal:
    made = Decimal(text)
    if str(made) != text:
        raise Refused(f"{text!r:.40} is not what a Decimal is written as")
    return made


def _named(value: Any, label: str) -> str:
    return str(value).removeprefix("torch.")


def _by_name(kind: type[Any]) -> Callable[[Any], Any]:
    """Look names up in a table: torch's attributes include functions and modules."""

    @functools.cache
    def table() -> Mapping[str, Any]:
        return {str(constant).removeprefix("torch."): constant for constant in vars(torch).values() if isinstance(constant, kind)}

    def found(name: Any) -> Any:
        one = table().get(name) if type(name) is str else None
        if one is None:
            raise Refused(f"{name!r:.40} is not a torch.{kind.__name__} of this version of torch")
        return one

    return found


KINDS = (
    Kind(tuple, _list, lambda data: tuple(_items(data)), "tuple"),
    Kind(dict, _pairs, _from_pairs, "dict"),  # with other keys than strings
    Kind(OrderedDict, _ordered, _from_ordered, "OrderedDict"),
    Kind(Counter, _pairs, lambda data: Counter(_from_pairs(data)), "Counter"),
    Kind(defaultdict, lambda value, label: [factory_name(value, label), _pairs(value, label)], _from_defaults, "defaultdict"),
    Kind(deque, _deque, _from_deque, "deque"),
    Kind(set, _sorted, lambda data: set(_items(data)), "set"),
    Kind(frozenset, _sorted, lambda data: frozenset(_items(data)), "frozenset"),
    Kind(argparse.Namespace, _vars, lambda data: filled(argparse.Namespace(), _attributes(data)), "Namespace"),
    Kind(types.SimpleNamespace, _vars, lambda data: filled(types.SimpleNamespace(), _attributes(data)), "SimpleNamespace"),
    Kind(bytes, _base64, _bytes, "bytes"),
    Kind(bytearray, _base64, lambda data: bytearray(_bytes(data)), "bytearray"),
    Kind(io.BytesIO, lambda value, label: _base64(value.getvalue(), label), lambda data: io.BytesIO(_bytes(data)), "BytesIO"),
    Kind(complex, lambda value, label: [repr(value.real), repr(value.imag)], _from_complex, "complex"),
    Kind(range, lambda value, label: [value.start, value.stop, value.step], lambda data: range(*msgspec.convert(data, list[int])), "range"),
    Kind(Decimal, _text, _of_text(_decimal), "Decimal"),
    Kind(Fraction, _text, _of_text(fraction), "Fraction"),
    Kind(uuid.UUID, _text, _of_text(uuid.UUID), "UUID"),
    Kind(type(Path()), _text, _of_text(Path), "Path"),
    Kind(PurePosixPath, _text, _of_text(PurePosixPath), "PurePosixPath"),
    Kind(PureWindowsPath, _text, _of_text(PureWindowsPath), "PureWindowsPath"),
    Kind(datetime, _isoformat, _of_text(datetime.fromisoformat), "datetime"),
    Kind(date, _isoformat, _of_text(date.fromisoformat), "date"),
    Kind(time, _isoformat, _of_text(time.fromisoformat), "time"),
    Kind(timedelta, lambda value, label: [value.days, value.seconds, value.microseconds],
         lambda data: timedelta(*msgspec.convert(data, tuple[int, int, int])), "timedelta"),
    Kind(np.ndarray, _ndarray, _from_ndarray, "ndarray"),
    Kind(torch.Size, lambda value, label: list(value), lambda data: torch.Size(msgspec.convert(data, list[int])), "Size"),
    Kind(torch.dtype, _named, _by_name(torch.dtype), "dtype"),
    Kind(torch.layout, _named, _by_name(torch.layout), "layout"),
    Kind(torch.device, _text, _of_text(torch.device), "device"),
)  # fmt: skip
"""All kinds that have a tag, but for floats that are not finite, NumPy's scalars, and members of enums."""


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
    """Return the member of this name, or the flags of this value, of a class that this process has imported; None if not found."""
    found = imported(module, qualname)
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


_BY_TYPE = {kind.type: kind for kind in KINDS}
_BY_TAG: dict[str, Callable[[Any], Any]] = {
    **{f"~{kind.tag}": kind.read for kind in KINDS},
    "~float": lambda data: _NOT_FINITE[data],
    "~scalar": _from_scalar,
    "~enum": _enum_from_json,
}
