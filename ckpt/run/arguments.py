"""Convert and check the arguments of a coordinator: names become objects, numbers become ids, errors say what was expected."""

from __future__ import annotations

import dataclasses
import difflib
import operator
import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from ckpt.backends.base import Backend
from ckpt.backends.registry import BACKENDS, backend_named
from ckpt.catalog.retention import Retention, as_retention
from ckpt.errors import Argument, ConfigurationError, require_no_sizes, unlike
from ckpt.format.places import ObjectPath, Place, as_place
from ckpt.loading.direct import DirectLoad
from ckpt.loading.load_settings import LoadSettings
from ckpt.loading.strategy import LoadingStrategy
from ckpt.loading.two_stage.two_stage import TwoStageLoad
from ckpt.memory.budget import Limited, MemoryBudget, Needs
from ckpt.memory.device import Device
from ckpt.planning.plan import CHUNK_MAX_BYTES
from ckpt.ranks.default_topology import current_topology
from ckpt.ranks.topology import Topology
from ckpt.saving.host_cache import copies_of, memories_of
from ckpt.saving.save_settings import SaveSettings, as_saves
from ckpt.saving.saver import SavedRun
from ckpt.saving.tiers import Root, Tier
from ckpt.state.sharing import SharingPattern, StateComponent
from ckpt.state.statefuls import as_stateful
from ckpt.storage.host_memory import HUGE_PAGE, MemoryUse

Settings = TypeVar("Settings", Retention, SaveSettings, LoadSettings)
Kind = TypeVar("Kind")
STRATEGIES = {"direct": DirectLoad, "two-stage": TwoStageLoad}
"""Name -> loading strategy."""
_BACKEND = ("writer", "join", "read")
_STRATEGY = ("prepare", "bind", "close")
"""Methods that a backend, or a strategy, must have. Its class does not matter."""
_ID_DIGITS = 8


def as_backend(given: Backend | str, called: str = "backend") -> Backend:
    """Return a backend: the object given, or one of `BACKENDS` with its defaults. `called`: the argument in the caller's interface."""
    if isinstance(given, str) and given in BACKENDS:
        return backend_named(given)
    expected = f"one of {', '.join(BACKENDS)}, or an object such as ZarrBackend()"
    backend: Backend = _with_methods(given, _BACKEND, "backend", called, expected)
    return backend


def as_strategy(given: LoadingStrategy | str, called: str = "strategy") -> LoadingStrategy:
    """Return a loading strategy: the object given, or "direct" or "two-stage" with its defaults. `called`: see `as_backend`."""
    made = STRATEGIES[given]() if isinstance(given, str) and given in STRATEGIES else given
    expected = f"one of {', '.join(STRATEGIES)}, or an object such as DirectLoad()"
    strategy: LoadingStrategy = _with_methods(made, _STRATEGY, "strategy", called, expected)
    return strategy


def as_device(given: Device | str) -> Device:
    """Return a device: the object given, or that of a known type."""
    if isinstance(given, str):
        return Device.of_type(given)
    return _object(given, Device, "device", "the type of a device, such as cpu, or a ckpt.memory.device.Device")


def as_topology(given: Topology | None) -> Topology:
    """Return the ranks; None: those of torch's default process group, or this process alone. Collective for None.

    Raises:
        ConfigurationError: None is given, and this process is one of several without a process group.
    """
    if given is not None:
        return _object(
            given, Topology, "topology", "a ckpt.ranks.topology.Topology, or None for the ranks of torch.distributed"
        )
    world_size = os.environ.get("WORLD_SIZE", "1")
    if not (dist.is_available() and dist.is_initialized()) and world_size != "1":
        raise ConfigurationError(
            f"topology=None means the ranks of torch.distributed, which is not initialized, and WORLD_SIZE is {world_size}: call "
            "torch.distributed.init_process_group first, or give Topology.join(...), or Topology.alone() for one process by itself"
        )
    return current_topology()


def as_components(given: Iterable[StateComponent]) -> list[StateComponent]:
    """Return the components as a list."""
    expected = "a list of StateComponent"
    if isinstance(given, StateComponent):
        raise unlike("state_components", given, f"{expected}: put it in a list")
    if isinstance(given, Mapping | str) or not isinstance(given, Iterable):
        raise unlike("state_components", given, f"{expected}, each with its key, its object and its sharing pattern")
    components = list(given)
    for number, component in enumerate(components):
        if not isinstance(component, StateComponent):
            raise unlike(f"state_components[{number}]", component, "a StateComponent(key, object, sharing_pattern)")
    return components


