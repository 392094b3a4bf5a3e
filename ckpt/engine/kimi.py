"""Weights through checkpoint-engine: its parameter server holds what trainers publish, and knows who has what.

Source: verl's engine of that name, which moves weights by a receiving loop of its own over the parameter server's memory, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C._distributed_c10d import Store

from ckpt.engine.base import CheckpointEngineRegistry
from ckpt.engine.broadcast import BroadcastCheckpointEngine
from ckpt.engine.parameter_server import BucketServer, Peers
from ckpt.engine.versioned import Update
from ckpt.engine.wire.layout import WeightLayout
from ckpt.engine.wire.pool import HostPool, ReceivedStream
from ckpt.engine.wire.transfer import Network, Verifier
from ckpt.errors import ConfigurationError, RankAbsentError
from ckpt.memory.device import wait_for

_TRANSPORTS = ("pipelined", "update")


@CheckpointEngineRegistry.register("kimi_ckpt_engine")
class KimiCheckpointEngine(BroadcastCheckpointEngine):
    """The host pool of every trainer is registered with a `checkpoint_engine.ParameterServer`, once for each layout.

    Args:
        transport: "pipelined": buckets go from pool to rollout as `BroadcastCheckpointEngine` sends them. "update": the package's
            own `ParameterServer.update` sends them to all ranks, trainers too, three buckets of device memory on each, and its
            worker's loop takes them; slower, and what inference engines know.
        settings: see `VersionedEngine`.
    """

    def __init__(self, bucket_size: int | None = None, *, transport: str = "pipelined", **settings: Any) -> None:
        if transport not in _TRANSPORTS:
            raise ConfigurationError(f"transport={transport}: expected one of {', '.join(_TRANSPORTS)}")
        if transport == "update" and settings.get("delta"):
            raise ConfigurationError(
                "delta=true: checkpoint-engine's own update sends whole buckets; choose transport=pipelined, or delta=false"
            )
        super().__init__(bucket_size, **settings)
        self._transport = transport
        self._server: BucketServer | None = None

    @property
    def peers(self) -> Peers | None:
        """Where `ckpt.engine.parameter_server.read_from_peers` finds the newest version; None: there is none, or no P2P store."""
        if self._server is None or self.version is None:
            return None
        return self._server.peers()

    def _join_transport(self, store: Store) -> None:
        super()._join_transport(store)
        topology, device = self._topology(), self.device.torch_device
        with topology.phase("start the parameter server"):
            self._server = BucketServer(
                topology,
                store,
                device_type=device.type,
                device_index=device.index or 0,
                memory_fraction=self._memory_fraction,
            )

    def _leave_transport(self) -> None:
        super()._leave_transport()
        if self._server is not None:
            self._server.close()
        self._server = None

    def _ready(self, layout: WeightLayout, pool: HostPool | None) -> None:
        assert self._server is not None
        self._server.register(pool.buckets(layout) if pool is not None else {})

    def _carry(self, update: Update, pool: HostPool | None, landing: ReceivedStream | None) -> None:
        if self._transport == "pipelined":
            super()._carry(update, pool, landing)
            return
        server, groups, topology, layout = self._server, self._groups, self._topology(), update.layout
        assert server is not None
        if not layout.num_buckets:
            return
        verifier = Verifier(self.rank, layout, update.digests)
        every = range(layout.num_buckets if landing is not None else 0)
        hosts = {number: landing.bucket(number) for number in every} if landing is not None else {}

        def carry(tell: Callable[[int], None]) -> None:
            def take(number: int, bucket: torch.Tensor) -> None:
                if number in hosts:
                    hosts[number].copy_(bucket, non_blocking=True)
                    wait_for(bucket.device)
                    verifier.check(number, hosts[number])
                tell(number)

            group = self._group(groups, "all", range(topology.world_size))
            server.update(group, layout.bucket_bytes, self.timeout_s, take)

        self._network = Network(carry)
        try:
            for _ in self._network.buckets(topology, self.timeout_s):
                continue
        except RankAbsentError as error:
            raise verifier.failure or error from error

    def _reset_transport(self) -> None:
        if self._server is not None:
            self._server.give_up()
        super()._reset_transport()
        if self._server is not None:
            self._server.unregister()
