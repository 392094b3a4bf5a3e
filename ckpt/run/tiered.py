"""The tiers of one run: which save goes where, and the newest whole checkpoint among the hosts' memory, their disks and the root."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ckpt.catalog.committed import COMMITTED
from ckpt.catalog.ledger import Ledger
from ckpt.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ConfigurationError,
    CorruptCheckpointError,
    StorageError,
)
from ckpt.format.digests import digest_of
from ckpt.format.manifest import MANIFEST_NAME, MAX_COMMIT_NUMBER
from ckpt.format.places import ObjectPath, Place
from ckpt.loading.report import LoadReport
from ckpt.ranks.topology import Topology
from ckpt.run.weights_to_rollouts import StepInMemory
from ckpt.saving.checkpoint_root import CheckpointRoot, KnownRoots, SaveTarget, StaleStateCheck
from ckpt.saving.drains import Drains, Later
from ckpt.saving.host_folder import HostFolder, Kept
from ckpt.saving.prepared_save import Destination, SaveReport
from ckpt.saving.tiers import HostTier, Tier
from ckpt.storage.checkpoint_files import CheckpointFolder
from ckpt.storage.keeper.hosts import SCHEME, HostsStore, nearest_first
from ckpt.storage.objects.store import given_store
from ckpt.storage.stored import read_manifest, read_manifest_bytes, recorded_sizes

_MOST_CANDIDATES = 4
"""Checkpoints of a host that are looked at: the newest ones."""

_Copies = dict[str, dict[int, int]]
"""Path -> host -> bytes that it has."""

_log = logging.getLogger("ckpt")


@dataclass(frozen=True)
class _Candidate:
    """A checkpoint to load.

    Attributes:
        tier: number of the tier.
        name: of its folder.
        time: when it was saved, in seconds.
        files: path below the tier's folders -> size, and the hosts that have it.
    """

    tier: int
    name: str
    time: float
    files: Mapping[str, tuple[int, list[int]]] = field(default_factory=dict)


class TieredRun:
    """What a coordinator with tiers asks on each save and load. Every rank has one.

    Args:
        tiers: before the checkpoint root, the fastest first; not empty.
        finished: called on every rank, in a thread, with the report of each copy into the root.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        topology: Topology,
        roots: KnownRoots,
        stale_check: StaleStateCheck,
        finished: Callable[[SaveReport], None],
    ) -> None:
        self._topology = topology
        self._roots = roots
        self._later_roots = replace(roots, host_cache=None)  # of the thread of copies
        self._stale_check = stale_check
        self._tiers = [HostTier(tier, roots.home, topology) for tier in tiers]
        if len({tier.root for tier in self._tiers}) < len(self._tiers):
            raise ConfigurationError("two tiers have one folder: give each one of its own")
        later = [self._later(tier) for tier in self._tiers[1:]]
        later.append(Later(str(roots.home), lambda target: target.goes_home, self._place_in_root, topology.is_lead))
        self._drains = Drains(topology, later, self._note, self._release)
        self._finished = finished
        self._newest: Kept | None = None
        self._only_here: str | None = None  # the newest save, if an earlier run has left it and the root has it not
        self._candidates: list[_Candidate] | None = None  # that the load under way may try, the newest first; None: not known yet

    def _later(self, tier: HostTier) -> Later:
        def place(kept: Kept) -> Destination:
            return self._host_folder(kept.target, tier, lambda _: None, kept.saved_at)

        return Later(f"the tier {tier.tier.kind}", tier.tier.is_due, place, tier.is_head)

    def first(self, target: SaveTarget) -> HostFolder:
        """The destination of a save: the first tier, from which it is copied to the others."""
        return self._host_folder(target, self._tiers[0], self._has_been_saved, None)

    def folder_of(self, target: SaveTarget) -> Path:
        """Where a save lies on this host once it is committed."""
        return self._tiers[0].root / target.path.name

    def in_memory(self) -> StepInMemory | None:
        """The newest save in the memory of the hosts, on this one; None: there is none, or the first tier is no memory."""
        kept = self._newest
        is_memory = self._tiers[0].tier.removes
        return StepInMemory(kept.target.checkpoint_id, kept.folder) if kept is not None and is_memory else None

    def _host_folder(
        self, target: SaveTarget, tier: HostTier, committed: Callable[[Kept], None], saved_at: str | None
    ) -> HostFolder:
        is_first = tier is self._tiers[0]
        return HostFolder(
            # Each tier numbers its own commits: those of the runs that this one goes on from all count.
            replace(target, history=dict.fromkeys(target.history, MAX_COMMIT_NUMBER)),
            tier,
            self._roots.run_id,
            stale_check=self._stale_check if is_first else StaleStateCheck(()),
            min_live=self._roots.min_live,
            pinned=self._drains.pinned if is_first else set,
            committed=committed,
            saved_at=saved_at,
        )

    def _place_in_root(self, kept: Kept) -> CheckpointRoot:
        target = replace(kept.target, validate=False, saved_at=kept.saved_at)
        return CheckpointRoot(target, self._later_roots, StaleStateCheck(()))

    def _has_been_saved(self, kept: Kept) -> None:
        # The end of the run before may have cut off copies to later tiers, which this save makes up for.
        self._drains.give(kept, everywhere=self._only_here is not None)
        self._newest, self._only_here = kept, None

    def _release(self, kept: Kept) -> None:
        """Remove a save from the first tier that only waited to be copied. In the thread of copies, beside saves: it touches no other."""
        first = self._tiers[0]
        if first.is_head and kept.folder not in self._drains.pinned():
            first.release(first.ledger(self._roots.run_id), kept.folder)

    def _note(self, tier: Later, report: SaveReport) -> None:
        if tier.name == str(self._roots.home):
            self._finished(report)
        if self._topology.is_lead:
            _log.info("%s, in %s", report, tier.name)

    def finish(self) -> None:
        """Bring the newest save into all tiers, and wait for that. Collective.

        Raises:
            CheckpointError: a copy failed, the same on every rank.
        """
        failure: CheckpointError | None = None
        try:
            self.wait()  # after which all ranks know alike what the root has
        except CheckpointError as error:
            failure = error
        if self._newest is not None:
            self._drains.give(self._newest, everywhere=True)
            self.wait()
        if failure is not None:
            raise failure

    def wait(self) -> None:
        """Wait for all copies that are due. Collective. Raises as `finish`."""
        self._drains.wait()

    def hurry(self) -> None:
        """Wait less for absent ranks, because this process has been asked to end. Any thread."""
        self._drains.hurry()

    def give_up(self) -> None:
        """End all copies soon. Any thread."""
        self._drains.give_up()

    def close(self, *, has_ended: bool) -> None:
        """End the thread of copies, and leave the keepers.

        Args:
            has_ended: the run has ended as it should, and memory is not needed any more; unless an earlier run's newest save, after which
                this one has saved none, is in no other place.
        """
        self._drains.close()
        self._later_roots.close()
        if has_ended and self._only_here is not None and self._topology.is_lead:
            _log.warning("%s is on the hosts alone, and stays there for the next run: this one has saved nothing", self._only_here)
        for tier in self._tiers:
            tier.close(has_ended=has_ended and self._only_here is None)

    # Loads

    def begin_load(self) -> None:
        """Have the next `load_newest` ask the hosts."""
        self._candidates = None
        self._only_here = "what was saved before"  # also if no rank finds out, because one of them dies

    def load_newest(self, load: Callable[[Place], LoadReport], since: float | None) -> LoadReport | None:
        """Load the newest checkpoint that is whole in memory or on the disks of the hosts, and was not found damaged. Collective.

        If a keeper ends, or a file goes, meanwhile, the search is made again, once: it starts the keeper again.

        Args:
            since: when the checkpoint was saved that the root offers instead; those that are older wait. None: it offers none.

        Returns:
            None: there is none; the root decides.
        """
        try:
            return self._load_newest(load, since)
        except (StorageError, CheckpointNotFoundError) as error:
            if self._topology.is_lead:
                _log.warning("the hosts are asked again: %s", error)
            self.begin_load()
            return self._load_newest(load, since)

    def _load_newest(self, load: Callable[[Place], LoadReport], since: float | None) -> LoadReport | None:
        if self._candidates is None:
            self._candidates, self._only_here = self._find(), None
        while self._candidates and (since is None or self._candidates[0].time >= since):
            candidate = self._candidates[0]
            if candidate.time != since:
                self._only_here = self._only_here or candidate.name
            try:
                return self._load_from_hosts(candidate, load)
            except CorruptCheckpointError as error:
                if self._topology.is_lead:
                    _log.warning("%s on the hosts is damaged and passed over: %s", candidate.name, error)
                del self._candidates[0]
        return None

    def abandon_newer(self, loaded: Place) -> None:
        """Set aside, or in memory remove, what the tiers have that is newer than a checkpoint from which the run goes on. Collective."""
        with self._topology.operation(f"load of {loaded.name}"), self._topology.phase("look for newer on the hosts") as phase:
            if self._topology.is_lead:
                phase.from_lead = _time_of(loaded)
        since = phase.from_lead
        with self._topology.operation(f"load of {loaded.name}"), self._topology.phase("set aside on the hosts"):
            for tier in self._tiers:
                if tier.is_head:
                    tier.abandon(tier.ledger(self._roots.run_id), lambda path: _time_of(path) > since, self._topology.progress)

    def _find(self) -> list[_Candidate]:
        """The checkpoints to try, the newest first, as the lead finds them."""
        with self._topology.operation("search for checkpoints in the tiers"):
            with self._topology.phase("look on the hosts") as phase:
                # A host that has nothing gets its keeper with the first save: nobody waits here until it has started.
                phase.payload = [tier.prepare() if tier.is_head and any(tier.root.glob("checkpoint-*")) else None for tier in self._tiers]
                phase.to_lead = [_listing(tier.root) if tier.is_head else None for tier in self._tiers]
            for number, tier in enumerate(self._tiers):
                tier.know([phase.payloads[head][number] for head in tier.heads])
            of_heads = phase.gathered
            with self._topology.phase("choose") as phase:
                if self._topology.is_lead:
                    found = [whole for number in range(len(self._tiers)) for whole in self._whole(number, of_heads)]
                    found.sort(key=lambda candidate: -candidate.time)
                    phase.from_lead = [[candidate.tier, candidate.name, candidate.time, candidate.files] for candidate in found]
        return [
            _Candidate(tier, name, saved, {path: (size, hosts) for path, (size, hosts) in files.items()})
            for tier, name, saved, files in phase.from_lead
        ]

    def _whole(self, number: int, of_heads: Sequence[Any]) -> Iterator[_Candidate]:
        """The checkpoints of a tier all of whose files are on the hosts that are left. Lead rank only."""
        found: dict[str, dict[tuple[str | None, float], _Copies]] = defaultdict(lambda: defaultdict(lambda: defaultdict(dict)))
        for host, head in enumerate(self._tiers[number].heads):
            for name, digest, saved, sizes in of_heads[head][number]:
                for path, size in sizes.items():
                    found[name][digest, saved][path][host] = size
        for name, saves in found.items():
            for (_, saved), copies in self._with_manifests(number, name, saves).items():
                try:
                    recorded = self._recorded(_Candidate(number, name, saved), copies)
                except (CheckpointError, OSError) as error:
                    _log.info("%s is not whole on the hosts: %s", name, error)
                    continue
                files = {f"{name}/{path}": (size, _hosts_of(copies[path], size)) for path, size in recorded.items()}
                missing = [path for path, (_, hosts) in files.items() if not hosts]
                if missing:
                    _log.info("%s is not whole on the hosts: %d files are missing, such as %s", name, len(missing), missing[0])
                else:
                    yield _Candidate(number, name, saved, files)

    def _with_manifests(
        self, number: int, name: str, saves: dict[tuple[str | None, float], _Copies]
    ) -> dict[tuple[str | None, float], _Copies]:
        """Of the saves with a name, by the digest of their manifest, those whose manifest is whole. Lead rank only.

        The files of hosts whose manifest is damaged, or gone, are copies for all of them: digests tell which they belong to.
        """
        if len(saves) == 1:
            return saves
        whole, others = {}, []
        for save, copies in saves.items():
            size = max(copies[MANIFEST_NAME].values(), default=0)
            manifest = {f"{name}/{MANIFEST_NAME}": (size, _hosts_of(copies[MANIFEST_NAME], size))}
            with self._reading(_Candidate(number, name, 0.0, manifest)) as place:
                try:
                    read_manifest(place)
                    whole[save] = copies
                except (CheckpointError, OSError) as error:
                    _log.info("%s of hosts %s: %s", name, manifest[f"{name}/{MANIFEST_NAME}"][1], error)
                    others.append(copies)
        for copies in whole.values():
            for path, of_hosts in ((path, of_hosts) for more in others for path, of_hosts in more.items() if path != MANIFEST_NAME):
                copies[path].update(of_hosts)
        return whole

    def _recorded(self, candidate: _Candidate, copies: _Copies) -> dict[str, int]:
        """Path -> bytes of every file of a candidate, as its records say. Lead rank only.

        Args:
            copies: a host whose copy of a record is damaged is taken out.
        """
        name = candidate.name
        while True:
            largest = {path: max(of_hosts.values()) for path, of_hosts in copies.items() if of_hosts}
            files = {f"{name}/{path}": (size, _hosts_of(copies[path], size)) for path, size in largest.items()}
            with self._reading(replace(candidate, files=files)) as place:
                try:
                    manifest = read_manifest(place)
                    return recorded_sizes(place, manifest) | {MANIFEST_NAME: largest[MANIFEST_NAME]}
                except CorruptCheckpointError as error:
                    path = f"{name}/{error.file}"
                    if error.file is None or path not in files:
                        raise
                    del copies[error.file][nearest_first(files[path][1], self._topology.node_rank)[0]]

    @contextmanager
    def _reading(self, candidate: _Candidate) -> Iterator[ObjectPath]:
        """Make a candidate of the hosts readable for this rank; yield its place."""
        tier = self._tiers[candidate.tier]
        root = ObjectPath(SCHEME, tier.tier.kind)
        store = HostsStore(tier.root, tier.host, tier.peers, candidate.files)
        try:
            with given_store(root, store):
                yield root / candidate.name
        finally:
            store.close()

    def _load_from_hosts(self, candidate: _Candidate, load: Callable[[Place], LoadReport]) -> LoadReport:
        """Load a candidate; a file that proves damaged is read from another host. Collective."""
        files = {path: (size, list(hosts)) for path, (size, hosts) in candidate.files.items()}
        while True:
            with self._reading(replace(candidate, files=files)) as place:
                try:
                    return load(place)
                except CorruptCheckpointError as error:
                    path = f"{candidate.name}/{error.file}"
                    host = self._host_read(path, error, files)
                    if host is None or files[path][1] == [host]:
                        raise
                    files[path][1].remove(host)
                    if self._topology.is_lead:
                        _log.warning("%s; it is read from another host than %d now", error, host)

    def _host_read(
        self, path: str, error: CorruptCheckpointError, files: Mapping[str, tuple[int, list[int]]]
    ) -> int | None:
        """The host from which the rank that met the error has read a file; None: nobody can say. Collective."""
        with self._topology.operation("search for another copy"), self._topology.phase("other copies") as phase:
            if path in files and self._topology.rank == (error.rank or 0):
                phase.payload = nearest_first(files[path][1], self._topology.node_rank)[0]
        return next((host for host in phase.payloads if host is not None), None)


