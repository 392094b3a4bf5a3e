"""Ranks started on this machine, through torch's elastic launcher, from a forkserver that has everything imported.

The launcher holds the ranks' store, so it can say of any rank what it last did, and a pipe: a rank that finds it closed
ends itself, for its launcher is gone.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from ckpt.errors import CheckpointError, RankAbsentError, describe, rebuild, sentence
from ckpt.heartbeat import Beat, beat_key
from ckpt.mailbox import Mailbox
from ckpt.topology import Topology
from recipes.ranks import RANK_VARIABLES, Environment, Job, bug_beneath, environment_with, grace_s, run_job
from recipes.run_folder import Held

_ADDRESS = "127.0.0.1"
_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)  # SIGINT stays Python's: KeyboardInterrupt
_LOGGERS = ("torch.distributed.elastic", "torch.distributed.launcher", "torch.multiprocessing")
_LINGER_S = 1.0


@dataclass(frozen=True)
class _Start:
    """All that a rank is given. Of `lifeline` the launcher holds the other end, and never writes to it.

    `held` is the lock of the run's folder: it is free when the launcher and every rank have ended.
    """

    job: Job
    cfg: dict[str, Any]
    port: int
    lifeline: Connection
    environment: dict[str, str]
    folder: str
    num_threads: int | None
    held: Held | None


def run_local_ranks(job: Job, cfg: dict[str, Any], num_ranks: int, held: Held | None = None) -> dict[str, Any] | None:
    """Run the job on `num_ranks` new processes and return rank 0's result. Nothing of them is left afterwards.

    Only the forkserver stays, for the next job of this process, and ends with it.

    Args:
        held: the lock of the run's folder, which the ranks share; None: the job has no folder.

    Raises:
        CheckpointError: what the job failed of, once for all ranks. The traceback of an error that nobody foresaw is
            written to stderr before.
    """
    failure: ChildFailedError | None = None
    results: dict[int, Any] = {}
    asked_to_end: signal.Signals | None = None
    store = dist.TCPStore(_ADDRESS, 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    lifeline, ours = context.Pipe(duplex=False)
    with ours, lifeline, _elastic_leaves_no_trace(), _start_method_that_ranks_know():
        _start_forkserver(job)
        threads = None if "OMP_NUM_THREADS" in os.environ else max(1, _num_cores() // num_ranks)
        start = _Start(job, cfg, store.port, lifeline, dict(os.environ), os.getcwd(), threads, held)
        try:
            results = elastic_launch(_config(num_ranks, grace_s(cfg)), _rank_main)(start)
        except ChildFailedError as failed:
            failure = failed
        except SignalException as asked:
            asked_to_end = asked.sigval
    if asked_to_end is not None:  # the ranks have ended; now the signal does what it does without us
        sys.stdout.flush()
        os.kill(os.getpid(), asked_to_end)
        raise SystemExit(128 + asked_to_end)
    if failure is not None:
        error, unforeseen = _cause(store, failure, num_ranks)
        sys.stderr.write(unforeseen)
        raise error
    return results[0]


def _num_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _config(num_ranks: int, grace: float) -> LaunchConfig:
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.05,
        start_method="forkserver",
        local_addr=_ADDRESS,
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
        signals_to_handle=",".join(number.name for number in _SIGNALS),
        shutdown_timeout=int(grace) + 5,
    )


def _start_forkserver(job: Job) -> None:
    """Start it, unless it runs, with the modules of the job imported and no thread in it, which a fork would lose."""
    spec = sys.modules["__main__"].__spec__
    main = {"__main__", spec.name if spec else "__main__"}  # each rank runs it anew, and Python warns if it is there
    package = job.__module__.partition(".")[0]
    ours = [name for name in sys.modules if name.partition(".")[0] == package and name not in main]
    # The first optimizer of a process imports torch._dynamo, which takes a second: better once than in every rank.
    imports = ["torch.nn.parallel", "torch.distributed.launcher.api", "torch._dynamo", __name__, *ours]
    preload = [*imports, "recipes.forkserver"]  # what is registered last runs first when it ends
    multiprocessing.get_context("forkserver").set_forkserver_preload(preload)
    wanted = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "OMP_NUM_THREADS": "1"}
    wanted["TORCH_CPP_LOG_LEVEL"] = os.environ.get("TORCH_CPP_LOG_LEVEL", "FATAL")  # a dead peer is told in our words
    with environment_with(wanted):
        multiprocessing.forkserver.ensure_running()


@contextmanager
def _elastic_leaves_no_trace() -> Iterator[None]:
    """Keep torch elastic from logging, and take back its signal handlers and environment variables."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    propagated = [logger.propagate for logger in loggers]
    here = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in _SIGNALS} if here else {}
    silence = logging.NullHandler()
    for logger in loggers:
        logger.propagate = False
        logger.addHandler(silence)
    try:
        with environment_with({}):
            yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler or signal.SIG_DFL)
        for logger, propagate in zip(loggers, propagated, strict=True):
            logger.propagate = propagate
            logger.removeHandler(silence)


