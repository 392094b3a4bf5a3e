"""Prepare the saves of one run, while training waits: collect the state, compare it, plan. All ranks agree on each step.

The `Planner` has all ranks agree on plain values and on the plan (planning/plan.py), reused while they hold the same. `PreparedSave.run`
does the rest, from the folder to the commit: in the same thread, or in a background thread with a topology of its own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ckpt.backends.base import Backend
from ckpt.format.dtypes import item_bytes
from ckpt.format.gc_pause import gc_paused
from ckpt.format.places import Place
from ckpt.memory.device import Device
from ckpt.planning.plan import PACK_BELOW_BYTES, SavePlan, plan_save
from ckpt.ranks.topology import Topology
from ckpt.saving.checkpoint_root import CheckpointRoot, KnownRoots, SaveTarget, StaleStateCheck
from ckpt.saving.prepared_save import Destination, PreparedSave, SaveReport, To
from ckpt.saving.writing import RankWritePlan, plain_files
from ckpt.state.collect import Compared, Comparison, RankState, collect, exchange_tables, settle_plain
from ckpt.state.pattern_check import AutoSharing, Diagnosis, act_on, examine
from ckpt.state.sharing import SharingPattern, StateComponent

PACK_BELOW_IN_STORES = 8 << 20
"""In an object store arrays are packed up to an eighth of a segment: by default they are from 64 KiB on not."""

MANY_OBJECTS = 10_000
"""Of one save: more are told of."""

_log = logging.getLogger("ckpt")


class Planner:
    """Prepares save after save. Both plans are reused while all ranks hold the same tensors.

    Args:
        device: of the tensors.
        pack_below_bytes: arrays whose global size is smaller are packed.
    """

    @classmethod
    def for_place(cls, place: Place, topology: Topology, backend: Backend, device: Device) -> Planner:
        """A planner of saves to a place: in a store, where each object is a request, a format of a file for each chunk packs more."""
        packs_more = not isinstance(place, Path) and backend.store == "zarr"
        below = PACK_BELOW_IN_STORES if packs_more else PACK_BELOW_BYTES
        planner = cls(topology, backend, device, pack_below_bytes=below)
        planner._counts_objects = packs_more
        return planner

    def __init__(
        self,
        topology: Topology,
        backend: Backend,
        device: Device,
        *,
        pack_below_bytes: int = PACK_BELOW_BYTES,
    ) -> None:
        self._counts_objects = False
        self.topology = topology
        self._backend = backend
        self._device = device
        self._pack_below_bytes = pack_below_bytes
        self.comparison = Comparison(topology)
        self._found: tuple[SavePlan, RankWritePlan] | None = None

    def prepare(
        self,
        place: To,
        mine: RankState,
        compared: Compared,
        check: Callable[[], object] = lambda: None,
    ) -> PreparedSave[To]:
        """Agree on plain values and on who writes what. Collective.

        Args:
            compared: what `comparison` says of the states of all ranks.
            check: called before the plan is made; collective, too.

        Raises:
            ShardingError, ShapeMismatchError, ReplicationError: the states of the ranks do not make up one.
        """
        plain = settle_plain(mine, compared, self.topology, self.comparison.merges)
        check()
        plan, write_plan = self._planned(mine, compared)
        files = plain_files(plain, mine.components, self.topology)
        return PreparedSave(place, mine, plan, write_plan, files, self._backend, self._device)

    def collect_and_prepare(self, place: To, mine: RankState) -> PreparedSave[To]:
        """Compare the states of all ranks, and `prepare`. Collective."""
        with self.topology.phase("collect") as phase:
            self.comparison.say(mine, phase)
        return self.prepare(place, mine, self.comparison.heard(phase))

    def _planned(self, mine: RankState, compared: Compared) -> tuple[SavePlan, RankWritePlan]:
        """The plan, the same on every rank, and this rank's part of it."""
        if compared.tables is not None or self._found is None:
            assert compared.tables is not None, "the ranks have said that they have a plan"
            tables, table_of_rank = exchange_tables(mine.table, compared.tables, self.topology)
            with self.topology.phase("plan"), gc_paused():
                plan = plan_save(tables, table_of_rank, item_bytes, pack_below_bytes=self._pack_below_bytes)
                tasks = plan.of_rank(self.topology.rank)
                write_plan = RankWritePlan(plan, tasks, mine.components, self.topology, store=self._backend.store)
            if self._counts_objects and self.topology.is_lead:
                _tell_of_objects(plan)
            self.comparison.plan_is_made(compared)
            self._found = plan, write_plan
        return self._found


def _tell_of_objects(plan: SavePlan) -> None:
    """Warn of a save that makes very many objects: each is a request, and costs money."""
    count = sum(len(array.writers) + 1 for array in plan.arrays.values() if array.grid is not None)
    if count > MANY_OBJECTS:
        _log.warning(
            "each save in the format zarr makes about %d objects, each of them a request; tensorstore makes one for each segment of a rank",
            count,
        )




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
        first_tier: makes the destination of a save that is to go on into the root; None: it is the root.
    """

    def __init__(
        self,
        run: SavedRun,
        roots: KnownRoots,
        *,
        pattern_check: str = "warn",
        stale_check: StaleStateCheck | None = None,
        first_tier: Callable[[SaveTarget], Destination] | None = None,
    ) -> None:
        self._run = run
        self._topology = run.topology
        self._roots = roots
        self._pattern_check = pattern_check
        self._was_examined = False
        self._planner = Planner.for_place(roots.home, run.topology, run.backend, run.device)
        self._fits: RankWritePlan | None = None
        self._stale_check = stale_check or StaleStateCheck(run.components)
        self._first_tier = first_tier
        self._sharing = AutoSharing(run.components, run.topology)

    def save(self, target: SaveTarget) -> SaveReport:
        """Save once, while training waits. See `CheckpointCoordinator.save_checkpoint`."""
        started = time.perf_counter()
        with self._topology.operation(target.what):
            prepared = self.prepare(target)
            prepared.run(self._topology, prepared.live_tensors(), RankWritePlan.write, started=started)
        assert prepared.destination.report is not None, "it is published"
        return prepared.destination.report

    def prepare(self, target: SaveTarget) -> PreparedSave[Destination]:
        """Collect the state, exchange digests, and plan. Writes nothing. Collective."""
        root: Destination
        if self._first_tier is not None and self._roots.is_home(target.root):
            root = self._first_tier(target)
        else:
            root = CheckpointRoot(target, self._roots, self._stale_check)
        with root.unclaimed_if_refused():
            look = self._is_to_look(target.validate)
            claim = partial(root.claim, self._topology)
            mine, compared = self._collect(validate=target.validate, look=look, claim=claim)
            check = partial(self._check_patterns, mine) if look else lambda: None
            prepared = self._planner.prepare(root, mine, compared, check)
            if prepared.write_plan is not self._fits:
                root.require_room(prepared.write_plan.num_bytes, self._topology)
                self._fits = prepared.write_plan
            return prepared

    def patterns(self) -> dict[str, SharingPattern]:
        """Return the pattern that each component was saved under last; those declared "auto" count as replicated before."""
        return {component.key: component.pattern for component in self._sharing.settled}

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
