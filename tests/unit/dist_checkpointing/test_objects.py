"""Values of a sharded state dict that are no tensors."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    LocalNonpersitentObject,
    ShardedBase,
    ShardedObject,
)
from ckpt.errors import ShapeMismatchError, ShardingError


@st.composite
def places(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    shape = tuple(draw(st.lists(st.integers(1, 12), max_size=3)))
    return shape, tuple(draw(st.integers(0, side - 1)) for side in shape)


@given(st.text(), places())
def test_a_unique_key_is_parsed_back_whatever_the_key_is(
    key: str, place: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    """S1.63: slashes, underscores and a key that looks like a unique key itself included."""
    shape, offset = place
    for name in (key, f"{key}/shard_0_1"):
        stored = ShardedObject(name, "data", shape, offset)
        assert ShardedObject.empty_from_unique_key(stored.unique_key, replica_id=3) == ShardedObject(
            name, None, shape, offset, 3
        )


@pytest.mark.parametrize(
    ("unique_key", "key", "offset", "shape"),
    [
        ("rng_state/shard_1.3_2.4", "rng_state", (1, 3), (2, 4)),
        ("decoder/layers.0/_extra_state/shard_0_1", "decoder/layers.0/_extra_state", (0,), (1,)),
        ("rng_state/shard_1.3_2", "rng_state", (1, 3), (2, -1)),
        ("rng_state/shard_5_", "rng_state", (5,), (-1,)),
        ("rng_state/shard_1.3_2.-1", "rng_state", (1, 3), (2, -1)),
        ("rng_state/shard__", "rng_state", (), ()),
    ],
)
def test_unique_keys_of_old_and_new_checkpoints_are_read(
    unique_key: str, key: str, offset: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    """S1.63: an older unique key lacks the shape's last number, which is then -1."""
    assert ShardedObject.empty_from_unique_key(unique_key) == ShardedObject(key, None, shape, offset)


def test_the_unique_key_is_the_one_that_megatron_writes() -> None:
    """S1.63: `<key>/shard_<offset>_<shape>` names the file of an object in its checkpoints."""
    assert ShardedObject("opt", {"a": 1}, (4, 12), (0, 11)).unique_key == "opt/shard_0.11_4.12"


@pytest.mark.parametrize(
    "unique_key", ["rng_state", "rng_state/shard_1.3", "shard_0_1", "a/shard_0_1/b", "a/shard_x_1", "a/shard_-1_1", "a/shard_1._1"]
)  # fmt: skip
def test_what_is_no_unique_key_is_refused(unique_key: str) -> None:
    """S1.63: in one sentence that shows the form."""
    with pytest.raises(ShardingError, match=rf"^'{unique_key}' is no unique key of an object: <key>/shard_"):
        ShardedObject.empty_from_unique_key(unique_key)


def test_a_place_that_is_none_is_refused() -> None:
    """S1.63: numbers of dimensions that differ, and an object outside of its grid; an unknown side holds any number."""
    with pytest.raises(
        ShapeMismatchError, match=r"^x: global_shape \(2,\) has 1 dimensions, global_offset \(0, 1\) has 2"
    ):
        ShardedObject("x", None, (2,), (0, 1))
    for offset in (2, -1):
        with pytest.raises(ShardingError, match=rf"^x: global_offset \({offset},\) is outside of global_shape \(2,\)"):
            ShardedObject("x", None, (2,), (offset,))
    with pytest.raises(ShardingError, match=r"global_offset \(5, 0\) is outside of global_shape \(2, -1\)"):
        ShardedObject.empty_from_unique_key("x/shard_5.0_2")
    assert ShardedObject("x", None, (-1,), (99,)).global_offset == (99,)


def test_an_object_without_data_keeps_its_place() -> None:
    """S1.63: what ranks tell each other of their objects."""
    mine = ShardedObject("x", {"big": [1, 2]}, (2, 2), (1, 0), (0, 1))
    assert mine.without_data() == ShardedObject("x", None, (2, 2), (1, 0), (0, 1))
    assert mine.data == {"big": [1, 2]}
    assert str(mine) == "ShardedObject(key='x')"
    assert isinstance(mine, ShardedBase)


def test_a_local_value_is_wrapped_and_unwrapped_and_nothing_else() -> None:
    """S1.65: the wrapper is no part of what is sharded; the first reference's misspelt name is the same class."""
    value = [1, 2]
    assert LocalNonpersistentObject(value).unwrap() is value
    assert not isinstance(LocalNonpersistentObject(value), ShardedBase)
    assert LocalNonpersitentObject is LocalNonpersistentObject
