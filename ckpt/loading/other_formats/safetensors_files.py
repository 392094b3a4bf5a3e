"""Open safetensors files, as Hugging Face's `save_pretrained` writes them: one, or several with an index. They hold the model alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ckpt.backends.safetensors_format import INDEX_NAME, MOST_HEADER_BYTES, SUFFIX, read_shard
from ckpt.errors import CorruptCheckpointError
from ckpt.format.checkpoint_files import CheckpointFolder
from ckpt.format.gc_pause import gc_paused
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
    root = path.parent if path.is_file() else path
    tensors: dict[str, OtherTensor] = {}
    parted: dict[str, list[FilePiece]] = {}
    for file in [path.name] if path.is_file() else _files_of(root):
        shard = read_shard(root / file)
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
    return OtherCheckpoint(root, "safetensors", tensors, {})


def _files_of(root: Path) -> list[str]:
    if not (root / INDEX_NAME).is_file():
        return [ONE_FILE]
    where = str(root / INDEX_NAME)
    with CheckpointFolder(root) as folder:
        index = fit(parse(folder.read(INDEX_NAME, MOST_HEADER_BYTES), where), dict[str, Any], where)
    return sorted(set(fit(index.get("weight_map"), dict[str, str], where).values()))
