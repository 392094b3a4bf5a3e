"""Convert a checkpoint of Megatron-Core, of its zarr strategy or `torch_dist`: tensors, objects and common state become one of ours.

Tensors are saved from memory-mapped files, chunk by chunk, so that memory is needed only for the chunks in flight.
"""

from __future__ import annotations

import argparse
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePath
from typing import Any

import torch
from rich.filesize import decimal

from ckpt.catalog.verify import examine
from ckpt.convert.atomic_directory import shared_directory
from ckpt.convert.opened import share_of
from ckpt.dist_checkpointing.mapping import ShardedObject
from ckpt.dist_checkpointing.megatron import zarr as megatron_zarr
from ckpt.dist_checkpointing.megatron.layout import headless
from ckpt.dist_checkpointing.serialization import save
from ckpt.errors import ConfigurationError, StorageError
from ckpt.errors.arguments import argument
from ckpt.format.box import Box, whole
from ckpt.format.dtypes import torch_dtype
from ckpt.format.places import Place
from ckpt.format.unpickling import UnknownObject
from ckpt.loading.other_formats.megatron_folders import common_state, is_megatron, open_sharded
from ckpt.loading.report import some_of
from ckpt.ranks.default_topology import use_topology
from ckpt.ranks.topology import Topology
from ckpt.state.plain import to_json
from ckpt.state.sharded_tensor import ShardedTensor
from ckpt.storage.objects.files import ObjectFiles


@dataclass(frozen=True)
class Converted:
    """A new checkpoint, or new files: written, and read back.

    Attributes:
        num_files, num_bytes: of what was written.
        held: its content, under the keys of the command's JSON.
        lines: its content, for people.
    """

    src: str
    dst: str
    to: str
    num_files: int
    num_bytes: int
    held: dict[str, Any]
    lines: Sequence[str]


def described(
    src: str | Path, dst: Place, to: str, topology: Topology, held: dict[str, Any], lines: Sequence[str]
) -> Converted:
    """Return the result, with the files as the lead finds them."""
    if not isinstance(dst, Path):
        in_store = ObjectFiles(dst).sizes() if topology.is_lead else []
        return Converted(str(src), str(dst), to, len(in_store), sum(in_store), held, lines)
    files = [dst] if dst.is_file() else dst.rglob("*")
    sizes = [file.stat().st_size for file in files if file.is_file()] if topology.is_lead else []
    return Converted(str(src), str(dst), to, len(sizes), sum(sizes), held, lines)


def convert_megatron(
    src: Path,
    dst: Path,
    to: str,
    topology: Topology,
    shown: Callable[[int], AbstractContextManager[None]],
    *,
    allow_pickle: bool,
    leave_out_unknown: bool,
) -> Converted:
    """Write the checkpoint at `src` in this library's format, verify it, and then rename it to `dst`. Collective.

    Args:
        to: the name of a strategy of version 1: "zarr" or "tensorstore".
        shown: shows the progress of a block, given the bytes of all tensors.

    Returns:
        its files are counted on the lead.

    Raises:
        CheckpointExistsError: `dst` exists and is not empty.
        ConfigurationError: pickles are not allowed, or hold values that cannot be converted.
        CorruptCheckpointError: the old checkpoint is damaged or incomplete.
        StorageError: the bytes read back differ from those written.
    """
    with topology.phase("open"):
        old = (_of_torch_dist if is_megatron(src) else _of_zarr)(src, allow_pickle)
        plain = _PlainValues()
        common = plain.entries(old.common, "")
        objects = _objects(old, plain)
        if plain.left_out and not leave_out_unknown:
            raise ConfigurationError(
                f"{src} holds values of classes that are not built here: {some_of(plain.left_out)}. Leave them out with "
                f"{argument('leave_out_unknown')}"
            )
    pieces = [piece for of_key in old.tensors.values() for piece in of_key]
    sizes = [0 if piece.data is None else piece.data.nbytes for piece in pieces]
    state = _state(common, objects if topology.is_lead else [], share_of(pieces, sizes, topology))
    array_bytes = sum(sizes)
    with topology.operation(f"convert to {dst}"), shown(array_bytes), shared_directory(dst, topology) as folder:
        with use_topology(topology):
            save(state, folder, (to, 1))
        with topology.phase("read back"):
            examined = examine(folder, writers=[topology.rank], progress=topology.progress)
            if examined.problems:
                raise StorageError(f"what was written for {dst} is not what is read back: {examined.problems[0]}")
    names = [str(key) for key in common]
    left_out = [*(f"{path} (of no known meaning)" for path in old.others), *plain.left_out]
    held: dict[str, Any] = {"arrays": len(old.tensors), "array_bytes": array_bytes, "objects": len(objects)}
    held |= {"common": names, "left_out": left_out, "changed": plain.changed}
    lines = [
        f"  arrays   {len(old.tensors)}, {decimal(array_bytes)}",
        f"  objects  {len(objects)}",
        f"  common   {', '.join(names) or 'nothing'}",
    ]
    return described(src, dst, to, topology, held, lines)


@dataclass(frozen=True)
class _Old:
    """What the old checkpoint holds.

    Attributes:
        common: its common state; inert objects stand for those of unknown classes, as in the objects.
        objects: unique key -> reads the object.
        tensors: pieces by key, mapped.
        others: files of no known meaning.
    """

    common: dict[Any, Any]
    objects: Mapping[str, Callable[[], Any]]
    tensors: Mapping[str, list[ShardedTensor]]
    others: Sequence[str] = ()


