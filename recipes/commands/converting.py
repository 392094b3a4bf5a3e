"""The command `convert`: find out the format of `src`, and write it in the format `to`, in one process."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import MISSING, DictConfig
from rich.filesize import decimal

from ckpt.backends.base import Backend
from ckpt.backends.kimi_engine import KimiEngineBackend
from ckpt.backends.tensorstore import TensorStoreBackend
from ckpt.backends.zarr import ZarrBackend
from ckpt.convert.atomic_directory import require_free
from ckpt.convert.exporting_safetensors import Selection, export, select, select_of_megatron
from ckpt.convert.rewriting import rewrite
from ckpt.dist_checkpointing.megatron.zarr import is_megatron_zarr
from ckpt.errors import CheckpointNotFoundError, ConfigurationError
from ckpt.format.manifest import MANIFEST_NAME
from ckpt.format.metadata import other_format
from ckpt.format.stored import noticing_removal
from recipes.commands.converting_megatron import Converted, convert_megatron, differences
from recipes.support.config import command_keys
from recipes.support.tables import counted, printable

SAFETENSORS = "safetensors"
_BACKENDS: dict[str, Callable[[], Backend]] = {
    "zarr": ZarrBackend,
    "tensorstore": TensorStoreBackend,
    "kimi-engine": partial(KimiEngineBackend, pool=False),  # the process ends after it: no save is kept in memory
}
_OF_SHARDED = ("zarr", "tensorstore")
"""The formats of a sharded state dict, which Megatron-Core's zarr checkpoints can become."""
_UNITS = {"": 1, "B": 1} | {
    f"{letter}{unit}B": base**power
    for power, letter in enumerate("KMGT", 1)
    for unit, base in (("", 1000), ("i", 1024))
}


@dataclass
class ConvertLoadKeys:
    """The keys of `load`."""

    allow_pickle: bool = False


@dataclass
class ConvertKeys:
    """The keys of the command."""

    src: str = MISSING
    dst: str = MISSING
    to: str = "zarr"
    component: str | None = "model"
    max_shard_size: str | None = "5GB"
    load: ConvertLoadKeys = field(default_factory=ConvertLoadKeys)
    leave_out_unknown: bool = False
    json: bool = False


def keys_of(cfg: DictConfig) -> ConvertKeys:
    """Return the config of the command, its types checked.

    Raises:
        ConfigurationError: src or dst is missing or a URL, or `to` or `max_shard_size` has a wrong value.
    """
    keys = command_keys(cfg, ConvertKeys, {"src": "the old checkpoint", "dst": "a folder for the new one"})
    if keys.to not in (*_BACKENDS, SAFETENSORS):
        raise ConfigurationError(f"to={keys.to} is not known; choose {', '.join(_BACKENDS)} or {SAFETENSORS}")
    shard_bytes(keys.max_shard_size)
    return keys


def shard_bytes(size: str | None) -> int:
    """Return the bytes of `max_shard_size`, such as "5GB", which is 5 * 10**9, or "5GiB"; None: no limit.

    Raises:
        ConfigurationError: the text is no size.
    """
    if size is None:
        return 1 << 62
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([A-Za-z]*)", size)
    unit = next((unit for unit in _UNITS if match and unit.lower() == match[2].lower()), None)
    if match is None or unit is None or float(match[1]) * _UNITS[unit] < 1:
        raise ConfigurationError(f"max_shard_size={size}: expected a size such as 5GB, 500MiB or 1000, or null")
    return int(float(match[1]) * _UNITS[unit])


def convert(keys: ConvertKeys) -> Converted:
    """Write the checkpoint at `src` in the format `to`, read it back, and then rename it to `dst`.

    Raises:
        CheckpointNotFoundError: there is no checkpoint at `src`.
        CheckpointExistsError: `dst` exists and is not empty.
        ConfigurationError: `src` cannot be converted to that format, or holds pickles that are not allowed or not convertible.
        CheckpointGoneError: the old checkpoint was removed while it was read.
        CorruptCheckpointError: the old checkpoint is damaged or incomplete.
        StorageError: the bytes read back differ from those written.
    """
    with noticing_removal(Path(keys.src)):
        return _convert(keys)


