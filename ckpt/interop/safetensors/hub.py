"""Folders as Hugging Face's libraries write them: which of their files holds the weights."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from ckpt.errors import CorruptCheckpointError
from ckpt.format.places import Place
from ckpt.format.strict_json import fit, parse
from ckpt.storage.checkpoint_files import files_below, is_file, names_below
from ckpt.storage.hub_snapshots import files_in

SAFETENSORS, BIN = "safetensors", "bin"
_STEMS = {
    SAFETENSORS: ("model", "diffusion_pytorch_model", "adapter_model", "pytorch_lora_weights", "consolidated"),
    BIN: ("pytorch_model", "diffusion_pytorch_model", "adapter_model", "pytorch_lora_weights"),
}
"""Names of files of weights, of transformers, diffusers, PEFT and Mistral. Those that come first are taken first."""
_INDEX = re.compile(r".+\.(safetensors|bin)\.index(\.\w+)?\.json")
_STATE_BESIDE = re.compile(r"(optimizer|scheduler|scaler|sampler|rng_state|random_states|custom_checkpoint|global_step)(\.|_?\d).*")
"""What Trainer, Accelerate and DeepSpeed save beside the weights."""
_MOST_INDEX_BYTES = 100_000_000


def index_kind(path: Place) -> str | None:
    """The kind of the files that an index names, "safetensors" or "bin", by its own name; None: it is no index."""
    match = _INDEX.fullmatch(path.name)
    return match and match[1]


def weights_at(path: Place) -> Place | None:
    """Return the file of the weights at a path: the path itself, or in a folder the file or the index that has one of the names.

    A file comes before an index, as for transformers. A variant (`model.fp16.safetensors`) is taken where it is the only one, and nothing
    has the plain name.
    """
    if is_file(path):
        return path
    listed = names_below(path)
    for kind, stems in _STEMS.items():
        for stem in stems:
            for name in (f"{stem}.{kind}", f"{stem}.{kind}.index.json"):
                if name in listed and is_file(path / name):
                    return path / name
    for kind, stems in _STEMS.items():
        variant = re.compile(rf"(?:{'|'.join(stems)})(?:\.\w+\.{kind}|\.{kind}\.index\.\w+\.json)")
        found = [name for name in listed if variant.fullmatch(name) and is_file(path / name)]
        if found:
            return path / found[0] if len(found) == 1 else None
    return None


def state_beside(path: Place) -> list[str]:
    """Return the names of what Trainer, Accelerate and DeepSpeed saved of other objects in a folder whose weights are read."""
    return sorted(name for name in names_below(path) if _STATE_BESIDE.fullmatch(name))


@contextmanager
def opened(path: Place, file: Place) -> Iterator[BinaryIO]:
    """Open a file that `weights_at` found at a path: one in a folder by the rules of `CheckpointFolder`, which follow no link out of it.

    Raises:
        CorruptCheckpointError: it is such a link.
    """
    if file == path and isinstance(file, Path):
        with file.open("rb", buffering=0) as stream:
            yield stream
        return
    root, place_of = files_in(file.parent)
    with files_below(root) as folder, folder.stream(place_of(file.name)) as stream:
        yield stream


class _Part(msgspec.Struct):
    """A part of a tensor, in an index of ours."""

    file: str
    name: str


class _Parts(msgspec.Struct):
    parts: list[_Part]


def names_by_file(index: Place) -> dict[str, set[str]]:
    """Read an index: file -> names in it of the tensors, and of the parts of tensors that an index of ours lists.

    Raises:
        CorruptCheckpointError: it is no such index.
    """
    root, place_of = files_in(index.parent)
    with files_below(root) as folder:
        document = fit(parse(folder.read(place_of(index.name), _MOST_INDEX_BYTES), str(index)), dict[str, Any], str(index))
    if "weight_map" not in document:
        raise CorruptCheckpointError(f"{index} is no index of weights: it has no weight_map", file=index.name)
    found: dict[str, set[str]] = {}
    for name, file in fit(document["weight_map"], dict[str, str], str(index)).items():
        found.setdefault(file, set()).add(name)
    for tensor in fit(document.get("parts", {}), dict[str, _Parts], str(index)).values():
        for part in tensor.parts:
            found.setdefault(part.file, set()).add(part.name)
    return found


def require_all_held(index: Place, file: str, named: Collection[str], held: Iterable[str]) -> None:
    """Refuse a file that lacks what an index names in it.

    Raises:
        CorruptCheckpointError
    """
    if lost := set(named).difference(held):
        raise CorruptCheckpointError(f"{index} names {min(lost)!r:.80} in {file}, which does not hold it", file=file)
