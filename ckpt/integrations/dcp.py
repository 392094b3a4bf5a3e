"""Storage for `torch.distributed.checkpoint`: existing programs get this package's format, digests and speed by one argument.

    dcp.save(state, storage_writer=CkptWriter("checkpoints/1"))
    dcp.load(state, storage_reader=CkptReader("checkpoints/1"))

DCP plans a save by gathering all ranks' items on one, as pickles. The writer keeps each rank's items back, and plans by itself: which rank
writes what is decided as in every save of this package. What it writes, `ckpt.load` reads; the reader also reads what `Checkpointer` and
`ckpt.save` have written.
"""

from __future__ import annotations

import io
import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_local_save_plan
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from ckpt.backends.base import Backend
from ckpt.errors import ConfigurationError, ShardingError, WorldSizeError
from ckpt.format.box import Box, whole
from ckpt.format.dtypes import is_dtensor, torch_dtype
from ckpt.format.manifest import STATE, ArrayEntry
from ckpt.format.places import Place
from ckpt.loading.direct import DirectLoad
from ckpt.loading.sources import CommittedSource
from ckpt.loading.state_matching import SavedCopy
from ckpt.loading.strategy import LoadingStrategy, ReadRequest, StoredCheckpoint
from ckpt.memory.device import device_of, wait_for_all
from ckpt.ranks.topology import Topology
from ckpt.run.arguments import as_backend, as_location, as_strategy, as_topology
from ckpt.saving.new_folder import save_into_new_folder
from ckpt.state.collect import RankState
from ckpt.state.flatten import Leaves, flatten, holds_tensor, is_attribute, key_of, path_to_json, rows_of, unflatten
from ckpt.state.flatten import Path as Steps
from ckpt.state.sharing import SharingPattern, StateComponent
from ckpt.state.statefuls import Given
from ckpt.state.tensor_classes import empty_tensor, is_kind_step, is_wrapper_step, require_dense
from ckpt.storage.stored import identity_of, noticing_removal, read_manifest

_CACHES = (
    "_cached_save_plan",
    "_cached_final_save_plan",
    "_cached_all_plans",
    "_cached_global_plan",
    "_cached_metadata",
)
"""Attributes of DCP's planners that outlive a save."""


