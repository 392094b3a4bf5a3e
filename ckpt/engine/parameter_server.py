"""The `checkpoint-engine` package as it is used here, and all changes to it. The only file that imports it.

Its own device layer serves npu and cuda. It does not support CPUs: there its device managers are replaced. Replaced on all devices are
the handle of its buffer, for trainer and consumer are one process; its collectives, for torch's default process group is the trainer's;
its store, for the ranks have one; and the garbage collections, five in an update, which take longer than a small update and find nothing.
A name is re-bound while a thread of this file needs it, and keeps its value in all other threads. `REBOUND` and `PRIVATE` list each name
that is re-bound, or private; a test notices if one goes.
"""

from __future__ import annotations

import gc
import itertools
import os
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from importlib import metadata
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import torch
import torch.distributed as dist
from packaging.version import Version
from torch.distributed import PrefixStore, Store

from ckpt.errors import ConfigurationError, RankLeftError

_FITTING = ("0.4.2", "0.5")
_version = metadata.version("checkpoint-engine")  # raises an ImportError if it is not installed
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

from ckpt.engine.wire.group import OwnGroup  # noqa: E402
from ckpt.ranks.topology import Topology  # noqa: E402
from ckpt.ranks.waiting import poll_until  # noqa: E402

REBOUND = (
    (ce_ps, "DeviceManager"),
    (ce_worker, "DeviceManager"),
    (ce_ps, "torch"),
    (ce_ps, "reduce_tensor"),
    (ce_ps, "gc"),
    (ce_worker, "gc"),
    (ce_distributed, "_BACKEND_INSTANCE"),
    (ce_pin_memory, "torch"),  # by `use_host_memory` alone
)
PRIVATE = (
    "_detect_bucket_size",
    "_device_uuid",
    "_local_rank",
    "_memory_pool",
    "_p2p_store",
    "_register_parameters_to_p2p_store",
    "_zmq_ctx",
)

Peers = list[tuple[str, list[tuple[int, int, int]]]]
"""For each trainer its address, and for each of its buckets the number, the address in its memory, and the size in bytes."""

_CHECKPOINT = "weights"
_NAME = "bucket-{:05d}"

logger.disable("checkpoint_engine")  # a line per bucket; logger.enable("checkpoint_engine") brings them back


