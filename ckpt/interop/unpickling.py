"""Read pickled files of other programs without running their code. Our own checkpoints hold no pickle.

Files of `torch.save` go through torch's weights-only reader, which makes tensors, containers and plain values and refuses the rest.
`unpickle` also allows a few harmless containers, and puts an inert `UnknownObject` in the place of each other object, so that
the file's content can be listed and its other parts used. NumPy numbers and arrays are built here from their bytes, because
NumPy does not check shape and type against them.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import enum
import io
import mmap
import pathlib
import pickle
import re
import sys
import threading
import types
import uuid
import zipfile
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch.serialization import get_safe_globals, get_unsafe_globals_in_checkpoint, safe_globals

from ckpt.errors import Argument, CheckpointNotFoundError, ConfigurationError, CorruptCheckpointError, sentence
from ckpt.format.strict_json import fraction
from ckpt.format.unknown import UnknownObject
from ckpt.interop.pickle_cost import TooMuchError, require_bounded

Unknown = Literal["refuse", "keep"]
"""Objects of classes that may not be built: refuse the file, naming them, or keep an `UnknownObject` in their place."""

_NAMED = 8
"""Number of objects that a refusal names; it counts the others."""


def require_allowed(allow_pickle: bool, found: str) -> None:
    """Raise CheckpointNotFoundError unless pickles may be read. `found`: what is there, with what of it is a pickle."""
    if not allow_pickle:
        way = ". To read it, without running any code in it, load with "
        raise CheckpointNotFoundError(found, way, Argument("load.allow_pickle", True), ".")


def unpickle_state_dict(file: Path) -> dict[Any, Any]:
    """Read a state dict of tensors, containers and plain values. Refuse other objects.

    Raises:
        ConfigurationError: it holds other objects, or is no state dict.
        CorruptCheckpointError: it is missing or cannot be read.
    """
    _require_loadable(file)
    state = _load(
        file,
        lambda name: (
            f"{file} holds {name}, and from an old checkpoint nothing but tensors and plain values is ever unpickled; write it anew "
            "from the run that saved it, or leave the component out"
        ),
    )
    if not isinstance(state, dict):
        raise ConfigurationError(f"{file} holds a {type(state).__name__}, where a state dict should be")
    return state


def unpickle_inert(data: bytes, where: str) -> Any:
    """Read a bare pickle: plain values as they are, and an `UnknownObject` for each other object. Nothing is imported or called.

    Raises:
        CorruptCheckpointError: it is no pickle.
    """
    _require_bounded(data, where)
    try:
        return _InertUnpickler(io.BytesIO(data)).load()
    except Exception as error:  # a pickle that anybody may have written makes Python raise nearly anything
        raise CorruptCheckpointError(f"{where} cannot be read as a pickle: {type(error).__name__}") from None


def unpickle_archived(data: bytes, where: str) -> Any:
    """Read the pickle of an archive of `torch.save`: containers, plain values (as in `ckpt.state.plain`), and arrays of NumPy as they are;
    an `UnknownObject` for each other object, tensors among them. Nothing is imported, and no code of the file runs.

    Raises:
        CorruptCheckpointError: it is no pickle, or its value is not small (`require_small`).
    """
    _require_bounded(data, where)
    try:
        value = _Resolve(makes_plain=True)(_ArchiveUnpickler(io.BytesIO(data)).load(), "")
    except Exception as error:  # as in `unpickle_inert`
        raise CorruptCheckpointError(f"{where} cannot be read as a pickle: {type(error).__name__}") from None
    require_small(value, where)
    return value


def _require_bounded(data: bytes, where: str) -> None:
    try:
        require_bounded(data) if len(data) > _SHORT_BYTES else _is_bounded(data)
    except ValueError as error:
        raise CorruptCheckpointError(f"{where} cannot be read as a pickle: {error}") from None


@lru_cache(maxsize=1024)
def _is_bounded(data: bytes) -> None:
    """Cached: DCP describes each tensor by a pickle, and those of one shape are equal."""
    require_bounded(data)


_SHORT_BYTES = 4096


class _InertUnpickler(pickle.Unpickler):
    """References to memory outside of the pickle come back as they are: tuples, of `torch.save`."""

    def find_class(self, module: str, name: str) -> Any:
        return _CONTAINERS.get(f"{module}.{name}") or _stand_in(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        return pid


class _ArchiveUnpickler(_InertUnpickler):
    def find_class(self, module: str, name: str) -> Any:
        module = "builtins" if module == "__builtin__" else module  # as the pickles of torch.save have it
        found = getattr(torch, name, None) if module == "torch" else None
        return (
            found if isinstance(found, torch.dtype) else _BUILT.get(f"{module}.{name}") or _stand_in(f"{module}.{name}")
        )


_CONTAINERS: dict[str, Any] = {
    "collections.OrderedDict": OrderedDict,
    "torch.Size": tuple,
    "builtins.set": set,
    "builtins.frozenset": frozenset,
}


def unpickle(file: Path, *, unknown: Unknown = "refuse") -> Any:
    """Read what `torch.save` wrote: tensors (mapped, not read), plain values, namespaces, bytes, paths and NumPy's numbers.

    A class given to `torch.serialization.add_safe_globals` is built, as everywhere in torch. A `defaultdict` comes back as
    a dict.

    Args:
        unknown: "keep" puts an `UnknownObject` in the place of each object of any other class.

    Raises:
        ConfigurationError: it holds objects of other classes, and is to be refused; it names each with the way to it. Or it
            holds one that nothing can stand in for.
        CorruptCheckpointError: it is missing or cannot be read.
    """
    where = str(file)
    _require_loadable(file)
    with _ONE_AT_A_TIME:
        names, added = _additions(file)
        with safe_globals(added):
            loaded = _load(
                file,
                lambda name: (
                    f"{where} holds {name}, which torch's weights-only reader does not build, and for which there is no stand-in; leave it "
                    "out where the file is written"
                ),
            )
    resolve = _Resolve()
    try:
        resolved = resolve(loaded, "")
    except (ValueError, TypeError, RecursionError) as error:  # NumPy's values that are none
        raise CorruptCheckpointError(f"{where} cannot be read: {sentence(error)}") from None
    require_repeats_within(resolve.num_bytes, file.stat().st_size, f"{where} repeats elements")
    if unknown == "refuse":
        _require_known(where, resolve, names)
    return resolved


def unknown_in(value: Any) -> dict[str, str]:
    """Return the unknown objects in a result of `unpickle`: path to the object -> name of its class.

    Example:
        >>> unknown_in({"args": argparse.Namespace(lr=0.1)})
        {}
    """
    resolve = _Resolve()
    resolve(value, "")
    return resolve.places


def without_unknown(value: Any) -> Any:
    """Return a result of `unpickle` without its unknown objects: entries of dictionaries and attributes of namespaces are left out.

    Returns:
        what is left; an `UnknownObject` if the value is one, or a list, tuple or set that holds one.

    Example:
        >>> without_unknown({"args": argparse.Namespace(lr=0.1)})
        {'args': Namespace(lr=0.1)}
    """
    if isinstance(value, argparse.Namespace | types.SimpleNamespace):
        left = type(value)()
        vars(left).update(without_unknown(vars(value)))
        return left
    if isinstance(value, dict):
        known = {key: without_unknown(item) for key, item in value.items() if not unknown_in(key)}
        kept = copy.copy(value)
        kept.clear()
        for key, item in known.items():  # not by `update`: see `_Resolve`
            if not isinstance(item, UnknownObject):
                kept[key] = item
        return kept
    return UnknownObject() if unknown_in(value) else value


def _load(file: Path, refusal: Callable[[str], str]) -> Any:
    """Call torch's weights-only reader.

    Args:
        refusal: makes the sentence for a file that holds a refused object of this class name.
    """
    with _as_written_by_torch(file):
        try:
            # Files of the older, non-zip kind cannot be mapped. Mapping avoids reading tensors that are not used.
            return torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
        except Exception as error:
            if (refused := _REFUSED.search(str(error))) is None:
                raise
            raise ConfigurationError(refusal(refused[1] or refused[2])) from None


@contextmanager
def _as_written_by_torch(file: Path) -> Iterator[None]:
    """Turn what the block raises of a file into one error: bytes that are no such file make readers raise nearly anything."""
    try:
        yield
    except ConfigurationError:
        raise
    except (OSError, TooMuchError) as error:
        raise CorruptCheckpointError(f"{file} cannot be read: {sentence(error) if isinstance(error, OSError) else error}") from error
    except Exception:
        raise CorruptCheckpointError(f"{file} cannot be read as a file that torch.save wrote") from None


def _require_loadable(file: Path) -> None:
    """Refuse what would take all memory or time of torch's reader: compressed archives, and pickles by `require_bounded`.

    Raises:
        CorruptCheckpointError: it is that, or no file that torch.save wrote.
    """
    with _as_written_by_torch(file), file.open("rb") as stream:
        is_zip = stream.read(4) == _ZIP
        if is_zip != zipfile.is_zipfile(stream):
            raise ValueError("torch takes it for another kind of file than Python")
        if not is_zip:
            require_bounded(mmap.mmap(stream.fileno(), 0, prot=mmap.PROT_READ), num_pickles=_OLD_PICKLES)
            return
        archive = zipfile.ZipFile(stream)
        if any(member.compress_type or member.file_size != member.compress_size for member in archive.infolist()):
            raise TooMuchError("it is compressed")
        (described,) = (member for member in archive.infolist() if member.filename.endswith("/data.pkl"))
        require_bounded(archive.read(described))


def require_repeats_within(num_bytes: int, stored: int, what: str) -> None:
    """Refuse tensors that have far more elements than lie in their file: memory or files for all of them will be asked for.

    Args:
        num_bytes: of the elements of different tensors; a tensor that has several names counts once.
        stored: bytes of the file.
        what: repeats elements, for errors.

    Raises:
        ConfigurationError
    """
    if num_bytes > _REPEATS * stored + _REPEATED_BYTES:
        raise ConfigurationError(
            f"{what}: the tensors of a file of {stored} bytes would have {num_bytes}; save what is repeated, once"
        )


_REPEATS = 4
_REPEATED_BYTES = 1 << 30
"""The tensors of a file may have so many times its bytes, and so many bytes on top."""
_ZIP = b"PK\x03\x04"
_OLD_PICKLES = 5
"""At the begin of files of torch before 1.6: a number, a version, facts of the system, the value, and the names of its storages."""


_REFUSED = re.compile(r"(?i:unsupported (?:global: global|global|class)) ([\w.]+)|but got <class '([\w.]+)'>")


def _additions(file: Path) -> tuple[set[str], list[Any]]:
    """Return the class names in a file that get stand-ins, and all that torch's reader shall be allowed besides the user's list.

    The user's own entries are left out: torch would drop them together with ours afterwards. NumPy's names go together.
    """
    users = {allowed[1] if isinstance(allowed, tuple) else f"{allowed.__module__}.{allowed.__qualname__}" for allowed in get_safe_globals()}
    known = {name: made for name, made in _HARMLESS.items() if name not in users}
    known |= {} if users & _NUMPY.keys() else _NUMPY
    try:
        names = set(get_unsafe_globals_in_checkpoint(file)) - known.keys() - _NUMPY.keys()
    except Exception:  # of the older kind, or damaged: `_load` says what it is
        names = set()
    known |= {name: _stand_in(name) for name in names}
    return names, [(made, name) for name, made in known.items()]


@lru_cache(maxsize=4096)
def _stand_in(name: str) -> type[UnknownObject]:
    module, _, qualname = name.rpartition(".")
    return type(qualname, (UnknownObject,), {"name": name, "__module__": module})


def _require_known(where: str, resolved: _Resolve, names: Iterable[str]) -> None:
    """Refuse a file with unknown objects, or with class names that no visited object has.

    A built-in class alone does not count: a `defaultdict` refers to one, for example.
    """
    hidden = sorted(name for name in set(names) - resolved.names if not name.startswith("builtins."))
    places = [f"{path or 'the whole of it'}: {name}" for path, name in resolved.places.items()]
    places += [f"inside of another object: {name}" for name in hidden]
    if places:
        more = f" and {len(places) - _NAMED} more" if len(places) > _NAMED else ""
        raise ConfigurationError(
            f"{where} holds objects of classes that are not built unasked: {'; '.join(places[:_NAMED])}{more}. {_HOW_TO_ALLOW}"
        )


_HOW_TO_ALLOW = (
    "Allow a class that you trust with torch.serialization.add_safe_globals([<class>]) before the load, or read the file with "
    'unknown="keep" (of TorchCommonLoadStrategy), which puts an inert UnknownObject in the place of each.'
)


class _Resolve:
    """Walks a loaded value: replaces stand-ins of NumPy values by these, and notes where unknown objects are.

    Dictionaries and lists are changed in place; shared objects stay shared. Objects with a `__dict__` are entered.

    Args:
        makes_plain: make all plain values, and members of enums that this process has; otherwise NumPy's numbers and arrays of these.

    Attributes:
        places: path to each outermost unknown object -> name of its class.
        names: class names of all unknown objects, nested ones included.
        num_bytes: of the elements of all tensors. Their memory can be smaller: they may repeat elements, or lie in one another.
    """

    def __init__(self, *, makes_plain: bool = False) -> None:
        self._makes_plain = makes_plain
        self.num_bytes = 0
        self.places: dict[str, str] = {}
        self.names: set[str] = set()
        self._inside = 0  # nesting depth in unknown objects
        self._done: dict[int, tuple[Any, Any]] = {}  # keeps replaced objects alive, so that ids stay unique

    def __call__(self, value: Any, path: str) -> Any:
        if id(value) not in self._done:
            self._done[id(value)] = value, value  # ends the walk of a cycle
            self._done[id(value)] = value, self._resolved(value, path)
        return self._done[id(value)][1]

    def _resolved(self, value: Any, path: str) -> Any:
        if isinstance(value, type) and issubclass(value, UnknownObject):
            value = value()
            value.args = None
        if isinstance(value, UnknownObject):
            return self._stand_in(value, path)
        if isinstance(value, bytearray) or (isinstance(value, torch.Tensor) and value.layout is torch.strided):
            self.num_bytes += len(value) if isinstance(value, bytearray) else value.nbytes
            return value
        if type(value) in (dict, OrderedDict, Counter, defaultdict):
            pairs = [(self(key, f"{path} (a key)"), self(item, _below(path, key))) for key, item in value.items()]
            value.clear()
            for key, item in pairs:  # dict.update leaves an OrderedDict without an order, and Counter.update adds up
                value[key] = item
        elif type(value) in (list, tuple, set, frozenset, deque):
            return self._items(value, path)
        if hasattr(value, "__dict__") and not isinstance(value, torch.Tensor | type | types.FunctionType):
            for name, item in list(vars(value).items()):
                if (resolved := self(item, _below(path, name))) is not item:
                    vars(value)[name] = resolved
        return value

    def _items(self, value: Any, path: str) -> Any:
        before = list(value)
        after = [self(item, f"{path}[{at}]") for at, item in enumerate(before)]
        if all(a is b for a, b in zip(before, after, strict=True)):
            return value
        if isinstance(value, list | deque):
            value.clear()
            value.extend(after)
            return value
        return type(value)(after)

    def _stand_in(self, value: UnknownObject, path: str) -> Any:
        made = _of_numpy(value) if value.name in _NUMPY else _plain_of(value) if self._makes_plain else None
        if made is not None and (self._makes_plain or getattr(made, "dtype", made).kind in _NUMBERS):
            return made
        self.names.add(value.name)
        if not self._inside:
            self.places[path] = value.name
        self._inside += 1
        value.args = self(value.args, path)
        value.state = self(value.state, path)
        value.items = self(value.items, path)
        self._inside -= 1
        return value


def require_small(value: Any, where: str) -> None:
    """Refuse a value that is much larger as a tree than in memory. Unknown objects are not entered.

    Raises:
        CorruptCheckpointError: it is, or a container holds itself.
    """
    size = _Size()
    try:
        _, steps = size.of(value)
    except RecursionError:
        steps = _ENDLESS
    if steps > _MOST_STEPS + _STEPS_PER_REFERENCE * size.num_references:
        raise CorruptCheckpointError(f"{where} holds containers that hold themselves, or one another too often")


class _Size:
    """Measures plain containers as a tree, without building it: one that is referred to again and again can be of any size.

    Attributes:
        num_references: to the items of all containers, each container counted once.
    """

    def __init__(self) -> None:
        self.num_references = 0
        self._known: dict[int, tuple[int, int]] = {}

    def of(self, value: Any) -> tuple[int, int]:
        """Return the number of nodes below a value and itself, and the sum of the lengths of the paths to them."""
        inner = _inside(value)
        if inner is None:
            return 1, 0
        known = self._known.get(id(value))
        if known is None:
            self._known[id(value)] = 0, _ENDLESS
            self.num_references += len(inner)
            sizes = [self.of(part) for part in inner]
            nodes = sum(nodes for nodes, _ in sizes)
            known = self._known[id(value)] = 1 + nodes, nodes + sum(steps for _, steps in sizes)
        return known


_MOST_STEPS = 1 << 20
_STEPS_PER_REFERENCE = 32
_ENDLESS = 1 << 200
"""Steps to a container that is in itself."""


def _inside(value: Any) -> list[Any] | None:
    """The items of a plain container; None: it is something else."""
    if isinstance(value, dict):
        return [*value, *value.values()]
    if isinstance(value, list | tuple | set | frozenset | deque):
        return list(value)
    return list(vars(value).values()) if isinstance(value, argparse.Namespace | types.SimpleNamespace) else None


def _below(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)


def _of_numpy(value: UnknownObject) -> Any:
    """Return the NumPy data type, number or array of a stand-in; None if it is not of plain numbers."""
    kind = value.name.rpartition(".")[2]
    args, state = value.args or (), value.state
    if kind == "dtype" and args and isinstance(args[0], str) and re.fullmatch(r"[biufcSU]\d{1,9}|[mM]8", args[0]):
        is_big = isinstance(state, tuple) and state[1:2] == (">",)
        return np.dtype(f"{args[0]}{_unit_in(state) if args[0] in _TIMES else ''}").newbyteorder(">" if is_big else "=")
    if kind == "scalar" and len(args) == 2:
        dtype = _dtype_of(args[0])
        return None if dtype is None else np.frombuffer(args[1], dtype)[0]
    if kind == "_reconstruct" and isinstance(state, tuple) and len(state) == 5:
        _, shape, described, is_fortran, data = state
        dtype = _dtype_of(described)
        if dtype is not None:
            return np.frombuffer(data, dtype).reshape(shape, order="F" if is_fortran else "C").copy(order="K")
    return None


def _unit_in(state: Any) -> str:
    """Return the unit of a data type of times, such as "[ns]"; "" if it has none."""
    if not isinstance(state, tuple) or len(state) < 9:
        return ""
    name, count = state[8][1][:2]
    return f"[{count if type(count) is int else 0}{name.decode('ascii')}]"


def _plain_of(value: UnknownObject) -> Any:
    """Return the plain value, or the member of an enum that this process has, of a stand-in; None: it is of none of these."""
    given, state = value.args, value.state
    if given is None:
        return None
    try:
        made = [_plain_of(arg) if isinstance(arg, UnknownObject) else arg for arg in given]
        args = [was if arg is None else arg for arg, was in zip(made, given, strict=True)]
        if value.name == "uuid.UUID":
            return uuid.UUID(int=state["int"])
        if value.name in _PLAIN:
            make, *kinds = _PLAIN[value.name]
            return make(*args) if all(isinstance(arg, kind) for arg, kind in zip(args, kinds, strict=False)) else None
        return _enum_member(value.name, *args) if len(args) == 1 else None
    except (ValueError, TypeError, KeyError, ArithmeticError, RuntimeError, AttributeError):
        return None


def _enum_member(name: str, value: Any) -> Any:
    """Return the member, or the combined flags, of an enum class that has been imported."""
    module, _, kind = name.rpartition(".")
    found: Any = getattr(sys.modules.get(module), "__dict__", {}).get(kind)
    if not (isinstance(found, type) and issubclass(found, enum.Enum)):
        return None
    if type(value) is int and issubclass(found, enum.Flag):
        flags = found(value)
        return flags if flags.value == value else None  # some classes drop unknown bits silently
    return found._value2member_map_.get(value)


def _fraction(text: str | int, denominator: int = 1) -> Fraction:
    return fraction(text) if isinstance(text, str) else Fraction(text, denominator)


def _defaultdict(factory: Any = None) -> Any:
    """Make a dictionary whose missing values are of a type of Python; another one is not known."""
    name = getattr(factory, "name", None) or next((name for name, made in _BUILT.items() if made is factory), None)
    known = None if name is None else _FACTORIES.get(name)
    return _stand_in("collections.defaultdict")() if factory is not None and known is None else defaultdict(known)


def _deque(items: Any = (), most: int | None = None) -> deque[Any]:
    return deque(items if isinstance(items, list | tuple) else (), most)


def _dtype_of(value: Any) -> np.dtype[Any] | None:
    made = _of_numpy(value) if isinstance(value, UnknownObject) and value.name == "numpy.dtype" else None
    return made if isinstance(made, np.dtype) else None


def _made_by(name: str, make: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that makes a value, or a stand-in where it cannot, such as a date in a time zone that is not built."""

    def made(*args: Any) -> Any:
        try:
            return make(*args)
        except (TypeError, ValueError, OverflowError, RuntimeError):
            return _stand_in(name)(*args)

    return made