class CkptWriter(StorageWriter):
    """Saves the state dict of `dcp.save` or `dcp.async_save` as a checkpoint at a path. All ranks make one.

    Values that are no tensors are saved as plain values, not as pickles, and must be equal on all ranks that have them. A tuple may hold
    tensors.

    Args:
        path: of a folder that does not exist, or is empty; None: the `checkpoint_id` of `dcp.save`. An existing checkpoint is refused.
        format: "zarr", "tensorstore", "kimi-engine", or a backend.
        topology: None: the ranks of torch's default process group, or this process alone. `dcp.save(process_group=...)` needs the
            topology of that group.

    Raises:
        ConfigurationError: an argument is of a wrong type or value, or a value of the state dict is neither a tensor nor plain.
    """

    def __init__(
        self, path: str | Place | None = None, *, format: Backend | str = "zarr", topology: Topology | None = None
    ) -> None:
        self._folder = as_location("path", path) if path is not None else None
        self._backend = as_backend(format, "format")
        self._ranks = _Ranks(as_topology(topology))
        self._items: list[WriteItem] | None = []

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Take the path of the next save. Called by DCP."""
        if checkpoint_id is not None:
            self._folder = as_location("checkpoint_id", checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *_args: Any, **_kwargs: Any) -> None:
        """Require a path. Called by DCP."""
        if self._folder is None:
            raise ConfigurationError('give CkptWriter(path), or checkpoint_id="<path>" to dcp.save')

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Keep the items of this rank, and give DCP none to gather."""
        self._items = plan.items if plan.usable else None  # None: a planner that caches says "as before"
        return replace(plan, items=[], planner_data={})

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Save. Collective: DCP calls it on every rank, in one thread."""
        assert self._folder is not None, "checked by `set_up_storage_writer`"
        topology = self._ranks.topology()

        def collected() -> RankState:
            with topology.phase("state"):
                items = self._items
                if items is None:
                    items = create_default_local_save_plan(planner.state_dict, topology.is_lead).items  # type: ignore[attr-defined]
                return _rank_state(items, getattr(planner, "mappings", {}), planner)

        save_into_new_folder(self._folder, topology, self._backend, collected)
        self._items = []
        if getattr(planner, "_enable_plan_caching", False):  # it has cached what was left of the plan
            for cache in _CACHES:
                getattr(SavePlanner, cache).pop(planner._cached_plans_key, None)  # type: ignore[attr-defined]
        return _done([])

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Do nothing: `write_data` has written the manifest."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return "://" not in os.fspath(checkpoint_id)


class CkptReader(StorageReader):
    """Reads a checkpoint of this package into the state dict of `dcp.load`, and checks what it reads. All ranks make one.

    Keys of a checkpoint with components begin with the component: "model.layer.weight". Of components that each rank has a copy of, a rank
    sees its own.

    Args:
        path: the folder of a checkpoint; None: the `checkpoint_id` of `dcp.load`.
        load: "direct", "two-stage", or a loading strategy.
        topology: as of `CkptWriter`.

    Raises:
        CheckpointNotFoundError: there is no checkpoint.
        CorruptCheckpointError: bytes are missing or changed.
    """

    def __init__(
        self,
        path: str | Place | None = None,
        *,
        load: LoadingStrategy | str = "direct",
        topology: Topology | None = None,
    ) -> None:
        self._folder = as_location("path", path) if path is not None else None
        self._strategy = as_strategy(load, "load")
        self._ranks = _Ranks(as_topology(topology))
        self._items: list[ReadItem] = []
        self._entries: dict[str, _Entry] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Take the path of the next load. Called by DCP."""
        if checkpoint_id is not None:
            self._folder = as_location("checkpoint_id", checkpoint_id)

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        """Return what the checkpoint holds, in DCP's terms: each tensor as one chunk, wherever its bytes lie. Called by DCP."""
        if self._folder is None:
            raise ConfigurationError('give CkptReader(path), or checkpoint_id="<path>" to dcp.load')
        self._identity = identity_of(self._folder)
        with noticing_removal(self._folder, self._identity):
            return self._read_metadata(self._folder)

    def _read_metadata(self, folder: Place) -> Metadata:
        topology = self._ranks.topology()
        manifest = read_manifest(folder)
        self._checkpoint = StoredCheckpoint(folder, manifest)
        source = CommittedSource(self._checkpoint, "", topology, DirectLoad(), device_of(()), verify=True)
        nested: dict[Any, Any] = {}
        leaves: list[tuple[int, Steps, _Leaf]] = []
        for key, saved in manifest.components.items():
            component = StateComponent(key, Given(), saved.sharing_pattern, saved.group_name)
            try:
                start = f"{key}/{source.own_prefix(component)}"
            except WorldSizeError:  # copies of other ranks
                continue
            prefix = start.removeprefix(f"{key}/")
            copy = SavedCopy.of(start, source.entries(component, prefix), source.rows(component, prefix))
            paths = _paths_of(copy)
            tree = unflatten({name: _stand_in(path, name in copy.entries) for name, path in paths.items()}, paths)
            above = () if key == STATE and isinstance(tree, dict) else (key,)
            nested |= {key: tree} if above else tree
            for name, path in paths.items():
                entry = copy.entries.get(name)
                leaf = _Leaf(name, None, copy.plain[name]) if entry is None else _Leaf(copy.name_of(name), entry)
                leaves.append((len(above), (*above, *path), leaf))
        planner = DefaultSavePlanner()
        planner.set_up_planner(nested, is_coordinator=True)
        names = {tuple(map(str, path)): name for name, path in planner.mappings.items()}
        self._entries = {name: _Entry() for name in planner.mappings}
        for at, path, leaf in leaves:
            steps = path[:-1] if is_kind_step(path[-1]) else path
            keys = tuple([str(key_of(step)) for step in steps])
            end = next((end for end in range(1, len(keys) + 1) if keys[:end] in names), None)
            if end is not None and not is_attribute(path[at:end]):  # those DCP drops
                self._entries[names[keys[:end]]].append((path[end:] if end < len(steps) else (), leaf))
        return Metadata({name: row.metadata() for name, row in self._entries.items()}, planner_data=planner.mappings)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_args: Any, **_kwargs: Any) -> None:
        """Do nothing: `read_metadata` has opened the checkpoint."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Keep the items of this rank, and give DCP none to gather."""
        self._items = plan.items
        return replace(plan, items=[])

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the tensors. Collective: DCP calls it on every rank, in one thread."""
        topology = self._ranks.topology()
        folder = self._checkpoint.place
        with noticing_removal(folder, self._identity), topology.operation(f"load of {folder}"):
            targets, values, copies = [], [], []
            requests: list[ReadRequest] = []
            for item in self._items:
                name = item.storage_index.fqn
                if item.type is LoadItemType.BYTE_IO:
                    value, of_value = self._entries[name].value(name)
                    values.append((item, value))
                    requests += of_value
                else:
                    box = Box(tuple(item.storage_offsets), tuple(item.lengths))
                    targets.append((item, self._entries[name][0][1], box, planner.resolve_tensor(item).detach()))
            wait_for_all(tensor for *_, tensor in targets)
            for item, leaf, box, tensor in targets:
                out = tensor
                if leaf.entry is not None and tensor.dtype != torch_dtype(leaf.entry.dtype):
                    out = torch.empty(box.shape, dtype=torch_dtype(leaf.entry.dtype), device="cpu")
                    copies.append((tensor, out))
                requests.append(ReadRequest(leaf.name, item.storage_index.fqn, box, out))
            device = device_of(request.out for request in requests)
            reading = self._strategy.prepare(requests, self._checkpoint, topology, device, verify=True)
            try:
                with topology.phase("read"):
                    reading.run()
            finally:
                reading.close()
            for tensor, out in copies:
                tensor.copy_(out)
            for item, _, _, tensor in targets:
                planner.commit_tensor(item, tensor)
            for item, value in values:
                planner.load_bytes(item, _as_torch_saves(value))
        self._items = []
        return _done(None)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return "://" not in os.fspath(checkpoint_id)


class _Leaf(NamedTuple):
    """A tensor of the checkpoint, by the array that holds its bytes and its entry in the manifest; or a plain value."""

    name: str
    entry: ArrayEntry | None
    plain: Any = None


class _Entry(list[tuple[Steps, _Leaf]]):
    """What DCP knows by one name: a tensor, a plain value, or a container that it does not enter, such as a tuple: (path below, leaf)."""

    def metadata(self) -> TensorStorageMetadata | BytesStorageMetadata:
        path, leaf = self[0]
        if path or leaf.entry is None:
            return BytesStorageMetadata()
        size = torch.Size(leaf.entry.shape)
        chunk = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
        return TensorStorageMetadata(TensorProperties(dtype=torch_dtype(leaf.entry.dtype)), size, [chunk])

    def value(self, name: str) -> tuple[Any, list[ReadRequest]]:
        """Make the value, and the requests that fill its tensors."""
        parts, paths, requests = {}, {}, []
        for number, (path, leaf) in enumerate(self):
            key = str(number) if path else ""
            parts[key], paths[key] = leaf.plain, path
            if leaf.entry is not None:
                parts[key] = empty_tensor(leaf.entry, path)
                requests.append(ReadRequest(leaf.name, name, whole(tuple(leaf.entry.shape)), parts[key]))
        return unflatten(parts, paths), requests


class _Ranks:
    """The ranks of a writer or reader. They join in the thread that saves or loads: `dcp.async_save` has one of its own."""

    def __init__(self, whole: Topology) -> None:
        self._whole = whole
        self._name = whole.name_branch()
        self._branch: Topology | None = None

    def topology(self) -> Topology:
        if self._branch is None:
            self._branch = self._whole.branch(self._name)
            weakref.finalize(self, self._branch.close)
        return self._branch


def _rank_state(items: Iterable[WriteItem], paths: Mapping[str, tuple[Any, ...]], planner: SavePlanner) -> RankState:
    """This rank's state, out of the items of DCP's plan.

    Raises:
        ConfigurationError: a value is neither a tensor nor plain.
        ShardingError: the plan of a DTensor is wrong, or two entries have one key.
    """
    rows: dict[str, list[Any]] = {}
    pieces: list[tuple[str, Sequence[int], Box, torch.Tensor]] = []
    for item in items:
        fqn = item.index.fqn
        steps = path_to_json(tuple((p, "list") if isinstance(p, int) else p for p in paths.get(fqn, (fqn,))))
        found = {fqn: [steps]}
        if item.type is WriteItemType.BYTE_IO:
            value = planner.lookup_object(item.index)  # type: ignore[attr-defined]
            leaves = _leaves_of(fqn, value, is_flattened=fqn in paths)
            below = rows_of(leaves, STATE, paths_of=leaves.tensors)
            found = {key: [steps + path[1:], *plain] for key, (path, *plain) in below.items()}
            pieces += [
                (key, tensor.shape, whole(tuple(tensor.shape)), tensor)
                for key, tensor in leaves.tensors.items()
                if isinstance(tensor, torch.Tensor)
            ]
        else:
            assert item.tensor_data is not None
            tensor, chunk = planner.resolve_data(item), item.tensor_data.chunk
            assert isinstance(tensor, torch.Tensor), "it is no BYTE_IO"
            if tensor.shape != chunk.sizes:
                raise ShardingError(
                    f"{STATE}: {fqn} has shape {[*tensor.shape]} here, and {[*chunk.sizes]} in DCP's plan, which misplaces rows that FSDP "
                    "cuts unevenly after tensor parallelism: save with Checkpointer or ckpt.save"
                )
            pieces.append((fqn, item.tensor_data.size, Box(tuple(chunk.offsets), tuple(chunk.sizes)), tensor))
        for key, row in found.items():
            if rows.setdefault(key, row) != row:
                raise ShardingError(
                    f"{STATE}: two entries of the state dict have the joined key {key!r}; rename one of them"
                )
    for key, *_, tensor in pieces:
        require_dense(tensor, f"{STATE}: {key}")
    wait_for_all(tensor for *_, tensor in pieces)
    mine = RankState.of_pieces(StateComponent(STATE, Given(), SharingPattern.SHARDED), pieces)
    mine.plain, mine.private = {STATE: rows}, {STATE: set()}
    return mine


def _leaves_of(fqn: str, value: Any, *, is_flattened: bool) -> Leaves:
    """Flatten a value that DCP would pickle, if it holds tensors: a tuple, for example.

    Raises:
        ConfigurationError: a load would not give back an equal one.
    """
    if not holds_tensor(value):
        return Leaves({}, {fqn: value}, {fqn: (fqn,)})
    if not is_flattened and isinstance(value, Mapping | list):
        raise ConfigurationError(
            f"{STATE}: {fqn} is a {type(value).__name__} that holds tensors, and the planner does not flatten it: save with "
            "flatten_state_dict=True, or give its tensors names of their own"
        )
    leaves = flatten({fqn: value}, STATE)
    for key, tensor in leaves.tensors.items():
        if not isinstance(tensor, torch.Tensor) or is_dtensor(tensor):
            raise ConfigurationError(
                f"{STATE}: {key} is a {type(tensor).__name__} inside of a {type(value).__name__}, of which DCP saves one rank's part: give "
                "it in a dictionary or a list"
            )
    return leaves


def _stand_in(path: Steps, is_tensor: bool) -> object:
    """Return what DCP treats as it treats a leaf: it looks for tensors in lists, and enters no other value, whatever it is here."""
    is_part = any(type(part) is tuple and is_wrapper_step(str(part[1])) for part in path)
    return torch.empty(0, device="cpu") if is_tensor and not is_part else object()


def _paths_of(copy: SavedCopy) -> dict[str, Steps]:
    """Return the path of each leaf, without dictionaries that are empty on one rank alone."""
    paths = copy.paths | {name: (name,) for name in copy.entries if name not in copy.paths}
    if empty := {name for name, value in copy.plain.items() if isinstance(value, dict) and not value}:
        filled = {path[:end] for path in paths.values() for end in range(len(path))}
        return {name: path for name, path in paths.items() if name not in empty or path not in filled}
    return paths


def _as_torch_saves(value: Any) -> io.BytesIO:
    """Serialize a value with `torch.save`, the only form that DCP's planner reads."""
    data = io.BytesIO()
    torch.save(value, data)
    data.seek(0)
    return data


def _done(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result)
    return future
