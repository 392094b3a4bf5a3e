"""Two-stage loading: one rank reads the bytes that several ranks want, and spreads them to the others.

    wants of all ranks -> blocks, each with a reader and destinations -> storage -> slots -> tensors

Ranks of a host share the memory of their slots; between hosts a transport carries each block once per host. Ranks read different
blocks at the same time, each as many bytes as the others, while earlier blocks are spread and placed. A rank reads by itself the
bytes that it alone wants, and those that its host holds in memory since they were saved. The ranks of a host read all by themselves if
its page cache has all that they want: from there to a tensor is one copy, through a slot it is two. They all do or none does: what one
finds in the cache, another may have looked for a moment too early.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch

from ckpt.backends.base import Backend
from ckpt.errors import Argument, ConfigurationError
from ckpt.format import strict_json
from ckpt.format.records import ALIGNMENT, BLOCK_BYTES
from ckpt.loading.direct import ChunkReader
from ckpt.loading.strategy import ReadRequest, Stored
from ckpt.loading.two_stage.network import KeptTransports, Transport
from ckpt.loading.two_stage.slots import SLOT_BYTES, HostLink, Slots, make_slots
from ckpt.loading.two_stage.spread_blocks import (
    PIECE_ALIGNMENT,
    Want,
    first_wanted_bytes,
    part_of,
    plan_spread,
    wants_of,
)
from ckpt.loading.two_stage.spread_worker import Timers, TwoStageReading, timed
from ckpt.memory.budget import more_memory
from ckpt.memory.copies import HALVES, Filling
from ckpt.memory.device import Device
from ckpt.ranks.merging import alike, first, first_difference
from ckpt.ranks.topology import Topology, group_of
from ckpt.state.collect import digest_of_json
from ckpt.storage.extents import PREADV, ReadAt
from ckpt.storage.host_memory import MemoryUse, can_be_shared, power_of_two
from ckpt.storage.objects.files import RANGE_BYTES, REQUESTS


class TwoStageLoad:
    """Each byte is read from storage once for all the ranks of a group.

    Args:
        group: the name of a process group of the run, within whose instances bytes are read once, or the ranks of this rank's
            instance; None: all ranks are one.
        cpu_transfer: between hosts, blocks travel in host memory, through gloo, and within a host through memory that its ranks
            share. If not, they travel between all ranks in device memory, by the device's own collectives.
        transport: carries blocks between hosts. "torch": torch.distributed, in groups of its default one. "engine": the transport
            that carries weights to rollouts (ckpt/engine), which needs none. None: "engine" where the coordinator's backend says so,
            else "torch".
        read_at: how bytes come from an open file. Only of `os.preadv` it is known that they come through the page cache.

    Attributes:
        in_flight_bytes: the most memory that a rank gives to bytes on their way, equal on all ranks; on the host, and as much on the
            device where they travel in device memory. Besides, the bytes that a rank alone wants, and cannot read into tensors as they
            are, pass through 4 MiB, and an encoded chunk is decoded whole; bytes for a device pass through 16 MiB of page-locked
            memory, and up to 8 MiB on the device.
        num_requests: to an object store, at a time; each has an answer of 8 MiB.
        timers: seconds of this rank: `prepare`; then `storage`, `network` and `place`, which run beside each other, and `wait`. See
            `ckpt.loading.two_stage.spread_worker.summarize`.

    Raises:
        ConfigurationError: there is no such transport.
    """

    in_flight_bytes = 16 << 20
    num_requests = REQUESTS

    def __init__(
        self,
        *,
        group: str | Sequence[int] | None = None,
        cpu_transfer: bool = True,
        transport: Transport | str | None = None,
        read_at: ReadAt = PREADV,
    ) -> None:
        self._group = group
        self._cpu_transfer = cpu_transfer
        self._transports = KeptTransports(transport, cpu_transfer=cpu_transfer)
        self._read_at = read_at
        self.timers: Timers = defaultdict(list)

    def bind(self, backend: Backend) -> None:
        """See `LoadingStrategy.bind`: the transport."""
        if self._transports.choice is None:
            # Not isinstance: from Python 3.12 on it misses attributes that a wrapper delegates by __getattr__.
            self._transports.choice = getattr(backend, "transport", None)

    def memory_range(self, use: MemoryUse) -> tuple[int, int]:
        """See `ckpt.memory.budget.Limited`: two blocks are in flight at least."""
        least = 2 * BLOCK_BYTES
        fixed, ranges = _beside(use), RANGE_BYTES if use.in_store else 0
        return fixed + least + ranges, fixed + max(least, self.in_flight_bytes) + self.num_requests * ranges

    def limit_memory(self, num_bytes: int, use: MemoryUse) -> None:
        """See `ckpt.memory.budget.Limited`."""
        num_bytes -= _beside(use)
        if use.in_store:
            self.num_requests = max(1, min(self.num_requests, num_bytes // 2 // RANGE_BYTES))
            num_bytes -= self.num_requests * RANGE_BYTES
        self.in_flight_bytes = min(self.in_flight_bytes, power_of_two(num_bytes))

    @timed()
    def prepare(
        self, requests: Sequence[ReadRequest], checkpoint: Stored, topology: Topology, device: Device, *, verify: bool
    ) -> TwoStageReading:
        """See `LoadingStrategy.prepare`. Three agreements: ranks announce their wants, meet their neighbours, and plan the read.

        Raises:
            ConfigurationError: there is no such group, a block does not fit the memory allowed, several hosts share no network, or
                the ranks were given different settings.
            CorruptCheckpointError: an index contradicts the manifest.
        """
        with ExitStack() as unless_prepared:
            verify = verify and checkpoint.has_digests
            reader = self._reader(checkpoint, topology, verify)
            unless_prepared.callback(reader.close)
            with topology.phase("say what is wanted") as phase:
                mine = wants_of(requests, checkpoint, verify=verify)
                wanted = mine.wants
                members = self._members(topology)
                link = self._link_for(topology, members)
                if link is not None:
                    unless_prepared.callback(link.close)
                phase.payload = _Announcement(
                    digest_of_json(wanted),
                    self._cpu_transfer and mine.are_cached(reader),
                    max((want.unit for want in wanted), default=ALIGNMENT),
                    None if self._group is None else members,
                    link.address if link is not None else None,
                )
                phase.merge = {name: alike(setting) for name, setting in self._settings(verify).items()}
                if mine.wants and not self._cpu_transfer:
                    phase.merge["devices"] = first({device.type: None})
                phase.answer = lambda: _require_alike(phase.merged)
            announced = [_Announcement(*payload) for payload in phase.payloads]
            everybody = tuple(range(topology.world_size))
            of_each = [everybody if announcement.members is None else announcement.members for announcement in announced]
            group = group_of("of two-stage loading", of_each, topology.rank)
            with topology.phase("meet") as phase:
                same = [rank for rank in group.members if announced[rank].wants == announced[topology.rank].wants]
                has_met = _has_met(link, announced, _neighbours(topology, group.members))
                phase.payload = [wanted if topology.rank == min(same) else None, has_met, self._transports.offer()]
            rows_of, met, offers = zip(*phase.payloads, strict=True)
            hosts = {
                instance: _by_host(topology, instance, share=all(met[rank] for rank in instance))
                for instance in group.instances
            }
            here = hosts[group.members]
            all_wants = _wants_of(group.members, [announcement.wants for announcement in announced], rows_of)
            cached = _cached(topology, group.members, announced)
            if topology.rank in cached:
                mine = mine.by_itself()
            wants = _of_ranks(all_wants, set(group.members) - cached)
            between_hosts = [instance for instance in group.instances if len(hosts[instance]) > 1]
            transport = self._transports.connect(topology, device, between_hosts, offers) if between_hosts else None
            with topology.phase("plan the read"):
                share_memory = len(here) < len(group.members) and any(rows for rows, _ in wants)
                if link is not None and not share_memory:
                    link.close()
                    link = None
                unit = max(announced[rank].unit for rank in group.members)
                slots = self._slots(link, unit, device, num_hosts=len(here), alone=len(group.members) == 1)
                part = part_of(plan_spread(wants, slots.slot_bytes), here, topology.rank, mine.held)
            unless_prepared.pop_all()
        give_up = partial(self._transports.give_up, topology.rank)
        counted = None
        if wanted and topology.rank in cached:  # each byte once, whichever of this host's ranks read it
            counted = first_wanted_bytes(_of_ranks(all_wants, set(_neighbours(topology, group.members))), topology.rank)
        return TwoStageReading(
            part, mine, reader, Filling(SLOT_BYTES), slots, link, transport, topology, self.timers, give_up, counted
        )

    def close(self) -> None:
        """See `LoadingStrategy.close`."""
        self._transports.close()

    def _reader(self, checkpoint: Stored, topology: Topology, verify: bool) -> ChunkReader:
        return ChunkReader(
            checkpoint,
            verify=verify,
            slab_bytes=SLOT_BYTES,
            progress=topology.progress,
            read_at=self._read_at,
            role="filling by the reader thread",
            num_requests=self.num_requests,
        )

    def _settings(self, verify: bool) -> dict[str, Any]:
        """The settings that every rank's plan follows from."""
        return {_IN_FLIGHT: self.in_flight_bytes >> 20, "strategy.cpu_transfer": self._cpu_transfer, "verify": verify}

    def _members(self, topology: Topology) -> list[int]:
        """The ranks of the instance that this one is in, for which each byte is read once."""
        if self._group is None:
            return list(range(topology.world_size))
        if not isinstance(self._group, str):
            return sorted(self._group)
        if self._group not in topology.groups:
            known = ", ".join(sorted(topology.groups)) or "none"
            raise ConfigurationError(
                Argument("strategy.group", self._group, f"group={self._group} of TwoStageLoad"),
                f": the run has no process group of that name, it has {known}; None takes all as one",
            )
        return list(topology.groups[self._group].members)

    def _link_for(self, topology: Topology, members: Sequence[int]) -> HostLink | None:
        """A link to the members on this host, if blocks are to travel in memory that they can share."""
        if not self._cpu_transfer or not can_be_shared() or len(_neighbours(topology, members)) == 1:
            return None
        return HostLink(topology.rank, self.in_flight_bytes)

    def _slots(
        self,
        link: HostLink | None,
        unit: int,
        device: Device,
        *,
        num_hosts: int,
        alone: bool,
    ) -> Slots:
        if alone:
            return Slots(torch.empty(0, dtype=torch.uint8, device="cpu"), PIECE_ALIGNMENT, 0, 0)
        in_host_memory = self._cpu_transfer or device.type == "cpu"
        return make_slots(
            self.in_flight_bytes,
            unit=unit,
            between_hosts=num_hosts > 1,
            shared=None if link is None else link.memory[link.rank],
            device=None if in_host_memory else device.torch_device,
        )


