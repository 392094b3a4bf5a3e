"""A compressed chunk that would decode to anything but its elements is refused, before memory for it is asked for."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import zlib
from collections.abc import Callable
from pathlib import Path

import numcodecs
import numpy as np
import pytest
import tensorstore as ts

from ckpt.backends.decoded_size import require_bytes_decode_within, require_decodes_within
from ckpt.errors import CorruptCheckpointError
from ckpt.storage.checkpoint_files import CheckpointFolder
from tests.support.bounded import BOMBS, ZSTD_SKIPPED, little_memory, zstd_frame
from tests.support.covering import sampled

SIZE = 400_000
MUCH = 40 << 20
LITTLE_MIB = 24
DATA = np.arange(SIZE // 8, dtype=np.float32).tobytes() + np.random.default_rng(0).bytes(SIZE // 2)


def _by_numcodecs(codec: str, **options: object) -> Callable[[bytes], bytes]:
    return lambda data: bytes(numcodecs.get_codec({"id": codec, **options}).encode(data))


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_is_refused_in_little_memory(tmp_path: Path, bomb: str) -> None:
    codec, make = BOMBS[bomb]
    file = tmp_path / "chunk"
    file.write_bytes(make(SIZE, MUCH))
    with (
        little_memory(LITTLE_MIB),
        pytest.raises(CorruptCheckpointError, match="chunk (would decode to|decodes to|cannot be decoded)"),
    ):
        require_decodes_within(CheckpointFolder(file.parent), file.name, [codec], SIZE)


SOUND: dict[str, tuple[list[str], Callable[[bytes], bytes]]] = {
    "gzip": (["gzip"], gzip.compress),
    "zlib": (["zlib"], zlib.compress),
    "bz2": (["bz2"], bz2.compress),
    "lzma": (["lzma"], lzma.compress),
    "two members": (["gzip"], lambda data: gzip.compress(data[:9]) + gzip.compress(data[9:])),
    "two streams": (["zlib"], lambda data: zlib.compress(data[:9]) + zlib.compress(data[9:])),
    "two frames": (["zstd"], lambda data: b"".join(map(_by_numcodecs("zstd"), (data[:9], data[9:])))),
    "a skipped frame": (["zstd"], lambda data: _by_numcodecs("zstd")(data) + ZSTD_SKIPPED),
    "no size": (["zstd"], lambda data: zstd_frame(len(data))),
    "no size, compressed": (["zstd"], lambda data: zstd_frame(len(data), compressed=True)),
    "a checksum": (["zstd"], _by_numcodecs("zstd", checksum=True)),
    "many levels": (["zstd"], _by_numcodecs("zstd", level=22)),
    "blosc": (["blosc"], _by_numcodecs("blosc")),
    "lz4": (["lz4"], _by_numcodecs("lz4")),
    "numcodecs": (["numcodecs.lz4"], _by_numcodecs("lz4")),
    "crc32c behind": (["zstd", "crc32c"], lambda data: _by_numcodecs("zstd")(data) + b"1234"),
    "twice": (["gzip", "zstd"], lambda data: _by_numcodecs("zstd")(gzip.compress(data))),
    "shuffled": (["shuffle", "zlib"], zlib.compress),
    "a codec of somebody else's": (["own"], lambda data: b"whatever"),
    "none": ([], lambda data: data),
}


@pytest.mark.parametrize("how", SOUND)
def test_chunks_that_decode_to_their_elements_are_taken(how: str) -> None:
    codecs, encode = SOUND[how]
    require_bytes_decode_within(encode(DATA), codecs, len(DATA), "chunk")


@pytest.mark.parametrize(
    "codecs", [["gzip", "gzip"], ["gzip", "zstd"], ["zstd", "crc32c"], ["gzip", "shuffle", "zlib"]]
)
def test_a_bomb_inside_of_another_codec_is_refused(codecs: list[str]) -> None:
    data = bytes(MUCH)
    for codec in codecs:
        data = data if codec == "shuffle" else bytes(numcodecs.get_codec({"id": codec}).encode(data))
    with little_memory(LITTLE_MIB), pytest.raises(CorruptCheckpointError, match="chunk"):
        require_bytes_decode_within(data, codecs, SIZE, "chunk")


@pytest.mark.parametrize("how", ["gzip", "zlib", "bz2", "two members", "two frames", "no size", "a checksum", "twice"])
def test_what_was_cut_off_is_damage(how: str) -> None:
    codecs, encode = SOUND[how]
    data = encode(DATA)
    for end in (0, 3, len(data) // 2):
        with pytest.raises(CorruptCheckpointError, match="chunk"):
            require_bytes_decode_within(data[:end], codecs, len(DATA), "chunk")


@sampled("level", [1, 19, 22])
@pytest.mark.parametrize("driver", ["zarr", "zarr3"])
def test_what_tensorstore_writes_is_taken(tmp_path: Path, driver: str, level: int) -> None:
    values = np.frombuffer(os.urandom(999) * 4004, np.float32)
    codec = (
        {"compressor": {"id": "zstd", "level": level}}
        if driver == "zarr"
        else {"codecs": [{"name": "zstd", "configuration": {"level": level}}]}
    )
    kvstore = {"driver": "file", "path": f"{tmp_path}/"}
    spec = {"driver": driver, "kvstore": kvstore, "metadata": {"shape": [len(values)], **codec}}
    ts.open(spec, create=True, dtype=ts.float32).result().write(values).result()
    require_decodes_within(CheckpointFolder(tmp_path), "0" if driver == "zarr" else "c/0", ["zstd"], values.nbytes)
