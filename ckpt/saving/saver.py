"""The steps of a save, in order. Every step ends in an agreement: it succeeded on all ranks, or all raise one error.

The first half, up to the plan, is made while training waits (`Saver.prepare`); the second, from the folder to the commit, by the
same thread or by one in the background (`PreparedSave.run`), with a topology of its own.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ckpt.backends.base import Backend
from ckpt.catalog import verify
from ckpt.catalog.incremental import previous_of
from ckpt.catalog.ledger import Commit, Ledger
from ckpt.catalog.owner import FolderLock
from ckpt.errors import CorruptCheckpointError, StorageError
from ckpt.format.manifest import CheckpointManifest, index_name
from ckpt.memory.device import Device
from ckpt.planning.plan import SavePlan
from ckpt.ranks.topology import Topology
from ckpt.saving.gathering import ByteSource, LiveTensors
from ckpt.saving.host_cache import HeldStep, HostCache, heard_places, said_places
from ckpt.saving.manifest_writer import ManifestWriter, entries_of
from ckpt.saving.planner import Planner
from ckpt.saving.stale_state_check import StaleStateCheck
from ckpt.saving.writing import PACKED_BYTES, PlainFiles, RankWritePlan, Write, WriteJob, WriteResult, plain_files
from ckpt.state.collect import MergedRows, RankState, collect, settle_plain
from ckpt.state.doctor import Diagnosis
from ckpt.state.pattern_check import act_on, check_choice, examine
from ckpt.state.sharing import StateComponent
from ckpt.storage.pool import PooledSave

_CLOCK_TOLERANCE = timedelta(seconds=1)

_log = logging.getLogger("ckpt")


@dataclass(frozen=True, slots=True)
class SaveReport:
    """What a save did.

    Attributes:
        path: of the committed checkpoint.
        bytes: of all files together.
        written_bytes: of them those that this save has written; the others are linked to the checkpoint before.
        save_s: from the first rank's call to the commit, in seconds.
        blocked_s: how long training stood still; for a save that is not in the background, as long.
        alarms: sentences about tensors that are the same as in an earlier checkpoint, where they should not be.
    """

    path: str
    checkpoint_id: str
    bytes: int
    save_s: float
    blocked_s: float
    written_bytes: int = 0
    alarms: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SaveTarget:
    """Where one save goes, and what is to become of what is there.

    Attributes:
        root: the checkpoint root.
        refused: checkpoints that this run found damaged, and what was wrong with each.
        keep_last: how many checkpoints of this run stay; None: all.
        condemned: those of `refused` that share a damaged file.
        min_live: of an incremental save: the fraction of a data file that must still be used to be linked; None: nothing is linked.
        run_ids: what this training history is called in manifests: the new checkpoint goes by the first, and retention counts all.
        remove_others: remove the checkpoints of other runs that lie in the root.
        lock: of the root; None: several runs may save there.
        keeps_lock: whether the lock is held when the save is over.
    """

    root: Path
    checkpoint_id: str
    validate: bool
    refused: Mapping[Path, str]
    keep_last: int | None
    condemned: Mapping[Path, str] = field(default_factory=dict)
    min_live: float | None = None
    run_ids: tuple[str | None, ...] = ()
    remove_others: bool = False
    lock: FolderLock | None = None
    keeps_lock: bool = True

    @property
    def path(self) -> Path:
        return self.root / f"checkpoint-{self.checkpoint_id}"

    @property
    def what(self) -> str:
        return f"save of checkpoint-{self.checkpoint_id}"

    def release_lock(self) -> None:
        """The save is over."""
        if self.lock is not None and not self.keeps_lock:
            self.lock.release()


@dataclass
class Learnt:
    """What the saves of a saver, which run one after another, leave to those after them.

    Attributes:
        reached: the roots that every rank has been seen to reach.
        in_use: the roots that exist, as far as this run knows.
        distrusted: checkpoints that nothing is to be linked to. Any rank; the lead's word counts.
        is_clock_told: a warning has said that the clock is behind.
    """

    reached: set[Path] = field(default_factory=set)
    distrusted: set[Path] = field(default_factory=set)
    is_clock_told: bool = False
    in_use: set[Path] = field(default_factory=set)

    def require_not_removed(self, root: Path) -> None:
        """Make no new root in place of one that was removed with the checkpoints of this run. Lead rank only.

        Raises:
            StorageError: the root was there before.
        """
        if root in self.in_use and not root.is_dir():
            raise StorageError(
                f"checkpoint root {root} was removed while this run was using it; nothing is saved in its place"
            )


class Saver:
    """Saves the same components again and again; what does not change between saves is worked out once.

    Args: those of `CheckpointCoordinator`, which makes one, and
        output_dir: the checkpoint root of saves that name no other.
        keeper: keeps what is saved in memory; None: nothing is kept.
    """

    def __init__(
        self,
        output_dir: Path,
        components: Sequence[StateComponent],
        topology: Topology,
        backend: Backend,
        device: Device,
        *,
        config_text: str | None,
        stale_s: float,
        run_id: str,
        pattern_check: str = "warn",
        packed_bytes: int = PACKED_BYTES,
        delete: Callable[[Path], None] | None = None,
        keeper: HostCache | None = None,
    ) -> None:
        self._keeper = keeper
        self._packed_bytes = packed_bytes
        self._delete = delete
        self._components = components
        self._topology = topology
        self._backend = backend
        self._device = device
        self.config_text = config_text
        self._stale_s = stale_s
        self._run_id = run_id
        self._pattern_check = check_choice(pattern_check)
        self._was_examined = False
        self._planner = Planner()
        self._share: tuple[SavePlan, RankWritePlan] | None = None
        self._merged: MergedRows = {}
        self._learnt = Learnt(in_use={output_dir} if output_dir.is_dir() else set())
        self._sameness = StaleStateCheck(components)

    def save(self, target: SaveTarget) -> SaveReport:
        """Save once, while training waits. See `CheckpointCoordinator.save_checkpoint`."""
        started = time.perf_counter()
        with self._topology.operation(target.what):
            prepared = self.prepare(target)
            return prepared.run(self._topology, prepared.live_tensors(), RankWritePlan.write, started=started)

    def prepare(self, target: SaveTarget) -> PreparedSave:
        """Ask the components, compare notes, and plan: all ranks agree on what this save is. Nothing is written. Collective."""
        ledger = Ledger(
            target.root,
            run_id=self._run_id,
            keep_last=target.keep_last,
            stale_s=self._stale_s,
            delete=self._delete,
        )
        with _released_unless_prepared(target):
            return self._prepare(target, ledger)

    def _claim(self, target: SaveTarget, ledger: Ledger) -> None:
        """Acquire the root, or see that this run still has it, and that nobody has removed it. Lead rank only."""
        self._learnt.require_not_removed(target.root)
        if target.lock is not None:
            ledger.claim(target.lock, self._topology.progress)

    def _prepare(self, target: SaveTarget, ledger: Ledger) -> PreparedSave:
        look = self._is_to_look(target.validate)
        claim = partial(self._claim, target, ledger)
        mine, summaries = self._collect(validate=target.validate, look=look, claim=claim)
        plain = settle_plain(mine, summaries, self._topology, self._merged)
        if look:
            self._check_patterns(mine)
        plan, tasks = self._planner.plan(mine, [summary["table"] for summary in summaries], self._topology)
        if self._share is None or self._share[0] is not plan:
            share = RankWritePlan(
                plan,
                tasks,
                mine.components,
                self._topology,
                packed_bytes=self._packed_bytes,
                store=self._backend.store,
            )
            self._require_room(share)
            self._share = plan, share
        return PreparedSave(
            target=target,
            ledger=ledger,
            mine=mine,
            plan=plan,
            share=self._share[1],
            plain=plain_files(plain, mine.components, self._topology),
            backend=self._backend,
            device=self._device,
            config_text=self.config_text,
            learnt=self._learnt,
            sameness=self._sameness,
            keeper=self._keeper,
        )

    def _require_room(self, share: RankWritePlan) -> None:
        """See that what is kept of every save may be kept."""
        if self._keeper is not None:
            with self._topology.phase("room in memory"):
                self._keeper.require_room(share.num_bytes, self._topology)

    def distrust(self, checkpoint: Path) -> None:
        """Link nothing to this checkpoint: something in it has been found damaged. Any rank; the lead's word counts."""
        self._learnt.distrusted.add(checkpoint)

    def diagnose(self) -> list[Diagnosis]:
        """Save nothing. See `CheckpointCoordinator.diagnose`."""
        with self._topology.operation("diagnosis of the sharing patterns"):
            mine, _ = self._collect(validate=False, look=True)
            return examine(mine.components, mine.seen, self._topology)

    def _is_to_look(self, validate: bool) -> bool:
        """The doctor looks before the first save, and when a save is to be validated."""
        if self._pattern_check == "off" or self._topology.world_size == 1:
            return False
        return validate or not self._was_examined

    def _check_patterns(self, mine: RankState) -> None:
        diagnoses = examine(mine.components, mine.seen, self._topology)
        tell = self._topology.is_lead and not self._was_examined
        act_on(diagnoses, mine.components, self._pattern_check, tell=tell)
        self._was_examined = True

    def _collect(
        self, *, validate: bool, look: bool, claim: Callable[[], object] = lambda: None
    ) -> tuple[RankState, list[dict[str, Any]]]:
        """Step 1 and 2: ask the components; leave out an optional one that fails anywhere, and ask again.

        Args:
            claim: called by the lead, before it asks: it acquires the root, or sees that it still has it.
        """
        without: set[str] = set()
        while True:
            with self._topology.phase("collect") as phase:
                if self._topology.is_lead:
                    claim()
                mine = collect(self._components, self._topology, without=without, compare_all=validate, look=look)
                phase.payload = mine.summary()
            summaries: list[dict[str, Any]] = phase.payloads
            failed = {
                key: f"{reason} (rank {rank})"
                for rank, summary in enumerate(summaries)
                for key, reason in summary["failed"].items()
            }
            if not failed:
                return mine, summaries
            for key, reason in failed.items():
                if self._topology.is_lead:
                    _log.warning("optional component %s is not saved: %s", key, reason)
                without.add(key)


