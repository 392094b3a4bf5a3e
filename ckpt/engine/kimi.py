"""Weights through checkpoint-engine: its parameter server holds what trainers publish, and knows who has what.

Source: verl's engine of that name, which moves weights by a receiving loop of its own over the parameter server's memory, too.
"""

from __future__ import annotations

import socket
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch
from torch._C._distributed_c10d import Store

from ckpt.device import same_device, wait_for
from ckpt.engine.base import CheckpointEngineRegistry
from ckpt.engine.broadcast import BroadcastCheckpointEngine
from ckpt.engine.group import OwnGroup
from ckpt.engine.layout import WeightLayout
from ckpt.engine.parameter_server import BucketServer
from ckpt.engine.pool import HostPool, Landing
from ckpt.engine.transfer import Verifier, await_news
from ckpt.engine.versioned import Update
from ckpt.errors import ConfigurationError

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
        super().__init__(bucket_size, **settings)
        self._transport = transport
        self._server: BucketServer | None = None
        self._all: OwnGroup | None = None

    def _join_transport(self, store: Store) -> None:
        super()._join_transport(store)
        topology = self._topology()
        with topology.phase("meet") as phase:
            phase.payload = _free_port() if topology.is_lead else None
        device = self.device.torch_device
        with topology.phase("start the parameter server"):
            self._server = BucketServer(
                topology,
                self._address,
                phase.payloads[0],
                device_type=device.type,
                device_index=device.index or 0,
                memory_fraction=self._memory_fraction,
            )

    def _leave_transport(self) -> None:
        super()._leave_transport()
        if self._server is not None:
            self._server.close()
        if self._all is not None:
            self._all.close()
        self._server = self._all = None

    def _ready(self, layout: WeightLayout, pool: HostPool | None) -> None:
        assert self._server is not None
        self._server.register(pool.buckets(layout) if pool is not None else {})
        if self._transport == "pipelined":
            super()._ready(layout, pool)
        elif self._all is None:
            name = f"{self._groups_name}-{self._generation}-all"
            ranks = range(self._topology().world_size)
            self._all = OwnGroup(
                self._store, name, ranks, self.rank, backends=self.device.backends, timeout_s=self.timeout_s
            )

    def _carry(self, update: Update, pool: HostPool | None, landing: Landing | None) -> None:
        if self._transport == "pipelined":
            super()._carry(update, pool, landing)
            return
        assert self._server is not None and self._all is not None
        server, group, layout = self._server, self._all, update.layout
        verifier = Verifier(self.rank, layout, update.digests)
        news: SimpleQueue[int | BaseException | None] = SimpleQueue()
        begin = same_device()

        def take(number: int, bucket: torch.Tensor) -> None:
            if landing is not None:
                host = landing.bucket(number)
                host.copy_(bucket, non_blocking=True)
                wait_for(bucket.device)
                verifier.check(number, host)
            news.put(number)

        def work() -> None:
            begin()
            try:
                server.update(group, layout.bucket_bytes, self.timeout_s, take)
            except BaseException as error:
                news.put(error)
            else:
                news.put(None)

        if not layout.num_buckets:
            return
        thread = Thread(target=work, name="ckpt-weights", daemon=True)
        thread.start()
        while await_news(news, self._topology(), self.timeout_s, verifier) is not None:
            continue
        thread.join()

    def _reset_transport(self) -> None:
        super()._reset_transport()
        if self._all is not None:
            self._all.abort()
        self._all = None


def _free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
