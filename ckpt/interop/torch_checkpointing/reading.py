"""Open checkpoints of Meta's torch_checkpointing: files of the items of each rank, and `metadata.pkl`, of which no code runs.

    metadata.pkl                        world size, and of each item that has a resharder the sharding of its tensors, and its files
    <item>_<rank>.pt                    an item of a rank, by torch.save; DTensors with their local part
    other names                         items with a layout: JSON, raw bytes, safetensors (local parts alone), torch.save
    <item>.safetensors.index.json       with its files: an export of an item, which is read as such by the path of the index

The file `metadata.pkl` is missing where no item has a resharder, and in all but the first of the saves that a manager makes in the
foreground. Its items are components. Ranks have one item together if it is sharded, or the same on all of them; what differs between
ranks is an item for each, `<item>_<rank>`. Of a sharded item, all that is not sharded is that of the first rank.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ckpt.backends.safetensors_format import read_shard
from ckpt.errors import ConfigurationError, CorruptCheckpointError
from ckpt.format.box import Box, whole
from ckpt.format.dtypes import is_known
from ckpt.format.places import Place, is_inner_path
from ckpt.format.unknown import shown
from ckpt.interop.safetensors.hub import names_by_file, weights_at
from ckpt.interop.torch_checkpointing.shards import Shards, shards_of_metadata, shards_of_spec
from ckpt.interop.torch_save.archives import ArchivedTensor, located
from ckpt.interop.torch_save.old_folders import is_old_file
from ckpt.interop.torch_save.reading import Content, content_of
from ckpt.interop.unpickling import require_small, unpickle_inert
from ckpt.loading.other_checkpoint import FilePiece, OtherCheckpoint, OtherTensor, folder_with, refusing
from ckpt.state.flatten import Path as StatePath
from ckpt.state.flatten import key_of
from ckpt.state.plain import to_json
from ckpt.storage.checkpoint_files import files_below, is_file, names_below

METADATA = "metadata.pkl"
_BEGIN = b"metadata"
_VERSION = "2.0"
_UNFINISHED = "tmp_"
_MOST_BYTES = 4 << 30
_MOST_VALUE_BYTES = 1 << 30
_BY_DEFAULT = re.compile(r"[A-Za-z0-9_-]+_(?:0|[1-9][0-9]{0,8})\.pt")
_OF_RANK = re.compile(r"(?P<item>.+)_(?P<rank>0|[1-9][0-9]{0,8})(?P<suffix>(?:\.\w+)?)")
_INDEX = ".safetensors.index.json"
_TORCH, _JSON, _SAFETENSORS, _RAW = (f"{kind}Serialization" for kind in ("Torch", "Json", "Safetensors", "Raw"))
_KINDS = {".pt": _TORCH, ".json": _JSON, ".safetensors": _SAFETENSORS}

_NONE: Mapping[Any, Any] = MappingProxyType({})

_Key = tuple[Any, ...]
"""Keys and positions of a path, without the types of containers."""
_Files = dict[int, tuple[str, Content]]
"""The files of an item by rank, and what they hold."""
_Holders = dict[int, tuple[str, Content, StatePath]]
"""Where something is, by rank: file, what that holds, path in it."""
_Parts = dict[Box, tuple[str, ArchivedTensor]]
"""Parts of a tensor: where they belong, their file, and where they lie in it."""


def is_at(path: Path) -> bool:
    """Whether a folder has `metadata.pkl`, or `.pt` files that all have the names of items and ranks, and no weights of Hugging Face's."""
    if is_file(path / METADATA):
        with suppress(CorruptCheckpointError, OSError), files_below(path) as folder:
            return _BEGIN in folder.first_bytes(METADATA, 64)
    names = [name for name in names_below(path) if name.endswith(".pt")]
    are_named = all(_BY_DEFAULT.fullmatch(name) and not is_old_file(name) for name in names)
    return are_named and any(name.endswith("_0.pt") for name in names) and weights_at(path) is None


def open_at(path: Path) -> OtherCheckpoint:
    """Open it. Reads what describes the tensors in each file, and the plain values.

    Raises:
        ConfigurationError: it is a save that was not finished; or its metadata is of a version that is not known, or a file of a format.
        CorruptCheckpointError: a file is damaged or missing, or the parts of a tensor are not all of it.
    """
    if path.name.startswith(_UNFINISHED):
        raise ConfigurationError(
            f"{path} is a save of torch_checkpointing that was not finished: take another, or rename it if all its ranks have ended"
        )
    with refusing(path, "torch_checkpointing"):
        return _Opening(path).checkpoint()


