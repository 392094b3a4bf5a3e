"""Launch a run: join ranks that exist, run in this process alone, or start ranks here."""

from __future__ import annotations

import functools
import importlib.util
import os
import socket
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from ckpt.errors import ConfigurationError, RankAbsentError
from ckpt.ranks.addresses import LOOPBACK
from ckpt.ranks.store_client import StoreClient
from ckpt.ranks.stores import StoreGoneError, reach, serve
from ckpt.ranks.topology import Topology
from recipes.support.ranks import (
    Environment,
    Job,
    listening_on,
    number_of,
    ranks_exist,
    run_job,
    take_slurm_ranks,
    take_threads,
    tracebacks_of_bugs,
)
from recipes.support.run_folder import RunFolder, opened
from recipes.support.slurm import is_only_task

CPU_RANKS = {
    "device": {"_target_": "ckpt.memory.device.Device", "type": "cpu", "collectives": "gloo"},
    "agree": {"timeout_s": 300.0, "grace_s": 20.0},
}
"""What `launch` reads of a config, of a command that works on files alone; with `RanksKeys` as a dictionary."""


@dataclass
class NumRanksKeys:
    """The keys of `launch`, of such a command."""

    nproc_per_node: int = 1


@dataclass
class RanksKeys:
    """The key `launch`, of such a command."""

    launch: NumRanksKeys = field(default_factory=NumRanksKeys)

    def validate(self) -> None:
        """Raise ConfigurationError for less than one rank."""
        if self.launch.nproc_per_node < 1:
            raise ConfigurationError(f"launch.nproc_per_node={self.launch.nproc_per_node}: expected at least 1")


_STORE_S = 300.0
_OWN_NAME = "127.0.1.1"  # as Debian's installer notes a machine's own name
_PATIENCE_S = 10.0  # how long rank 0, which holds the store, waits for the other ranks to be done with it
_PATIENCE_AFTER_ERROR_S = 3.0  # one of them may be gone


def launch(job: Job, cfg: dict[str, Any], folder: RunFolder | None = None) -> dict[str, Any] | None:
    """Run `job(cfg, topology)` on all ranks of this run, and return what it returned on rank 0.

    Ranks that exist already (of torchrun, where RANK is set, or tasks of Slurm) all call this; all run rank 0's `cfg`, and the result is
    None on all but rank 0. Otherwise `cfg["launch"]["nproc_per_node"]` ranks are started on this machine; a single rank is this
    process itself, without store, threads or process group. With several ranks torch's default process group exists while
    the job runs, with the collectives of `cfg["device"]`.

    Args:
        job: a function of an importable module.
        cfg: plain values that JSON can hold.
        folder: of the run, open while the job runs: in this process if it starts the ranks or is the only one, in rank 0 of
            ranks that exist. None: the job writes nothing.

    Raises:
        CheckpointError: the job failed; started ranks raise one error for all of them. Or the folder cannot be opened; then
            no rank has started.
    """
    take_slurm_ranks()
    if ranks_exist() and cfg["launch"].get("name") == "ray":
        raise ConfigurationError("launch=ray starts ranks by itself, and this process is one of ranks that exist: start it once, by itself")
    if ranks_exist() and number_of("WORLD_SIZE") > 1:
        return _join_existing(job, cfg, folder)
    name = cfg["launch"].get("name", "local")
    is_alone = ranks_exist() or (name == "slurm" and is_only_task(os.environ))
    if name != "local" and not is_alone:
        return _launch_elsewhere(name, job, cfg, folder)
    num_ranks = 1 if is_alone else cfg["launch"]["nproc_per_node"]
    with opened(folder, cfg) as run:
        if num_ranks > 1:
            from recipes.support.local_ranks import run_local_ranks  # a run of one rank does not need it

            return run_local_ranks(job, run.cfg, num_ranks, run.held)
        take_threads(1)
        with tracebacks_of_bugs(), listening_on(LOOPBACK), Topology.alone() as topology:
            return job(run.cfg, topology)


