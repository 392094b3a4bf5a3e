"""Jobs that tests launch, and a command that launches them one after another as a sweep does:

    python -m tests.support.jobs adds_up:3 is_killed:2

prints one line of JSON per job: what it returned or raised, and what it left behind.
"""

from __future__ import annotations

import gc
import json
import multiprocessing.util
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ckpt.memory.device import Device
from ckpt.ranks.sigterm import TOLD_TO_END
from ckpt.ranks.topology import Topology
from recipes.support.launch import launch
from recipes.support.ranks import rank_of_environment, ranks_exist

SAVE = "save of checkpoint-00000020"


def config(num_ranks: int, **more: Any) -> dict[str, Any]:
    device = {"_target_": "ckpt.memory.device.Device", "type": "cpu", "collectives": "gloo", "plugin": None}
    return {
        "launch": {"nproc_per_node": num_ranks},
        "device": device,
        "agree": {"timeout_s": float(os.environ.get("AGREE_S", "2"))},
        "save": {"grace_s": 5.0},
        "rank_that_composed": rank_of_environment(),
        **more,
    }


def adds_up(cfg: dict[str, Any], topology: Topology) -> dict[str, Any]:
    total = torch.tensor(float(topology.rank))
    if topology.world_size > 1:
        dist.all_reduce(total)
    with topology.operation(SAVE), topology.phase("write") as phase:
        phase.payload = {"rank": topology.rank, "pid": os.getpid(), "local_rank": topology.local_rank}
    return {
        "total": total.item(),
        "ranks": phase.payloads,
        "nodes": topology.nodes,
        "composed_by": cfg["rank_that_composed"],
        "has_process_group": dist.is_initialized(),
        "threads": torch.get_num_threads(),
        "omp": os.environ.get("OMP_NUM_THREADS"),
        "from_the_launcher": os.environ.get("A_VARIABLE_OF_THE_LAUNCHER"),
        "folder": os.getcwd(),
        "frozen": gc.get_freeze_count(),
    }


def has_a_bug(cfg: dict[str, Any], topology: Topology) -> None:
    if topology.rank == 1:
        raise ZeroDivisionError("a bug in training")
    dist.all_reduce(torch.ones(3))


def has_a_bug_in_a_save(cfg: dict[str, Any], topology: Topology) -> None:
    with topology.operation(SAVE), topology.phase("write"):
        if topology.rank == 1:
            raise KeyError("a bug in a save")


def fills_the_disk(cfg: dict[str, Any], topology: Topology) -> None:
    with topology.operation(SAVE), topology.phase("write") as phase:
        phase.component = "model"
        if topology.rank == 1:
            raise OSError(28, "No space left on device", "w")


def is_killed_in_a_save(cfg: dict[str, Any], topology: Topology) -> None:
    with topology.operation(SAVE), topology.phase("write"):
        if topology.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def is_killed_in_training(cfg: dict[str, Any], topology: Topology) -> None:
    if topology.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        dist.all_reduce(torch.ones(3))
        time.sleep(0.001)


def hangs_in_a_save(cfg: dict[str, Any], topology: Topology) -> None:
    with topology.operation(SAVE), topology.phase("write"):
        if topology.rank == 1:
            time.sleep(60)


def ends_without_a_word(cfg: dict[str, Any], topology: Topology) -> None:
    if topology.rank == 1:
        os._exit(3)
    dist.all_reduce(torch.ones(3))


def exits(cfg: dict[str, Any], topology: Topology) -> None:
    if topology.rank == 1:
        sys.exit(3)
    dist.all_reduce(torch.ones(3))


def exits_well(cfg: dict[str, Any], topology: Topology) -> dict[str, Any]:
    if topology.rank == 1:
        sys.exit()
    return {"rank": topology.rank}


class StoppingDevice(Device):
    """A device that stops one rank, as SIGSTOP or a frozen cgroup does, at the moment when its process group is made."""

    def __init__(self, stopped: int, **keywords: Any) -> None:
        super().__init__(**keywords)
        self._stopped = stopped
        self._at_process_group = False

    def use(self, local_rank: int) -> None:
        super().use(local_rank)
        self._at_process_group = local_rank == self._stopped

    @property
    def backends(self) -> str:
        if self._at_process_group:
            _stand_still()
        return super().backends


def _stand_still() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def stands_still_in_training(cfg: dict[str, Any], topology: Topology) -> None:
    for step in range(1000):
        if topology.rank == cfg["stopped"] and step == 3:
            _stand_still()
        dist.all_reduce(torch.ones(3))


def stands_still_in_a_save(cfg: dict[str, Any], topology: Topology) -> None:
    with topology.operation(SAVE), topology.phase("write"):
        if topology.rank == cfg["stopped"]:
            _stand_still()


def stands_still_at_the_end(cfg: dict[str, Any], topology: Topology) -> dict[str, Any]:
    if topology.rank == cfg["stopped"]:
        multiprocessing.util.Finalize(None, _stand_still, exitpriority=100)
    return {}


def was_told_to_end(cfg: dict[str, Any], topology: Topology) -> None:
    """All ranks know that they are to end; rank 0 takes longer, and has something to put in order at last."""
    if topology.rank == 0:
        time.sleep(1.0)
        Path(cfg["folder"], "in order").touch()
    raise SystemExit(TOLD_TO_END)


def says_who_runs(cfg: dict[str, Any], topology: Topology) -> None:
    """Write this rank's pid to a file of `folder`, and go on until the end of the world."""
    Path(cfg["folder"], str(topology.rank)).write_text(f"{os.getpid()}")
    while True:
        with topology.operation(SAVE), topology.phase("write"):
            time.sleep(0.02)
        Path(cfg["folder"], f"saved-{topology.rank}").touch()


def outcome_of(job: Callable[..., Any], cfg: dict[str, Any]) -> dict[str, Any]:
    began = time.monotonic()
    try:
        outcome = {"result": launch(job, cfg)}
    except Exception as error:
        outcome = {"error": type(error).__name__, "message": str(error), "rank": getattr(error, "rank", None)}
    gc.collect()
    return {"job": job.__name__, **outcome, "seconds": time.monotonic() - began, "left": left_behind()}


def left_behind() -> dict[str, Any]:
    """What a job could leave in this process. Equal before and after, but for the forkserver and its helper."""
    import psutil

    this = psutil.Process()
    return {
        "children": sorted(" ".join(child.cmdline()) for child in this.children(recursive=True)),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "descriptors": this.num_fds(),
        "environment": sorted(name for name in os.environ if name.startswith(("TORCH", "OMP", "RANK", "WORLD"))),
        "handlers": [repr(signal.getsignal(number)) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)],
        "process_group": dist.is_initialized(),
    }


def main(arguments: list[str]) -> None:
    for argument in arguments:
        name, _, number = argument.partition(":")
        stopped = int(os.environ.get("STOPPED", "-1"))
        cfg = config(int(number or 1), folder=os.environ.get("FOLDER_OF_PIDS", ""), stopped=stopped)
        from tests.support import jobs  # by its own name, as a recipe's job would be, not as part of __main__

        line = json.dumps(
            {**outcome_of(getattr(jobs, name), cfg), "here": rank_of_environment() if ranks_exist() else None}
        )
        sys.stdout.write(line + "\n")  # in one piece: the ranks of torchrun share a pipe
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