class BucketServer:
    """A `ParameterServer` over buckets that are in a host pool already. One thread at a time.

    Args:
        topology: of all ranks; exchanges metadata as JSON.
        store: of all ranks.
        device: of this rank.
    """

    def __init__(self, topology: Topology, store: Store, device: torch.device, *, memory_fraction: float) -> None:
        self._topology = topology
        self._index = device.index or 0
        self._is_host = device.type == "cpu"
        self._messages = _Messages()
        ours = _torch_with(PrefixStore("checkpoint-engine", store))
        with self._package(), _rebound({(ce_ps, "torch"): ours}):
            self._server = _PooledServer(
                self._index, topology.rank, topology.world_size, memory_fraction=memory_fraction
            )

    def register(self, buckets: Mapping[int, torch.Tensor]) -> None:
        """Register the buckets that this rank sends, in place of those before, and tell all ranks. Collective.

        Args:
            buckets: flat host memory by number; must not move until the next call.
        """
        self.unregister()
        self._server.adopt(_CHECKPOINT, [_memory_buffer(number, host) for number, host in sorted(buckets.items())])
        with self._package():
            self._server.gather_metas(_CHECKPOINT)

    def unregister(self) -> None:
        """Forget this rank's buckets. Local; does nothing if there are none."""
        if _CHECKPOINT in self._server._memory_pool:
            self._server.unregister_checkpoint(_CHECKPOINT)

    def peers(self) -> Peers | None:
        """Return the registered buckets for `read_from_peers`; None: there are none, or the package has no P2P store here."""
        found: Peers = []
        for items in self._server.get_metas().values():
            if items.p2p_store_addr is None:
                return None
            buffers = [(_number(of.metas[0].name), of.ptr, of.size) for of in items.memory_buffer_metas_list]
            found.append((items.p2p_store_addr, buffers))
        return found or None

    def update(
        self, group: OwnGroup, bucket_bytes: int, timeout_s: float, take: Callable[[int, torch.Tensor], None]
    ) -> None:
        """Broadcast all buckets to all ranks by the package's own loop; its worker's loop gives each to `take`. Collective.

        Args:
            group: of all ranks.
            take: gets the number of a bucket, and its bytes in memory that is reused. Its errors fail the update on all ranks.

        Raises:
            RuntimeError: a rank failed; an error of torch.distributed, if a rank is gone.
        """

        def run(batch: Sequence[tuple[str, torch.Tensor]]) -> None:
            for name, bucket in batch:
                take(_number(name), bucket)

        def consume(handles: Sequence[tuple[str, str]]) -> None:
            path = handles[self._topology.rank][1]
            # The thread that started this one raises its errors: it gets them as messages, or sent them.
            with suppress(Exception), messages.ended_on_error(), self._package():
                ce_worker.update_weights_from_ipc(messages, path, device_id=self._index, run=run)

        with _Messages() as messages:
            self._messages = self._server._zmq_ctx = messages
            self._server.bucket_bytes = bucket_bytes
            with self._package(group):
                self._server.update(_CHECKPOINT, consume, timeout=timedelta(seconds=timeout_s))

    def give_up(self) -> None:
        """End an update that may hang in another thread. Later updates are possible."""
        self._messages.give_up()

    @contextmanager
    def _package(self, group: OwnGroup | None = None) -> Iterator[None]:
        """Give the package's names the values that this server needs, in this thread."""
        meanings: dict[tuple[ModuleType, str], Any] = {
            (ce_distributed, "_BACKEND_INSTANCE"): _Collectives(self._topology, group, self._messages),
            (ce_ps, "reduce_tensor"): _handle_within_process,
            (ce_ps, "gc"): _NO_GARBAGE,
            (ce_worker, "gc"): _NO_GARBAGE,
        }
        with _rebound(meanings | (_HOST_DEVICE if self._is_host else {})):
            yield


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
    with _rebound(_HOST_DEVICE if device_type == "cpu" else {}):
        store = _p2p_store(device_index)
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


def _p2p_store(device_index: int) -> Any:
    try:
        with _environment({"RANK": str(device_index)}):  # determines its network device
            return ce_ps.P2PStore(ce_ps.DeviceManager())
    except ImportError as error:
        raise ConfigurationError(
            f"weights are read from trainers' memory by the package mooncake, which could not be imported: {error}; see "
            "checkpoint-engine's p2p extra"
        ) from error


class _PooledServer(ce_ps.ParameterServer):  # type: ignore[misc]
    """The package's server with three changes: registered memory is not copied, no barriers, the engine's size of buckets.

    Attributes:
        bucket_bytes: the largest size of a bucket.
    """

    bucket_bytes = 0

    def __init__(self, device_index: int, rank: int, world_size: int, *, memory_fraction: float) -> None:
        self._device_index = device_index
        # The package takes rank 0 for unset, and then reads the environment; its P2P store always does.
        with _environment({"RANK": str(rank), "WORLD_SIZE": str(world_size)}):
            super().__init__(
                rank=rank,
                world_size=world_size,
                auto_pg=False,  # else it destroys the default process group after an update
                mem_fraction=memory_fraction,
                master_addr="none: it is given our store",
                master_port=1,
            )
        self._zmq_ctx.term()
        # The name of a socket of this host: two jobs, or ranks, on one device shall not meet.
        self._device_uuid = uuid.uuid4().hex

    @property
    def _local_rank(self) -> int:
        return self._device_index

    @_local_rank.setter
    def _local_rank(self, _: int) -> None:
        """Ignore the package's value, the rank modulo the number of devices."""

    def adopt(self, name: str, buffers: list[MemoryBuffer]) -> None:
        """Register existing memory, of which `register_checkpoint` would make a copy."""
        self._memory_pool[name] = buffers
        if self._p2p_store is not None:
            self._register_parameters_to_p2p_store(name)

    def store_based_barrier(self, timeout: timedelta = timedelta(0)) -> None:
        """Do nothing: an update is within a phase, and the package's barrier would wait minutes for a rank that is gone."""

    def _detect_bucket_size(self, *args: Any, **named: Any) -> tuple[int, bool]:
        """Limit the size by `bucket_bytes`, in place of the environment."""
        size, in_place = super()._detect_bucket_size(*args, **named)
        return min(size, self.bucket_bytes), in_place


