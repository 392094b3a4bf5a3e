"""Save a state dict of tensors and plain values under a path, and load it: `ckpt.save` and `ckpt.load`, on one rank or on many."""

from __future__ import annotations

import logging
from collections.abc import Mapping, MutableMapping
from dataclasses import replace
from typing import Any

import torch

from ckpt.backends.base import Backend
from ckpt.errors import ConfigurationError
from ckpt.format.manifest import STATE
from ckpt.format.places import Place
from ckpt.interop.registry import components_of, register_programs
from ckpt.loading.compatibility import goes_on
from ckpt.loading.loader import Loader
from ckpt.loading.strategy import LoadingStrategy
from ckpt.memory.device import device_of
from ckpt.ranks.topology import Topology
from ckpt.run.arguments import as_backend, as_location, as_run, as_strategy, check_flags
from ckpt.saving.new_folder import save_into_new_folder
from ckpt.saving.prepared_save import SaveReport
from ckpt.state.address import local_tensor
from ckpt.state.collect import RankState, collect
from ckpt.state.flatten import flatten
from ckpt.state.pattern_check import AutoSharing
from ckpt.state.sharing import AUTO, OWN_COPIES, Sharing, SharingPattern, StateComponent
from ckpt.state.statefuls import Filled, Given

_log = logging.getLogger("ckpt")


def save(
    state: Mapping[str, Any],
    path: str | Place,
    *,
    format: Backend | str = "zarr",
    process_groups: Mapping[str, Any] | None = None,
    topology: Topology | None = None,
) -> SaveReport:
    """Save a nested state dict of tensors and plain values as a checkpoint at `path`. Collective.

    On many ranks, equal tensors are saved once, and the writing is shared; the parts of a DTensor become one tensor; different keys are
    all saved. Nothing is pickled. The folder appears by a rename, complete; a save that fails leaves nothing at `path`.

    Args:
        state: of this rank. Other ranks may hold other keys.
        path: of a folder that does not exist, or is empty. An existing checkpoint is refused.
        format: "zarr", "tensorstore", "kimi-engine", or a backend.
        process_groups: name -> torch process group whose members are equal, where ranks hold different bits under one key.
        topology: None: the ranks of torch's default process group, or this process alone.

    Returns:
        the report: `print` shows bytes, seconds and GB/s.

    Raises:
        CheckpointExistsError: something is at `path` already.
        ReplicationError: ranks hold different bits under one key, and no group tells how they belong together.
        ConfigurationError: a value is neither a tensor nor plain.

    Example:
        >>> report = ckpt.save({"weight": torch.arange(6.0), "step": 7}, "checkpoint")
        >>> print(report)  # doctest: +ELLIPSIS
        saved checkpoint: ... GB/s
    """
    folder = as_location("path", path)
    run = as_run((), process_groups, topology, as_backend(format, "format"), device_of(()))

    def collected() -> RankState:
        with run.topology.phase("state"):
            _mapping("state", state)
            component = StateComponent(STATE, Given(state), AUTO)
        components = AutoSharing([component], run.topology).settle()
        with run.topology.phase("leaves"):
            return collect(components, run.topology)

    return save_into_new_folder(folder, run.topology, run.backend, collected)


