"""The steps of a save, in order. Every step ends in an agreement: it succeeded on all ranks, or all raise one error."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt.backends.base import Backend
from ckpt.collect import Contribution, MergedRows, collect, settle_plain
from ckpt.device import Device
from ckpt.doctor import Diagnosis
from ckpt.errors import CorruptCheckpointError, StorageError
from ckpt.ledger import Ledger
from ckpt.pattern_check import act_on, check_choice, examine
from ckpt.planner import Planner
from ckpt.recording import Record
from ckpt.sharing import StateComponent
from ckpt.topology import Topology
from ckpt.verify import verify_checkpoint
from ckpt.writing import PACKED_BYTES, Share, Vote

_log = logging.getLogger("ckpt")


@dataclass(frozen=True, slots=True)
class SaveReport:
    """What a save did.

    Attributes:
        path: of the committed checkpoint.
        bytes: of all files together.
        save_s: from the first rank's call to the commit, in seconds.
        blocked_s: how long training stood still; for a save that is not in the background, as long.
    """

    path: str
    checkpoint_id: str
    bytes: int
    save_s: float
    blocked_s: float


class Saver:
    """Saves the same components again and again; what does not change between saves is worked out once.

    Args: those of `CheckpointCoordinator`, which makes one.
    """

    def __init__(
        self,
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
    ) -> None:
        self._packed_bytes = packed_bytes
        self._components = components
        self._topology = topology
        self._backend = backend
        self._device = device
        self._config_text = config_text
        self._stale_s = stale_s
        self._run_id = run_id
        self._pattern_check = check_choice(pattern_check)
        self._was_examined = False
        self._planner = Planner()
        self._merged: MergedRows = {}
        self._root_is_shared = False

    def save(
        self, root: Path, checkpoint_id: str, *, validate: bool, refused: Mapping[Path, str], keep_last: int | None
    ) -> SaveReport:
        """Save once. See `CheckpointCoordinator.save_checkpoint`."""
        started = time.perf_counter()
        ledger = Ledger(root, run_id=self._run_id, keep_last=keep_last, stale_s=self._stale_s)
        try:
            with self._topology.operation(f"save of checkpoint-{checkpoint_id}"):
                look = self._is_to_look(validate)
                mine, summaries = self._collect(validate=validate, look=look)
                plain = settle_plain(mine, summaries, self._topology, self._merged)
                if look:
                    self._check_patterns(mine)
                plan, tasks = self._planner.plan(mine, [summary["table"] for summary in summaries], self._topology)
                folder = self._open(ledger, root, checkpoint_id)
                share = Share(plan, tasks, mine, self._topology, self._device, packed_bytes=self._packed_bytes)
                slivers = share.exchange_slivers()
                with self._topology.phase("write") as phase:
                    vote = share.write(folder, self._backend, plain, slivers)
                    mine.require_unchanged()
                    phase.payload = [vote.to_json(), time.perf_counter() - started]
                votes = [Vote(**tree) for tree, _ in phase.payloads]
                waited_s = max(seconds for _, seconds in phase.payloads)
                record = Record(
                    folder,
                    plan,
                    mine.components,
                    votes,
                    topology=self._topology,
                    backend=self._backend,
                    config_text=self._config_text,
                )
                path, commit_s = self._commit(ledger, folder, checkpoint_id, record, votes, validate, refused)
                if keep_last is not None:
                    with self._topology.phase("retention") as phase:
                        phase.stands = _is_committed(path)
                        if self._topology.is_lead:
                            ledger.retain(keep=path)
        except BaseException:
            ledger.discard_all()  # not before all have heard of it: until then another rank may be writing there
            raise
        seconds = waited_s + commit_s
        return SaveReport(str(path), checkpoint_id, sum(vote.total_bytes for vote in votes), seconds, seconds)

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

    def _check_patterns(self, mine: Contribution) -> None:
        diagnoses = examine(mine.components, mine.seen, self._topology)
        tell = self._topology.is_lead and not self._was_examined
        act_on(diagnoses, mine.components, self._pattern_check, tell=tell)
        self._was_examined = True

    def _collect(self, *, validate: bool, look: bool) -> tuple[Contribution, list[dict[str, Any]]]:
        """Step 1 and 2: ask the components; leave out an optional one that fails anywhere, and ask again."""
        without: set[str] = set()
        while True:
            with self._topology.phase("collect") as phase:
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

    def _open(self, ledger: Ledger, root: Path, checkpoint_id: str) -> Path:
        """The lead makes the unpublished folder; before the first save every rank shows that it sees it."""
        with self._topology.phase("open") as phase:
            if self._topology.is_lead:
                phase.payload = ledger.open(checkpoint_id).name
        folder = root / str(phase.payloads[0])
        if not self._root_is_shared:
            with self._topology.phase("reach"):
                require_reachable(folder, self._topology)
            self._root_is_shared = True
        return folder

    def _commit(
        self,
        ledger: Ledger,
        folder: Path,
        checkpoint_id: str,
        record: Record,
        votes: Sequence[Vote],
        validate: bool,
        refused: Mapping[Path, str],
    ) -> tuple[Path, float]:
        """Step 7, by the lead: join what the ranks wrote, write the manifest; and when all are well still, rename.

        Nobody else moves a byte. Whatever befalls a rank before phase publish, nothing is committed; once the lead has
        renamed, the checkpoint is, and an error says so.
        """
        started = time.perf_counter()
        with self._topology.phase("commit") as phase:
            if self._topology.is_lead:
                votes[0].total_bytes += record.write(checkpoint_id)
                if validate:
                    _require_sound(folder, self._topology.progress)
                phase.payload = votes[0].total_bytes
        votes[0].total_bytes = phase.payloads[0]
        with self._topology.phase("publish") as phase:
            if self._topology.is_lead:
                self._topology.require_awaited()
                path = ledger.publish(folder, checkpoint_id, refused=refused)
                phase.stands = _is_committed(path)
                phase.payload = str(path)
        return Path(phase.payloads[0]), time.perf_counter() - started


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
    problems = verify_checkpoint(folder, progress=progress)
    if problems:
        raise CorruptCheckpointError(f"what was written does not read back as it should: {problems[0]}")