def _number(name: str) -> int:
    return int(name.removeprefix(_NAME.format(0)[:-5]))


def _memory_buffer(number: int, host: torch.Tensor) -> MemoryBuffer:
    meta = ParameterMeta(
        name=_NAME.format(number), dtype=torch.uint8, shape=torch.Size([len(host)]), aligned_size=len(host)
    )
    return MemoryBuffer(buffer=host, size=len(host), metas=[meta])


class _Collectives:
    """The collectives that the package calls, among the ranks of an engine. After one has failed all fail, and no message is waited for.

    Source of the methods: `checkpoint_engine.distributed.base.Distributed`.
    """

    def __init__(self, topology: Topology, group: OwnGroup | None, messages: _Messages) -> None:
        self._topology = topology
        self._group = group
        self._messages = messages

    def is_initialized(self) -> bool:
        return True

    def all_gather_object(self, object_list: list[Any], obj: Any, group: Any = None) -> None:
        with self._topology.phase("gather metas") as phase:
            phase.payload = obj.model_dump(mode="json")
        object_list[:] = [DataToGather.model_validate(said) for said in phase.payloads]

    def all_reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, **_: Any) -> None:
        with self._of_all() as ours:
            ours.all_reduce(tensor, op)

    def broadcast(self, tensor: torch.Tensor, src: int = 0, group: Any = None, **_: Any) -> None:
        with self._of_all() as ours:
            ours.broadcast(tensor, src)()

    def barrier(self, group: Any = None, **_: Any) -> None:
        with self._of_all() as ours:
            ours.barrier()

    @contextmanager
    def _of_all(self) -> Iterator[OwnGroup]:
        assert self._group is not None, "an update is given its group"
        with self._messages.ended_on_error():
            self._messages.require_open()
            yield self._group


# The messages between the package's server and its worker's loop, which wait for each other without a timeout


class _Messages:
    """In place of a zmq context, for one update: makes sockets whose waits can be ended. The block of an update closes them."""

    def __init__(self) -> None:
        self._sockets: list[_PatientSocket] = []
        self._is_over = threading.Event()

    def socket(self, kind: int) -> zmq.Socket[bytes]:
        made = _PatientSocket(self._context, kind)
        made.require_open = self.require_open
        self._sockets.append(made)
        return made

    def require_open(self) -> None:
        """Raise if the waits have been ended."""
        if self._is_over.is_set():
            raise RankLeftError("the update was given up")

    @contextmanager
    def ended_on_error(self) -> Iterator[None]:
        """End all waits if the block raises, for its messages will not come."""
        try:
            yield
        except BaseException:
            self.give_up()
            raise

    def give_up(self) -> None:
        """End all waits. Any thread."""
        self._is_over.set()

    def __enter__(self) -> _Messages:
        self._context = zmq.Context()
        return self

    def __exit__(self, *_: object) -> None:
        for made in self._sockets:
            made.close(linger=0)
        self._context.term()


