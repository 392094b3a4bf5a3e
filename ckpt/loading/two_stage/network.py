"""Transports between hosts: they carry a block from the rank that read it to one rank on every host that wants it."""

from __future__ import annotations

import json
import uuid
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from ckpt.errors import Argument, ConfigurationError, refused
from ckpt.format.digests import digest_of
from ckpt.memory.device import Device
from ckpt.ranks.topology import Topology

if TYPE_CHECKING:
    from ckpt.engine.wire.load_transport import EngineTransport


class Transport(Protocol):
    """Carries bytes between ranks of one group. One thread uses it; the ranks that take part in a call make it in the same order."""

    def begin(self, buffer: torch.Tensor, source: int, to: Sequence[int]) -> Callable[[], None]:
        """Begin to fill `buffer` on the ranks in `to` with that of `source`; return a function that waits for the end.

        Called by these ranks; numbers are global. Several transfers may be begun before the first is waited for, in order.
        """


class TorchTransport:
    """A broadcast where the whole group takes part, else a tree of sends.

    Args:
        group: its collectives move the memory that blocks travel in.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._members = set(dist.get_process_group_ranks(group))

    def begin(self, buffer: torch.Tensor, source: int, to: Sequence[int]) -> Callable[[], None]:
        """See `Transport.begin`."""
        order = [source, *(rank for rank in to if rank != source)]
        if set(order) == self._members:
            work: Any = dist.broadcast(buffer, source, group=self._group, async_op=True)
            return lambda: _wait_for([work])
        above, below = _in_tree(order.index(dist.get_rank()), len(order))
        if above is None:
            sent = [dist.isend(buffer, order[child], group=self._group) for child in below]
            return lambda: _wait_for(sent)
        received = dist.irecv(buffer, order[above], group=self._group)

        def pass_on() -> None:
            _wait_for([received])
            _wait_for([dist.isend(buffer, order[child], group=self._group) for child in below])

        return pass_on


class KeptTransports:
    """The transports of one strategy, made by its first load between hosts and kept for the next ones.

    Args:
        choice: "torch", "engine" or a transport of the caller's, which is used as it is; None: "torch".
        cpu_transfer: see `TwoStageLoad`.
    """

    def __init__(self, choice: Transport | str | None, *, cpu_transfer: bool) -> None:
        if isinstance(choice, str) and choice not in ("torch", "engine"):
            setting = f"transport={choice} of TwoStageLoad"
            raise refused("strategy.transport", choice, "torch or engine, a Transport, or None", setting)
        self.choice = choice
        self._cpu_transfer = cpu_transfer
        self._engine: EngineTransport | None = None
        self._groups: _TorchGroups | None = None

    def offer(self) -> list[str | None]:
        """This rank's part in the choice between kept transports and new ones: the name of the kept ones, a name for new ones."""
        kept = self._engine.name if self._engine is not None else None
        if self._groups is not None and (world := self._groups.world()) is not None and world is dist.group.WORLD:
            kept = self._groups.name
        return [kept, uuid.uuid4().hex]

    def connect(
        self,
        topology: Topology,
        device: Device,
        instances: Sequence[Sequence[int]],
        offers: Sequence[Sequence[str | None]],
    ) -> Transport | None:
        """The transport of this rank; None: nothing of its travels between hosts. Collective if new process groups are made.

        Args:
            instances: the sets of ranks, in order, each of which spreads blocks between hosts; not empty.
            offers: `offer` of every rank.
        """
        if self.choice == "engine":
            return self._engine_transport(topology, device, offers)
        if self.choice is None or isinstance(self.choice, str):
            name = digest_of(json.dumps(instances).encode())
            if self._groups is None or any(kept != name for kept, _ in offers):
                with topology.phase("make process groups"):
                    backend = "gloo" if self._cpu_transfer else device.collectives
                    made = make_groups(instances, backend, topology.timeout_s)
                assert dist.group.WORLD is not None
                self._groups = _TorchGroups(name, weakref.ref(dist.group.WORLD), made)
            group = self._groups.by_rank.get(topology.rank)
            return None if group is None else TorchTransport(group)
        return self.choice

    def give_up(self, rank: int) -> None:
        """Abort what is under way on this rank, as far as that is possible, and forget the groups that this object has made."""
        groups, self._groups = self._groups, None
        if groups is not None and rank in groups.by_rank and not self._cpu_transfer:
            with suppress(RuntimeError):  # not all collectives can be aborted; gloo's end by a time-out
                groups.by_rank[rank].abort()
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.give_up()

    def close(self) -> None:
        """Let go of the engine's transport. Nothing is under way."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def _engine_transport(
        self, topology: Topology, device: Device, offers: Sequence[Sequence[str | None]]
    ) -> Transport:
        """The transport that all ranks have kept, or a new one under the name that the lead offers."""
        from ckpt.engine.wire.load_transport import EngineTransport  # imports all engines, which few loads need

        kept, new_name = offers[0]
        assert new_name is not None
        if self._engine is None or kept is None or any(name != kept for name, _ in offers):
            self.give_up(topology.rank)
            store = topology.store_for("ckpt-two-stage")
            assert store is not None, "a rank that is alone sends nothing"
            self._engine = EngineTransport(
                store,
                new_name,
                topology.rank,
                device=Device(type="cpu", collectives="gloo") if self._cpu_transfer else device,
                timeout_s=topology.timeout_s,
            )
        return self._engine


class _TorchGroups(NamedTuple):
    """Process groups made for one set of instances.

    Attributes:
        world: torch's default group, with which they end; the next one may lie in memory where it lay.
        by_rank: the group of each rank that is in one.
    """

    name: str
    world: weakref.ref[dist.ProcessGroup]
    by_rank: dict[int, dist.ProcessGroup]


def _in_tree(me: int, count: int) -> tuple[int | None, list[int]]:
    """The rank that the me-th of `count` ranks gets a block from, and those it passes it to. Each round doubles the ranks that have it."""
    above, below, width = None, [], 1
    while width < count:
        if me < width and me + width < count:
            below.append(me + width)
        elif width <= me < 2 * width:
            above = me - width
        width *= 2
    return above, below


def _wait_for(works: Sequence[Any]) -> None:
    for work in works:
        work.wait()


def make_groups(instances: Sequence[Sequence[int]], backend: str, timeout_s: float) -> dict[int, dist.ProcessGroup]:
    """Make a process group of each of these sets of ranks, and return them by member.

    Every rank of the job calls it, also one that is in none of them: torch wants all groups made by all ranks in one order.

    Raises:
        ConfigurationError: torch.distributed is not initialized.
    """
    if not dist.is_initialized():
        raise ConfigurationError(
            "strategy=two-stage sends over the network through torch.distributed, which is not initialized; call "
            "init_process_group first, or load with ",
            Argument("strategy.transport", "engine", "transport=engine of TwoStageLoad"), ", or strategy=direct",
        )
    made: dict[int, dist.ProcessGroup] = {}
    for ranks in sorted(tuple(sorted(instance)) for instance in instances):
        group = dist.new_group(list(ranks), timeout=timedelta(seconds=timeout_s), backend=backend)
        made |= dict.fromkeys(ranks, group)
    return made
