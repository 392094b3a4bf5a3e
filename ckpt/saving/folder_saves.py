"""Save after save, each into a folder of its own, in the foreground or beside training. For frameworks that name and retire checkpoints."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from ckpt.backends.base import Backend
from ckpt.catalog.catalog import catalog_at
from ckpt.catalog.ledger import is_removable, is_there
from ckpt.errors import ConfigurationError
from ckpt.format.places import Place
from ckpt.ranks.topology import Topology
from ckpt.saving.arguments import as_saves
from ckpt.saving.background.background import Background
from ckpt.saving.new_folder import NewFolder, prepare
from ckpt.saving.save_settings import OF_A_ROOT, SaveSettings, setting
from ckpt.saving.saver import SavedRun
from ckpt.saving.writing import RankWritePlan
from ckpt.state.collect import RankState

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
