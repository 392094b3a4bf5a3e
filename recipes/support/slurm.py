"""Ranks that Slurm has started: `srun` gives each task its number, but not by the names that torch and its libraries read."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping

from ckpt.errors import ConfigurationError
from ckpt.memory.device import OWN_DEVICE

PORTS = range(15_000, 30_000)
"""For stores of ranks: below those that the kernel gives to connections."""


def slurm_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a rank, as torchrun would set them, in a task of `srun` with several tasks; else none.

    Variables of an address and a port that the user has set stay. In a batch script itself, outside of `srun`, there is one process, and no
    other will come; nor does one beside an interactive shell (`srun --pty`), which is the first task alone. A job that was submitted from
    such a shell has inherited its variables, but has no terminal.

    Raises:
        ConfigurationError: Slurm's variables are not as Slurm writes them.
    """
    tasks = environment.get("SLURM_STEP_NUM_TASKS", "1")
    if "RANK" in environment or tasks == "1" or ("SLURM_PTY_PORT" in environment and _has_terminal()):
        return {}
    try:
        node = int(environment["SLURM_NODEID"])
        on_nodes = _tasks_of_nodes(environment["SLURM_STEP_TASKS_PER_NODE"])
        if node >= len(on_nodes):
            raise ValueError(f"SLURM_NODEID={node}")
        found = {
            "RANK": environment["SLURM_PROCID"],
            "WORLD_SIZE": tasks,
            "LOCAL_RANK": environment["SLURM_LOCALID"],
            "LOCAL_WORLD_SIZE": str(on_nodes[node]),
            "GROUP_RANK": str(node),
            "GROUP_WORLD_SIZE": str(len(on_nodes)),
            "MASTER_ADDR": _first_host(environment["SLURM_STEP_NODELIST"]),
            "MASTER_PORT": str(_port(environment)),
        }
        if environment.get("SLURM_GPUS_PER_TASK", "").rpartition(":")[2] == "1":
            found[OWN_DEVICE] = "1"
    except (KeyError, ValueError) as error:
        what = f"{error.args[0]} is missing" if isinstance(error, KeyError) else f"{error} is not as Slurm writes it"
        raise ConfigurationError(
            f"SLURM_STEP_NUM_TASKS is {tasks}, so this is one of several ranks, but {what}; set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR "
            "and MASTER_PORT for each task"
        ) from error
    return {name: value for name, value in found.items() if name not in environment}


def is_only_task(environment: Mapping[str, str]) -> bool:
    """Whether `srun` has started this process, and no other."""
    return environment.get("SLURM_STEP_NUM_TASKS") == "1" and "SLURM_PROCID" in environment


def cores_of_task(environment: Mapping[str, str]) -> int | None:
    """Return the cores that Slurm was asked for for each task; None: it was not asked."""
    cores = environment.get("SLURM_CPUS_PER_TASK", "")
    return int(cores) if cores.isdecimal() else None


def _has_terminal() -> bool:
    """Whether this process belongs to a terminal, even if its input and output are redirected."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _tasks_of_nodes(text: str) -> list[int]:
    """Return the number of tasks on each node: "2(x3),1" is [2, 2, 2, 1]."""
    found = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]+)(?:\(x([0-9]+)\))?", part)
        if match is None:
            raise ValueError(f"SLURM_STEP_TASKS_PER_NODE={text}")
        found += [int(match[1])] * int(match[2] or 1)
    return found


def _first_host(hosts: str) -> str:
    """Return the first host of a list: of "gpu[007-012,020],login" it is gpu007."""
    match = re.match(r"(?:[^,\[]|\[[^\]]*\])+", hosts)
    if match is None:
        raise ValueError(f"SLURM_STEP_NODELIST={hosts}")
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", match[0])


def _port(environment: Mapping[str, str]) -> int:
    """Return a port that all tasks know, and no other step of this node is likely to have: also not the same job, started again."""
    life = [environment["SLURM_JOB_ID"], environment["SLURM_STEP_ID"], environment.get("SLURM_RESTART_COUNT", "0")]
    return PORTS[zlib.crc32(".".join(life).encode()) % len(PORTS)]
