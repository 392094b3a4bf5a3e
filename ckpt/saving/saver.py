"""Prepare the saves of one run, while training waits: collect the state, compare it, plan. All ranks agree on each step.

`PreparedSave.run` does the rest, from the folder to the commit: in the same thread, or in a background thread with a topology of its own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from ckpt.backends.base import Backend
from ckpt.memory.device import Device
from ckpt.ranks.topology import Topology
from ckpt.saving.checkpoint_root import CheckpointRoot, KnownRoots, SaveTarget
from ckpt.saving.planner import Planner
from ckpt.saving.prepared_save import PreparedSave, SaveReport
from ckpt.saving.stale_state_check import StaleStateCheck
from ckpt.saving.writing import RankWritePlan
from ckpt.state.auto_sharing import AutoSharing
from ckpt.state.collect import Compared, RankState, collect
from ckpt.state.doctor import Diagnosis
from ckpt.state.pattern_check import act_on, examine
from ckpt.state.sharing import SharingPattern, StateComponent

_log = logging.getLogger("ckpt")


@dataclass(frozen=True, slots=True)
class SavedRun:
    """The constants of a run's saves: components, ranks, backend, device."""

    components: Sequence[StateComponent]
    topology: Topology
    backend: Backend
    device: Device


class Saver:
    """Saves the components of a run; reuses what did not change since the last save. Made by `CheckpointCoordinator`.

    Args:
        pattern_check: see `SaveSettings`.
    """

    def __init__(self, run: SavedRun, roots: KnownRoots, *, pattern_check: str = "warn") -> None:
        self._run = run
        self._topology = run.topology
        self._roots = roots
        self._pattern_check = pattern_check
        self._was_examined = False
        self._planner = Planner.for_place(roots.home, run.topology, run.backend, run.device)
        self._fits: RankWritePlan | None = None
        self._stale_check = StaleStateCheck(run.components)
        self._sharing = AutoSharing(run.components, run.topology)

    def save(self, target: SaveTarget) -> SaveReport:
        """Save once, while training waits. See `CheckpointCoordinator.save_checkpoint`."""
        started = time.perf_counter()
        with self._topology.operation(target.what):
            prepared = self.prepare(target)
            prepared.run(self._topology, prepared.live_tensors(), RankWritePlan.write, started=started)
        assert prepared.destination.report is not None, "it is published"
        return prepared.destination.report

    def prepare(self, target: SaveTarget) -> PreparedSave[CheckpointRoot]:
        """Collect the state, exchange digests, and plan. Writes nothing. Collective."""
        root = CheckpointRoot(target, self._roots, self._stale_check)
        with root.unclaimed_if_refused():
            look = self._is_to_look(target.validate)
            claim = partial(root.claim, self._topology)
            mine, compared = self._collect(validate=target.validate, look=look, claim=claim)
            check = partial(self._check_patterns, mine) if look else lambda: None
            prepared = self._planner.prepare(root, mine, compared, check)
            self._require_room(prepared.share)
            return prepared

    def patterns(self) -> dict[str, SharingPattern]:
        """Return the pattern that each component was saved under last; those declared "auto" count as replicated before."""
        return {component.key: component.pattern for component in self._sharing.settled}

    def _require_room(self, share: RankWritePlan) -> None:
        """Require memory for the saves that are kept, once for each plan."""
        host_cache = self._roots.host_cache
        if host_cache is not None and share is not self._fits:
            with self._topology.phase("room in memory"):
                host_cache.require_room(share.num_bytes, self._topology)
            self._fits = share

    def diagnose(self) -> list[Diagnosis]:
        """See `CheckpointCoordinator.diagnose`."""
        with self._topology.operation("diagnosis of the sharing patterns"):
            mine, _ = self._collect(validate=False, look=True)
            return self._examined(mine)

    def _is_to_look(self, validate: bool) -> bool:
        """Whether to examine the sharing patterns: before the first save, and when a save is validated."""
        if self._pattern_check == "off" or self._topology.world_size == 1:
            return False
        return validate or not self._was_examined

    def _check_patterns(self, mine: RankState) -> None:
        diagnoses = self._examined(mine)
        tell = self._topology.is_lead and not self._was_examined
        act_on(diagnoses, mine.components, self._pattern_check, tell=tell)
        self._was_examined = True

    def _examined(self, mine: RankState) -> list[Diagnosis]:
        return examine({key: mine.components[key] for key in mine.seen}, mine.seen, self._topology)

    def _collect(
        self, *, validate: bool, look: bool, claim: Callable[[], object] = lambda: None
    ) -> tuple[RankState, Compared]:
        """Collect the state, and compare it with the other ranks'; if an optional component fails on any rank, collect again without it.

        Args:
            claim: called by the lead, before it collects; see `CheckpointRoot.claim`.
        """
        without: set[str] = set()
        components = self._sharing.settle()
        known = self._sharing.examined
        comparison = self._planner.comparison
        while True:
            with self._topology.phase("collect") as phase:
                if self._topology.is_lead:
                    claim()
                mine = collect(
                    components, self._topology, without=without, compare_all=validate, look=look, known=known
                )
                comparison.say(mine, phase)
            compared = comparison.heard(phase)
            if not compared.failed:
                return mine, compared
            for key, reason in compared.failed.items():
                if self._topology.is_lead:
                    _log.warning("optional component %s is not saved: %s", key, reason)
                without.add(key)
