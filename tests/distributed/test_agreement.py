"""All ranks or none, on real processes: whatever becomes of one rank, all others raise one and the same error."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from ckpt.errors import CheckpointError, CorruptCheckpointError, RankAbsentError, StorageError
from ckpt.ranks.addresses import LOOPBACK
from ckpt.ranks.stores import reach, serve, where_is
from ckpt.ranks.topology import Topology
from tests.support.frozen import Frozen
from tests.support.ranks import Dead, run_ranks

SAVE = "save of checkpoint-00000020"


def _error_of(topology: Topology, body: Callable[[], None]) -> tuple[Any, ...]:
    """Run `body` in phase write of a save, and return what this rank raised, and after how long."""
    began = time.monotonic()
    with pytest.raises(CheckpointError) as caught, topology.operation(SAVE), topology.phase("write"):
        body()
    error = caught.value
    return (type(error), str(error), error.rank, error.phase), time.monotonic() - began


def _one_error(outcomes: list[Any], *, within_s: float) -> tuple[Any, ...]:
    """Return the one error that all ranks raised that could, having checked that they did, and when."""
    survivors = [outcome for outcome in outcomes if not isinstance(outcome, Dead)]
    assert len({error for error, _ in survivors}) == 1, survivors
    assert max(seconds for _, seconds in survivors) < within_s
    error: tuple[Any, ...] = survivors[0][0]
    return error


# A rank raises


def _raise(topology: Topology) -> list[Any]:
    def fail(error: Exception) -> Callable[[], None]:
        def body() -> None:
            if topology.rank == 1:
                raise error

        return body

    errors = OSError(28, "No space left on device", "w"), CorruptCheckpointError("block 3 has changed"), KeyError("w")
    return [_error_of(topology, fail(error)) for error in errors]


def test_every_rank_raises_what_one_rank_raised_and_the_next_phase_works() -> None:
    outcomes = run_ranks(3, _raise)
    start = f"{SAVE} failed in phase write on rank 1: "
    wanted = [
        (StorageError, start + "No space left on device: 'w'", 1, "write"),
        (CorruptCheckpointError, start + "block 3 has changed", 1, "write"),
        (CheckpointError, start + "KeyError: 'w'", 1, "write"),
    ]
    for number, error in enumerate(wanted):
        assert _one_error([outcome[number] for outcome in outcomes], within_s=2) == error


# A rank is killed, stopped, or hangs


def _signal_on(topology: Topology, rank: int, number: signal.Signals) -> Any:
    def body() -> None:
        if topology.rank == rank:
            time.sleep(0.2)  # the others are waiting by then
            os.kill(os.getpid(), number)

    return _error_of(topology, body)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_killed_rank_is_named_at_once_also_if_it_was_the_lead(rank: int) -> None:
    outcomes = run_ranks(3, _signal_on, rank, signal.SIGKILL, expect_dead={rank})
    assert outcomes[rank] == Dead(-signal.SIGKILL)
    kind, message, named, phase = _one_error(outcomes, within_s=2)
    assert (kind, named, phase) == (RankAbsentError, rank, "write")
    assert message.startswith(f"rank {rank} (pid ")
    assert message.endswith(f" on host-0) was killed or ended in phase write of {SAVE}")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_rank_is_named_when_its_heartbeat_has_been_silent_for_long_enough(rank: int) -> None:
    outcomes = run_ranks(3, _signal_on, rank, signal.SIGSTOP, expect_dead={rank}, agree_s=2.0)
    kind, message, named, _ = _one_error(outcomes, within_s=6)
    assert (kind, named) == (RankAbsentError, rank)
    assert message.endswith(f" has been silent for 2 s, last seen in phase write of {SAVE}")


def _hang_then_come_back(topology: Topology, rank: int) -> Any:
    def body() -> None:
        if topology.rank == rank:
            time.sleep(2.4)

    outcome, _ = _error_of(topology, body)
    with topology.operation("save of the next one"), topology.phase("write") as phase:
        phase.payload = topology.rank
    return outcome, phase.payloads


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_stood_still_is_named_and_raises_the_same_error_when_it_comes_back(rank: int) -> None:
    outcomes = run_ranks(3, _hang_then_come_back, rank, agree_s=1.5)
    assert len({error for error, _ in outcomes}) == 1
    kind, message, named, _ = outcomes[0][0]
    assert (kind, named) == (RankAbsentError, rank)
    assert message.endswith(f" on host-0) made no progress for 1.5 s in phase write of {SAVE}")
    assert [payloads for _, payloads in outcomes] == [[0, 1, 2]] * 3, "all three take part in the next save"


def _be_slow(topology: Topology, slow: int, how: str) -> list[int]:
    with topology.operation(SAVE), topology.phase("write") as phase:
        phase.payload = topology.rank
        end = time.monotonic() + 4.5
        while topology.rank == slow and time.monotonic() < end:
            time.sleep(0.1)
            if how == "from a thread":
                thread = threading.Thread(target=topology.progress, args=(1 << 20,))
                thread.start()
                thread.join()
            else:
                topology.progress()
    return phase.payloads


@pytest.mark.parametrize(("slow", "how"), [(0, "itself"), (2, "from a thread")])
def test_a_rank_that_is_merely_slow_is_waited_for(slow: int, how: str) -> None:
    assert run_ranks(3, _be_slow, slow, how, agree_s=2.0) == [[0, 1, 2]] * 3


def _suspended(topology: Topology) -> list[int]:
    """All ranks are stopped at once for longer than their patience, and go on one after another, as after Ctrl-Z or Slurm's suspension."""
    with topology.operation(SAVE), topology.phase("meet") as phase:
        phase.payload = os.getpid()
    if topology.rank == 0:
        pids = " ".join(str(pid) for pid in phase.payloads)
        words = f"sleep 0.5; kill -STOP {pids}; sleep 5; for pid in {pids}; do kill -CONT $pid; sleep 0.5; done"
        subprocess.Popen(["sh", "-c", words], start_new_session=True)
    with topology.operation(SAVE), topology.phase("write") as phase:
        phase.payload = topology.rank
        for _ in range(20 if topology.rank == 1 else 0):  # the others wait for it
            time.sleep(0.1)
            topology.progress()
    return phase.payloads


