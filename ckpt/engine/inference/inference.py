"""A sink that hands received weights to the worker processes of an inference engine, by checkpoint-engine's protocol.

    receive buffer --copy--> half of a buffer that the workers have mapped --their `load_weights`--> their model

The workers run `checkpoint_engine.worker.VllmColocateWorkerExtension`, SGLang's extension of that kind, or the package's
`update_weights_from_ipc` itself; they need nothing of this package, except for handles of host memory. While they load one half of the
buffer, the other half is filled.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from itertools import tee
from typing import Any, NamedTuple

import torch
import zmq
from torch.multiprocessing import reductions

from ckpt.engine.base import NamedTensor, WeightVersion
from ckpt.engine.inference.worker_line import Farewell, WorkerLine, await_answers
from ckpt.engine.update import Sink
from ckpt.engine.wire.layout import WeightLayout, aligned
from ckpt.errors import CheckpointError, ConfigurationError
from ckpt.format.dtypes import raw_bytes
from ckpt.memory.device import device_memory, wait_for
from ckpt.memory.host import mapped, segment_of, shared_memory
from ckpt.ranks.waiting import in_thread
from ckpt.storage.files import Closed

Request = Callable[[Mapping[str, str], WeightVersion], None]
"""Makes an inference engine update itself, given {name of a worker: address of its weights}; may return before the update is done."""


class InferenceOutlet(Closed):
    """A sink that is an inference engine of this host: `engine.receive_into(outlet)`, or `Sinks(outlet, live)` beside a live model.

    One rollout rank serves all workers of one inference engine, each of which takes its own part of the whole tensors.

    Args:
        workers: device of the memory that each worker loads from, by the name under which it looks up its address: that of
            `ckpt.engine.parameter_server.worker_name`; any name for host memory, which all workers share.
        request: called in a thread of its own; one of `inference_requests`, or a `collective_rpc` of an engine in this process.
        bucket_mib: that the workers get at a time, or the largest tensor; twice that is allocated on each device during an update,
            and on the host for good.
        timeout_s: a worker that does not answer for so long is given up; less than the engine's, whose other ranks wait.
        aliases: give the workers tied weights under all their names; else under the first only, as in files.

    Attributes:
        version: held by the inference engine; None before the first update, and after one that failed midway, when it holds parts of
            two versions until the next one.
        request, timeout_s: as given; may be changed between updates.
        buffers: the memory that workers load from, by device; a device's is freed after each update.

    Raises:
        ConfigurationError: there are no workers, or a number is out of range.
    """

    def __init__(
        self,
        workers: Mapping[str, torch.device],
        request: Request,
        *,
        bucket_mib: float = 256,
        timeout_s: float = 120.0,
        aliases: bool = False,
    ) -> None:
        if not workers:
            raise ConfigurationError("workers is empty: expected the device of at least one worker")
        if not (timeout_s > 0 and bucket_mib > 0):
            raise ConfigurationError(f"timeout_s={timeout_s}, bucket_mib={bucket_mib}: expected more than 0")
        self.version: WeightVersion | None = None
        self._workers = dict(workers)
        self.request = request
        self._bucket_bytes = aligned(int(bucket_mib * 2**20))
        self.timeout_s = timeout_s
        self._with_aliases = aliases
        self._aliases: frozenset[str] = frozenset()
        self.buffers: dict[torch.device, torch.Tensor] = {}
        self._half = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._farewell = Farewell()

    def check(self, layout: WeightLayout) -> None:
        """See `Sink.check`. Weights that the inference engine itself refuses fail in `load`.

        Raises:
            DeviceMemoryError: a device has no room for the buffer.
        """
        largest = max((aligned(weight.num_bytes) for weight in layout.weights), default=0)
        half = max(min(self._bucket_bytes, layout.num_bytes), largest)
        if half > self._half or not self.buffers:
            self.buffers.clear()
            self._half = half
        for device in self._workers.values():
            if device not in self.buffers:
                self.buffers[device] = _buffer(2 * self._half, device)
        self._aliases = frozenset() if self._with_aliases else frozenset(layout.aliases)

    def load(self, weights: Iterable[NamedTensor], version: WeightVersion) -> None:
        """See `Sink.load`. Returns when each worker has loaded all weights, and the request has returned.

        Raises:
            RankAbsentError: a worker did not connect, or does not answer.
            CheckpointError: a worker failed or ended, or the request failed. All workers are dismissed.
        """
        assert self.buffers, "check comes first"
        self.version = None
        lines = [WorkerLine(self._context, worker) for worker in self._workers]
        handles = {line.worker: line.address for line in lines}
        asked = in_thread(lambda: self.request(handles, version), "ckpt-inference-request")
        try:
            self._serve(lines, asked, weights)
        except BaseException:
            self._let_go(self._workers.values())  # a worker may still read it
            self._farewell.to(lines)
            raise
        for line in lines:
            line.close()
        self.version = version

    def close(self) -> None:
        """Free memory and sockets."""
        self._let_go(self._workers.values())
        if self._farewell.end():
            self._context.term()

    def _serve(self, lines: Sequence[WorkerLine], asked: Future[Any], weights: Iterable[NamedTensor]) -> None:
        def raise_failure() -> None:
            if asked.done():
                asked.result()

        def await_all() -> None:
            await_answers(lines, self.timeout_s, raise_failure)

        def say_to_all(message: Any) -> None:
            await_all()
            for line in lines:
                line.say(message)

        for line in lines:
            line.say(_handle(self.buffers[self._workers[line.worker]]))
        wanted = (named for named in weights if named[0] not in self._aliases)
        for number, batch in enumerate(_batches(wanted, self._half)):
            start = number % 2 * self._half
            self._fill(batch, start)
            say_to_all([tensor.meta(start) for tensor in batch])
        say_to_all(None)
        await_all()
        self._let_go(device for device in self.buffers if device.type != "cpu")  # before they want memory to finish
        say_to_all(None)
        await_all()
        try:
            asked.result(self.timeout_s)
        except TimeoutError:
            raise CheckpointError(
                f"the inference engine's workers have loaded all weights, and the request to it did not return for {self.timeout_s:g} s"
            ) from None

    def _fill(self, batch: Sequence[_Placed], start: int) -> None:
        for buffer in self.buffers.values():
            for tensor in batch:
                first = start + tensor.offset
                buffer[first : first + tensor.host.nbytes].copy_(raw_bytes(tensor.host), non_blocking=True)
        for device in self.buffers:
            wait_for(device)

    def _let_go(self, devices: Iterable[torch.device]) -> None:
        for device in [*devices]:
            if self.buffers.pop(device, None) is not None and device.type != "cpu":
                module = torch.get_device_module(device)
                module.ipc_collect()
                module.empty_cache()


class Sinks:
    """Several sinks in one, such as an inference engine and a model of this process; each loads an update, one after the other.

    Args:
        sinks: first the one whose `load` may fail, for those after it are unchanged then.
    """

    def __init__(self, *sinks: Sink) -> None:
        self._sinks = sinks

    def check(self, layout: WeightLayout) -> None:
        """See `Sink.check`."""
        for sink in self._sinks:
            sink.check(layout)

    def load(self, weights: Iterable[NamedTensor], version: WeightVersion) -> None:
        """See `Sink.load`."""
        for sink, same in zip(self._sinks, tee(weights, len(self._sinks)), strict=True):
            sink.load(same, version)


# Tensors in buffers


class _Placed(NamedTuple):
    """A tensor, and its offset in a half."""

    name: str
    host: torch.Tensor
    offset: int

    def meta(self, start: int) -> dict[str, Any]:
        """Return the description by which a worker makes a view."""
        return {"name": self.name, "shape": self.host.shape, "dtype": self.host.dtype, "offset": start + self.offset}


def _batches(weights: Iterable[NamedTensor], half: int) -> Iterator[list[_Placed]]:
    """Yield as many whole tensors at a time as fit into a half."""
    batch: list[_Placed] = []
    used = 0
    for name, host in weights:
        if batch and used + aligned(host.nbytes) > half:
            yield batch
            batch, used = [], 0
        batch.append(_Placed(name, host, used))
        used += aligned(host.nbytes)
    if batch:
        yield batch


def _buffer(num_bytes: int, device: torch.device) -> torch.Tensor:
    return shared_memory(num_bytes) if device.type == "cpu" else device_memory(num_bytes, device)


def _handle(buffer: torch.Tensor) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
    """Return the function and arguments by which another process maps the memory. It sets the seventh argument to its device's index."""
    if buffer.device.type != "cpu":
        # Looked up at each call: plugins replace it.
        handle: tuple[Callable[..., torch.Tensor], tuple[Any, ...]] = reductions.reduce_tensor(buffer)  # type: ignore[no-untyped-call]
        return handle
    found = segment_of(buffer)
    assert found is not None, "it is shared memory"
    return opened, (os.getpid(), found[0].fd, os.fstat(found[0].fd).st_ino, None, None, None, None)


def opened(pid: int, fd: int, inode: int, *_: object) -> torch.Tensor:
    """Map the host memory of another process of this host and user.

    Raises:
        CheckpointError: the memory is gone.
    """
    try:
        with open(f"/proc/{pid}/fd/{fd}", "r+b", buffering=0) as own:
            if os.fstat(own.fileno()).st_ino != inode:
                raise FileNotFoundError
            return mapped(own.fileno())
    except OSError as error:
        raise CheckpointError(
            f"the memory of the weights in process {pid} is gone, or not visible to this process"
        ) from error