_HARMLESS: dict[str, Any] = {
    "argparse.Namespace": argparse.Namespace,
    "types.SimpleNamespace": types.SimpleNamespace,
    "_io.BytesIO": io.BytesIO,
    "builtins.bytes": lambda: b"",  # only empty bytes are pickled as a call
    "builtins.frozenset": frozenset,
    "collections.defaultdict": lambda *_: {},
    **{
        f"datetime.{name}": _made_by(f"datetime.{name}", getattr(datetime, name))
        for name in ("date", "time", "datetime", "timedelta", "timezone")
    },
    "pathlib.PosixPath": pathlib.Path,
    "pathlib.PurePosixPath": pathlib.PurePosixPath,
    "pathlib.WindowsPath": pathlib.PureWindowsPath,
    "pathlib.PureWindowsPath": pathlib.PureWindowsPath,
    # Names of Python 3.13.
    "pathlib._local.PosixPath": pathlib.Path,
    "pathlib._local.PurePosixPath": pathlib.PurePosixPath,
    "pathlib._local.WindowsPath": pathlib.PureWindowsPath,
    "pathlib._local.PureWindowsPath": pathlib.PureWindowsPath,
}
"""Class names that a file may use besides those that torch allows -> what is built: inert containers only."""

_BUILT = {
    **_CONTAINERS,
    **_HARMLESS,
    "torch.Size": torch.Size,
    "torch.device": _made_by("torch.device", torch.device),
    "collections.defaultdict": _defaultdict,
    "collections.deque": _deque,
    "builtins.bytearray": lambda data=b"", *_: bytearray(
        data.encode("latin1") if isinstance(data, str) else memoryview(data)
    ),
    "collections.Counter": Counter,
    "builtins.complex": complex,
    "_codecs.encode": lambda text, encoding: text.encode("latin1"),  # bytes, in the pickles of torch.save
}
"""What `unpickle_archived` builds."""

