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
from ckpt.storage.held import MemoryFile

Sharing = Mapping[int, int]
"""Rollout -> the rollout of its host whose memory it reads, which may be itself. The others have memory of their own."""


def agreed_sharing(said: Sequence[Mapping[str, Any]], nodes: Sequence[Sequence[int]]) -> Sharing:
    """Return who shares with whom, from the offers of all ranks (`VersionedEngine._offer`); equal on all of them. Pure.

    Args:
        nodes: the ranks of each host.
    """
    found: dict[int, int] = {}
    for ranks in nodes:
        sharing = [rank for rank in ranks if said[rank].get("shares")]
        if len(sharing) > 1:
            found |= dict.fromkeys(sharing, sharing[0])
    return found


class Receivers:
    """The receivers of one engine's updates, as one rank knows them.

    Args:
        landings: of the engine: the first is received into, the last holds the newest version.

    Attributes:
        ranks: the rollouts that receive.
    """

    def __init__(self, rank: int, rollouts: Sequence[int], landings: Sequence[ReceivedStream]) -> None:
        self.ranks = rollouts
        self._rank = rank
        self._rollouts = rollouts
        self._landings = landings
        self._sharing: Sharing = {}

    @property
    def _landing(self) -> ReceivedStream:
        return self._landings[0]

    def are_settled(self, said: Sequence[Mapping[str, Any]], sharing: Sharing) -> bool:
        """Whether nothing has changed since `settle`, by all offers: who shares with whom, and the memory that they share."""
        others = [rank for rank in sharing if rank not in self.ranks]
        return sharing == self._sharing and all(
            said[rank]["place"] == said[sharing[rank]]["place"] is not None for rank in others
        )

    def make_room(self, layout: WeightLayout, sharing: Sharing) -> dict[str, Any]:
        """Allocate memory for a rollout that receives, for all rollouts that will read it. Local. Return JSON for `settle`."""
        with_rank = sharing.get(self._rank)
        if self._rank in self._rollouts and with_rank is None:
            if self._landing.place is not None:
                self._landing.let_go()
            self._landing.make_room(layout)
        elif with_rank == self._rank:
            self._landing.make_shared_room(layout)
        return {"place": self._landing.place, "holds": self._landings[-1].holds}

    def settle(
        self, topology: Topology, layout: WeightLayout, sharing: Sharing, said: Sequence[Mapping[str, Any]]
    ) -> list[str | None]:
        """Map the memory of the rollout that receives for this one, and set `ranks`. Collective, if any rollouts share.

        Args:
            said: by rank, what `make_room` has returned.

        Returns:
            the version that each rank holds now, as `ReceivedStream.holds`: none, where it has new memory.
        """
        self._sharing, self.ranks = sharing, self._rollouts
        if sharing:
            with topology.phase("share memory") as phase:
                with_rank = sharing.get(self._rank, self._rank)
                receives = with_rank == self._rank or not self._joins(said[with_rank]["place"], layout)
                phase.payload = {"receives": receives, "holds": self._landings[-1].holds}
            said = phase.payloads
            self.ranks = [rank for rank in self._rollouts if said[rank]["receives"]]
        return [offer["holds"] for offer in said]

    def _joins(self, place: Sequence[Any] | None, layout: WeightLayout) -> bool:
        """Map memory of another rollout; if that cannot be done, allocate memory of its own, and return False."""
        if place is not None and self._landing.join(MemoryFile(*place), layout):
            return True
        self._landing.make_room(layout)
        return False
