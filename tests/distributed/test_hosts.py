"""Ranks of made-up hosts, which see no process of each other's: deaths, silence and messages go by the sockets of each host."""

from __future__ import annotations

import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import psutil
import pytest
from torch.distributed import PrefixStore

import ckpt.ranks.heartbeat as heartbeat_module
from ckpt.errors import CheckpointError, RankAbsentError
from ckpt.ranks.mail import Mail
from ckpt.ranks.topology import Topology
from tests.support.covering import sampled
from tests.support.pace import patience
from tests.support.ranks import Dead, run_ranks

SAVE = "save of checkpoint-00000020"
NODES = [2, 1, 3]
HUBS = (0, 2, 3)


def _apart(topology: Topology, fn: Callable[[Topology], Any], timeout_s: float = 300.0) -> Any:
    """Call `fn` with a topology of the same ranks and hosts, in which processes of other hosts cannot be looked at."""
    host = f"host-{topology.node_rank}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heartbeat_module, "machine", lambda _: host)
        store = topology.store_for("apart")
        assert store is not None
        apart = Topology.join(PrefixStore("job", store), topology.rank, topology.world_size, host=host, timeout_s=timeout_s)
    with apart:
        return fn(apart)


def _rounds(topology: Topology) -> Any:
    said = []
    for number in range(20):
        with topology.operation(SAVE), topology.phase("write") as phase:
            phase.payload = [topology.rank, number]
        said.append(phase.payloads)
    return said


def _say(topology: Topology) -> Any:
    return _apart(topology, _rounds)


def test_ranks_of_several_hosts_agree() -> None:
    world_size = sum(NODES)
    expected = [[[rank, number] for rank in range(world_size)] for number in range(20)]
    assert run_ranks(world_size, _say, nodes=NODES) == [expected] * world_size


def _signal_in_phase(
    topology: Topology, victim: int, number: signal.Signals, timeout_s: float, has_forked: bool = False
) -> Any:
    def write(apart: Topology) -> tuple[str, int | None, float]:
        began = time.monotonic()
        with pytest.raises(CheckpointError) as caught, apart.operation(SAVE), apart.phase("write"):
            if apart.rank == victim:
                time.sleep(0.2)  # the others wait by then
                if has_forked and os.fork() == 0:  # a loader of data, which keeps the rank's connections open
                    time.sleep(20)
                    os._exit(0)
                os.kill(os.getpid(), number)
        after_s = time.monotonic() - began
        with pytest.raises(CheckpointError) as again, apart.operation(SAVE), apart.phase("write"):
            pass
        assert f"rank {victim} " in str(again.value), "who is dead stays so"
        return str(caught.value), caught.value.rank, after_s

    return _apart(topology, write, timeout_s)


@sampled("victim", [0, 2, 4, 1, 3, 5], 3)
def test_a_rank_that_is_killed_is_named_on_all_hosts_at_once(victim: int) -> None:
    """But for the only rank of a host: nobody sees its end."""
    is_seen = victim != 2
    outcomes = run_ranks(
        6, _signal_in_phase, victim, signal.SIGKILL, 300.0 if is_seen else 4.0, nodes=NODES, expect_dead={victim}
    )
    assert outcomes[victim] == Dead(-signal.SIGKILL)
    said = [outcome for rank, outcome in enumerate(outcomes) if rank != victim]
    ((message, named),) = {(message, rank) for message, rank, _ in said}
    how = "was killed or ended" if is_seen else "has been silent for 4 s, last seen"
    assert message.startswith(f"rank {victim} (pid ") and message.endswith(f"{how} in phase write of {SAVE}")
    assert named == victim
    assert max(after_s for *_, after_s in said) < patience(2.0 if is_seen else 4.0 + 5.0)


@sampled("victim", [3, 4])
def test_the_end_of_a_rank_is_seen_although_processes_that_it_has_forked_live_on(victim: int) -> None:
    outcomes = run_ranks(6, _signal_in_phase, victim, signal.SIGKILL, 300.0, True, nodes=NODES, expect_dead={victim})
    said = [outcome for rank, outcome in enumerate(outcomes) if rank != victim]
    assert all(f"rank {victim} (pid " in message and "was killed or ended" in message for message, *_ in said)
    assert max(after_s for *_, after_s in said) < patience(2.0)


@sampled("victim", [0, 3])
def test_a_hub_that_is_stopped_is_named_and_its_host_still_hears(victim: int) -> None:
    outcomes = run_ranks(6, _signal_in_phase, victim, signal.SIGSTOP, 4.0, nodes=NODES, expect_dead={victim})
    said = [outcome for rank, outcome in enumerate(outcomes) if rank != victim]
    ((message, named),) = {(message, rank) for message, rank, _ in said}
    assert f"rank {victim} (pid " in message and "for 4 s" in message and named == victim
    assert max(after_s for *_, after_s in said) < patience(4.0 + 5.0)