@contextmanager
def _start_method_that_ranks_know() -> Iterator[None]:
    """Replace a default start method that is not Python's, as in processes of joblib: new processes are told of it and do not find it."""
    before = multiprocessing.get_start_method(allow_none=True)
    if before in (None, *multiprocessing.get_all_start_methods()):
        yield
        return
    multiprocessing.set_start_method("forkserver", force=True)
    try:
        yield
    finally:
        multiprocessing.set_start_method(before, force=True)


# In the ranks


def _rank_main(start: _Start) -> dict[str, Any] | None:
    _end_with_launcher(start.lifeline)
    os.environ.update({name: value for name, value in start.environment.items() if name not in RANK_VARIABLES})
    os.chdir(start.folder)
    if start.num_threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(start.num_threads)
        torch.set_num_threads(start.num_threads)
    environment = Environment.read()
    store = dist.TCPStore(_ADDRESS, start.port, is_master=False, wait_for_workers=False)

    def job(cfg: dict[str, Any], topology: Topology) -> dict[str, Any] | None:
        with _reported(
            store, environment
        ):  # before the process group goes, whose end the others would take for the cause
            return start.job(cfg, topology)

    with _reported(store, environment):
        return run_job(job, start.cfg, store, environment, take_from_lead=False)


def _end_with_launcher(lifeline: Connection) -> None:
    """Watch the pipe: it closes when the launcher's process is gone, however it went."""

    def watch() -> None:
        try:
            lifeline.recv_bytes()
        except (EOFError, OSError):
            os._exit(1)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


@contextmanager
def _reported(store: dist.Store, environment: Environment) -> Iterator[None]:
    """Tell the launcher what the job failed of, and end this process there and then."""
    try:
        yield
    except KeyboardInterrupt:  # Ctrl-C reaches the launcher too
        os._exit(130)
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            return
        try:
            _report(store, environment, error)
        except dist.DistError:
            pass  # the launcher is gone, and with it whoever could read this
        finally:
            _exit_at_once()


def _report(store: dist.Store, environment: Environment, error: BaseException) -> None:
    """Leave a report in the store; linger while others may be about to leave theirs, or their bodies.

    The launcher ends all ranks when the first one ends. A rank that was killed must be that first one, and not one that
    only lost its connection to it.
    """
    described = describe(error)
    if not isinstance(error, CheckpointError):
        described |= {"message": f"rank {environment.rank} failed: {sentence(error)}", "rank": environment.rank}
    report = {"number": store.add("reports", 1), "error": described, "unforeseen": _unforeseen(error, environment.rank)}
    store.set(_report_key(environment.rank), json.dumps(report))
    everybody = [_report_key(rank) for rank in range(environment.world_size)]
    deadline = time.monotonic() + _LINGER_S
    while not store.check(everybody) and time.monotonic() < deadline:
        time.sleep(0.01)


def _unforeseen(error: BaseException, rank: int) -> str:
    """Return the traceback of what nobody foresaw, which may be the cause of an error that all ranks agreed on."""
    bug = bug_beneath(error)
    return "" if bug is None else f"rank {rank}:\n" + "".join(traceback.format_exception(bug))


def _exit_at_once() -> None:
    """End without waiting for threads and process groups, which may wait for other ranks."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _report_key(rank: int) -> str:
    return f"report/{rank}"


# In the launcher, after a failure


def _cause(store: dist.TCPStore, failure: ChildFailedError, num_ranks: int) -> tuple[CheckpointError, str]:
    """Return the error that stands for all ranks, and a traceback to show before, or ""."""
    keys = {rank: _report_key(rank) for rank in range(num_ranks)}
    reports = {rank: json.loads(store.get(key)) for rank, key in keys.items() if store.check([key])}
    rank, process = min(failure.failures.items())
    collateral = process.exitcode == -signal.SIGABRT and reports  # collectives abort when another rank is gone
    if rank not in reports and not collateral:
        return _death(store, rank, process.exitcode), ""
    first = min(reports.values(), key=lambda report: int(report["number"]))
    error = rebuild(first["error"])
    same = [report["unforeseen"] for report in reports.values() if report["error"]["message"] == str(error)]
    return error, next(filter(None, same), "")


def _death(store: dist.TCPStore, rank: int, exitcode: int) -> RankAbsentError:
    """Say how a rank ended that could not say so itself, and where its last heartbeat was."""
    data = Mailbox(dist.PrefixStore("topology", store), writer=rank).peek(beat_key(rank))
    beat = None if data is None else Beat.decode(data)
    how = f"was killed by {_signal_name(exitcode)}" if exitcode < 0 else f"ended with exit code {exitcode}"
    where = beat.place if beat else "before it had joined the other ranks"
    hint = "; the kernel does that when memory runs out" if exitcode == -signal.SIGKILL else ""
    return RankAbsentError(f"rank {rank} {how} {where}{hint}", rank=rank, phase=beat.phase if beat else None)


def _signal_name(exitcode: int) -> str:
    try:
        return signal.Signals(-exitcode).name
    except ValueError:
        return f"signal {-exitcode}"
