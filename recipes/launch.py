"""Where the ranks of a run come from: they exist already, or this process is the only one, or they are started here."""

from __future__ import annotations

import functools
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ckpt.errors import RankAbsentError
from ckpt.topology import Topology
from recipes.ranks import Environment, Job, number_of, ranks_exist, run_job, tracebacks_of_bugs
from recipes.run_folder import RunFolder, opened

_PATIENCE_S = 10.0  # how long the rank that holds the store waits for the others to let go of it


def launch(job: Job, cfg: dict[str, Any], folder: RunFolder | None = None) -> dict[str, Any] | None:
    """Run `job(cfg, topology)` on all ranks of this run, and return what it returned on rank 0.

    Ranks that exist already (torchrun, Slurm: RANK is set) are joined: every one of them calls this, all of them run rank
    0's `cfg`, and on all but rank 0 the result is None. Otherwise `cfg["launch"]["nproc_per_node"]` ranks are started on
    this machine; one is this process itself, without store, threads or process group. With several ranks the default
    process group is there while the job runs, with the collectives of `cfg["device"]`.

    Args:
        job: a function of an importable module.
        cfg: plain values that JSON can hold.
        folder: the run's, held open for as long as the job runs: by this process if it starts the ranks or is the only one, by rank 0
            of ranks that exist. None: the job writes nothing.

    Raises:
        CheckpointError: the job failed; with started ranks, one error that stands for all of them. Or the folder cannot be opened; then
            no rank has begun.
    """
    if ranks_exist() and number_of("WORLD_SIZE") > 1:
        return _join_existing(job, cfg, folder)
    num_ranks = 1 if ranks_exist() else cfg["launch"]["nproc_per_node"]
    with opened(folder, cfg) as run:
        if num_ranks > 1:
            from recipes.local_ranks import run_local_ranks  # torch elastic; a run of one rank does without

            return run_local_ranks(job, run.cfg, num_ranks, run.held)
        with tracebacks_of_bugs(), Topology.alone() as topology:
            return job(run.cfg, topology)


def _join_existing(job: Job, cfg: dict[str, Any], folder: RunFolder | None) -> dict[str, Any] | None:
    environment = Environment.read()
    store = _store_of(environment)
    # One prefix per job: the second job of a sweep must not meet the first one's addresses. The store itself counts.
    number = store.add(f"jobs/{environment.attempt}/{environment.rank}", 1)
    own = dist.PrefixStore(f"job-{environment.attempt}.{number}", store)
    try:
        with tracebacks_of_bugs():
            return run_job(job, cfg, own, environment, take_from_lead=True, folder=folder)
    finally:
        if not environment.store_is_held:
            _let_go(own, environment)


@functools.cache
def _store_of(environment: Environment) -> dist.TCPStore:
    """Return the store of the ranks that exist. It is theirs, not a job's, so all jobs of this process share it."""
    try:
        return dist.TCPStore(
            environment.address,
            environment.port,
            environment.world_size,
            is_master=environment.rank == 0 and not environment.store_is_held,
            wait_for_workers=False,
            multi_tenant=True,
            timeout=timedelta(seconds=300),
        )
    except dist.DistError as error:
        raise RankAbsentError(
            f"rank {environment.rank} cannot reach the ranks' store at {environment.address}:{environment.port}: is rank 0 "
            "running, and are MASTER_ADDR and MASTER_PORT the same on every rank?",
            rank=environment.rank,
        ) from error


def _let_go(store: dist.PrefixStore, environment: Environment) -> None:
    """Rank 0 holds the store: it stays until the others are done with it, or have had the time."""
    deadline = time.monotonic() + _PATIENCE_S
    try:
        gone = store.add("gone", 1)
        while environment.rank == 0 and gone < environment.world_size and time.monotonic() < deadline:
            time.sleep(0.02)
            gone = store.add("gone", 0)
    except dist.DistError:
        return  # the store went first: nothing is left to wait for
