"""Digests do not depend on how a stream is cut."""

from __future__ import annotations

import itertools

import xxhash
from hypothesis import given
from hypothesis import strategies as st

from ckpt.blocks import EMPTY_DIGEST, BlockDigests


@given(st.binary(max_size=200), st.lists(st.integers(0, 200), max_size=6), st.integers(1, 64))
def test_digests_are_those_of_the_blocks_however_the_bytes_arrive(data: bytes, cuts: list[int], block: int) -> None:
    stream = BlockDigests(block)
    edges = [0, *sorted(cuts), len(data)]
    for start, stop in itertools.pairwise(edges):
        stream.update(memoryview(data)[start:stop])
    assert stream.close() == tuple(xxhash.xxh3_64_intdigest(data[at : at + block]) for at in range(0, len(data), block))


def test_nothing_has_no_blocks_and_the_empty_digest() -> None:
    assert BlockDigests(4).close() == ()
    assert xxhash.xxh3_128_hexdigest(b"") == EMPTY_DIGEST