@dataclass
class PreparedSave:
    """One save that all ranks have agreed on, from the folder to the commit.

    Attributes:
        plain: what this rank writes of plain values, as they were at the call.
        learnt, sameness: of the saver.
        keeper: keeps what is written in memory; None: nothing is kept.
        memory: for that, if there is some already.
    """

    target: SaveTarget
    ledger: Ledger
    mine: RankState
    plan: SavePlan
    share: RankWritePlan
    plain: PlainFiles
    backend: Backend
    device: Device
    config_text: str | None
    learnt: Learnt
    sameness: StaleStateCheck
    keeper: HostCache | None = None
    memory: PooledSave | None = None

    def live_tensors(self) -> ByteSource:
        """The state itself, which must not change until the save is over."""
        return LiveTensors(self.share, self.plan, self.mine, self.device.pinned_bytes)

    def rooms(self) -> Mapping[int, torch.Tensor]:
        """Number of an item -> its place in memory that is kept, for a copy that is taken ahead of the writing.

        None have one where parts of the save may be linked: what is written then is not known yet.
        """
        if self.keeper is None or self.target.min_live is not None:
            return {}
        self.memory = self.keeper.begin()
        return self.keeper.rooms(self.memory, self.share, self.backend)

    def run(self, topology: Topology, source: ByteSource, write: Write, *, started: float) -> SaveReport:
        """Write, and commit. Collective over the topology; by any thread of the rank.

        Args:
            started: when this rank was called, by `time.perf_counter`.
        """
        target = self.target
        folder: Path | None = None
        previous: Path | None = None
        try:
            with topology.operation(target.what):
                folder, previous = self._open(topology)
                self._begin_memory(folder, topology)
                slivers = self._exchange_slivers(topology, source)
                with topology.phase("write") as phase:
                    before = None
                    if previous is not None and target.min_live is not None:
                        before = previous_of(previous, topology.rank, target.min_live)
                    job = WriteJob(folder, self.backend, self.plain, slivers, before)
                    vote = write(self.share, job, source.items(), topology.progress)
                    source.check()
                    phase.payload = [vote.to_json(), time.perf_counter() - started]
                votes = [WriteResult(**tree) for tree, _ in phase.payloads]
                waited_s = max(seconds for _, seconds in phase.payloads)
                path, commit_s, held = self._commit(topology, folder, votes)
                alarms = self._settle(topology, path, votes)
                if self.keeper is not None and held is not None:
                    self.keeper.keep(held)
        except BaseException as error:
            self.drop_memory(folder, topology)
            if isinstance(error, CorruptCheckpointError) and error.file is not None and previous is not None:
                self.learnt.distrusted.add(previous)
            self.ledger.discard_all()  # not before all have heard of it: until then another rank may be writing there
            raise
        finally:
            target.release_lock()
        seconds = waited_s + commit_s
        total = sum(vote.total_bytes for vote in votes)
        linked = sum(vote.linked_bytes for vote in votes)
        return SaveReport(str(path), target.checkpoint_id, total, seconds, seconds, total - linked, tuple(alarms))

    def _begin_memory(self, folder: Path, topology: Topology) -> None:
        """Have what this rank writes to the folder kept."""
        if self.keeper is not None:
            self.memory = self.memory or self.keeper.begin()
            self.keeper.assign(folder, topology.rank, self.memory)

    def drop_memory(self, folder: Path | None, topology: Topology) -> None:
        """Nothing of this save is kept; nobody writes from its memory any more."""
        memory, self.memory = self.memory, None
        if self.keeper is not None and memory is not None:
            self.keeper.drop(folder, topology.rank, memory)

    def _open(self, topology: Topology) -> tuple[Path, Path | None]:
        """The lead makes the unpublished folder; before the first save into a root every rank shows that it sees it.

        Returns:
            the folder, and the checkpoint to link what has not changed to.
        """
        root = self.target.root
        with topology.phase("open") as phase:
            if topology.is_lead:
                self.learnt.require_not_removed(root)
                phase.payload = [self.ledger.open(self.target.checkpoint_id).name, self._previous()]
        name, previous = phase.payloads[0]
        if root not in self.learnt.reached:
            with topology.phase("reach"):
                require_reachable(root / name, topology)
            self.learnt.reached.add(root)
            self.learnt.in_use.add(root)
        return root / name, root / previous if previous is not None else None

    def _previous(self) -> str | None:
        """The newest checkpoint that nobody has found damaged."""
        if self.target.min_live is None:
            return None
        unfit = {*self.target.refused, *self.target.condemned, *self.learnt.distrusted}
        sound = [one for one in self.ledger.committed() if one.path not in unfit]
        return sound[-1].path.name if sound else None

    def _exchange_slivers(self, topology: Topology, source: ByteSource) -> Mapping[int, bytes]:
        """Send the parts of chunks that other ranks write; return those that come here, by sender."""
        if not self.share.sends_slivers:
            return {}
        return topology.exchange("slivers", source.sends(), self.share.sources)

    def _commit(
        self, topology: Topology, folder: Path, votes: Sequence[WriteResult]
    ) -> tuple[Path, float, HeldStep | None]:
        """Step 7, by the lead: join what the ranks wrote, write the manifest; and when all are well still, rename.

        Nobody else moves a byte. Whatever befalls a rank before phase publish, nothing is committed; once the lead has
        renamed, the checkpoint is, and an error says so.

        Returns:
            the checkpoint, the seconds that this took, and what is in memory of it.
        """
        started = time.perf_counter()
        target = self.target
        with topology.phase("commit") as phase:
            if topology.is_lead:
                commit = self.ledger.next_commit()
                self._tell_of_clock(commit)
                record = ManifestWriter(
                    folder,
                    self.plan,
                    self.mine.components,
                    votes,
                    topology=topology,
                    backend=self.backend,
                    config_text=self.config_text,
                    commit=commit,
                    run_id=next(iter(target.run_ids), None),
                )
                votes[0].total_bytes += record.write(target.checkpoint_id)
                if target.validate:
                    _require_sound(folder, topology.progress)
                if self.memory is not None:
                    self.memory.add(record.made)
                phase.payload = [votes[0].total_bytes, record.manifest_digest]
        votes[0].total_bytes, digest = phase.payloads[0]
        with topology.phase("publish") as phase:
            if topology.is_lead:
                topology.require_awaited()
                path = self.ledger.publish(folder, target.checkpoint_id, refused=target.refused)
                phase.stands = _is_committed(path)
            phase.payload = [str(path) if topology.is_lead else None, said_places(self.memory)]
        path = Path(phase.payloads[0][0])
        held = self._held(path, digest, votes, [places for _, places in phase.payloads])
        return path, time.perf_counter() - started, held

    def _tell_of_clock(self, commit: Commit) -> None:
        """Warn once if the clock of this host was set back, or is behind that of another."""
        if commit.behind > _CLOCK_TOLERANCE and not self.learnt.is_clock_told:
            self.learnt.is_clock_told = True
            _log.warning(
                "the clock of this host is %s behind the time of a checkpoint in %s: set it right. Checkpoints keep their order, "
                "which goes by a counter in their manifests.",
                commit.behind,
                self.target.root,
            )

    def _held(
        self, path: Path, manifest_digest: str, votes: Sequence[WriteResult], places: Sequence[Mapping[str, Any] | None]
    ) -> HeldStep | None:
        """What all ranks have in memory of this save, now that it is committed."""
        if self.memory is None:
            return None
        known = self.target.checkpoint_id, votes, self.plan, self.mine.components, self.backend.store
        manifest = partial(_known_manifest, *known)
        return HeldStep(known[0], path, manifest_digest, manifest, heard_places(places), self.memory)

    def _settle(self, topology: Topology, path: Path, votes: Sequence[WriteResult]) -> list[str]:
        """Once it is committed: let older ones go, and look whether this one is anything new."""
        target = self.target
        if target.keep_last is not None or target.remove_others or target.condemned:
            with topology.phase("retention") as phase:
                phase.stands = _is_committed(path)
                if topology.is_lead:
                    self.ledger.quarantine(target.condemned, keep=path)
                    self.ledger.retain(keep=path, own=target.run_ids or None, remove_others=target.remove_others)
        alarms = self.sameness.alarms(target.checkpoint_id, votes)
        for alarm in alarms if topology.is_lead else ():
            _log.warning("%s", alarm)
        return alarms


