"""`metadata.json`: the formats of a sharded state dict's checkpoint. Written last: it marks the folder complete.

Names follow megatron.core.dist_checkpointing.core.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ckpt.errors import Argument, CheckpointError, CorruptCheckpointError, StorageError, sentence, telling
from ckpt.format.digests import digest_of
from ckpt.format.manifest import COMMON, OBJECTS, SHARDED
from ckpt.format.places import ObjectPath, Place, as_place
from ckpt.format.strict_json import parse
from ckpt.storage.checkpoint_files import files_below
from ckpt.storage.files import replace_durably

Given = str | os.PathLike[str] | ObjectPath
"""A folder, or an address in an object store."""

CONFIG_FNAME = "metadata.json"
MOST_CONFIG_BYTES = 1 << 20
"""Limit for `metadata.json`, far above any real one."""

TORCH_DIST = "torch_dist"
"""Megatron-Core's name for checkpoints in the format of torch.distributed.checkpoint."""
_DCP_METADATA = ".metadata"
_DIGEST = "digest"
_PARTS = "parts"
_PLACE = re.compile(r"[0-9a-f]{16}")

CheckpointingException = CheckpointError
"""Megatron-Core's name for the base of all errors, so that its callers catch ours."""

_BEFORE_COMMON_WAS_NAMED: dict[str, Any] = {"common_backend": "torch", "common_backend_version": 1}


@dataclass
class CheckpointingConfig:
    """The format of a checkpoint's sharded tensors (`sharded_*`), and of everything else (`common_*`).

    Attributes:
        sharded_backend: such as "zarr".
        common_backend: such as "json", which is ours; "torch" is a pickle.
    """

    sharded_backend: str
    sharded_backend_version: int = 1
    common_backend: str = "json"
    common_backend_version: int = 1


def check_is_distributed_checkpoint(checkpoint_dir: Given) -> bool:
    """Whether a folder, or an address in an object store, holds a complete distributed checkpoint. Any rank; reads one small file.

    Raises:
        CorruptCheckpointError, StorageError: as `maybe_load_config`: a damaged file does not count as a missing one.
    """
    return maybe_load_config(checkpoint_dir) is not None


def parts_at(checkpoint_dir: Given) -> dict[str, str]:
    """Return the parts of one save in an object store, or in a copy out of it: component -> name of the place of its files. Else {}.

    Raises: as `maybe_load_config`.
    """
    return config_and_parts_at(checkpoint_dir)[1]


def maybe_load_config(checkpoint_dir: Given) -> CheckpointingConfig | None:
    """Read `metadata.json`; return None if the folder has none. Any rank.

    Unknown keys are ignored. Without a common backend, as older versions wrote it, it is torch's, version 1.

    Raises:
        CorruptCheckpointError: the file does not fit the schema, or does not match its digest.
        StorageError: it cannot be read.
    """
    return config_and_parts_at(checkpoint_dir)[0]


def config_and_parts_at(checkpoint_dir: Given) -> tuple[CheckpointingConfig | None, dict[str, str]]:
    """Return what `maybe_load_config` and `parts_at` do, and read the file once."""
    place = as_place(checkpoint_dir, "checkpoint_dir")
    path = place / CONFIG_FNAME
    try:
        with files_below(place) as files:
            data = files.read(CONFIG_FNAME, MOST_CONFIG_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None, {}
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {sentence(error)}") from error
    return _parsed(path, data)


def other_format(checkpoint_dir: Given) -> str | None:
    """Return a sentence about a folder in a known format that is read elsewhere, with the way to read it; else None. Any rank."""
    folder = as_place(checkpoint_dir, "checkpoint_dir")
    try:
        config = maybe_load_config(folder)
    except CheckpointError:  # somebody else's file of that name
        config = None
    if config is not None and config.sharded_backend == TORCH_DIST:
        found = f"{folder} is a {TORCH_DIST} checkpoint of Megatron-Core"
        return _pickled(found, "by ckpt.dist_checkpointing.load with allow_pickle=True and no sharded_strategy")
    if config is None and isinstance(folder, Path) and (folder / _DCP_METADATA).is_file():
        return _pickled(f"{folder} is a checkpoint of torch.distributed.checkpoint", "into a run by its path")
    return None


def _pickled(found: str, other_way: str) -> Argument:
    reason = f"{found}, whose metadata is a pickle. Load it by ckpt.load(path, allow_pickle=True), or {other_way}; no code in it is run"
    return Argument("pickled_metadata", found, reason)


def save_config(config: CheckpointingConfig, checkpoint_dir: Given, parts: Mapping[str, str] | None = None) -> None:
    """Write `metadata.json` durably and atomically: readers find the old file, if any, or the new one. One rank.

    Args:
        parts: component -> name of the place of its files: see `parts_at`.

    Raises:
        StorageError: the folder cannot be written; the old file is unchanged.
    """
    place = as_place(checkpoint_dir, "checkpoint_dir")
    path = place / CONFIG_FNAME
    with telling(f"{path} cannot be written"):
        if isinstance(path, Path):
            replace_durably(path, config_bytes(config, parts))
        else:
            files_below(place).write(CONFIG_FNAME, config_bytes(config, parts))


def config_bytes(config: CheckpointingConfig, parts: Mapping[str, str] | None = None) -> bytes:
    """Return the bytes of `metadata.json`: the config, and its digest, a key that Megatron-Core refuses."""
    document = asdict(config) | ({_PARTS: dict(parts)} if parts else {})
    return json.dumps(document | {_DIGEST: _digest(document)}).encode()


def _digest(document: dict[str, Any]) -> str:
    return digest_of(json.dumps(document).encode())


def _parsed(path: Place, data: bytes) -> tuple[CheckpointingConfig, dict[str, str]]:
    try:
        found = parse(data, CONFIG_FNAME)
    except CorruptCheckpointError as error:
        raise _unlike(path, f"is no JSON ({error})") from error
    if not isinstance(found, dict):
        raise _unlike(path, f"holds a {type(found).__name__}, not an object")
    digest = found.pop(_DIGEST, None)
    if digest is not None and digest != _digest(found):
        raise _unlike(path, "does not match its own digest")
    if "sharded_backend" not in found:
        raise _unlike(path, "has no sharded_backend")
    named = {field.name: found[field.name] for field in fields(CheckpointingConfig) if field.name in found}
    for name, value in named.items():
        kind = int if name.endswith("_version") else str
        if type(value) is not kind:
            raise _unlike(
                path, f"has {name}: {value!r:.40}, which should be {'a string' if kind is str else 'a whole number'}"
            )
    parts = found.get(_PARTS, {})
    are_places = isinstance(parts, dict) and all(isinstance(part, str) and _PLACE.fullmatch(part) for part in parts.values())
    if not are_places or not parts.keys() <= {COMMON, OBJECTS, SHARDED}:
        raise _unlike(path, f"has {_PARTS}: {parts!r:.40}, which should name a place for each part")
    return CheckpointingConfig(**(_BEFORE_COMMON_WAS_NAMED | named)), parts


def _unlike(path: Place, what: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{path} {what}, so the checkpoint's formats are unknown; take another checkpoint, or a copy of this one"
    )
