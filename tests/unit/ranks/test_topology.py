"""Ranks, nodes and groups; and phases that end alike for all, on ranks that are threads of this process."""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.errors import CheckpointError, ConfigurationError, CorruptCheckpointError, RankAbsentError, StorageError
from ckpt.ranks.topology import Group, Topology
from tests.support.ranks import run_threads

# One rank alone

pytestmark = pytest.mark.usefixtures("collected")


def test_a_rank_alone_makes_the_same_calls_without_store_or_thread() -> None:
    threads = threading.active_count()
    with Topology.alone() as topology, topology.operation("save of checkpoint-1"):
        with topology.phase("collect") as phase:
            phase.payload = {"bytes": 3}
        assert phase.payloads == [{"bytes": 3}]
        assert topology.exchange("exchange", {0: b"mine"}, [0]) == {0: b"mine"}
        topology.name_groups({"tp": [0]})
        topology.progress()
        assert threading.active_count() == threads
    assert (topology.rank, topology.world_size, topology.local_rank, topology.node_rank) == (0, 1, 0, 0)
    assert topology.nodes == ((0,),)
    assert topology.is_lead
    assert topology.groups == {"tp": Group("tp", (0,), 0, ((0,),))}


def test_the_error_of_a_rank_alone_says_what_failed_and_keeps_its_class_and_cause() -> None:
    cause = CorruptCheckpointError("h.0.weight: block 3 has changed")
    with (
        pytest.raises(CorruptCheckpointError) as caught,
        Topology.alone() as topology,
        topology.operation("load of checkpoint-1"),
        topology.phase("read") as phase,
    ):
        phase.component = "model"
        raise cause
    assert str(caught.value) == "load of checkpoint-1: model: h.0.weight: block 3 has changed"
    assert (caught.value.rank, caught.value.phase, caught.value.component) == (None, "read", "model")
    assert caught.value.__cause__ is cause


def test_an_error_between_two_phases_is_told_once_and_only_once() -> None:
    topology = Topology.alone()
    with pytest.raises(StorageError, match="^save of x: Is a directory: '/'$"), topology.operation("save of x"):
        with topology.phase("first"):
            pass
        Path("/").write_text("")
    with pytest.raises(CheckpointError, match="^save of y: ValueError: no$"), topology.operation("save of y"):
        with topology.operation("part of y"), topology.phase("first"):
            pass
        with topology.phase("second"):
            raise ValueError("no")


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_goes_on_as_it_is(interrupt: type[BaseException]) -> None:
    topology = Topology.alone()
    with pytest.raises(interrupt), topology.operation("save of x"), topology.phase("first"):
        raise interrupt
    with topology.phase("next"):
        pass


def test_a_payload_that_is_no_json_fails_the_phase() -> None:
    with pytest.raises(CheckpointError, match="set is not JSON serializable"), Topology.alone().phase("first") as phase:
        phase.payload = {1, 2}


def test_a_phase_inside_a_phase_is_refused() -> None:
    topology = Topology.alone()
    with (
        pytest.raises(CheckpointError, match="phase inner begins inside another"),
        topology.phase("outer"),
        topology.phase("inner"),
    ):
        pass
    with topology.phase("next"):
        pass


# Several ranks


def _payloads(topology: Topology) -> list[Any]:
    with topology.operation("save of x"), topology.phase("collect") as phase:
        phase.payload = {"rank": topology.rank, "name": "ÿ\n" * topology.rank}
    return phase.payloads


def test_every_rank_sees_every_payload_by_rank() -> None:
    wanted = [{"rank": rank, "name": "ÿ\n" * rank} for rank in range(3)]
    assert run_threads(3, _payloads) == [wanted] * 3


def _big_payloads(topology: Topology) -> bool:
    mine = [random.Random(rank).randbytes(3 << 20).hex() for rank in range(2)]
    with topology.phase("tables") as phase:
        phase.payload = mine[topology.rank]
    return phase.payloads == mine


@pytest.mark.full
def test_tables_of_several_megabytes_reach_every_rank() -> None:
    assert run_threads(2, _big_payloads) == [True] * 2


