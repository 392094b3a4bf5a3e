"""Read old checkpoints: folders of `torch.save` files without a manifest, as the third reference wrote before it had one.

| file | holds the state of |
|---|---|
| `<key>_state.pt` | all ranks (GLOBAL, REPLICATED) |
| `<key>_state_rank_<r>.pt` | global rank r (PER_RANK) |
| `<key>_state_group_<name>_grank_<g>_rank_<r>.pt` | that instance of group `name` which global rank r is in (PER_GROUP) |
| `<key>_state_group_<name>_rank_<r>.pt` | the same |
| `<key>_state_<name>_<n>.pt` | the n-th instance of group `name` |
| `<key>_state_node_<n>_rank_<r>.pt`, `<key>_state_node_<n>.pt` | the n-th node (PER_NODE) |

They are pickles: a load reads them only with `allow_pickle`, through torch's reader, which builds tensors and plain values and
refuses everything else. They hold no digests, so only damage that makes a file unreadable is found. Model weights in another
form, such as safetensors, are not read here: leave the model out, or convert it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ckpt.errors import MissingStateError, WorldSizeError, declare
from ckpt.format.dtypes import zarr_name
from ckpt.format.manifest import MANIFEST_NAME, ArrayEntry
from ckpt.format.places import Place
from ckpt.interop.unpickling import require_allowed, require_repeats_within, unpickle_state_dict
from ckpt.loading.report import refusal
from ckpt.loading.sources import CheckpointSource, Rows, require_same_kind
from ckpt.loading.strategy import ReadRequest, ReadStats, bytes_of
from ckpt.ranks.topology import Topology
from ckpt.state.abilities import NamedFromPositions, offers
from ckpt.state.flatten import Leaves, flatten, rows_of
from ckpt.state.sharing import OWN_COPIES, Sharing, SharingPattern, StateComponent, find_aliases, holders_of
from ckpt.storage.checkpoint_files import CheckpointFolder, names_below

_FILE = re.compile(r"(?P<key>[A-Za-z0-9_-]+?)_state(?:_(?![0-9]+\.pt)[A-Za-z0-9_.-]+)?\.pt")
"""A number alone is a rank of torch_checkpointing."""
_KINDS = {
    SharingPattern.GLOBAL: (r"",),
    SharingPattern.PER_RANK: (r"_rank_(?P<n>[0-9]+)",),
    SharingPattern.PER_NODE: (r"_node_(?P<n>[0-9]+)(?:_rank_[0-9]+)?",),
    SharingPattern.PER_GROUP: (
        r"_group_(?P<name>.+?)(?:_grank_[0-9]+)?_rank_(?P<leader>[0-9]+)",
        r"_(?P<name>.+)_(?P<n>[0-9]+)",
    ),
}
"""Patterns of the text between `_state` and `.pt`; the first that fits counts."""
_LEADER = "leader-"


def old_files(folder: Place, *, allow_pickle: bool) -> list[str]:
    """The files of an old checkpoint in a folder; [] if it is none. A folder with a manifest is never an old one, nor an address.

    Raises:
        CheckpointNotFoundError: it is an old checkpoint, and `allow_pickle` is false.
    """
    if not isinstance(folder, Path) or (folder / MANIFEST_NAME).exists() or not folder.is_dir():
        return []
    files = sorted(name for name in names_below(folder) if _FILE.fullmatch(name))
    if files:
        found = f"{folder} has no {MANIFEST_NAME}; it looks like an old checkpoint of pickled files ({files[0]}, ...)"
        require_allowed(allow_pickle, found)
    return files


def is_old_file(name: str) -> bool:
    """Whether a file has a name of those in old checkpoints."""
    return _FILE.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class _Copying:
    """See `ckpt.loading.strategy.Reading`."""

    source: OldSource
    requests: Sequence[ReadRequest]

    def run(self) -> ReadStats:
        return self.source.fill(self.requests)

    def close(self) -> None:
        """Nothing is held."""


class OldSource(CheckpointSource):
    """A folder of pickled files, open for reading by one rank. See `ckpt.loading.sources.CheckpointSource`.

    Args:
        files: `old_files` of the folder, as the lead sees it.
    """

    def __init__(self, folder: Path, files: Sequence[str], topology: Topology) -> None:
        self.checkpoint_id = folder.name.removeprefix("checkpoint-")
        self._folder = folder
        self._files = files
        self.topology = topology
        self._copies: dict[str, tuple[SharingPattern, dict[str, str]]] = {}
        self._leaves: dict[tuple[str, str], Leaves] = {}

    def holds(self, key: str) -> bool:
        return any(_read_name(name, key) is not None for name in self._files)

    def component_keys(self) -> Collection[str]:
        return list(dict.fromkeys(match["key"] for name in self._files if (match := _FILE.fullmatch(name))))

    def only_saved(self, declared: Collection[str]) -> list[str]:
        names = [name for name in self._files if not any(_read_name(name, key) for key in declared)]
        keys = dict.fromkeys(match["key"] for name in names if (match := _FILE.fullmatch(name)))
        return [key for key in keys if key not in declared]

    def saved_sharing(self, component: StateComponent) -> Sharing | None:
        """See `CheckpointSource.saved_sharing`: by the names of its files, if they are of one kind without groups."""
        kinds = [kind for kind in _copies_by_kind(self._files, component) if kind is not SharingPattern.PER_GROUP]
        return Sharing(kinds[0]) if len(kinds) == 1 else None

    def same_pattern(self, component: StateComponent) -> bool:
        was, _ = self._copies_of(component)
        return was is component.pattern or not (was in OWN_COPIES or component.pattern in OWN_COPIES)

    def own_prefix(self, component: StateComponent) -> str:
        was, copies = self._copies_of(component)
        require_same_kind(component, was)
        moved = self.moved(component) if was in OWN_COPIES else None
        if moved is not None:
            reason = f" is {was.value}, and {moved}. Run on the ranks, nodes or groups that saved it"
            raise refusal(WorldSizeError, component.key, reason)
        return self._prefixes_here(component, copies)[self.topology.rank]

    def moved(self, component: StateComponent) -> str | None:
        was, copies = self._copies_of(component)
        if was not in OWN_COPIES:
            return "the old checkpoint does not say how many ranks saved it"
        here = set(self._prefixes_here(component, copies))
        if set(copies) == here:
            return None
        return f"the old checkpoint holds {', '.join(sorted(copies.values()))}, where this run needs one for each of {len(here)}"

    def prefixes(self, component: StateComponent) -> list[str]:
        return list(self._copies_of(component)[1])

    def entries(self, component: StateComponent, prefix: str) -> Mapping[str, ArrayEntry]:
        leaves = self._load(component, prefix)
        start = f"{component.key}/{prefix}"
        aliases = find_aliases(leaves.tensors, {})
        return {
            key: ArrayEntry(
                zarr_name(_plain_tensor(tensor).dtype),
                tuple(_plain_tensor(tensor).shape),
                alias_of=start + aliases[key] if key in aliases else None,
            )
            for key, tensor in leaves.tensors.items()
        }

    def rows(self, component: StateComponent, prefix: str) -> Rows:
        leaves = self._load(component, prefix)
        return rows_of(leaves, component.key, paths_of=leaves.tensors)

    def prepare(self, requests: Sequence[ReadRequest]) -> _Copying:
        """See `CheckpointSource.prepare`."""
        return _Copying(self, requests)

    def fill(self, requests: Sequence[ReadRequest]) -> ReadStats:
        """Copy every wanted box out of the files, which are mapped, not read whole."""
        for request in requests:
            key, _, rest = request.name.partition("/")
            prefix = next(p for k, p in self._leaves if k == key and rest.startswith(p))
            saved = _plain_tensor(self._leaves[key, prefix].tensors[rest.removeprefix(prefix)])
            request.out.copy_(saved[request.box.slices])
            self.topology.progress()
        num_bytes = bytes_of(requests)
        return ReadStats(num_bytes, num_bytes)

    def _copies_of(self, component: StateComponent) -> tuple[SharingPattern, dict[str, str]]:
        """The pattern a component was saved under, by its file names, and prefix -> file of each copy, in order.

        Raises:
            MissingStateError: files of several patterns, and none of them the declared one.
        """
        if component.key not in self._copies:
            found = _copies_by_kind(self._files, component)
            declared = component.pattern if component.pattern in OWN_COPIES else SharingPattern.GLOBAL
            if declared not in found and len(found) != 1:
                kinds = [kind.value for kind in found]
                raise MissingStateError(
                    f"component {component.key} is declared {component.pattern.value}, and the old checkpoint has files of it for "
                    f"{' and '.join(kinds) or 'other groups'}; declare what should count: ",
                    declare(component.key, sharing_pattern=" or ".join(kinds) or "..."),
                    component=component.key,
                )
            kind = declared if declared in found else next(iter(found))
            self._copies[component.key] = kind, found[kind]
        return self._copies[component.key]

    def _prefixes_here(self, component: StateComponent, saved: Collection[str]) -> list[str]:
        """The prefix of each rank's copy in this run. A group instance is found by the rank that saved it, where names give that."""
        topology, kind = self.topology, component.pattern
        sets = holders_of(component, topology) if kind in OWN_COPIES else [range(topology.world_size)]
        here: dict[int, str] = {}
        for number, ranks in enumerate(sets):
            leaders = [prefix for rank in ranks if (prefix := f"{_LEADER}{rank:05d}/") in saved]
            here |= dict.fromkeys(ranks, leaders[0] if leaders else _prefix(kind, number))
        return [here[rank] for rank in range(topology.world_size)]

    def _load(self, component: StateComponent, prefix: str) -> Leaves:
        """The leaves of one file, kept for later calls; its tensors are views of the mapped file."""
        at = component.key, prefix
        if at not in self._leaves:
            name = self._copies_of(component)[1][prefix]
            with CheckpointFolder(self._folder) as folder:
                folder.require_regular(name)
            state = unpickle_state_dict(self._folder / name)
            if offers(component.stateful, NamedFromPositions) and isinstance(state.get("param_groups"), list):
                state = component.stateful.named_from_positions(state)
            leaves = self._leaves[at] = flatten(state, f"{component.key}: {name}")
            num_bytes = sum({id(tensor): _plain_tensor(tensor).nbytes for tensor in leaves.tensors.values()}.values())
            require_repeats_within(num_bytes, (self._folder / name).stat().st_size, f"{self._folder / name} repeats elements")
        return self._leaves[at]