def test_a_job_that_is_suspended_as_a_whole_misses_nobody_when_it_goes_on() -> None:
    assert run_ranks(3, _suspended, agree_s=3.0) == [[0, 1, 2]] * 3


def _die_before(topology: Topology) -> Any:
    if topology.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return [_error_of(topology, lambda: None) for _ in range(2)]


def test_a_rank_that_died_in_training_fails_every_save_after_it_at_once() -> None:
    outcomes = run_ranks(3, _die_before, expect_dead={1})
    for number in range(2):
        _, message, named, _ = _one_error([outcomes[0][number], outcomes[2][number]], within_s=2)
        assert named == 1
        assert message.startswith(f"{SAVE} failed in phase write: rank 1 (pid ")
        assert message.endswith(" was killed or ended outside of any save or load")


def _raise_and_die(topology: Topology) -> Any:
    def body() -> None:
        if topology.rank == 1:
            raise ValueError("the cause")
        if topology.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    return _error_of(topology, body)


def test_a_cause_is_told_before_a_death() -> None:
    outcomes = run_ranks(3, _raise_and_die, expect_dead={2})
    kind, message, named, _ = _one_error(outcomes, within_s=2)
    assert (kind, named) == (CheckpointError, 1)
    assert message.startswith(f"{SAVE} failed in phase write on rank 1: ValueError: the cause; rank 2 (pid ")


def _interrupted(topology: Topology, rank: int) -> Any:
    try:
        with topology.operation(SAVE), topology.phase("write"):
            if topology.rank == rank:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        return "went on as it was"
    except CheckpointError as error:
        return str(error)


@pytest.mark.parametrize("rank", [0, 1])
def test_an_interrupt_is_told_to_the_others_and_goes_on_as_it_is(rank: int) -> None:
    outcomes = run_ranks(3, _interrupted, rank)
    assert outcomes.pop(rank) == "went on as it was"
    assert outcomes == [f"{SAVE} failed in phase write on rank {rank}: KeyboardInterrupt"] * 2


# The store


