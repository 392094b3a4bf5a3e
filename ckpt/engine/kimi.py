"""Transport with checkpoint-engine: its parameter server registers the buckets that trainers publish.

Source: verl's engine of that name, which moves weights by a receiving loop of its own over the parameter server's memory, too.
"""

from __future__ import annotations

from typing import Any

from ckpt.engine.base import CheckpointEngineRegistry
from ckpt.engine.broadcast import BroadcastTransport
from ckpt.engine.parameter_server import BucketServer, Peers
from ckpt.engine.update import Update
from ckpt.engine.versioned import VersionedEngine
from ckpt.engine.wire.pool import ReceivedStream
from ckpt.ranks.topology import Topology


class ParameterServerTransport(BroadcastTransport):
    """Registers pools with a parameter server, and broadcasts their buckets.

    Attributes:
        server: of this rank; None: no ranks are joined.
    """

    server: BucketServer | None = None

    def join(self, topology: Topology) -> None:
        super().join(topology)
        with topology.phase("start the parameter server"):
            self.server = BucketServer(topology, self._buckets.device.torch_device)

    def leave(self) -> None:
        super().leave()
        self.server = None

    def ready(self, update: Update) -> None:
        assert self.server is not None, "the ranks are joined"
        self.server.register(update.pool.buckets(update.layout) if update.pool is not None else {})

    def reset(self, receive_buffer: ReceivedStream) -> None:
        super().reset(receive_buffer)
        if self.server is not None:
            self.server.unregister()


@CheckpointEngineRegistry.register("kimi_ckpt_engine")
class KimiCheckpointEngine(VersionedEngine):
    """Registers the host pool of each trainer with a `checkpoint_engine.ParameterServer`, once for each layout.

    Buckets travel as those of `BroadcastCheckpointEngine`. Other processes can read them from the trainers' memory by `peers`.

    Args: see `VersionedEngine`.
    """

    transport: ParameterServerTransport

    def __init__(self, bucket_size: int | None = None, **settings: Any) -> None:
        super().__init__(bucket_size, **settings)
        self.transport = ParameterServerTransport(self.members, self.buckets)

    @property
    def peers(self) -> Peers | None:
        """The newest version's address for `ckpt.engine.parameter_server.read_from_peers`; None: no version, or no P2P store."""
        server = self.transport.server
        return None if server is None or self.version is None else server.peers()
