"""Host memory of the two ends of an update: what a trainer sends, and what has come to a rollout. Kept from update to update."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import xxhash

from ckpt.device import wait_for_all
from ckpt.dtypes import contiguous, raw_bytes
from ckpt.engine.layout import Weight, WeightLayout, aligned
from ckpt.memory import staging_memory


class HostPool:
    """The buckets that one rank sends, page-locked where it has an accelerator.

    Memory is made for a bucket when the first byte of it comes, and used again by all later updates.

    Args:
        rank: the owner.
    """

    def __init__(self, rank: int, bucket_bytes: int) -> None:
        self._rank = rank
        self._bucket_bytes = bucket_bytes
        self._segments: dict[int, torch.Tensor] = {}
        self._devices: dict[torch.device, torch.Tensor] = {}

    @property
    def num_bytes(self) -> int:
        return len(self._segments) * self._bucket_bytes

    def put(self, layout: WeightLayout, weight: Weight, tensor: torch.Tensor) -> None:
        """Queue the copy of what this rank owns of a tensor, cast to the type in which it travels. Nothing, if it owns none.

        The copy is queued on the tensor's own current stream: what the program does with the tensor's memory next comes after it.
        """
        parts = list(layout.parts(weight, self._rank))
        if not parts:
            return
        tensor = tensor.detach()
        flat = contiguous(tensor).view(-1) if tensor.dim() else contiguous(tensor).reshape(1)
        for part in parts:
            size = weight.dtype.itemsize
            piece = flat[part.start // size : part.stop // size].to(weight.dtype)
            segment, stop = self._segment(part.bucket), part.at + part.stop - part.start
            segment[part.at : stop].copy_(raw_bytes(piece), non_blocking=True)
            segment[
                stop : aligned(stop)
            ].zero_()  # the padding travels, too, and shall not differ between equal weights
        if not flat.is_cpu:
            self._devices[flat.device] = flat

    def seal(self, layout: WeightLayout) -> dict[int, str]:
        """Wait for the copies and return the digest of every bucket of this rank. Memory of buckets that are no more is let go of."""
        wait_for_all(self._devices.values())
        self._devices = {}
        mine = self.buckets(layout)
        for bucket in self._segments.keys() - mine.keys():
            del self._segments[bucket]
        return {bucket: digest_of_bucket(host) for bucket, host in mine.items()}

    def buckets(self, layout: WeightLayout) -> dict[int, torch.Tensor]:
        """All buckets of this rank by number."""
        return {
            bucket: self.bucket(layout, bucket)
            for bucket in range(layout.num_buckets)
            if layout.owner(bucket) == self._rank
        }

    def bucket(self, layout: WeightLayout, bucket: int) -> torch.Tensor:
        """The bytes of a bucket of this rank, flat."""
        start, stop = layout.extent(bucket)
        return self._segment(bucket)[: stop - start]

    def _segment(self, bucket: int) -> torch.Tensor:
        if bucket not in self._segments:
            self._segments[bucket] = staging_memory(self._bucket_bytes)
        return self._segments[bucket]


class Landing:
    """The whole stream at one rollout, in the order of the stream."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._layout: WeightLayout | None = None
        self._readers = 0

    def make_room(self, layout: WeightLayout) -> None:
        """Have room for a stream. What was there is no more, but for who reads it still.

        Raises:
            MemoryError, RuntimeError: the host has not so much.
        """
        if self._readers or len(self._memory) < layout.num_bytes:
            self._memory = torch.empty(0, dtype=torch.uint8)  # before the new memory is there
            self._memory = staging_memory(layout.num_bytes)
        self._layout = layout

    def let_go(self) -> None:
        """Drop the memory: something may still write to it. The next update makes new."""
        self._memory, self._layout = torch.empty(0, dtype=torch.uint8), None

    def bucket(self, bucket: int) -> torch.Tensor:
        """Where a bucket belongs, flat."""
        assert self._layout is not None, "make_room comes first"
        start, stop = self._layout.extent(bucket)
        return self._memory[start:stop]

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every weight under its name, then every alias; host tensors over this memory."""
        assert self._layout is not None, "make_room comes first"
        layout, memory, found = self._layout, self._memory, {}
        self._readers += 1
        try:
            for weight in layout.weights:
                there = memory[weight.start : weight.start + weight.num_bytes]
                found[weight.name] = there.view(weight.dtype).view(weight.shape)
                yield weight.name, found[weight.name]
            for alias, first in layout.aliases.items():
                yield alias, found[first]
        finally:
            self._readers -= 1


def digest_of_bucket(host: torch.Tensor) -> str:
    """The xxh3-128 of flat bytes."""
    return xxhash.xxh3_128_hexdigest(raw_bytes(host).numpy().data)
