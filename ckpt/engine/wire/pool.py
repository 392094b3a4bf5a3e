"""Host memory at both ends of an update: buckets to send, on a trainer; the received stream, on a rollout. Kept between updates."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import torch

from ckpt.engine.wire.delta import BlockHistory, digested
from ckpt.engine.wire.layout import Weight, WeightLayout, aligned
from ckpt.format.box import flat_boxes
from ckpt.format.digests import digest_of
from ckpt.format.dtypes import as_integers, contiguous, raw_bytes
from ckpt.memory.device import pinned, uses_accelerator, wait_for
from ckpt.memory.host import HostMemory, memory_at, place_of, shared_memory, staging_memory
from ckpt.storage.host_memory import MemoryFile


class HostPool:
    """The buckets that one rank sends, page-locked if it has an accelerator.

    A bucket's memory is allocated at its first byte, and reused by all later updates.

    Args:
        rank: the owner of the buckets.
        block_bytes: size of the blocks that are compared with the version before; None: all bytes are sent.

    Attributes:
        history: digests of what has been sent; None: without `block_bytes`.
    """

    def __init__(self, rank: int, bucket_bytes: int, *, block_bytes: int | None = None) -> None:
        self.history = None if block_bytes is None else BlockHistory()
        self._rank = rank
        self._bucket_bytes = bucket_bytes
        self._block_bytes = block_bytes
        self._segments: dict[int, torch.Tensor] = {}
        self._pageable = HostMemory()  # one for all buckets, so that small ones share huge pages
        self._devices: set[torch.device] = set()  # with copies that may be under way

    def is_of(self, rank: int, bucket_bytes: int) -> bool:
        """Whether the pool was made with these arguments."""
        return (self._rank, self._bucket_bytes) == (rank, bucket_bytes)

    def put(self, layout: WeightLayout, weight: Weight, tensor: torch.Tensor) -> None:
        """Queue the copy of those parts of a tensor that this rank owns, cast to the weight's type.

        The copy is queued on the tensor's current stream, so later writes of the program to that memory come after it. A tensor with
        gaps, or one that is cast, passes through device memory, a bucket at most.
        """
        if not weight.start:
            self._settle()  # copies of an update that failed before `seal` would overwrite this one's
        size = weight.dtype.itemsize
        for part in layout.parts(weight, self._rank):
            self._devices.add(tensor.device)
            segment, stop = self._segment(part.bucket), part.at + part.stop - part.start
            for piece, first in _pieces(tensor.detach(), part.start // size, part.stop // size):
                start = part.at + first * size
                _fill(segment[start : start + piece.numel() * size], piece, weight.dtype)
            if stop < aligned(stop):
                segment[stop : aligned(stop)].zero_()  # padding is digested, and is equal for equal weights

    def seal(self, layout: WeightLayout) -> dict[int, str]:
        """Wait for the copies and return the digest of each bucket of this rank. Frees memory of buckets that no longer exist.

        Raises:
            ConfigurationError: a tied name stands for a weight that was not yielded.
        """
        self._settle()
        layout.require_sources()
        mine = self.buckets(layout)
        for bucket in self._segments.keys() - mine.keys():
            del self._segments[bucket]
        if self.history is None or self._block_bytes is None:
            return {bucket: digest_of_bucket(host) for bucket, host in mine.items()}
        found = {bucket: digested(raw_bytes(host).numpy().data, self._block_bytes) for bucket, host in mine.items()}
        self.history.take(layout, {bucket: digested.blocks for bucket, digested in found.items()})
        return {bucket: digested.whole for bucket, digested in found.items()}

    def buckets(self, layout: WeightLayout) -> dict[int, torch.Tensor]:
        """Return all buckets of this rank by number, flat."""
        return {bucket: self.bucket(layout, bucket) for bucket in layout.buckets_of(self._rank)}

    def bucket(self, layout: WeightLayout, bucket: int) -> torch.Tensor:
        """Return a bucket of this rank, flat."""
        start, stop = layout.extent(bucket)
        return self._segment(bucket)[: stop - start]

    def _settle(self) -> None:
        for device in self._devices:
            wait_for(device)
        self._devices.clear()

    def _segment(self, bucket: int) -> torch.Tensor:
        if bucket not in self._segments:
            size = self._bucket_bytes
            self._segments[bucket] = pinned(size) if uses_accelerator() else self._pageable.empty((size,), torch.uint8)
        return self._segments[bucket]


class ReceivedStream:
    """Host memory of one rollout for the whole stream of weights: of its own, or that of another rollout of its host.

    Attributes:
        holds: digest of the version that is there, whole and verified; None: no whole version is.
        place: of memory that several rollouts of the host read; None: this one has memory of its own.
    """

    def __init__(self) -> None:
        self.holds: str | None = None
        self.place: MemoryFile | None = None
        self._lock = threading.Lock()
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._layout: WeightLayout | None = None
        self._readers: list[None] = []  # one item for each iterator over this memory; new memory has a new list

    def make_room(self, layout: WeightLayout) -> None:
        """Allocate memory for a stream, if there is too little, or an iterator still reads it. The contents become undefined.

        Raises:
            MemoryError, RuntimeError: the host has too little memory.
        """
        with self._lock:
            if not self._has_room(layout):
                self._forget()  # freed before the new memory is allocated
                self._memory = staging_memory(layout.num_bytes)
            self._layout = layout

    def make_shared_room(self, layout: WeightLayout) -> None:
        """Allocate memory likewise that other rollouts of this host can `join`, unless this one's is such memory already.

        It is not page-locked.

        Raises:
            OSError: the host has too little memory.
        """
        with self._lock:
            if not self._has_room(layout) or self.place is None or place_of(self._memory) != self.place:
                self._forget()
                self._memory = shared_memory(layout.num_bytes)
                self.place = place_of(self._memory)
            self._layout = layout

    def join(self, place: MemoryFile, layout: WeightLayout) -> bool:
        """Use the memory of another rollout, which fills it; return whether this process can."""
        with self._lock:
            if self.place != place:
                self._forget()
                memory = memory_at(place)
                if memory is None or len(memory) < layout.num_bytes:
                    return False
                self._memory, self.place = memory, place
            self._layout = layout
            return True

    def let_go(self) -> None:
        """Drop the memory, to which a failed transfer may still write. The next update allocates new memory."""
        with self._lock:
            self._forget()

    def bucket(self, bucket: int) -> torch.Tensor:
        """Return the memory of a bucket, flat."""
        assert self._layout is not None, "make_room comes first"
        start, stop = self._layout.extent(bucket)
        return self._memory[start:stop]

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each weight under its name, then each alias: host tensors over this memory, valid until the iterator ends.

        The memory is that of now, also if the first weight is requested when there is another one.
        """
        with self._lock:
            assert self._layout is not None, "make_room comes first"
            return self._read(self._layout, self._memory, self._readers)

    def _read(
        self, layout: WeightLayout, memory: torch.Tensor, readers: list[None]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        with self._lock:
            readers.append(None)
        firsts = dict.fromkeys(layout.aliases.values(), memory)
        try:
            for weight in layout.weights:
                there = memory[weight.start : weight.start + weight.num_bytes]
                there = there.view(weight.dtype).view(weight.shape)
                if weight.name in firsts:
                    firsts[weight.name] = there
                yield weight.name, there
            for alias, first in layout.aliases.items():
                yield alias, firsts[first]
        finally:
            readers.pop()

    def _forget(self) -> None:
        self._memory, self._layout, self._readers = torch.empty(0, dtype=torch.uint8, device="cpu"), None, []
        self.holds = self.place = None

    def _has_room(self, layout: WeightLayout) -> bool:
        return not self._readers and len(self._memory) >= layout.num_bytes


def digest_of_bucket(host: torch.Tensor, block_bytes: int | None = None) -> str:
    """Return the xxh3-128 of flat bytes, or of the digests of their blocks, in hex."""
    data = raw_bytes(host).numpy().data
    return digest_of(data) if block_bytes is None else digested(data, block_bytes).whole


def _pieces(tensor: torch.Tensor, first: int, last: int) -> Iterator[tuple[torch.Tensor, int]]:
    """Yield the elements [first, last) of a tensor in row-major order, as views, each with the number of elements before it."""
    if tensor.is_contiguous():
        yield tensor.view(-1)[first:last], 0
        return
    for box, before in flat_boxes(tuple(tensor.shape), first, last):
        yield tensor[box.slices], before


def _fill(there: torch.Tensor, piece: torch.Tensor, dtype: torch.dtype) -> None:
    """Copy a piece, cast, to flat host memory: at once from the host; from a device the copy is queued."""
    if not piece.is_cpu:
        there.copy_(raw_bytes(contiguous(piece).to(dtype)), non_blocking=True)
        return
    piece = piece.resolve_conj().resolve_neg()
    if piece.dtype == dtype:
        piece = as_integers(piece)
        dtype = piece.dtype
    out = there.view(dtype)
    (out if piece.dim() == 1 else out.view(piece.shape)).copy_(piece)