_NUMBERS = "biufc"
_TIMES = ("m8", "M8")
_FACTORIES: dict[str, Any] = {
    **{
        f"builtins.{kind.__name__}": kind
        for kind in (list, dict, set, int, float, str, tuple, bool, bytes, complex, frozenset)
    },
    **{f"collections.{kind.__name__}": kind for kind in (OrderedDict, Counter, deque)},
}
_LAYOUTS = {str(constant): constant for constant in vars(torch).values() if isinstance(constant, torch.layout)}
_PLAIN: dict[str, tuple[Any, ...]] = {
    "builtins.range": (range, int, int, int),
    "builtins.xrange": (range, int, int, int),  # as the pickles of torch.save have it
    "decimal.Decimal": (Decimal, str),
    "fractions.Fraction": (_fraction, str | int, int),
    "torch.serialization._get_layout": (_LAYOUTS.get, str),
}
"""Names in pickles of plain values -> what makes them of the arguments, and the types of these."""

_NUMPY = {
    name: _stand_in(name)
    for name in (
        "numpy.dtype",
        "numpy.ndarray",
        *(f"numpy.{core}.multiarray.{made}" for core in ("core", "_core") for made in ("scalar", "_reconstruct")),
    )
}
_ONE_AT_A_TIME = threading.Lock()
"""torch's list of allowed classes belongs to the process; `unpickle` adds to it while it reads one file."""