_IN_FLIGHT = "in flight"


def _beside(use: MemoryUse) -> int:
    """The bytes of host memory beside those in flight: of the reader, and of copies to a device by two threads."""
    return SLOT_BYTES * (1 + 2 * HALVES * use.on_device)


class _Announcement(NamedTuple):
    """What a rank tells all others first.

    Attributes:
        wants: digest of what it wants, as JSON.
        is_cached: the page cache of its host has all of that.
        unit: the most bytes that it wants read as one.
        members: the ranks for which each byte is read once; None: all.
        address: of its `HostLink`; None: it has none.
    """

    wants: str
    is_cached: bool
    unit: int
    members: list[int] | None
    address: str | None


def _neighbours(topology: Topology, members: Sequence[int]) -> list[int]:
    here = set(topology.nodes[topology.node_rank])
    return [rank for rank in members if rank in here]


def _cached(topology: Topology, members: Sequence[int], announced: Sequence[_Announcement]) -> set[int]:
    """The members that read all by themselves: those of the hosts whose members have all found all in the page cache."""
    chosen = set(members)
    of_hosts = ([rank for rank in ranks if rank in chosen] for ranks in topology.nodes)
    return {rank for here in of_hosts if all(announced[member].is_cached for member in here) for rank in here}


def _has_met(link: HostLink | None, announced: Sequence[_Announcement], neighbours: Sequence[int]) -> bool:
    """Whether this rank can share memory with its neighbours. Connects to those below it."""
    if len(neighbours) == 1:
        return True
    addresses = [(rank, address) for rank in neighbours if (address := announced[rank].address) is not None]
    return link is not None and len(addresses) == len(neighbours) and link.reach(addresses)


