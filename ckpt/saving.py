"""The steps of a save, in order. Every step ends in an agreement: it succeeded on all ranks, or all raise one error."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import xxhash

from ckpt.backends.base import ArraySpec, Backend
from ckpt.collect import Contribution, collect, exchange_tables, settle_plain
from ckpt.device import Device
from ckpt.doctor import Diagnosis
from ckpt.dtypes import item_bytes
from ckpt.errors import CorruptCheckpointError, StorageError
from ckpt.ledger import Ledger
from ckpt.manifest import (
    CONFIG_NAME,
    MANIFEST_NAME,
    PLAIN_NAME,
    ArrayEntry,
    CheckpointManifest,
    ComponentManifest,
    digest_of,
    index_name,
)
from ckpt.pattern_check import act_on, check_choice, examine
from ckpt.plan import RankPlan, SavePlan, plan_save
from ckpt.sharing import EQUAL_COPIES, StateComponent, holders_of
from ckpt.topology import Topology
from ckpt.verify import verify_checkpoint
from ckpt.version import __version__
from ckpt.writing import Share, Vote, path_of, write_durably

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
    ) -> None:
        self._components = components
        self._topology = topology
        self._backend = backend
        self._device = device
        self._config_text = config_text
        self._stale_s = stale_s
        self._run_id = run_id
        self._pattern_check = check_choice(pattern_check)
        self._was_examined = False
        self._plan_key: tuple[str, ...] = ()
        self._plan: SavePlan | None = None
        self._my_plan = RankPlan()
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
                plain = settle_plain(mine, summaries, self._topology)
                if look:
                    self._check_patterns(mine)
                self._make_plan(mine, [summary["table"] for summary in summaries])
                folder = self._open(ledger, root, checkpoint_id)
                assert self._plan is not None
                share = Share(self._plan, self._my_plan, mine, self._topology, self._device)
                slivers = share.exchange_slivers()
                with self._topology.phase("write") as phase:
                    vote = share.write(folder, self._backend, plain, slivers)
                    mine.require_unchanged()
                    phase.payload = [vote.to_json(), time.perf_counter() - started]
                votes = [Vote(**tree) for tree, _ in phase.payloads]
                waited_s = max(seconds for _, seconds in phase.payloads)
                path, commit_s = self._commit(ledger, folder, checkpoint_id, mine, votes, validate, refused)
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

    def _make_plan(self, mine: Contribution, table_digests: Sequence[str]) -> None:
        """Step 3: exchange tables if any changed since the last save, and plan; the same answer on every rank."""
        key = tuple(table_digests)
        if key == self._plan_key and self._plan is not None:
            return
        tables, table_of_rank = exchange_tables(mine.table, table_digests, self._topology)
        with self._topology.phase("plan"):
            plan = plan_save(tables, table_of_rank, item_bytes)
            self._my_plan = plan.of_rank(self._topology.rank)
        self._plan, self._plan_key = plan, key

    def _open(self, ledger: Ledger, root: Path, checkpoint_id: str) -> Path:
        """The lead makes the unpublished folder; before the first save every rank shows that it sees it."""
        with self._topology.phase("open") as phase:
            if self._topology.is_lead:
                phase.payload = ledger.open(checkpoint_id).name
        folder = root / str(phase.payloads[0])
        if not self._root_is_shared:
            with self._topology.phase("reach"):
                _require_reachable(folder, self._topology)
            self._root_is_shared = True
        return folder

    def _commit(
        self,
        ledger: Ledger,
        folder: Path,
        checkpoint_id: str,
        mine: Contribution,
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
                _await_indexes(folder, votes, self._topology)
                manifest = self._manifest(folder, checkpoint_id, mine, votes)
                votes[0].total_bytes += self._write_lead_files(folder, mine, manifest, votes)
                data = manifest.to_bytes()
                write_durably(folder / MANIFEST_NAME, data)
                votes[0].total_bytes += len(data)
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

    def _manifest(
        self, folder: Path, checkpoint_id: str, mine: Contribution, votes: Sequence[Vote]
    ) -> CheckpointManifest:
        assert self._plan is not None
        arrays = {
            name: ArrayEntry(
                array.dtype, array.shape, self._backend.store, path_of(name, mine.components), array.grid, array.runs()
            )
            if array.grid is not None
            else ArrayEntry(
                array.dtype, array.shape, self._backend.store, packed_in=tuple(sorted(set(array.packs.values())))
            )
            for name, array in self._plan.arrays.items()
        }
        for alias, first in self._plan.aliases.items():
            if first in arrays:
                arrays[alias] = ArrayEntry(arrays[first].dtype, arrays[first].shape, alias_of=first)
        topology = self._topology
        config = (self._config_text or "").encode()
        return CheckpointManifest(
            checkpoint_id=checkpoint_id,
            timestamp=datetime.now(UTC),
            world_size=topology.world_size,
            topology={
                "nodes": [list(ranks) for ranks in topology.nodes],
                "groups": {name: [list(ranks) for ranks in group.instances] for name, group in topology.groups.items()},
            },
            components={key: self._component(component, votes) for key, component in mine.components.items()},
            arrays=arrays,
            files={},
            training_args_hash=digest_of(config) if self._config_text is not None else None,
            ckpt_version=__version__,
            pytorch_version=torch.__version__,
        )

    def _component(self, component: StateComponent, votes: Sequence[Vote]) -> ComponentManifest:
        holders = holders_of(component, self._topology)
        checksum = xxhash.xxh3_128()
        for vote in votes:
            checksum.update(vote.checksums.get(component.key, "").encode())
        start = component.key + "/"
        return ComponentManifest(
            key=component.key,
            sharing_pattern=component.pattern.value,
            ranks=[rank for rank, vote in enumerate(votes) if component.key in vote.sizes],
            replicated_across=sorted(r for ranks in holders for r in ranks)
            if component.pattern in EQUAL_COPIES
            else None,
            group_name=component.process_group_name,
            size_bytes=sum(vote.sizes.get(component.key, 0) for vote in votes),
            checksum=checksum.hexdigest(),
            plain_in={
                path.removeprefix(start).removesuffix(PLAIN_NAME): rank
                for rank, vote in enumerate(votes)
                for path in vote.plain_files
                if path.startswith(start)
            },
        )

    def _write_lead_files(
        self, folder: Path, mine: Contribution, manifest: CheckpointManifest, votes: Sequence[Vote]
    ) -> int:
        """Write array metadata and config, list every file of the lead's and every index; return the bytes added."""
        assert self._plan is not None
        specs = [
            ArraySpec(path_of(name, mine.components), array.dtype, array.shape, array.grid)
            for name, array in self._plan.arrays.items()
            if array.grid is not None
        ]
        specs += [ArraySpec(path, dtype, (n,), (n,)) for vote in votes for path, (dtype, n) in vote.packed.items()]
        writers = [rank for rank, vote in enumerate(votes) if vote.wrote_chunks]
        made = self._backend.lay_out(folder, specs, writers)
        if self._config_text is not None:
            write_durably(folder / CONFIG_NAME, self._config_text.encode())
            made = [*made, CONFIG_NAME]
        added = 0
        for path in made:
            data = (folder / path).read_bytes()
            manifest.files[path] = (len(data), digest_of(data))
            added += len(data)
            self._topology.progress()
        for path, (size, digest) in votes[0].plain_files.items():
            manifest.files[path] = (size, digest)
            added += size
        for rank, vote in enumerate(votes):
            if vote.index is not None:
                manifest.files[index_name(rank)] = (vote.index[0], vote.index[1])
        return added


def _is_committed(path: Path) -> str:
    """What an error says that comes too late to undo the save."""
    return f"{path.name} is committed"


def _require_reachable(folder: Path, topology: Topology) -> None:
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


def _await_indexes(folder: Path, votes: Sequence[Vote], topology: Topology) -> None:
    """Wait until the lead sees every index in its full length, on file systems where that takes a while."""
    deadline = time.monotonic() + topology.timeout_s
    for rank, vote in enumerate(votes):
        path = folder / index_name(rank)
        while vote.index is not None and not (path.exists() and path.stat().st_size == vote.index[0]):
            if time.monotonic() > deadline:
                raise StorageError(
                    f"rank {rank} wrote {path.name} with {vote.index[0]} bytes, but rank 0 does not see it so in {folder}"
                )
            time.sleep(0.01)


def _require_sound(folder: Path, progress: Callable[[int], None]) -> None:
    problems = verify_checkpoint(folder, progress=progress)
    if problems:
        raise CorruptCheckpointError(f"what was written does not read back as it should: {problems[0]}")
