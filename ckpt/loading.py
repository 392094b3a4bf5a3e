"""The steps of a load, in order. Nothing is read before every rank has found that all it wants is there and fits."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ckpt.box import Box
from ckpt.device import Device
from ckpt.dtypes import torch_dtype
from ckpt.errors import CorruptCheckpointError, MissingStateError, ShapeMismatchError, WorldSizeError
from ckpt.flatten import Leaves, flatten, from_json, path_from_json, unflatten
from ckpt.ledger import Ledger
from ckpt.manifest import (
    CONFIG_NAME,
    MANIFEST_NAME,
    PLAIN_NAME,
    ArrayEntry,
    CheckpointManifest,
    ComponentManifest,
    digest_of,
)
from ckpt.mapping import address_of, local_tensor
from ckpt.sharing import OWN_COPIES, SharingPattern, StateComponent, find_aliases
from ckpt.stored import check_file, read_listed_file, read_manifest_bytes
from ckpt.strategies.base import LoadingStrategy, ReadRequest, StoredCheckpoint
from ckpt.topology import Topology
from ckpt.verify import Names

_log = logging.getLogger("ckpt")
_MAX_NAMED = 5


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a load did.

    Attributes:
        path: of the checkpoint that was loaded.
        checkpoint_id: the id it was saved under.
        load_s: of the slowest rank, in seconds.
        bytes_read: from storage, summed over ranks; less than `bytes_needed` where ranks share reads.
        bytes_needed: by all ranks together.
        config_text: the config of the run that saved it; "" if it gave none.
        fell_back_from: damaged newer checkpoints that were passed over, the newest first.
    """

    path: str
    checkpoint_id: str
    load_s: float
    bytes_read: int
    bytes_needed: int
    config_text: str
    fell_back_from: tuple[str, ...] = ()


@dataclass(slots=True)
class _Wanted:
    """One component on one rank, ready to be read.

    Attributes:
        leaves: of the object's own state dict: where the tensors go.
        new: tensors the object did not hold, made for it because it takes whatever was saved.
        plain: joined key -> saved value.
        saved_only, wanted_only: keys on one side alone.
    """

    component: StateComponent
    leaves: Leaves
    requests: list[ReadRequest] = field(default_factory=list)
    new: dict[str, torch.Tensor] = field(default_factory=dict)
    plain: dict[str, Any] = field(default_factory=dict)
    saved_only: list[str] = field(default_factory=list)
    wanted_only: list[str] = field(default_factory=list)