class _Opening:
    """Reads the files of one checkpoint."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._all = Content("dict", {}, {}, {}, [])
        with files_below(root) as folder:
            self._names = {name for name in folder.below() if not name.startswith(".")}

    def checkpoint(self) -> OtherCheckpoint:
        metadata = self._metadata()
        layouts = {item: dict(self._layouts(item, described["rank_to_layout_info"])) for item, described in metadata.items()}
        named = [name for of_item in layouts.values() for name, _ in of_item.values()]
        if len(set(named)) < len(named):
            raise CorruptCheckpointError(f"{self._root / METADATA} names one file for several ranks or items")
        for item, of_item in layouts.items():
            groups = {_key(path): found for path, found in metadata[item]["nested_path_to_metadata"].items()}
            files = {rank: self._file(*layout, groups) for rank, layout in of_item.items() if layout[0] in self._names}
            self._join(item, files, groups, {name for name, _ in of_item.values()} - self._names)
        indexes = {f"{item}{_INDEX}" for item in metadata} & self._names
        exported = {name for index in indexes for name in names_by_file(self._root / index)}  # of the tensors of an item, again
        for item, names in _by_item(self._names - {METADATA, *named} - indexes - exported, metadata):
            files = {rank: self._file(name, _KINDS.get(Path(name).suffix, _RAW)) for rank, name in names.items()}
            if any(content.sharded for _, content in files.values()) or _are_copies(files):
                self._join(item, files)
            else:
                for rank, file in files.items():
                    self._join(file[0].removesuffix(Path(file[0]).suffix), {rank: file})
        held = self._all
        tensors = {repr(path): tensor for path, tensor in held.tensors.items()}
        return OtherCheckpoint(self._root, tensors, held.values, paths=held.paths, unread=held.unread)

    def _metadata(self) -> dict[str, Any]:
        """What `metadata.pkl` says of each item."""
        if METADATA not in self._names:
            return {}
        with files_below(self._root) as folder:
            document = unpickle_inert(folder.read(METADATA, _MOST_BYTES), str(self._root / METADATA))
        require_small(document, str(self._root / METADATA))  # ranks are looked up for each tensor
        if document.get("version") != _VERSION:
            found = f"{self._root / METADATA} is of version {shown(document.get('version'))}, where {_VERSION} is read"
            raise ConfigurationError(f"{found}: load it by torch_checkpointing 0.1.1, and save it again")
        return dict(document["metadata"])

    def _layouts(self, item: str, described: dict[Any, Any]) -> Iterator[tuple[int, tuple[str, str]]]:
        """Rank -> file and format."""
        for rank, layout in described.items():
            name, kind = f"{item}_{rank}.pt", _TORCH
            if layout is not None:
                name, kind = layout["file_path"], layout["serialization_format"]["type"]
            if not is_inner_path(name):
                raise CorruptCheckpointError(f"{self._root / METADATA} names {name!r:.80}, which is no file below its folder")
            yield int(rank), (name, kind)

    def _file(self, name: str, kind: str, keys: Collection[_Key] = ()) -> tuple[str, Content]:
        """Read what describes the tensors of a file. JSON and raw bytes are one value. `keys`: of the tensors that are described."""
        if kind == _TORCH:
            return name, content_of(self._root, name)
        if kind == _SAFETENSORS:
            return name, _of_safetensors(self._root, name, {".".join(map(str, key)): key for key in keys})
        if kind not in (_JSON, _RAW):
            raise ConfigurationError(f"{self._root / name} is of the format {shown(kind)}, which is not read here")
        return name, Content("value", {}, {(): partial(_value, self._root, name, kind)}, {}, [()])

    def _join(self, item: str, files: _Files, groups: Mapping[_Key, Any] = _NONE, missing: Collection[str] = ()) -> None:
        """Add an item of several ranks.

        Args:
            groups: key -> of ranks, with the sharding that each of them has.
            missing: files of the item that are described, and not there.
        """
        paths = {rank: {tuple(map(key_of, path)): path for path in files[rank][1].paths} for rank in sorted(files)}
        for key in dict.fromkeys([*(key for of_rank in paths.values() for key in of_rank), *groups]):
            holders = {rank: (*files[rank], of_rank[key]) for rank, of_rank in paths.items() if key in of_rank}
            _, held, inside = next(iter(holders.values()), ("", self._all, key))
            path: StatePath = (item, *inside)
            try:
                shards = _shards(holders, groups.get(key))
                if key in groups or shards:
                    self._all.tensors[path] = self._sharded(path, shards, holders, missing)
                    self._all.paths.append(path)
                else:
                    self._all.add(path, held, inside)
            except ConfigurationError as error:
                self._all.unread[path] = str(error)
                self._all.paths.append(path)

    def _sharded(
        self, path: StatePath, shards: Mapping[int, Shards], holders: _Holders, missing: Collection[str]
    ) -> OtherTensor:
        """Return a tensor of the parts of ranks. Of replicas, the first rank's is read."""
        name = ".".join(str(key_of(step)) for step in path)
        parts: _Parts = {}
        for rank, shard in shards.items():
            part = _part_in(self._root, name, shard, *holders[rank])
            if 0 not in shard.box.shape or 0 in shard.shape:
                parts.setdefault(shard.box, part)
        wholes = {(shard.dtype, shard.shape) for shard in shards.values()}
        found = sum(box.num_elements for box in parts)
        if [math.prod(shape) for _, shape in wholes] != [found]:
            lost = f"{self._root / min(missing)} is missing; " if missing else f"{self._root}: "
            shapes = " and ".join(str(list(shape)) for _, shape in wholes) or "not known"
            raise CorruptCheckpointError(f"{lost}the files that are there hold {found} elements of {name}, whose shape is {shapes}")
        first, (dtype, shape) = next(iter(shards)), wholes.pop()
        alone = holders[first][1].tensors.get(holders[first][2])
        if alone is not None and [*parts] == [whole(alone.shape)]:
            return replace(alone, path=path)
        pieces = partial(located, self._root, name, shape, [(box, *found_at) for box, found_at in parts.items()])
        return OtherTensor(path, dtype, shape, pieces, memory=tuple(parts.items()) or None)


