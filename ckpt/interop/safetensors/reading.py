"""Open safetensors files, as Hugging Face's `save_pretrained` writes them: one, or several with an index. They hold the model alone.

`hub_folders.weights_at` finds them in a folder.
"""

from __future__ import annotations

from pathlib import Path as FilePath

from ckpt.backends.safetensors_format import MOST_HEADER_BYTES, SUFFIX, read_shard
from ckpt.errors import CorruptCheckpointError
from ckpt.format.gc_pause import gc_paused
from ckpt.format.places import Place
from ckpt.interop.safetensors.hub import (
    SAFETENSORS,
    index_kind,
    names_by_file,
    opened,
    require_all_held,
    weights_at,
)
from ckpt.loading.other_checkpoint import FilePiece, OtherCheckpoint, OtherTensor
from ckpt.state.flatten import Path as StatePath
from ckpt.storage.hub_snapshots import files_in

ONE_FILE = "model.safetensors"


def is_at(path: Place) -> bool:
    """Whether a path is a safetensors file, by its name or its first bytes, an index of such files, or a folder with either."""
    file = weights_at(path)
    if file is None:
        return False
    if index_kind(file) or file.suffix == SUFFIX or file != path:
        return index_kind(file) == SAFETENSORS or file.suffix == SUFFIX
    with opened(path, file) as stream:
        begin = stream.read(9)
    return begin[8:] == b"{" and int.from_bytes(begin[:8], "little") <= MOST_HEADER_BYTES


@gc_paused()
def open_at(path: Place) -> OtherCheckpoint:
    """Open it. Reads the headers alone. An index says which file holds which tensor; what it does not name is no part of the model.

    Raises:
        CorruptCheckpointError: a header, or the index, is damaged, or names what is not there; or a file is shorter than its header says.
    """
    weights = weights_at(path)
    assert weights is not None, "is_at"
    folder = weights.parent
    root, place_of = files_in(folder)
    index = names_by_file(weights) if index_kind(weights) else None
    tensors: dict[str, OtherTensor] = {}
    parted: dict[str, list[FilePiece]] = {}
    unread: dict[StatePath, str] = {}
    for name_of_file in [weights.name] if index is None else sorted(index):
        file = place_of(name_of_file)
        shard = read_shard(root / file, root)
        rows = shard.rows
        if index is not None:
            rows = [row for row in rows if row[0] in index[name_of_file]]
            require_all_held(weights, name_of_file, index[name_of_file], (row[0] for row in rows))
        for name, dtype, key, shape, box, start in rows:
            if name in shard.raw:
                unread[key,] = f"is of {shard.raw[name]}, a data type that torch lacks"
            piece = FilePiece(box, file, shard.data_start + start)
            one = tensors.get(key)
            if one is None:
                tensors[key] = OtherTensor((key,), dtype, shape, piece)
                continue
            if key not in parted:
                assert isinstance(one.pieces, FilePiece), "it was the first of them"
                parted[key] = [one.pieces]
            parted[key].append(piece)
            one.pieces = parted[key].copy
            if (one.dtype, one.shape) != (dtype, shape):
                raise CorruptCheckpointError(
                    f"{root}: the tensor {key!r} is {one.dtype} {list(one.shape)} in one file, and {dtype} {list(shape)} in another",
                    file=file,
                )
    # The name of a snapshot is that of a commit, and no step, whatever it ends in.
    named_by = None if root == folder else FilePath(ONE_FILE)
    return OtherCheckpoint(root, tensors, {}, named_by=named_by, unread=unread)
