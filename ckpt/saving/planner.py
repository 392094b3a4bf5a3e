"""Agree on a save before it writes: its plain values, its plan, and each rank's share."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from ckpt.backends.base import Backend
from ckpt.format.dtypes import item_bytes
from ckpt.format.gc_pause import gc_paused
from ckpt.format.places import Place
from ckpt.memory.device import Device
from ckpt.planning.plan import PACK_BELOW_BYTES, SavePlan, plan_save
from ckpt.ranks.topology import Topology
from ckpt.saving.prepared_save import PreparedSave, To
from ckpt.saving.writing import RankWritePlan, plain_files
from ckpt.state.collect import Compared, Comparison, RankState, exchange_tables, settle_plain

PACK_BELOW_IN_STORES = 8 << 20
"""In an object store arrays are packed up to an eighth of a segment: by default they are from 64 KiB on not."""

MANY_OBJECTS = 10_000
"""Of one save: more are told of."""

_log = logging.getLogger("ckpt")


class Planner:
    """Prepares save after save. Plan and share are reused while all ranks hold the same tensors.

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
        plan, share = self._planned(mine, compared)
        files = plain_files(plain, mine.components, self.topology)
        return PreparedSave(place, mine, plan, share, files, self._backend, self._device)

    def collect_and_prepare(self, place: To, mine: RankState) -> PreparedSave[To]:
        """Compare the states of all ranks, and `prepare`. Collective."""
        with self.topology.phase("collect") as phase:
            self.comparison.say(mine, phase)
        return self.prepare(place, mine, self.comparison.heard(phase))

    def _planned(self, mine: RankState, compared: Compared) -> tuple[SavePlan, RankWritePlan]:
        """The plan, the same on every rank, and this rank's share of it."""
        if compared.tables is not None or self._found is None:
            assert compared.tables is not None, "the ranks have said that they have a plan"
            tables, table_of_rank = exchange_tables(mine.table, compared.tables, self.topology)
            with self.topology.phase("plan"), gc_paused():
                plan = plan_save(tables, table_of_rank, item_bytes, pack_below_bytes=self._pack_below_bytes)
                tasks = plan.of_rank(self.topology.rank)
                share = RankWritePlan(plan, tasks, mine.components, self.topology, store=self._backend.store)
            if self._counts_objects and self.topology.is_lead:
                _tell_of_objects(plan)
            self.comparison.plan_is_made(compared)
            self._found = plan, share
        return self._found


def _tell_of_objects(plan: SavePlan) -> None:
    """Warn of a save that makes very many objects: each is a request, and costs money."""
    count = sum(len(array.writers) + 1 for array in plan.arrays.values() if array.grid is not None)
    if count > MANY_OBJECTS:
        _log.warning(
            "each save in the format zarr makes about %d objects, each of them a request; tensorstore makes one for each segment of a rank",
            count,
        )
