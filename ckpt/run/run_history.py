"""The checkpoints in a run's output_dir: which are the run's own, which are newer than the one it loaded, and which are damaged."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any

from ckpt.catalog.committed import Catalog, Committed, runs_of
from ckpt.catalog.incremental import linked_with
from ckpt.catalog.retention import Retention
from ckpt.errors import (
    CheckpointExistsError,
    CheckpointGoneError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    MissingStateError,
)
from ckpt.format.manifest import MAX_COMMIT_NUMBER
from ckpt.format.places import Place, place_of
from ckpt.loading.report import LoadReport, Status, some_of
from ckpt.ranks.topology import Topology
from ckpt.saving.checkpoint_root import KnownRoots, SaveTarget
from ckpt.saving.prepared_save import SaveReport
from ckpt.storage.keeper.hosts import SCHEME

_MOST_GONE = 100
"""Checkpoints that may be removed under one load; where more are, the load is too slow for the run that saves them."""

_log = logging.getLogger("ckpt")


class RunHistory:
    """What one run knows of the checkpoints in its output_dir, and may do to them. Every rank has one, all with the same content.

    Args:
        roots: their home is output_dir.
        retention: which checkpoints of the run stay in output_dir.
        overwrite: see `CheckpointCoordinator`.

    Attributes:
        newer: names of checkpoints of the loaded one's own history that are newer than it: no save may come after them.
    """

    def __init__(self, topology: Topology, roots: KnownRoots, *, retention: Retention, overwrite: bool) -> None:
        self.newer: list[str] = []
        self._topology = topology
        self._roots = roots
        self._history: dict[str | None, int] = {}  # of the runs that this one goes on from: see `SaveTarget.history`
        self._retention = retention
        self._overwrite = overwrite
        self._loaded_name = ""
        self._damaged: dict[Place, str] = {}
        self._condemned: dict[Place, str] = {}

    def require_no_newer(self, root: Place) -> None:
        """Refuse a save into output_dir as long as `newer` lists any.

        Raises:
            CheckpointExistsError: it does.
        """
        if self.newer and self._roots.is_home(root):
            raise CheckpointExistsError(
                f"{self._loaded_name} was loaded, and {self._roots.home} holds newer checkpoints: {some_of(self.newer)}. What is saved "
                "now would lie among them, as one history. Set them aside with overwrite=True, or save to another output_dir"
            )

    def target(self, root: Place, checkpoint_id: str, *, validate: bool, **notes: Any) -> SaveTarget:
        """Describe a save. Only in output_dir it removes or moves checkpoints of other names.

        Args:
            notes: what the checkpoint holds beside state: `config_text`, `metrics` and `metadata` of `SaveTarget`.
        """
        is_home = self._roots.is_home(root)
        return SaveTarget(
            root,
            checkpoint_id,
            validate=validate,
            refused=dict(self._damaged),
            retention=self._retention if is_home else Retention(),
            condemned=dict(self._condemned) if is_home else {},
            history=dict(self._history) if is_home else {},
            remove_others=self._overwrite and is_home,
            **notes,
        )

    def add(self, report: SaveReport) -> None:
        """Note a save that was committed, and with it what was to be removed."""
        path = place_of(report.path)
        self._damaged.pop(path, None)
        if self._roots.is_home(path.parent):
            self._overwrite = False
            self._condemned.clear()

    def leave_newer(self, loaded: LoadReport) -> None:
        """After a load by path: set newer checkpoints of output_dir aside if they may be overwritten. Collective.

        Otherwise those of the loaded one's history are listed in `newer`; those of other runs stay, as they always do. Of a shared root
        only those of the same run matter, if it has ended: other runs may go on from the loaded one, too.

        Raises:
            FolderInUseError: they are to be set aside, and another run saves into output_dir.
        """
        path, home = place_of(loaded.path), self._roots.home
        ledger = self._roots.ledger_of(home)
        with self._topology.operation(f"load of {path.name}"), self._topology.phase("look for newer") as phase:
            if self._topology.is_lead:
                newer = ledger.newer_than(path) if self._roots.is_home(path.parent) else None
                own = self._of_history(newer or (), loaded, ledger)
                doomed = own if self._roots.shared_root else newer
                if doomed and self._overwrite:
                    ledger.claim(self._roots.lock_of(home), self._topology.progress)
                    ledger.abandon(doomed)
                    names = some_of([commit.path.name for commit in doomed])
                    _log.warning("set aside, for this run goes on from %s: %s", path, names)
                    own = []
                phase.from_lead = {"is_here": newer is not None, "newer": [commit.path.name for commit in own]}
        self.newer, self._loaded_name = phase.from_lead["newer"], path.name
        if phase.from_lead["is_here"]:
            self._overwrite = False  # what is left is the history that goes on

    def _of_history(self, newer: Sequence[Committed[Place]], loaded: LoadReport, ledger: Catalog[Any]) -> list[Committed[Place]]:
        """Those of newer checkpoints that go on from the loaded one, or from one before it."""
        if self._roots.shared_root:
            living = ledger.living()
            return [commit for commit in newer if commit.run_id == loaded.run_id and commit.run_id not in living]
        return [commit for commit in newer if not loaded.history.keys().isdisjoint(runs_of(commit))]

    def go_on_from(self, loaded: LoadReport) -> None:
        """Go on with the history of a loaded checkpoint of output_dir: retention counts what is not newer than it as this run's own."""
        path = place_of(loaded.path)
        if loaded.path.startswith(f"{SCHEME}:"):  # of a tier on the hosts
            # It is newer than all of these runs' checkpoints in output_dir, which number their commits otherwise.
            self._history |= dict.fromkeys(loaded.history, MAX_COMMIT_NUMBER)
        elif self._roots.is_home(path.parent) and not self._overwrite:
            self._history |= loaded.history
        if any(component.status is Status.FAILED for component in loaded.components):
            self._roots.distrusted.add(path)

    def load_newest(
        self,
        load: Callable[[Place], LoadReport],
        needed: Collection[str],
        of_hosts: Callable[[float | None], LoadReport | None] = lambda _: None,
    ) -> LoadReport:
        """Load the newest sound checkpoint of output_dir and of the hosts. If one is removed while it is read, search again. Collective.

        Args:
            of_hosts: see `TieredRun.load_newest`. It is asked before each checkpoint of output_dir, and when there is none any more.
            needed: keys of components. A checkpoint that retention has taken one of these out of is passed over.

        Raises:
            CheckpointNotFoundError: there is none.
            CorruptCheckpointError: all are damaged, but for those that are incomplete.
            MissingStateError: all are incomplete.
        """
        passed_over: dict[Place, str] = {}
        (times, incomplete), num_gone = self._find(needed), 0
        while True:
            path = next((found for found in times if found not in passed_over and found not in incomplete), None)
            report = of_hosts(None if path is None else times[path])
            try:
                if report is None:
                    if path is None:
                        break
                    report = load(path)
            except CorruptCheckpointError as error:
                assert path is not None
                self._pass_over(path, error, passed_over)
            except CheckpointNotFoundError as error:
                (times, incomplete), num_gone = self._find(needed), num_gone + 1
                is_gone = isinstance(error, CheckpointGoneError) or path not in times
                if not is_gone or num_gone > _MOST_GONE:
                    raise
            else:
                self._damaged.update((candidate, passed_over[candidate]) for candidate in times if candidate in passed_over)
                newer = [*times] if path is None else [*times][: [*times].index(path)]
                return dataclasses.replace(report, fell_back_from=tuple(map(str, newer)))
        if not times:
            renamed = self._roots.ledger_of(self._roots.home).renamed()
            but = (
                f", but for {renamed[0]}, which has another name than it was saved under: load it by its path"
                if renamed
                else ""
            )
            raise CheckpointNotFoundError(f"there is no committed checkpoint in {self._roots.home}{but}")
        reasons = "; ".join([*passed_over.values(), *incomplete.values()])
        what = "damaged or incomplete" if passed_over and incomplete else "damaged" if passed_over else "incomplete"
        kind = CorruptCheckpointError if passed_over else MissingStateError
        advice = "; load one by its path, and leave out what it lacks" if incomplete else ""
        raise kind(f"every checkpoint in {self._roots.home} is {what}: {reasons}{advice}")

    def _find(self, needed: Collection[str]) -> tuple[dict[Place, float], dict[Place, str]]:
        """The committed checkpoints in output_dir as the lead sees them, the newest first, with their times in seconds; and why some of
        them lack what is needed."""
        home = self._roots.home
        with self._topology.operation(f"search for checkpoints in {home}"), self._topology.phase("find") as phase:
            if self._topology.is_lead:
                found = reversed(self._roots.ledger_of(home).committed())
                phase.from_lead = [
                    [str(commit.path), commit.timestamp.timestamp(), [key for key in commit.removed if key in needed]] for commit in found
                ]
        places = [(place_of(path), time, lost) for path, time, lost in phase.from_lead]
        incomplete = {place: f"{', '.join(lost)} was removed from {place.name} by retention" for place, _, lost in places if lost}
        return {place: time for place, time, _ in places}, incomplete

    def _pass_over(self, path: Place, error: CorruptCheckpointError, passed_over: dict[Place, str]) -> None:
        """Note a damaged checkpoint, and those that share the damaged file."""
        passed_over[path] = str(error)
        if self._topology.is_lead:
            _log.warning("%s is damaged and passed over: %s", path, error)
        sharing = self._sharing_damage(path, error)
        passed_over.update(sharing)
        if sharing:
            self._condemned |= {path: str(error), **sharing}

    def _sharing_damage(self, path: Place, error: CorruptCheckpointError) -> dict[Place, str]:
        """The checkpoints that link the damaged file of this one, and what is wrong with them."""
        if error.file is None:
            return {}
        with self._topology.phase("look for links") as phase:
            if self._topology.is_lead:
                phase.from_lead = [str(other) for other in linked_with(path.parent, path, [error.file])]
        return {
            place_of(other): f"{error.file} is one and the same file as that of {path.name}, which is damaged"
            for other in phase.from_lead
        }
