"""Open one file that `torch.save` wrote: a state dict of tensors, containers and plain values. No code of the file runs.

Tensors are read from where they lie in the file, each by itself: views of one memory come back as tensors of their own.
"""

from __future__ import annotations

import io
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ckpt.errors import CheckpointNotFoundError, ConfigurationError
from ckpt.format.box import whole
from ckpt.format.export_records import RECORDS_NAME, ExportRecords, records_for
from ckpt.format.unpickling import UnknownObject, unknown_in, unpickle_archived
from ckpt.loading.other_formats.other_checkpoint import OtherCheckpoint, OtherTensor, Step, folder_with
from ckpt.loading.other_formats.torch_archives import Archive, located

_ZIP = b"PK\x03\x04"
_OLD = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""The first bytes of files of torch before 1.6: a number, pickled."""
_DESCRIBED = b"/data.pkl"
_MAKES_TENSORS = ("torch._utils._rebuild_", "torch._tensor._rebuild_")


def is_torch_file(path: Path) -> bool:
    """Whether a path is a file of `torch.save`, by its first bytes: `data.pkl` is the first member of its zip."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        begin = file.read(4096)
    named = begin[30 : 30 + int.from_bytes(begin[26:28], "little")]
    return begin.startswith(_OLD) or (begin.startswith(_ZIP) and named.endswith(_DESCRIBED))


def open_torch_file(path: Path, *, allow_pickle: bool) -> OtherCheckpoint:
    """Open it. Reads the description of its tensors, and its plain values.

    Raises:
        CheckpointNotFoundError: pickles are not allowed.
        ConfigurationError: it is of an old format, of a big-endian machine, or holds no state dict.
        CorruptCheckpointError: it is damaged.
    """
    if not allow_pickle:
        raise CheckpointNotFoundError(
            f"{path} is a file of torch.save, whose data.pkl is a pickle. To read it, without running any code in it, load with "
            "allow_pickle=True."
        )
    path = path.resolve()
    held = content_of(path.parent, path.name)
    if held.kind != "dict":
        raise ConfigurationError(f"{path} holds a {held.kind}, where a state dict should be")
    tensors = {repr(one): tensor for one, tensor in held.tensors.items()}
    checkpoint = OtherCheckpoint(path.parent, "torch.save", tensors, held.values)
    checkpoint.records = held.records
    return checkpoint


@dataclass(frozen=True, slots=True)
class Content:
    """What a file of `torch.save` holds.

    Attributes:
        kind: type of the whole: "dict", also of its subclasses.
        tensors, values: by path; the path of a file that holds one alone is empty.
        records: as of `OtherCheckpoint`.
    """

    kind: str
    tensors: dict[tuple[Step, ...], OtherTensor]
    values: dict[tuple[Step, ...], Callable[[], Any]]
    records: ExportRecords | None = None


def content_of(root: Path, file: str) -> Content:
    """Read what describes the tensors of a file, and its plain values.

    Args:
        file: path below the root.

    Raises: as `open_torch_file`.
    """
    where = str(root / file)
    tensors: dict[tuple[Step, ...], OtherTensor] = {}
    values: dict[tuple[Step, ...], Callable[[], Any]] = {}
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
        for path, leaf in _leaves(state, ()):
            name = ".".join(str(step[0] if isinstance(step, tuple) else step) for step in path)
            label = f"{where}: {name}"
            try:
                if not _is_tensor(leaf):
                    values[path] = partial(_plain, leaf, label)
                    continue
                one = archive.tensor(leaf, label)
            except ConfigurationError as error:
                values[path] = partial(_refuse, str(error))
                continue
            box = whole(one.shape)
            pieces = partial(located, root, label, one.shape, [(box, file, one)])
            tensors[path] = OtherTensor(path, one.dtype, one.shape, pieces, None if one.header is None else (file, one))
    return Content(_kind(state), tensors, values, records)


def _leaves(node: Any, path: tuple[Step, ...]) -> list[tuple[tuple[Step, ...], Any]]:
    """The leaves of a nested state: tensors, and the outermost plain values beside these. Enters the dictionaries of its components."""
    steps = steps_into(node)
    if not steps:
        return [(path, node)]
    found = [leaf for step, inner in steps for leaf in _leaves(inner, (*path, step))]
    is_entered = len(path) < 2 and isinstance(node, dict)
    if not is_entered and not any(_is_tensor(leaf) or isinstance(leaf, UnknownObject) for _, leaf in found):
        return [(path, node)]
    return found


def steps_into(node: Any) -> list[tuple[Step, Any]]:
    """Return (step, what is there) of a container; [] for all else."""
    if type(node) in (dict, OrderedDict, Counter):
        return [(key if type(key) is str else (key, "key"), inner) for key, inner in node.items()]
    if type(node) is tuple:
        return [((at, "tuple"), inner) for at, inner in enumerate(node)]
    return list(enumerate(node)) if type(node) is list else []


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, UnknownObject) and leaf.name.startswith(_MAKES_TENSORS)


def _plain(value: Any, label: str) -> Any:
    """Return a plain value.

    Raises:
        ConfigurationError: it is, or holds, an object that is not built.
    """
    for path, name in unknown_in(value).items():
        raise ConfigurationError(
            f"{label}{path and f' ({path})'} is a {name}, and nothing but tensors and plain values is read; leave its component out"
        )
    return value


def _refuse(message: str) -> Any:
    raise ConfigurationError(message)


def _kind(value: Any) -> str:
    if isinstance(value, dict):
        return "dict"
    return value.name if isinstance(value, UnknownObject) else type(value).__name__
