"""Export the tensors of a checkpoint as plain safetensors files in Hugging Face's layout: whole tensors by name.

The place of each tensor in a file is known before it is read: ranks copy tensors in pieces, and need memory for two pieces each.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import accumulate
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from ckpt.backends.safetensors_format import (
    INDEX_NAME,
    MOST_HEADER_BYTES,
    Entry,
    Header,
    entries_of,
    index_bytes,
    name_of,
)
from ckpt.errors import Argument, ConfigurationError, MissingStateError, needing
from ckpt.format.box import whole
from ckpt.format.dtypes import item_bytes
from ckpt.format.manifest import SHARDED, STATE, ArrayEntry, CheckpointManifest
from ckpt.format.places import COMPONENT_KEY, Place
from ckpt.format.records import Content
from ckpt.format.strict_json import fit, parse
from ckpt.interop.megatron.zarr import MegatronZarr
from ckpt.interop.new_files import PlacedBytes, require_read_back, shared_directory, write_pieces
from ckpt.interop.opened import (
    Opened,
    OpenedTensor,
    Piece,
    Readable,
    batches,
    bytes_of_piece,
    read_pieces,
    share_of,
    slabs,
)
from ckpt.interop.safetensors.reading import ONE_FILE
from ckpt.loading.direct import DirectLoad
from ckpt.loading.report import some_of
from ckpt.loading.sources import CheckpointSource, ManifestSource
from ckpt.loading.strategy import Reading, ReadRequest
from ckpt.memory.device import device_of
from ckpt.ranks.topology import Topology
from ckpt.state.adapters import CONFIG
from ckpt.state.sharing import OWN_COPIES, SharingPattern
from ckpt.storage.checkpoint_files import CheckpointFolder
from ckpt.storage.files import make_durable, read_once
from ckpt.storage.hub_snapshots import files_in

Found = TypeVar("Found")

AT_ONCE_BYTES = 64 << 20
"""Bytes of a tensor in memory at once."""

_COPIED_BYTES = 1 << 20
CONFIG_NAME = "config.json"
_MOST_CONFIG_BYTES = 16 << 20
TRAINER, MODEL_FILES = "trainer", "model"
"""The component, and the first step of its keys there, that hold the files of a model whose trainer knows them, as bytes."""
_BESIDE_MODEL = ("*config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model", "chat_template.*")  # fmt: skip # noqa: E501


@dataclass(frozen=True, slots=True)
class Selection:
    """The tensors of a checkpoint to export.

    Attributes:
        source: to read them from.
        tensors: by their names in the file, in the order of the checkpoint.
        aliases: second name -> first name, of tied tensors that are both selected: only the first is exported.
    """

    source: Readable
    tensors: Mapping[str, OpenedTensor]
    aliases: Mapping[str, str]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.entry.num_bytes for tensor in self.tensors.values())


@dataclass(frozen=True, slots=True)
class Exported:
    """The result of an export, which was read back; equal on all ranks.

    Attributes:
        files: names of the safetensors files.
        renamed: tensor -> name in the file, where the format does not allow the tensor's name.
        as_pairs: complex tensor -> its type, which the format lacks; stored as real numbers with one more dimension.
    """

    files: Sequence[str]
    renamed: Mapping[str, str]
    as_pairs: Mapping[str, str]


def select(source: ManifestSource, src: Place, component: str | None) -> Selection:
    """Choose the tensors of one component of a checkpoint in our format.

    Args:
        source: opened at `src`.
        component: key of the component, or one of its copies, such as "rng/rank-00003". For the checkpoint of a sharded state dict,
            which has no components, the first part of keys, such as "model" of "model.w". The names in the files leave it out. None:
            all tensors, by full names.

    Raises:
        MissingStateError: the component does not exist, or has no tensor.
        ConfigurationError: the component holds several copies.
    """
    manifest = source.manifest
    _require_one_copy(manifest, component)
    is_sharded = SHARDED in manifest.components and component not in manifest.components
    above = f"{SHARDED}/" if is_sharded else ""
    keys = {name.removeprefix(above): name for name in manifest.arrays}
    chosen = _chosen(src, component, keys, "." if is_sharded else "/")
    names = {stored: name for name, stored in chosen.items()}
    tensors, aliases = {}, {}
    for name, stored in chosen.items():
        first = manifest.arrays[stored].alias_of or stored
        if first != stored and first in names:
            aliases[name] = names[first]
        else:
            tensors[name] = OpenedTensor(source, first, manifest.arrays[first])
    return Selection(source, tensors, aliases)


def select_of_megatron(src: Path, component: str | None, topology: Topology) -> Selection:
    """Choose the tensors of a checkpoint that Megatron-Core's zarr strategy wrote. Arguments as for `select`.

    Raises: those of `MegatronZarr`, and
        MissingStateError: no key begins with the component.
    """
    opened = MegatronZarr(src).require_whole()
    source = _MegatronTensors(opened, topology)
    chosen = _chosen(src, component, opened.arrays, ".")
    for array in chosen.values():
        opened.require_chunks(array)
    entries = {name: ArrayEntry(array.dtype, array.shape, grid=array.grid) for name, array in chosen.items()}
    return Selection(source, {name: OpenedTensor(source, chosen[name].key, entry) for name, entry in entries.items()}, {})


class _MegatronTensors(NamedTuple):
    """See `Readable`."""

    stored: MegatronZarr
    topology: Topology

    def prepare(self, requests: Sequence[ReadRequest]) -> Reading:
        strategy = DirectLoad(read_at=read_once)
        return strategy.prepare(requests, self.stored, self.topology, device_of(()), verify=True)


def select_of_other(source: CheckpointSource, src: Place, component: str | None) -> Selection:
    """Choose the tensors of a checkpoint of another program, or of one state dict. Arguments as for `select`.

    Raises:
        MissingStateError: the component does not exist, or has no tensor.
    """
    key = STATE if component is None else component
    opened = Opened(source, by_component=key != STATE)
    chosen = opened.tensors(key, "") if COMPONENT_KEY.fullmatch(key) else {}
    _require_some(src, component, chosen, opened.source.component_keys(), "/")
    return Selection(opened.source, chosen, {})


def adapter_config_in(source: CheckpointSource, component: str | None) -> str | None:
    """Return the text of adapter_config.json, if the component is an adapter of PEFT. Arguments as for `select`."""
    opened = Opened(source, by_component=True)
    found = opened.plain(component, "").get(CONFIG) if component in opened.keys and opened.copies(component) == [""] else None
    return found if isinstance(found, str) else None


def values_beside(source: CheckpointSource, component: str | None) -> list[str]:
    """Return the names of the plain values of what is exported, which the format cannot hold. Arguments as for `select`."""
    opened = Opened(source, by_component=component not in (None, STATE))
    key, _, copy = (component or "").partition("/")
    found = [
        (f"{part}/{prefix}" if component is None and opened.keys != [STATE] else "", opened.plain(part, prefix))
        for part in opened.keys
        if component is None or part == key
        for prefix in opened.copies(part)
        if prefix.startswith(copy)
    ]
    return [f"{start}{name}" for start, plain in found for name in plain]


def _chosen(src: Place, component: str | None, found: Mapping[str, Found], separator: str) -> dict[str, Found]:
    """Name in the file -> what is found under the key of that tensor, of the keys that begin with the component."""
    start = "" if component is None else f"{component}{separator}"
    chosen = {key.removeprefix(start): tensor for key, tensor in found.items() if key.startswith(start)}
    _require_some(src, component, chosen, found, separator)
    return chosen


def _require_one_copy(manifest: CheckpointManifest, component: str | None) -> None:
    one = manifest.components.get(component or "")
    if one is None or SharingPattern(one.sharing_pattern) not in OWN_COPIES:
        return
    copies = dict.fromkeys(name.partition("/")[0] for name in manifest.arrays_of(one.key))
    if copies:
        raise ConfigurationError(
            f"component {one.key} is {one.sharing_pattern} and holds {some_of(list(copies))}; choose one copy, such as ",
            Argument("component", f"{one.key}/{next(iter(copies))}"),
        )


def _require_some(
    src: Place, component: str | None, chosen: Collection[str], keys: Collection[str], separator: str
) -> None:
    if chosen:
        return
    first = list(dict.fromkeys(key.partition(separator)[0] for key in keys))
    held = some_of(first) if first else "none at all"
    raise MissingStateError(
        f"{src} holds no tensor of ",
        Argument("component", component),
        f"; it has {held}. Choose another, or ",
        Argument("component", None),
        " for everything",
    )


class ModelFiles(NamedTuple):
    """The files of a folder of Hugging Face's that tell how its model is used: configs, tokenizer, chat template.

    Attributes:
        root: a folder to open.
        places: name of a file -> its path below `root`.
        made: name of a file -> its content, for files that are in no folder, or are not as they are there.
    """

    root: Path
    places: Mapping[str, str]
    made: Mapping[str, bytes] = MappingProxyType({})

    @property
    def config(self) -> dict[str, Any] | None:
        """The content of `config.json`; None: there is none.

        Raises:
            CorruptCheckpointError: it is no JSON object.
        """
        data = self.read(CONFIG_NAME)
        return None if data is None else fit(parse(data, CONFIG_NAME), dict[str, Any], CONFIG_NAME)

    def read(self, name: str) -> bytes | None:
        """Return the content of a config; None: there is none of this name."""
        data = self.made.get(name)
        if data is None and name in self.places:
            with CheckpointFolder(self.root) as folder:
                data = folder.read(self.places[name], _MOST_CONFIG_BYTES)
        return data

    def without(self, name: str) -> ModelFiles:
        """Return the same files but one."""
        places = {key: place for key, place in self.places.items() if key != name}
        return self._replace(places=places, made={key: data for key, data in self.made.items() if key != name})

    def with_config(self, config: Mapping[str, Any]) -> ModelFiles:
        """Return the same files with another config, in place of the first."""
        return self._replace(made={**self.made, CONFIG_NAME: f"{json.dumps(config, indent=2)}\n".encode()})


def model_files_in(src: Path) -> ModelFiles:
    """Find the files beside a model. Links are left out, but those of a snapshot in Hugging Face's cache (`ckpt.storage.hub_snapshots`).

    Raises:
        CorruptCheckpointError: a link of a snapshot leads elsewhere.
    """
    root, place_of = files_in(src)
    assert isinstance(root, Path), "as src is"
    names = {path.name for pattern in _BESIDE_MODEL for path in src.glob(pattern) if path.is_file()}
    return ModelFiles(
        root, {name: place_of(name) for name in sorted(names) if root != src or not (src / name).is_symlink()}
    )


def model_files_of(source: CheckpointSource) -> ModelFiles | None:
    """Return the files of the model that a trainer has saved with a checkpoint (`ckpt.integrations.huggingface`); None: it has none."""
    opened = Opened(source)
    if TRAINER not in opened.keys:
        return None
    start = f"{MODEL_FILES}."
    tensors = {name.removeprefix(start): tensor for name, tensor in opened.tensors(TRAINER, "").items() if name.startswith(start)}
    made = {
        name: bytes(bytes_of_piece(tensor.read(whole(tensor.entry.shape))))
        for name, tensor in tensors.items()
        if PurePath(name).name == name and any(fnmatch(name, pattern) for pattern in _BESIDE_MODEL)
    }
    return ModelFiles(Path(), {}, made) if made else None


def export(
    selection: Selection,
    dst: Path,
    max_shard_bytes: int,
    topology: Topology,
    *,
    beside: ModelFiles | None = None,
    check: Callable[[Path], None] | None = None,
    is_adapter: bool = False,
) -> Exported:
    """Write the selected tensors as `model.safetensors`, or, if they take more than `max_shard_bytes`, as several files and an index.

    A larger tensor has a file of its own. All files are read back before `dst` appears. Collective; the files do not depend on the
    number of ranks.

    Args:
        selection: equal on all ranks.
        dst: nothing is there, or an empty folder.
        beside: files to copy into it. The lead.
        check: called with the finished folder before it becomes `dst`, to raise if it is not as it should be. The lead.
        is_adapter: the files are those that PEFT's `from_pretrained` reads, `adapter_model.safetensors` alone.

    Raises:
        CheckpointExistsError: there is something at `dst`.
        CorruptCheckpointError: a part of the checkpoint is missing or damaged.
        ConfigurationError: there are too many tensors for one header.
        StorageError: the bytes read back differ from those written.
    """
    wholes = [Piece(name, whole(tensor.entry.shape), tensor.entry.dtype) for name, tensor in selection.tensors.items()]
    shards = list(batches(wholes, max_shard_bytes)) or [[]]
    of = len(shards)
    file_names = [ONE_FILE] if of == 1 else [f"model-{number:05d}-of-{of:05d}.safetensors" for number in range(1, of + 1)]
    files = {name: _in_order(few) for name, few in zip(file_names, shards, strict=True)}
    if is_adapter:
        files = {f"adapter_{ONE_FILE}": _in_order(wholes)}
    with topology.operation(f"export to {dst}"):
        with topology.phase("plan"):
            sections = [section for file, few in files.items() for section in _sections(file, few, selection.tensors)]
            mine = share_of(sections, [section.num_bytes for section in sections], topology)
        with shared_directory(dst, topology) as folder:
            what = f"the part of rank {topology.rank}"
            with topology.phase("write"), needing(what, lambda: sum(section.num_bytes for section in mine)):
                runs = write_pieces(_placed(selection, folder, mine), topology.progress)
            with topology.phase("read back"):
                require_read_back(runs, dst, topology.progress)
                if topology.is_lead:
                    _finish(folder, dst, list(files), beside, topology)
            with topology.phase("check"):
                if check is not None:
                    with topology.moving():
                        check(folder)
    names = {tensor.name: name_of(Content(tensor.name, tensor.box.shape, tensor.box)) for tensor in wholes}
    return Exported(
        files=list(files),
        renamed={ours: theirs for ours, theirs in names.items() if ours != theirs},
        as_pairs={tensor.name: tensor.dtype for tensor in wholes if tensor.dtype in ("complex128", "complex32")},
    )


def _finish(folder: Path, dst: Path, files: Sequence[str], beside: ModelFiles | None, topology: Topology) -> None:
    """Write the index of several files, copy the files beside them, and make the folder durable. The lead."""
    sizes = dict.fromkeys(files, 0)  # on the disk already
    if len(files) > 1:
        sizes[INDEX_NAME] = (folder / INDEX_NAME).write_bytes(index_bytes(folder, files, topology.progress))
    if beside is not None:
        copies = write_pieces(_pieces_beside(beside, folder), topology.progress)
        require_read_back(copies, dst, topology.progress)
    make_durable(folder, sizes, [folder], topology.progress)


def _pieces_beside(beside: ModelFiles, folder: Path) -> Iterator[PlacedBytes]:
    """Yield the bytes of files, piece by piece."""
    with CheckpointFolder(beside.root) as source:
        for name in beside.places.keys() - beside.made.keys():
            with source.stream(beside.places[name]) as stream:
                at, data = 0, stream.read(_COPIED_BYTES)
                while data or at == 0:  # an empty file, too
                    yield PlacedBytes(folder / name, at, memoryview(data))
                    at += max(len(data), 1)
                    data = stream.read(_COPIED_BYTES)
    yield from (PlacedBytes(folder / name, 0, memoryview(data)) for name, data in beside.made.items())


def _in_order(tensors: Sequence[Piece]) -> list[Piece]:
    """Sort by element size, largest first: readers need each tensor to begin at a multiple of its element size."""
    return sorted(tensors, key=lambda tensor: -item_bytes(tensor.dtype))


def _header(file: str, tensors: Sequence[Piece]) -> bytes:
    starts = accumulate((tensor.num_bytes for tensor in tensors), initial=0)
    entries: list[tuple[int, list[Entry]]] = [
        (start, entries_of(tensor.dtype, [Content(tensor.name, tensor.box.shape, tensor.box)], 0))
        for start, tensor in zip(starts, tensors, strict=False)
    ]
    header = Header(entry for _, few in entries for entry in few)
    if header.num_bytes - 8 > MOST_HEADER_BYTES:
        raise ConfigurationError(
            f"{file} would hold {len(tensors)} tensors, whose names and places take {header.num_bytes} bytes; readers of safetensors "
            f"take {MOST_HEADER_BYTES}: set a smaller max_shard_size"
        )
    return header.to_bytes(entries)


class _Section(NamedTuple):
    """The header of a file, or a piece of a tensor in it; `start` is its first byte in the file."""

    file: str
    start: int
    num_bytes: int
    content: bytes | Piece


def _sections(file: str, wholes: Sequence[Piece], tensors: Mapping[str, OpenedTensor]) -> Iterator[_Section]:
    """Yield everything in a file, in order: its header, and its tensors in pieces that are read at once."""
    header = _header(file, wholes)
    yield _Section(file, 0, len(header), header)
    start = len(header)
    for tensor in wholes:
        for box in slabs(tensors[tensor.name].entry, AT_ONCE_BYTES):
            piece = tensor._replace(box=box)
            yield _Section(file, start, piece.num_bytes, piece)
            start += piece.num_bytes


def _placed(selection: Selection, folder: Path, sections: Sequence[_Section]) -> Iterator[PlacedBytes]:
    """Yield the checked bytes of sections, in order; each is valid until the next."""
    pieces = [section.content for section in sections if isinstance(section.content, Piece)]
    coming = read_pieces(selection.source, pieces, selection.tensors)
    for file, start, _, content in sections:
        data = bytes_of_piece(next(coming)[1]) if isinstance(content, Piece) else memoryview(content)
        yield PlacedBytes(folder / file, start, data)
