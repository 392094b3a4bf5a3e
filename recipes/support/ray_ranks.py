"""Start the ranks of a run as actors of a Ray cluster; after a lost node, start all again on the nodes that are left.

    launcher -- placement group --> one actor for each rank --> run_job, with the variables that torchrun would set
        ^                                  |
        +---- a rank is gone, or raises ---+   ask the others to end, kill them, begin again from the newest checkpoint

Ray starts, watches and kills processes; that all ranks hold one result is the business of their agreement. The launcher holds the folder of
the run, so that no other run begins between two lives of the ranks.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ckpt.catalog.catalog import catalog_at
from ckpt.cli.environment import torch_variables
from ckpt.errors import CheckpointError, ConfigurationError, RankAbsentError, describe, rebuild, sentence
from ckpt.format.places import place_of
from ckpt.memory.device import OWN_DEVICE
from ckpt.ranks.sigterm import TOLD_TO_END
from recipes.support.config import fits
from recipes.support.ranks import RANK_VARIABLES, Job, end_after_this_step, grace_s
from recipes.support.run_folder import RunFolder, opened
from recipes.support.slurm import PORTS

_ROOM_S = 30.0
"""Longest wait for room for a group: Ray counts a node that is gone for some 10 s more."""
_SETTLES_S = 3.0
"""For so long the room for fewer ranks than wanted must not have grown: what an earlier life's ranks held becomes free little by little."""
_BEGINS_S = 120.0
_LAST_WORDS_S = 8.0
"""In which the ranks that are left learn of one that is gone, and say so."""
_MORE_THAN_GRACE_S = 5.0


InRank = Callable[[Job, dict[str, Any]], dict[str, Any] | None]
"""Runs a job on the ranks that exist, of which this process is one by its environment."""


class _Rank:
    """One rank, in an actor: its methods run in threads, so SIGTERM is not the run's."""

    def where(self) -> tuple[str, str, int]:
        """Return the node's id and address, and a port that is free there."""
        context = ray.get_runtime_context()
        return context.get_node_id(), ray.util.get_node_ip_address(), _free_port()

    def run(self, in_rank: InRank, job: Job, cfg: dict[str, Any], variables: Mapping[str, str], folder: str) -> dict[str, Any]:
        """Run the job; return {"result"}, {"error"} as `errors.describe` has it, or {"told": True} of a run that was told to end."""
        for name in RANK_VARIABLES:
            os.environ.pop(name, None)
        os.environ.update(variables)
        os.chdir(folder)
        try:
            return {"result": in_rank(job, cfg | {"launch": {**cfg["launch"], "name": "exists"}})}
        except SystemExit as end:
            if end.code == TOLD_TO_END:
                return {"told": True}
            raise
        except CheckpointError as error:
            return {"error": describe(error)}

    def end(self) -> None:
        """Have the run save and end after its step."""
        end_after_this_step()


def run_ray_ranks(in_rank: InRank, job: Job, cfg: dict[str, Any], folder: RunFolder | None) -> dict[str, Any] | None:
    """Run the job on ranks of a Ray cluster, and return rank 0's result.

    Args:
        in_rank: called in each rank; a function of an importable module, as the job.

    Raises:
        CheckpointError: the job's error, after `launch.max_restarts`; at once, if it is one of the configuration.
        SystemExit: the launcher was told to end; the ranks have saved.
    """
    _connect(cfg["launch"]["address"])
    before = _newest(cfg)
    with _told_to_end() as is_told, opened(folder, cfg) as run:
        cfg = run.cfg
        for restarts_left in reversed(range(1 + cfg["launch"]["max_restarts"])):
            outcome = _life(in_rank, job, cfg, is_told)
            if isinstance(outcome, _Result):
                return outcome.value
            if isinstance(outcome, ConfigurationError) or is_told() or not restarts_left:
                raise outcome
            print(f"{sentence(outcome)}; the ranks start again", file=sys.stderr, flush=True)
            if _newest(cfg) != before:
                cfg = cfg | {"resume": "latest", "overwrite": False}
    raise AssertionError("the last life ends the run")


class _Result:
    """What rank 0 has returned."""

    def __init__(self, value: dict[str, Any] | None) -> None:
        self.value = value


