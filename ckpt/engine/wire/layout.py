"""Where each weight lies in one stream of bytes, how the stream is cut into buckets, and who sends which. Pure.

The stream holds the tensors in the order in which trainers yield them, each at a multiple of 256 bytes. Bucket k is its bytes
from k * bucket_bytes on, whatever tensors they belong to: so a tensor larger than a bucket needs nothing special, owners
differ by one bucket at most, and every bucket lands in place at the receiver.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

import torch

from ckpt.errors import ConfigurationError
from ckpt.format.dtypes import torch_dtype, zarr_name
from ckpt.format.manifest import digest_of

ALIGNED = 256


class Weight(NamedTuple):
    """One tensor of the stream.

    Attributes:
        dtype: as it travels.
        start: its first byte in the stream.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def stop(self) -> int:
        """Behind its last byte, padding included."""
        return self.start + aligned(self.num_bytes)


class BucketPart(NamedTuple):
    """The bytes of a weight that lie in one bucket.

    Attributes:
        start, stop: bytes of the weight, without padding; multiples of its element's size.
        at: where they begin in the bucket.
    """

    bucket: int
    start: int
    stop: int
    at: int


class WeightLayout:
    """Grows with every tensor that a trainer yields; the same on all of them.

    Args:
        bucket_bytes: a multiple of 256.
        owners: the ranks that send, in the order in which they take turns.
        aliases: name -> the name under which that tensor travels, or another alias of it.

    Raises:
        ConfigurationError: names that are aliases of each other.
    """

    def __init__(self, bucket_bytes: int, owners: Sequence[int], aliases: Mapping[str, str] | None = None) -> None:
        assert bucket_bytes > 0 and bucket_bytes % ALIGNED == 0, bucket_bytes
        self.bucket_bytes = bucket_bytes
        self.owners = tuple(owners)
        self.aliases = first_names(aliases or {})
        self.weights: list[Weight] = []
        self._names: set[str] = set()
        self._digest: str | None = None

    @property
    def num_bytes(self) -> int:
        """Of the stream, padding included."""
        return self.weights[-1].stop if self.weights else 0

    @property
    def payload_bytes(self) -> int:
        """Of the tensors alone."""
        return sum(weight.num_bytes for weight in self.weights)

    @property
    def num_buckets(self) -> int:
        return -(-self.num_bytes // self.bucket_bytes)

    def add(self, name: str, dtype: torch.dtype, shape: Sequence[int]) -> Weight:
        """Put a tensor behind the others.

        Raises:
            ConfigurationError: the name has been there, or no engine can send such a type.
        """
        zarr_name(dtype)
        if name in self._names:
            raise ConfigurationError(f"{name} is yielded twice: a weight has one value")
        if name in self.aliases:
            raise ConfigurationError(
                f"{name} is yielded, and tied_names says that it is {self.aliases[name]}, which travels for both: yield it no more, "
                "or do not name it there"
            )
        self._names.add(name)
        self._digest = None
        weight = Weight(name, dtype, tuple(shape), self.num_bytes)
        self.weights.append(weight)
        return weight

    def require_sources(self) -> None:
        """See that every alias stands for a tensor that has been added. Called when the last one has.

        Raises:
            ConfigurationError: one does not.
        """
        for alias, first in self.aliases.items():
            if first not in self._names:
                raise ConfigurationError(
                    f"tied_names says that {alias} is {first}, which is not yielded; yield it, or {alias} itself"
                )

    def owner(self, bucket: int) -> int:
        """The rank that sends a bucket."""
        return self.owners[bucket % len(self.owners)]

    def extent(self, bucket: int) -> tuple[int, int]:
        """The bytes [start, stop) of the stream that a bucket holds. Only the last one is shorter than `bucket_bytes`."""
        start = bucket * self.bucket_bytes
        return start, min(start + self.bucket_bytes, self.num_bytes)

    def parts(self, weight: Weight, owner: int | None = None) -> Iterator[BucketPart]:
        """The parts of a weight in order, or those of one owner."""
        start = weight.start
        while start < weight.start + weight.num_bytes:
            bucket, at = divmod(start, self.bucket_bytes)
            stop = min((bucket + 1) * self.bucket_bytes, weight.start + weight.num_bytes)
            if owner is None or self.owner(bucket) == owner:
                yield BucketPart(bucket, start - weight.start, stop - weight.start, at)
            start = stop

    def weights_in(self, bucket: int) -> list[str]:
        """The names of the weights that a bucket holds something of."""
        start, stop = self.extent(bucket)
        first = bisect_right(self.weights, start, key=lambda weight: weight.stop)
        inside = takewhile(lambda weight: weight.start < stop, self.weights[first:])
        return [weight.name for weight in inside if weight.num_bytes]

    def digest(self) -> str:
        """32 hex digits that depend on names, types, shapes, order, aliases and the cut."""
        if self._digest is None:
            self._digest = digest_of(json.dumps(self.as_rows()).encode())
        return self._digest

    def as_rows(self) -> list[Any]:
        """What `from_rows` makes the same layout of, as plain JSON."""
        weights = [[weight.name, zarr_name(weight.dtype), list(weight.shape)] for weight in self.weights]
        return [self.bucket_bytes, list(self.owners), sorted(self.aliases.items()), weights]

    @classmethod
    def from_rows(cls, rows: Sequence[Any]) -> WeightLayout:
        """The layout that another rank described."""
        bucket_bytes, owners, aliases, weights = rows
        layout = cls(bucket_bytes, owners, dict(aliases))
        for name, dtype, shape in weights:
            layout.add(name, torch_dtype(dtype), shape)
        return layout


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNED) * ALIGNED


def first_names(aliases: Mapping[str, str]) -> dict[str, str]:
    """{alias: name} with names that are no aliases themselves: an alias of an alias is one of the first name.

    Raises:
        ConfigurationError: names that are aliases of each other.
    """
    found = {}
    for alias, first in aliases.items():
        seen = {alias}
        while first in aliases and first not in seen:
            seen.add(first)
            first = aliases[first]
        if first in seen:
            raise ConfigurationError(
                f"tied_names goes in a circle through {', '.join(sorted(seen))}: one of them is first"
            )
        found[alias] = first
    return found


def take_turns(nodes: Sequence[Sequence[int]], senders: Sequence[int]) -> list[int]:
    """Order the senders such that neighbours in the order live on different hosts, as far as that goes.

    Buckets that are on their way at the same time then leave through different network devices.

    Args:
        nodes: ranks per host.
    """
    wanted = set(senders)
    waiting = [[rank for rank in node if rank in wanted] for node in nodes]
    turns: list[int] = []
    last: list[int] | None = None
    while any(waiting):
        # The host with most left: if it came last, its own would be neighbours in the end.
        others = [host for host in waiting if host and host is not last] or [host for host in waiting if host]
        last = max(others, key=len)
        turns.append(last.pop(0))
    return turns
