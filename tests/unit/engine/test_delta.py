"""Which bytes of buckets travel: exactly those of the blocks that differ, by what all ranks say, and nothing by guess."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from ckpt.engine.wire.delta import BLOCK_KIB, MOST, BlockHistory, agreed_changes, bytes_of, digested, without
from ckpt.engine.wire.layout import ALIGNED, WeightLayout
from ckpt.engine.wire.pool import HostPool, digest_of_bucket

BLOCK = 1024


@given(st.binary(max_size=5000), st.integers(1, 3000))
def test_a_bucket_is_digested_as_a_whole_and_by_blocks(data: bytes, block_bytes: int) -> None:
    found = digested(memoryview(data), block_bytes)
    blocks = [data[start : start + block_bytes] for start in range(0, len(data), block_bytes)]
    assert found.blocks == b"".join(xxhash.xxh3_128_digest(block) for block in blocks)
    assert found.whole == xxhash.xxh3_128_hexdigest(found.blocks)
    assert found.whole == digest_of_bucket(
        torch.frombuffer(bytearray(data + b"x"), dtype=torch.uint8)[:-1], block_bytes
    )
    assert (
        len({found.whole, digested(memoryview(data + b"0"), block_bytes).whole, digested(memoryview(b"1"), 1).whole})
        > 1
    )


def layout_of(num_bytes: int, bucket_bytes: int, owners: list[int]) -> WeightLayout:
    layout = WeightLayout(bucket_bytes, owners)
    layout.add("w", torch.uint8, (num_bytes,))
    return layout


def stream_of(layout: WeightLayout, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (layout.num_bytes,), generator=generator, dtype=torch.uint8)


def buckets_of(layout: WeightLayout, stream: torch.Tensor, rank: int) -> dict[int, torch.Tensor]:
    return {
        bucket: stream[slice(*layout.extent(bucket))]
        for bucket in range(layout.num_buckets)
        if layout.owner(bucket) == rank
    }


def take(history: BlockHistory, layout: WeightLayout, stream: torch.Tensor, rank: int) -> None:
    buckets = buckets_of(layout, stream, rank)
    history.take(layout, {bucket: digested(host.numpy().data, BLOCK).blocks for bucket, host in buckets.items()})


def said_by(histories: Mapping[int, BlockHistory], holds: Mapping[int, str | None]) -> list[dict[str, Any]]:
    """What all ranks have said, as it comes: through JSON."""
    said: list[dict[str, Any]] = [{} for _ in range(max(*histories, *holds) + 1)]
    for rank, history in histories.items():
        said[rank] |= {"base": history.base, "changed": history.changed()}
    for rank, digest in holds.items():
        said[rank] |= {"holds": digest}
    return list(json.loads(json.dumps(said)))


@given(
    num_bytes=st.integers(1, 40_000),
    bucket_bytes=st.integers(1, 40).map(lambda blocks: blocks * ALIGNED),
    num_owners=st.integers(1, 4),
    places=st.lists(st.integers(0, 39_999), max_size=12),
    stretches=st.lists(st.tuples(st.integers(0, 39_999), st.integers(1, 9000)), max_size=2),
)
def test_what_travels_put_into_what_is_held_is_what_was_sent(
    num_bytes: int,
    bucket_bytes: int,
    num_owners: int,
    places: list[int],
    stretches: list[tuple[int, int]],
) -> None:
    layout = layout_of(num_bytes, bucket_bytes, [*range(num_owners)])
    before = stream_of(layout, 1)
    after = before.clone()
    for place in places:
        after[place % layout.num_bytes] ^= 1
    for start, length in stretches:
        after[start % layout.num_bytes :][:length] ^= 1
    histories = {rank: BlockHistory() for rank in range(num_owners)}
    for rank, history in histories.items():
        take(history, layout, before, rank)
        history.commit("v1")
        take(history, layout, after, rank)
    changes = agreed_changes(said_by(histories, {num_owners: "v1"}), layout, [num_owners], BLOCK)
    assert changes is not None and changes.base == "v1" and [*sorted(changes.runs)] == [*range(layout.num_buckets)]
    got, least = before.clone(), 0
    for bucket, runs in changes.runs.items():
        first, last = layout.extent(bucket)
        for start, stop in runs:
            assert 0 <= start < stop <= last - first
            got[first + start : first + stop] = after[first + start : first + stop]
        rest = without(runs, last - first)
        assert bytes_of(rest) + bytes_of(runs) == last - first
        assert sorted(rest + runs)[-1][1] == last - first
        blocks = [(start, min(start + BLOCK, last - first)) for start in range(0, last - first, BLOCK)]
        differ = [
            (start, stop)
            for start, stop in blocks
            if not torch.equal(before[first + start : first + stop], after[first + start : first + stop])
        ]
        least += bytes_of(differ)
        if bytes_of(differ) > MOST * (last - first):
            assert runs == [(0, last - first)]
        else:
            assert bytes_of(runs) == bytes_of(differ)
    assert torch.equal(got, after)
    assert least <= changes.num_bytes <= layout.num_bytes


@pytest.mark.parametrize(
    ("holds", "why"),
    [
        ({2: "v1", 3: None}, "a rollout holds nothing"),
        ({2: "v0", 3: "v1"}, "a rollout holds another version"),
        ({2: "v0", 3: "v0"}, "all rollouts hold another version than the trainers"),
    ],
)
def test_everything_travels_if_one_rollout_does_not_hold_what_the_trainers_sent(
    holds: dict[int, str | None], why: str
) -> None:
    layout = layout_of(9000, 2048, [0, 1])
    histories = {rank: BlockHistory() for rank in (0, 1)}
    for rank, history in histories.items():
        take(history, layout, stream_of(layout, 1), rank)
        history.commit("v1")
    assert agreed_changes(said_by(histories, {2: "v1", 3: "v1"}), layout, [2, 3], BLOCK) is not None
    assert agreed_changes(said_by(histories, holds), layout, [2, 3], BLOCK) is None, why


def test_everything_travels_if_a_trainer_has_nothing_to_compare_with() -> None:
    layout, other = layout_of(9000, 2048, [0, 1]), layout_of(9001, 2048, [0, 1])
    for case in ("first", "forgotten", "of another layout"):
        histories = {rank: BlockHistory() for rank in (0, 1)}
        for rank, history in histories.items():
            if case != "first" or rank == 0:
                take(
                    history, other if case == "of another layout" and rank == 1 else layout, stream_of(layout, 1), rank
                )
                history.commit("v1")
            if case == "forgotten" and rank == 1:
                history.forget()
            take(history, layout, stream_of(layout, 1), rank)
        assert [history.base for history in histories.values()] == ["v1", None], case
        assert agreed_changes(said_by(histories, {2: "v1"}), layout, [2], BLOCK) is None, case


def test_a_trainer_that_owns_nothing_has_nothing_to_say_and_says_that() -> None:
    layout = layout_of(100, 1024, [0, 1])
    histories = {rank: BlockHistory() for rank in (0, 1)}
    for rank, history in histories.items():
        take(history, layout, stream_of(layout, 1), rank)
        history.commit("v1")
        take(history, layout, stream_of(layout, 2), rank)
    changes = agreed_changes(said_by(histories, {2: "v1"}), layout, [2], BLOCK)
    assert changes is not None and changes.runs == {0: [(0, 256)]}


def test_a_pool_that_remembers_digests_by_blocks_and_one_that_does_not_as_a_whole() -> None:
    tensors = {f"w{n}": torch.randn(70, 33, generator=torch.Generator().manual_seed(n)) for n in range(4)}
    pools = [HostPool(0, 4096), HostPool(0, 4096, block_bytes=BLOCK)]
    for pool, block_bytes in zip(pools, (None, BLOCK), strict=True):
        layout = WeightLayout(4096, [0])
        for name, tensor in tensors.items():
            pool.put(layout, layout.add(name, tensor.dtype, tensor.shape), tensor)
        buckets = pool.buckets(layout)
        assert pool.seal(layout) == {bucket: digest_of_bucket(host, block_bytes) for bucket, host in buckets.items()}
    assert pools[0].history is None and pools[1].history is not None and pools[1].history.base is None


def test_what_says_which_blocks_have_changed_is_short() -> None:
    """Of 64 GiB: some KiB where whole tensors are frozen, and never more than a bit for each block, and what JSON makes of it."""
    layout = layout_of(64 << 30, 256 << 20, [0])
    num_blocks = (256 << 20) // (BLOCK_KIB << 10)
    history = BlockHistory()
    blocks = {bucket: bytes(16 * num_blocks) for bucket in range(layout.num_buckets)}
    history.take(layout, blocks)
    history.commit("v1")
    history.take(layout, {bucket: bytes([bucket % 3 == 0] * 16 * num_blocks) for bucket in blocks})
    assert len(history.changed() or "") < 4 << 10
    random = torch.randint(2, (layout.num_buckets, num_blocks, 1), generator=torch.Generator().manual_seed(1))
    random = random.expand(-1, -1, 2).contiguous()
    history.take(layout, {bucket: random[bucket].numpy().astype("int64").tobytes() for bucket in blocks})
    assert len(history.changed() or "") < layout.num_buckets * num_blocks / 8 * 1.4
