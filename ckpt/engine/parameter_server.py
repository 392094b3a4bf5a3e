"""The `checkpoint-engine` package as it is used here, and all that is changed in it: the only file that imports it.

On npu and cuda its own device layer is used. It knows no CPU, so there its two device managers and the pinning of host memory are
replaced; on every device, while an update runs, the handle of its buffer and its collectives are, because trainer and consumer
are one process, and torch's default process group is the trainer's. Each name that is re-bound, or private, is listed in
`REBOUND` and `PRIVATE`, and a test says so if one goes.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from importlib import metadata
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import torch
import torch.distributed as dist
from packaging.version import Version

from ckpt.errors import ConfigurationError

_FITTING = ("0.4.2", "0.5")
_version = metadata.version("checkpoint-engine")  # raises an ImportError of its own where there is none
if not Version(_FITTING[0]) <= Version(_version) < Version(_FITTING[1]):
    raise ImportError(
        f"checkpoint-engine {_version} is installed, and {_FITTING[0]} or later, before {_FITTING[1]}, is needed: "
        f"pip install 'checkpoint-engine>={_FITTING[0]},<{_FITTING[1]}'"
    )

import checkpoint_engine.distributed.base as ce_distributed  # noqa: E402
import checkpoint_engine.pin_memory as ce_pin_memory  # noqa: E402
import checkpoint_engine.ps as ce_ps  # noqa: E402
import checkpoint_engine.worker as ce_worker  # noqa: E402
import zmq  # noqa: E402
from checkpoint_engine.data_types import DataToGather, MemoryBuffer, ParameterMeta  # noqa: E402
from checkpoint_engine.device_utils import DeviceManager  # noqa: E402
from loguru import logger  # noqa: E402

from ckpt.engine.group import OwnGroup  # noqa: E402
from ckpt.topology import Topology  # noqa: E402

REBOUND = (
    (ce_ps, "DeviceManager"),
    (ce_worker, "DeviceManager"),
    (ce_pin_memory, "torch"),
    (ce_ps, "reduce_tensor"),
    (ce_distributed, "_BACKEND_INSTANCE"),
)
PRIVATE = ("_memory_pool", "_p2p_store", "_register_parameters_to_p2p_store", "_zmq_ctx")

_CHECKPOINT = "weights"
_NAME = "bucket-{:05d}"

logger.disable("checkpoint_engine")  # a line per bucket; logger.enable("checkpoint_engine") brings them back


class BucketServer:
    """A `ParameterServer` over buckets that lie in a host pool already. One thread at a time.

    Args:
        topology: of all ranks; metadata goes through it as JSON.
        port: free on rank 0's host, for the store of the package itself.
        device_index: of this rank's device.
    """

    def __init__(
        self,
        topology: Topology,
        address: str,
        port: int,
        *,
        device_type: str,
        device_index: int,
        memory_fraction: float,
    ) -> None:
        self._topology = topology
        self._index = device_index
        self._zmq = zmq.Context()
        if device_type == "cpu":
            use_host_memory()
        # The package takes rank 0 for unset, and then looks here; its P2P store looks nowhere else.
        with _environment({"RANK": str(topology.rank), "WORLD_SIZE": str(topology.world_size)}):
            self._server = _PooledServer(
                rank=topology.rank,
                world_size=topology.world_size,
                auto_pg=False,  # else it destroys the default process group after an update
                mem_fraction=memory_fraction,
                master_addr=address,
                master_port=port,
            )

    def register(self, buckets: Mapping[int, torch.Tensor]) -> None:
        """Make known to all ranks what this one sends, in place of what it sent before. Collective.

        Args:
            buckets: flat host memory by number; stays where it is until the next call.
        """
        self.unregister()
        self._server.adopt(_CHECKPOINT, [_memory_buffer(number, host) for number, host in sorted(buckets.items())])
        with _collectives(_Collectives(self._topology, None)):
            self._server.gather_metas(_CHECKPOINT)

    def unregister(self) -> None:
        """Forget this rank's buckets. Local; does nothing if there are none."""
        if _CHECKPOINT in self._server._memory_pool:
            self._server.unregister_checkpoint(_CHECKPOINT)

    def metas(self) -> Mapping[int, Any]:
        """What is registered, by rank, as the package keeps it."""
        metas: Mapping[int, Any] = self._server.get_metas()
        return metas

    def update(
        self, group: OwnGroup, bucket_bytes: int, timeout_s: float, take: Callable[[int, torch.Tensor], None]
    ) -> None:
        """Broadcast all buckets to all ranks by the package's own loop, and hand each to `take` in its worker's loop. Collective.

        Args:
            group: all ranks.
            take: number of the bucket, and its bytes in memory that is used again. What it raises fails the update on all ranks.

        Raises:
            RuntimeError: a rank failed; torch.distributed's own errors where one is gone.
        """

        def run(batch: Sequence[tuple[str, torch.Tensor]]) -> None:
            for name, bucket in batch:
                take(int(name.removeprefix(_NAME.format(0)[:-5])), bucket)

        def consume(handles: Sequence[tuple[str, str]]) -> None:
            path = handles[self._topology.rank][1]
            ce_worker.update_weights_from_ipc(self._zmq, path, device_id=self._index, run=run)

        limit = {"PS_MAX_BUCKET_SIZE_GB": repr(bucket_bytes / 2**30)}
        with (
            _collectives(_Collectives(self._topology, group)),
            _rebound(ce_ps, "reduce_tensor", _handle_within_process),
            _environment(limit),
        ):
            self._server.update(_CHECKPOINT, consume, timeout=timedelta(seconds=timeout_s))

    def close(self) -> None:
        """Let go of the sockets; what waits on them ends."""
        self._zmq.destroy(linger=0)
        self._server._zmq_ctx.destroy(linger=0)