@contextmanager
def _released_unless_prepared(target: SaveTarget) -> Iterator[None]:
    """Leave the root as it was found if the save is refused in the block: unclaimed, unless an earlier save claimed it."""
    was_held = target.lock is not None and target.lock.is_held
    was_there = target.root.exists()
    try:
        yield
    except BaseException:
        if target.lock is not None and target.lock.is_held and not was_held:  # on the lead alone
            target.lock.release()
            if not was_there:
                with suppress(OSError):  # something else lies in it by now
                    target.root.rmdir()
        raise


def _known_manifest(
    checkpoint_id: str,
    votes: Sequence[WriteResult],
    plan: SavePlan,
    components: Mapping[str, StateComponent],
    store: str,
) -> CheckpointManifest:
    """What every rank knows of the manifest that the lead has written."""
    return CheckpointManifest(
        checkpoint_id=checkpoint_id,
        timestamp=datetime.now(UTC),
        world_size=len(votes),
        topology={},
        components={},
        arrays=entries_of(plan, components, store),
        files={index_name(rank): (vote.index[0], vote.index[1]) for rank, vote in enumerate(votes) if vote.index},
    )


def _is_committed(path: Path) -> str:
    """What an error says that comes too late to undo the save."""
    return f"{path.name} is committed"


def require_reachable(folder: Path, topology: Topology) -> None:
    """Wait, a little, until the lead's new folder is seen here; network file systems show it late, other disks never."""
    deadline = time.monotonic() + min(topology.timeout_s / 2, 30.0)
    while not folder.is_dir():
        if time.monotonic() > deadline:
            raise StorageError(
                f"checkpoint root {folder.parent} is not shared by the ranks: rank {topology.rank} "
                "does not see the folder that rank 0 made "
                "there. Put output_dir on a file system that all hosts mount."
            )
        os.listdir(folder.parent)  # makes NFS clients ask again
        time.sleep(0.05)


def _require_sound(folder: Path, progress: Callable[[int], None]) -> None:
    """Refuse what does not read back. Its damage may be that of a file which is linked, and then of the checkpoint before, too."""
    found = verify.examine(folder, progress=progress)
    if found.problems:
        raise CorruptCheckpointError(
            f"what was written does not read back as it should: {found.problems[0]}",
            file=min(found.damaged, default=None),
        )
