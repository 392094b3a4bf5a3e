"""The rollouts that an update is sent to; any other one reads the memory of a rollout of its host.

    offers of all ranks -> agreed_sharing -> make_room: the first rollout of a host allocates -> settle: the others map that memory

One that cannot map it receives for itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ckpt.engine.wire.layout import WeightLayout
from ckpt.engine.wire.pool import ReceivedStream
from ckpt.ranks.topology import Topology
from ckpt.storage.host_memory import MemoryFile

Sharing = Mapping[int, int]
"""Rollout -> the rollout of its host whose memory it reads, which may be itself. The others have memory of their own."""


def agreed_sharing(offers: Sequence[Mapping[str, Any]], nodes: Sequence[Sequence[int]]) -> Sharing:
    """Return who shares with whom, from the offers of all ranks (`VersionedEngine._offer`); equal on all of them. Pure.

    Args:
        nodes: the ranks of each host.
    """
    found: dict[int, int] = {}
    for ranks in nodes:
        sharing = [rank for rank in ranks if offers[rank].get("shares")]
        if len(sharing) > 1:
            found |= dict.fromkeys(sharing, sharing[0])
    return found


class Receivers:
    """The receivers of one engine's updates, as one rank knows them.

    Args:
        receive_buffers: of the engine: the first is received into, the last holds the newest version.

    Attributes:
        ranks: the rollouts that receive.
    """

    def __init__(self, rank: int, rollouts: Sequence[int], receive_buffers: Sequence[ReceivedStream]) -> None:
        self.ranks = rollouts
        self._rank = rank
        self._rollouts = rollouts
        self._receive_buffers = receive_buffers
        self._sharing: Sharing = {}

    @property
    def _receive_buffer(self) -> ReceivedStream:
        return self._receive_buffers[0]

    def are_settled(self, offers: Sequence[Mapping[str, Any]], sharing: Sharing) -> bool:
        """Whether nothing has changed since `settle`, by all offers: who shares with whom, and the memory that they share."""
        others = [rank for rank in sharing if rank not in self.ranks]
        return sharing == self._sharing and all(
            offers[rank]["place"] == offers[sharing[rank]]["place"] is not None for rank in others
        )

    def make_room(self, layout: WeightLayout, sharing: Sharing) -> dict[str, Any]:
        """Allocate memory for a rollout that receives, for all rollouts that will read it. Local. Return JSON for `settle`."""
        with_rank = sharing.get(self._rank)
        if self._rank in self._rollouts and with_rank is None:
            if self._receive_buffer.place is not None:
                self._receive_buffer.let_go()
            self._receive_buffer.make_room(layout)
        elif with_rank == self._rank:
            self._receive_buffer.make_shared_room(layout)
        return {"place": self._receive_buffer.place, "holds": self._receive_buffers[-1].holds}

    def settle(
        self, topology: Topology, layout: WeightLayout, sharing: Sharing, offers: Sequence[Mapping[str, Any]]
    ) -> list[str | None]:
        """Map the memory of the rollout that receives for this one, and set `ranks`. Collective, if any rollouts share.

        Args:
            offers: by rank, what `make_room` has returned.

        Returns:
            the version that each rank holds now, as `ReceivedStream.holds`: none, where it has new memory.
        """
        self._sharing, self.ranks = sharing, self._rollouts
        if sharing:
            with topology.phase("share memory") as phase:
                with_rank = sharing.get(self._rank, self._rank)
                receives = with_rank == self._rank or not self._joins(offers[with_rank]["place"], layout)
                phase.payload = {"receives": receives, "holds": self._receive_buffers[-1].holds}
            offers = phase.payloads
            self.ranks = [rank for rank in self._rollouts if offers[rank]["receives"]]
        return [offer["holds"] for offer in offers]

    def _joins(self, place: Sequence[Any] | None, layout: WeightLayout) -> bool:
        """Map memory of another rollout; if that cannot be done, allocate memory of its own, and return False."""
        if place is not None and self._receive_buffer.join(MemoryFile(*place), layout):
            return True
        self._receive_buffer.make_room(layout)
        return False
