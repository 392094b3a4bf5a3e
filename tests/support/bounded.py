"""Limits on the memory that a block of a test may ask for, and bombs: few bytes that decode to many."""

from __future__ import annotations

import bz2
import gzip
import lzma
import resource
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_ZSTD_BLOCK_BYTES = 128 << 10


@contextmanager
def little_memory(mib: int = 384) -> Iterator[None]:
    """Let this process map so much more than it has; beyond that allocations fail."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + (mib << 20), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def zstd_frame(num_bytes: int, told: int | None = None, window: int = 7 << 3, *, compressed: bool = False) -> bytes:
    """A frame of zeros: 4 bytes for 128 KiB.

    Args:
        told: size in its header; None: it says none.
        window: byte of the header that describes the window; the default is 128 KiB.
        compressed: the blocks are of the kind whose headers do not tell the decoded size.
    """
    # literals: one byte 0, repeated; no sequences. Its header has 3 bytes for a length above 4095.
    blocks = []
    for start in range(0, num_bytes, _ZSTD_BLOCK_BYTES):
        length = min(_ZSTD_BLOCK_BYTES, num_bytes - start)
        body = (1 | 3 << 2 | length << 4).to_bytes(3, "little") + b"\0\0" if compressed else b"\0"
        kind, size = (2, len(body)) if compressed else (1, length)
        is_last = start + length == num_bytes
        blocks.append((is_last | kind << 1 | size << 3).to_bytes(3, "little") + body)
    head = bytes([0, window]) if told is None else bytes([3 << 6, window]) + told.to_bytes(8, "little")
    return b"\x28\xb5\x2f\xfd" + head + b"".join(blocks)


ZSTD_SKIPPED = b"\x5a\x2a\x4d\x18\x04\x00\x00\x00skip"
BOMBS: dict[str, tuple[str, Callable[[int, int], bytes]]] = {
    "gzip": ("gzip", lambda size, much: gzip.compress(bytes(much), 9)),
    "gzip, a small member first": ("gzip", lambda size, much: gzip.compress(bytes(size)) + gzip.compress(bytes(much), 9)),
    "zlib, a small stream first": ("zlib", lambda size, much: zlib.compress(bytes(size)) + zlib.compress(bytes(much), 9)),
    "bz2, a small stream first": ("bz2", lambda size, much: bz2.compress(bytes(size)) + bz2.compress(bytes(much))),
    "lzma, a small stream first": ("lzma", lambda size, much: lzma.compress(bytes(size)) + lzma.compress(bytes(much))),
    "lzma, without a header": (
        "lzma",
        lambda size, much: lzma.compress(bytes(much), lzma.FORMAT_RAW, filters=[{"id": lzma.FILTER_LZMA2}]),
    ),
    "zstd": ("zstd", lambda size, much: zstd_frame(much, much)),
    "zstd, no size": ("zstd", lambda size, much: zstd_frame(much)),
    "zstd, a frame that is skipped first": ("zstd", lambda size, much: ZSTD_SKIPPED + zstd_frame(much, much)),
    "zstd, a small frame first": ("zstd", lambda size, much: zstd_frame(size, size) + zstd_frame(much, much)),
    "zstd, a small frame first, then no size": ("zstd", lambda size, much: zstd_frame(size, size) + zstd_frame(much)),
    "zstd, a size that is a lie": ("zstd", lambda size, much: zstd_frame(much, size)),
    "zstd, compressed blocks of no size": ("zstd", lambda size, much: zstd_frame(much, compressed=True)),
    "zstd, compressed blocks and a lie": ("zstd", lambda size, much: zstd_frame(much, size, compressed=True)),
    "zstd, garbage after it": ("zstd", lambda size, much: zstd_frame(much, size, compressed=True) + b"garbage"),
    "zstd, a window of 1 TiB": ("zstd", lambda size, much: zstd_frame(size, size, window=30 << 3)),
    "blosc": ("blosc", lambda size, much: b"\x02\x01\x91\x04" + much.to_bytes(4, "little") + bytes(64)),
    "lz4": ("lz4", lambda size, much: much.to_bytes(4, "little") + bytes(64)),
    "a long file": ("zstd", lambda size, much: zstd_frame(size, size) + b"\x5a\x2a\x4d\x18" + much.to_bytes(4, "little") + bytes(much)),
    "a short one": ("zstd", lambda size, much: zstd_frame(size - 1, size - 1)),
}  # fmt: skip
"""What is wrong -> codec, and a function of (bytes of a chunk, many bytes)."""
