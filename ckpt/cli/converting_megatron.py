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
from ckpt.cli.arguments import argument
from ckpt.dist_checkpointing.mapping import ShardedObject
from ckpt.dist_checkpointing.serialization import load_common_state_dict, save
from ckpt.dist_checkpointing.validation import verify_checkpoint_and_load_strategy
from ckpt.errors import ConfigurationError, StorageError
from ckpt.format.places import Place
from ckpt.format.unknown import UnknownObject
from ckpt.interop.megatron import zarr as megatron_zarr
from ckpt.interop.megatron.reading import common_state, open_sharded
from ckpt.interop.megatron.reading import is_at as is_torch_dist
from ckpt.interop.megatron.writing import ShardedParts
from ckpt.interop.new_files import shared_directory
from ckpt.interop.opened import share_of
from ckpt.interop.programs import PROGRAMS
from ckpt.loading.other_checkpoint import OtherCheckpoint
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

    num_files: int
    num_bytes: int
    held: dict[str, Any]
    lines: Sequence[str]


def described(dst: Place, topology: Topology, held: dict[str, Any], lines: list[str]) -> Converted:
    """Return the result, with the files as the lead finds them."""
    if not isinstance(dst, Path):
        in_store = ObjectFiles(dst).sizes() if topology.is_lead else []
        return Converted(len(in_store), sum(in_store), held, lines)
    files = [dst] if dst.is_file() else dst.rglob("*")
    sizes = [file.stat().st_size for file in files if file.is_file()] if topology.is_lead else []
    return Converted(len(sizes), sum(sizes), held, lines)


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
        old = (_of_torch_dist if is_torch_dist(src) else _of_zarr)(src, allow_pickle)
        plain = _PlainValues()
        common = plain.entries(old.common, "")
        objects = _objects(old, plain)
        if plain.left_out and not leave_out_unknown:
            raise ConfigurationError(
                f"{src} holds values of classes that are not built here: {some_of(plain.left_out)}. Leave them out with "
                f"{argument('leave_out_unknown')}"
            )
        tensors = old.stored.tensors
        pieces = [
            ShardedTensor.at(key, values, tensor.shape, box.offsets)
            for key, tensor in tensors.items()
            for box, values in old.stored.mapped(key)
        ]
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
    held: dict[str, Any] = {"arrays": len(tensors), "array_bytes": array_bytes, "objects": len(objects)}
    held |= {"common": names, "left_out": left_out, "changed": plain.changed}
    lines = [
        f"  arrays   {len(tensors)}, {decimal(array_bytes)}",
        f"  objects  {len(objects)}",
        f"  common   {', '.join(names) or 'nothing'}",
    ]
    return described(dst, topology, held, lines)


def sharded_parts(src: Path) -> ShardedParts:
    """What the sharded state dict at `src`, in our format, holds beside its tensors."""

    def objects() -> dict[str, list[Any]]:
        with use_topology(Topology.alone()):
            _, common = verify_checkpoint_and_load_strategy(str(src))
            found: dict[str, Any] = common.load_sharded_objects(dict(common.load_sharded_metadata(src)), src)
        return {unique_key: [value] for unique_key, value in found.items()}

    def common() -> dict[str, Any]:
        with use_topology(Topology.alone()):
            return load_common_state_dict(src)

    return ShardedParts(objects, common)


@dataclass(frozen=True)
class _Old:
    """What the old checkpoint holds.

    Attributes:
        stored: its tensors.
        common: its common state; inert objects stand for those of unknown classes, as in the objects.
        objects: unique key -> reads the object.
        others: files of no known meaning.
    """

    stored: OtherCheckpoint
    common: dict[Any, Any]
    objects: Mapping[str, Callable[[], Any]]
    others: Sequence[str] = ()


def _of_zarr(src: Path, allow_pickle: bool) -> _Old:
    stored = megatron_zarr.MegatronZarr(src).require_whole()
    read = partial(megatron_zarr.load_megatron_object, src, allow_pickle=allow_pickle, unknown="keep")
    objects = {unique_key: partial(read, unique_key) for unique_key in megatron_zarr.megatron_objects(src)}
    common = megatron_zarr.load_megatron_common(src, allow_pickle=allow_pickle, unknown="keep")
    return _Old(stored, common, objects, stored.layout.others)


def _of_torch_dist(src: Path, allow_pickle: bool) -> _Old:
    PROGRAMS["megatron"].require_allowed(src, allow_pickle=allow_pickle)
    stored = open_sharded(src)
    for (key,), why in stored.unread.items():
        raise ConfigurationError(f"{src}: {key} {why}: leave it out where it is written")
    return _Old(stored, common_state(src), {str(key): read for (key,), read in stored.values.items()})


def _objects(old: _Old, plain: _PlainValues) -> list[ShardedObject]:
    found = []
    for unique_key, read in old.objects.items():
        plain.file = unique_key
        one = ShardedObject.empty_from_unique_key(unique_key)
        one.data = plain.of(read(), "")
        found += [] if one.data is _LEFT_OUT else [one]
    return found


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