class _PooledServer(ce_ps.ParameterServer):  # type: ignore[misc]
    def adopt(self, name: str, buffers: list[MemoryBuffer]) -> None:
        """Register memory that is there: `register_checkpoint` would make a copy of it."""
        self._memory_pool[name] = buffers
        if self._p2p_store is not None:
            self._register_parameters_to_p2p_store(name)


def _memory_buffer(number: int, host: torch.Tensor) -> MemoryBuffer:
    meta = ParameterMeta(
        name=_NAME.format(number), dtype=torch.uint8, shape=torch.Size([len(host)]), aligned_size=len(host)
    )
    return MemoryBuffer(buffer=host, size=len(host), metas=[meta])


class _Collectives(ce_distributed.Distributed):  # type: ignore[misc]
    """The package's collectives, among the ranks of an engine."""

    def __init__(self, topology: Topology, group: OwnGroup | None) -> None:
        self._topology = topology
        self._group = group

    def is_initialized(self) -> bool:
        return True

    def all_gather_object(self, object_list: list[Any], obj: Any, group: Any = None) -> None:
        with self._topology.phase("gather metas") as phase:
            phase.payload = obj.model_dump(mode="json")
        object_list[:] = [DataToGather.model_validate(said) for said in phase.payloads]

    def all_reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, **_: Any) -> None:
        self._of_all().all_reduce(tensor, op)

    def broadcast(self, tensor: torch.Tensor, src: int = 0, group: Any = None, **_: Any) -> None:
        self._of_all().broadcast(tensor, src).wait()

    def barrier(self, group: Any = None, **_: Any) -> None:
        self._of_all().barrier()

    def init_process_group(self, rank: int, world_size: int, store: Any, **_: Any) -> None:
        raise ConfigurationError("the engine makes its process groups itself")

    def destroy_process_group(self, group: Any = None) -> None:
        raise ConfigurationError("the engine leaves its process groups itself")

    def new_group(self, ranks: list[int], **_: Any) -> Any:
        raise ConfigurationError("updates of some ranks only need the package's P2P store")

    def _of_all(self) -> OwnGroup:
        assert self._group is not None, "an update is given its group"
        return self._group


_lent: dict[int, torch.Tensor] = {}
_numbers = itertools.count()


def _lent_buffer(number: int, *_: object) -> torch.Tensor:
    return _lent.pop(number)


def _handle_within_process(tensor: torch.Tensor) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
    """In place of a device's handle for other processes: CUDA cannot open its own. The receiver overwrites the seventh value."""
    number = next(_numbers)
    _lent[number] = tensor
    return _lent_buffer, (number, None, None, None, None, None, 0)


@contextmanager
def _collectives(ours: _Collectives) -> Iterator[None]:
    with _rebound(ce_distributed, "_BACKEND_INSTANCE", ours):
        yield


@contextmanager
def _rebound(module: ModuleType, name: str, value: Any) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


# Host memory in place of a device


class _HostModule:
    """What the package wants of torch.cuda or torch.npu, for host memory. One "device" for each rank there can be."""

    _MOST = 1 << 16

    def __init__(self) -> None:
        self._current = 0

    def device_count(self) -> int:
        return self._MOST

    def set_device(self, index: int) -> None:
        self._current = int(index)

    def current_device(self) -> int:
        return self._current

    def mem_get_info(self, device: object = None) -> tuple[int, int]:
        host = psutil.virtual_memory()
        return host.available, host.total

    def get_device_properties(self, index: int | None = None) -> SimpleNamespace:
        # The name of a socket of this host: of this process, lest two jobs meet.
        return SimpleNamespace(uuid=f"host-{os.getpid()}-{self._current if index is None else index}")

    def synchronize(self, device: object = None) -> None: ...

    def empty_cache(self) -> None: ...

    def ipc_collect(self) -> None: ...

    def memory_allocated(self, device: object = None) -> int:
        return 0

    def memory_reserved(self, device: object = None) -> int:
        return 0


class _HostDeviceManager(DeviceManager):  # type: ignore[misc]
    def _detect_device_type(self) -> str:
        return "cpu"

    def _setup_device_module(self) -> None:
        self.device_module = _HostModule()

    @property
    def backend(self) -> str:
        return "gloo"

    @property
    def transfer_engine_protocol(self) -> str:
        return "tcp"

    def rdma_device(self, rank: int) -> str:
        return ""


class _PageableTorch(ModuleType):
    """torch, except that `empty` never pins: without an accelerator it cannot."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def empty(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return torch.empty(*args, **kwargs)


def use_host_memory() -> None:
    """Let the package work on host memory, in this process, from now on. May be called again."""
    ce_ps.DeviceManager = ce_worker.DeviceManager = _HostDeviceManager
    ce_pin_memory.torch = _PageableTorch("torch")
