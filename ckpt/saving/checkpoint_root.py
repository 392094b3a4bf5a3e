"""Save into a checkpoint root: ranks write an unpublished folder, and a rename gives it its name once all have written.

A root knows the tensors of its earlier steps: a checkpoint whose tensors equal those of one more often than not holds the wrong state
(`StaleStateCheck`). Published cases: all checkpoints of a run were the same (NeMo-RL 3312); each held the optimizer of the first step
(NeMo-RL 4183). They were saved, committed and verified; the fault showed only when training was resumed from them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ckpt.backends.base import Backend, Previous
from ckpt.catalog import verify
from ckpt.catalog.catalog import Lock, catalog_at, lock_at
from ckpt.catalog.committed import Catalog, Commit
from ckpt.catalog.incremental import previous_of
from ckpt.catalog.ledger import ROOT_OWNER, run_owner
from ckpt.catalog.retention import Retention
from ckpt.errors import CorruptCheckpointError, StorageError
from ckpt.format.manifest import CheckpointManifest, storable_metadata, storable_metrics
from ckpt.format.places import Place, place_of, step_of
from ckpt.planning.plan import SavePlan
from ckpt.ranks.topology import Topology
from ckpt.saving.host_cache import HeldStep, HostCache
from ckpt.saving.manifest_writer import ManifestWriter, entries_of, index_files
from ckpt.saving.prepared_save import Destination, PreparedSave, SaveReport, Written, require_reachable
from ckpt.saving.writing import RankWritePlan, WriteResult, joined_checksum
from ckpt.state.overlap import optimizer_of
from ckpt.state.sharing import StateComponent
from ckpt.state.statefuls import ModelState
from ckpt.storage.checkpoint_files import same_place
from ckpt.storage.files import empty, remove
from ckpt.storage.host_memory import places_from_json
from ckpt.storage.objects.store import CountedRequests, Counts, all_of
from ckpt.storage.pool import PooledSave


class StaleStateCheck:
    """Remembers the digests of earlier checkpoints of this process. The lead asks it, once a checkpoint is committed.

    Args:
        components: those with an optimizer, and the modules that these optimizers train, must change with every step.
    """

    def __init__(self, components: Sequence[StateComponent]) -> None:
        optimizers = {c.key: found for c in components if (found := optimizer_of(c.stateful)) is not None}
        trained = {id(p) for optimizer in optimizers.values() for group in optimizer.param_groups for p in group["params"]}
        self._steps_change = {
            c.key
            for c in components
            if c.key in optimizers
            or (isinstance(c.stateful, ModelState) and any(id(p) in trained for p in c.stateful.parameters()))
        }
        self._seen: dict[str, dict[str, str]] = {}

    def alarms(self, checkpoint_id: str, results: Sequence[WriteResult]) -> list[str]:
        """Return a sentence for each component that equals that of an earlier step, and should not; remember this checkpoint.

        Ids that are numbers are steps, in their order; other ids are different steps if they differ.
        """
        keys = sorted({key for result in results for key in result.tensor_checksums})
        now = {key: joined_checksum(result.tensor_checksums.get(key, "") for result in results) for key in keys}
        older = {key: self._older(key, digest, checkpoint_id) for key, digest in now.items()}
        for key, digest in now.items():
            self._seen.setdefault(key, {})[digest] = checkpoint_id
        same = {id for id in older.values() if id is not None}
        if keys and None not in older.values() and len(same) == 1:
            (id,) = same
            return [
                f"checkpoint-{checkpoint_id} holds, in every tensor, the same bits as checkpoint-{id}, though the step has advanced: "
                "either nothing was trained, or it is not the state of this step that was saved"
            ]
        return [
            f"{key} in checkpoint-{checkpoint_id} is, bit for bit, what it was in checkpoint-{id}, though the step has advanced: the "
            "object that is saved may not be the one that is trained"
            for key, id in older.items()
            if id is not None and key in self._steps_change
        ]

    def _older(self, key: str, digest: str, checkpoint_id: str) -> str | None:
        """The id of an earlier step's checkpoint in which this component was the same."""
        id = self._seen.get(key, {}).get(digest)
        if id is None or id == checkpoint_id:
            return None
        then, now = step_of(id), step_of(checkpoint_id)
        return id if then is None or now is None or then < now else None


