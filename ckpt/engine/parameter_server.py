"""The `checkpoint-engine` package as it is used here. The only file that imports it.

Its device layer serves npu and cuda: on CPUs a server gets a device manager of this file. On all devices it gathers by the agreement of
the engine's ranks, for torch's default process group is the trainer's, and it has no store, for its own update is not used. Its rank is not
that of the environment. Three methods of the package run with other globals for that: no name of it is re-bound, except by
`use_host_memory`. `REPLACED` and `PRIVATE` list each name that is replaced in a method, or private; a test notices if one goes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import metadata
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import psutil
import torch
from packaging.version import Version

from ckpt.errors import ConfigurationError, RankLeftError

_FITTING = ("0.4.2", "0.5")
_version = metadata.version("checkpoint-engine")  # raises an ImportError if it is not installed
if not Version(_FITTING[0]) <= Version(_version) < Version(_FITTING[1]):
    raise ImportError(
        f"checkpoint-engine {_version} is installed, and {_FITTING[0]} or later, before {_FITTING[1]}, is needed: "
        f"pip install 'checkpoint-engine>={_FITTING[0]},<{_FITTING[1]}'"
    )

import checkpoint_engine.pin_memory as ce_pin_memory  # noqa: E402
import checkpoint_engine.ps as ce_ps  # noqa: E402
import checkpoint_engine.worker as ce_worker  # noqa: E402
from checkpoint_engine.data_types import DataToGather, MemoryBuffer, ParameterMeta  # noqa: E402
from checkpoint_engine.device_utils import DeviceManager  # noqa: E402
from loguru import logger  # noqa: E402

from ckpt.ranks.topology import Topology  # noqa: E402

REPLACED = {
    ce_ps.ParameterServer.__init__: ("DeviceManager", "P2PStore", "os", "torch"),
    ce_ps.ParameterServer.gather_metas: ("dist",),
    ce_ps.P2PStore.__init__: ("os",),
}
"""Global names that are replaced, by the method of the package."""
PRIVATE = ("_local_rank", "_memory_pool", "_p2p_store", "_register_parameters_to_p2p_store", "_zmq_ctx")

Peers = list[tuple[str, list[tuple[int, int, int]]]]
"""For each trainer its address, and for each of its buckets the number, the address in its memory, and the size in bytes."""

_CHECKPOINT = "weights"

logger.disable("checkpoint_engine")  # a line per bucket; logger.enable("checkpoint_engine") brings them back


class BucketServer(ce_ps.ParameterServer):  # type: ignore[misc]
    """A `ParameterServer` of buckets that are in a host pool already: it makes no copies of them. One thread at a time.

    Args:
        topology: of all ranks; exchanges metadata as JSON.
        device: of this rank.
    """

    def __init__(self, topology: Topology, device: torch.device) -> None:
        self._device_index = device.index or 0
        begin = _with_names(
            ce_ps.ParameterServer.__init__,
            DeviceManager=_device_manager(device.type),
            P2PStore=partial(_p2p_store, number=topology.rank),
            os=_os_of_rank(topology.rank),  # the package takes rank 0 for unset, and then reads the environment
            torch=_With(torch, distributed=_With(torch.distributed, TCPStore=lambda *_, **__: None)),
        )
        begin(
            self,
            rank=topology.rank,
            world_size=topology.world_size,
            auto_pg=False,  # else it makes the default process group
            master_addr="none: it has no store",
            master_port=1,
        )
        self._zmq_ctx.term()
        self._gather = _with_names(ce_ps.ParameterServer.gather_metas, dist=_Collectives(topology))

    @property
    def _local_rank(self) -> int:
        return self._device_index

    @_local_rank.setter
    def _local_rank(self, _: int) -> None:
        """Ignore the package's value, the rank modulo the number of devices."""

    def register(self, buckets: Mapping[int, torch.Tensor]) -> None:
        """Register the buckets that this rank sends, in place of those before, and tell all ranks. Collective.

        Args:
            buckets: flat host memory by number; must not move until the next call.
        """
        self.unregister()
        self._memory_pool[_CHECKPOINT] = [_memory_buffer(number, host) for number, host in sorted(buckets.items())]
        if self._p2p_store is not None:
            self._register_parameters_to_p2p_store(_CHECKPOINT)
        self._gather(self, _CHECKPOINT)

    def unregister(self) -> None:
        """Forget this rank's buckets. Local; does nothing if there are none."""
        if _CHECKPOINT in self._memory_pool:
            self.unregister_checkpoint(_CHECKPOINT)

    def peers(self) -> Peers | None:
        """Return the registered buckets for `read_from_peers`; None: there are none, or the package has no P2P store here."""
        found: Peers = []
        for items in self.get_metas().values():
            if items.p2p_store_addr is None:
                return None
            buffers = [(_number(of.metas[0].name), of.ptr, of.size) for of in items.memory_buffer_metas_list]
            found.append((items.p2p_store_addr, buffers))
        return found or None


def _memory_buffer(number: int, host: torch.Tensor) -> MemoryBuffer:
    size, name = len(host), f"bucket-{number:05d}"
    meta = ParameterMeta(name=name, dtype=torch.uint8, shape=torch.Size([size]), aligned_size=size)
    return MemoryBuffer(buffer=host, size=size, metas=[meta])


def _number(name: str) -> int:
    return int(name.removeprefix("bucket-"))


