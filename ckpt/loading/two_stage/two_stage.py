"""What several ranks want is read once, by one of them, and spread to the others; what one alone wants it reads itself.

    wants -> blocks (who reads what for whom) -> storage -> slots -> tensors of all ranks that want it

What ranks of a host hold in its memory since they saved it, each of its ranks takes from there.

Within a host the slots are memory that all its ranks see; between hosts torch.distributed carries them, once per host. Ranks
read different parts at the same time, each as many bytes as the others, while the parts before are spread and put in place.
"""

from __future__ import annotations

import json
import logging
import os
import uuid
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
import xxhash

from ckpt.backends.base import Backend, BringsTransport
from ckpt.errors import ConfigurationError
from ckpt.loading.strategy import ReadRequest, ReadStats, Stored, in_flight_bytes
from ckpt.loading.two_stage.endpoints import RankEndpoints
from ckpt.loading.two_stage.host import HostLink
from ckpt.loading.two_stage.network import TorchTransport, Transport, make_groups
from ckpt.loading.two_stage.slots import DeviceSlots, Slots
from ckpt.loading.two_stage.spread_blocks import PIECE_ALIGNMENT, Want, plan_spread
from ckpt.loading.two_stage.spread_worker import Hosts, SpreadWorker
from ckpt.loading.two_stage.timing import Timers, summarize, timed
from ckpt.memory.device import Device, device_memory_within, pinned
from ckpt.ranks.topology import Topology, first_difference, group_of
from ckpt.storage.extents import ALIGNMENT, ReadAt
from ckpt.storage.host_memory import can_be_shared

if TYPE_CHECKING:
    from ckpt.engine.wire.transport import EngineTransport

SLOT_BYTES = 4 << 20
"""A block's most usual size: large enough to cost few messages, small enough to stay in the processor's cache."""

MAX_SLOTS = 64
"""More are of no use. What two ranks may have said of their slots to each other, unread, fits a socket's buffer (277 messages)."""

_log = logging.getLogger("ckpt")


