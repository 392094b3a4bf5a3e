"""Digests: one xxh3-64 for each block of a chunk, one xxh3-128 for the bytes of a file outside of chunks."""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

StreamDigest = xxhash.xxh3_128
"""The digest of a stream of bytes."""

EMPTY_DIGEST: str = StreamDigest().hexdigest()
"""The `FileRecord.rest` of a file whose bytes all lie in chunks."""


def digest_of(data: bytes | memoryview) -> str:
    """Return the xxh3-128 of some bytes as 32 lower-case hex digits, as manifests hold it for whole files."""
    return xxhash.xxh3_128_hexdigest(data)


def digest_bytes_of(data: bytes | memoryview) -> bytes:
    """Return the xxh3-128 of some bytes as 16 bytes."""
    return xxhash.xxh3_128_digest(data)


def block_digest_of(data: bytes | memoryview) -> int:
    """Return the xxh3-64 of some bytes."""
    return xxhash.xxh3_64_intdigest(data)


class BlockDigests:
    """Computes one xxh3-64 for each `block_bytes` bytes of a stream, in whatever pieces the stream comes.

    The interpreter is free while a piece is digested (xxhash releases it for anything but small pieces).

    Example:
        >>> stream = BlockDigests(4)
        >>> stream.update(memoryview(b"abcdef"))
        >>> [f"{digest:016x}" for digest in stream.close()] == [xxhash.xxh3_64_hexdigest(b) for b in (b"abcd", b"ef")]
        True
    """

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._room = block_bytes
        self._open = xxhash.xxh3_64()
        self._done: list[int] = []

    def update(self, piece: memoryview) -> None:
        """Take the next bytes of the stream; `piece` is flat and of single bytes."""
        at = 0
        while at < len(piece):
            end = min(at + self._room, len(piece))
            self._open.update(piece[at:end])
            self._room -= end - at
            at = end
            if self._room == 0:
                self._finish_block()

    def agree(self, digests: Sequence[int]) -> bool:
        """Whether the complete blocks so far have the first of these digests."""
        return self._done == list(digests[: len(self._done)])

    def close(self) -> tuple[int, ...]:
        """Return all digests; the last block may be shorter, and an empty stream has none. Call `update` no more."""
        if self._room < self._block_bytes:
            self._finish_block()
        return tuple(self._done)

    def _finish_block(self) -> None:
        self._done.append(self._open.intdigest())
        self._open.reset()
        self._room = self._block_bytes
