"""What `convert` does to a checkpoint of Megatron-Core's zarr strategy: tensors, objects and common state go into one of ours.

Tensors are saved out of their mapped files, chunk by chunk, so that memory is needed for what is under way.
"""

from __future__ import annotations

import argparse
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

import torch
from rich.filesize import decimal

from ckpt.catalog.verify import examine
from ckpt.convert.atomic_directory import atomic_directory, require_free
from ckpt.dist_checkpointing.mapping import ShardedObject
from ckpt.dist_checkpointing.megatron.layout import headless
from ckpt.dist_checkpointing.megatron.zarr import (
    MegatronZarr,
    load_megatron_common,
    load_megatron_object,
    megatron_objects,
)
from ckpt.dist_checkpointing.serialization import save
from ckpt.errors import ConfigurationError, StorageError
from ckpt.format.box import Box, whole
from ckpt.format.dtypes import torch_dtype
from ckpt.format.unpickling import UnknownObject
from ckpt.ranks.job import use_topology
from ckpt.ranks.topology import Topology
from ckpt.state.flatten import to_json
from ckpt.state.sharded_tensor import ShardedTensor

_NAMED = 8


@dataclass
class _Notes:
    """What does not go over as it was.

    Attributes:
        left_out: one text each: where, and of which class.
        changed: where, and what it is now.
    """

    left_out: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Converted:
    """What went over.

    Attributes:
        array_bytes: of all elements.
        common: the outermost entries of the common state.
        num_files, num_bytes: of the new checkpoint, read back after it was written.
    """

    src: str
    dst: str
    to: str
    arrays: int
    array_bytes: int
    objects: int
    common: list[str]
    left_out: list[str]
    changed: list[str]
    num_files: int
    num_bytes: int

    def lines(self) -> list[str]:
        """What a person reads of it."""
        return [
            f"  arrays   {self.arrays}, {decimal(self.array_bytes)}",
            f"  objects  {self.objects}",
            f"  common   {', '.join(self.common) or 'nothing'}",
            *(f"  changed  {text}" for text in self.changed),
            *(f"  left out {text}" for text in self.left_out),
        ]


def convert_megatron(src: Path, dst: Path, to: str, *, allow_pickle: bool, leave_out_unknown: bool) -> Converted:
    """Write the checkpoint at `src` as one of ours, check it, and only then give it the name `dst`.

    Args:
        to: what a strategy of ours is called, with version 1: "zarr" or "tensorstore".

    Raises:
        CheckpointExistsError: there is something at `dst`.
        ConfigurationError: pickles are not allowed, or hold values that cannot go over.
        CorruptCheckpointError: something of the old checkpoint is missing or damaged.
        StorageError: what was written is not what is read back.
    """
    require_free(dst)
    stored = MegatronZarr(src)
    if stored.layout.headless:
        raise headless(src, stored.layout.headless[0])
    notes = _Notes([f"{path} (of no known meaning)" for path in stored.layout.others])
    unknown = _Notes()
    common = _common(src, allow_pickle, unknown)
    objects = _objects(src, allow_pickle, unknown)
    if unknown.left_out and not leave_out_unknown:
        raise ConfigurationError(
            f"{src} holds values of classes that are not built here: {_listed(unknown.left_out)}. Go on without them with "
            "leave_out_unknown=true, which says which they were."
        )
    state = _state(common, objects, _tensors(stored))
    with atomic_directory(dst) as folder:
        with use_topology(Topology.alone()):
            save(state, folder, (to, 1))
        examined = examine(folder)
        if examined.problems:
            raise StorageError(f"what was written for {dst} is not what is read back: {examined.problems[0]}")
    return Converted(
        src=str(src),
        dst=str(dst),
        to=to,
        arrays=len(stored.arrays),
        array_bytes=sum(array.num_bytes for array in stored.arrays.values()),
        objects=len(objects),
        common=[str(key) for key in common],
        left_out=notes.left_out + unknown.left_out,
        changed=unknown.changed,
        num_files=examined.num_files,
        num_bytes=examined.num_bytes,
    )