def _key(path: str) -> _Key:
    """Parse a path of `metadata.pkl`."""
    with suppress(RecursionError):
        key = tuple(json.loads(path))
        if all(type(step) in (str, int) for step in key):
            return key
    raise ValueError(f"{path!r:.80} is no path")


def _shards(holders: _Holders, groups: Any) -> dict[int, Shards]:
    """What each rank holds of a tensor, by `metadata.pkl` or by the spec of its DTensor; {}: it is not sharded."""
    if groups is None:
        specs = {rank: held.sharded[path][1] for rank, (_, held, path) in holders.items() if path in held.sharded}
        return {rank: shards_of_spec(spec) for rank, spec in specs.items()}
    by_rank = {rank: group["sharding_metadata"] for group in groups for rank in holders.keys() & set(group["ranks"])}
    return {rank: shards_of_metadata(by_rank[rank], rank) for rank in sorted(by_rank)}


def _part_in(
    root: Place, name: str, shards: Shards, file: str, held: Content, path: StatePath
) -> tuple[str, ArchivedTensor]:
    """Find the part of a tensor in a file.

    Raises:
        ConfigurationError: what lies there is no tensor that can be read.
        CorruptCheckpointError: it is not of the type or shape that the sharding says.
    """
    local = held.archived.get(path) or held.sharded.get(path, (None,))[0]
    if local is None or not is_known(shards.dtype):
        raise ConfigurationError(held.unread.get(path, f"is no tensor that is read, and {METADATA} says {shown(shards.dtype)}"))
    found, expected = (local.dtype, local.shape), (shards.dtype, shards.box.shape)
    if found != expected:
        mismatch = f"is {found[0]} {list(found[1])}, and its sharding says {expected[0]} {list(expected[1])}"
        raise CorruptCheckpointError(f"{root / file}: {name} {mismatch}", file=file)
    return file, local


def _of_safetensors(root: Place, name: str, keys: Mapping[str, _Key]) -> Content:
    """What a file of safetensors holds, with the keys that its names stand for."""
    shard = read_shard(root / name, root)
    held = Content("dict", {}, {}, {}, [])
    for row, dtype, key, shape, box, start in shard.rows:
        path: StatePath = keys.get(key, (key,))
        held.paths.append(path)
        if row in shard.raw or box != whole(shape):
            held.unread[path] = f"is of {shard.raw.get(row, 'a part of a tensor')}, which is not read here"
            continue
        stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
        held.archived[path] = ArchivedTensor(dtype, shape, stride, None, shard.data_start + start)
        held.tensors[path] = OtherTensor(path, dtype, shape, FilePiece(box, name, shard.data_start + start))
    return held


def _value(root: Place, name: str, kind: str) -> Any:
    """Read a file of JSON, or of raw bytes."""
    with folder_with(root, name) as folder:
        data = folder.read(name, _MOST_VALUE_BYTES)
    try:
        return data if kind == _RAW else json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{root / name} is no JSON: {type(error).__name__}", file=name) from None


def _by_item(names: Collection[str], taken: Collection[str]) -> Iterator[tuple[str, dict[int, str]]]:
    """Item -> rank -> file, by the names of files. A name without a rank is of rank 0. Items whose names are taken keep their suffix."""
    found: dict[tuple[str, str], dict[int, str]] = {}
    for name in sorted(names):
        match = _OF_RANK.fullmatch(name)
        item, rank, suffix = match.groups() if match else (str(Path(name).with_suffix("")), 0, Path(name).suffix)
        found.setdefault((item, suffix), {})[int(rank)] = name
    stems = Counter([*taken, *(item for item, _ in found)])
    for (item, suffix), files in found.items():
        yield item if stems[item] == 1 else item + suffix, files


def _are_copies(files: _Files) -> bool:
    """Whether these are files of the first ranks that hold the same: plain values, and tensors by the checksums of their archives."""
    first, *others = [_digest(files[rank][1]) for rank in sorted(files)]
    return sorted(files) == [*range(len(files))] and (not others or (first is not None and {first} == set(others)))


def _digest(held: Content) -> str | None:
    """What a file holds, for comparison; None: it cannot be told."""
    if held.unread or any(not tensor.crc and 0 not in tensor.shape for tensor in held.archived.values()):
        return None
    try:
        values = [to_json(read(), "") for read in held.values.values()]
    except ConfigurationError:
        return None
    return repr((held.paths, [replace(tensor, header=None) for tensor in held.archived.values()], values))