def _launch_elsewhere(name: str, job: Job, cfg: dict[str, Any], folder: RunFolder | None) -> dict[str, Any] | None:
    """Run on ranks that a cluster's program starts."""
    if name in (starts := {"torchrun": "torchrun --nproc-per-node=<ranks>", "slurm": "srun --ntasks=<ranks> python"}):
        raise ConfigurationError(f"launch={name}: this process is no rank of {name}; start the command with {starts[name]} -m ...")
    if name != "ray":
        raise ConfigurationError(f"launch.name={name}: expected one of local, torchrun, slurm, ray")
    if importlib.util.find_spec("ray") is None:
        raise ConfigurationError("launch=ray needs the package ray, which is not installed: pip install -e '.[ray]'")
    from recipes.support.ray_ranks import run_ray_ranks

    return run_ray_ranks(launch, job, cfg, folder)


def _join_existing(job: Job, cfg: dict[str, Any], folder: RunFolder | None) -> dict[str, Any] | None:
    environment = Environment.read()
    take_threads(number_of("LOCAL_WORLD_SIZE", default=1))
    try:
        store = _store_of(environment, cfg["agree"]["timeout_s"])
    except StoreGoneError as error:
        raise RankAbsentError(
            f"rank {environment.rank} cannot reach the ranks' store at {environment.address}:{environment.port}: is rank 0 running, "
            "are MASTER_ADDR and MASTER_PORT the same on every rank, and can others reach rank 0's machine by MASTER_ADDR?",
            rank=environment.rank,
        ) from error
    patience_s = _PATIENCE_AFTER_ERROR_S
    try:
        with tracebacks_of_bugs():
            own = dist.PrefixStore("ckpt", store)
            result = run_job(job, cfg, own, environment, take_from_lead=True, end=_end_process, folder=folder)
        patience_s = _PATIENCE_S
        return result
    except RankAbsentError as error:
        if isinstance(error.__cause__, StoreGoneError):
            patience_s = 0.0
        raise
    finally:
        if patience_s and not environment.store_is_held:
            _let_go(environment, store, patience_s)


def _end_process(error: RankAbsentError) -> None:
    try:
        print(error, file=sys.stderr, flush=True)
    finally:  # also if nobody reads
        os._exit(1)


def _store_of(environment: Environment, timeout_s: float) -> dist.TCPStore:
    """Return the store of the ranks that exist. Rank 0 holds it, unless the launcher does."""
    if environment.rank != 0 or environment.store_is_held:
        return reach(environment.address, environment.port, timeout_s=timeout_s)
    return _held_store(environment)


@functools.cache
def _held_store(environment: Environment) -> dist.TCPStore:
    """Start the store, which all jobs of this process share. It listens only on the address that MASTER_ADDR names."""
    if number_of("GROUP_WORLD_SIZE", default=1) > 1 and _takes_for_own_name(environment.address):
        raise ConfigurationError(
            f"rank 0's machine takes its own name, {environment.address}, for {_OWN_NAME} (/etc/hosts), where the ranks of other machines "
            "cannot reach it: set MASTER_ADDR to its address for all ranks"
        )
    try:
        return serve(environment.address, environment.port, timeout_s=_STORE_S, is_shared=True, for_ranks=environment.world_size)
    except OSError as error:
        raise ConfigurationError(
            f"rank 0 cannot hold the ranks' store at {environment.address}:{environment.port}: {error}. Set MASTER_ADDR to an address "
            "of rank 0's machine by which the others reach it, and MASTER_PORT to a free port"
        ) from error


def _takes_for_own_name(address: str) -> bool:
    try:
        return socket.gethostbyname(address) == _OWN_NAME
    except OSError:
        return False


def _let_go(environment: Environment, store: dist.TCPStore, patience_s: float) -> None:
    """Wait on rank 0, which holds the store, until all ranks are done with this job, or for `patience_s`."""
    deadline = time.monotonic() + patience_s
    try:
        mailbox = StoreClient(store, writer=environment.rank, timeout_s=patience_s)
        gone = mailbox.add("gone", 1)  # of all jobs of a sweep
        while environment.rank == 0 and gone % environment.world_size and time.monotonic() < deadline:
            time.sleep(0.02)
            gone = mailbox.add("gone", 0)
    except StoreGoneError:
        return  # the store is gone already
