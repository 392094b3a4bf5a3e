"""Answer what a checkpoint holds of a component: the questions to every kind of checkpoint, and the answers of a committed one."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, Self

import torch

from ckpt.catalog.catalog import catalog_at
from ckpt.catalog.committed import continues, look
from ckpt.catalog.verify import TensorNames
from ckpt.errors import Argument, CorruptCheckpointError, MissingStateError, WorldSizeError, declare, describe
from ckpt.format.box import num_chunks, whole
from ckpt.format.digests import digest_of
from ckpt.format.dtypes import raw_bytes, torch_dtype
from ckpt.format.manifest import ArrayEntry, CheckpointManifest
from ckpt.format.places import PLAIN_NAME
from ckpt.loading.direct import DirectLoad
from ckpt.loading.report import refusal
from ckpt.loading.strategy import LoadingStrategy, Reading, ReadRequest, StoredCheckpoint
from ckpt.memory.device import Device
from ckpt.ranks.topology import Topology
from ckpt.state.flatten import rows_from_json
from ckpt.state.sharing import OWN_COPIES, Sharing, SharingPattern, StateComponent, copy_prefix
from ckpt.storage.checkpoint_files import files_below
from ckpt.storage.objects.files import side_by_side
from ckpt.storage.stored import check_file, read_listed_file, read_plain_file

Rows = Mapping[str, Sequence[Any]]
"""Joined key -> [path, value] of a plain value, [path] of a tensor, as JSON; the content of a plain.json."""


class CheckpointSource(Protocol):
    """A checkpoint of any kind, open for reading by one rank. A *prefix* names one of the copies of a component."""

    checkpoint_id: str
    run_id: str | None = None
    history: Mapping[str | None, int] = MappingProxyType({})
    config_text: str = ""
    metrics: Mapping[str, float | None] = MappingProxyType({})
    metadata: Mapping[str, Any] = MappingProxyType({})
    topology: Topology
    _strategy: LoadingStrategy = DirectLoad()
    has_order: bool = True
    """Whether entries have an order that a program chose."""

    def for_rank(self, topology: Topology) -> Self:
        """The same checkpoint, as another rank sees it. What was read of it is shared."""
        other = copy.copy(self)
        other.topology = topology
        return other

    def holds(self, key: str) -> bool:
        """Whether it holds this component."""

    def component_keys(self) -> Collection[str]:
        """The components it holds, for messages."""

    def why_removed(self, key: str) -> str | None:
        """Where a component went that it does not hold, without full stop; None: it was saved without it."""
        return None

    def only_saved(self, declared: Collection[str]) -> list[str]:
        """The components with state of a run that are not among these keys. A strict load refuses them."""

    def saved_sharing(self, component: StateComponent) -> Sharing | None:
        """The pattern it was saved under; None: the checkpoint does not say. It holds the component."""

    def own_prefix(self, component: StateComponent) -> str:
        """The prefix of this rank's copy.

        Raises:
            MissingStateError: the pattern it was saved under does not say which copy belongs to this rank.
            WorldSizeError: the copies belong to other ranks, nodes or groups than these.
        """

    def moved(self, component: StateComponent) -> str | None:
        """How the ranks, nodes or groups that hold its copies have changed since, such as "saved by 4 ranks, this run has 3".

        A component that all ranks share has moved if their number has changed. None: nothing has changed.
        """

    def same_pattern(self, component: StateComponent) -> bool:
        """Whether it was saved under the pattern, and the process group, that is declared now."""

    def prefixes(self, component: StateComponent) -> list[str]:
        """The prefixes of all copies, in the order of the ranks, nodes or instances that saved them."""

    def entries(self, component: StateComponent, prefix: str) -> Mapping[str, ArrayEntry]:
        """Key -> array of one copy."""

    def rows(self, component: StateComponent, prefix: str) -> Rows:
        """The plain values of one copy."""

    def unread(self, component: StateComponent, prefix: str) -> Mapping[str, str]:
        """Key -> why it cannot be loaded, of what other programs alone can read. `entries` may have it, as its bytes."""
        return {}

    def contents(self, component: StateComponent, prefix: str) -> Mapping[str, Any]:
        """Key -> a value that is equal for two copies exactly if their bits are, by the digests of tensors. Reads these one at a time."""
        start, source = f"{component.key}/{prefix}", self.by_this_rank()
        found: dict[str, Any] = {key: tuple(row) for key, row in self.rows(component, prefix).items()}
        for key, entry in self.entries(component, prefix).items():
            out = torch.empty(entry.shape, dtype=torch_dtype(entry.dtype), device="cpu")
            request = ReadRequest(entry.alias_of or start + key, f"{component.key}: {key}", whole(entry.shape), out)
            source.prepare([request]).run()
            found[key] = entry.dtype, entry.shape, digest_of(raw_bytes(out).numpy().data)
        return found

    def check(self, optional: Collection[str]) -> dict[str, dict[str, Any]]:
        """Check this rank's part of the bytes that reading the tensors does not check: none, where there are no digests.

        Returns:
            component -> `describe` of the damage, for the optional ones that are damaged.

        Raises:
            CorruptCheckpointError: anything else is damaged.
        """
        return {}

    def prepare(self, requests: Sequence[ReadRequest]) -> Reading:
        """Plan how every request is filled. All ranks call it, outside of a phase, each with its own requests."""

    def by_this_rank(self) -> Self:
        """The same checkpoint, whose `prepare` any rank may call alone."""
        other = copy.copy(self)
        other._strategy = DirectLoad()
        return other


class ManifestSource(CheckpointSource):
    """What a manifest answers. See `CheckpointSource`.

    Attributes:
        manifest: of the checkpoint, or of the one that an export was made of.
    """

    def __init__(self, manifest: CheckpointManifest, config_text: str, topology: Topology) -> None:
        self.manifest = manifest
        self.checkpoint_id = manifest.checkpoint_id
        self.run_id = manifest.run_id
        own: dict[str | None, int] = {self.run_id: manifest.commit_number or 0}
        self.history: Mapping[str | None, int] = own | dict(manifest.history.items())
        self.config_text = config_text
        self.metrics = manifest.metrics
        self.metadata = manifest.metadata
        self.topology = topology

    def holds(self, key: str) -> bool:
        return key in self.manifest.components

    def component_keys(self) -> Collection[str]:
        return self.manifest.components

    def only_saved(self, declared: Collection[str]) -> list[str]:
        return [key for key in self.manifest.components if key not in declared]

    def saved_sharing(self, component: StateComponent) -> Sharing:
        saved = self.manifest.components[component.key]
        return Sharing(SharingPattern(saved.sharing_pattern), saved.group_name)

    def same_pattern(self, component: StateComponent) -> bool:
        return self.saved_sharing(component) == component.sharing

    def own_prefix(self, component: StateComponent) -> str:
        """See `CheckpointSource.own_prefix`; by the pattern it was *saved* under."""
        saved = self.saved_sharing(component)
        was = saved.pattern
        require_same_kind(component, was)
        self._require_same_group(component, saved.group)
        if was in OWN_COPIES and (moved := self.moved(component)) is not None:
            advice = _same_ones(was, self.manifest.world_size)
            raise refusal(WorldSizeError, component.key, f" is {was.value} and was {moved}. ", advice)
        return saved.prefix(self.topology)

    def moved(self, component: StateComponent) -> str | None:
        """See `CheckpointSource.moved`."""
        saved, topology = self.saved_sharing(component), self.topology
        match saved.pattern:
            case SharingPattern.PER_NODE:
                then, now = self.manifest.topology["nodes"], [list(ranks) for ranks in topology.nodes]
                what = "nodes of ranks "
            case SharingPattern.PER_GROUP:
                name = saved.group or ""
                group = topology.groups.get(name)
                then, now = self.manifest.topology["groups"][name], [list(g) for g in group.instances] if group else []
                what = f"groups {name} = "
            case _:
                count = self.manifest.world_size
                by = f"{count} rank{'' if count == 1 else 's'}"
                return None if count == topology.world_size else f"saved by {by}, this run has {topology.world_size}"
        return None if then == now else f"saved by {what}{then}, this run has {now or 'no group of that name'}"

    def prefixes(self, component: StateComponent) -> list[str]:
        saved = self.saved_sharing(component)
        match saved.pattern:
            case SharingPattern.PER_RANK:
                copies = self.manifest.world_size
            case SharingPattern.PER_NODE:
                copies = len(self.manifest.topology["nodes"])
            case SharingPattern.PER_GROUP:
                copies = len(self.manifest.topology["groups"][saved.group or ""])
            case _:
                return [""]
        return [copy_prefix(saved.pattern, number, saved.group or "") for number in range(copies)]

    def rows(self, component: StateComponent, prefix: str) -> Rows:
        """See `CheckpointSource.rows`."""
        if prefix not in self.manifest.components[component.key].plain_in:
            return {}
        path = f"{component.key}/{prefix}{PLAIN_NAME}"
        return rows_from_json(self.plain_file(component.key, prefix), path)

    def plain_file(self, key: str, prefix: str) -> bytes:
        """The file of plain values of one copy, which has one.

        Raises:
            CorruptCheckpointError: it is missing or damaged.
        """
        raise NotImplementedError

    def plain_files(self) -> dict[str, tuple[str, bytes]]:
        """Path -> (component, content) of all files of plain values."""
        return {
            f"{key}/{prefix}{PLAIN_NAME}": (key, self.plain_file(key, prefix))
            for key, component in self.manifest.components.items()
            for prefix in component.plain_in
        }

    def _require_same_group(self, component: StateComponent, then: str | None) -> None:
        """Accept a group of another name with the same instances; the members of any other would get different states."""
        now = component.process_group_name
        here, there = (self.topology.groups.get(name or "") for name in (now, then))
        if here is not None and there is not None and here.instances != there.instances:
            reason = f" was saved per_group of {then} and is now declared per_group of {now}, whose members are others: "
            raise refusal(MissingStateError, component.key, reason, declare(component.key, process_group_name=then))


class CommittedSource(ManifestSource):
    """A checkpoint with a manifest. See `CheckpointSource`."""

    def __init__(
        self,
        checkpoint: StoredCheckpoint,
        config_text: str,
        topology: Topology,
        strategy: LoadingStrategy,
        device: Device,
        *,
        verify: bool,
    ) -> None:
        super().__init__(checkpoint.manifest, config_text, topology)
        self._checkpoint = checkpoint
        self._held = checkpoint.held
        self._strategy = strategy
        self._device = device
        self._verify = verify

    def why_removed(self, key: str) -> str | None:
        """See `CheckpointSource.why_removed`. Names the newest complete checkpoint beside this one that goes on from it."""
        if key not in self.manifest.removed:
            return None
        place = self._checkpoint.place
        this, beside = look(place), reversed(catalog_at(place.parent).committed())
        newest = next((commit for commit in beside if this and not commit.removed and continues(commit.path, this)), None)
        complete = f"the newest complete one is {newest.path.name}" if newest else "none that goes on from it is complete"
        return f"component {key} was removed from {place.name} by retention, and {complete}"

    def require_chunks(self) -> None:
        """See `StoredCheckpoint.require_chunks`."""
        self._checkpoint.require_chunks()

    def entries(self, component: StateComponent, prefix: str) -> Mapping[str, ArrayEntry]:
        return self.manifest.arrays_of(f"{component.key}/{prefix}".removesuffix("/"))

    def plain_file(self, key: str, prefix: str) -> bytes:
        """See `ManifestSource.plain_file`."""
        writer = self.manifest.components[key].plain_in[prefix]
        return read_plain_file(
            self._checkpoint.place,
            self.manifest,
            f"{key}/{prefix}{PLAIN_NAME}",
            lambda: self._checkpoint.index(writer),
            self._held,
            component=key,
        )

    def check(self, optional: Collection[str]) -> dict[str, dict[str, Any]]:
        """See `CheckpointSource.check`. Compares size and loose bytes of the files, each file on one rank; arrays are checked when read.

        Damage in a file of an optional component alone is that component's; in a file of several components it is the checkpoint's.
        """
        damaged: dict[str, dict[str, Any]] = {}
        mine = slice(self.topology.rank, None, self.topology.world_size)
        if not self._verify:
            for rank in self.manifest.index_ranks()[mine]:
                self._checkpoint.index(rank)  # which is checked, and reading tensors needs it
            return damaged
        read = partial(read_listed_file, self._checkpoint.place, self.manifest, held=self._held)
        for path, error in self._errors_of(read, list(self.manifest.files)[mine]):
            _note_damage(damaged, path, error, optional)
        for rank in self.manifest.index_ranks()[mine]:
            self._check_files_of(rank, optional, damaged)
            self.topology.progress()
        return damaged

    def prepare(self, requests: Sequence[ReadRequest]) -> Reading:
        return self._strategy.prepare(requests, self._checkpoint, self.topology, self._device, verify=self._verify)

    def contents(self, component: StateComponent, prefix: str) -> dict[str, tuple[Any, ...]]:
        """See `CheckpointSource.contents`. Large arrays are not read: their digests are in the indexes."""
        start = f"{component.key}/{prefix}"
        found: dict[str, tuple[Any, ...]] = {key: tuple(row) for key, row in self.rows(component, prefix).items()}
        small = []
        for key, entry in self.entries(component, prefix).items():
            form = (entry.dtype, entry.shape, entry.grid)
            if entry.alias_of is not None:
                found[key] = (*form, entry.alias_of.removeprefix(start))
            elif entry.grid is None:
                small.append((key, form, torch.empty(entry.shape, dtype=torch_dtype(entry.dtype), device="cpu")))
            else:
                found[key] = (*form, tuple(self._chunk_digests(entry)))
        requests = [
            ReadRequest(start + key, f"{component.key}: {key}", whole(form[1]), out) for key, form, out in small
        ]
        self.by_this_rank().prepare(requests).run()
        return found | {key: (*form, digest_of(raw_bytes(out).numpy().data)) for key, form, out in small}

    def _chunk_digests(self, entry: ArrayEntry) -> Iterator[tuple[int, ...]]:
        assert entry.grid is not None and entry.path is not None
        for number in range(math.prod(num_chunks(entry.shape, entry.grid))):
            index = self._checkpoint.index(entry.writer_of(number))
            yield index.chunks[entry.path][number].digests

    def _check_files_of(self, rank: int, optional: Collection[str], damaged: dict[str, dict[str, Any]]) -> None:
        index = self._checkpoint.index(rank)
        covered = index.covered()
        with files_below(self._checkpoint.root) as files:

            def check(path: str) -> None:
                check_file(files, path, index.files[path], covered.get(path, ()), self._held)

            for path, error in self._errors_of(check, index.files):
                whose = TensorNames(self.manifest, index).of_file(path)
                named = CorruptCheckpointError(f"{whose}: {error}" if whose else str(error), file=error.file)
                _note_damage(damaged, path, named, optional)

    def _errors_of(
        self, call: Callable[[str], object], paths: Collection[str]
    ) -> Iterator[tuple[str, CorruptCheckpointError]]:
        """Call for each path, in an object store for several at a time; yield those that are damaged."""

        def error_of(path: str) -> CorruptCheckpointError | None:
            try:
                call(path)
            except CorruptCheckpointError as error:
                return error
            return None

        if isinstance(self._checkpoint.root, Path):
            found: Iterable[CorruptCheckpointError | None] = map(error_of, paths)
        else:
            found = side_by_side(error_of, paths)
        yield from ((path, error) for path, error in zip(paths, found, strict=True) if error is not None)


def require_same_kind(component: StateComponent, was: SharingPattern) -> None:
    """Raise unless the component is declared as it was saved: shared by all ranks, or with copies of the same pattern."""
    now = component.pattern
    if was is not now and (was in OWN_COPIES or now in OWN_COPIES):
        reason = f" was saved as {was.value} and is now declared {now.value}, so it is not clear whose state to load: "
        raise refusal(MissingStateError, component.key, reason, declare(component.key, sharing_pattern=was.value))


def _same_ones(pattern: SharingPattern, world_size: int) -> str:
    """Advice: the ranks, nodes or groups to run on, so that every copy belongs to the one that saved it."""
    if pattern is SharingPattern.PER_RANK:
        return Argument("world_size", world_size, f"Run on {world_size} ranks")
    return "Run on the same nodes" if pattern is SharingPattern.PER_NODE else "Run with the same groups"


def _note_damage(
    damaged: dict[str, dict[str, Any]], path: str, error: CorruptCheckpointError, optional: Collection[str]
) -> None:
    """Note damage of the optional component whose folder the file lies in; raise any other."""
    component = path.partition("/")[0]
    if component not in optional or "/" not in path:
        raise error
    damaged.setdefault(component, describe(error))