def _fail_on(topology: Topology, failing: Sequence[int], where: str) -> tuple[Any, ...]:
    with pytest.raises(CheckpointError) as caught, topology.operation("save of x"):
        if where == "before" and topology.rank in failing:
            raise OSError(28, "No space left on device", "w")
        with topology.phase("write") as phase:
            phase.component = "model"
            if where == "inside" and topology.rank in failing:
                raise OSError(28, "No space left on device", "w")
        if where == "after" and topology.rank in failing:
            raise OSError(28, "No space left on device", "w")
        if where == "after" and topology.rank not in failing:
            raise CheckpointError("what a rank does that never heard of it")
    with topology.operation("save of y"), topology.phase("write") as again:
        again.payload = topology.rank
    assert again.payloads == list(range(topology.world_size)), "the ranks are in step again"
    cause = caught.value.__cause__
    assert isinstance(cause, OSError) == (topology.rank in failing)
    return type(caught.value), str(caught.value), caught.value.rank, caught.value.phase, caught.value.component


@pytest.mark.parametrize("failing", [[0], [1], [2], [0, 2]])
def test_one_rank_s_error_is_every_rank_s_error_and_the_next_save_works(failing: list[int]) -> None:
    outcomes = run_threads(3, _fail_on, failing, "inside")
    ranks = "rank " + str(failing[0]) if len(failing) == 1 else "ranks 0, 2"
    message = f"save of x failed in phase write on {ranks}: model: No space left on device: 'w'"
    assert outcomes == [(StorageError, message, failing[0], "write", "model")] * 3


def test_an_error_before_the_phase_reaches_the_ranks_that_are_in_it() -> None:
    message = "save of x failed before phase write on rank 1: No space left on device: 'w'"
    assert run_threads(3, _fail_on, [1], "before") == [(StorageError, message, 1, "write", None)] * 3


def test_all_ranks_that_fail_alike_name_no_rank() -> None:
    message = "save of x: model: No space left on device: 'w'"
    assert run_threads(3, _fail_on, [0, 1, 2], "inside") == [(StorageError, message, None, "write", "model")] * 3


def _fail_last(topology: Topology, failing: int) -> str | None:
    try:
        with topology.operation("save of x"):
            with topology.phase("write"):
                pass
            if topology.rank == failing:
                raise ValueError("after the last phase")
    except CheckpointError as error:
        return str(error)
    finally:
        with topology.phase("next"):
            pass
    return None


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_fails_when_the_others_are_through_waits_for_nobody(failing: int) -> None:
    began = time.monotonic()
    outcomes = run_threads(3, _fail_last, failing, agree_s=20.0)
    assert (
        outcomes[failing] == f"save of x failed between two phases on rank {failing}: ValueError: after the last phase"
    )
    assert outcomes.count(None) == 2
    assert time.monotonic() - began < 10


def _call(topology: Topology, calls: Sequence[Sequence[str]]) -> list[str]:
    """Make the calls of this rank, `operation phase phase`, then one that all ranks make."""
    said = []
    for what, *phases in calls[topology.rank]:
        try:
            with topology.operation(what):
                for phase in phases:
                    with topology.phase(phase):
                        pass
        except CheckpointError as error:
            said.append(str(error))
    with topology.operation("save of all"), topology.phase("write") as phase:
        phase.payload = topology.rank
    assert phase.payloads == list(range(topology.world_size))
    return said


def test_ranks_in_different_operations_all_hear_who_is_where_and_meet_again() -> None:
    save, load = ("save of x", "write"), ("load of y", "open")
    for saying in run_threads(3, _call, [[save], [save], [load]]):
        assert saying == [
            "ranks 0, 1 in phase write of save of x; rank 2 in phase open of load of y: all ranks must make the same calls in "
            "the same order"
        ]


def test_ranks_in_different_phases_all_hear_who_is_where_and_meet_again() -> None:
    for saying in run_threads(
        3, _call, [[("save of x", "a", "c")], [("save of x", "a", "b")], [("save of x", "a", "c")]]
    ):
        assert len(saying) == 1
        assert saying[0].startswith(
            "ranks 0, 2 in phase c of save of x; rank 1 in phase b of save of x: all ranks must"
        )