class Loader:
    """Loads one committed checkpoint into the objects of the components.

    Args: those of `CheckpointCoordinator`, which makes one.
    """

    def __init__(
        self,
        components: Sequence[StateComponent],
        topology: Topology,
        strategy: LoadingStrategy,
        device: Device,
        *,
        verify: bool,
    ) -> None:
        self._components = sorted(components, key=lambda c: getattr(c.stateful, "restored_last", False))
        self._topology = topology
        self._strategy = strategy
        self._device = device
        self._verify = verify

    def load(self, path: Path, *, strict: bool) -> LoadReport:
        """Load once. See `CheckpointCoordinator.load_checkpoint`."""
        started = time.perf_counter()
        with self._topology.operation(f"load of {path.name}"):
            checkpoint, config_text = self._open(path)
            with self._topology.phase("check") as phase:
                if self._verify:
                    _check_share_of_files(checkpoint, self._topology)
                wanted = [
                    self._want(checkpoint, component, saved)
                    for component, saved in self._present(checkpoint.manifest, strict)
                ]
                phase.payload = {one.component.key: one.saved_only for one in wanted if one.saved_only}
            with self._topology.phase("compare keys"):
                self._compare_keys(wanted, phase.payloads, strict)
            with self._topology.phase("read") as phase:
                requests = [request for one in wanted for request in one.requests]
                stats = self._strategy.load(requests, checkpoint, self._topology, self._device, verify=self._verify)
                phase.payload = [stats.bytes_read, stats.bytes_needed]
            totals = [sum(rank[i] for rank in phase.payloads) for i in (0, 1)]
            with self._topology.phase("apply") as phase:
                for one in wanted:
                    phase.component = one.component.key
                    _apply(one)
                phase.component = None
                phase.payload = time.perf_counter() - started
        return LoadReport(
            str(path), checkpoint.manifest.checkpoint_id, max(phase.payloads), totals[0], totals[1], config_text
        )

    def _open(self, path: Path) -> tuple[StoredCheckpoint, str]:
        """The lead reads and checks the manifest once; all ranks parse the same bytes."""
        where = str(path / MANIFEST_NAME)
        manifest: CheckpointManifest | None = None
        with self._topology.phase("open") as phase:
            if self._topology.is_lead:
                data = read_manifest_bytes(path)
                manifest = CheckpointManifest.from_bytes(data, where)
                config = read_listed_file(path, manifest, CONFIG_NAME).decode() if CONFIG_NAME in manifest.files else ""
                phase.payload = [data.decode(), config]
        text, config = phase.payloads[0]
        return StoredCheckpoint(path, manifest or CheckpointManifest.from_bytes(text.encode(), where)), config

    def _present(
        self, manifest: CheckpointManifest, strict: bool
    ) -> Iterator[tuple[StateComponent, ComponentManifest]]:
        """The components that are in the checkpoint; a missing one is an error if it is required and the load strict."""
        for component in self._components:
            saved = manifest.components.get(component.key)
            if saved is not None:
                yield component, saved
                continue
            has = ", ".join(manifest.components) or "none"
            if component.required and strict:
                raise MissingStateError(
                    f"component {component.key} is not in the checkpoint, which has: {has}. Leave it "
                    f"out with ~components.{component.key}, "
                    f"set components.{component.key}.required=false, or load with load.strict=false.",
                    component=component.key,
                )
            if self._topology.is_lead:
                _log.warning(
                    "component %s is not in the checkpoint and keeps its state; it has: %s", component.key, has
                )

    def _want(self, checkpoint: StoredCheckpoint, component: StateComponent, saved: ComponentManifest) -> _Wanted:
        """Find where in the checkpoint each tensor of a component lies, and read its plain values."""
        manifest = checkpoint.manifest
        _require_same_kind(component, saved)
        start = f"{component.key}/{_saved_prefix(saved, manifest, self._topology)}"
        entries = {name.removeprefix(start): entry for name, entry in manifest.arrays.items() if name.startswith(start)}
        prepare = getattr(component.stateful, "prepare_to_load", None)
        if prepare is not None:
            prepare({key: entry for key, entry in entries.items() if entry.alias_of is None})
        one = _Wanted(component, flatten(component.stateful.state_dict(), component.key))
        rows = _read_plain(checkpoint, saved, start)
        for key, row in rows.items():
            one.leaves.paths[key] = path_from_json(row[0])
            if len(row) == 2:
                one.plain[key] = from_json(row[1])
        tied = find_aliases(one.leaves.tensors, {})
        declared = getattr(component.stateful, "tied_names", {})
        for key, leaf in one.leaves.tensors.items():
            if key in tied:
                continue
            name = start + key
            if name not in manifest.arrays and key in declared:
                name = start + declared[key]
            if name not in manifest.arrays:
                one.wanted_only.append(key)
                continue
            name = manifest.arrays[name].alias_of or name
            label = f"{component.key}: {key}"
            address = address_of(leaf, name)
            _require_fit(label, address.dtype, address.global_shape, manifest.arrays[name], component.key)
            one.requests.append(ReadRequest(name, label, address.box, local_tensor(leaf)))
        unclaimed = [key for key, entry in entries.items() if key not in one.leaves.tensors and entry.alias_of is None]
        unclaimed += [key for key, first in tied.items() if key in entries and entries[key].alias_of is None]
        if prepare is None and component.pattern is not SharingPattern.SHARDED:
            for key in unclaimed:
                self._make_new(one, key, start, entries[key])
        else:
            one.saved_only = unclaimed
        return one

    def _make_new(self, one: _Wanted, key: str, start: str, entry: ArrayEntry) -> None:
        """A tensor for an object that does not hold it yet, and takes whatever was saved."""
        tensor = torch.empty(entry.shape, dtype=torch_dtype(entry.dtype))
        one.new[key] = tensor
        one.leaves.paths.setdefault(key, (key,))
        whole = Box((0,) * len(entry.shape), entry.shape)
        one.requests.append(ReadRequest(start + key, f"{one.component.key}: {key}", whole, tensor))

    def _compare_keys(
        self, wanted: Sequence[_Wanted], saved_only: Sequence[Mapping[str, list[str]]], strict: bool
    ) -> None:
        """Refuse, or report, keys that are in the checkpoint only or wanted only."""
        for one in wanted:
            key = one.component.key
            nowhere = set(one.saved_only)
            if one.component.pattern is SharingPattern.SHARDED:  # wanted by another rank is wanted
                nowhere = set.intersection(*(set(rank.get(key, ())) for rank in saved_only))
            for what, keys in (("in the checkpoint only", sorted(nowhere)), ("wanted only", one.wanted_only)):
                if not keys:
                    continue
                named = ", ".join(keys[:_MAX_NAMED]) + (
                    f" and {len(keys) - _MAX_NAMED} more" if len(keys) > _MAX_NAMED else ""
                )
                if strict:
                    raise MissingStateError(
                        f"component {key}: {what}: {named}. Load into the model it was saved from, or "
                        "with load.strict=false to leave these out.",
                        component=key,
                    )
                if self._topology.is_lead:
                    _log.warning("component %s: %s: %s", key, what, named)


def committed_newest_first(root: Path) -> list[Path]:
    """The committed checkpoints below a root, the newest commit first."""
    return [one.path for one in reversed(Ledger(root, run_id="reader").committed())]


