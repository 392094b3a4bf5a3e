"""Transport with checkpoint-engine: its parameter server registers the buckets that trainers publish.

Source: verl's engine of that name, which moves weights by a receiving loop of its own over the parameter server's memory, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ckpt.engine.base import CheckpointEngineRegistry
from ckpt.engine.broadcast import BroadcastTransport
from ckpt.engine.members import Members
from ckpt.engine.parameter_server import BucketServer, Peers
from ckpt.engine.update import Transport, Update
from ckpt.engine.versioned import VersionedEngine
from ckpt.engine.wire.buffers import Buckets
from ckpt.engine.wire.pool import ReceivedStream
from ckpt.engine.wire.transfer import Network, Verifier
from ckpt.errors import ConfigurationError, RankAbsentError
from ckpt.memory.device import wait_for
from ckpt.ranks.topology import Topology

_TRANSPORTS = ("pipelined", "update")


class ParameterServerTransport(Transport):
    """Registers pools with a parameter server, and carries their buckets.

    Args:
        by_package: carry by the package's own update; else by `BroadcastTransport`.

    Attributes:
        server: of this rank; None: no ranks are joined.
    """

    def __init__(self, members: Members, buckets: Buckets, *, by_package: bool) -> None:
        self.server: BucketServer | None = None
        self._members = members
        self._buckets = buckets
        self._broadcast = BroadcastTransport(members, buckets)
        self._by_package = by_package

    def join(self, topology: Topology) -> None:
        self._broadcast.join(topology)
        store, device = self._members.store, self._buckets.device.torch_device
        assert store is not None, "the ranks are joined"
        with topology.phase("start the parameter server"):
            self.server = BucketServer(topology, store, device, memory_fraction=self._buckets.memory_fraction)

    def leave(self) -> None:
        self._broadcast.leave()
        if self.server is not None:
            self.server.give_up()
        self.server = None

    def ready(self, update: Update) -> None:
        assert self.server is not None
        self.server.register(update.pool.buckets(update.layout) if update.pool is not None else {})

    def carry(self, update: Update) -> None:
        if self._by_package:
            self._carry_by_package(update)
        else:
            self._broadcast.carry(update)

    def reset(self, landing: ReceivedStream) -> None:
        if self.server is not None:
            self.server.give_up()
        self._broadcast.reset(landing)
        if self.server is not None:
            self.server.unregister()

    def _carry_by_package(self, update: Update) -> None:
        server, layout, landing, topology = self.server, update.layout, update.arriving, update.topology
        assert server is not None
        if not layout.num_buckets:
            return
        groups, verifier = self._broadcast.groups, Verifier(update)
        hosts = {n: landing.bucket(n) for n in range(layout.num_buckets)} if landing is not None else {}

        def carry(tell: Callable[[int], None]) -> None:
            def take(number: int, bucket: torch.Tensor) -> None:
                if number in hosts:
                    hosts[number].copy_(bucket, non_blocking=True)
                    wait_for(bucket.device)
                    verifier.check(number, hosts[number])
                tell(number)

            group = groups.of(f"{update.connections}-all", range(topology.world_size))
            server.update(group, layout.bucket_bytes, topology.timeout_s, take)

        network = self._broadcast.watched(Network(carry))
        try:
            for _ in network.buckets(topology):
                continue
        except RankAbsentError as error:
            raise verifier.failure or error from error


@CheckpointEngineRegistry.register("kimi_ckpt_engine")
class KimiCheckpointEngine(VersionedEngine):
    """Registers the host pool of each trainer with a `checkpoint_engine.ParameterServer`, once for each layout.

    Args:
        transport: "pipelined": buckets travel as those of `BroadcastCheckpointEngine`. "update": the package's own
            `ParameterServer.update` broadcasts them to all ranks, trainers too, with three buckets of device memory on each, and its
            worker's loop receives them; slower, but the protocol that inference engines know.
        settings: see `VersionedEngine`.
    """

    transport: ParameterServerTransport

    def __init__(self, bucket_size: int | None = None, *, transport: str = "pipelined", **settings: Any) -> None:
        if transport not in _TRANSPORTS:
            raise ConfigurationError(f"transport={transport}: expected one of {', '.join(_TRANSPORTS)}")
        if transport == "update" and settings.get("delta"):
            raise ConfigurationError(
                "delta=true: checkpoint-engine's own update sends whole buckets; choose transport=pipelined, or delta=false"
            )
        super().__init__(bucket_size, **settings)
        self.transport = ParameterServerTransport(self.members, self.buckets, by_package=transport == "update")

    @property
    def peers(self) -> Peers | None:
        """The newest version's address for `ckpt.engine.parameter_server.read_from_peers`; None: no version, or no P2P store."""
        server = self.transport.server
        return None if server is None or self.version is None else server.peers()
