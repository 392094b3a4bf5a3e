"""The plan of a save, agreed by all ranks, and kept for as long as they hold the same."""

from __future__ import annotations

from collections.abc import Sequence

from ckpt.format.dtypes import item_bytes
from ckpt.format.gc_pause import gc_paused
from ckpt.planning.plan import PACK_BELOW_BYTES, RankPlan, SavePlan, plan_save
from ckpt.ranks.topology import Topology
from ckpt.state.collect import RankState, exchange_tables


class Planner:
    """Plans save after save; tables are exchanged only when any changed."""

    def __init__(self) -> None:
        self._key: tuple[str, ...] = ()
        self._found: tuple[SavePlan, RankPlan] | None = None

    def plan(self, mine: RankState, table_digests: Sequence[str], topology: Topology) -> tuple[SavePlan, RankPlan]:
        """Return what `agreed_plan` does."""
        key = tuple(table_digests)
        if key != self._key or self._found is None:
            self._found = agreed_plan(mine, table_digests, topology)
            self._key = key
        return self._found


def agreed_plan(
    mine: RankState,
    table_digests: Sequence[str],
    topology: Topology,
    *,
    pack_below_bytes: int = PACK_BELOW_BYTES,
) -> tuple[SavePlan, RankPlan]:
    """Return the whole plan, the same on every rank, and this rank's part of it. Collective.

    Args:
        table_digests: of every rank's table, from its summary.
        pack_below_bytes: arrays whose global size is smaller share a packed one.
    """
    tables, table_of_rank = exchange_tables(mine.table, table_digests, topology)
    with topology.phase("plan"), gc_paused():
        plan = plan_save(tables, table_of_rank, item_bytes, pack_below_bytes=pack_below_bytes)
        return plan, plan.of_rank(topology.rank)
