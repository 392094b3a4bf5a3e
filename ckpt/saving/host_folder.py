"""Save into a tier on the hosts: each host's folder gets what its own ranks write, and copies of what other hosts' ranks have written.

The manifest is the same on every host. A checkpoint counts only where all its files are found on the hosts together, so a host that
goes between two renames leaves the one before, which is removed once all have renamed theirs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ckpt.backends.base import Previous
from ckpt.catalog.incremental import previous_of
from ckpt.catalog.verify import examine, uncommitted
from ckpt.errors import StorageError
from ckpt.format.consistency import MAX_FILE_BYTES
from ckpt.format.digests import digest_of
from ckpt.format.manifest import CONFIG_NAME, MAX_COMMIT_NUMBER, index_name
from ckpt.format.manifest_parsing import parse_index, parse_manifest
from ckpt.ranks.topology import Topology
from ckpt.saving.checkpoint_root import SaveTarget, StaleStateCheck, saved_then
from ckpt.saving.manifest_writer import ManifestWriter, write_beside
from ckpt.saving.prepared_save import Destination, PreparedSave, SaveReport, Written
from ckpt.saving.tiers import HostTier
from ckpt.saving.writing import WriteResult
from ckpt.storage.checkpoint_files import CheckpointFolder, is_same_file
from ckpt.storage.stored import read_manifest_bytes

_log = logging.getLogger("ckpt")


@dataclass(frozen=True)
class Kept:
    """A committed save in the folders of the hosts, from which it can be copied to the next tiers.

    Attributes:
        folder: of this host.
        files: path -> bytes, of those that this rank has written.
        mine: the result of this rank.
        save: without its destination's state: for its plan.
        target: as it was saved.
        saved_at: time of the save, ISO 8601, equal on all ranks.
    """

    folder: Path
    files: Mapping[str, int]
    mine: WriteResult
    save: PreparedSave[Any]
    target: SaveTarget
    saved_at: str


class HostFolder(Destination):
    """The folders of one save on all hosts. See `Destination`.

    Args:
        run_id: of this run, in manifests.
        min_live: see `KnownRoots`.
        pinned: returns the checkpoints that are still being copied to other tiers, and so stay.
        committed: called with the save by every rank once all have committed it.
        saved_at: when it was saved in an earlier tier, ISO 8601; None: it is saved now.
    """

    def __init__(
        self,
        target: SaveTarget,
        tier: HostTier,
        run_id: str,
        *,
        stale_check: StaleStateCheck,
        min_live: float | None,
        pinned: Callable[[], set[Path]],
        committed: Callable[[Kept], None],
        saved_at: str | None = None,
    ) -> None:
        self.what = target.what
        self._target = target
        self._tier = tier
        self._run_id = run_id
        self._stale_check = stale_check
        self._saved_at = saved_at
        self._min_live = min_live
        self._pinned = pinned
        self._committed = committed
        self._ledger = tier.ledger(run_id)
        self._names: list[str] = []
        self._previous: str | None = None
        self._has_previous: Set[int] = frozenset()  # the hosts whose newest save is the same
        self._notes: dict[str, Any] = {}

    def claim(self, topology: Topology) -> None:
        """See `CheckpointRoot.claim`. Lead rank only."""
        self._notes = self._target.storable_notes()

    def open(self, topology: Topology) -> None:
        """Make the unpublished folder of every host, on its first rank, and see that its keeper is there."""
        tier = self._tier
        with topology.phase("open") as phase:
            if tier.is_head:
                where = tier.prepare()
                self._ledger.claim(tier.lock, topology.progress)
                newest = self._ledger.newest() if self._min_live is not None else None
                before = newest and [newest.path.name, digest_of(read_manifest_bytes(newest.path))]
                phase.payload = [self._ledger.open(self._target.checkpoint_id).name, where, before]
        of_heads = [phase.payloads[rank] for rank in tier.heads]
        self._names = [name for name, _, _ in of_heads]
        tier.know([where for _, where, _ in of_heads])
        before = of_heads[tier.host][2]
        self._previous = before and before[0]
        self._has_previous = {host for host, (_, _, its) in enumerate(of_heads) if its == before}
        self.folder: Path = tier.root / self._names[tier.host]

    def publish(self, save: PreparedSave[Any], written: Written, topology: Topology) -> None:
        """Copy to the other hosts, then commit on every host."""
        started = time.perf_counter()
        in_parts = self._tier.num_hosts > 1
        files = files_of(self.folder, written.mine, topology.rank)
        if self._tier.partners:
            self._copy(files, topology)
        with topology.phase("commit") as phase:
            self._require_there(files)
            if topology.is_lead:
                data: list[bytes] = []
                commit = saved_then(self._ledger.next_commit(), self._saved_at)
                writer = ManifestWriter(
                    save,
                    written.results,
                    topology,
                    config_text=self._target.config_text,
                    commit=commit,
                    run_id=self._run_id,
                    in_parts=in_parts,
                    **self._notes,
                )
                added = writer.write(self._target.checkpoint_id, data.append)
                num_bytes = added + sum(result.total_bytes for result in written.results)
                alarms = self._stale_check.alarms(self._target.checkpoint_id, written.results)
                phase.from_lead = [num_bytes, data[0].decode(), commit.timestamp.isoformat(), alarms, self._run_id]
        num_bytes, manifest, saved_at, alarms, run_id = phase.from_lead
        if self._target.validate:
            with topology.phase("validate"):
                place, record = uncommitted(self.folder, parse_manifest(manifest.encode(), self.what))
                found = examine(place, writers=[topology.rank], manifest=record, progress=topology.progress)
                if found.problems:
                    raise StorageError(f"what was written is not what is read back: {found.problems[0]}")
        with topology.phase("publish"):
            if self._tier.is_head:
                if not topology.is_lead and self._target.config_text is not None:
                    write_beside(self.folder, CONFIG_NAME, self._target.config_text.encode())
                self._ledger.record(self.folder, manifest.encode())
                topology.require_awaited()
                self._ledger.publish(self.folder, self._target.checkpoint_id, replace_others=self._tier.tier.removes)
        path = self._tier.root / self._target.path.name
        kept = Kept(path, files, written.mine, replace(save, destination=self), self._target, saved_at)
        self._committed(kept)
        with topology.phase("retention"):
            if self._tier.is_head:
                # Memory is the run's own, with what its earlier lives have left; disks may hold what people keep.
                is_own = self._tier.tier.removes
                history = {**self._target.history, run_id: MAX_COMMIT_NUMBER}  # the lead's name for this run is in all manifests
                self._ledger.retain(keep=path, history=history, remove_others=is_own, spare=self._pinned())
        for alarm in alarms if topology.is_lead else ():
            _log.warning("%s", alarm)
        seconds = written.write_s + time.perf_counter() - started
        self.report = SaveReport(
            str(path),
            self._target.checkpoint_id,
            num_bytes,
            seconds,
            seconds,
            num_bytes - written.linked_bytes,
            tuple(alarms),
            slowest_rank=written.slowest_rank,
        )

    def _require_there(self, files: Mapping[str, int]) -> None:
        """Require what this rank has written: if somebody has removed the folder, copies of other hosts' files have made it again."""
        with CheckpointFolder(self.folder) as folder:
            there = folder.sizes_below()
        if gone := [path for path, size in files.items() if there.get(path) != size]:
            raise StorageError(f"{self.folder / gone[0]} was removed or changed while the save went on")

    def _copy(self, files: Mapping[str, int], topology: Topology) -> None:
        """Send what this rank has written to the hosts that get copies. One that takes none in time costs the copy, not the save."""
        tier, throttle = self._tier, self._tier.throttle
        moved = topology.progress if throttle is None else throttle.wrap(topology.progress)
        ends_at = time.monotonic() + topology.timeout_s

        def progress(num_bytes: int) -> None:
            if time.monotonic() > ends_at:
                raise TimeoutError(f"it was too slow for {topology.timeout_s:g} s")
            moved(num_bytes)

        with topology.phase("copy"):
            failures = {}
            for host in tier.partners:
                try:
                    for path in files:
                        self._copy_file(path, host, progress)
                except OSError as error:
                    failures[host] = str(error)
        for host, why in failures.items():
            _log.warning("%s has no copy of rank %d's files on host %d: %s", self.what, topology.rank, host, why)

    def _copy_file(self, path: str, host: int, progress: Callable[[int], None]) -> None:
        """Give another host a file: one that this save has linked is linked there, too, from the copy of the save before."""
        peer, to = self._tier.peers[host], f"{self._names[host]}/{path}"
        before = self._previous if host in self._has_previous else None
        if before is not None and is_same_file(self._tier.root / before / path, self.folder / path):
            try:
                peer.link(f"{before}/{path}", to)
            except OSError as error:
                _log.debug("%s is copied again: %s", path, error)  # that host has no copy of the save before
            else:
                progress(1)
                return
        peer.copy(self.folder, path, to, progress)

    def previous(self, rank: int) -> Previous | None:
        if self._previous is None or self._min_live is None:
            return None
        return previous_of(self._tier.root / self._previous, rank, self._min_live)

    def require_room(self, num_bytes: int, topology: Topology) -> None:
        """Require room on every host for the saves that this tier keeps, and for the copies; the lead says how much that is.

        Raises:
            ConfigurationError: a host has less; on every rank.
        """
        with topology.phase("room") as phase:
            phase.to_lead = [num_bytes, self._tier.room() if self._tier.is_head else 0]
            phase.answer = lambda: self._tier.require_room(phase.gathered, topology)
        if topology.is_lead:
            _log.info("the tier %s takes up to %.0f MiB of each host", self._tier.tier.kind, phase.from_lead / 2**20)

    def discard(self, error: BaseException | None = None) -> None:
        if self._tier.is_head:
            self._ledger.discard_all()


def files_of(folder: Path, mine: WriteResult, rank: int) -> dict[str, int]:
    """Path -> bytes of every file that a rank has written into a folder."""
    found = {path: size for path, (size, _) in mine.plain_files.items()}
    if mine.index is not None:
        with CheckpointFolder(folder) as files:
            index = parse_index(files.read(index_name(rank), MAX_FILE_BYTES), index_name(rank))
        found |= {path: record.size for path, record in index.files.items()}
        found[index_name(rank)] = mine.index[0]
    return found
