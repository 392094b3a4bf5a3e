"""Nested dictionaries and lists: map, merge, split, compare. Everything else, tuples included, is a leaf. Names follow Megatron-Core."""

from __future__ import annotations

import struct
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch

from ckpt.errors import ConfigurationError
from ckpt.format.dtypes import raw_bytes

Container = dict[Any, Any] | list[Any]
Path = tuple[Any, ...]
"""Dictionary keys and list positions, from the outermost."""
Mismatch = tuple[Path, type, type]
T = TypeVar("T")
C = TypeVar("C", dict[Any, Any], list[Any])

_SHOWN = 30


def extract_matching_values(x: C, predicate: Callable[[Any], bool], return_lists_as_dicts: bool = False) -> tuple[C, C]:
    """Split a nested container into (matching leaves, other leaves), both nested as `x`, which is not changed.

    Containers that become empty are dropped. A container that was empty before does not match if it is a dictionary's value; in a
    list the predicate decides, so that a list all of whose elements match stays complete.

    Args:
        predicate: called with a leaf.
        return_lists_as_dicts: turn lists into {position: element}, which keeps positions. Otherwise the remaining elements move up.

    Raises:
        ConfigurationError: `x` is neither a dictionary nor a list.

    Example:
        >>> extract_matching_values({"a": [1, "b", 2], "c": "d"}, lambda leaf: isinstance(leaf, int))
        ({'a': [1, 2]}, {'a': ['b'], 'c': 'd'})
    """
    if not isinstance(x, dict | list):
        raise ConfigurationError(f"a {type(x).__name__} is given where a dict or list is split; wrap it in one")
    with _nesting():
        return _split(x, predicate, return_lists_as_dicts)


def diff(x1: Any, x2: Any, prefix: Path = ()) -> tuple[list[Path], list[Path], list[Mismatch]]:
    """Compare two nested values; also enters tuples and arrays of objects.

    Tensors and arrays are equal if data type, shape and every bit are, on any device: a NaN equals the same NaN. Objects with
    data and a replica id (`ShardedTensor`) are compared by their data. Values that cannot be compared are unequal.

    Args:
        prefix: prepended to every path.

    Returns:
        (paths only in `x1`, paths only in `x2`, (path, type in `x1`, type in `x2`) where the values differ).

    Example:
        >>> diff({"a": [1, 2], "b": 3}, {"a": [1], "b": "3"})
        ([('a', 1)], [], [(('b',), <class 'int'>, <class 'str'>)])
    """
    found: tuple[list[Path], list[Path], list[Mismatch]] = ([], [], [])
    with _nesting():
        _compare(x1, x2, prefix, *found)
    return found


def inspect_types(x: Any, prefix: Path = (), indent: int = 4) -> None:
    """Print a nested value as a tree of keys and types.

    Args:
        prefix: its length is the number of levels to indent the tree by.
        indent: columns per level.
    """
    with _nesting():
        for line in _lines(x, len(prefix), indent):
            print(line)


def nested_values(x: Container) -> Iterator[Any]:
    """Yield the leaves of a nested container."""
    for _, _, value in nested_items_iter(x):
        yield value


def nested_items_iter(x: Container) -> Iterator[tuple[Container, Any, Any]]:
    """Yield (the container it is in, its key or position there, the leaf) for the leaves of a nested container."""
    with _nesting():
        yield from _leaves(x)


def dict_map(f: Callable[[Any], Any], d: Container) -> None:
    """Replace every leaf by f(leaf), in place. As `dict_list_map_inplace`."""
    dict_list_map_inplace(f, d)


def dict_map_with_key(f: Callable[[Any, Any], Any], d: Container) -> None:
    """Replace every leaf by f(its key or position in the innermost container, leaf), in place."""
    with _nesting():
        _map_in_place(f, d, set())


def dict_list_map_inplace(f: Callable[[Any], Any], x: Any) -> Any:
    """Replace every leaf by f(leaf), in place, and return `x`; for a leaf, return f(x).

    A container that appears several times is mapped once. Results of `f` are not entered.
    """
    if not isinstance(x, dict | list):
        return f(x)
    with _nesting():
        _map_in_place(lambda _, leaf: f(leaf), x, set())
    return x


def dict_list_map_outplace(f: Callable[[Any], Any], x: Any) -> Any:
    """Return new containers with f(leaf) for every leaf; for a leaf, f(x)."""
    with _nesting():
        return _mapped(f, x)


