"""The ranks of one life of a job meet over a store that earlier lives have used, and agree on a name that no earlier life had."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.errors import CheckpointError, RankAbsentError
from ckpt.ranks.addresses import machine
from ckpt.ranks.agreement import Beat
from ckpt.ranks.heartbeat import beat_key
from ckpt.ranks.meeting import meet
from ckpt.ranks.store_client import StoreClient
from ckpt.ranks.topology import Topology
from tests.support.pace import patience

pytestmark = pytest.mark.usefixtures("collected")


def _meet(store: dist.Store, rank: int, world_size: int, timeout_s: float = 20.0) -> str:
    return meet(StoreClient(store, writer=rank), rank, world_size, host="here", timeout_s=timeout_s)


def _lives(store: dist.Store, sizes: list[int]) -> list[str]:
    """Let lives of these world sizes meet over one store, one after the other; return their names."""
    names = []
    with ThreadPoolExecutor(max(sizes)) as ranks:
        for size in sizes:
            met = [ranks.submit(_meet, store, rank, size) for rank in reversed(range(size))]
            of_life = {one.result(patience(30)) for one in met}
            assert len(of_life) == 1
            names += of_life
    return names


def test_every_life_over_one_store_has_a_name_of_its_own() -> None:
    names = _lives(dist.HashStore(), [3, 3, 2, 4, 1, 3])
    assert len(set(names)) == len(names)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_whatever_earlier_lives_have_left_only_delays(data: st.DataObject) -> None:
    """Each key of the meeting may hold what it held at some moment of some earlier life, or nothing."""
    size = data.draw(st.integers(1, 3))
    store = dist.HashStore()
    places = [f"{kind}/{rank}" for kind in ("arrived", "answer") for rank in range(size)]
    keys = [*filter("answer/0".__ne__, places), "roll", "stage"]  # the lead answers nobody
    earlier: dict[str, list[bytes]] = {key: [] for key in keys}
    for _ in range(2):
        _lives(store, [size])
        for key in keys:
            earlier[key].append(store.get(key))
    names = {stage.decode().split()[1] for stage in earlier["stage"]}
    for key in keys:
        kept = data.draw(st.sampled_from([*earlier[key], None]), label=key)
        store.delete_key(key)
        if kept is not None:
            store.set(key, kept)
    order = data.draw(st.permutations(range(size)))
    met: list[str] = []
    threads = [threading.Thread(target=lambda rank=rank: met.append(_meet(store, rank, size))) for rank in order]
    for thread in threads:
        thread.start()
        time.sleep(data.draw(st.sampled_from([0.0, 0.01])))
    for thread in threads:
        thread.join(patience(30))
    assert len(met) == size
    assert len({*met}) == 1
    assert not names & {*met}


def test_a_rank_that_comes_before_the_lead_does_not_take_the_roll_of_an_earlier_life() -> None:
    store = dist.HashStore()
    (before,) = _lives(store, [2])
    with ThreadPoolExecutor(2) as ranks:
        early = ranks.submit(_meet, store, 1, 2)
        time.sleep(0.2)
        assert not early.done()
        assert before != _meet(store, 0, 2) == early.result(patience(10))


def test_a_lead_whose_peer_is_of_an_earlier_life_waits_and_then_names_it_and_its_process() -> None:
    store = dist.HashStore()
    _lives(store, [2])
    with pytest.raises(
        RankAbsentError, match=r"join failed: rank 1 did not join .* 0.5 s; the last .* is pid \d+ on here"
    ):
        _meet(store, 0, 2, timeout_s=0.5)


def test_ranks_that_never_come_are_named_alike_by_all_that_have() -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor(3) as ranks:
        met = [ranks.submit(_meet, store, rank, 5, 0.6) for rank in (0, 1, 3)]
        errors = [one.exception(patience(20)) for one in met]
    assert {type(error) for error in errors} == {RankAbsentError}
    assert {str(error) for error in errors} == {
        "phase join failed: rank 2 and rank 4 did not join the job within 0.6 s"
    }


def test_a_lead_that_does_not_come_is_named() -> None:
    with pytest.raises(RankAbsentError, match=r"^phase join failed: rank 0 did not join the job within 0.4 s$"):
        _meet(dist.HashStore(), 1, 2, timeout_s=0.4)


def test_a_lead_that_waits_for_others_is_waited_for() -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as ranks:
        first = ranks.submit(_meet, store, 1, 3, 1.0)
        time.sleep(0.7)
        lead = ranks.submit(_meet, store, 0, 3, 5.0)
        time.sleep(1.5)  # longer than the first one's patience
        assert not first.done()
        assert _meet(store, 2, 3) == first.result(patience(10)) == lead.result(patience(10))


@pytest.mark.parametrize("rank", [0, 1])
def test_the_earlier_of_two_processes_of_one_rank_ends(rank: int) -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor(3) as ranks:
        earlier = ranks.submit(_meet, store, rank, 2)
        time.sleep(0.1)
        later = ranks.submit(_meet, store, rank, 2)
        error = earlier.exception(patience(20))
        assert isinstance(error, CheckpointError)
        assert f"two processes have come as rank {rank} of this job" in str(error)
        assert _meet(store, 1 - rank, 2) == later.result(patience(20))


def test_a_lead_of_an_earlier_life_that_still_waits_never_goes_on_with_the_new_life() -> None:
    """The new lead comes a moment before the others, while it waits for one that never came."""
    for _ in range(20):
        store = dist.HashStore()
        with ThreadPoolExecutor(3) as ranks:
            orphan = ranks.submit(_meet, store, 0, 2)
            while not store.check(["arrived/0"]):
                time.sleep(0.001)
            old = store.get("arrived/0")
            new = [ranks.submit(_meet, store, 0, 2)]
            while store.get("arrived/0") == old:
                time.sleep(0.0005)
            new.append(ranks.submit(_meet, store, 1, 2))
            assert new[0].result(patience(20)) == new[1].result(patience(20))
            assert "two processes have come as rank 0" in str(orphan.exception(patience(20)))


def test_a_rank_whose_job_has_gone_on_with_an_orphan_learns_it_at_once() -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor(3) as ranks:
        orphan = ranks.submit(_meet, store, 1, 2)
        time.sleep(0.1)
        lead = ranks.submit(_meet, store, 0, 2)
        late = ranks.submit(_meet, store, 1, 2)
        outcomes = [one.exception(patience(20)) for one in (orphan, late)]
        assert lead.result(patience(20))
    assert sum(error is None for error in outcomes) == 1, "exactly one of them is rank 1"
    assert "two processes have come as rank 1" in str(next(filter(None, outcomes)))


def test_a_member_of_a_roll_of_an_earlier_lead_is_not_called_again() -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor(3) as ranks:
        orphan = ranks.submit(_meet, store, 1, 3)
        with pytest.raises(RankAbsentError):
            _meet(store, 0, 3, timeout_s=0.4)  # it ends with the lead's error
        assert isinstance(orphan.exception(patience(20)), RankAbsentError)
        client = StoreClient(store, writer=2)
        client.put("roll", json.dumps([[(client.peek("arrived/1") or b"").decode()], None]).encode())
        lead = ranks.submit(_meet, store, 0, 2)
        time.sleep(0.6)
        assert not lead.done()
        assert _meet(store, 1, 2) == lead.result(patience(20))


def test_a_lead_whose_time_is_up_ends_whatever_has_become_of_its_keys() -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor(1) as ranks:
        lead = ranks.submit(_meet, store, 0, 2, 1.0)
        time.sleep(0.2)
        client = StoreClient(store, writer=2)
        for key in ("answer/0", "answer/1", "arrived/1"):
            client.put(key, b"of another pid 1 on there")
        assert isinstance(lead.exception(patience(20)), RankAbsentError)


def test_a_rank_for_which_a_heartbeat_vouches_and_that_has_ended_is_missed_at_once() -> None:
    store = dist.HashStore()
    dead = subprocess.Popen(["true"])
    dead.wait()
    beat = Beat(1, dead.pid, "1", "here", machine("pid"))
    StoreClient(store, writer=1).put(beat_key(1), beat.encode())
    began = time.monotonic()
    with pytest.raises(RankAbsentError, match=r"rank 1 \(pid \d+ on here\) was killed or ended"):
        _meet(store, 0, 2)
    assert time.monotonic() - began < patience(5)


# What is joined after it


def _attempt(store: dist.Store, number: int, fails: bool, at_the_end: ExitStack) -> list[Any]:
    """Join, and make one save; rank 0 fails it late. The ranks do not leave: killed ones would not, either."""

    def run(rank: int) -> Any:
        topology = at_the_end.enter_context(Topology.join(dist.PrefixStore("ckpt", store), rank, 2, timeout_s=20.0))
        try:
            with topology.operation("save of checkpoint-00000002"), topology.phase("write") as phase:
                if fails and rank == 0:
                    time.sleep(0.3)
                    raise OSError(28, "No space left on device")
                phase.payload = number
            return phase.payloads
        except CheckpointError as error:
            return str(error)

    with ThreadPoolExecutor(2) as ranks:
        return [one.result(patience(60)) for one in [ranks.submit(run, rank) for rank in (1, 0)]]


@pytest.mark.parametrize("kind", ["hash", "file", "tcp", "tcp without libuv"])
def test_an_error_of_the_second_attempt_is_raised_on_all_its_ranks(kind: str, tmp_path: Path) -> None:
    stores: dict[str, Callable[[], dist.Store]] = {
        "hash": dist.HashStore,
        "file": lambda: dist.FileStore(str(tmp_path / "store"), -1),
        "tcp": lambda: dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False),
        "tcp without libuv": lambda: dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=False
        ),
    }
    store = stores[kind]()
    said = "save of checkpoint-00000002 failed in phase write on rank 0: No space left on device"
    with ExitStack() as at_the_end:
        assert _attempt(store, 1, False, at_the_end) == [[1, 1]] * 2
        assert _attempt(store, 2, True, at_the_end) == [said] * 2
        assert _attempt(store, 3, False, at_the_end) == [[3, 3]] * 2
