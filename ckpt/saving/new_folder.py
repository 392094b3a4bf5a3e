"""Save into a folder that does not exist yet: ranks write beside its place, and a rename puts it there. For `ckpt.save` and DCP."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ckpt.backends.base import Backend
from ckpt.catalog.catalog import catalog_at
from ckpt.catalog.verify import examine, uncommitted
from ckpt.errors import ConfigurationError, StorageError
from ckpt.format.manifest import CheckpointManifest
from ckpt.format.manifest_parsing import parse_manifest
from ckpt.format.places import Place
from ckpt.ranks.merging import Alike, alike
from ckpt.ranks.topology import Topology
from ckpt.saving.manifest_writer import ManifestWriter
from ckpt.saving.planner import Planner
from ckpt.saving.prepared_save import Destination, PreparedSave, SaveReport, Written, require_reachable
from ckpt.saving.writing import RankWritePlan
from ckpt.state.collect import RankState
from ckpt.storage.objects.store import CountedRequests, Counts, all_of


def save_into_new_folder(
    path: Place, topology: Topology, backend: Backend, collected: Callable[[], RankState]
) -> SaveReport:
    """Save this rank's state, and that of the others, as a checkpoint at `path`. Collective.

    Args:
        collected: returns the state; may communicate.

    Raises:
        CheckpointExistsError: something is at `path` already, other than an empty folder.
        CheckpointError: anything else, the same on every rank; there is nothing at `path` then.
    """
    started = time.perf_counter()
    with topology.operation(f"save into {path}"):
        place = NewFolder(path)
    with place.discarding(), topology.operation(place.what):
        save = prepare(place, topology, backend, collected)
        save.run(topology, save.live_tensors(), RankWritePlan.write, started=started)
    assert place.report is not None, "it is published"
    return place.report


def prepare(
    place: NewFolder, topology: Topology, backend: Backend, collected: Callable[[], RankState]
) -> PreparedSave[NewFolder]:
    """Collect the state of all ranks, and agree on who writes what. Writes nothing. Collective, in an operation of the caller.

    Args:
        collected: as of `save_into_new_folder`.
    """
    place.claim(topology)
    mine = collected()
    planner = Planner.for_place(place.path, topology, backend, mine.device)
    return planner.collect_and_prepare(place, mine)


class NewFolder(Destination):
    """The folder of one save, which gets its name when it is complete. See `Destination`.

    A save that was killed leaves a hidden folder beside `path`; the next save there removes it, as in a checkpoint root.

    Args:
        replaces: what is at `path` is replaced: see `Ledger.publish_at`. Otherwise it is refused.
        delete: deletes what was replaced, now or later; it has been renamed already.
        validate: every rank reads back what it wrote, before the folder gets its name.
        like, config_text: of the checkpoint that is copied: see `ManifestWriter`.

    Attributes:
        path: where the checkpoint will be.
    """

    def __init__(
        self,
        path: Place,
        *,
        replaces: bool = False,
        delete: Callable[[Path], None] | None = None,
        validate: bool = False,
        like: CheckpointManifest | None = None,
        config_text: str | None = None,
    ) -> None:
        self.what = f"save into {path}"
        self.path = path
        self._replaces = replaces
        self._validate = validate
        self._like = like
        self._config_text = config_text
        self._ledger = catalog_at(path.parent, run_id=str(path), delete=delete)
        self._asked: list[Counts] = []  # by the lead for all ranks

    def claim(self, topology: Topology) -> None:
        """Refuse a path where something is that is not to be replaced, before anything is collected. Collective."""
        with topology.phase("claim") as phase:
            phase.merge = {"path": alike(str(self.path))}
            phase.answer = lambda: _require_one_path(phase.merged["path"])
            if topology.is_lead and not self._replaces:
                self._ledger.require_free(self.path)

    def open(self, topology: Topology) -> None:
        root = self.path.parent
        with topology.phase("open") as phase:
            if topology.is_lead:
                asked = CountedRequests(root)
                phase.from_lead = self._ledger.open_at(self.path).relative_to(root).as_posix()
                self._asked.append(asked.made())
        self.folder = root / phase.from_lead
        with topology.phase("reach"):
            require_reachable(root, partial(self._ledger.is_seen, self.folder), topology)

    def publish(self, save: PreparedSave[Any], written: Written, topology: Topology) -> None:
        started = time.perf_counter()
        asked = CountedRequests(self.path)
        with topology.phase("commit") as phase:
            if topology.is_lead:
                writer = ManifestWriter(save, written.results, topology, self._config_text, like=self._like)
                added = writer.write(self.path.name, partial(self._ledger.record, self.folder))
                is_unread = self._validate and not isinstance(self.folder, Path)
                said = writer.manifest.to_bytes().decode() if is_unread and writer.manifest is not None else None
                phase.from_lead = [added + sum(result.total_bytes for result in written.results), said]
        num_bytes, said = phase.from_lead
        if self._validate:
            with topology.phase("validate"):
                place, told = uncommitted(self.folder, said and parse_manifest(said.encode(), self.what))
                found = examine(place, writers=[topology.rank], manifest=told, progress=topology.progress)
                if found.problems:
                    raise StorageError(
                        f"what was written for {self.path} is not what is read back: {found.problems[0]}"
                    )
        with topology.phase("publish") as phase:

            def committed(path: Place) -> None:
                phase.stands = f"{path} is committed"

            if topology.is_lead:
                topology.require_awaited()
                self._ledger.publish_at(self.folder, self.path, replaces=self._replaces, committed=committed)
                phase.from_lead = all_of([*self._asked, asked.made()])
        seconds = written.write_s + time.perf_counter() - started
        self.report = SaveReport(
            str(self.path),
            self.path.name,
            num_bytes,
            seconds,
            seconds,
            num_bytes,
            slowest_rank=written.slowest_rank,
            requests=all_of([phase.from_lead, written.requests]),
        )

    def discard(self, error: BaseException | None = None) -> None:
        self._ledger.discard_all()


def _require_one_path(path: Alike) -> None:
    if path.odd_rank is not None:
        raise ConfigurationError(
            f"path is {path.odd_value} on rank {path.odd_rank} and {path.value} on rank 0; all ranks save one checkpoint together. For "
            "one of each rank, give topology=Topology.alone()"
        )
