"""A contender of weight updates: checkpoint-engine's ParameterServer, all weights copied off and registered anew for each update.

Source of the order of calls: verl's engine of that name, and the examples of the package itself. Its update needs a worker's loop on
every rank, trainers too; here it is a thread of the rank.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import checkpoint_engine.ps as ce_ps
import torch
import torch.distributed as dist
import zmq
from checkpoint_engine.worker import update_weights_from_ipc

from ckpt.engine.parameter_server import use_host_memory
from recipes.benchmark.measuring import gathered
from recipes.benchmark.update_contenders import Contender, Seconds, Stopwatch, UpdateEndpoints
from recipes.support.ranks import environment_with

THREADS = 32
"""That copy weights to the host; as many as verl has."""
_CHECKPOINT = "weights"
_FIRST_SOCKET = 1 << 24
"""Number of the first one, whose name holds the device: so far from those of our own server in this process."""


class Reference(Contender):
    """The parameter server of one rank. Each of T trainers owns every T-th tensor.

    Args:
        is_tuned: use the package's memory pool, which is made once, and hand it tensors that are on the host as they are. Otherwise each
            update copies to new host tensors, from which the server copies to new memory of its own.
    """

    def __init__(self, ends: UpdateEndpoints, *, is_tuned: bool) -> None:
        super().__init__(ends)
        self._is_tuned = is_tuned
        topology, device = ends.topology, ends.device.torch_device
        self._index = device.index or 0
        self._zmq = zmq.Context()
        self._limit = {"PS_MAX_BUCKET_SIZE_GB": repr(ends.bucket_bytes / 2**30)}
        self._targets: Mapping[str, torch.Tensor] = {} if ends.is_trainer else ends.weights.tensors
        host, port = gathered([socket.gethostname(), _free_port()], topology)[0]
        if device.type == "cpu":
            use_host_memory()
        ranks = {"rank": topology.rank, "world_size": topology.world_size}
        master = "127.0.0.1" if len(topology.nodes) == 1 else host
        with topology.phase("start the parameter server"), environment_with({name.upper(): str(at) for name, at in ranks.items()}):
            self._server = ce_ps.ParameterServer(**ranks, auto_pg=False, master_addr=master, master_port=port)
        self._server._zmq_addr_counter = _FIRST_SOCKET * (1 + is_tuned)

    def update(self, step: int) -> Seconds:
        server, stopwatch = self._server, Stopwatch()
        seconds: Seconds = {}
        if self.ends.is_trainer:
            self._offload()
            seconds["offload_s"] = stopwatch.lap()
        dist.barrier()  # a rank that waits for trainers does not gather yet
        stopwatch.lap()
        server.gather_metas(_CHECKPOINT)
        seconds["gather_s"] = stopwatch.lap()
        with environment_with(self._limit), _within_process():
            server.update(_CHECKPOINT, self._consume)
        seconds["transfer_s"] = stopwatch.lap()
        if self.ends.is_trainer:
            server.unregister_checkpoint(_CHECKPOINT)
        self.num_buckets = self.num_buckets or self._count()
        return seconds

    def close(self) -> None:
        self._server.unregister_checkpoint(_CHECKPOINT, force=True)
        self._zmq.destroy(linger=0)

    def _offload(self) -> None:
        ends = self.ends
        owned = {name: ends.weights.tensors[name] for name, *_ in ends.rows[ends.topology.rank :: len(ends.trainers)]}
        if not (self._is_tuned and ends.device.type == "cpu"):
            with ThreadPoolExecutor(THREADS) as threads:
                owned = dict(threads.map(lambda item: (item[0], _on_host(item[1])), owned.items()))
            ends.device.synchronize()
        self._server.register_checkpoint(
            _CHECKPOINT, named_tensors=owned, use_shared_memory_pool=self._is_tuned, use_inplace_pin_memory=False
        )

    def _consume(self, handles: Sequence[tuple[str, str]]) -> None:
        path = handles[self.ends.topology.rank][1]
        update_weights_from_ipc(self._zmq, path, device_id=self._index, run=self._load)

    def _load(self, batch: Sequence[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in batch:
            if name in self._targets:  # a trainer only listens
                self._targets[name].copy_(tensor, non_blocking=True)

    def _count(self) -> int:
        """Count the buckets that it makes of the registered tensors."""
        held = self._server.get_metas()
        buffers = [buffer for items in held.values() for buffer in items.memory_buffer_metas_list]
        largest = max(meta.aligned_size for buffer in buffers for meta in buffer.metas)
        return len(ce_ps._gen_h2d_buckets(held, max(self.ends.bucket_bytes, largest), {}, {}))


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Copy to new host memory, from the host too: host weights stand for those of an accelerator."""
    return tensor.clone() if tensor.is_cpu else tensor.to("cpu", non_blocking=True)


_lent: dict[int, torch.Tensor] = {}
"""Buffers on their way to the worker in this process. Their handles travel pickled, so they are found here by number."""


def _borrowed(number: int, *_: object) -> torch.Tensor:
    return _lent.pop(number)


def _lend(tensor: torch.Tensor) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
    """Return the handle of a buffer for a worker in this process, which writes its device into the seventh value."""
    _lent[id(tensor)] = tensor
    return _borrowed, (id(tensor), None, None, None, None, None, 0)


@contextmanager
def _within_process() -> Iterator[None]:
    """Hand buffers to a worker in this process: no device opens a handle where it was made."""
    before = ce_ps.reduce_tensor
    ce_ps.reduce_tensor = _lend
    try:
        yield
    finally:
        ce_ps.reduce_tensor = before


def _free_port() -> int:
    with socket.create_server(("", 0)) as probe:
        return int(probe.getsockname()[1])