def _convert(keys: ConvertKeys) -> Converted:
    src, dst = Path(keys.src), Path(keys.dst)
    is_megatron = _is_megatron(src)
    require_free(dst)
    if keys.to == SAFETENSORS:
        return _export(keys, (select_of_megatron if is_megatron else select)(src, keys.component))
    if not is_megatron:
        return _cross(keys)
    if keys.to not in _OF_SHARDED:
        raise ConfigurationError(
            f"{src} is a sharded state dict of Megatron-Core's, which to={keys.to} cannot hold: choose to={' or to='.join(_OF_SHARDED)}, "
            f"or to={SAFETENSORS} for the tensors alone"
        )
    allow_pickle = keys.load.allow_pickle
    return convert_megatron(src, dst, keys.to, allow_pickle=allow_pickle, leave_out_unknown=keys.leave_out_unknown)


def show(found: Converted, keys: ConvertKeys) -> None:
    """Print what was converted, and what was left out."""
    if keys.json:
        places = {"src": found.src, "dst": found.dst, "to": found.to}
        print(json.dumps(places | found.held | {"num_files": found.num_files, "num_bytes": found.num_bytes}, indent=2))
        return
    files = counted(found.num_files, "file")
    first = (
        f"{found.src} is now {found.dst}, for to={found.to}; {files}, {decimal(found.num_bytes)}, read back and right"
    )
    print("\n".join(printable(line) for line in (first, *found.lines)))


def _is_megatron(src: Path) -> bool:
    """Whether Megatron-Core wrote the checkpoint at `src`, and not this library.

    Raises:
        CheckpointNotFoundError: there is neither.
    """
    if not src.exists():
        raise CheckpointNotFoundError(f"src={src} does not exist")
    if _is_checkpoint(src):
        return not (src / MANIFEST_NAME).is_file()
    if (other := other_format(src)) is not None:
        raise CheckpointNotFoundError(f"src: {other}")
    below = sorted(path for path in src.iterdir() if _is_checkpoint(path)) if src.is_dir() else []
    hint = f"; below it there is src={below[-1]}" if below else ""
    raise CheckpointNotFoundError(
        f"src={src} is no checkpoint: it has neither a {MANIFEST_NAME}, as ours have, nor a metadata.json of Megatron-Core's zarr{hint}"
    )


def _is_checkpoint(path: Path) -> bool:
    return path.is_dir() and ((path / MANIFEST_NAME).is_file() or is_megatron_zarr(path))


def _cross(keys: ConvertKeys) -> Converted:
    done = rewrite(Path(keys.src), Path(keys.dst), _BACKENDS[keys.to]())
    components = list(done.manifest.components)
    arrays = [entry for entry in done.manifest.arrays.values() if entry.alias_of is None]
    array_bytes = sum(entry.num_bytes for entry in arrays)
    held: dict[str, Any] = {"components": components, "arrays": len(arrays), "array_bytes": array_bytes}
    lines = [f"  components {', '.join(components)}", f"  arrays     {len(arrays)}, {decimal(array_bytes)}"]
    return Converted(keys.src, keys.dst, keys.to, done.num_files, done.num_bytes, held, lines)


def _export(keys: ConvertKeys, selection: Selection) -> Converted:
    done = export(selection, Path(keys.dst), shard_bytes(keys.max_shard_size))
    num_files = len(done.files) + (1 if len(done.files) > 1 else 0)
    tensor_bytes = sum(tensor.num_bytes for tensor in selection.tensors)
    left_out = [f"{alias} (tied: it is {first})" for alias, first in selection.aliases.items()]
    changed = [
        *(f"{name}: called {theirs}, for the format cannot call it so" for name, theirs in done.renamed.items()),
        *(f"{name}: float64 in a dimension more, for the format has no complex128" for name in done.as_pairs),
    ]
    held: dict[str, Any] = {
        "component": keys.component,
        "tensors": len(selection.tensors),
        "tensor_bytes": tensor_bytes,
    }
    held |= {"files": list(done.files), "left_out": left_out, "changed": changed}
    of = "of everything" if keys.component is None else f"of component={keys.component}"
    lines = [f"  tensors  {len(selection.tensors)}, {decimal(tensor_bytes)}, {of}", *differences(changed, left_out)]
    return Converted(keys.src, keys.dst, keys.to, num_files, done.num_bytes, held, lines)