def _lose_the_store(topology: Topology, late: bool) -> Any:
    """Agree through a store that rank 0 holds, and which goes with it, as under Slurm."""
    with topology.phase("hold") as phase:
        store = serve(LOOPBACK, timeout_s=300.0) if topology.is_lead else None
        phase.payload = None if store is None else store.port
    own = store or dist.TCPStore("127.0.0.1", phase.payloads[0], is_master=False, wait_for_workers=False)
    inner = Topology.join(own, topology.rank, topology.world_size, timeout_s=20.0)
    with inner.phase("all is well"):
        pass

    def body() -> None:
        time.sleep(0.3)  # all have read that all is well
        if topology.is_lead:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.5 if late else 0.0)

    outcome = [_error_of(inner, body), _error_of(inner, lambda: None)]
    inner.close()
    return outcome


@pytest.mark.parametrize("late", [False, True])
def test_when_the_store_goes_with_rank_0_every_other_rank_says_so_in_one_sentence(late: bool) -> None:
    outcomes = run_ranks(3, _lose_the_store, late, expect_dead={0})
    for number in range(2):
        kind, message, _, _ = _one_error([outcome[number] for outcome in outcomes[1:]], within_s=3)
        assert kind is RankAbsentError
        assert message == (
            f"{SAVE} failed: the store through which the ranks agree is gone, with rank 0 or with the launcher that held it"
        )


def _agree_often(topology: Topology, rounds: int) -> list[int]:
    keys = []
    for number in range(rounds):
        with topology.operation(f"save of {number}"):
            with topology.phase("write") as phase:
                phase.payload = {"number": number, "rank": topology.rank}
            topology.exchange("exchange", {(topology.rank + 1) % 4: bytes(70_000)}, [(topology.rank - 1) % 4])
            if number in (9, rounds - 1):
                with topology.phase("everybody is through"):
                    pass
                time.sleep(0.1)
                keys.append(topology._client.connection.num_keys())
    return keys


def test_hundreds_of_agreements_leave_no_key_behind() -> None:
    for after_10, after_100 in run_ranks(4, _agree_often, 100):
        assert abs(after_100 - after_10) < 8, "a rank may be late by a round; a key left per round would be 90"


# SIGTERM


def _end_all_because_one_died(topology: Topology) -> Any:
    def body() -> None:
        if topology.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGTERM)  # what every elastic agent does a moment after
        time.sleep(0.2)

    return _error_of(topology, body)


def test_ranks_that_are_told_to_end_because_one_died_say_which_one_first() -> None:
    outcomes = run_ranks(3, _end_all_because_one_died, expect_dead={1})
    _, message, named, _ = _one_error(outcomes, within_s=3)
    assert named == 1
    assert message.endswith(f" was killed or ended in phase write of {SAVE}")


def _silent_after_sigterm(topology: Topology) -> Any:
    def body() -> None:
        if topology.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGTERM)

    return _error_of(topology, body)


def test_sigterm_is_a_hint_that_a_silent_rank_is_gone() -> None:
    outcomes = run_ranks(3, _silent_after_sigterm, expect_dead={1}, agree_s=60.0)
    _, message, named, _ = _one_error(outcomes, within_s=10)
    assert named == 1
    assert message.endswith(f" has been silent for 3 s, last seen in phase write of {SAVE}")


def _sigterm_in_a_good_save(topology: Topology, path: str) -> None:
    with topology.operation(SAVE):
        with topology.phase("write"):
            os.kill(os.getpid(), signal.SIGTERM)
        with topology.phase("commit"):
            open(f"{path}/{topology.rank}", "w").close()
    time.sleep(30)


def test_sigterm_lets_a_save_end_and_then_does_what_it_does(tmp_path: Any) -> None:
    outcomes = run_ranks(2, _sigterm_in_a_good_save, str(tmp_path), expect_dead={0, 1})
    assert outcomes == [Dead(-signal.SIGTERM)] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


def _sigterm_with_a_handler(topology: Topology) -> list[str]:
    heard: list[str] = []

    def handler(number: int, frame: object) -> None:
        heard.append("signal")

    signal.signal(signal.SIGTERM, handler)
    with topology.operation(SAVE), topology.phase("write"):
        os.kill(os.getpid(), signal.SIGTERM)
        heard.append("end of the phase")
    assert signal.getsignal(signal.SIGTERM) is handler
    return heard


