"""Open safetensors files, as Hugging Face's `save_pretrained` writes them: one, or several with an index. They hold the model alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ckpt.backends.safetensors_format import INDEX_NAME, MOST_HEADER_BYTES, SUFFIX, read_shard
from ckpt.errors import CorruptCheckpointError
from ckpt.format.checkpoint_files import CheckpointFolder
from ckpt.format.gc_pause import gc_paused
from ckpt.format.hub_snapshots import files_in
from ckpt.format.strict_json import fit, parse
from ckpt.loading.other_formats.other_checkpoint import FilePiece, OtherCheckpoint, OtherTensor

ONE_FILE = "model.safetensors"


def is_safetensors(path: Path) -> bool:
    """Whether a path is a safetensors file, or a folder with a model in such files."""
    return (path.suffix == SUFFIX and path.is_file()) or any((path / name).is_file() for name in (INDEX_NAME, ONE_FILE))


@gc_paused()
def open_safetensors(path: Path) -> OtherCheckpoint:
    """Open it. Reads the headers alone.

    Raises:
        CorruptCheckpointError: a header, or the index, is damaged, or a file is shorter than its header says.
    """
    folder = path.parent if path.is_file() else path
    root, place_of = files_in(folder)
    tensors: dict[str, OtherTensor] = {}
    parted: dict[str, list[FilePiece]] = {}
    for file in map(place_of, [path.name] if path.is_file() else _files_of(path)):
        shard = read_shard(root / file, root)
        for _, dtype, key, shape, box, start in shard.rows:
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
    named_by = None if root == folder else Path(ONE_FILE)
    return OtherCheckpoint(root, "safetensors", tensors, {}, named_by=named_by)


def _files_of(path: Path) -> list[str]:
    if not (path / INDEX_NAME).is_file():
        return [ONE_FILE]
    where = str(path / INDEX_NAME)
    root, place_of = files_in(path)
    with CheckpointFolder(root) as folder:
        index = fit(parse(folder.read(place_of(INDEX_NAME), MOST_HEADER_BYTES), where), dict[str, Any], where)
    return sorted(set(fit(index.get("weight_map"), dict[str, str], where).values()))
