"""Export the tensors of a checkpoint as plain safetensors files in Hugging Face's layout: whole tensors by name.

The place of each tensor in a file is known before it is read, so tensors are copied in pieces, and memory is needed for one piece.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import Any

import xxhash

from ckpt.backends.safetensors_format import (
    INDEX_NAME,
    MOST_HEADER_BYTES,
    Entry,
    Header,
    entries_of,
    index_bytes,
    name_of,
)
from ckpt.convert.atomic_directory import atomic_directory
from ckpt.convert.opened import Opened, ahead
from ckpt.dist_checkpointing.megatron.layout import headless
from ckpt.dist_checkpointing.megatron.zarr import MegatronZarr
from ckpt.errors import ConfigurationError, MissingStateError, StorageError
from ckpt.format.box import flat_boxes, whole
from ckpt.format.checkpoint_files import CheckpointFolder
from ckpt.format.consistency import MAX_FILE_BYTES
from ckpt.format.dtypes import item_bytes, raw_bytes, torch_dtype
from ckpt.format.hub_snapshots import files_in
from ckpt.format.manifest import SHARDED, STATE, CheckpointManifest
from ckpt.format.names import COMPONENT_KEY
from ckpt.format.records import Content
from ckpt.format.stored import read_manifest
from ckpt.loading.direct import DirectLoad
from ckpt.loading.report import some_of
from ckpt.loading.sources import CheckpointSource
from ckpt.loading.strategy import Reading, ReadRequest, Stored, StoredCheckpoint
from ckpt.memory.device import device_of
from ckpt.memory.huge_pages import Scratch
from ckpt.ranks.topology import Topology
from ckpt.state.sharing import OWN_COPIES, SharingPattern
from ckpt.storage.files import WriteOnce, make_durable, read_once

AT_ONCE_BYTES = 64 << 20
"""Bytes of a tensor in memory at once."""

_READ_BACK_BYTES = 4 << 20
_BESIDE_MODEL = ("*config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model", "chat_template.*")  # fmt: skip # noqa: E501


@dataclass(frozen=True, slots=True)
class ExportedTensor:
    """A tensor to export.

    Attributes:
        name: in the file.
        stored: name in the checkpoint.
        rows: in one row of chunks.
    """

    name: str
    stored: str
    dtype: str
    shape: tuple[int, ...]
    rows: int = 1

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * item_bytes(self.dtype)


@dataclass(frozen=True, slots=True)
class Selection:
    """The tensors of a checkpoint to export.

    Attributes:
        prepare: prepares the reading of boxes of them.
        tensors: in the order of the checkpoint.
        aliases: second name -> first name, of tied tensors that are both selected: only the first is exported.
    """

    prepare: Callable[[Sequence[ReadRequest]], Reading]
    tensors: Sequence[ExportedTensor]
    aliases: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Exported:
    """The result of an export, which was read back.

    Attributes:
        files: names of the safetensors files.
        num_bytes: of all files together.
        renamed: tensor -> name in the file, where the format does not allow the tensor's name.
        as_pairs: complex128 tensors, stored as float64 with one more dimension.
    """

    files: Sequence[str]
    num_bytes: int
    renamed: Mapping[str, str]
    as_pairs: Collection[str]


def select(src: Path, component: str | None) -> Selection:
    """Choose the tensors of one component of a checkpoint in our format.

    Args:
        component: key of the component, or one of its copies, such as "rng/rank-00003". For the checkpoint of a sharded state dict,
            which has no components, the first part of keys, such as "model" of "model.w". The names in the files leave it out. None:
            all tensors, by full names.

    Raises:
        CheckpointNotFoundError: there is no checkpoint at `src`.
        MissingStateError: the component does not exist, or has no tensor.
        ConfigurationError: the component holds several copies.
    """
    manifest = read_manifest(src)
    _require_one_copy(manifest, component)
    is_sharded = SHARDED in manifest.components and component not in manifest.components
    above = f"{SHARDED}/" if is_sharded else ""
    start = _start(component, "." if is_sharded else "/")
    chosen = {n.removeprefix(above): n for n in manifest.arrays if n.startswith(above + start)}
    _require_some(src, component, chosen, [n.removeprefix(above) for n in manifest.arrays], "." if is_sharded else "/")
    tensors, aliases = [], {}
    for key, stored in chosen.items():
        entry = manifest.arrays[stored]
        first = entry.alias_of
        if first is not None and first.removeprefix(above) in chosen:
            aliases[key.removeprefix(start)] = first.removeprefix(above + start)
        else:
            rows = entry.grid[0] if entry.grid else 1
            tensors.append(ExportedTensor(key.removeprefix(start), first or stored, entry.dtype, entry.shape, rows))
    return Selection(_reader_of(StoredCheckpoint(src, manifest)), tensors, aliases)


def select_of_megatron(src: Path, component: str | None) -> Selection:
    """Choose the tensors of a checkpoint that Megatron-Core's zarr strategy wrote. Arguments as for `select`.

    Raises: those of `MegatronZarr`, and
        MissingStateError: no key begins with the component.
    """
    opened = MegatronZarr(src)
    if opened.layout.headless:
        raise headless(src, opened.layout.headless[0])
    start = _start(component, ".")
    chosen = {key: array for key, array in opened.arrays.items() if key.startswith(start)}
    _require_some(src, component, chosen, opened.arrays, ".")
    tensors = [
        ExportedTensor(key.removeprefix(start), key, array.dtype, array.shape, array.grid[0] if array.grid else 1)
        for key, array in chosen.items()
    ]
    return Selection(_reader_of(opened), tensors, {})


def select_of_other(source: CheckpointSource, src: Path, component: str | None) -> Selection:
    """Choose the tensors of a checkpoint of another program. Arguments as for `select`.

    Raises:
        MissingStateError: the component does not exist, or has no tensor.
    """
    opened = Opened(source)
    key = STATE if component is None else component
    chosen = opened.tensors(key, "") if COMPONENT_KEY.fullmatch(key) else {}
    _require_some(src, component, chosen, source.component_keys(), "/")
    tensors = [ExportedTensor(name, one.name, one.entry.dtype, one.entry.shape) for name, one in chosen.items()]
    return Selection(source.prepare, tensors, {})


def _reader_of(stored: Stored) -> Callable[[Sequence[ReadRequest]], Reading]:
    strategy, topology, device = DirectLoad(read_at=read_once), Topology.alone(), device_of(())
    return lambda requests: strategy.prepare(requests, stored, topology, device, verify=True)


def _start(component: str | None, separator: str) -> str:
    return "" if component is None else f"{component}{separator}"


def _require_one_copy(manifest: CheckpointManifest, component: str | None) -> None:
    one = manifest.components.get(component or "")
    if one is None or SharingPattern(one.sharing_pattern) not in OWN_COPIES:
        return
    copies = dict.fromkeys(name.partition("/")[0] for name in manifest.arrays_of(one.key))
    if copies:
        raise ConfigurationError(
            f"component {one.key} is {one.sharing_pattern} and holds {some_of(list(copies))}; choose one copy, such as "
            f"component={one.key}/{next(iter(copies))}"
        )


def _require_some(
    src: Path, component: str | None, chosen: Collection[str], keys: Collection[str], separator: str
) -> None:
    if chosen:
        return
    first = list(dict.fromkeys(key.partition(separator)[0] for key in keys))
    raise MissingStateError(
        f"{src} holds no tensor of component={component}; it has {some_of(first) if first else 'none at all'}. Choose another, or "
        "component=null for everything"
    )


def beside_model(src: Path) -> dict[str, bytes]:
    """Read the files of a folder of Hugging Face's that tell how its model is used: configs, tokenizer, chat template.

    Links are left out; those of a snapshot in Hugging Face's cache are read, see `ckpt.format.hub_snapshots`.

    Raises:
        CorruptCheckpointError: a link of a snapshot leads elsewhere.
    """
    root, place_of = files_in(src)
    names = {path.name for pattern in _BESIDE_MODEL for path in src.glob(pattern) if path.is_file()}
    with CheckpointFolder(root) as folder:
        return {
            name: folder.read(place_of(name), MAX_FILE_BYTES)
            for name in sorted(names)
            if root != src or not (src / name).is_symlink()
        }


def export(
    selection: Selection,
    dst: Path,
    max_shard_bytes: int,
    *,
    beside: Mapping[str, bytes] = MappingProxyType({}),
    progress: Callable[[int], None] = lambda _: None,
) -> Exported:
    """Write the selected tensors as `model.safetensors`, or, if they take more than `max_shard_bytes`, as several files and an index.

    A larger tensor has a file of its own. All files are read back before `dst` appears.

    Args:
        dst: nothing is there, or an empty folder.
        beside: name -> content of small files to write into it.
        progress: called with the number of bytes that have moved.

    Raises:
        CheckpointExistsError: there is something at `dst`.
        CorruptCheckpointError: a part of the checkpoint is missing or damaged.
        ConfigurationError: there are too many tensors for one header.
        StorageError: the bytes read back differ from those written.
    """
    shards = list(_cut(selection.tensors, max_shard_bytes))
    files = {_file_name(number, len(shards)): _in_order(few) for number, few in enumerate(shards, 1)}
    headers = {file: _header(file, tensors) for file, tensors in files.items()}
    read = partial(_pieces, selection.prepare, (Scratch(), Scratch()))
    with atomic_directory(dst) as folder:
        digests = {file: _write(folder / file, headers[file], few, read, progress) for file, few in files.items()}
        for file, digest in digests.items():
            _require_read_back(folder / file, dst, digest, progress)
        sizes = {file: (folder / file).stat().st_size for file in files}
        if len(files) > 1:
            index = index_bytes(folder, files, progress)
            sizes[INDEX_NAME] = (folder / INDEX_NAME).write_bytes(index)
        for name, content in beside.items():
            sizes[name] = (folder / name).write_bytes(content)
            if (folder / name).read_bytes() != content:
                raise StorageError(f"what was written for {dst} is not what is read back: {name} was changed")
        make_durable(folder, sizes, [folder], progress)
    names = {
        tensor.name: name_of(Content(tensor.name, tensor.shape, whole(tensor.shape))) for tensor in selection.tensors
    }
    return Exported(
        files=list(files),
        num_bytes=sum(sizes.values()),
        renamed={ours: theirs for ours, theirs in names.items() if ours != theirs},
        as_pairs=[tensor.name for tensor in selection.tensors if tensor.dtype == "complex128"],
    )


def _cut(tensors: Sequence[ExportedTensor], most: int) -> Iterator[list[ExportedTensor]]:
    """Split tensors, in order, into files of at most `most` bytes and at least one tensor."""
    few: list[ExportedTensor] = []
    size = 0
    for tensor in tensors:
        if few and size + tensor.num_bytes > most:
            yield few
            few, size = [], 0
        few.append(tensor)
        size += tensor.num_bytes
    yield few


def _file_name(number: int, of: int) -> str:
    return "model.safetensors" if of == 1 else f"model-{number:05d}-of-{of:05d}.safetensors"


def _in_order(tensors: Sequence[ExportedTensor]) -> list[ExportedTensor]:
    """Sort by element size, largest first: readers need each tensor to begin at a multiple of its element size."""
    return sorted(tensors, key=lambda tensor: -item_bytes(tensor.dtype))


def _header(file: str, tensors: Sequence[ExportedTensor]) -> bytes:
    starts = accumulate((tensor.num_bytes for tensor in tensors), initial=0)
    entries: list[tuple[int, list[Entry]]] = [
        (start, entries_of(tensor.dtype, [Content(tensor.name, tensor.shape, whole(tensor.shape))], 0))
        for start, tensor in zip(starts, tensors, strict=False)
    ]
    header = Header(entry for _, few in entries for entry in few)
    if header.num_bytes - 8 > MOST_HEADER_BYTES:
        raise ConfigurationError(
            f"{file} would hold {len(tensors)} tensors, whose names and places take {header.num_bytes} bytes; readers of safetensors "
            f"take {MOST_HEADER_BYTES}: set a smaller max_shard_size"
        )
    return header.to_bytes(entries)


def _pieces(
    prepare: Callable[[Sequence[ReadRequest]], Reading],
    memories: tuple[Scratch, Scratch],
    tensors: Sequence[ExportedTensor],
) -> Iterator[memoryview]:
    """Yield the checked bytes of tensors, in order. While a piece is used, the next is read; each is valid until the next."""
    ranges = (
        (tensor, first, min(_elements_at_once(tensor), math.prod(tensor.shape) - first))
        for tensor in tensors
        for first in range(0, math.prod(tensor.shape), _elements_at_once(tensor))
    )
    return ahead(partial(_read, prepare, memories[number % 2], *one) for number, one in enumerate(ranges))


def _read(
    prepare: Callable[[Sequence[ReadRequest]], Reading],
    memory: Scratch,
    tensor: ExportedTensor,
    first: int,
    num_elements: int,
) -> memoryview:
    """Read consecutive elements of a tensor into memory."""
    flat = memory.empty((num_elements,), torch_dtype(tensor.dtype))
    label = tensor.stored.replace("/", ": ", 1)
    requests = [
        ReadRequest(tensor.stored, label, box, flat[at : at + box.num_elements].view(box.shape))
        for box, at in flat_boxes(tensor.shape, first, first + num_elements)
    ]
    prepare(requests).run()
    bits: Any = raw_bytes(flat).numpy()
    return memoryview(bits)


def _elements_at_once(tensor: ExportedTensor) -> int:
    """Return the elements to read at once: whole rows of chunks if they fit `AT_ONCE_BYTES`, else whole rows, else a part of a row."""
    most = AT_ONCE_BYTES // item_bytes(tensor.dtype)
    row = max(math.prod(tensor.shape[1:]), 1)
    for unit in (row * tensor.rows, row):
        if unit <= most:
            return most // unit * unit
    return most


def _write(
    file: Path,
    header: bytes,
    tensors: Sequence[ExportedTensor],
    read: Callable[[Sequence[ExportedTensor]], Iterator[memoryview]],
    progress: Callable[[int], None],
) -> str:
    """Write one file; return the digest of its intended content."""
    digest = xxhash.xxh3_128(header)
    with file.open("wb", buffering=0) as stream:
        out = WriteOnce(stream.fileno())
        out.write(memoryview(header))
        for piece in read(tensors):
            digest.update(piece)
            out.write(piece)
            progress(len(piece))
        out.close()
    return digest.hexdigest()


def _require_read_back(file: Path, dst: Path, digest: str, progress: Callable[[int], None]) -> None:
    found = xxhash.xxh3_128()
    at, memory = 0, memoryview(bytearray(_READ_BACK_BYTES))
    with file.open("rb") as stream:
        while num_bytes := read_once(stream.fileno(), [memory], at):
            found.update(memory[:num_bytes])
            at += num_bytes
            progress(num_bytes)
    if found.hexdigest() != digest:
        raise StorageError(f"what was written for {dst} is not what is read back: {os.path.basename(file)} was changed")