@pytest.mark.parametrize("short", [0, 2])
def test_a_rank_that_leaves_an_operation_early_is_no_reason_to_wait(short: int) -> None:
    calls = [[("save of x", "a", "b")] for _ in range(3)]
    calls[short] = [("save of x", "a")]
    sayings = run_threads(3, _call, calls, agree_s=20.0)
    assert sayings[short] == []
    for rank, saying in enumerate(sayings):
        if rank != short:
            assert len(saying) == 1
            assert f"rank {short} (pid " in saying[0]
            assert "in phase b of save of x" in saying[0]


def _come_back_late(topology: Topology, sleeper: int) -> tuple[str, bool]:
    """Rank `sleeper` stands still in a phase, until the others have raised, and then asks whether they still wait."""
    refused = False
    with pytest.raises(RankAbsentError) as caught, topology.operation("save of x"), topology.phase("publish"):
        topology.require_awaited()
        if topology.rank == sleeper:
            time.sleep(1.6)
            try:
                topology.require_awaited()
            except RankAbsentError:
                refused = True
                raise
    return str(caught.value), refused


@pytest.mark.parametrize("sleeper", [0, 1])
def test_a_rank_that_was_given_up_can_know_before_it_does_what_cannot_be_undone(
    sleeper: int,
) -> None:
    outcomes = run_threads(3, _come_back_late, sleeper, agree_s=0.8)
    assert [refused for _, refused in outcomes] == [rank == sleeper for rank in range(3)]
    assert len({said for said, _ in outcomes}) == 1
    assert outcomes[0][0].endswith("made no progress for 0.8 s in phase publish of save of x")


def test_a_rank_alone_is_always_awaited() -> None:
    topology = Topology.alone()
    with topology.phase("publish"):
        topology.require_awaited()


def _skip(topology: Topology, skipping: Sequence[int]) -> list[str]:
    said = []
    for what in ("save of 10", "save of 20", "save of 30"):
        if what == "save of 20" and topology.rank in skipping:
            time.sleep(2.5)  # rank 0 evaluates, say; longer than the others' patience
            continue
        try:
            with topology.operation(what), topology.phase("write"):
                pass
        except CheckpointError as error:
            assert isinstance(error, RankAbsentError)
            assert error.rank == min(skipping)
            said.append(str(error))
    return said


@pytest.mark.parametrize(
    "skipping", [[0], pytest.param([2], marks=pytest.mark.full), pytest.param([1, 2], marks=pytest.mark.full)]
)
def test_ranks_that_skip_a_save_are_named_and_take_part_in_the_next(skipping: list[int]) -> None:
    sayings = run_threads(3, _skip, skipping, agree_s=1.5)
    callers = [saying for rank, saying in enumerate(sayings) if rank not in skipping]
    assert [sayings[rank] for rank in skipping] == [[]] * len(skipping)
    assert len({tuple(saying) for saying in callers}) == 1
    assert len(callers[0]) == 1
    for rank in skipping[:1] if 0 in skipping else skipping:
        assert f"rank {rank} (pid " in callers[0][0]
    assert "did not come to phase write of save of 20 within 1.5 s and is outside of any save or load" in callers[0][0]


def _leave(topology: Topology) -> str | None:
    if topology.rank == 1:
        return None
    with pytest.raises(RankAbsentError) as caught, topology.operation("save of x"), topology.phase("write"):
        pass
    return str(caught.value)


def test_a_rank_that_has_left_the_job_is_not_waited_for() -> None:
    began = time.monotonic()
    sayings = run_threads(3, _leave, agree_s=20.0)
    assert sayings[0] == sayings[2]
    assert "save of x failed in phase write: rank 1 (pid " in str(sayings[0])
    assert "has left the job" in str(sayings[0])
    assert time.monotonic() - began < 10


def test_a_rank_that_never_joins_is_named_by_those_that_did() -> None:
    store = dist.HashStore()
    with pytest.raises(RankAbsentError, match="phase join failed: rank 1 did not join the job within 0.5 s"):
        Topology.join(store, 0, 2, timeout_s=0.5)


# Exchange


def _ring(topology: Topology, rounds: int) -> list[dict[int, bytes]]:
    after, before = (topology.rank + 1) % topology.world_size, (topology.rank - 1) % topology.world_size
    return [topology.exchange("exchange", {after: bytes([topology.rank, number])}, [before]) for number in range(rounds)]


def test_parts_reach_the_rank_they_were_sent_to() -> None:
    got = run_threads(3, _ring, 4)
    assert got == [[{(rank - 1) % 3: bytes([(rank - 1) % 3, number])} for number in range(4)] for rank in range(3)]


