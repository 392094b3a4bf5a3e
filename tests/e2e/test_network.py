"""A run on one machine opens no port that another machine can reach: every recipe, watched from another machine while it runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.e2e.other_machine import OUTER, watched, why_not_here
from tests.e2e.runs import SMALL

pytestmark = pytest.mark.skipif(bool(why_not_here()), reason=why_not_here() or "they are")

ONE_BY_ONE = """
import importlib, json, sys

commands = json.loads(sys.argv[1])
for command in commands:
    sys.argv = command
    importlib.import_module(command[0]).main()
"""
TRAIN = ["recipes.train", "output_dir=trained", *SMALL, "train.steps=2", "launch.nproc_per_node=2"]
SYNC = ["recipes.sync_weights", "output_dir=run", *SMALL, "train.steps=2"]


def test_the_other_machine_finds_what_listens_for_it(tmp_path: Path) -> None:
    listens = "import socket, time; one, two = [socket.create_server((host, 0)) for host in ('', '127.0.0.1')]; time.sleep(0.5)"
    found = watched([sys.executable, "-c", listens], tmp_path)
    assert sorted(address for address, _ in found.listening) == ["0.0.0.0", "127.0.0.1"], found.said
    assert found.reached == {port for address, port in found.listening if address == "0.0.0.0"}


@pytest.mark.parametrize(
    "commands",
    [
        pytest.param([TRAIN, [*SYNC, "roles.trainer=2"]], id="train and sync_weights"),
        pytest.param([[*TRAIN, "parallel=fsdp", "save.mode=async"]], id="fsdp", marks=pytest.mark.full),
        pytest.param([[*TRAIN, "strategy=two-stage", "save.every=1"]], id="two-stage", marks=pytest.mark.full),
        pytest.param([[*TRAIN, "parallel=accelerate"]], id="accelerate", marks=pytest.mark.full),
        pytest.param([[*SYNC, "engine=broadcast", "ckpt=kimi-engine"]], id="broadcast", marks=pytest.mark.full),
        pytest.param([[*SYNC, "engine=naive", "roles.colocated=true"]], id="naive", marks=pytest.mark.full),
        pytest.param([["recipes.doctor", "launch.nproc_per_node=2"]], id="doctor", marks=pytest.mark.full),
    ],
)
def test_a_run_on_one_machine_listens_on_its_loopback_interface_alone(
    commands: list[list[str]], tmp_path: Path
) -> None:
    """Several commands are run by one process, one after the other: it loads torch once."""
    found = watched([sys.executable, "-c", ONE_BY_ONE, json.dumps(commands)], tmp_path)
    assert found.code == 0, found.said
    assert found.listening, "its ranks meet somewhere"
    assert found.beyond_loopback == set()
    assert found.reached == set()


@pytest.mark.full
def test_a_rollout_that_joins_on_the_same_machine_opens_nothing_either(tmp_path: Path) -> None:
    run = f"{sys.executable} -m {' '.join(SYNC)} train.steps=300 roles.rollout=0"
    join = f"{sys.executable} -m recipes.join_rollout run=run updates=2"
    found = watched(["sh", "-c", f"{run} & {join}; code=$?; kill $!; wait; exit $code"], tmp_path)
    assert found.code == 0, found.said
    assert "has left with version" in found.said
    assert (found.beyond_loopback, found.reached) == (set(), set())


@pytest.mark.full
def test_ranks_that_somebody_else_starts_listen_where_they_reach_each_other(tmp_path: Path) -> None:
    """MASTER_ADDR names the interface of the store; ranks of one machine need no other than the loopback one for the rest."""
    rank = f"RANK=$RANK {sys.executable} -m tests.support.jobs adds_up"
    both = f"(RANK=0; {rank}) & (RANK=1; {rank}); code=$?; wait $!; exit $code"
    environment = {"WORLD_SIZE": "2", "MASTER_ADDR": OUTER, "MASTER_PORT": "4711"}
    found = watched(["sh", "-c", both], tmp_path, **environment)
    assert found.code == 0, found.said
    assert found.beyond_loopback == {OUTER, f"::ffff:{OUTER}"} & found.beyond_loopback
    assert {port for address, port in found.listening if address == OUTER} == {4711}
    assert found.reached == {4711}