class _PatientSocket(zmq.Socket[bytes]):
    """A socket between two threads: whatever address the package gives, it is one of this process.

    Attributes:
        require_open: raises if the waits have been ended.
    """

    require_open: Callable[[], None]

    def bind(self, addr: str) -> Any:
        return super().bind(_within_process(addr))

    def connect(self, addr: str) -> Any:
        return super().connect(_within_process(addr))

    def recv(self, *args: Any, **named: Any) -> Any:
        poll_until(lambda: self.poll(200) or None, look=self.require_open, nap=None)
        return super().recv(*args, **named)


def _within_process(address: str) -> str:
    return f"inproc://{address.removeprefix('ipc://')}"


_lent: dict[int, torch.Tensor] = {}
"""Registry of buffers on their way to the worker's loop, by number: a message is a pickle, and cannot hold a tensor's memory."""
_numbers = itertools.count()


def _lent_buffer(number: int, *_: object) -> torch.Tensor:
    return _lent.pop(number)


def _handle_within_process(tensor: torch.Tensor) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
    """In place of a handle for other processes, which CUDA cannot open in the same one. The receiver sets the seventh argument."""
    number = next(_numbers)
    _lent[number] = tensor
    return _lent_buffer, (number, None, None, None, None, None, 0)


class _Name:
    """A name of the package with another value in threads that give it one; in all other threads it keeps its own."""

    def __init__(self, module: ModuleType, name: str) -> None:
        self._module, self._name = module, name
        self._own = threading.local()
        self._users = 0
        self._lock = threading.Lock()
        self._before: Any = None

    @contextmanager
    def meaning(self, value: Any) -> Iterator[None]:
        outer = getattr(self._own, "value", None)
        with self._lock:
            if not self._users:
                self._before = getattr(self._module, self._name)
                setattr(self._module, self._name, _Proxy(self._now))
            self._users += 1
        self._own.value = value
        try:
            yield
        finally:
            self._own.value = outer
            with self._lock:
                self._users -= 1
                if not self._users:
                    setattr(self._module, self._name, self._before)

    def _now(self) -> Any:
        value = getattr(self._own, "value", None)
        return self._before if value is None else value


class _Proxy:
    """Stands for the object that `now` returns, except for the attributes in `names`."""

    def __init__(self, now: Callable[[], Any], **names: Any) -> None:
        self.__dict__.update(names, _now=now)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_now"](), name)

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self.__dict__["_now"]()(*args, **named)


_NAMES = {place: _Name(*place) for place in REBOUND}
_NO_GARBAGE = _Proxy(lambda: gc, collect=lambda: 0)


@contextmanager
def _rebound(meanings: Mapping[tuple[ModuleType, str], Any]) -> Iterator[None]:
    """Give names of the package other values, in this thread."""
    with ExitStack() as names:
        for place, value in meanings.items():
            names.enter_context(_NAMES[place].meaning(value))
        yield


def _torch_with(store: Store) -> _Proxy:
    """Return torch, in which each new TCPStore is this store."""
    distributed = _Proxy(lambda: dist, TCPStore=lambda *_, **__: store)
    return _Proxy(lambda: torch, distributed=distributed)


_environment_lock = threading.Lock()


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    with _environment_lock:
        before = {name: os.environ.get(name) for name in values}
        os.environ.update(values)
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name, None) if value is None else os.environ.update({name: value})


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


_HOST_DEVICE = {(ce_ps, "DeviceManager"): _HostDeviceManager, (ce_worker, "DeviceManager"): _HostDeviceManager}


def _pageable(*args: Any, pin_memory: bool = False, **named: Any) -> torch.Tensor:
    """`torch.empty` without pinning, which needs an accelerator."""
    return torch.empty(*args, **named)


def use_host_memory() -> None:
    """Make the whole package work on host memory, in this process, for good. May be called again."""
    ce_ps.DeviceManager = ce_worker.DeviceManager = _HostDeviceManager
    ce_pin_memory.torch = _Proxy(lambda: torch, empty=_pageable)