def merge(x1: C, x2: C, key: Path = ()) -> C:
    """Merge `x2` into `x1`, in place, and return `x1`. Lists of one length are merged element by element.

    Args:
        key: path of both, for messages.

    Raises:
        ConfigurationError: a leaf is in both, or two lists differ in length; names the path. `x1` is unchanged then.
    """
    with _nesting():
        _require_mergeable(x1, x2, key)
        _merge(x1, x2)
    return x1


def map_reduce(
    xs: Iterable[T],
    key_fn: Callable[[T], Hashable] = lambda x: x,
    value_fn: Callable[[T], Any] = lambda x: x,
    reduce_fn: Callable[[list[Any]], Any] = lambda values: values,
) -> dict[Any, Any]:
    """Group `xs` by `key_fn`, and apply `reduce_fn` to the list of `value_fn` results of each group.

    Example:
        >>> map_reduce(["a", "bc", "d"], key_fn=len, reduce_fn="+".join)
        {1: 'a+d', 2: 'bc'}
    """
    groups: dict[Any, list[Any]] = {}
    for x in xs:
        groups.setdefault(key_fn(x), []).append(value_fn(x))
    return {key: reduce_fn(values) for key, values in groups.items()}


def path_name(path: Path) -> str:
    """Format a path: `optimizer.param_groups.0.lr`."""
    return ".".join(map(str, path)) or "the top level"


def same_bits(x1: torch.Tensor, x2: torch.Tensor) -> bool:
    """Whether two tensors are equal in data type, shape and every bit, on any device.

    DTensors are compared by this rank's parts. Sparse, quantised and meta tensors equal themselves alone.
    """
    if x1 is x2:
        return True
    form, other = ((x.dtype, x.shape, getattr(x, "placements", None)) for x in (x1, x2))
    if form != other:
        return False
    x1, x2 = (x.to_local() if hasattr(x, "to_local") else x for x in (x1.detach(), x2.detach()))
    return has_bits(x1) and has_bits(x2) and torch.equal(_bytes(x1), _bytes(x2))


@contextmanager
def _nesting() -> Iterator[None]:
    """Turn a RecursionError into a ConfigurationError."""
    try:
        yield
    except RecursionError:
        raise ConfigurationError(
            "a state dict holds itself, or nests deeper than Python can follow; give one without cycles and with fewer levels"
        ) from None


def _items(x: Container) -> Iterable[tuple[Any, Any]]:
    return x.items() if isinstance(x, dict) else enumerate(x)


def _leaves(x: Container) -> Iterator[tuple[Container, Any, Any]]:
    for key, value in _items(x):
        if isinstance(value, dict | list):
            yield from _leaves(value)
        else:
            yield x, key, value


def _split(x: Container, predicate: Callable[[Any], bool], as_dicts: bool) -> tuple[Any, Any]:
    parts: tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]] = ([], [])
    for key, value in _items(x):
        if isinstance(value, dict | list) and (value or isinstance(x, dict)):
            matching, others = _split(value, predicate, as_dicts)
            if matching:
                parts[0].append((key, matching))
            if others or not value:
                parts[1].append((key, others))
        else:
            parts[0 if predicate(value) else 1].append((key, value))
    if isinstance(x, dict) or as_dicts:
        return dict(parts[0]), dict(parts[1])
    return [value for _, value in parts[0]], [value for _, value in parts[1]]


def _map_in_place(f: Callable[[Any, Any], Any], x: Container, done: set[int]) -> None:
    """Args: done: ids of the containers that have been mapped; `x` keeps them alive."""
    if id(x) in done:
        return
    done.add(id(x))
    for key, value in list(_items(x)):
        if isinstance(value, dict | list):
            _map_in_place(f, value, done)
        else:
            x[key] = f(key, value)


def _mapped(f: Callable[[Any], Any], x: Any) -> Any:
    if isinstance(x, dict):
        return {key: _mapped(f, value) for key, value in x.items()}
    return [_mapped(f, value) for value in x] if isinstance(x, list) else f(x)