def load(
    path: str | Place,
    into: MutableMapping[str, Any] | None = None,
    *,
    load: LoadingStrategy | str = "direct",
    strict: bool = True,
    cast: bool = False,
    allow_pickle: bool = False,
    process_groups: Mapping[str, Any] | None = None,
    topology: Topology | None = None,
) -> dict[str, Any]:
    """Load a checkpoint: that of `save`, or any other. Every byte is checked. Collective.

    Checkpoints of other programs are read, too: safetensors and Orbax's, and with `allow_pickle` those of `torch.distributed.checkpoint`,
    Megatron-Core, torch_checkpointing and `torch.save`. They have no digests to check.

    Args:
        path: of a checkpoint: a folder, or a file. Of Orbax: a step with one item, or an item.
        into: a state dict whose tensors are filled in place, DTensors of any layout among them, and whose plain values are set; of a
            checkpoint with components, some of them. None: whole tensors are made, on the host.
        load: "direct", "two-stage", or a loading strategy.
        strict: keys on one side alone, and shapes that differ, are an error; otherwise they are left out.
        cast: tensors of `into` that were saved in another floating-point type are converted while they are read.
        allow_pickle: read the pickles that describe checkpoints of other programs; no code in them is run.
        process_groups, topology: as of `save`.

    Returns:
        the state dict. That of a checkpoint with components, as `Checkpointer` saves, has one entry for each of them; without `into`,
        components of which other ranks have copies of their own are left out, with a warning.

    Raises:
        CheckpointNotFoundError: there is no checkpoint.
        MissingStateError, ShapeMismatchError: `into` does not fit.
        CorruptCheckpointError: bytes are missing or changed.

    Example:
        >>> _ = ckpt.save({"weight": torch.arange(6.0), "step": 7}, "checkpoint")
        >>> ckpt.load("checkpoint")
        {'weight': tensor([0., 1., 2., 3., 4., 5.]), 'step': 7}
    """
    check_flags(strict=strict, cast=cast, allow_pickle=allow_pickle)
    register_programs()
    if cast and into is None:
        raise ConfigurationError("cast=True without into: new tensors have the types that were saved; give into, whose types are taken")
    folder = as_location("path", path)
    strategy = as_strategy(load, "load")
    run = as_run((), process_groups, topology, "zarr", device_of(()))
    with run.topology.operation(f"load of {folder}"):
        with run.topology.phase("list") as phase:
            given = None if into is None else _mapping("into", into)
            if run.topology.is_lead:
                saved = components_of(folder)
                phase.from_lead = {key: [sharing.pattern.value, sharing.group] for key, sharing in saved.items()}
        sharing = {key: Sharing(SharingPattern(name), group) for key, (name, group) in phase.from_lead.items()}
        is_one = list(sharing) == [STATE]
        with run.topology.phase("into"):
            device = device_of([] if given is None else _tensors(given))
            objects: dict[str, Given]
            if given is None:
                objects = {key: Given() for key in sharing}
                components = [
                    _for_new_tensors(StateComponent(key, objects[key], AUTO), sharing[key]) for key in sharing
                ]
            else:
                parts = {STATE: given} if is_one else given
                objects = {key: Filled(_mapping(f"into[{key!r}]", part)) for key, part in parts.items()}
                components = [StateComponent(key, thing, AUTO) for key, thing in objects.items()]
    loader = Loader(components, run.topology, strategy, device, verify=True, allow_pickle=allow_pickle)
    report = loader.load(
        folder, strict=strict, cast=cast, leave_out=sharing.keys() - objects.keys(), may_be_old=True
    )
    _log.info("%s", report)
    for component in report.components:
        _log.info("%s", component)
    loaded = {component.key: objects[component.key].loaded for component in report.components if goes_on(component)}
    if into is not None:
        _set_plain(into, loaded[STATE] if is_one else loaded)
    return loaded[STATE] if is_one else loaded


def _for_new_tensors(component: StateComponent, saved: Sharing) -> StateComponent:
    """The component under the pattern in which every rank is given whole tensors; a copy of this rank's own is left out if it has none."""
    if saved.pattern in OWN_COPIES:
        return replace(component.with_sharing(saved), required=False)
    return component.with_sharing(Sharing(SharingPattern.REPLICATED))


def _set_plain(into: MutableMapping[str, Any], loaded: Mapping[str, Any]) -> None:
    """Set what is not filled in place: values that are no tensors."""
    for key, value in loaded.items():
        own = into.get(key)
        if isinstance(value, Mapping) and isinstance(own, MutableMapping):
            _set_plain(own, value)
        elif not isinstance(own, torch.Tensor):
            into[key] = value


@torch.no_grad()
def _tensors(state: Mapping[str, Any]) -> list[torch.Tensor]:
    """This rank's memory of all tensors."""
    return [local_tensor(leaf) for leaf in flatten(state, STATE).tensors.values()]


def _mapping(name: str, given: Any) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise ConfigurationError(
            f"{name} is a {type(given).__name__}; expected a state dict: names, and tensors or plain values"
        )
    return dict(given)
