"""Open a file that `torch.save` wrote, or several with an index: a state dict of tensors, containers and plain values. No code of it runs.

Tensors are read from where they lie in the file, each by itself: views of one memory come back as tensors of their own.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ckpt.errors import ConfigurationError
from ckpt.format.box import whole
from ckpt.format.export_records import RECORDS_NAME, ExportRecords, records_for
from ckpt.format.places import Place
from ckpt.format.unknown import UnknownObject
from ckpt.interop.safetensors.hub import BIN, index_kind, names_by_file, opened, require_all_held, weights_at
from ckpt.interop.torch_save.archives import Archive, is_tensor, kind_of_tensor, located
from ckpt.interop.unpickling import unpickle_archived
from ckpt.loading.other_checkpoint import OtherCheckpoint, OtherTensor, folder_with, given
from ckpt.state.flatten import Path as StatePath
from ckpt.state.flatten import joined_key, key_of, leaves_apart
from ckpt.state.tensor_classes import saved_kind
from ckpt.storage.hub_snapshots import files_in

_ZIP = b"PK\x03\x04"
_OLD = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""The first bytes of files of torch before 1.6: a number, pickled."""
_OF_DCP = ".distcp"
"""Files of tensors one by one, each as of `torch.save`."""
_DESCRIBED = b"/data.pkl"


def is_at(path: Place) -> bool:
    """Whether a path is a file of `torch.save`, by its first bytes: `data.pkl` is the first member of its zip.

    Also an index of such files, and a folder of Hugging Face's with either.
    """
    file = weights_at(path)
    if file is None or file.suffix == _OF_DCP or index_kind(file):
        return file is not None and index_kind(file) == BIN
    with opened(path, file) as stream:
        begin = stream.read(4096)
    named = begin[30 : 30 + int.from_bytes(begin[26:28], "little")]
    return begin.startswith(_OLD) or (begin.startswith(_ZIP) and named.endswith(_DESCRIBED))


def open_at(path: Place) -> OtherCheckpoint:
    """Open it. Reads the description of its tensors, and its plain values.

    Raises:
        ConfigurationError: it is of an old format, of a big-endian machine, or holds no state dict.
        CorruptCheckpointError: it is damaged.
    """
    weights = weights_at(path)
    assert weights is not None, "is_at"
    if weights == path and not index_kind(path):  # a link that the user named is followed
        path = path.resolve() if isinstance(path, Path) else path
        root, held, named_by = path.parent, content_of(path.parent, path.name), None
    else:
        root, place_of = files_in(weights.parent)
        held = _of_index(weights, root, place_of) if index_kind(weights) else content_of(root, place_of(weights.name))
        named_by = None if root == weights.parent else Path(weights.name)
    if held.kind != "dict":
        raise ConfigurationError(f"{path} holds a {held.kind}, where a state dict should be")
    tensors = {repr(path): tensor for path, tensor in held.tensors.items()}
    checkpoint = OtherCheckpoint(
        root, tensors, held.values, paths=held.paths, named_by=named_by, unread=held.unread
    )
    checkpoint.records = held.records
    return checkpoint


@dataclass(frozen=True, slots=True)
class Content:
    """What a file of `torch.save` holds.

    Attributes:
        kind: type of the whole: "dict", also of its subclasses.
        tensors, values: by path; the path of a file that holds one alone is empty.
        paths: of both and of what is unread, in the order of the state.
        unread, records: as of `OtherCheckpoint`.
    """

    kind: str
    tensors: dict[StatePath, OtherTensor]
    values: dict[StatePath, Callable[[], Any]]
    unread: dict[StatePath, str]
    paths: list[StatePath]
    records: ExportRecords | None = None


def content_of(root: Place, file: str) -> Content:
    """Read what describes the tensors of a file, and its plain values.

    Args:
        file: path below the root.

    Raises: as `open_at`.
    """
    where = str(root / file)
    tensors: dict[StatePath, OtherTensor] = {}
    values: dict[StatePath, Callable[[], Any]] = {}
    unread: dict[StatePath, str] = {}
    with folder_with(root, file) as folder, folder.stream(file) as stream:
        if stream.read(len(_OLD)) == _OLD:
            raise ConfigurationError(
                f"{where} is of the format of torch before 1.6; load it with torch, and save it again"
            )
        archive = Archive(stream, 0, stream.seek(0, io.SEEK_END), where)
        described = archive.pickle
        state = unpickle_archived(described, where)
        found = archive.beside(RECORDS_NAME)
        records = None if found is None else records_for(described, found, f"{where}: {RECORDS_NAME}")
        leaves = leaves_apart(state, lambda leaf: isinstance(leaf, UnknownObject))
        for path, leaf in leaves:
            label = f"{where}: {joined_key(path)}"
            if not is_tensor(leaf):
                values[path] = given(leaf)
                continue
            try:
                one = archive.tensor(leaf, label)
            except ConfigurationError as error:
                unread[path] = str(error).removeprefix(f"{label} ")
                continue
            box = whole(one.shape)
            pieces = partial(located, root, label, one.shape, [(box, file, one)])
            memory = None if one.header is None else (file, one)
            kind = saved_kind(*kind_of_tensor(leaf), one.order)
            tensors[path] = OtherTensor(path, one.dtype, one.shape, pieces, memory, kind)
    return Content(_kind(state), tensors, values, unread, [path for path, _ in leaves], records)


def _of_index(index: Place, root: Place, place_of: Callable[[str], str]) -> Content:
    """What the files of an index hold, each of them only what the index names in it; a dictionary, whatever they are.

    Raises: as `content_of`, and
        CorruptCheckpointError: a file does not hold what the index names in it.
    """
    held = Content("dict", {}, {}, {}, [])
    for file, names in sorted(names_by_file(index).items()):
        one = content_of(root, place_of(file))
        require_all_held(index, file, names, map(_first, one.paths))
        for path in one.paths:
            if (first := _first(path)) not in names:
                continue
            place = first, *path[1:]
            held.paths.append(place)
            if path in one.tensors:
                held.tensors[place] = replace(one.tensors[path], path=place)
            elif path in one.unread:
                held.unread[place] = one.unread[path]
            else:
                held.values[place] = one.values[path]
    return held


def _first(path: StatePath) -> str:
    key = key_of(path[0]) if path else ""
    return key if isinstance(key, str) else ""


def _kind(value: Any) -> str:
    if isinstance(value, dict):
        return "dict"
    return value.name if isinstance(value, UnknownObject) else type(value).__name__
