"""Copy between host and devices on side streams, beside other work. Tensors on the host are passed through.

    a save    device --side stream--> pinned memory -> written, while the next tensor is copied
    a load    read -> pinned memory --side stream--> device, while the next bytes are read

Devices copy asynchronously only from and to page-locked memory. It is small and used in halves: one half is copied while the other
is written or filled.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch

from ckpt.format.dtypes import as_integers, contiguous, raw_bytes
from ckpt.memory.device import SideStream, StreamEvent, device_memory_within, pinned, telling_of_room
from ckpt.storage.files import Closed
from ckpt.storage.wanted_bytes import WantedBytes

HALVES = 2
_ALIGNED = 64
BUCKET_MIN_BYTES = 64 << 10
"""Smallest bucket. A device without room for it has no room for the loaded tensors either."""

_log = logging.getLogger("ckpt")

Item = TypeVar("Item")


class Streams:
    """One side stream for each device, created at its first use."""

    def __init__(self, role: str) -> None:
        self._role = role
        self._streams: dict[torch.device, SideStream] = {}

    def on(self, device: torch.device) -> SideStream:
        """Return the stream of a device. The first call waits for all work queued on the device."""
        if device not in self._streams:
            self._streams[device] = SideStream(device, self._role)
        return self._streams[device]

    def wait(self) -> None:
        """Wait for all of them."""
        for stream in self._streams.values():
            stream.wait()


class Halves:
    """Pinned memory for `Staging`, in two halves: one is copied to while the other is written.

    Args:
        pinned_bytes: of both together.
    """

    def __init__(self, pinned_bytes: int) -> None:
        self._half_bytes = pinned_bytes // HALVES
        self._halves: list[torch.Tensor] = []
        self._count = 0

    def __call__(self, num_bytes: int) -> torch.Tensor:
        """Return the half whose item has been written. It may be smaller than asked for."""
        number = self._count % HALVES
        self._count += 1
        if number == len(self._halves):
            self._halves.append(pinned(self._half_bytes))
        return self._halves[number]


class Staging:
    """Copies items of tensors to the host in turn, each while the one before it is written. One save, one thread.

    Args:
        room: returns pinned flat memory for the device tensors of an item; called once for each such item, in turn. Tensors that do
            not fit are copied through it piece by piece, without overlap.
        streams: to copy on; None: new ones.
    """

    def __init__(self, room: Callable[[int], torch.Tensor], streams: Streams | None = None) -> None:
        self._room = room
        self._has_warned = False
        self._streams = streams or Streams("staging")

    def ahead(self, items: Iterable[tuple[Item, Sequence[torch.Tensor]]]) -> Iterator[tuple[Item, list[torch.Tensor]]]:
        """Yield every item with its tensors on the host, copies complete.

        A host tensor is yielded itself, with any strides. Copies are contiguous, and valid until the next item is asked for.

        Args:
            items: each with its tensors; those on one device have one data type.
        """
        started: tuple[Item, _Started] | None = None
        for item, tensors in items:
            following = item, self._start(tensors)
            if started is not None:
                yield started[0], started[1].arrived()
            started = following
        if started is not None:
            yield started[0], started[1].arrived()

    def _start(self, tensors: Sequence[torch.Tensor]) -> _Started:
        """Queue the copies of an item's tensors, one copy for each device."""
        hosts: list[torch.Tensor | None] = [tensor if tensor.is_cpu else None for tensor in tensors]
        on_device: dict[torch.device, list[int]] = {}
        for number, host in enumerate(hosts):
            if host is None:
                on_device.setdefault(tensors[number].device, []).append(number)
        batches = []
        room = self._room(_room_bytes(tensors, on_device)) if on_device else torch.empty(0, device="cpu")
        for device, numbers in on_device.items():
            batch = self._start_batch(self._streams.on(device), [tensors[number] for number in numbers], room)
            room = room[-(-batch.host.nbytes // _ALIGNED) * _ALIGNED :]
            batches.append((numbers, batch))
        return _Started(hosts, batches)

    def _start_batch(self, side: SideStream, tensors: Sequence[torch.Tensor], room: torch.Tensor) -> _Batch:
        """Queue the copy of one device's tensors, joined, into pinned memory. Without room there, copy them synchronously."""
        with side:  # temporaries are allocated on this stream, and freed in its order
            joined = self._joined(tensors, side.device)
            if joined is None:
                return _Batch(_brought_in_parts(tensors, side.device), None, tensors)
            if joined.nbytes > len(room):
                return _Batch(_brought_through(joined, room, side).view(tensors[0].dtype), None, tensors)
            host = room[: joined.nbytes].view(joined.dtype)
            host.copy_(joined, non_blocking=True)
            return _Batch(host.view(tensors[0].dtype), side.mark(), tensors)

    def _joined(self, tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor | None:
        """Return the tensors joined on their device, flat, bit for bit; None: the device has no room for that."""
        try:
            if len(tensors) == 1:
                return contiguous(tensors[0]).view(-1)
            return torch.cat([as_integers(contiguous(tensor).view(-1)) for tensor in tensors])
        except torch.OutOfMemoryError:
            if not self._has_warned:
                self._has_warned = True
                _log.warning(
                    "%s has no room to join small tensors, or to lay out one that is not contiguous: saving them part by part, "
                    "which takes longer",
                    device,
                )
            return None


def _room_bytes(tensors: Sequence[torch.Tensor], on_device: Mapping[torch.device, Sequence[int]]) -> int:
    """Return the bytes of memory for all batches, each aligned."""
    batches = (sum(tensors[number].nbytes for number in numbers) for numbers in on_device.values())
    return sum(-(-num_bytes // _ALIGNED) * _ALIGNED for num_bytes in batches)


class _Batch(NamedTuple):
    """The queued copy of one device's tensors to the host.

    Attributes:
        host: destination, for all tensors end to end.
        mark: event after the copy; None: the copy is complete.
        tensors: copied ones.
    """

    host: torch.Tensor
    mark: StreamEvent | None
    tensors: Sequence[torch.Tensor]


class _Started(NamedTuple):
    """The tensors of one item: those on the host, and the queued copies of the others."""

    hosts: list[torch.Tensor | None]
    batches: list[tuple[list[int], _Batch]]

    def arrived(self) -> list[torch.Tensor]:
        """Wait for the copies, and return all tensors on the host."""
        for numbers, batch in self.batches:
            if batch.mark is not None:
                batch.mark.wait()
            views = batch.host.split_with_sizes([tensor.numel() for tensor in batch.tensors])
            for number, tensor, view in zip(numbers, batch.tensors, views, strict=True):
                self.hosts[number] = view.view(tensor.shape)
        return [host for host in self.hosts if host is not None]


class Filling(Closed):
    """Copies bytes to the device tensors of one load while the next bytes are read. Used by one thread. A context manager.

    Bytes are copied straight to a tensor where they are contiguous there, too; all others through a bucket on the device, and from
    there to their places. The bucket is smaller where the device has little room.

    Args:
        bucket_bytes: of the bucket, and of each half of the pinned memory, which grows if more is taken at once.
        role: name of the side streams; objects that work at the same time need different ones.
    """

    def __init__(self, bucket_bytes: int, role: str = "filling") -> None:
        self._bucket_bytes = bucket_bytes
        self._halves: list[_Half] = []
        self._count = 0
        self._streams = Streams(role)
        self._buckets: dict[torch.device, torch.Tensor] = {}

    def begin(self, devices: Iterable[torch.device]) -> None:
        """Create the streams now, which waits for all work queued on the devices, instead of at the first bytes."""
        for device in devices:
            if device.type != "cpu":
                self._streams.on(device)

    def take(self, num_bytes: int) -> torch.Tensor:
        """Return pinned memory to read into, flat uint8, which no copy reads any more. Call `place` with it before the next `take`."""
        self._count += 1
        if len(self._halves) < HALVES:
            self._halves.append(_Half(max(num_bytes, self._bucket_bytes)))
        return self._half().free(num_bytes)

    def place(self, wanted: WantedBytes, start: int, stop: int, memory: torch.Tensor) -> None:
        """Copy the bytes [start, stop) of a chunk to the parts that want them.

        Args:
            memory: these bytes, on the host. Copies from memory of the last `take` are queued; other memory is free when this returns.

        Raises:
            DeviceMemoryError: a device has no room for the smallest bucket.
        """
        for device in wanted.devices:
            if device.type == "cpu":
                wanted.place(start, stop, memory, device)
                continue
            if not self._is_ours(memory):
                mine = self.take(len(memory))
                memory = mine.copy_(memory)
            side = self._streams.on(device)
            with side:
                if wanted.lies_in_order(start, stop, device):
                    wanted.place(start, stop, memory, device)
                else:
                    self._through_bucket(wanted, start, memory, device)
                self._half().in_use.append(side.mark())

    def place_within(self, wanted: WantedBytes, start: int, stop: int, memory: torch.Tensor) -> None:
        """Copy likewise from memory on a device, which is free when this returns."""
        side = self._streams.on(memory.device)
        with side:
            for device in wanted.devices:
                if wanted.wants(start, stop, device):
                    wanted.place(start, stop, memory.cpu() if device.type == "cpu" else memory, device)
        side.wait()

    def fill(self, out: torch.Tensor, host: torch.Tensor) -> None:
        """Copy a host tensor into one on any device, of any strides. The host tensor is free when this returns."""
        if out.device.type == "cpu":
            out.detach().copy_(host)
            return
        with self._streams.on(out.device):
            out.detach().copy_(host)

    def close(self) -> None:
        """Wait for all copies, and free all memory."""
        self._streams.wait()
        self._halves, self._buckets = [], {}

    def _half(self) -> _Half:
        """The half of the last `take`."""
        return self._halves[(self._count - 1) % HALVES]

    def _is_ours(self, memory: torch.Tensor) -> bool:
        return bool(self._halves) and memory.data_ptr() == self._half().memory.data_ptr()

    def _through_bucket(self, wanted: WantedBytes, start: int, memory: torch.Tensor, device: torch.device) -> None:
        """Copy bytes to the device, and from there to their places. The stream keeps the order."""
        bucket = self._bucket(device)
        for at in range(0, len(memory), len(bucket)):
            piece = memory[at : at + len(bucket)]
            there = bucket[: len(piece)].copy_(piece, non_blocking=True)
            wanted.place(start + at, start + at + len(piece), there, device)

    def _bucket(self, device: torch.device) -> torch.Tensor:
        if device not in self._buckets:
            bucket = device_memory_within(BUCKET_MIN_BYTES, self._bucket_bytes, device)
            if len(bucket) < self._bucket_bytes:
                _log.warning(
                    "%s has no room for a bucket of %.1f MiB: loading through one of %.2f MiB, which takes longer",
                    device,
                    self._bucket_bytes / 2**20,
                    len(bucket) / 2**20,
                )
            self._buckets[device] = bucket
        return self._buckets[device]


class _Half:
    """A half of the pinned memory.

    Attributes:
        in_use: events after each queued copy from it.
    """

    def __init__(self, num_bytes: int) -> None:
        self.memory = pinned(num_bytes)
        self.in_use: list[StreamEvent] = []

    def free(self, num_bytes: int) -> torch.Tensor:
        """Wait for the copies from it; return this many bytes of it."""
        while self.in_use:
            self.in_use.pop().wait()
        if len(self.memory) < num_bytes:
            self.memory = pinned(num_bytes)
        return self.memory[:num_bytes]


def _brought_through(joined: torch.Tensor, room: torch.Tensor, side: SideStream) -> torch.Tensor:
    """Copy a flat tensor to new host memory through smaller pinned memory, one piece while the next one arrives."""
    step = len(room) // 2 // _ALIGNED * _ALIGNED
    if step == 0:
        return joined.cpu()
    host = torch.empty(joined.numel(), dtype=joined.dtype, device="cpu")
    there, here = raw_bytes(joined), raw_bytes(host)
    coming: deque[tuple[int, torch.Tensor, StreamEvent]] = deque()
    for number, at in enumerate(range(0, len(there), step)):
        if len(coming) == HALVES:
            _land(here, *coming.popleft())
        piece = room[number % HALVES * step :][: min(step, len(there) - at)]
        piece.copy_(there[at : at + step], non_blocking=True)
        coming.append((at, piece, side.mark()))
    for piece_that_comes in coming:
        _land(here, *piece_that_comes)
    return host


def _land(here: torch.Tensor, at: int, piece: torch.Tensor, mark: StreamEvent) -> None:
    mark.wait()
    here[at : at + len(piece)] = piece


def _brought_in_parts(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Copy a device's tensors to the host, end to end, with almost no extra memory on the device.

    Raises:
        DeviceMemoryError: the device lacks even that.
    """
    host = torch.empty(sum(tensor.numel() for tensor in tensors), dtype=tensors[0].dtype, device="cpu")
    with telling_of_room(device, BUCKET_MIN_BYTES):
        for tensor, flat in zip(tensors, host.split_with_sizes([tensor.numel() for tensor in tensors]), strict=True):
            _copy_in_parts(flat.view(tensor.shape), tensor.detach())
    return host


def _copy_in_parts(host: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy a contiguous tensor as it is, others in parts so small that temporaries take little memory."""
    if tensor.nbytes <= BUCKET_MIN_BYTES or (tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()):
        host.copy_(tensor)
        return
    dim = next(dim for dim, side in enumerate(tensor.shape) if side > 1)
    side = tensor.shape[dim]
    step = max(BUCKET_MIN_BYTES * side // tensor.nbytes, 1)
    for at in range(0, side, step):
        count = min(step, side - at)
        _copy_in_parts(host.narrow(dim, at, count), tensor.narrow(dim, at, count))