def as_run(
    state_components: Iterable[StateComponent],
    process_groups: Mapping[str, Any] | None,
    topology: Topology | None,
    backend: Backend | str,
    device: Device | str,
) -> SavedRun:
    """Return components, ranks, backend and device as one value. Collective: process groups are named on all ranks.

    Raises:
        ConfigurationError: also where two components share a key, or one names a group that does not exist.
    """
    components = [dataclasses.replace(c, stateful=as_stateful(c.stateful)) for c in as_components(state_components)]
    _require_distinct(components)
    groups = as_groups(process_groups)
    backend, device = as_backend(backend), as_device(device)
    topology = as_topology(topology)
    if groups:
        topology.name_groups(groups)
    _require_groups(components, topology)
    return SavedRun(components, topology, backend, device)


def as_groups(given: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return process groups by name; None: no groups."""
    expected = "a dictionary: name -> torch process group, or the global ranks of this rank's instance of it"
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise unlike("process_groups", given, expected)
    for name, group in given.items():
        are_ranks = isinstance(group, Collection) and all(isinstance(rank, int) for rank in group)
        if not isinstance(name, str) or not (are_ranks or isinstance(group, dist.ProcessGroup)):
            raise unlike(f"process_groups[{name!r}]", group, expected)
    return given


def as_tiers(given: Iterable[Tier | Root] | Mapping[str, Tier | Root | None] | None) -> tuple[list[Tier], Root]:
    """Return the tiers on the hosts as a list, and what the last one says of the checkpoint root, if it is that: see `remote`.

    Args:
        given: those of a mapping, as in a configuration, are taken in its order; None: there are none.
    """
    if given is None:
        return [], Root()
    if isinstance(given, Mapping):
        given = [tier for tier in given.values() if tier is not None]
    if isinstance(given, Tier | Root | str) or not isinstance(given, Iterable):
        raise unlike("tiers", given, "a list of tiers, such as [ckpt.saving.tiers.memory(copies=1)]")
    tiers: list[Any] = list(given)
    root = tiers.pop() if tiers and isinstance(tiers[-1], Root) else Root()
    expected = "what memory() or local() returns, or remote() for the last one"
    return [_object(tier, Tier, f"tiers[{number}]", expected) for number, tier in enumerate(tiers)], root


def given_once(name: str, given: Any, of_root: Any, nothing: Any = None) -> Any:
    """Return an argument that `remote` may give in its place.

    Args:
        nothing: the value of one that is not given.

    Raises:
        ConfigurationError: both are given, and differ.
    """
    if nothing not in (given, of_root) and given != of_root:
        raise ConfigurationError(f"{name} is {given}, and remote() in tiers says {of_root}: give it once")
    return of_root if given == nothing else given


def root_given_once(name: str, given: str | os.PathLike[str] | ObjectPath | None, of_root: Place | None) -> Place:
    """Return the checkpoint root; see `given_once`."""
    return as_location(name, given_once(name, given and as_location(name, given), of_root))


def as_settings(
    keep_last: int | Retention | None,
    saves: SaveSettings | str,
    loads: LoadSettings | None,
    given: Mapping[str, Any],
    called: str = "saves",
) -> tuple[Retention, SaveSettings, LoadSettings]:
    """Return the settings of a coordinator.

    Args:
        given: settings by themselves, such as `verify`, which take the place of those in `keep_last`, `saves` and `loads`.
        called: `saves` in the caller's interface.

    Raises:
        ConfigurationError: there is no such setting, or it has a wrong value.
    """
    if not isinstance(loads, LoadSettings | None):
        raise unlike("loads", loads, "a LoadSettings, such as LoadSettings(verify=False)")
    require_no_sizes(given)
    for name, value in given.items():
        if name not in SETTINGS:
            near = difflib.get_close_matches(name, SETTINGS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"settings are {', '.join(sorted(SETTINGS))}"
            raise ConfigurationError(Argument(f"coordinator.{name}", value), f": there is no such setting; {hint}")
    retention, loads = as_retention(keep_last), loads or LoadSettings()
    return _with(given, retention), _with(given, as_saves(saves, called)), _with(given, loads)


def _with(given: Mapping[str, Any], settings: Settings) -> Settings:
    own = {field.name: given[field.name] for field in dataclasses.fields(settings) if field.name in given}
    return dataclasses.replace(settings, **own)


SETTINGS = frozenset(field.name for kind in (Retention, SaveSettings, LoadSettings) for field in dataclasses.fields(kind))
"""Names of the settings that may be given by themselves."""


def shared_out(
    mib: int | MemoryBudget | None, run: SavedRun, strategy: LoadingStrategy, saves: SaveSettings, place: Place
) -> tuple[MemoryBudget, str]:
    """Share a memory budget out to the parts of a run, and limit them; return it, and the line that says it.

    Args:
        mib: the budget of a rank, or that of each part.
        place: the checkpoint root.

    Raises:
        ConfigurationError: it is too small, or of a wrong type.
    """
    use = MemoryUse(not isinstance(place, Path), run.device.type != "cpu", CHUNK_MAX_BYTES)
    # Not isinstance: from Python 3.12 on it misses attributes that a wrapper delegates by __getattr__.
    buffers: Limited | None = getattr(run.backend, "buffers", None)
    reader: Any = strategy if hasattr(strategy, "limit_memory") else None
    writing, reading = (part.memory_range(use) if part is not None else (0, 0) for part in (buffers, reader))
    copies, staging = copies_of(run.backend, saves), None
    if copies:
        items = 0 if memories_of(run.backend) is not None else 4 if use.on_device else 1
        staging = items * CHUNK_MAX_BYTES + (HUGE_PAGE if items == 1 else 0)  # three on a device, in memory of a power of two
    chunks = getattr(run.backend, "chunk_memories", 1)
    pinned = run.device.pinned_bytes if use.on_device else 0
    needs = Needs(chunks * CHUNK_MAX_BYTES, pinned, writing, reading, staging, copies, use.on_device)
    if not isinstance(mib, MemoryBudget):
        if mib is not None:
            check_number("memory_budget_mib", mib, 1, "a whole number of MiB, or None for no limit")
        mib = MemoryBudget.shared_out(mib, needs)
    for part, most in ((buffers, mib.writing), (reader, mib.reading)):
        if part is not None and most is not None:
            part.limit_memory(most, use)
    return mib, mib.sentence(needs)


def as_location(name: str, given: str | os.PathLike[str] | ObjectPath) -> Place:
    """Return the folder, or the address in an object store, that the argument `name` gives."""
    if isinstance(given, ObjectPath):
        return given
    if not isinstance(given, str | os.PathLike) or not isinstance(os.fspath(given), str) or not os.fspath(given):
        raise unlike(name, given, "the path of a folder, as a string or a Path, or an address such as s3://bucket/run")
    return as_place(given, name)


def as_checkpoint_id(given: str | int) -> str:
    """Return the name of a checkpoint. A number, such as a step, gets leading zeros, so that names sort as numbers do."""
    if isinstance(given, str) and given:
        return given
    with suppress(TypeError):
        if not isinstance(given, bool) and (number := operator.index(given)) >= 0:  # type: ignore[arg-type]
            return f"{number:0{_ID_DIGITS}d}"
    raise unlike("checkpoint_id", given, "a name, or a number from 0 on, such as the step")


def check_flags(**given: object) -> None:
    """Require True or False for each argument."""
    for name, value in given.items():
        _object(value, bool, name, "True or False")


def check_number(name: str, given: object, least: int, expected: str, kinds: Any = int) -> None:
    """Require a number of at least `least`. `expected`: the rest of the error's sentence."""
    if isinstance(given, bool) or not isinstance(given, kinds) or not given >= least:
        raise unlike(name, given, expected)


def check_step(given: object) -> None:
    """Require the number of a training step."""
    with suppress(TypeError):
        if not isinstance(given, bool) and operator.index(given) >= 0:  # type: ignore[arg-type]
            return
    raise unlike("step", given, "a whole number from 0 on")


def _require_distinct(components: Sequence[StateComponent]) -> None:
    for key, count in Counter(component.key for component in components).items():
        if count > 1:
            raise ConfigurationError(f"two state components have the key {key!r}; a checkpoint holds one of each name")


def _require_groups(components: Sequence[StateComponent], topology: Topology) -> None:
    for component in components:
        is_of_group = not component.is_auto and component.pattern is SharingPattern.PER_GROUP
        if is_of_group and component.process_group_name not in topology.groups:
            known = ", ".join(sorted(topology.groups)) or "none"
            raise ConfigurationError(
                f"component {component.key}: there is no process group {component.process_group_name!r}; this run has: {known}"
            )


def _object(given: Kind, kind: Any, name: str, expected: str) -> Kind:
    if not isinstance(given, kind):
        raise unlike(name, given, expected)
    return given


def _with_methods(given: Any, methods: Iterable[str], name: str, called: str, expected: str) -> Any:
    if isinstance(given, type) or not all(callable(getattr(given, method, None)) for method in methods):
        raise unlike(called, given, expected, name)
    return given
