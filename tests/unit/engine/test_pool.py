"""What trainers put into their pools and rollouts find in their receive buffers: any tensors, strides, buckets and owners."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from ckpt.engine.wire.layout import ALIGNED, WeightLayout
from ckpt.engine.wire.pool import HostPool, ReceivedStream, digest_of_bucket
from ckpt.errors import ConfigurationError
from ckpt.format.dtypes import as_integers
from ckpt.memory.host import staging_memory
from tests.support.states import ALL_DTYPES, random_bits, same_bits, zero_bits


def _transposed(tensor: torch.Tensor) -> torch.Tensor:
    backwards = tuple(reversed(range(tensor.dim())))
    return tensor.permute(backwards).contiguous().permute(backwards)


def _every_second(tensor: torch.Tensor) -> torch.Tensor:
    out = zero_bits((*tensor.shape, 2), tensor.dtype)[..., 0]
    as_integers(out).copy_(as_integers(tensor))
    return out


LAYS = {"as it is": lambda tensor: tensor, "transposed": _transposed, "with gaps": _every_second}
TENSORS = st.lists(
    st.tuples(
        st.sampled_from(ALL_DTYPES),
        st.lists(st.integers(0, 17), max_size=3).map(tuple),
        st.sampled_from(sorted(LAYS)),
    ),
    max_size=8,
)
OWNERS = st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True)
BUCKETS = st.integers(1, 12).map(lambda blocks: blocks * ALIGNED)


def tensors_of(kinds: Sequence[tuple[torch.dtype, tuple[int, ...], str]], seed: int) -> dict[str, torch.Tensor]:
    return {
        f"w.{number}": LAYS[lay](random_bits(shape, dtype, seed=100 * seed + number))
        for number, (dtype, shape, lay) in enumerate(kinds)
    }


def sent(
    pools: Sequence[HostPool],
    tensors: dict[str, torch.Tensor],
    bucket_bytes: int,
    owners: Sequence[int],
    aliases: dict[str, str] | None = None,
) -> tuple[WeightLayout, dict[int, str]]:
    """What all trainers do with the same tensors: the layout, and the digests of all of them."""
    digests: dict[int, str] = {}
    for pool in pools:
        layout = WeightLayout(bucket_bytes, owners, aliases)
        for name, tensor in tensors.items():
            pool.put(layout, layout.add(name, tensor.dtype, tensor.shape), tensor)
        own = pool.seal(layout)
        assert not own.keys() & digests.keys()
        digests |= own
    return layout, digests


def landed(pools: Sequence[HostPool], layout: WeightLayout, receive_buffer: ReceivedStream) -> dict[str, torch.Tensor]:
    receive_buffer.make_room(layout)
    for pool in pools:
        for bucket, host in pool.buckets(layout).items():
            receive_buffer.bucket(bucket).copy_(host)
    return dict(receive_buffer.weights())


def require_equal(found: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(tensors)
    for name, tensor in tensors.items():
        assert same_bits(found[name], tensor), name


@pytest.mark.usefixtures("turns")
@settings(max_examples=50)
@given(TENSORS, TENSORS, BUCKETS, OWNERS)
def test_what_all_owners_send_gives_back_every_bit_also_in_memory_used_before(
    kinds: list[tuple[torch.dtype, tuple[int, ...], str]],
    others: list[tuple[torch.dtype, tuple[int, ...], str]],
    bucket_bytes: int,
    owners: list[int],
) -> None:
    pools = [HostPool(rank, bucket_bytes) for rank in owners]
    receive_buffer = ReceivedStream()
    for seed, some in enumerate((kinds, others, kinds), start=1):
        tensors = tensors_of(some, seed)
        layout, digests = sent(pools, tensors, bucket_bytes, owners)
        require_equal(landed(pools, layout, receive_buffer), tensors)
        assert digests == {bucket: digest_of_bucket(receive_buffer.bucket(bucket)) for bucket in range(layout.num_buckets)}


@given(TENSORS, BUCKETS, OWNERS)
def test_digests_of_equal_weights_are_equal_whatever_was_in_the_memory_before(
    kinds: list[tuple[torch.dtype, tuple[int, ...], str]], bucket_bytes: int, owners: list[int]
) -> None:
    fresh = sent([HostPool(rank, bucket_bytes) for rank in owners], tensors_of(kinds, 1), bucket_bytes, owners)
    used = [HostPool(rank, bucket_bytes) for rank in owners]
    filled = {"all ones": torch.full((20 * bucket_bytes,), 255, dtype=torch.uint8)}
    sent(used, filled, bucket_bytes, owners)
    assert sent(used, tensors_of(kinds, 1), bucket_bytes, owners)[1] == fresh[1]


@pytest.mark.parametrize("num_owners", [1, 3])
@pytest.mark.parametrize("lay", sorted(LAYS))
def test_a_cast_is_that_of_torch_also_where_a_bucket_ends_within_the_tensor(num_owners: int, lay: str) -> None:
    tensor = LAYS[lay](torch.randn(70, 33, generator=torch.Generator().manual_seed(5)))
    owners = range(num_owners)
    pools = [HostPool(rank, 512) for rank in owners]
    for pool in pools:
        layout = WeightLayout(512, owners)
        pool.put(layout, layout.add("w", torch.bfloat16, tensor.shape), tensor)
        pool.seal(layout)
    assert same_bits(landed(pools, layout, ReceivedStream())["w"], tensor.to(torch.bfloat16))


def test_lazy_conjugates_and_negatives_are_sent_as_what_they_are() -> None:
    plain = torch.randn(9, 11, dtype=torch.complex64, generator=torch.Generator().manual_seed(1))
    tensors = {"conj": plain.conj(), "conj of some": plain.t().conj()[3:], "negative": plain.conj().imag}
    assert tensors["conj"].is_conj() and tensors["negative"].is_neg()
    pools = [HostPool(rank, 256) for rank in (0, 1)]
    layout, _ = sent(pools, tensors, 256, (0, 1))
    found = landed(pools, layout, ReceivedStream())
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor.resolve_conj().resolve_neg()), name


def test_a_tensor_that_needs_a_gradient_and_one_that_is_expanded_are_sent() -> None:
    tensors = {"learned": torch.randn(3, 5, requires_grad=True), "expanded": torch.arange(4.0).expand(3, 4)}
    pool = HostPool(0, 256)
    layout, _ = sent([pool], tensors, 256, [0])
    require_equal(
        landed([pool], layout, ReceivedStream()),
        {"learned": tensors["learned"].detach(), "expanded": tensors["expanded"]},
    )


class _Untouchable:
    """A tensor of another owner: to look at its elements is an error."""

    def detach(self) -> _Untouchable:
        raise AssertionError("a tensor was looked at of which this rank owns nothing")

    is_contiguous = contiguous = to = view = detach


def test_a_tensor_is_not_looked_at_where_this_rank_owns_nothing_of_it() -> None:
    layout = WeightLayout(256, [0, 1])
    pool = HostPool(1, 256)
    pool.put(layout, layout.add("of 0", torch.float32, (64,)), _Untouchable())  # type: ignore[arg-type]
    pool.put(layout, layout.add("of 1", torch.float32, (64,)), torch.arange(64.0))
    pool.put(layout, layout.add("of 0 again", torch.float32, (64,)), _Untouchable())  # type: ignore[arg-type]
    assert sorted(pool.seal(layout)) == [1]


class _NewMemory(TorchDispatchMode):
    """Notes the bytes of every tensor that a copy is made into new memory of."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes = [0]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default):
            self.sizes.append(out.nbytes)
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_has_gaps_or_is_cast_is_never_copied_as_a_whole(dtype: torch.dtype) -> None:
    tensor = torch.randn(64, 96).t()
    pool, receive_buffer = HostPool(0, 2048), ReceivedStream()
    layout = WeightLayout(2048, [0])
    with _NewMemory() as noted:
        pool.put(layout, layout.add("w", dtype, tensor.shape), tensor)
    assert max(noted.sizes) <= 2048
    pool.seal(layout)
    assert same_bits(landed([pool], layout, receive_buffer)["w"], tensor.to(dtype))


