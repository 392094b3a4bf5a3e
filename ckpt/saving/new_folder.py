"""Save into folders that do not exist yet: ranks write beside the place of one, and a rename puts it there.

Once, for `ckpt.save` and DCP (`save_into_new_folder`); or save after save, in the foreground or beside training, for frameworks that name
and retire checkpoints (`FolderSaves`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ckpt.backends.base import Backend
from ckpt.catalog.catalog import catalog_at
from ckpt.catalog.ledger import is_removable, is_there
from ckpt.catalog.verify import examine, uncommitted
from ckpt.errors import ConfigurationError, StorageError
from ckpt.format.manifest import CheckpointManifest
from ckpt.format.manifest_parsing import parse_manifest
from ckpt.format.places import Place
from ckpt.ranks.merging import Alike, alike
from ckpt.ranks.topology import Topology
from ckpt.saving.background.background import Background
from ckpt.saving.manifest_writer import ManifestWriter
from ckpt.saving.prepared_save import Destination, PreparedSave, SaveReport, Written, require_reachable
from ckpt.saving.save_settings import OF_A_ROOT, SaveSettings, as_saves, setting
from ckpt.saving.saver import Planner, SavedRun
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
                text = writer.manifest.to_bytes().decode() if is_unread and writer.manifest is not None else None
                phase.from_lead = [added + sum(result.total_bytes for result in written.results), text]
        num_bytes, text = phase.from_lead
        if self._validate:
            with topology.phase("validate"):
                place, parsed = uncommitted(self.folder, text and parse_manifest(text.encode(), self.what))
                found = examine(place, writers=[topology.rank], manifest=parsed, progress=topology.progress)
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


_log = logging.getLogger("ckpt")


def as_folder_settings(mode: str | SaveSettings) -> SaveSettings:
    """Return settings for `FolderSaves`: those given, or the defaults of a mode, "sync" or "async".

    Raises:
        ConfigurationError: a setting has no effect there, or could cost checkpoints.
    """
    settings = as_saves(mode, "mode")
    for name in ("overlap", "incremental", *OF_A_ROOT):
        if (value := getattr(settings, name)) != getattr(SaveSettings(), name):
            raise ConfigurationError(setting(name, value), " has no effect where a framework gives the state: leave it out")
    if settings.when_busy == "skip":
        raise ConfigurationError(
            setting("when_busy", "skip"),
            ": the framework would count a skipped checkpoint as saved, and remove older ones; give wait or queue",
        )
    return settings


class FolderSaves:
    """Saves of one program, one after another. Each replaces the checkpoint that is at its path.

    Every rank makes one, and calls its methods in the same order, in one thread. A path belongs to one `FolderSaves` at a time.

    Args:
        settings: as `as_folder_settings` returns them.
    """

    def __init__(self, topology: Topology, backend: Backend, settings: SaveSettings) -> None:
        self._topology = topology
        self._backend = backend
        self._settings = settings
        self._background: Background | None = None
        self._num_begun = 0
        self._begun: list[Place] = []
        self._doomed: dict[Place, int] = {}  # path -> number of saves that had begun when it was to be removed

    @property
    def unfinished(self) -> list[Place]:
        """Paths of the saves in the background that no call has taken note of, the oldest first. Equal on all ranks."""
        num = self._background.num_pending if self._background is not None else 0
        return self._begun[len(self._begun) - num :]

    def save(self, path: Place, collected: Callable[[], RankState]) -> None:
        """Save, or begin to: in the background the state may change as soon as this returns. Collective.

        Args:
            collected: as of `save_into_new_folder`.

        Raises:
            CheckpointError: the same on every rank; what was at `path` is still there. It may be the error of an earlier save in the
                background, whose path it begins with; nothing is saved then.
        """
        started = time.perf_counter()
        self.finalize(blocking=self._settings.when_busy == "wait")
        self._doomed.pop(path.absolute(), None)
        delete = self._background.delete if self._background is not None else None
        place = NewFolder(path, replaces=True, delete=delete)
        with place.discarding(), self._topology.operation(place.what):
            prepared = prepare(place, self._topology, self._backend, collected)
            if not self._settings.is_async:
                prepared.run(self._topology, prepared.live_tensors(), RankWritePlan.write, started=started)
                return
            if self._background is None:
                with self._topology.phase("background"):
                    run = SavedRun((), self._topology, self._backend, prepared.device)
                    self._background = Background(run, self._settings)
        self._num_begun += 1
        self._begun = [*self.unfinished, path.absolute()]
        self._background.begin(prepared, started, None)

    def remove(self, path: Place) -> None:
        """Remove a checkpoint once all saves that have begun are committed; if one of them fails, it stays. All ranks call it.

        What is no checkpoint stays, with a warning.
        """
        self._doomed[path.absolute()] = self._num_begun
        if self._background is None or not self._background.num_pending:
            self._remove_doomed()

    def finalize(self, *, blocking: bool) -> None:
        """Take note of the saves that have ended, and remove what waited for them. Collective.

        Args:
            blocking: wait for all of them.

        Raises:
            CheckpointError: a save has failed in the background, unless `on_async_error` is "warn".
        """
        if self._background is None or not self._background.num_pending:
            return
        before, committed = self._background.num_pending, 0
        try:
            committed = len(self._background.finalize(blocking=blocking))
        finally:
            if committed < before - self._background.num_pending and self._doomed:
                _log.warning("not removed, because a save has failed: %s", ", ".join(map(str, self._doomed)))
                self._doomed.clear()
        self._remove_doomed()

    def close(self) -> None:
        """Wait for all saves, and release threads, processes and memory. Collective if a save is unfinished.

        Raises:
            CheckpointError: as `finalize` does.
        """
        try:
            self.finalize(blocking=True)
        finally:
            self.release()

    def release(self) -> None:
        """Release threads, processes and memory once this rank's saves have ended; errors of theirs are logged. Not collective."""
        background, self._background = self._background, None
        if background is not None:
            for failure in background.close():
                _log.error("a save has failed in the background: %s", failure)

    def _remove_doomed(self) -> None:
        """Remove the checkpoints that no unfinished save is to precede."""
        num_ended = self._num_begun - (self._background.num_pending if self._background is not None else 0)
        delete = self._background.delete if self._background is not None else None
        for path in [path for path, number in self._doomed.items() if number <= num_ended]:
            del self._doomed[path]
            if not self._topology.is_lead or not is_there(path):
                continue
            if is_removable(path):
                catalog_at(path.parent, run_id=str(path), delete=delete).remove(path)
            else:
                _log.warning("%s is not removed: it is no checkpoint of this package, or was saved under another name", path)