def _common(src: Path, allow_pickle: bool, notes: _Notes) -> dict[Any, Any]:
    common = load_megatron_common(src, allow_pickle=allow_pickle, unknown="keep")
    return _Carry(notes, "common.pt").entries(common, "")


def _objects(src: Path, allow_pickle: bool, notes: _Notes) -> list[ShardedObject]:
    found = []
    for unique_key, one in megatron_objects(src).items():
        data = load_megatron_object(src, unique_key, allow_pickle=allow_pickle, unknown="keep")
        one.data = _Carry(notes, unique_key)(data, "")
        found += [] if one.data is _LEFT_OUT else [one]
    return found


def _tensors(stored: MegatronZarr) -> dict[str, list[ShardedTensor]]:
    return {
        key: [ShardedTensor.at(key, values, array.shape, box.offsets) for box, values in _pieces(stored, key)]
        for key, array in stored.arrays.items()
    }


def _pieces(stored: MegatronZarr, key: str) -> list[tuple[Box, torch.Tensor]]:
    """A tensor's chunks. Megatron-Core wrote them raw; if somebody encoded them since, the tensor is read into memory."""
    mapped = stored.mapped(key)
    if mapped:
        return mapped
    array = stored.arrays[key]
    values = torch.empty(array.shape, dtype=torch_dtype(array.dtype))
    stored.read(key, whole(array.shape), values)
    return [(whole(array.shape), values)]


def _state(
    common: dict[Any, Any], objects: list[ShardedObject], tensors: Mapping[str, list[ShardedTensor]]
) -> dict[Any, Any]:
    """The sharded state dict to save. Tensors and objects go by their own keys, so where they stand in it means nothing."""
    name = "sharded"
    while name in common:
        name += "_"
    sharded = {key: part for key, part in (("tensors", dict(tensors)), ("objects", objects)) if part}
    return common | ({name: sharded} if sharded else {})  # an empty one would be a common value


_LEFT_OUT = object()


class _Carry:
    """Makes of what a pickle held what a checkpoint of ours can hold, and notes what cannot go over.

    What cannot is left out with the entry of a dictionary, or the attribute, that it is in, for in a list the rest would move up.
    """

    def __init__(self, notes: _Notes, file: str) -> None:
        self._notes = notes
        self._file = file

    def __call__(self, value: Any, path: str) -> Any:
        """The value to save, or `_LEFT_OUT`."""
        if isinstance(value, torch.Tensor):
            return value.detach()
        if isinstance(value, dict):
            return self.entries(value, path)
        if type(value) in (argparse.Namespace, types.SimpleNamespace):
            return type(value)(**self.entries(vars(value), path))
        if type(value) in (list, tuple, set, frozenset):
            items = [self(item, f"{path}[{at}]") for at, item in enumerate(value)]
            if any(item is _LEFT_OUT for item in items):
                self._notes.left_out.append(f"{self._place(path)} (all of this {type(value).__name__})")
                return _LEFT_OUT
            return type(value)(items)
        if isinstance(value, PurePath | torch.device):
            self._notes.changed.append(f"{self._place(path)}: the text {str(value)!r}, was a {type(value).__name__}")
            return str(value)
        return self._leaf(value, path)

    def entries(self, value: dict[Any, Any], path: str) -> dict[Any, Any]:
        """A dictionary without what cannot go over."""
        carried = {}
        for key, item in value.items():
            below = f"{path}.{key}" if path else str(key)
            if self._leaf(key, f"{path} (a key)") is _LEFT_OUT:
                continue
            made = self(item, below)
            if made is not _LEFT_OUT:
                carried[key] = made
        return carried

    def _leaf(self, value: Any, path: str) -> Any:
        try:
            to_json(value, path)
        except ConfigurationError:
            kind = (
                value.name
                if isinstance(value, UnknownObject)
                else f"{type(value).__module__}.{type(value).__qualname__}"
            )
            self._notes.left_out.append(f"{self._place(path)} ({kind})")
            return _LEFT_OUT
        return value

    def _place(self, path: str) -> str:
        return f"{self._file}: {path}" if path else self._file


def _listed(texts: list[str]) -> str:
    more = f" and {len(texts) - _NAMED} more" if len(texts) > _NAMED else ""
    return "; ".join(texts[:_NAMED]) + more