_CLOCK_TOLERANCE = timedelta(seconds=1)

_log = logging.getLogger("ckpt")


@dataclass(frozen=True, slots=True)
class SaveTarget:
    """The destination of one save, and what it does to the checkpoints there.

    Attributes:
        root: the checkpoint root.
        refused: checkpoints that this run found damaged -> the damage.
        retention: which checkpoints of this run stay.
        condemned: those of `refused` that share a damaged file; they are quarantined.
        history: run id -> the largest commit number that retention counts, of the runs that this one goes on from.
        remove_others: remove the checkpoints of other runs that lie in the root.
        config_text: stored as config.yaml; None: no such file.
        metrics, metadata: stored in the manifest, as the caller gave them.
        saved_at: when it was saved in an earlier tier, ISO 8601; None: it is saved now.
        goes_home: with tiers, it is copied to the checkpoint root, too.
    """

    root: Place
    checkpoint_id: str
    validate: bool
    refused: Mapping[Place, str]
    retention: Retention
    condemned: Mapping[Place, str] = field(default_factory=dict)
    history: Mapping[str | None, int] = field(default_factory=dict)
    remove_others: bool = False
    config_text: str | None = None
    metrics: Mapping[str, float] | None = None
    metadata: Mapping[str, Any] | None = None
    saved_at: str | None = None
    goes_home: bool = True

    @property
    def path(self) -> Place:
        return self.root / f"checkpoint-{self.checkpoint_id}"

    @property
    def what(self) -> str:
        return f"save of checkpoint-{self.checkpoint_id}"

    def storable_notes(self) -> dict[str, Any]:
        """Metrics and metadata as the manifest holds them.

        Raises:
            ConfigurationError: it cannot.
        """
        return {"metrics": storable_metrics(self.metrics), "metadata": storable_metadata(self.metadata)}


@dataclass
class KnownRoots:
    """The checkpoint roots of a run: settings, and facts that its saves leave for the next one. Saves use it one after another.

    Attributes:
        home: the checkpoint root of saves that name no other.
        run_id: of this run, in the manifests of its checkpoints.
        stale_s, delete: see `Ledger`.
        shared_root: several runs may save into one root, so each claims its own checkpoints there, and none the root.
        min_live: of incremental saves: the fraction of a data file that must still be used to be linked; None: nothing is linked.
        host_cache: keeps saves in memory; None: nothing is kept.
        in_use: the roots that are known to exist.
        reached: the roots that every rank is known to reach.
        distrusted: checkpoints that no save links to. May differ between ranks; the lead's counts.
        is_clock_told: the warning about a slow clock has been logged.
        lock: of `home`, from the first save to `close`.
    """

    home: Place
    run_id: str
    stale_s: float
    shared_root: bool = False
    min_live: float | None = None
    delete: Callable[[Path], None] | None = None
    host_cache: HostCache | None = None
    in_use: set[Place] = field(default_factory=set)
    reached: set[Place] = field(default_factory=set)
    distrusted: set[Place] = field(default_factory=set)
    is_clock_told: bool = False
    lock: Lock | None = None

    def __post_init__(self) -> None:
        if isinstance(self.home, Path) and self.home.is_dir():
            self.in_use.add(self.home)

    def is_home(self, root: Place) -> bool:
        return same_place(root, self.home)

    def ledger_of(self, root: Place, retention: Retention | None = None) -> Catalog[Any]:
        return catalog_at(
            root,
            run_id=f"{self.home.absolute()}" + (f", of {self.run_id}" if self.shared_root else ""),
            saves_as=self.run_id,
            keep_last=retention,
            stale_s=self.stale_s,
            delete=self.delete,
        )

    def lock_of(self, root: Place) -> Lock:
        """Return this run's claim on a root, or on its own checkpoints in a root that several runs share."""
        is_home = self.is_home(root)
        if is_home and self.lock is not None:
            return self.lock
        lock = lock_at(
            root / (run_owner(self.run_id) if self.shared_root else ROOT_OWNER),
            run_id=self.run_id,
            what=f"checkpoint root {root}",
            advice="wait for it to end, save elsewhere, or let several runs save there with shared_root=True",
            stale_s=self.stale_s,
        )
        if is_home:
            self.lock = lock
        return lock

    def close(self) -> None:
        """Release the lock of `home`: other runs may save there."""
        if self.lock is not None:
            self.lock.release()

    def require_not_removed(self, root: Place) -> None:
        """Refuse a root that was removed with the checkpoints of this run, instead of making it again. Lead rank only.

        Raises:
            StorageError: the root existed before.
        """
        if root in self.in_use and isinstance(root, Path) and not root.is_dir():
            raise StorageError(
                f"checkpoint root {root} was removed while this run was using it; nothing is saved in its place"
            )