def _require_mergeable(x1: Any, x2: Any, path: Path) -> None:
    if isinstance(x1, dict) and isinstance(x2, dict):
        for key in x2:
            if key in x1:
                _require_mergeable(x1[key], x2[key], (*path, key))
    elif isinstance(x1, list) and isinstance(x2, list):
        if len(x1) != len(x2):
            raise ConfigurationError(
                f"{path_name(path)} is a list of length {len(x1)} in one state dict and {len(x2)} in the other; only lists of one "
                "length can be merged"
            )
        for at, pair in enumerate(zip(x1, x2, strict=True)):
            _require_mergeable(*pair, (*path, at))
    else:
        raise ConfigurationError(
            f"{path_name(path)} is in both state dicts, as {type(x1).__name__} and as {type(x2).__name__}; they can be merged only "
            "if every value is in one of them alone"
        )


def _merge(x1: Container, x2: Container) -> None:
    for key, value in _items(x2):
        if isinstance(x1, dict) and key not in x1:
            x1[key] = value
        else:
            _merge(x1[key], value)


def _compare(x1: Any, x2: Any, path: Path, left: list[Path], right: list[Path], mismatch: list[Mismatch]) -> None:
    """Append differences to the three lists of `diff`."""
    children = _children(x1, x2)
    if children is None:
        if not _equal(x1, x2):
            mismatch.append((path, type(x1), type(x2)))
        return
    mine, theirs = children
    left += [(*path, key) for key in mine if key not in theirs]
    right += [(*path, key) for key in theirs if key not in mine]
    for key in mine:
        if key in theirs:
            _compare(mine[key], theirs[key], (*path, key), left, right, mismatch)


def _children(x1: Any, x2: Any) -> tuple[dict[Any, Any], dict[Any, Any]] | None:
    """Return the entries of both values by key; None if the two are compared as leaves."""
    if isinstance(x1, dict) and isinstance(x2, dict):
        return x1, x2
    if any(isinstance(x1, kind) and isinstance(x2, kind) for kind in (list, tuple)):
        return dict(enumerate(x1)), dict(enumerate(x2))
    if isinstance(x1, np.ndarray) and isinstance(x2, np.ndarray) and x1.dtype == x2.dtype == object and x1.ndim:
        return dict(enumerate(x1)), dict(enumerate(x2))
    if type(x1) is type(x2) and all(hasattr(x, "replica_id") and hasattr(x, "data") for x in (x1, x2)):
        return {type(x1): x1.data}, {type(x2): x2.data}
    return None


def _equal(x1: Any, x2: Any) -> bool:
    if isinstance(x1, torch.Tensor) or isinstance(x2, torch.Tensor):
        return isinstance(x1, torch.Tensor) and isinstance(x2, torch.Tensor) and same_bits(x1, x2)
    if isinstance(x1, float) and isinstance(x2, float) and struct.pack("d", x1) == struct.pack("d", x2):
        return True
    try:
        if isinstance(x1, np.ndarray) or isinstance(x2, np.ndarray):
            return isinstance(x1, np.ndarray) and isinstance(x2, np.ndarray) and _same_array(x1, x2)
        return x1 is x2 or bool(x1 == x2)
    except Exception:  # raised by an object's __eq__
        return False


def _same_array(x1: np.ndarray[Any, Any], x2: np.ndarray[Any, Any]) -> bool:
    if (x1.dtype, x1.shape) != (x2.dtype, x2.shape):
        return False
    return np.array_equal(x1, x2) if x1.dtype.hasobject else x1.tobytes() == x2.tobytes()


def has_bits(tensor: torch.Tensor) -> bool:
    """Whether the elements of a tensor can be read: not those of sparse, quantised and meta tensors."""
    return tensor.layout is torch.strided and not tensor.is_quantized and tensor.device.type != "meta"


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return raw_bytes(tensor.cpu().resolve_conj().resolve_neg().contiguous())


def _lines(x: Any, depth: int, indent: int) -> Iterator[str]:
    if not isinstance(x, dict | list):
        yield f"{' ' * indent * depth}{_type_and_text(x)}"
        return
    mark = ">" if isinstance(x, dict) else "-"
    for key, value in _items(x):
        start = f"{' ' * indent * depth}{mark} {key}:"
        if isinstance(value, dict | list):
            yield start
            yield from _lines(value, depth + 1, indent)
        else:
            yield f"{start} {_type_and_text(value)}"


def _type_and_text(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return f"{type(leaf).__name__} {str(leaf.dtype).removeprefix('torch.')} {list(leaf.shape)}"
    try:
        text = " ".join(str(leaf).split())
    except Exception as error:
        text = f"(str() raised {type(error).__name__})"
    return f"[{type(leaf).__name__}] {text if len(text) <= _SHOWN else text[: _SHOWN - 3] + '...'}"
