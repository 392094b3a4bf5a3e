"""Agree on a save before it writes: its plain values, its plan, and each rank's share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ckpt.backends.base import Backend
from ckpt.format.dtypes import item_bytes
from ckpt.format.gc_pause import gc_paused
from ckpt.memory.device import Device
from ckpt.planning.plan import PACK_BELOW_BYTES, SavePlan, plan_save
from ckpt.ranks.topology import Topology
from ckpt.saving.prepared_save import Place, PreparedSave
from ckpt.saving.writing import PACKED_BYTES, RankWritePlan, plain_files
from ckpt.state.collect import MergedRows, RankState, exchange_tables, settle_plain


class Planner:
    """Prepares save after save. Plan and share are reused while all ranks hold the same tensors.

    Args:
        device: of the tensors.
        packed_bytes: the longest array that small tensors are packed in.
        pack_below_bytes: arrays whose global size is smaller are packed.
    """

    def __init__(
        self,
        topology: Topology,
        backend: Backend,
        device: Device,
        *,
        packed_bytes: int = PACKED_BYTES,
        pack_below_bytes: int = PACK_BELOW_BYTES,
    ) -> None:
        self.topology = topology
        self._backend = backend
        self._device = device
        self._packed_bytes = packed_bytes
        self._pack_below_bytes = pack_below_bytes
        self._merged: MergedRows = {}
        self._key: list[str] = []
        self._found: tuple[SavePlan, RankWritePlan] | None = None

    def prepare(
        self,
        place: Place,
        mine: RankState,
        summaries: Sequence[Mapping[str, Any]],
        check: Callable[[], object] = lambda: None,
    ) -> PreparedSave[Place]:
        """Agree on plain values and on who writes what. Collective.

        Args:
            summaries: `RankState.summary` of every rank.
            check: called before the plan is made; collective, too.

        Raises:
            ShardingError, ShapeMismatchError, ReplicationError: the states of the ranks do not make up one.
        """
        plain = settle_plain(mine, summaries, self.topology, self._merged)
        check()
        plan, share = self._planned(mine, [summary["table"] for summary in summaries])
        files = plain_files(plain, mine.components, self.topology)
        return PreparedSave(place, mine, plan, share, files, self._backend, self._device)

    def collect_and_prepare(self, place: Place, mine: RankState) -> PreparedSave[Place]:
        """Exchange summaries, and `prepare`. Collective."""
        with self.topology.phase("collect") as phase:
            phase.payload = mine.summary()
        return self.prepare(place, mine, phase.payloads)

    def _planned(self, mine: RankState, table_digests: list[str]) -> tuple[SavePlan, RankWritePlan]:
        """The plan, the same on every rank, and this rank's share of it."""
        if table_digests != self._key or self._found is None:
            tables, table_of_rank = exchange_tables(mine.table, table_digests, self.topology)
            with self.topology.phase("plan"), gc_paused():
                plan = plan_save(tables, table_of_rank, item_bytes, pack_below_bytes=self._pack_below_bytes)
                tasks = plan.of_rank(self.topology.rank)
                packed_bytes, store = self._packed_bytes, self._backend.store
                share = RankWritePlan(
                    plan, tasks, mine.components, self.topology, packed_bytes=packed_bytes, store=store
                )
            self._key, self._found = table_digests, (plan, share)
        return self._found
