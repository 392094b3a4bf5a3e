"""Digests do not depend on how a stream is cut."""

from __future__ import annotations

import itertools

import xxhash
from hypothesis import given
from hypothesis import strategies as st

from ckpt.format.digests import EMPTY_DIGEST, BlockDigests


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


@given(st.binary(max_size=60), st.integers(1, 8), st.integers(0, 59), st.integers(0, 60))
def test_a_stream_agrees_up_to_the_first_whole_block_that_differs(data: bytes, block: int, at: int, seen: int) -> None:
    other = bytearray(data)
    if at < len(other):
        other[at] ^= 1
    digests = [xxhash.xxh3_64_intdigest(other[begin : begin + block]) for begin in range(0, len(other), block)]
    stream = BlockDigests(block)
    stream.update(memoryview(data)[:seen])
    whole_blocks = min(seen, len(data)) // block
    assert stream.agree(digests) is (at >= len(data) or at // block >= whole_blocks)
    assert stream.agree(tuple(digests[: max(whole_blocks - 1, 0)])) is (whole_blocks == 0)
