"""Write what makes a checkpoint of DCP one of Megatron-Core's `torch_dist`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ckpt.interop.megatron.reading import COMMON
from ckpt.interop.opened import require_known
from ckpt.storage.files import make_durable
from ckpt.storage.metadata import CONFIG_FNAME, TORCH_DIST, CheckpointingConfig


class ShardedParts(NamedTuple):
    """What a sharded state dict holds beside its tensors. Read on the lead.

    Attributes:
        objects: returns the objects by unique key, each in a list, as Megatron-Core has them.
        common: returns the common state.
    """

    objects: Callable[[], Mapping[str, list[Any]]]
    common: Callable[[], Mapping[Any, Any]]


def write_common(common: Mapping[Any, Any], folder: Path) -> None:
    """Write `common.pt` and `metadata.json`. Megatron-Core takes no other keys in `metadata.json`."""
    require_known(common)
    torch.save(dict(common), folder / COMMON)
    config = CheckpointingConfig(TORCH_DIST, common_backend="torch")
    (folder / CONFIG_FNAME).write_text(json.dumps(asdict(config)))
    names = (COMMON, CONFIG_FNAME)
    make_durable(folder, {name: (folder / name).stat().st_size for name in names}, [folder], lambda num_bytes: None)
