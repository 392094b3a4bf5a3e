"""Slurm's variables of a task, and the ranks that follow from them."""

from __future__ import annotations

import os
import sys

import pytest

from ckpt.errors import ConfigurationError
from ckpt.memory.device import OWN_DEVICE
from recipes.support.slurm import slurm_variables
from tests.support.ranks import forkserver

TASK = {
    "SLURM_JOB_ID": "71",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "3(x2),1",
    "SLURM_STEP_NODELIST": "gpu[007-008,020]",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "9",
}


def test_a_task_of_several_is_a_rank() -> None:
    found = slurm_variables(TASK)
    port = int(found.pop("MASTER_PORT"))
    assert 15_000 <= port < 30_000, "below the ports of connections"
    assert found == {
        "RANK": "4",
        "WORLD_SIZE": "7",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "3",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "3",
        "MASTER_ADDR": "gpu007",
    }


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"SLURM_JOB_ID": "71", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"},
        TASK | {"SLURM_STEP_NUM_TASKS": "1"},
        TASK | {"RANK": "3"},
    ],
    ids=["no Slurm", "a batch script, outside of srun", "one task", "ranks that another launcher has made"],
)
def test_elsewhere_nothing_is_set(environment: dict[str, str]) -> None:
    assert slurm_variables(environment) == {}


@pytest.mark.parametrize("has_terminal", [True, False], ids=["in the shell", "in a job that was submitted from there"])
def test_an_interactive_shell_has_one_task_and_a_terminal(has_terminal: bool) -> None:
    ours, theirs = os.openpty()
    try:
        task = forkserver().Process(target=_end_with_number_of_variables, args=([os.ttyname(theirs)] if has_terminal else [],))
        task.start()
        task.join()
    finally:
        os.close(ours)
        os.close(theirs)
    assert task.exitcode == (0 if has_terminal else 8)


def _end_with_number_of_variables(terminals: list[str]) -> None:
    os.setsid()
    for terminal in terminals:
        os.open(terminal, os.O_RDWR)  # the first of a session is its terminal
    sys.exit(len(slurm_variables(TASK | {"SLURM_PTY_PORT": "40000"})))


def test_what_the_user_has_set_stays() -> None:
    found = slurm_variables(TASK | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4000"})
    assert not {"MASTER_ADDR", "MASTER_PORT"} & found.keys() and found["RANK"] == "4"


def test_a_port_is_of_one_life_of_one_step() -> None:
    lives = [TASK, TASK | {"SLURM_RESTART_COUNT": "1"}, TASK | {"SLURM_STEP_ID": "1"}, TASK | {"SLURM_JOB_ID": "72"}]
    assert len({slurm_variables(one)["MASTER_PORT"] for one in lives}) == len(lives)
    assert slurm_variables(TASK) == slurm_variables(TASK | {"SLURM_RESTART_COUNT": "0"})


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("n1", "n1"),
        ("login,gpu[1-4]", "login"),
        ("rack[2-3]gpu[07,09-12],other", "rack2gpu07"),
        ("gpu-a-[001-128].cluster", "gpu-a-001.cluster"),
    ],
)
def test_the_first_host_of_a_list(hosts: str, first: str) -> None:
    assert slurm_variables(TASK | {"SLURM_STEP_NODELIST": hosts})["MASTER_ADDR"] == first


def test_a_variable_that_is_missing_is_named() -> None:
    with pytest.raises(ConfigurationError, match="but SLURM_LOCALID is missing; set RANK, WORLD_SIZE"):
        slurm_variables({name: value for name, value in TASK.items() if name != "SLURM_LOCALID"})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"SLURM_STEP_TASKS_PER_NODE": "many"}, "SLURM_STEP_TASKS_PER_NODE=many is not as Slurm writes it"),
        ({"SLURM_NODEID": "5"}, "SLURM_NODEID=5 is not as Slurm writes it"),
        ({"SLURM_STEP_NODELIST": ""}, "SLURM_STEP_NODELIST= is not"),
    ],
)
def test_variables_that_slurm_does_not_write_are_one_sentence(change: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        slurm_variables(TASK | change)
    assert says in str(caught.value) and "SLURM_STEP_NUM_TASKS is 7" in str(caught.value)


@pytest.mark.parametrize(("said", "one"), [("1", True), ("a100:1", True), ("2", False), ("", False)])
def test_one_device_is_a_ranks_own_where_slurm_was_asked_for_one(said: str, one: bool) -> None:
    assert (slurm_variables(TASK | {"SLURM_GPUS_PER_TASK": said}).get(OWN_DEVICE) == "1") is one
    assert OWN_DEVICE not in slurm_variables(TASK)