def _hosts_of(copies: Mapping[int, int], size: int) -> list[int]:
    """The hosts whose copy of a file has this size."""
    return [host for host, its in copies.items() if its == size]


def _listing(root: Path) -> list[list[Any]]:
    """[name, digest of the manifest, seconds, path -> bytes] of the newest checkpoints in a host's folder; digest None: it has none."""
    found: list[list[Any]] = []
    times = {commit.path: commit.timestamp.timestamp() for commit in Ledger(root, run_id="reader").committed()}
    others = [path for path in sorted(root.glob(f"{COMMITTED}*")) if path not in times]
    for path in [*[*times][: -_MOST_CANDIDATES - 1 : -1], *others[: -_MOST_CANDIDATES - 1 : -1]]:
        try:
            digest = digest_of(read_manifest_bytes(path)) if path in times else None
            with CheckpointFolder(path) as folder:
                sizes = folder.sizes_below()
        except (CheckpointError, OSError) as error:
            _log.info("%s is not used: %s", path, error)
            continue
        found.append([path.name, digest, times.get(path, 0.0), sizes])
    return found


def _time_of(path: Place) -> float:
    """When a checkpoint was saved, in seconds; a damaged one counts as old."""
    try:
        return read_manifest(path).timestamp.timestamp()
    except (CheckpointError, OSError):
        return 0.0