def _by_host(topology: Topology, members: Sequence[int], *, share: bool) -> list[list[int]]:
    """The members by host; a host of its own for each one, where they share no memory."""
    if not share:
        return [[rank] for rank in members]
    on_hosts = ([rank for rank in ranks if rank in set(members)] for ranks in topology.nodes)
    return [ranks for ranks in on_hosts if ranks]


def _wants_of(
    members: Sequence[int], digests: Sequence[str], rows: Sequence[Any]
) -> list[tuple[list[Want], tuple[int, ...]]]:
    """Each set of wants once, with the ranks that have just these."""
    alike: dict[str, list[int]] = {}
    for rank in members:
        alike.setdefault(digests[rank], []).append(rank)
    return [(strict_json.convert(rows[ranks[0]], list[Want]), tuple(ranks)) for ranks in alike.values()]


def _of_ranks(
    wants: Sequence[tuple[Sequence[Want], tuple[int, ...]]], ranks: AbstractSet[int]
) -> list[tuple[Sequence[Want], tuple[int, ...]]]:
    """The sets of wants that some of these ranks have, each with those that do."""
    chosen = [(rows, tuple(rank for rank in those if rank in ranks)) for rows, those in wants]
    return [(rows, those) for rows, those in chosen if those]


def _require_alike(merged: Mapping[str, Any]) -> None:
    """Require the same settings on all ranks, and one type of device in whose memory blocks travel."""
    devices: dict[str, tuple[int, None]] = merged.get("devices", {})
    settings = {name: setting for name, setting in merged.items() if name != "devices"}
    if (difference := first_difference(settings)) is not None:
        name, rank, here, on_lead = difference
        if name == _IN_FLIGHT:
            found = f"rank {rank} may have {here} MiB in flight, and rank 0 {on_lead}: two-stage loading needs the same on all ranks"
            raise ConfigurationError(found, "; give all one ", more_memory())
        raise ConfigurationError(
            Argument(name, here),
            f" on rank {rank}, and {on_lead} on rank 0: two-stage loading needs the same on all ranks",
        )
    if len(devices) > 1:
        ways = ", ".join(f"rank {rank} into {device} memory" for device, (rank, _) in devices.items())
        found, advice = (Argument("strategy.cpu_transfer", value) for value in (False, True))
        raise ConfigurationError(found, f": {ways}; bytes cannot travel between them; give ", advice)
