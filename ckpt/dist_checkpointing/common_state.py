"""Differences between the ranks' common states, of which rank 0's alone is saved."""

from __future__ import annotations

import argparse
import dataclasses
import json
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

import numpy as np
import torch

from ckpt.dist_checkpointing.dict_utils import Path, has_bits, path_name
from ckpt.dist_checkpointing.integrity import named_ranks
from ckpt.dist_checkpointing.mapping import CommonStateDict, StateDict
from ckpt.errors import logger_of
from ckpt.format.digests import digest_of
from ckpt.loading.report import some_of
from ckpt.ranks.default_topology import current_topology
from ckpt.ranks.topology import Topology
from ckpt.state.collect import DistinctRanks
from ckpt.state.replication import fingerprints

_log = logger_of(__name__)
_SCALARS = (type(None), bool, int, float, complex, str)
_MAX_SENT = 100  # paths per rank; every rank receives those of all ranks


def compare_common(
    common_state_dict: CommonStateDict, preprocess: Callable[[CommonStateDict], StateDict] | None = None
) -> dict[str, list[int]]:
    """Compare the ranks' common state dicts with rank 0's; rank 0 logs a warning about differences. Collective.

    Tensors are compared by type, shape and every bit, plain values by value; namespaces and dataclasses are entered. An object
    without a text of its own is compared by class alone.

    Each rank sends one digest. If these differ, rank 0 sends a short digest per path, and each group of equal ranks sends once the
    first 100 paths where it differs.

    Args:
        preprocess: returns the values to compare, such as a copy without the entries that are each rank's own; must not change its
            argument.

    Returns:
        path -> ranks that differ there; equal on every rank. Each rank appears in at most 100 paths; the warning says so.
    """
    topology = current_topology()
    with topology.phase("common state") as phase:
        mine = _rows_of(common_state_dict if preprocess is None else preprocess(common_state_dict), topology.progress)
        phase.to_lead = digest_of(json.dumps(sorted(mine.items())).encode())
        phase.answer = lambda: DistinctRanks.of(phase.gathered)
    distinct = DistinctRanks(*phase.from_lead)
    if len(distinct.senders) == 1:
        return {}
    differing = _exchange_differing(mine, distinct, topology)
    found: dict[str, list[int]] = {}
    for rank, (_, paths) in enumerate(differing):
        for path in paths:
            found.setdefault(path, []).append(rank)
    if topology.is_lead:
        _warn(found, [num for num, _ in differing])
    return found


def _exchange_differing(
    mine: Mapping[str, str], distinct: DistinctRanks, topology: Topology
) -> list[tuple[int, list[str]]]:
    """By rank: (number of paths that differ from rank 0's, the first of these paths)."""
    with topology.phase("common state of rank 0") as phase:
        if topology.is_lead:
            phase.from_lead = mine
    expected: dict[str, str] = phase.from_lead
    with topology.phase("paths that differ from rank 0's") as phase:
        if topology.rank in distinct.senders[1:]:
            paths = [path for path in {**expected, **mine} if expected.get(path) != mine.get(path)]
            phase.payload = [len(paths), paths[:_MAX_SENT]]
    reports: dict[int, tuple[int, list[str]]] = {rank: tuple(payload) for rank, payload in enumerate(phase.payloads) if payload}
    return [reports.get(speaker, (0, [])) for speaker in distinct.first_with_each()]


def _warn(found: Mapping[str, Sequence[int]], num_differing: Sequence[int]) -> None:
    """Log the paths where ranks differ.

    Args:
        num_differing: by rank, the number of such paths, of which `found` may hold only the first.
    """
    named = [f"{path} ({named_ranks(ranks)})" for path, ranks in found.items()]
    cut, most = [rank for rank, num in enumerate(num_differing) if num > _MAX_SENT], max(num_differing)
    only = (
        f"; of {named_ranks(cut)}, with up to {most} such paths, only the first {_MAX_SENT} are looked at"
        if cut
        else ""
    )
    _log.warning(
        "the common state dict of rank 0, which alone is saved, differs from other ranks' in %s%s", some_of(named), only
    )


def _rows_of(state_dict: StateDict, progress: Callable[[], None]) -> dict[str, str]:
    """Short digests by path. Two entries of one path name, which only odd keys have, share a row."""
    rows: dict[str, str] = {}
    for path, text in _walk(state_dict, (), ()):
        name = path_name(path)
        rows[name] = digest_of((rows.get(name, "") + text).encode(errors="surrogatepass"))[:16]
        progress()
    return rows


def _walk(value: Any, path: Path, above: tuple[int, ...]) -> Iterator[tuple[Path, str]]:
    """Yield (path, text that identifies the value) for everything inside.

    Args:
        above: ids of the containers around the value.
    """
    inside = _inside(value)
    if inside is None:
        yield path, _text(value)
    elif id(value) in above:
        yield path, "itself"
    else:
        yield path, _class_name(value)
        for key, child in inside.items():
            yield from _walk(child, (*path, key), (*above, id(value)))


def _inside(value: Any) -> Mapping[Any, Any] | None:
    """Return the entries of a container by key; None for a leaf."""
    if isinstance(value, Mapping):
        return value
    if isinstance(value, list | tuple) and not all(type(item) in _SCALARS for item in value):
        return dict(enumerate(value))
    if isinstance(value, np.ndarray) and value.dtype.hasobject and value.ndim:
        return dict(enumerate(value))
    if isinstance(value, argparse.Namespace | types.SimpleNamespace):
        return vars(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    return None


def _text(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        form = f"{leaf.dtype} {tuple(leaf.shape)} {leaf.layout}"
        return str(tuple(fingerprints({"": leaf})[""])) if has_bits(leaf) else form
    if isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject:
        return f"{leaf.dtype.str} {leaf.shape} {digest_of(leaf.tobytes())}"
    if isinstance(leaf, Enum):
        return f"{_class_name(leaf)}.{leaf.name}"
    if isinstance(leaf, set | frozenset):
        return f"{_class_name(leaf)} {sorted(map(_text, leaf))}"
    if isinstance(leaf, type | types.FunctionType | types.BuiltinFunctionType):
        return f"{leaf.__module__}.{leaf.__qualname__}"
    return f"{_class_name(leaf)} {_own_text(leaf)}"


def _own_text(leaf: Any) -> str:
    """Return an object's repr; "" if that holds a memory address, which differs between equal objects."""
    try:
        text = repr(leaf)
    except Exception as error:
        return f"repr() raised {type(error).__name__}"
    return "" if " at 0x" in text else text


def _class_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
