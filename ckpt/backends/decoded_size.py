"""Bound the decoded size of a compressed chunk before a library allocates memory for it.

The libraries that decode chunks (numcodecs under zarr-python, TensorStore) do not: a few KiB of gzip can become as many GiB. All members of
a stream and all codecs of a chain count. Codecs of other packages that somebody has registered with zarr-python are not known here.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import mmap
import os
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, BinaryIO

from ckpt.errors import LOAD_EARLIER, CorruptCheckpointError, importing, sentence
from ckpt.storage.checkpoint_files import CheckpointFolder, Files

_PIECE_BYTES = 1 << 20
_ZSTD_MAGIC = 0xFD2FB528
_ZSTD_SKIPPED = range(0x184D2A50, 0x184D2A60)
_ZSTD_BLOCK_BYTES = 128 << 10
_ZSTD_WINDOW_BYTES = 128 << 20
"""The largest window that decoders of zstd allow by default."""
_EITHER_HEADER = 32 + zlib.MAX_WBITS
"""For zlib: take streams of zlib and of gzip."""


def require_decodes_within(files: Files, path: str, codecs: Sequence[str], chunk_bytes: int) -> None:
    """Refuse a file that does not decode to one chunk.

    Args:
        path: of the file.
        codecs: names, in Zarr v2 or v3, of what was done to the bytes of the elements, in that order; the last one is decoded first.
        chunk_bytes: of the elements.

    Raises:
        CorruptCheckpointError
    """
    if isinstance(files, CheckpointFolder):
        with files.stream(path) as stream:
            length = min(os.fstat(stream.fileno()).st_size, _most(chunk_bytes) + 1)
            data: Any = memoryview(mmap.mmap(stream.fileno(), length, access=mmap.ACCESS_READ)) if length else b""
    else:
        data = files.first_bytes(path, _most(chunk_bytes) + 1)
    require_bytes_decode_within(data, codecs, chunk_bytes, str(files.root / path))


def require_bytes_decode_within(data: Any, codecs: Sequence[str], chunk_bytes: int, where: str) -> None:
    """`require_decodes_within` for the bytes of a chunk; `where` is their name for errors."""
    try:
        size = _decoded_bytes(data, codecs, chunk_bytes)
    except (zlib.error, lzma.LZMAError, OSError, EOFError, ValueError, RuntimeError) as error:
        raise CorruptCheckpointError(
            f"{where} cannot be decoded: {sentence(error)}", LOAD_EARLIER
        ) from None
    if size is not None and size != chunk_bytes:
        decoded = f"would decode to {size} bytes or more" if size > chunk_bytes else f"decodes to {size} bytes"
        raise CorruptCheckpointError(f"{where} {decoded}, where a chunk has {chunk_bytes}", LOAD_EARLIER)


def _decoded_bytes(data: Any, codecs: Sequence[str], chunk_bytes: int) -> int | None:
    """Return the decoded size, or a size that is too large; None: a codec is not known."""
    most = _most(chunk_bytes)
    left = [name.removeprefix("numcodecs.") for name in codecs]
    size = len(data)
    while left and size <= most:
        codec = left.pop()
        if codec == "crc32c":
            data, size = data[:-4], size - 4
        elif codec in _OTHERS:
            size -= _OTHERS[codec]
            if set(left) & _SIZES.keys():
                raise ValueError(f"{codec} was applied to compressed bytes, which is not decoded here")
        elif codec not in _SIZES:
            return None
        else:
            size = _SIZES[codec](data, most, chunk_bytes)
            if size <= most and left:
                data = _codec(codec).decode(bytes(data))
    return size


def _most(chunk_bytes: int) -> int:
    return 2 * chunk_bytes + _PIECE_BYTES  # inner codecs may add a little


def _by_decoding(open_decoded: Callable[[BinaryIO], Any], data: Any, most: int, _chunk_bytes: int) -> int:
    """Decode all members of a stream, piece by piece; return their length, or the first length beyond `most`."""
    size = 0
    with open_decoded(io.BytesIO(data)) as decoded:
        while size <= most and (piece := decoded.read(_PIECE_BYTES)):
            size += len(piece)
    return size


def _of_zlib(data: Any, most: int, _chunk_bytes: int) -> int:
    size, at = 0, 0
    decoder = zlib.decompressobj(_EITHER_HEADER)
    while size <= most:
        piece = decoder.unconsumed_tail
        if not piece:
            piece = data[at : at + _PIECE_BYTES]
            at += len(piece)
        if not piece:
            raise EOFError("it was cut off")
        size += len(decoder.decompress(piece, _PIECE_BYTES))
        if decoder.eof:
            at -= len(decoder.unused_data)
            if at == len(data):
                break
            decoder = zlib.decompressobj(_EITHER_HEADER)
    return size


def _of_zstd(data: Any, most: int, chunk_bytes: int) -> int:
    """Read the headers of all frames and blocks. Decode only where these do not bound the size, and into memory of that size.

    A streaming decoder, as TensorStore's, heeds the size in a frame's header only at the frame's end.
    """
    declared, least, largest, at = 0, 0, 0, 0
    is_told = True
    while at < len(data):
        magic = _number(data, at, 4)
        if magic in _ZSTD_SKIPPED:
            at += 8 + _number(data, at + 4, 4)
            continue
        if magic != _ZSTD_MAGIC:
            raise ValueError("it is no frame of zstd")
        flags = _number(data, at + 4, 1)
        is_single = flags >> 5 & 1
        window = 0 if is_single else _number(data, at + 5, 1)
        if (8 + (window & 7)) << (7 + (window >> 3)) > max(most, _ZSTD_WINDOW_BYTES):
            raise ValueError("its window is larger than decoders of zstd allow")
        at += 5 + (not is_single) + (0, 1, 2, 4)[flags & 3]
        width = (is_single, 2, 4, 8)[flags >> 6]
        is_told &= width > 0
        declared += _number(data, at, width) + (256 if width == 2 else 0)
        at += width
        if declared > most:
            return declared
        is_last = 0
        while not is_last:
            block = _number(data, at, 3)
            is_last, kind, length = block & 1, block >> 1 & 3, block >> 3
            if kind == 3:
                raise ValueError("a block of zstd is of no kind")
            at += 3 + (1 if kind == 1 else length)
            least += 0 if kind == 2 else length
            largest += _ZSTD_BLOCK_BYTES if kind == 2 else length
            if least > most:
                return least
        at += 4 * (flags >> 2 & 1)
    if at > len(data):
        raise EOFError("it was cut off")
    if is_told and largest <= most:
        return max(declared, least)
    out = bytearray(declared if is_told else chunk_bytes)
    _codec("zstd").decode(bytes(data), out)
    return len(out)


def _number(data: Any, at: int, width: int) -> int:
    if at + width > len(data):
        raise EOFError("it was cut off")
    return int.from_bytes(data[at : at + width], "little")


_SIZES: dict[str, Callable[[Any, int, int], int]] = {
    "gzip": partial(_by_decoding, gzip.open),
    "zlib": _of_zlib,
    "bz2": partial(_by_decoding, bz2.open),
    "lzma": partial(_by_decoding, lzma.open),
    "zstd": _of_zstd,
    "blosc": lambda data, most, chunk_bytes: _number(data, 4, 4),
    "lz4": lambda data, most, chunk_bytes: _number(data, 0, 4),
}
_OTHERS = {"shuffle": 0, "bitround": 0, "adler32": 4, "crc32": 4, "fletcher32": 4, "jenkins_lookup3": 4}
"""Codecs that do not compress, and the bytes that they add."""


def _codec(name: str) -> Any:
    """Return a codec of numcodecs, which is imported at the first chunk that needs one.

    Raises:
        ConfigurationError: it cannot be imported.
    """
    with importing("compressed chunks"):
        import numcodecs
    return numcodecs.get_codec({"id": name})