def test_the_job_s_own_handler_hears_sigterm_after_the_save() -> None:
    assert run_ranks(2, _sigterm_with_a_handler) == [["end of the phase", "signal"]] * 2


def _hang_under_sigterm(topology: Topology) -> None:
    with topology.operation(SAVE), topology.phase("write"):
        os.kill(os.getpid(), signal.SIGTERM)
        while True:
            time.sleep(0.1)
            topology.progress()


def test_sigterm_is_put_off_no_longer_than_the_grace() -> None:
    began = time.monotonic()
    assert run_ranks(2, _hang_under_sigterm, expect_dead={0, 1}, grace_s=1.0) == [Dead(128 + signal.SIGTERM)] * 2
    assert time.monotonic() - began < 10


# Hosts


def _where(topology: Topology) -> tuple[Any, ...]:
    return topology.nodes, topology.node_rank, topology.local_rank, topology.is_lead


def test_ranks_know_their_host_and_their_number_on_it() -> None:
    outcomes = run_ranks(4, _where, nodes=[1, 3])
    assert [nodes for nodes, *_ in outcomes] == [((0,), (1, 2, 3))] * 4
    assert [rest for _, *rest in outcomes] == [[0, 0, True], [1, 0, False], [1, 1, False], [1, 2, False]]


def _groups(topology: Topology) -> Any:
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    topology.name_groups({"tp": halves[topology.rank // 2]})
    return topology.groups["tp"].members, topology.groups["tp"].instances


def test_a_torch_process_group_can_be_named() -> None:
    outcomes = run_ranks(4, _groups, process_group=True)
    assert [members for members, _ in outcomes] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert {instances for _, instances in outcomes} == {((0, 1), (2, 3))}


# The harness itself


def _raise_in_rank_1(topology: Topology) -> None:
    if topology.rank == 1:
        raise ValueError("only here")


def _never_end(topology: Topology) -> None:
    time.sleep(3600)


def test_an_exception_in_a_rank_fails_the_test_with_its_traceback() -> None:
    with pytest.raises(AssertionError, match="(?s)rank 1 raised.*_raise_in_rank_1.*ValueError: only here"):
        run_ranks(2, _raise_in_rank_1)


@pytest.mark.full
def test_a_deadline_fails_the_test_and_shows_every_stack(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(AssertionError, match="rank 0 did not end before the deadline"):
        run_ranks(1, _never_end, timeout_s=2)
    assert "_never_end" in capsys.readouterr().err


def test_a_rank_that_ends_without_a_word_fails_the_test() -> None:
    with pytest.raises(AssertionError, match="rank 1 ended with exit code -9 and no result"):
        run_ranks(2, _signal_on, 1, signal.SIGKILL)


# The store hangs


def _lose_answers(topology: Topology) -> tuple[str, float]:
    """Join once more, rank 1 through something that stops to carry answers in a phase; return what was raised, and after how long."""
    whole = topology.store_for("a part")
    assert whole is not None
    port = int(where_is(whole).rpartition(":")[2])
    with Frozen(port) as between:
        store = reach("127.0.0.1", between.port if topology.rank == 1 else port, timeout_s=5.0)
        part = dist.PrefixStore("joined anew", store)
        with (
            Topology.join(part, topology.rank, 2, host=f"host-{topology.rank}", timeout_s=2.0) as joined,
            pytest.raises(RankAbsentError) as caught,
            joined.operation(SAVE),
        ):
            with joined.phase("plan"):
                pass
            with joined.phase("write"):
                between.freeze()
                began = time.monotonic()
        return str(caught.value), time.monotonic() - began


def test_a_store_that_does_not_answer_a_rank_fails_it_and_the_others_in_time() -> None:
    (others, after_s), (own, own_after_s) = run_ranks(2, _lose_answers)
    unanswered = f"{SAVE} failed on rank 1: the store at 127.0.0.1:", " within 2 s; the process that holds it hangs"
    given_up = (
        f"{SAVE} failed in phase write: rank 1 (pid ",
        "has been silent for 2 s",
    )  # the other rank may be the first to say so
    assert any(own.startswith(start) and rest in own for start, rest in (unanswered, given_up)), own
    assert "rank 1 (pid " in others, others
    assert max(after_s, own_after_s) < 8.0