def _check_share_of_files(checkpoint: StoredCheckpoint, topology: Topology) -> None:
    """Check size and loose bytes of the checkpoint's files, each file on one rank; array blocks are checked when read."""
    manifest = checkpoint.manifest
    for path in list(manifest.files)[topology.rank :: topology.world_size]:
        read_listed_file(checkpoint.root, manifest, path)
    for rank in manifest.index_ranks()[topology.rank :: topology.world_size]:
        index = checkpoint.index(rank)
        in_file: dict[str, list[Any]] = {path: [] for path in index.files}
        for by_number in index.chunks.values():
            for extent in by_number.values():
                in_file[extent.file].append(extent)
        for path, record in index.files.items():
            try:
                check_file(checkpoint.root, path, record, in_file[path])
            except CorruptCheckpointError as error:
                whose = Names(manifest, index).of_file(path)
                raise CorruptCheckpointError(f"{whose}: {error}" if whose else str(error)) from error
        topology.progress()


def _require_same_kind(component: StateComponent, saved: ComponentManifest) -> None:
    """Shared state loads as shared state; a copy per rank, group or node only as the same."""
    was, now = SharingPattern(saved.sharing_pattern), component.pattern
    if was is not now and (was in OWN_COPIES or now in OWN_COPIES):
        raise MissingStateError(
            f"component {component.key} was saved as {was.value} and is now declared {now.value}, so "
            "it is not clear whose state to load. "
            f"Declare it components.{component.key}.sharing_pattern={was.value}, or leave it out with ~components.{component.key}.",
            component=component.key,
        )


def _saved_prefix(saved: ComponentManifest, manifest: CheckpointManifest, topology: Topology) -> str:
    """The prefix of this rank's copy, by the pattern it was *saved* under.

    Raises:
        WorldSizeError: the ranks, groups or nodes are not those that saved it, so copies cannot be told apart.
    """
    pattern = SharingPattern(saved.sharing_pattern)
    if pattern not in OWN_COPIES:
        return ""
    key = saved.key
    way_out = f"or leave the component out with ~components.{key}"
    if pattern is SharingPattern.PER_RANK:
        if manifest.world_size != topology.world_size:
            raise WorldSizeError(
                f"component {key} is per_rank and was saved by {manifest.world_size} ranks, this run "
                f"has {topology.world_size}. Run on "
                f"{manifest.world_size} ranks (launch.nproc_per_node={manifest.world_size}), {way_out}.",
                component=key,
            )
        return f"rank-{topology.rank:05d}/"
    if pattern is SharingPattern.PER_NODE:
        then, now = manifest.topology["nodes"], [list(ranks) for ranks in topology.nodes]
        if then != now:
            raise WorldSizeError(
                f"component {key} is per_node and was saved by nodes of ranks {then}, this run has "
                f"{now}. Run on the same nodes, {way_out}.",
                component=key,
            )
        return f"node-{topology.node_rank:04d}/"
    name = saved.group_name or ""
    group = topology.groups.get(name)
    then, now = manifest.topology["groups"][name], [list(ranks) for ranks in group.instances] if group else []
    if group is None or then != now:
        raise WorldSizeError(
            f"component {key} is per_group and was saved by groups {name} = {then}, this run has "
            f"{now or 'no group of that name'}. Run with "
            f"the same groups, {way_out}.",
            component=key,
        )
    return f"{name}-{group.instance:04d}/"


def _require_fit(label: str, dtype: str, shape: tuple[int, ...], saved: ArrayEntry, component: str) -> None:
    if saved.shape != shape:
        raise ShapeMismatchError(
            f"{label}: the checkpoint holds global shape {list(saved.shape)}, this run asks for "
            f"{list(shape)}. Restore with the model "
            f"it was saved from, or leave the component out with ~components.{component}.",
            component=component,
        )
    if saved.dtype != dtype:
        raise ShapeMismatchError(
            f"{label}: the checkpoint holds {saved.dtype}, this run asks for {dtype}. Restore with the data type it was saved in.",
            component=component,
        )


def _read_plain(checkpoint: StoredCheckpoint, saved: ComponentManifest, start: str) -> dict[str, list[Any]]:
    """Joined key -> [path, value] or [path] of the copy under `start`, `<component>/<prefix>`."""
    writer = saved.plain_in.get(start.removeprefix(saved.key + "/"))
    if writer is None:
        return {}
    path = start + PLAIN_NAME
    if path in checkpoint.manifest.files:
        data = read_listed_file(checkpoint.root, checkpoint.manifest, path)
    else:
        record = checkpoint.index(writer).files.get(path)
        file = checkpoint.root / path
        data = file.read_bytes() if record is not None and file.is_file() else b""
        if record is None or len(data) != record.size or digest_of(data) != record.rest:
            raise CorruptCheckpointError(f"{path} is missing or not as rank {writer} wrote it", component=saved.key)
    rows = json.loads(data)
    return {".".join(str(part[0] if isinstance(part, list) else part) for part in row[0]): row for row in rows}


def _apply(one: _Wanted) -> None:
    """Hand the component its state: its own tensors, filled, and the plain values that were saved."""
    loaded: dict[str, Any] = {**one.leaves.tensors, **one.new, **one.plain}
    one.component.stateful.load_state_dict(unflatten(loaded, one.leaves.paths))