class CheckpointRoot(Destination):
    """The folder of one save below a checkpoint root. See `Destination`.

    Attributes:
        report: set by `publish`.
    """

    def __init__(self, target: SaveTarget, roots: KnownRoots, stale_check: StaleStateCheck) -> None:
        self.what = target.what
        self.report: SaveReport | None = None
        self._target = target
        self._roots = roots
        self._stale_check = stale_check
        self._ledger = roots.ledger_of(target.root, target.retention)
        self._lock = roots.lock_of(target.root)
        # What is kept in memory equals files of this host.
        self._host_cache = roots.host_cache if isinstance(target.root, Path) else None
        self._memory: PooledSave | None = None
        self._assigned: tuple[Path, int] | None = None
        self._previous: Place | None = None
        self._notes: dict[str, Any] = {}
        self._asked: list[Counts] = []  # by the lead for all ranks

    def claim(self, topology: Topology) -> None:
        """Lock the root, or check that this run still holds the lock, and that the root exists still. Lead rank only, before `open`.

        Raises:
            ConfigurationError: the manifest cannot hold the metrics or the metadata, or the metric is missing that retention goes by.
        """
        self._notes = self._target.storable_notes()
        self._target.retention.require_metric(self._notes["metrics"])
        self._roots.require_not_removed(self._target.root)
        asked = CountedRequests(self._target.root)
        self._ledger.claim(self._lock, topology.progress)
        self._asked.append(asked.made())

    @contextmanager
    def unclaimed_if_refused(self) -> Iterator[None]:
        """If the block fails, leave the root as it was before: unlocked, unless an earlier save locked it."""
        was_held = self._lock.is_held
        root = self._target.root
        was_there = not isinstance(root, Path) or root.exists()
        try:
            yield
        except BaseException:
            if self._lock.is_held and not was_held:  # on the lead alone
                self._lock.release()
                if isinstance(root, Path) and not was_there:
                    with suppress(OSError):  # something else lies in it by now
                        remove(root, empty)
            raise

    def require_room(self, num_bytes: int, topology: Topology) -> None:
        """Require memory for the save that is kept."""
        if self._host_cache is not None:
            with topology.phase("room in memory"):
                self._host_cache.require_room(num_bytes, topology)

    def rooms(self, write_plan: RankWritePlan, backend: Backend) -> Mapping[int, torch.Tensor]:
        """Number of an item -> its place in the memory that is kept, for a snapshot to copy it there.

        Empty for incremental saves: the chunks that are linked, and so the layout of the files, are not known before the writing.
        """
        if self._host_cache is None or self._roots.min_live is not None:
            return {}
        self._memory = self._host_cache.begin()
        return self._host_cache.rooms(self._memory, write_plan, backend)

    def open(self, topology: Topology) -> None:
        """Make the unpublished folder, on the lead rank; in the first save into a root every rank checks that it sees it."""
        root = self._target.root
        with topology.phase("open") as phase:
            if topology.is_lead:
                self._roots.require_not_removed(root)
                asked = CountedRequests(root)
                opened = self._ledger.open(self._target.checkpoint_id)
                phase.from_lead = [opened.relative_to(root).as_posix(), self._newest_sound()]
                self._asked.append(asked.made())
        name, previous = phase.from_lead
        if root not in self._roots.reached:
            with topology.phase("reach"):
                require_reachable(root, partial(self._ledger.is_seen, root / name), topology)
            self._roots.reached.add(root)
            self._roots.in_use.add(root)
        self.folder = root / name
        self._previous = root / previous if previous is not None else None
        if self._host_cache is not None and isinstance(self.folder, Path):
            self._memory = self._memory or self._host_cache.begin()
            self._assigned = self.folder, topology.rank
            self._host_cache.assign(*self._assigned, self._memory)

    def _newest_sound(self) -> str | None:
        """The newest checkpoint without known damage, which unchanged chunks are linked to."""
        if self._roots.min_live is None:
            return None
        unfit = {*self._target.refused, *self._target.condemned, *self._roots.distrusted}
        sound = [commit for commit in self._ledger.committed() if commit.path not in unfit]
        return sound[-1].path.name if sound else None

    def previous(self, rank: int) -> Previous | None:
        if self._previous is None or self._roots.min_live is None:
            return None
        return previous_of(self._previous, rank, self._roots.min_live)

    def publish(self, save: PreparedSave[Any], written: Written, topology: Topology) -> None:
        """Commit: the lead joins the arrays of all ranks, writes the manifest, and renames the folder.

        A failure of any rank before phase publish commits nothing. After the rename the checkpoint is committed, and a later error says so.
        """
        started = time.perf_counter()
        target = self._target
        asked = CountedRequests(target.root)
        with topology.phase("commit") as phase:
            if topology.is_lead:
                phase.from_lead = self._record(save, written.results, topology)
        total, digest = phase.from_lead
        with topology.phase("publish") as phase:

            def committed(path: Place) -> None:
                phase.stands = _is_committed(path)

            if topology.is_lead:
                topology.require_awaited()
                path = self._ledger.publish(
                    self.folder,
                    target.checkpoint_id,
                    refused=target.refused,
                    replace_others=target.remove_others,
                    committed=committed,
                )
                alarms = self._stale_check.alarms(target.checkpoint_id, written.results)
                phase.from_lead = [str(path), all_of([*self._asked, asked.made()]), alarms]
            if self._memory is not None:  # the other ranks may read it there
                phase.payload = [self._memory.settle(), written.mine.index]
        name, of_lead, alarms = phase.from_lead
        path = place_of(name)
        held = self._held(path, digest, save, phase.payloads)
        seconds = written.write_s + time.perf_counter() - started
        self._settle(topology, path, alarms)
        if self._host_cache is not None and held is not None:
            self._host_cache.keep(held)
        self._release()
        self.report = SaveReport(
            str(path),
            target.checkpoint_id,
            total,
            seconds,
            seconds,
            total - written.linked_bytes,
            tuple(alarms),
            written.slowest_rank,
            requests=all_of([of_lead, written.requests]),
        )

    def _record(self, save: PreparedSave[Any], results: Sequence[WriteResult], topology: Topology) -> list[Any]:
        """Write the manifest; return the bytes of all files, and the digest of the manifest. Lead rank only."""
        commit = saved_then(self._ledger.next_commit(), self._target.saved_at)
        self._tell_of_clock(commit)
        record = ManifestWriter(
            save,
            results,
            topology,
            config_text=self._target.config_text,
            commit=commit,
            run_id=self._roots.run_id,
            history={
                run: number
                for run, number in self._target.history.items()
                if run in commit.runs and run not in (None, self._roots.run_id)
            },
            **self._notes,
        )
        added = record.write(self._target.checkpoint_id, partial(self._ledger.record, self.folder))
        if self._target.validate:
            _require_sound(*verify.uncommitted(self.folder, record.manifest), topology.progress)
        if self._memory is not None:
            self._memory.add(record.made)
        return [added + sum(result.total_bytes for result in results), record.manifest_digest]

    def _tell_of_clock(self, commit: Commit) -> None:
        """Warn once if the clock of this host was set back, or is behind that of another host."""
        if commit.behind > _CLOCK_TOLERANCE and not self._roots.is_clock_told:
            self._roots.is_clock_told = True
            _log.warning(
                "the clock of this host is %s behind the time of a checkpoint in %s: set it right. Checkpoints keep their order, "
                "which goes by a counter in their manifests.",
                commit.behind,
                self._target.root,
            )

    def _held(
        self,
        path: Place,
        manifest_digest: str,
        save: PreparedSave[Any],
        kept: Sequence[Any],
    ) -> HeldStep | None:
        """The files of this save that all ranks hold in memory, now that it is committed; None: none are kept.

        Args:
            kept: by rank, the places of its files, and its index.
        """
        if self._memory is None or not isinstance(path, Path):
            return None
        results = [WriteResult(index) for _, index in kept]
        known = self._target.checkpoint_id, results, save.plan, save.mine.components, save.backend.store
        manifest = partial(_known_manifest, *known)
        places = [places_from_json(held or {}) for held, _ in kept]
        return HeldStep(known[0], path, manifest_digest, manifest, places, self._memory)

    def _settle(self, topology: Topology, path: Place, alarms: Sequence[str]) -> None:
        """After the commit: remove older checkpoints, and log the alarms about state that did not change."""
        target = self._target
        if target.retention.acts or target.remove_others or target.condemned:
            with topology.phase("retention") as phase:
                phase.stands = _is_committed(path)
                if topology.is_lead:
                    self._ledger.quarantine(target.condemned, keep=path)
                    self._ledger.retain(
                        keep=path, history=target.history, remove_others=target.remove_others, progress=topology.progress
                    )
        for alarm in alarms if topology.is_lead else ():
            _log.warning("%s", alarm)

    def discard(self, error: BaseException | None = None) -> None:
        """Release the memory of the save, and remove its folder. No thread writes to it any more."""
        memory, self._memory = self._memory, None
        if self._host_cache is not None and memory is not None:
            self._host_cache.drop(self._assigned, memory)
        if isinstance(error, CorruptCheckpointError) and error.file is not None and self._previous is not None:
            self._roots.distrusted.add(self._previous)
        self._ledger.discard_all()
        self._release()

    def _release(self) -> None:
        """Unlock a root that is not the run's home, now that the save is over."""
        if self._lock is not self._roots.lock:
            self._lock.release()


