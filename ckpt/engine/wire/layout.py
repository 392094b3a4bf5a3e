"""Layout of all weights in one stream of bytes, which is cut into buckets; each bucket has an owner, the rank that sends it. Pure.

The stream holds the tensors in the order in which trainers yield them, each at a multiple of 256 bytes. Bucket k begins at byte
k * bucket_bytes, whatever tensors it cuts: a tensor may be larger than a bucket, owners differ by one bucket at most, and a receiver
needs no copy, for buckets lie side by side.
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
from ckpt.format.digests import digest_of
from ckpt.format.dtypes import torch_dtype, zarr_name

ALIGNED = 256


class Weight(NamedTuple):
    """One tensor of the stream.

    Attributes:
        dtype: in which it travels.
        start: first byte in the stream.
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
        """End in the stream, padding included."""
        return self.start + aligned(self.num_bytes)


class BucketPart(NamedTuple):
    """The bytes of a weight that lie in one bucket.

    Attributes:
        start, stop: bytes of the weight, without padding; multiples of the element size.
        at: offset in the bucket.
    """

    bucket: int
    start: int
    stop: int
    at: int


class WeightLayout:
    """The layout of one version; grows with each tensor that a trainer yields, equally on all trainers.

    Args:
        bucket_bytes: a multiple of 256.
        owners: the ranks that send, in turn.
        aliases: {alias: name under which the tensor travels, or another alias of it}.

    Raises:
        ConfigurationError: aliases form a circle.
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
        """Bytes of the stream, padding included."""
        return self.weights[-1].stop if self.weights else 0

    @property
    def payload_bytes(self) -> int:
        """Bytes of the tensors, without padding."""
        return sum(weight.num_bytes for weight in self.weights)

    @property
    def num_buckets(self) -> int:
        return -(-self.num_bytes // self.bucket_bytes)

    def add(self, name: str, dtype: torch.dtype, shape: Sequence[int]) -> Weight:
        """Append a tensor.

        Raises:
            ConfigurationError: the name is there already, or no engine can send the type.
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
        """Check that each alias stands for a tensor of the layout. Called after the last `add`.

        Raises:
            ConfigurationError: one does not.
        """
        for alias, first in self.aliases.items():
            if first not in self._names:
                raise ConfigurationError(
                    f"tied_names says that {alias} is {first}, which is not yielded; yield it, or {alias} itself"
                )

    def owner(self, bucket: int) -> int:
        """Return the rank that sends a bucket."""
        return self.owners[bucket % len(self.owners)]

    def buckets_of(self, owner: int) -> list[int]:
        """Return the buckets that a rank sends, in order."""
        return [bucket for bucket in range(self.num_buckets) if self.owner(bucket) == owner]

    def extent(self, bucket: int) -> tuple[int, int]:
        """Return the bytes [start, stop) of the stream in a bucket. Only the last bucket is shorter than `bucket_bytes`."""
        start = bucket * self.bucket_bytes
        return start, min(start + self.bucket_bytes, self.num_bytes)

    def parts(self, weight: Weight, owner: int | None = None) -> Iterator[BucketPart]:
        """Yield the parts of a weight in order; of one owner, if given."""
        start = weight.start
        while start < weight.start + weight.num_bytes:
            bucket, at = divmod(start, self.bucket_bytes)
            stop = min((bucket + 1) * self.bucket_bytes, weight.start + weight.num_bytes)
            if owner is None or self.owner(bucket) == owner:
                yield BucketPart(bucket, start - weight.start, stop - weight.start, at)
            start = stop

    def weights_in(self, bucket: int) -> list[str]:
        """Return the names of the weights that have bytes in a bucket."""
        start, stop = self.extent(bucket)
        first = bisect_right(self.weights, start, key=lambda weight: weight.stop)
        inside = takewhile(lambda weight: weight.start < stop, self.weights[first:])
        return [weight.name for weight in inside if weight.num_bytes]

    def described(self, bucket: int) -> str:
        """Return "bucket 3 of 9, with a.weight, a.bias", for errors; of the names the first three."""
        names = self.weights_in(bucket)
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return f"bucket {bucket} of {self.num_buckets}, with {', '.join(names[:3])}{more}"

    def digest(self) -> str:
        """Return 32 hex digits that depend on names, types, shapes, order, aliases, owners and bucket size."""
        if self._digest is None:
            self._digest = digest_of(json.dumps(self.as_rows()).encode())
        return self._digest

    def as_rows(self) -> list[Any]:
        """Return the layout as plain JSON, for `from_rows`."""
        weights = [[weight.name, zarr_name(weight.dtype), list(weight.shape)] for weight in self.weights]
        return [self.bucket_bytes, list(self.owners), sorted(self.aliases.items()), weights]

    @classmethod
    def from_rows(cls, rows: Sequence[Any]) -> WeightLayout:
        """Return the layout that another rank described by `as_rows`."""
        bucket_bytes, owners, aliases, weights = rows
        layout = cls(bucket_bytes, owners, dict(aliases))
        for name, dtype, shape in weights:
            layout.add(name, torch_dtype(dtype), shape)
        return layout


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNED) * ALIGNED


def first_names(aliases: Mapping[str, str]) -> dict[str, str]:
    """Return {alias: name} with each alias of an alias resolved.

    Raises:
        ConfigurationError: aliases form a circle.
    """
    found = {}
    for alias, first in aliases.items():
        seen = {alias}
        while first in aliases and first not in seen:
            seen.add(first)
            first = aliases[first]
        if first in seen:
            raise ConfigurationError(
                f"tied_names has a circle, {', '.join(sorted(seen))}: expected one of them to be yielded"
            )
        found[alias] = first
    return found


def take_turns(nodes: Sequence[Sequence[int]], senders: Sequence[int]) -> list[int]:
    """Order the senders so that consecutive ones are on different hosts, as far as possible.

    Buckets in flight at the same time then leave through different network devices.

    Args:
        nodes: ranks of each host.
    """
    wanted = set(senders)
    waiting = [[rank for rank in node if rank in wanted] for node in nodes]
    turns: list[int] = []
    last: list[int] | None = None
    while any(waiting):
        # The host with most senders left, which would otherwise be consecutive at the end.
        others = [host for host in waiting if host and host is not last] or [host for host in waiting if host]
        last = max(others, key=len)
        turns.append(last.pop(0))
    return turns
