"""The parts of each bucket that have changed since a version that all ranks hold, so that only these travel. Pure.

Trainers keep a digest of each block that they have sent, and compare it with that of the same block now; all ranks learn which blocks
differ, and cut the same broadcasts from them. A rollout has the bytes of the other blocks. The digest of a bucket is that of its blocks'
digests, so bytes are digested once; rollouts digest whole buckets, whatever has travelled.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ckpt.engine.wire.layout import WeightLayout
from ckpt.errors import ConfigurationError
from ckpt.format.digests import digest_bytes_of, digest_of

BLOCK_KIB = 128
"""Size of a block. To digest 128 MiB on one core takes, in ms (medians of 9; as one block: 6.3), in blocks of 16 KiB 14.2, 32 KiB 11.1,
64 KiB 8.7, 128 KiB 7.5, 256 KiB 6.8, 512 KiB 6.3: the overhead of small blocks is Python's, and large ones send more than has changed if
a few rows of a table have."""
MOST = 2 / 3
"""Largest fraction of a bucket that travels in parts; if more has changed, the bucket is sent whole, for gather and scatter take as long.
A transfer by gloo on one host took, relative to one of whole buckets, 0.83 if 0.4 had changed, 0.98 at 0.7, and 1.37 at 0.8."""

Runs = list[tuple[int, int]]
"""Bytes [start, stop) of a bucket, in order, with gaps between them."""


class Digested(NamedTuple):
    """The digests of a bucket.

    Attributes:
        whole: xxh3-128 of `blocks`, in hex.
        blocks: xxh3-128 of each block, 16 bytes each.
    """

    whole: str
    blocks: bytes


def digested(host: memoryview, block_bytes: int) -> Digested:
    """Digest a bucket by its blocks."""
    digest = digest_bytes_of
    blocks = b"".join([digest(host[start : start + block_bytes]) for start in range(0, len(host), block_bytes)])
    return Digested(digest_of(blocks), blocks)


class BlockHistory:
    """Digests of the blocks that one trainer has sent, and of those that it is about to send.

    Attributes:
        base: digest of the version that `changed` compares with; None: there is none, or it had another layout.
    """

    def __init__(self) -> None:
        self._sent: tuple[str, str, dict[int, bytes]] | None = None
        self._now: tuple[str, dict[int, bytes]] | None = None

    def take(self, layout: WeightLayout, blocks: Mapping[int, bytes]) -> None:
        """Set what is sent next: the digests of the blocks of each bucket of this rank."""
        self._now = layout.digest(), dict(blocks)

    @property
    def base(self) -> str | None:
        if self._sent is None or self._now is None or self._sent[1] != self._now[0]:
            return None
        return self._sent[0]

    def changed(self) -> str | None:
        """Return one bit for each block of each bucket, in order, as text; None: there is no base."""
        if self.base is None:
            return None
        assert self._sent is not None and self._now is not None
        before, now = self._sent[2], self._now[1]
        differ = [(_rows(now[bucket]) != _rows(before[bucket])).any(axis=1) for bucket in sorted(now)]
        bits = np.packbits(np.concatenate(differ)) if differ else np.empty(0, np.uint8)
        return base64.b64encode(zlib.compress(bits.tobytes(), 1)).decode()

    def commit(self, version: str) -> None:
        """All ranks hold the blocks taken last, as the version of this digest."""
        if self._now is not None:
            self._sent = version, *self._now

    def forget(self) -> None:
        """It is unknown which version the ranks hold."""
        self._sent = None


@dataclass(frozen=True)
class Changes:
    """The bytes of an update that travel; equal on all ranks.

    Attributes:
        base: digest of the version that every rollout holds, from which the other bytes are.
        runs: the bytes that travel, by bucket: none, some, or the whole bucket as one run.
    """

    base: str
    runs: Mapping[int, Runs]

    @property
    def num_bytes(self) -> int:
        return sum(bytes_of(runs) for runs in self.runs.values())


def agreed_changes(
    offers: Sequence[Mapping[str, Any]], layout: WeightLayout, rollouts: Sequence[int], block_bytes: int
) -> Changes | None:
    """Return what travels; None: everything, for some rank holds another version, or none. Equal on all ranks.

    Args:
        offers: by rank. Trainers give `base` and `changed`, see `BlockHistory`; rollouts `holds`, the digest of the version they have.
    """
    trainers = [offer for offer in offers if "base" in offer]
    held = {trainer["base"] for trainer in trainers} | {offers[rank]["holds"] for rank in rollouts}
    if len(held) != 1 or None in held:
        return None
    runs: dict[int, Runs] = {}
    for rank in set(layout.owners):
        extents = {bucket: layout.extent(bucket) for bucket in layout.buckets_of(rank)}
        sizes = {bucket: stop - start for bucket, (start, stop) in extents.items()}
        runs |= _runs_of(offers[rank]["changed"], sizes, block_bytes)
    return Changes(held.pop(), runs)


def require_one_block(offers: Sequence[Mapping[str, Any]]) -> None:
    """Check that all ranks compare blocks of the same size, or none does.

    Raises:
        ConfigurationError: they differ.
    """
    for rank, offer in enumerate(offers):
        if offer["block_bytes"] != offers[0]["block_bytes"]:
            raise ConfigurationError(
                f"rank 0 has {_setting(offers[0])}, and rank {rank} has {_setting(offer)}: give all ranks the same"
            )


def _setting(one: Mapping[str, Any]) -> str:
    size = one["block_bytes"]
    return "delta=false" if size is None else f"delta=true with delta_block_kib={size >> 10}"


def bytes_of(runs: Runs) -> int:
    return sum(stop - start for start, stop in runs)


def without(runs: Runs, num_bytes: int) -> Runs:
    """Return the bytes of a bucket that are in none of the runs."""
    edges = [0, *(edge for run in runs for edge in run), num_bytes]
    return [(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True) if start < stop]


def _runs_of(changed: str, sizes: Mapping[int, int], block_bytes: int) -> dict[int, Runs]:
    packed = np.frombuffer(zlib.decompress(base64.b64decode(changed)), np.uint8)
    counts = {bucket: -(-size // block_bytes) for bucket, size in sorted(sizes.items())}
    bits = np.unpackbits(packed, count=sum(counts.values()))
    found, first = {}, 0
    for bucket, count in counts.items():
        runs = _runs(bits[first : first + count], block_bytes, sizes[bucket])
        found[bucket] = [(0, sizes[bucket])] if bytes_of(runs) > MOST * sizes[bucket] else runs
        first += count
    return found


def _runs(bits: np.ndarray[Any, np.dtype[np.uint8]], block_bytes: int, num_bytes: int) -> Runs:
    edges = np.flatnonzero(np.diff(bits, prepend=0, append=0)) * block_bytes
    return [(int(start), min(int(stop), num_bytes)) for start, stop in edges.reshape(-1, 2)]


def _rows(digests: bytes) -> np.ndarray[Any, np.dtype[np.uint64]]:
    return np.frombuffer(digests, np.uint64).reshape(-1, 2)