def _lose_host(topology: Topology) -> Any:
    def write(apart: Topology) -> tuple[str, float]:
        began = time.monotonic()
        with pytest.raises(RankAbsentError) as caught, apart.operation(SAVE), apart.phase("write"):
            if apart.node_rank == 2:
                time.sleep(0.5)
                os.kill(os.getpid(), signal.SIGSTOP)  # as if its machine had no network any more
        return str(caught.value), time.monotonic() - began

    return _apart(topology, write, 4.0)


def test_a_host_that_is_lost_is_named_within_the_timeout() -> None:
    outcomes = run_ranks(6, _lose_host, nodes=NODES, expect_dead={3, 4, 5})
    (message,) = {message for message, _ in outcomes[:3]}
    assert all(f"rank {rank} (pid " in message for rank in (3, 4, 5)) and "rank 2 " not in message, message
    assert max(after_s for _, after_s in outcomes[:3]) < patience(4.0 + 5.0)


def _num_connections(topology: Topology) -> int:
    """To the store of the harness, in which all of them meet."""
    store: Any = topology.store_for("port")
    while (beneath := getattr(store, "underlying_store", None)) is not None:
        store = beneath
    return len([one for one in psutil.Process().net_connections("tcp") if one.raddr and one.raddr.port == store.port])


def _connections(topology: Topology) -> int:
    of_harness = _num_connections(topology)

    def count(apart: Topology) -> int:
        before = _num_connections(topology)
        with ExitStack() as stack:
            outer = stack.enter_context(apart.branch("a branch"))
            inner = stack.enter_context(outer.branch("of it"))
            if apart.rank < 3:
                stack.enter_context(apart.part("some", [0, 1, 2]))
            with inner.phase("together"):
                pass
            assert _num_connections(topology) == before, "branches and parts have no connections of their own"
        return before - of_harness

    return _apart(topology, count)


def test_a_rank_has_one_connection_and_a_hub_two_however_many_branches_there_are() -> None:
    counts = run_ranks(6, _connections, nodes=NODES)
    assert counts == [2 if rank in HUBS else 1 for rank in range(6)]


def _without_sockets(topology: Topology) -> Any:
    """As in containers of one host name that do not share a network: rank 1 reaches no hub."""
    with pytest.MonkeyPatch.context() as patch:
        if topology.rank == 1:
            patch.setattr(Mail, "_connect", lambda _: False)
        return _apart(topology, _rounds)


def test_a_rank_that_reaches_no_hub_reads_a_queue_of_its_own() -> None:
    expected = [[[rank, number] for rank in range(3)] for number in range(20)]
    assert run_ranks(3, _without_sockets) == [expected] * 3


def _visited(topology: Topology) -> Any:
    """A process of another user connects to the hub, and says that it is rank 2, and that rank 1 is gone."""

    def visit(apart: Topology) -> bytes | None:
        assert apart._agreement is not None
        where = apart._agreement.mail._where
        refused: bytes | None = None
        if apart.rank == 0:
            reader, writer = os.pipe()
            if (child := os.fork()) == 0:
                try:
                    os.setuid(65534)
                    with socket.socket(socket.AF_UNIX) as stranger:
                        stranger.settimeout(5.0)
                        stranger.connect(where)
                        letters = (b"h2\0\0", b"g1\0\0")
                        with_lengths = b"".join(struct.pack("<I", len(one)) + one for one in letters)
                        try:
                            stranger.sendall(with_lengths)
                            os.write(writer, b"closed" if stranger.recv(1) == b"" else b"heard")
                        except OSError:
                            os.write(writer, b"closed")
                finally:
                    os._exit(0)
            refused = os.read(reader, 10)
            os.waitpid(child, 0)
        with apart.phase("after the visit"):
            pass
        assert apart._agreement.mail.gone == set()
        return refused

    return _apart(topology, visit)


@pytest.mark.skipif(os.getuid() != 0, reason="only root becomes another user")
def test_a_stranger_of_the_same_machine_is_not_listened_to() -> None:
    assert run_ranks(3, _visited) == [b"closed", None, None]


def _threads_after(topology: Topology) -> list[str]:
    before = {one.name for one in threading.enumerate()}
    _apart(topology, _rounds)
    return sorted({one.name for one in threading.enumerate()} - before)


def test_nothing_is_left_of_a_job_that_has_ended() -> None:
    assert run_ranks(3, _threads_after, nodes=[2, 1]) == [[], [], []]


def _long_results(topology: Topology) -> int:
    def exchange(apart: Topology) -> int:
        with apart.branch("a branch") as branch:
            for one in (apart, branch):
                for _ in range(3):
                    with one.operation(SAVE), one.phase("tables") as phase:
                        phase.payload = f"{apart.rank}" * 300_000
                    assert phase.payloads == [f"{rank}" * 300_000 for rank in range(apart.world_size)]
        return len(phase.payloads)

    return _apart(topology, exchange)


def test_long_results_reach_every_rank_of_every_host() -> None:
    assert run_ranks(6, _long_results, nodes=NODES) == [6] * 6