def _connect(address: str | None) -> None:
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # equal lines of ranks are lines of each
    if ray.is_initialized():
        return
    names = ("PYTHONPATH", "OMP_NUM_THREADS", "HYDRA_FULL_ERROR")
    variables = torch_variables() | {name: os.environ[name] for name in names if name in os.environ}
    try:
        ray.init(address=address or os.environ.get("RAY_ADDRESS"), runtime_env={"env_vars": variables}, configure_logging=False)
    except (ConnectionError, ValueError) as error:
        raise ConfigurationError(
            f"launch=ray: no cluster at {address or os.environ.get('RAY_ADDRESS')}: {sentence(error)}; set RAY_ADDRESS, or launch.address"
        ) from error


def _newest(cfg: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """Return the place of the newest checkpoint of the run's root in the order of commits; None: there is none, or no root."""
    newest = catalog_at(place_of(cfg["checkpoint_root"])).newest() if "checkpoint_root" in cfg else None
    return None if newest is None else newest.order


def _life(in_rank: InRank, job: Job, cfg: dict[str, Any], is_told: Callable[[], bool]) -> _Result | CheckpointError:
    """Start all ranks once; return rank 0's result, or why they have ended."""
    keys = cfg["launch"]
    of_rank = {"CPU": keys["cpus_per_rank"], "GPU": keys["gpus_per_rank"], **keys["resources"]}
    of_rank = {name: float(number) for name, number in of_rank.items() if number}
    if not of_rank or min(of_rank.values()) < 0:
        raise ConfigurationError(f"launch=ray: a rank would need {of_rank or 'nothing'}; give launch.cpus_per_rank, or another resource")
    numbers = [num for num in range(keys["least_ranks"], keys["nproc_per_node"] + 1) if fits(cfg, num)]
    group = _room(of_rank, numbers, is_told)
    options = {"max_concurrency": 2, "max_restarts": 0, "num_cpus": of_rank.get("CPU", 0), "num_gpus": of_rank.get("GPU", 0)}
    options["resources"] = {name: number for name, number in of_rank.items() if name not in ("CPU", "GPU")}
    actor = ray.remote(_Rank)
    ranks: list[Any] = []
    try:
        for number in range(group.bundle_count):
            place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
            ranks.append(actor.options(**options, scheduling_strategy=place).remote())
        places = ray.get([rank.where.remote() for rank in ranks], timeout=_BEGINS_S)
        ranks, variables = _numbered(ranks, places, has_own_device=keys["gpus_per_rank"] > 0)
        runs = [rank.run.remote(in_rank, job, cfg, of_one, os.getcwd()) for rank, of_one in zip(ranks, variables, strict=True)]
        return _outcome(ranks, runs, is_told, grace_s(cfg) + _MORE_THAN_GRACE_S)
    except (RayError, ValueError) as error:
        return RankAbsentError(f"a rank could not be started: {sentence(error)}")
    finally:
        for rank in ranks:
            ray.kill(rank)
        remove_placement_group(group)


def _room(of_rank: Mapping[str, float], numbers: Sequence[int], is_told: Callable[[], bool]) -> PlacementGroup:
    """Reserve room for as many ranks as there is.

    Ray tells what is free in the whole cluster. A rank has to fit on one node, so fewer may fit: then the next number is tried.

    Args:
        numbers: of ranks, on which the run can train; ascending.

    Raises:
        RankAbsentError: there is room for none of them.
        SystemExit: the launcher is told to end.
    """
    deadline = time.monotonic() + _ROOM_S
    most, since_s, num, too_many = -1, 0.0, 0, numbers[-1] + 1
    while time.monotonic() < deadline:
        if is_told():
            raise SystemExit(TOLD_TO_END)
        free = ray.available_resources()
        there = min([numbers[-1], too_many - 1, *(int(free.get(name, 0.0) / number) for name, number in of_rank.items())])
        if there != most:
            most, since_s = there, time.monotonic()
            num = max((count for count in numbers if count <= most), default=0)
        if num and (num == numbers[-1] or time.monotonic() - since_s >= _SETTLES_S):
            group = placement_group([dict(of_rank)] * num, strategy="PACK")
            if ray.wait([group.ready()], timeout=5.0)[0]:
                return group
            remove_placement_group(group)  # a node that is counted is gone, or what is free lies on several
            too_many, deadline = num, time.monotonic() + _ROOM_S
        time.sleep(0.5)
    wanted = ", ".join(f"{number:g} {name}" for name, number in of_rank.items())
    raise RankAbsentError(
        f"launch=ray: the cluster has room for {max(most, 0)} ranks with {wanted} each, and the run needs {numbers[0]} "
        "(launch.least_ranks, and what its layout and its batch divide by); add nodes, or lower it"
    )


def _numbered(
    ranks: Sequence[Any], places: Sequence[tuple[str, str, int]], *, has_own_device: bool
) -> tuple[list[Any], list[dict[str, str]]]:
    """Return the actors in the order of their ranks, those of a node together, and the variables of each."""
    nodes = list(dict.fromkeys(node for node, _, _ in places))
    order = sorted(range(len(ranks)), key=lambda one: (nodes.index(places[one][0]), one))
    of_node = [[at for at in order if places[at][0] == node] for node in nodes]
    _, address, port = places[order[0]]
    found = []
    for rank, old_rank in enumerate(order):
        node = nodes.index(places[old_rank][0])
        numbers = {"RANK": rank, "WORLD_SIZE": len(ranks), "GROUP_RANK": node, "GROUP_WORLD_SIZE": len(nodes), "MASTER_PORT": port}
        numbers |= {"LOCAL_RANK": of_node[node].index(old_rank), "LOCAL_WORLD_SIZE": len(of_node[node]), OWN_DEVICE: int(has_own_device)}
        found.append({name: str(number) for name, number in numbers.items()} | {"MASTER_ADDR": address})
    return [ranks[old_rank] for old_rank in order], found


def _outcome(
    ranks: Sequence[Any], runs: Sequence[Any], is_told: Callable[[], bool], patience_s: float
) -> _Result | CheckpointError:
    """Wait for the ranks; return rank 0's result, or the error that says most: ours before one of a process that is gone."""
    results: dict[int, dict[str, Any]] = {}
    gone: dict[int, str] = {}  # in the order in which they were seen
    waiting = {run: rank for rank, run in enumerate(runs)}
    deadline, has_asked = float("inf"), False
    while waiting and time.monotonic() < deadline:
        if is_told() and not has_asked:
            has_asked, deadline = True, time.monotonic() + patience_s
            for rank in ranks:
                rank.end.remote()
        done, _ = ray.wait(list(waiting), timeout=0.5)
        for run in done:
            rank = waiting.pop(run)
            try:
                results[rank] = ray.get(run)
            except RayTaskError as error:
                print(f"rank {rank}:\n{error}", file=sys.stderr, flush=True)  # a bug, with its traceback
                gone[rank] = f"failed: {sentence(error.cause)}"
            except RayError as error:
                gone[rank] = f"is gone: {type(error).__name__}"
        if gone or any("error" in offer for offer in results.values()):
            deadline = min(deadline, time.monotonic() + _LAST_WORDS_S)
    errors = [offer["error"] for offer in results.values() if "error" in offer]
    if any("told" in offer for offer in results.values()) and not gone:
        raise SystemExit(TOLD_TO_END)
    if errors:
        # One that lost its connection to another says less than one that was told which.
        return rebuild(min(errors, key=lambda error: (error["phase"] is None, error["rank"] is None)))
    if gone or waiting:
        found = gone | dict.fromkeys(waiting.values(), "did not end")
        # One that failed because a connection ended says less than one that is gone, and that less than a bug.
        first = min(found, key=lambda rank: ("onnection" in found[rank], not found[rank].startswith("failed")))
        return RankAbsentError(f"rank {first} {found[first]}", rank=first)
    return _Result(results[0]["result"])


def _free_port() -> int:
    """Return a port that is free here, of those that no connection gets meanwhile."""
    for port in random.sample(PORTS, 100):
        with socket.socket() as free, suppress(OSError):
            free.bind(("", port))
            return port
    raise RuntimeError("no port is free")


@contextmanager
def _told_to_end() -> Iterator[Callable[[], bool]]:
    """Note SIGTERM to the launcher inside the block, in the main thread: in place of Ray's handler, which ends the process at once."""
    sigterm = threading.Event()
    here = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, lambda *_: sigterm.set()) if here else None
    try:
        yield sigterm.is_set
    finally:
        if here:
            signal.signal(signal.SIGTERM, before or signal.SIG_DFL)
