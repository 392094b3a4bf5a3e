"""The order in which a direct load reads chunks, and which files it asks the kernel for ahead of that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpt.format.box import whole
from ckpt.format.records import ArraySpec, ChunkExtent
from ckpt.loading.direct import AHEAD_BYTES, AHEAD_CHUNKS, ChunkReader, DirectReading
from ckpt.loading.strategy import ReadRequest, Stored, StoredPart
from ckpt.storage.wanted_bytes import WantedBox

MIB = 1 << 20


class Recorder:
    """Notes the calls of a `ChunkReader`, by the number of the chunk."""

    bytes_read = 0

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def read(self, parts: Sequence[StoredPart]) -> None:
        self.calls.append(("read", int(parts[0].chunk.file)))

    def read_ahead(self, parts: Sequence[StoredPart], most_bytes: int) -> None:
        assert most_bytes == AHEAD_BYTES
        self.calls.append(("ahead", int(parts[0].chunk.file)))

    def close(self) -> None:
        self.calls.append(("close", -1))


class OneFileEach:
    """A checkpoint in which each request is one chunk of a file of its own."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes

    def parts(self, request: ReadRequest) -> list[StoredPart]:
        number = int(request.name)
        chunk = ChunkExtent(file=f"{number:03}", offset=0, length=self._sizes[number], block_bytes=4 * MIB, digests=())
        part = WantedBox(0, (0,), whole((0,)), request.out, request.label)
        return [StoredPart(chunk, part, ArraySpec("a", "uint8", (0,), (0,)), "zarr", whole((0,)))]


def calls_of(sizes: Sequence[int], start: float) -> list[tuple[str, int]]:
    recorder = Recorder()
    requests = [ReadRequest(str(number), "w", whole((0,)), torch.empty(0)) for number in range(len(sizes))]
    stored: Any = OneFileEach(sizes)
    DirectReading(requests, cast(Stored, stored), [cast(ChunkReader, recorder)], start).run()
    return recorder.calls


@given(st.lists(st.integers(1, 80 * MIB), max_size=80), st.sampled_from([0.0, 0.25, 0.5, 0.75]))
def test_each_chunk_is_read_once_in_storage_order_and_asked_for_once_before(sizes: list[int], start: float) -> None:
    calls = calls_of(sizes, start)
    read = [number for call, number in calls if call == "read"]
    asked = [number for call, number in calls if call == "ahead"]
    first = read[0] if read else 0
    assert read == [*range(first, len(sizes)), *range(first)]
    assert asked == read[1:]
    for number in asked:
        assert calls.index(("ahead", number)) < calls.index(("read", number))
    assert calls[-1] == ("close", -1)


@given(st.lists(st.integers(1, 80 * MIB), min_size=1, max_size=80))
def test_no_more_is_asked_for_ahead_than_the_limits_say(sizes: list[int]) -> None:
    behind: list[int] = []  # asked for, behind the chunk that is read next
    reads_next = 0
    for call, number in calls_of(sizes, 0.0):
        if call == "ahead":
            assert len(behind) < AHEAD_CHUNKS - 1
            assert sum(sizes[one] for one in behind) < AHEAD_BYTES
            behind.append(number)
        elif call == "read":
            reads_next = number + 1
            behind = [one for one in behind if one != reads_next]


def test_hosts_start_at_equal_shares_of_the_bytes() -> None:
    sizes = [MIB] * 8
    firsts = [next(n for call, n in calls_of(sizes, host / 4) if call == "read") for host in range(4)]
    assert firsts == [0, 2, 4, 6]


def test_a_load_of_nothing_closes_its_reader() -> None:
    assert calls_of([], 0.5) == [("close", -1)]
