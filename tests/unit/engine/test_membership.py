"""Who is in the next epoch, which failures are survived, and what members tell each other, without any process."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.engine.elastic.membership import Call, Epoch, News, Rendezvous, goes_on_after, next_epoch
from ckpt.errors import (
    CheckpointError,
    ConfigurationError,
    CorruptCheckpointError,
    MissingStateError,
    RankAbsentError,
    RankLeftError,
    describe,
)

NOW = Epoch(7, 2, (2, 3, 9), (9,))


def following(now: Epoch = NOW, *, proven: bool = True, ready=(), leaving=(), gone=()) -> Epoch:  # type: ignore[no-untyped-def]
    return next_epoch(now, proven=proven, ready=ready, leaving=leaving, gone=gone)


def test_an_epoch_goes_on_where_nobody_comes_or_goes() -> None:
    assert following() is NOW
    assert following(gone={4, 5}, leaving={1}) is NOW


def test_who_stays_keeps_the_order_and_who_comes_goes_behind() -> None:
    assert following(ready={12, 11}, gone={3}) == Epoch(8, 2, (2, 9, 11, 12), (11, 12))
    assert following(leaving={2}) == Epoch(8, 2, (3, 9), ())


def test_who_is_ready_and_dead_or_leaves_at_once_does_not_come() -> None:
    assert following(ready={11, 12}, gone={11}, leaving={12}) is NOW


def test_a_newcomer_is_new_until_an_update_has_ended_well() -> None:
    assert following(proven=False, gone={2}).newcomers == (9,)
    assert following(proven=False, ready={11}).newcomers == (9, 11)
    assert following(proven=True, ready={11}).newcomers == (11,)


def test_all_rollouts_may_go_and_others_come() -> None:
    empty = following(gone={2, 3, 9})
    assert (empty.rollouts, empty.world_size) == ((), 2)
    assert following(empty, ready={13}) == Epoch(9, 2, (13,), (13,))


numbers = st.sets(st.integers(2, 12))


@given(st.lists(st.tuples(numbers, numbers, numbers, st.booleans()), max_size=12))
def test_through_any_comings_and_goings_ranks_are_dense_and_nobody_who_is_out_is_in(changes) -> None:  # type: ignore[no-untyped-def]
    now, out = Epoch(1, 2, (2, 3)), set[int]()
    for ready, leaving, gone, proven in changes:
        out |= leaving | gone
        after = next_epoch(now, proven=proven, ready=ready, leaving=out, gone=out)
        assert after.number == now.number + (after.rollouts != now.rollouts)
        assert not out & set(after.rollouts)
        assert set(after.newcomers) <= set(after.rollouts)
        assert [one for one in after.rollouts if one in now.rollouts] == [one for one in now.rollouts if one not in out]
        assert [after.rank_of(one) for one in after.rollouts] == [*range(2, after.world_size)]
        assert [after.rollout_at(rank) for rank in range(-1, after.world_size + 1)] == [None] * 3 + [
            *after.rollouts,
            None,
        ]
        now = after


@pytest.mark.parametrize(
    ("error", "proven", "goes_on"),
    [
        (RankAbsentError("rank 3 was killed", rank=3), True, True),
        (RankAbsentError("rank 1 was killed", rank=1), True, True),  # the lead finds that it cannot do without
        (RankLeftError("the network failed"), True, True),
        (MissingStateError("rank 4 has another model", rank=4), False, True),
        (MissingStateError("rank 4 has another model", rank=4), True, False),
        (MissingStateError("rank 3 has another model", rank=3), False, False),
        (CorruptCheckpointError("a bucket", rank=0), False, False),
        (ConfigurationError("alike on all ranks"), False, False),
    ],
)
def test_an_update_is_made_again_without_who_is_gone_and_without_a_newcomer_that_cannot(
    error: CheckpointError, proven: bool, goes_on: bool
) -> None:
    assert goes_on_after(error, NOW, proven=proven) is goes_on


def test_the_culprit_is_a_rollout_by_its_number() -> None:
    assert NOW.rollout_at(RankAbsentError("", rank=4).rank) == 9
    assert NOW.rollout_at(RankAbsentError("", rank=2).rank) == 2
    assert NOW.rollout_at(RankAbsentError("", rank=0).rank) is None
    assert NOW.rollout_at(RankAbsentError("").rank) is None


@pytest.mark.parametrize(
    "call",
    [
        Call(number=3, epoch=NOW),
        Call(number=4, epoch=Epoch(1, 1, ()), is_last=True, last_words={"version": 3, "digest": "ab"}),
        Call(number=6, epoch=NOW, is_last=True, last_words=[math.inf, "a name that is not UTF-8: \udcff"]),
        Call(number=5, epoch=NOW, failure=describe(RankAbsentError("rank 1 was killed", rank=1, phase="load"))),
    ],
)
def test_a_call_reads_as_it_was_made(call: Call) -> None:
    assert Call.decode(call.encode()) == call


def test_news_and_a_rendezvous_read_as_they_were_told() -> None:
    news = News(3, "ab" * 16, "cd" * 16, {0: "00", 11: "11"}, [["10.0.0.1:5", [[0, 1, 2]]]])
    assert News.decode(news.encode()) == news
    rendezvous = Rendezvous("fe80::1", 4711, "ef" * 16, {"model": {"size": "tiny", "p": math.inf, "root": "/\udcff"}})
    assert Rendezvous.decode(rendezvous.encode(), "here") == rendezvous


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"[1, 2]", b'{"address": "x", "port": 1, "job": "j", "facts": {}, "more": 1}']
)
def test_what_is_no_rendezvous_is_named(data: bytes) -> None:
    with pytest.raises(ConfigurationError, match="run/rendezvous.json is no rendezvous"):
        Rendezvous.decode(data, "run/rendezvous.json")