def _of_zarr(src: Path, allow_pickle: bool) -> _Old:
    stored = megatron_zarr.MegatronZarr(src)
    if stored.layout.headless:
        raise headless(src, stored.layout.headless[0])
    read = partial(megatron_zarr.load_megatron_object, src, allow_pickle=allow_pickle, unknown="keep")
    return _Old(
        megatron_zarr.load_megatron_common(src, allow_pickle=allow_pickle, unknown="keep"),
        {unique_key: partial(read, unique_key) for unique_key in megatron_zarr.megatron_objects(src)},
        {key: _sharded(key, array.shape, _pieces(stored, key)) for key, array in stored.arrays.items()},
        stored.layout.others,
    )


def _of_torch_dist(src: Path, allow_pickle: bool) -> _Old:
    stored = open_sharded(src, allow_pickle=allow_pickle)
    for (key,), why in stored.unread.items():
        raise ConfigurationError(f"{src}: {key} {why}: leave it out where it is written")
    objects = {str(key): read for (key,), read in stored.values.items()}
    tensors = {key: _sharded(key, tensor.shape, stored.mapped(key)) for key, tensor in stored.tensors.items()}
    return _Old(common_state(src), objects, tensors)


def _sharded(key: str, shape: tuple[int, ...], pieces: list[tuple[Box, torch.Tensor]]) -> list[ShardedTensor]:
    return [ShardedTensor.at(key, values, shape, box.offsets) for box, values in pieces]


def _objects(old: _Old, plain: _PlainValues) -> list[ShardedObject]:
    found = []
    for unique_key, read in old.objects.items():
        plain.file = unique_key
        one = ShardedObject.empty_from_unique_key(unique_key)
        one.data = plain.of(read(), "")
        found += [] if one.data is _LEFT_OUT else [one]
    return found


def _pieces(stored: megatron_zarr.MegatronZarr, key: str) -> list[tuple[Box, torch.Tensor]]:
    """A tensor's chunks, mapped. Megatron-Core writes them raw; a tensor with encoded chunks is read into memory."""
    mapped = stored.mapped(key)
    if mapped:
        return mapped
    array = stored.arrays[key]
    values = torch.empty(array.shape, dtype=torch_dtype(array.dtype))
    stored.read(key, whole(array.shape), values)
    return [(whole(array.shape), values)]


def _state(common: dict[Any, Any], objects: list[ShardedObject], tensors: Sequence[ShardedTensor]) -> dict[Any, Any]:
    """The sharded state dict to save. Tensors and objects have keys of their own, so their place in it does not matter."""
    name = "sharded"
    while name in common:
        name += "_"
    sharded = {key: part for key, part in (("tensors", list(tensors)), ("objects", objects)) if part}
    return common | ({name: sharded} if sharded else {})  # an empty dictionary would be saved as a common value


_LEFT_OUT = object()


@dataclass
class _PlainValues:
    """Converts values of a pickle to values that a checkpoint of this library can hold.

    A value that cannot be converted is left out with the dictionary entry or the attribute that holds it, not alone: in a list the
    later items would move up.

    Attributes:
        file: that holds the values, for the texts below.
        left_out: values without a plain form: the place, and the class.
        changed: converted values: the place, and the new value.
    """

    file: str = "common.pt"
    left_out: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)

    def of(self, value: Any, path: str) -> Any:
        """Return the value to save, or `_LEFT_OUT`."""
        if isinstance(value, torch.Tensor):
            return value.detach()
        if isinstance(value, dict):
            return self.entries(value, path)
        if type(value) in (argparse.Namespace, types.SimpleNamespace):
            return type(value)(**self.entries(vars(value), path))
        if type(value) in (list, tuple, set, frozenset):
            items = [self.of(item, f"{path}[{at}]") for at, item in enumerate(value)]
            if any(item is _LEFT_OUT for item in items):
                self.left_out.append(f"{self._place(path)} (all of this {type(value).__name__})")
                return _LEFT_OUT
            return type(value)(items)
        if isinstance(value, PurePath | torch.device):
            self.changed.append(f"{self._place(path)}: the text {str(value)!r}, was a {type(value).__name__}")
            return str(value)
        return self._leaf(value, path)

    def entries(self, value: dict[Any, Any], path: str) -> dict[Any, Any]:
        """Return a dictionary without the entries that cannot be converted."""
        carried = {}
        for key, item in value.items():
            below = f"{path}.{key}" if path else str(key)
            if self._leaf(key, f"{path} (a key)") is _LEFT_OUT:
                continue
            made = self.of(item, below)
            if made is not _LEFT_OUT:
                carried[key] = made
        return carried

    def _leaf(self, value: Any, path: str) -> Any:
        try:
            to_json(value, path)
        except ConfigurationError:
            own = f"{type(value).__module__}.{type(value).__qualname__}"
            kind = value.name if isinstance(value, UnknownObject) else own
            self.left_out.append(f"{self._place(path)} ({kind})")
            return _LEFT_OUT
        return value

    def _place(self, path: str) -> str:
        return f"{self.file}: {path}" if path else self.file
