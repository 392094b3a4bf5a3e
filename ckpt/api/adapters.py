"""Load an adapter that PEFT, or `convert`, has written into a PEFT model that is in use: `ckpt.load_adapter`."""

from __future__ import annotations

from typing import Any

import torch

from ckpt.api.state_dicts import load
from ckpt.errors import CheckpointNotFoundError
from ckpt.format.places import Place
from ckpt.format.strict_json import fit, parse
from ckpt.ranks.topology import Topology
from ckpt.run.arguments import as_location, as_topology
from ckpt.state.adapters import CONFIG_NAME, AdapterState, require_same_name
from ckpt.storage.checkpoint_files import files_below, is_file

_MOST_BYTES = 16 << 20


def load_adapter(
    model: torch.nn.Module,
    folder: str | Place,
    adapter: str = "default",
    *,
    allow_pickle: bool = False,
    topology: Topology | None = None,
) -> None:
    """Load a folder with adapter_config.json and adapter_model.safetensors into an adapter that a model has. Collective.

    The model may be sharded, as PEFT's own `load_adapter` does not take it.

    Args:
        model: a `PeftModel`, or one in DDP or another wrapper.
        adapter: its name in the model.
        allow_pickle: read adapter_model.bin, too.
        topology: None: the ranks of torch's default process group, or this process alone.

    Raises:
        CheckpointNotFoundError: the folder holds no adapter.
        ConfigurationError: the model has no such adapter, or makes it in another way, or has another base; nothing is changed.
        MissingStateError, ShapeMismatchError: the tensors do not fit; nothing is changed.

    Example:
        >>> ckpt.load_adapter(peft_model, "adapters/first")  # doctest: +SKIP
    """
    place = as_location("folder", folder)
    ranks = as_topology(topology)
    with ranks.operation(f"load of {place.name}"):
        with ranks.phase("adapter") as phase:
            if ranks.is_lead:
                phase.from_lead = _config_in(place)
        config = phase.from_lead
        with ranks.phase("compare"):
            state = AdapterState(model, adapter)
            state.require_like(config)
            require_same_name(config, state.config)
            tensors = state.tensors()
    load(place, into=tensors, allow_pickle=allow_pickle, topology=ranks)


def _config_in(folder: Place) -> dict[str, Any]:
    if not is_file(folder / CONFIG_NAME):
        raise CheckpointNotFoundError(f"{folder} holds no adapter: it has no {CONFIG_NAME}")
    with files_below(folder) as files:
        found: dict[str, Any] = fit(parse(files.read(CONFIG_NAME, _MOST_BYTES), str(folder / CONFIG_NAME)), dict[str, Any], CONFIG_NAME)
    return found