def saved_then(commit: Commit, saved_at: str | None) -> Commit:
    """The place of a copy in the order of commits: now, but with the time of the save, by which the tiers are compared."""
    return commit if saved_at is None else commit._replace(timestamp=datetime.fromisoformat(saved_at))


def _known_manifest(
    checkpoint_id: str,
    results: Sequence[WriteResult],
    plan: SavePlan,
    components: Mapping[str, StateComponent],
    store: str,
) -> CheckpointManifest:
    """The part of the manifest that every rank knows without reading it: id, arrays, indexes."""
    return CheckpointManifest(
        checkpoint_id=checkpoint_id,
        timestamp=datetime.now(UTC),
        world_size=len(results),
        topology={},
        components={},
        arrays=entries_of(plan, components, store),
        files=index_files(results),
    )


def _is_committed(path: Place) -> str:
    """The end of an error that comes too late to undo the save."""
    return f"{path.name} is committed"


def _require_sound(folder: Place, manifest: CheckpointManifest | None, progress: Callable[[int], None]) -> None:
    """Read everything back. A damaged file may be linked, and is damaged in the earlier checkpoint too then."""
    found = verify.examine(folder, manifest=manifest, progress=progress)
    if found.problems:
        raise CorruptCheckpointError(
            f"what was written does not read back as it should: {found.problems[0]}",
            file=min(found.damaged, default=None),
        )