def test_the_pool_keeps_its_memory_from_update_to_update_and_lets_go_of_what_is_left_over() -> None:
    pool = HostPool(0, 256)
    layout, _ = sent([pool], {"w": torch.zeros(1000)}, 256, [0])
    first = {bucket: host.data_ptr() for bucket, host in pool.buckets(layout).items()}
    layout, _ = sent([pool], {"w": torch.ones(1000)}, 256, [0])
    assert {bucket: host.data_ptr() for bucket, host in pool.buckets(layout).items()} == first
    layout, _ = sent([pool], {"w": torch.ones(100)}, 256, [0])
    assert {bucket: host.data_ptr() for bucket, host in pool.buckets(layout).items()} == {
        bucket: first[bucket] for bucket in (0, 1)
    }
    assert len(pool._segments) == 2


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of every memory that a receive buffer has asked for."""
    sizes: list[int] = []

    def noted(num_bytes: int) -> torch.Tensor:
        sizes.append(num_bytes)
        return staging_memory(num_bytes)

    monkeypatch.setattr("ckpt.engine.wire.pool.staging_memory", noted)
    return sizes


def test_the_receive_buffer_keeps_its_memory_while_the_weights_fit_and_nobody_reads(made: list[int]) -> None:
    pool, receive_buffer = HostPool(0, 256), ReceivedStream()
    for size in (1000, 1000, 10, 1000, 2000):
        layout, _ = sent([pool], {"w": torch.ones(size)}, 256, [0])
        landed([pool], layout, receive_buffer)
    assert made == [4096, 8192]


def test_who_reads_a_receive_buffer_keeps_what_it_reads_while_the_next_weights_land(made: list[int]) -> None:
    pool, receive_buffer = HostPool(0, 256), ReceivedStream()
    old = {"a": torch.randn(100), "b": torch.randn(100)}
    layout, _ = sent([pool], old, 256, [0], {"tied": "a"})
    landed([pool], layout, receive_buffer)
    slow = receive_buffer.weights()
    found = dict([next(slow)])
    for seed in (2, 3):
        new = {"a": torch.full((100,), float(seed)), "b": torch.full((100,), -float(seed))}
        layout, _ = sent([pool], new, 256, [0], {"tied": "a"})
        require_equal(landed([pool], layout, receive_buffer), {**new, "tied": new["a"]})
    found |= dict(slow)
    require_equal(found, {**old, "tied": old["a"]})
    receive_buffer.make_room(layout)
    assert made == [1024, 1024], "the reader of memory that is no more keeps no other from being used again"


def test_a_reader_that_ends_early_reads_no_more(made: list[int]) -> None:
    pool, receive_buffer = HostPool(0, 256), ReceivedStream()
    layout, _ = sent([pool], {"a": torch.randn(100), "b": torch.randn(100)}, 256, [0])
    landed([pool], layout, receive_buffer)
    reader: Iterator[tuple[str, torch.Tensor]] = receive_buffer.weights()
    next(reader)
    reader.close()
    receive_buffer.make_room(layout)
    assert made == [1024]
    reader = receive_buffer.weights()
    next(reader)
    receive_buffer.make_room(layout)
    assert made == [1024, 1024]


def test_a_reader_that_begins_late_reads_the_memory_of_its_update() -> None:
    pool, receive_buffer = HostPool(0, 256), ReceivedStream()
    old = {"a": torch.randn(100)}
    layout, _ = sent([pool], old, 256, [0])
    landed([pool], layout, receive_buffer)
    late = receive_buffer.weights()
    receive_buffer.let_go()
    layout, _ = sent([pool], {"a": torch.zeros(100)}, 256, [0])
    landed([pool], layout, receive_buffer)
    require_equal(dict(late), old)


def test_a_receive_buffer_without_room_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    import ckpt.engine.wire.pool as module

    pool, receive_buffer = HostPool(0, 256), ReceivedStream()
    layout, _ = sent([pool], {"a": torch.randn(100)}, 256, [0])
    landed([pool], layout, receive_buffer)
    large, _ = sent([pool], {"a": torch.randn(10_000)}, 256, [0])

    def full(num_bytes: int) -> torch.Tensor:
        raise MemoryError(f"no {num_bytes} bytes")

    monkeypatch.setattr(module, "staging_memory", full)
    with pytest.raises(MemoryError, match="40192"):
        receive_buffer.make_room(large)
    with pytest.raises(AssertionError, match="make_room"):
        receive_buffer.bucket(0)


def test_an_alias_without_its_weight_is_refused_when_the_pool_is_sealed() -> None:
    with pytest.raises(ConfigurationError, match="tied_names says that head is embed, which is not yielded"):
        sent([HostPool(0, 256)], {"body": torch.zeros(3)}, 256, [0], {"head": "embed"})


def test_no_weights_at_all_are_no_buckets() -> None:
    pool, receive_buffer = HostPool(0, 256), ReceivedStream()
    for tensors in ({}, {"empty": torch.empty(0, 3), "empty too": torch.empty(5, 0, dtype=torch.int8)}):
        layout, digests = sent([pool], tensors, 256, [0])
        assert digests == {}
        require_equal(landed([pool], layout, receive_buffer), tensors)