def _read_name(name: str, key: str) -> tuple[SharingPattern, dict[str, str]] | None:
    """Parse a file name: the pattern a component was saved under, and `n`, `name` and `leader`; None: no file of it."""
    start = f"{key}_state"
    if not (name.startswith(start) and name.endswith(".pt")):
        return None
    between = name[len(start) : -len(".pt")]
    for kind, patterns in _KINDS.items():
        for pattern in patterns:
            if (match := re.fullmatch(pattern, between)) is not None:
                return kind, match.groupdict()
    return None


def _copies_by_kind(files: Sequence[str], component: StateComponent) -> dict[SharingPattern, dict[str, str]]:
    """Kind -> prefix -> file of a component's copies, in the order of the ranks, nodes or instances that saved them."""
    found: dict[SharingPattern, dict[str, str]] = {}
    for name in files:
        kind, parts = _read_name(name, component.key) or (None, {})
        if kind is None or component.process_group_name not in (None, parts.get("name", component.process_group_name)):
            continue
        prefix = (
            f"{_LEADER}{int(parts['leader']):05d}/" if "leader" in parts else _prefix(kind, int(parts.get("n") or 0))
        )
        found.setdefault(kind, {})[prefix] = name
    return {kind: dict(sorted(copies.items())) for kind, copies in found.items()}


def _prefix(kind: SharingPattern, number: int) -> str:
    return f"{kind.value}-{number:05d}/" if kind in OWN_COPIES else ""


def _plain_tensor(leaf: Any) -> torch.Tensor:
    assert isinstance(leaf, torch.Tensor), "weights_only builds no ShardedTensor of ours"
    return leaf.detach()