@settings(max_examples=10)
@given(table=st.lists(st.lists(st.none() | st.binary(max_size=9), min_size=3, max_size=3), min_size=3, max_size=3))
def test_any_table_of_parts_arrives(table: list[list[bytes | None]]) -> None:
    def swap(topology: Topology) -> dict[int, bytes]:
        outgoing = {to: data for to, data in enumerate(table[topology.rank]) if data is not None}
        return topology.exchange("exchange", outgoing, [r for r in range(3) if table[r][topology.rank] is not None])

    for rank, got in enumerate(run_threads(3, swap)):
        assert got == {source: table[source][rank] for source in range(3) if table[source][rank] is not None}


def _bad_swap(
    topology: Topology, outgoing: Sequence[Sequence[int]], sources: Sequence[Sequence[int]]
) -> tuple[str, int]:
    mine = dict.fromkeys(outgoing[topology.rank], b"x")
    with topology.phase("before"):
        pass
    with pytest.raises(CheckpointError) as caught, topology.operation("save of x"):
        topology.exchange("exchange", mine, sources[topology.rank])
    with topology.phase("between"):
        pass
    return str(caught.value), topology._client.connection.num_keys()


@pytest.mark.parametrize(
    ("outgoing", "sources", "mistake"),
    [
        ([[1], [], []], [[], [], []], "rank 0 sends bytes to rank 1, which expects none"),
        ([[], [], []], [[], [], [1]], "rank 2 waits for bytes from rank 1, which sends it none"),
    ],
)
def test_parts_that_one_side_does_not_know_of_fail_all_ranks_and_leave_no_key(
    outgoing: list[list[int]], sources: list[list[int]], mistake: str
) -> None:
    outcomes = run_threads(3, _bad_swap, outgoing, sources)
    assert {message for message, _ in outcomes} == {f"save of x: in phase exchange {mistake}"}
    of_meeting = 3 + 2 + 2  # arrivals, answers, roll and stage
    assert (
        min(keys for _, keys in outcomes) <= of_meeting + 3 + 1 + 2
    )  # heartbeats, the last result, verdicts that are being deleted


# Groups


def _named(topology: Topology, groups: Sequence[dict[str, list[int]]]) -> Any:
    try:
        topology.name_groups(groups[topology.rank])
    except CheckpointError as error:
        return type(error), str(error)
    return dict(topology.groups)


def test_every_rank_sees_the_same_sorted_instances_of_a_group() -> None:
    tp, dp = [[0, 1], [0, 1], [2, 3], [2, 3]], [[0, 2], [1, 3], [0, 2], [1, 3]]
    seen = run_threads(4, _named, [{"tp": tp[rank], "dp": dp[rank]} for rank in range(4)])
    assert seen[3] == {
        "tp": Group("tp", (2, 3), 1, ((0, 1), (2, 3))),
        "dp": Group("dp", (1, 3), 1, ((0, 2), (1, 3))),
    }
    assert [groups["dp"].instance for groups in seen] == [0, 1, 0, 1]
    assert len({groups["tp"].instances for groups in seen}) == 1


@pytest.mark.parametrize(
    ("groups", "sentence"),
    [
        ([[0, 1], [0, 1], [2], None], "process group tp: rank 3 is in no instance of it; every rank must be in one"),
        (
            [[0, 1], [0, 1], [2, 3], [3]],
            r"process group tp: rank 2 gives the instance \[2, 3\], and rank 3 gives \[3\]",
        ),
        ([[0, 1], [0, 1], [2, 3], [2]], r"process group tp: rank 3 gives \[2\], an instance without itself"),
        (
            [[0, 1], [0, 1], [2, 9], [3]],
            r"process group tp: rank 2 gives the instance \[2, 9\], and rank 9 gives no such",
        ),
    ],
)
def test_groups_that_do_not_fit_together_are_refused_alike_on_every_rank(groups: list[Any], sentence: str) -> None:
    outcomes = run_threads(4, _named, [{} if members is None else {"tp": members} for members in groups])
    assert len(set(outcomes)) == 1
    kind, message = outcomes[0]
    assert kind is ConfigurationError
    assert re.search(sentence, message)