class _Collectives:
    """The functions of `checkpoint_engine.distributed` that `gather_metas` calls, among the ranks of an engine.

    Source: `checkpoint_engine.distributed.base.Distributed`.
    """

    def __init__(self, topology: Topology) -> None:
        self._topology = topology

    def is_initialized(self) -> bool:
        return True

    def all_gather_object(self, object_list: list[Any], obj: Any) -> None:
        with self._topology.phase("gather metas") as phase:
            phase.payload = obj.model_dump(mode="json")
        object_list[:] = [DataToGather.model_validate(payload) for payload in phase.payloads]


def _p2p_store(manager: DeviceManager, number: int) -> Any:
    """Make the package's P2P store for the network device of this number; it takes that from the rank in the environment."""
    store = ce_ps.P2PStore.__new__(ce_ps.P2PStore)
    _with_names(ce_ps.P2PStore.__init__, os=_os_of_rank(number))(store, manager)
    return store


def _os_of_rank(rank: int) -> _With:
    return _With(os, environ={**os.environ, "RANK": str(rank)})


def _with_names(method: Any, **names: Any) -> Callable[..., Any]:
    """Return a function of the package that finds these objects under global names."""
    made = FunctionType(method.__code__, method.__globals__ | names, method.__name__, closure=method.__closure__)
    made.__defaults__, made.__kwdefaults__ = method.__defaults__, method.__kwdefaults__
    return made


class _With:
    """Stands for a module, with other values of some attributes."""

    def __init__(self, module: ModuleType, **values: Any) -> None:
        self.__dict__.update(values, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def worker_name(device_index: int) -> str:
    """Return the name under which an inference engine's worker on this device looks up its weights, as the package makes it.

    "GPU-<uuid>" on cuda, for any visible device; "NPU-<address>-<chip>" on npu, for the current device.

    Raises:
        ConfigurationError: the name cannot be found out.
    """
    try:
        return str(ce_ps._get_physical_gpu_id(ce_ps.DeviceManager(), device_index))
    except (AssertionError, ValueError, TypeError, OSError) as error:
        raise ConfigurationError(
            f"the name of device {device_index} for the workers of an inference engine cannot be found out here: {error}; set it yourself"
        ) from error


def read_from_peers(
    peers: Sequence[Sequence[Any]], buckets: Mapping[int, torch.Tensor], *, device_type: str, device_index: int = 0
) -> None:
    """Read buckets from the trainers' host memory through the package's P2P store, in a process that has not joined.

    The trainers may change them meanwhile: compare the bytes with their digests.

    Args:
        peers: result of `BucketServer.peers` on a trainer, as JSON or not.
        buckets: flat host memory by number.

    Raises:
        ConfigurationError: mooncake, which the package needs for this, is not installed or does not work here.
        RankLeftError: a trainer is gone, or has no such bucket.
    """
    where = {number: (address, pointer, size) for address, of in peers for number, pointer, size in of}
    missing = buckets.keys() - where.keys()
    if missing or any(where[number][2] != len(host) for number, host in buckets.items()):
        raise RankLeftError(f"the trainers have other buckets than the {len(buckets)} that are to be read from them")
    try:
        store = _p2p_store(_device_manager(device_type)(), device_index)
    except ImportError as error:
        raise ConfigurationError(
            f"weights are read from trainers' memory by the package mooncake, which could not be imported: {error}; see "
            "checkpoint-engine's p2p extra"
        ) from error
    own = {f"bucket {number}": host for number, host in buckets.items()}
    try:
        store.register_named_tensors(own)
        for address in dict.fromkeys(where[number][0] for number in buckets):
            there = [number for number in buckets if where[number][0] == address]
            store.batch_transfer_sync_read(
                address,
                [buckets[number].data_ptr() for number in there],
                [where[number][1] for number in there],
                [len(buckets[number]) for number in there],
            )
    except (AssertionError, RuntimeError) as error:  # the package asserts that the transfer engine returns 0
        raise RankLeftError(
            "weights could not be read from a trainer's memory: it is gone, or does not answer"
        ) from error
    finally:
        with suppress(AssertionError, KeyError):
            store.unregister_named_tensors([*own])


# Host memory in place of a device


def _nothing(*_: object) -> int:
    return 0


_HOST_MODULE = SimpleNamespace(
    device_count=lambda: 1 << 16,  # more than any job has ranks
    set_device=_nothing,
    synchronize=_nothing,
    empty_cache=_nothing,
    ipc_collect=_nothing,
    memory_allocated=_nothing,
    memory_reserved=_nothing,
    mem_get_info=lambda: (psutil.virtual_memory().available, psutil.virtual_memory().total),
    # The name of a socket of this host, unique to this process, for there may be other jobs.
    get_device_properties=lambda index: SimpleNamespace(uuid=f"host-{os.getpid()}-{index}"),
)
"""The functions of torch.cuda or torch.npu that the package calls, for host memory."""


class _HostDeviceManager(DeviceManager):  # type: ignore[misc]
    def _detect_device_type(self) -> str:
        return "cpu"

    def _setup_device_module(self) -> None:
        self.device_module = _HOST_MODULE

    @property
    def backend(self) -> str:
        return "gloo"

    @property
    def transfer_engine_protocol(self) -> str:
        return "tcp"

    def rdma_device(self, rank: int) -> str:
        return ""


def _device_manager(device_type: str) -> type[DeviceManager]:
    return _HostDeviceManager if device_type == "cpu" else ce_ps.DeviceManager


def _pageable(*args: Any, pin_memory: bool = False, **named: Any) -> torch.Tensor:
    """`torch.empty` without pinning, which needs an accelerator."""
    return torch.empty(*args, **named)


def use_host_memory() -> None:
    """Make the whole package work on host memory, in this process, for good. May be called again."""
    ce_ps.DeviceManager = ce_worker.DeviceManager = _HostDeviceManager
    ce_pin_memory.torch = _With(torch, empty=_pageable)