class TwoStageLoad:
    """Each byte is read from storage once for all the ranks of a group.

    Args:
        group: the name of a process group of the run, within whose instances bytes are read once, or the ranks of this rank's
            instance; None: all ranks are one.
        cpu_transfer: between hosts, blocks travel in host memory, through gloo, and within a host through memory that its ranks
            share. If not, they travel between all ranks in device memory, by the device's own collectives.
        max_in_flight_mib: the most memory that a rank gives to bytes on their way, in MiB; on the host, and as much on the device
            where they travel in device memory. Besides, what a rank alone wants, and cannot read into tensors as it is, passes
            through one block (4 MiB), and an encoded chunk is decoded whole; what goes to a device passes through 16 MiB of page-locked
            memory, and up to 8 MiB on the device.
        transport: carries blocks between hosts. "torch": torch.distributed, in groups of its default one. "engine": what carries
            weights to rollouts (ckpt/engine), which needs none. None: "engine" where the coordinator's backend says so, else "torch".
        read_at: how bytes come from an open file.

    Attributes:
        timers: seconds of this rank: `prepare`; then `storage`, `network` and `place`, which run beside each other, and `wait`.

    Raises:
        ConfigurationError: `max_in_flight_mib` is not positive, or there is no such transport.
    """

    def __init__(
        self,
        *,
        group: str | Sequence[int] | None = None,
        cpu_transfer: bool = True,
        max_in_flight_mib: int = 16,
        transport: Transport | str | None = None,
        read_at: ReadAt = os.preadv,
    ) -> None:
        self._group = group
        self._cpu_transfer = cpu_transfer
        self._in_flight_bytes = in_flight_bytes(max_in_flight_mib)
        self._transport = _checked(transport)
        self._read_at = read_at
        self._engine_transport: EngineTransport | None = None
        self._torch_groups: dict[Any, dict[int, dist.ProcessGroup]] = {}
        self.timers: Timers = defaultdict(list)

    def bind(self, backend: Backend) -> None:
        """See `LoadingStrategy.bind`: the transport."""
        if self._transport is None and isinstance(backend, BringsTransport):
            self._transport = backend.transport

    @timed()
    def prepare(
        self, requests: Sequence[ReadRequest], checkpoint: Stored, topology: Topology, device: Device, *, verify: bool
    ) -> TwoStageReading:
        """See `LoadingStrategy.prepare`.

        Raises:
            ConfigurationError: there is no such group, a block does not fit the memory allowed, several hosts share no network, or
                the ranks were given different settings.
            CorruptCheckpointError: an index contradicts the manifest.
        """
        with ExitStack() as unless_prepared:
            with topology.phase("say what is wanted") as phase:
                verify = verify and checkpoint.has_digests
                mine = RankEndpoints(requests, checkpoint, topology, verify, self._read_at, SLOT_BYTES)
                rows = [want.to_json() for want in mine.wants()]
                members = self._members(topology)
                link = self._link_for(topology, members)
                unless_prepared.callback(lambda: link.close() if link is not None else None)
                phase.payload = _Said(
                    _digest_of(rows),
                    members,
                    link.address if link is not None else None,
                    self._settings(verify),
                    device.type if rows and not self._cpu_transfer else None,
                )
            said = [_Said(*one) for one in phase.payloads]
            _require_alike([one.settings for one in said])
            _require_one_device([one.device for one in said])
            instances = group_of("of two-stage loading", [one.members for one in said], topology.rank).instances
            mates = next(instance for instance in instances if topology.rank in instance)
            with topology.phase("meet") as phase:
                is_first = topology.rank == min(rank for rank in mates if said[rank].wants == said[topology.rank].wants)
                phase.payload = [rows if is_first else None, _reaches(link, said, _neighbours(topology, mates))]
            hosts = {
                instance: _by_host(topology, instance, share=all(phase.payloads[rank][1] for rank in instance))
                for instance in instances
            }
            here = hosts[mates]
            wants = _wants_of(mates, [one.wants for one in said], [rows for rows, _ in phase.payloads])
            transport = self._meet_others(topology, device, [one for one in instances if len(hosts[one]) > 1])
            with topology.phase("plan the read"):
                shared = link if len(here) < len(mates) else None
                slots = self._slots(shared, wants, between_hosts=len(here) > 1, alone=len(mates) == 1, device=device)
                worker = SpreadWorker(
                    rank=topology.rank,
                    spread=plan_spread(wants, slots.slot_bytes),
                    hosts=Hosts(here),
                    slots=slots,
                    endpoints=mine,
                    link=shared,
                    transport=transport if len(here) > 1 else None,
                    topology=topology,
                )
            unless_prepared.pop_all()
        return TwoStageReading(worker, mine, link, self.timers, partial(self._forget_groups, topology.rank))

    def _settings(self, verify: bool) -> dict[str, Any]:
        """What every rank's plan follows from, besides what is wanted."""
        mib = self._in_flight_bytes >> 20
        return {"max_in_flight_mib": mib, "cpu_transfer": self._cpu_transfer, "verify": verify}

    def _link_for(self, topology: Topology, members: Sequence[int]) -> HostLink | None:
        """A link to the members on this host, if blocks are to travel in memory that they can share."""
        if not self._cpu_transfer or not can_be_shared() or len(_neighbours(topology, members)) == 1:
            return None
        return HostLink(topology.rank, self._in_flight_bytes)

    def summarize_load_times(self, topology: Topology) -> dict[str, tuple[float, float]]:
        """Return for each name in any rank's `timers` the slowest rank's seconds and the mean; then forget them. Collective."""
        summary = summarize(self.timers, topology)
        self.timers.clear()
        return summary

    def close(self) -> None:
        """See `LoadingStrategy.close`."""
        engine, self._engine_transport = self._engine_transport, None
        if engine is not None:
            engine.close()

    def _members(self, topology: Topology) -> list[int]:
        if self._group is None:
            return list(range(topology.world_size))
        if not isinstance(self._group, str):
            return sorted(self._group)
        if self._group not in topology.groups:
            known = ", ".join(sorted(topology.groups)) or "none"
            raise ConfigurationError(
                f"group={self._group} of TwoStageLoad: the run has no process group of that name, it has {known}; None takes all as one"
            )
        return list(topology.groups[self._group].members)

    def _meet_others(self, topology: Topology, device: Device, instances: Sequence[Sequence[int]]) -> Transport | None:
        """What carries this rank's blocks between hosts, where any rank's have to be."""
        if not instances:
            return None
        if self._transport == "engine":
            return self._make_engine(topology, device)
        if self._transport in (None, "torch"):
            groups = self._make_groups(topology, device, instances)
            return TorchTransport(groups[topology.rank]) if topology.rank in groups else None
        assert not isinstance(self._transport, str | None)
        return self._transport

    def _make_engine(self, topology: Topology, device: Device) -> Transport:
        """The engine's transport: that of the load before, if all ranks have it still."""
        from ckpt.engine.wire.transport import EngineTransport  # with it come all engines, which few loads need

        with topology.phase("look for the engine's groups") as phase:
            known = self._engine_transport.name if self._engine_transport is not None else None
            phase.payload = [known, uuid.uuid4().hex]
        if any(name is None or name != phase.payloads[0][0] for name, _ in phase.payloads):
            self._forget_groups(topology.rank)
            store = topology.store_for("ckpt-two-stage")
            assert store is not None, "a rank that is alone meets nobody"
            self._engine_transport = EngineTransport(
                store,
                phase.payloads[0][1],
                topology.rank,
                device=Device(type="cpu", collectives="gloo") if self._cpu_transfer else device,
                timeout_s=topology.timeout_s,
            )
        assert self._engine_transport is not None
        return self._engine_transport

    def _make_groups(
        self, topology: Topology, device: Device, instances: Sequence[Sequence[int]]
    ) -> dict[int, dist.ProcessGroup]:
        """The process groups that carry bytes between hosts, made once, and again after a load that failed; all ranks make all of them,
        in one order."""
        world = dist.group.WORLD  # all groups go with it, and the next one may lie where it lay
        key = world and weakref.ref(world), tuple(tuple(instance) for instance in instances)
        with topology.phase("look for process groups") as phase:
            phase.payload = key in self._torch_groups
        if not all(phase.payloads):
            with topology.phase("make process groups"):
                backend = "gloo" if self._cpu_transfer else device.collectives
                self._torch_groups = {key: make_groups(instances, backend, topology.timeout_s)}
        return self._torch_groups[key]

    def _forget_groups(self, rank: int) -> None:
        """End what is under way on this rank's own process group, as far as it can, and never use any of them again."""
        own = [groups[rank] for groups in self._torch_groups.values() if rank in groups]
        for group in own if not self._cpu_transfer else ():  # a device would wait for ever; gloo gives up after a time
            with suppress(RuntimeError):  # collectives that cannot be aborted
                group.abort()
        self._torch_groups = {}
        engine, self._engine_transport = self._engine_transport, None
        if engine is not None:
            engine.give_up()

    def _slots(
        self,
        link: HostLink | None,
        wants: Sequence[tuple[Sequence[Want], tuple[int, ...]]],
        *,
        between_hosts: bool,
        alone: bool,
        device: Device,
    ) -> Slots:
        """Cut the memory allowed into slots that take the largest unit: for reading, and for what lands from other hosts."""
        unit = max((want.unit for rows, _ in wants for want in rows), default=ALIGNMENT)
        kinds = 2 if between_hosts else 1
        slot_bytes = max(unit, min(SLOT_BYTES, self._in_flight_bytes // (2 * kinds)))
        slot_bytes = -(-slot_bytes // PIECE_ALIGNMENT) * PIECE_ALIGNMENT
        count = min(self._in_flight_bytes // slot_bytes, MAX_SLOTS)
        if alone:
            return Slots(torch.empty(0, dtype=torch.uint8), slot_bytes, 0, 0)
        if count < kinds:
            raise ConfigurationError(
                f"max_in_flight_mib={self._in_flight_bytes >> 20}: {-(-slot_bytes * kinds >> 20)} MiB are the least, for "
                f"{kinds} block{'s' * (kinds - 1)} of {slot_bytes / 2**20:.0f} MiB, which are checked as one"
            )
        if self._cpu_transfer or device.type == "cpu":
            landing = count // 2 if between_hosts else 0
            host = torch.empty(count * slot_bytes, dtype=torch.uint8) if link is None else link.memory[link.rank]
            return Slots(host, slot_bytes, count - landing, landing)
        travel = _device_slots(slot_bytes, count, kinds, device.torch_device)
        count = len(travel) // slot_bytes
        landing = count // 2 if between_hosts else 0
        return Slots(pinned((count - landing) * slot_bytes), slot_bytes, count - landing, landing, DeviceSlots(travel))


def _device_slots(slot_bytes: int, count: int, least: int, device: torch.device) -> torch.Tensor:
    """Memory of a device for so many slots, or for as many as there is room for.

    Raises:
        DeviceMemoryError: there is no room for the least.
    """
    wanted = count * slot_bytes
    memory = device_memory_within(least * slot_bytes, wanted, device, unit=slot_bytes)
    if len(memory) < wanted:
        _log.warning(
            "%s has no room for %.0f MiB in flight: loading with %.0f MiB, which takes longer; max_in_flight_mib says how much",
            device,
            wanted / 2**20,
            len(memory) / 2**20,
        )
    return memory


def _checked(transport: Transport | str | None) -> Transport | str | None:
    if isinstance(transport, str) and transport not in ("torch", "engine"):
        raise ConfigurationError(
            f"transport={transport} of TwoStageLoad: expected torch or engine, a Transport, or None"
        )
    return transport


class _Said(NamedTuple):
    """What a rank tells all others first.

    Attributes:
        wants: digest of the rows that say what it wants.
        members: the ranks within which it is to be read once.
        address: where its neighbours reach it; None: nowhere.
        settings: see `TwoStageLoad._settings`.
        device: the type of device in whose memory blocks travel; None: on the host, or it wants nothing.
    """

    wants: str
    members: list[int]
    address: str | None
    settings: dict[str, Any]
    device: str | None


@dataclass(slots=True)
class TwoStageReading:
    """One rank's part in one load. See `Reading`.

    Attributes:
        worker: runs once; None: it has.
        link: was made for this load, even if it is not used.
        failed: called when this rank's part has failed, and nobody knows what is still on the network.
    """

    worker: SpreadWorker | None
    endpoints: RankEndpoints
    link: HostLink | None
    timers: Timers
    failed: Callable[[], None]

    def run(self) -> ReadStats:
        """See `Reading.run`.

        Its memory is let go of at once, for other readings may follow; and neighbours that wait for a rank which has failed hear of
        it by that, long before all ranks agree on the error.
        """
        worker, self.worker = self.worker, None
        assert worker is not None, "a reading runs once"
        try:
            self.endpoints.begin()
            self.endpoints.read_held()
            if worker.link is not None:
                worker.link.join(worker.hosts.neighbours(worker.rank), worker.topology)
            worker.run()
        except BaseException:
            self.failed()
            raise
        finally:
            for name, seconds in asdict(worker.times).items():
                self.timers[name].append(seconds)
            worker.slots.close()
            self.close()
        return ReadStats(self.endpoints.bytes_read, self.endpoints.bytes_needed)

    def close(self) -> None:
        """See `Reading.close`."""
        self.worker = None
        self.endpoints.close()
        if self.link is not None:
            self.link.close()


def _neighbours(topology: Topology, members: Sequence[int]) -> list[int]:
    here = set(topology.nodes[topology.node_rank])
    return [rank for rank in members if rank in here]


def _reaches(link: HostLink | None, said: Sequence[_Said], neighbours: Sequence[int]) -> bool:
    """Whether this rank can share memory with its neighbours; those below it are called."""
    if len(neighbours) == 1:
        return True
    addresses = [(rank, address) for rank in neighbours if (address := said[rank].address) is not None]
    return link is not None and len(addresses) == len(neighbours) and link.reach(addresses)


def _by_host(topology: Topology, members: Sequence[int], *, share: bool) -> list[list[int]]:
    """The members by host; each one its own, where they do not share memory."""
    if not share:
        return [[rank] for rank in members]
    on_hosts = ([rank for rank in ranks if rank in set(members)] for ranks in topology.nodes)
    return [ranks for ranks in on_hosts if ranks]


def _digest_of(rows: Sequence[Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(rows).encode())


def _wants_of(
    mates: Sequence[int], digests: Sequence[str], rows: Sequence[Any]
) -> list[tuple[list[Want], tuple[int, ...]]]:
    """What the ranks of this group want: everything once, with the ranks that want just that."""
    alike: dict[str, list[int]] = {}
    for rank in mates:
        alike.setdefault(digests[rank], []).append(rank)
    return [([Want.from_json(row) for row in rows[ranks[0]]], tuple(ranks)) for ranks in alike.values()]


def _require_alike(settings: Sequence[Mapping[str, Any]]) -> None:
    if (difference := first_difference(settings)) is not None:
        name, rank, here, on_lead = difference
        raise ConfigurationError(
            f"{name}: rank {rank} was given {here}, rank 0 {on_lead}; two-stage loading needs the same on all ranks"
        )


def _require_one_device(devices: Sequence[str | None]) -> None:
    first = {device: devices.index(device) for device in devices if device is not None}
    if len(first) > 1:
        ways = ", ".join(f"rank {rank} into {device} memory" for device, rank in first.items())
        raise ConfigurationError(
            f"cpu_transfer=False: {ways}; bytes cannot travel between the two so, give cpu_transfer=True"
        )
