"""The plan of a save, agreed by all ranks, and kept for as long as they hold the same."""

from __future__ import annotations

from collections.abc import Sequence

from ckpt.collect import Contribution, exchange_tables
from ckpt.dtypes import item_bytes
from ckpt.plan import PACK_BELOW_BYTES, RankPlan, SavePlan, plan_save
from ckpt.topology import Topology


class Planner:
    """Plans save after save; tables are exchanged only when any changed.

    Args:
        pack_below_bytes: arrays whose global size is smaller share a packed one.
    """

    def __init__(self, *, pack_below_bytes: int = PACK_BELOW_BYTES) -> None:
        self._pack_below_bytes = pack_below_bytes
        self._key: tuple[str, ...] = ()
        self._found: tuple[SavePlan, RankPlan] | None = None

    def plan(self, mine: Contribution, table_digests: Sequence[str], topology: Topology) -> tuple[SavePlan, RankPlan]:
        """Return the whole plan, the same on every rank, and this rank's part of it. Collective.

        Args:
            table_digests: of every rank's table, from its summary.
        """
        key = tuple(table_digests)
        if key != self._key or self._found is None:
            tables, table_of_rank = exchange_tables(mine.table, table_digests, topology)
            with topology.phase("plan"):
                plan = plan_save(tables, table_of_rank, item_bytes, pack_below_bytes=self._pack_below_bytes)
                self._found = plan, plan.of_rank(topology.rank)
            self._key = key
        return self._found
