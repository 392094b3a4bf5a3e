"""Bound the decoded size of a compressed chunk before a library allocates memory for it.

The libraries that decode chunks (numcodecs under zarr-python, TensorStore) do not: a few KiB of gzip can become as many GiB. Only the
outermost of several codecs is checked, and only codecs in `_SIZES`.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from ckpt.errors import CorruptCheckpointError

_PIECE_BYTES = 1 << 20
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"


def require_decodes_within(file: Path, codec: str, chunk_bytes: int) -> None:
    """Refuse a file that decodes to far more bytes than its chunk has.

    Args:
        codec: name of the outermost codec, in Zarr v2 or v3.
        chunk_bytes: of the elements. Inner codecs may add a little.

    Raises:
        CorruptCheckpointError
    """
    most = 2 * chunk_bytes + _PIECE_BYTES
    if codec not in _SIZES:
        return
    with file.open("rb") as stream:
        try:
            size = _SIZES[codec](stream, most)
        except (zlib.error, lzma.LZMAError, OSError, EOFError, ValueError):
            return  # the library's own error is better
    if size > most:
        raise CorruptCheckpointError(
            f"{file} would decode to {size} bytes or more, where a chunk has {chunk_bytes}. Load an earlier checkpoint."
        )


def _by_decoding(open_decoded: Callable[[BinaryIO], Any], stream: BinaryIO, most: int) -> int:
    """Decode a stream piece by piece; return its length, or the first length beyond `most`."""
    size = 0
    with open_decoded(stream) as decoded:
        while size <= most and (piece := decoded.read(_PIECE_BYTES)):
            size += len(piece)
    return size


def _of_zlib(stream: BinaryIO, most: int) -> int:
    decoder, size = zlib.decompressobj(), 0
    while size <= most and (data := decoder.unconsumed_tail or stream.read(_PIECE_BYTES)) and not decoder.eof:
        size += len(decoder.decompress(data, _PIECE_BYTES))
    return size


def _of_zstd(stream: BinaryIO, most: int) -> int:
    """Read the size in the frame's header, which decoders allocate by. zarr-python writes no frame without it."""
    head = stream.read(18)
    if head[:4] != _ZSTD_MAGIC or len(head) < 6:
        return 0
    flags = head[4]
    is_single = flags >> 5 & 1
    at = 5 + (not is_single) + (0, 1, 2, 4)[flags & 3]
    width = (is_single, 2, 4, 8)[flags >> 6]
    size = int.from_bytes(head[at : at + width], "little") + (256 if width == 2 else 0)
    return size if width else most + 1


_SIZES: dict[str, Callable[[BinaryIO, int], int]] = {
    "gzip": partial(_by_decoding, gzip.open),
    "zlib": _of_zlib,
    "bz2": partial(_by_decoding, bz2.open),
    "lzma": partial(_by_decoding, lzma.open),
    "zstd": _of_zstd,
    "blosc": lambda stream, most: int.from_bytes(stream.read(8)[4:], "little"),
    "lz4": lambda stream, most: int.from_bytes(stream.read(4), "little"),
}
