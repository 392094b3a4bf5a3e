"""Start the ranks of a job on this machine, from a forkserver that has imported everything.

The launcher holds the ranks' store, which listens only on the loopback interface; after a death it reads the rank's last heartbeat
there. It also holds one end of a pipe: a rank whose end of the pipe closes exits, because its launcher is gone.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import multiprocessing
import multiprocessing.forkserver
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from types import FrameType
from typing import Any, NamedTuple

import psutil
import torch
import torch.distributed as dist

from ckpt.cli.environment import torch_variables
from ckpt.errors import CheckpointError, RankAbsentError, describe, rebuild, sentence
from ckpt.ranks.addresses import LOOPBACK
from ckpt.ranks.agreement import Beat
from ckpt.ranks.heartbeat import WAITING, beat_key
from ckpt.ranks.sigterm import TOLD_TO_END
from ckpt.ranks.store_client import StoreClient
from ckpt.ranks.stores import reach, serve
from ckpt.ranks.topology import Topology
from ckpt.ranks.waiting import AwakeClock
from recipes.support.ranks import (
    RANK_VARIABLES,
    Environment,
    Job,
    bug_beneath,
    environment_with,
    grace_s,
    run_job,
    threads_of,
)
from recipes.support.run_folder import InheritedLock

_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)  # SIGINT stays Python's: KeyboardInterrupt
_LINGER_S = 1.0
_TOLD_TO_END_KEY = "told to end"  # set when a rank has got SIGTERM, saved, and ends
_STORE_S = 300.0
_MORE_THAN_GRACE_S = 5.0
_LATER_THAN_RANKS_S = 4.0  # the other ranks say more about a rank that is silent
_LOOK_S = 1.0


@dataclass(frozen=True)
class _Start:
    """The arguments of a rank's process.

    Attributes:
        port: of the launcher's store.
        lifeline: the read end of a pipe; the launcher holds the other end and never writes.
        result: where rank 0 sends what the job returned.
        held: the lock of the run's folder, which is free when the launcher and every rank have ended.
    """

    job: Job
    cfg: dict[str, Any]
    num_ranks: int
    port: int
    lifeline: Connection
    result: Connection
    environment: dict[str, str]
    folder: str
    num_threads: int | None
    held: InheritedLock | None


class _Failure(NamedTuple):
    """The first rank whose exit code is not 0. A negative exit code is a signal."""

    rank: int
    exitcode: int


class _AskedToEnd(BaseException):
    """This process got a signal of `_SIGNALS`, which is the argument."""


def run_local_ranks(job: Job, cfg: dict[str, Any], num_ranks: int, held: InheritedLock | None) -> dict[str, Any] | None:
    """Run the job in `num_ranks` new processes and return rank 0's result. All of them have ended afterwards.

    The forkserver stays for the next job of this process, and ends with this process.

    Args:
        held: the lock of the run's folder, which the ranks share; None: the job has no folder.

    Raises:
        CheckpointError: the job's error, one for all ranks. The traceback of a bug is written to stderr before.
    """
    store = serve(LOOPBACK, timeout_s=_STORE_S, for_ranks=num_ranks)
    context = multiprocessing.get_context("forkserver")
    lifeline, ours = context.Pipe(duplex=False)
    results, result = context.Pipe(duplex=False)
    threads = threads_of(num_ranks)
    with ours, lifeline, results, result, _start_method_that_ranks_know():
        start_forkserver(_modules_of(job))
        start = _Start(job, cfg, num_ranks, store.port, lifeline, result, dict(os.environ), os.getcwd(), threads, held)
        ranks = [context.Process(target=_rank_main, args=(start, rank)) for rank in range(num_ranks)]
        try:
            with _signals_raised():
                outcome = _supervised(ranks, results, cfg["agree"]["timeout_s"], grace_s(cfg) + _MORE_THAN_GRACE_S)
        except _AskedToEnd as asked:  # the ranks have ended; now the signal gets its default action
            sys.stdout.flush()
            if not store.check([_TOLD_TO_END_KEY]):
                os.kill(os.getpid(), asked.args[0])
            raise SystemExit(128 + asked.args[0]) from None
    if not isinstance(outcome, _Failure):
        return outcome
    if store.check([_TOLD_TO_END_KEY]):  # SIGTERM to one rank, which has told the others
        raise SystemExit(TOLD_TO_END)
    error, traceback_of_bug = _cause(store, outcome, num_ranks)
    sys.stderr.write(traceback_of_bug)
    raise error


def _supervised(
    ranks: Sequence[ForkServerProcess], results: Connection, timeout_s: float, patience_s: float
) -> dict[str, Any] | _Failure | None:
    """Start the ranks and wait until all have ended with exit code 0, or one with another; then signal the others.

    Args:
        results: where rank 0's result arrives.
        timeout_s: that a rank may stand still, stopped by a signal, where no other rank notices.
        patience_s: seconds that a rank may take to end after a signal, before it is killed.
    """
    outcome: dict[str, Any] | None = None
    number = signal.SIGTERM
    try:
        for rank in ranks:
            rank.start()
        clock = AwakeClock(3 * _LOOK_S)
        stands_still_since: dict[int, float] = {}
        while running := [rank.sentinel for rank in ranks if rank.exitcode is None]:
            if results in wait([results, *running], _LOOK_S):
                outcome = results.recv()
            ended = [(rank, process.exitcode) for rank, process in enumerate(ranks)]
            if failed := [_Failure(rank, exitcode) for rank, exitcode in ended if exitcode]:
                # After SIGTERM to one rank all ranks end by themselves: a signal now would interrupt their save.
                if failed[0].exitcode == TOLD_TO_END:
                    _join(ranks, time.monotonic() + patience_s)
                return failed[0]
            if (stopped := _stopped_for(timeout_s + _LATER_THAN_RANKS_S, clock(), ranks, stands_still_since)) is not None:
                return _Failure(stopped, -signal.SIGSTOP)
        return results.recv() if results.poll() else outcome
    except _AskedToEnd as asked:
        number = asked.args[0]
        raise
    finally:
        _end([rank for rank in ranks if rank.pid is not None], number, patience_s)


def _stopped_for(seconds: float, now: float, ranks: Sequence[ForkServerProcess], since: dict[int, float]) -> int | None:
    """Return the first rank that has been stopped by a signal for this long, also before it has met the others or after it has left.

    Args:
        since: of each rank that was stopped at the last call.
    """
    for rank, process in enumerate(ranks):
        if not _is_stopped(process):
            since.pop(rank, None)
        elif now - since.setdefault(rank, now) > seconds:
            return rank
    return None


def _is_stopped(process: ForkServerProcess) -> bool:
    try:
        return psutil.Process(process.pid).status() == psutil.STATUS_STOPPED
    except psutil.Error:
        return False


def _join(ranks: Sequence[ForkServerProcess], until: float) -> None:
    """Wait until all ranks have ended, or until this time of `time.monotonic`."""
    for rank in ranks:
        rank.join(max(0.0, until - time.monotonic()))


def _end(ranks: Sequence[ForkServerProcess], number: signal.Signals, patience_s: float) -> None:
    """Send a signal to the ranks; kill those that stand still, those that run after `patience_s`, or all if this is interrupted."""
    until = time.monotonic() + patience_s
    try:
        for rank in ranks:
            if rank.is_alive() and rank.pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(rank.pid, signal.SIGKILL if _is_stopped(rank) else number)
        _join(ranks, until)
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
            rank.close()


@contextmanager
def _signals_raised() -> Iterator[None]:
    """Raise `_AskedToEnd` for the signals that end a process."""

    def ask(number: int, _: FrameType | None) -> None:
        raise _AskedToEnd(signal.Signals(number))

    here = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.signal(number, ask) for number in _SIGNALS} if here else {}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler or signal.SIG_DFL)


def _modules_of(job: Job) -> list[str]:
    """The modules that a rank imports for a job."""
    spec = sys.modules["__main__"].__spec__
    # Each rank runs it again, and Python warns if it is imported already.
    main = {"__main__", spec.name if spec else "__main__"}
    package = job.__module__.partition(".")[0]
    ours = [name for name in sys.modules if name.partition(".")[0] == package and name not in main]
    # The first optimizer of a process imports torch._dynamo, which takes a second: here once, and not in every rank.
    return ["torch.nn.parallel", "torch._dynamo", __name__, *ours]


def start_forkserver(modules: list[str]) -> None:
    """Start the forkserver, unless it runs, with these modules imported. It has no threads, which a fork would lose."""
    preload = [*modules, "recipes.support.forkserver"]  # its exit handler is registered last, and so runs first
    multiprocessing.get_context("forkserver").set_forkserver_preload(preload)
    wanted = torch_variables(log_level="FATAL") | {"OMP_NUM_THREADS": "1"}  # an error of ours names a dead peer
    with environment_with(wanted), _no_folder_left():
        multiprocessing.forkserver.ensure_running()


@contextmanager
def _no_folder_left() -> Iterator[None]:
    """Unlink the socket of a forkserver that starts in the block, and its folder, so that a kill leaves neither behind.

    Python's folder of the socket is removed by the launcher alone, unless that is killed. Folder and socket are reached by their
    descriptors in /proc, which are never too long for a socket's path. Without /proc the folder stays as Python makes it.
    """
    if not os.path.isdir("/proc/self/fd"):
        yield
        return
    server = multiprocessing.forkserver._forkserver
    settings = multiprocessing.current_process()._config
    before, elsewhere = server._forkserver_address, settings.get("tempdir")
    folder = tempfile.mkdtemp(prefix="ckpt-")
    there = os.open(folder, os.O_PATH | os.O_CLOEXEC)
    settings["tempdir"] = f"/proc/self/fd/{there}"
    try:
        yield
        if server._forkserver_address != before:
            held = os.open(server._forkserver_address, os.O_PATH | os.O_CLOEXEC)
            os.unlink(server._forkserver_address)
            server._forkserver_address = f"/proc/self/fd/{held}"
    finally:
        settings["tempdir"] = elsewhere
        os.close(there)
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _start_method_that_ranks_know() -> Iterator[None]:
    """Replace a default start method that is not Python's own, as joblib sets it: the ranks are told its name and do not know it."""
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


def _rank_main(start: _Start, rank: int) -> None:
    _end_with_launcher(start.lifeline)
    faulthandler.enable()
    os.environ.update({name: value for name, value in start.environment.items() if name not in RANK_VARIABLES})
    os.environ.update(_variables(start, rank))
    os.chdir(start.folder)
    if start.num_threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(start.num_threads)
        torch.set_num_threads(start.num_threads)
    environment = Environment.read()
    store = reach(LOOPBACK, start.port, timeout_s=_STORE_S)

    def job(cfg: dict[str, Any], topology: Topology) -> dict[str, Any] | None:
        # Before the process group ends, which other ranks would report as the cause.
        with _reported(store, environment):
            return start.job(cfg, topology)

    def end(error: RankAbsentError) -> None:
        try:
            # The main thread may use the other connection.
            another = reach(LOOPBACK, start.port, timeout_s=_MORE_THAN_GRACE_S)
            with _reported(another, environment):
                raise error
        finally:
            os._exit(1)

    with _reported(store, environment):
        result = run_job(job, start.cfg, store, environment, take_from_lead=False, end=end)
        if rank == 0:
            start.result.send(result)


def _variables(start: _Start, rank: int) -> dict[str, str]:
    """The variables that torchrun sets on one machine."""
    positions = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "MASTER_PORT": start.port}
    sizes = {"WORLD_SIZE": start.num_ranks, "LOCAL_WORLD_SIZE": start.num_ranks, "GROUP_WORLD_SIZE": 1}
    numbers = {name: str(number) for name, number in (positions | sizes).items()}
    return numbers | {"MASTER_ADDR": LOOPBACK, "TORCHELASTIC_USE_AGENT_STORE": "True"}


def _end_with_launcher(lifeline: Connection) -> None:
    """Exit when the pipe closes, which it does when the launcher's process is gone."""

    def watch() -> None:
        try:
            lifeline.recv_bytes()
        except (EOFError, OSError):
            os._exit(1)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


@contextmanager
def _reported(store: dist.Store, environment: Environment) -> Iterator[None]:
    """Report an error of the block to the launcher, and exit at once."""
    try:
        yield
    except KeyboardInterrupt:  # Ctrl-C reaches the launcher too
        os._exit(130)
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            return
        if isinstance(error, SystemExit) and error.code == TOLD_TO_END:
            store.add(_TOLD_TO_END_KEY, 1)
            raise
        try:
            with suppress(dist.DistError):  # the launcher is gone, which would read it
                _report(store, environment, error)
        finally:  # exit without waiting for threads and process groups, which may wait for other ranks
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)


def _report(store: dist.Store, environment: Environment, error: BaseException) -> None:
    """Write a report to the store, then wait up to `_LINGER_S` for the other ranks' reports.

    The launcher ends all ranks when the first one ends. That first one must be the rank that was killed, not one that only
    lost its connection to it.
    """
    described = describe(error)
    if not isinstance(error, CheckpointError):
        described |= {"message": f"rank {environment.rank} failed: {sentence(error)}", "rank": environment.rank}
    bug = bug_beneath(error)  # it may be the cause of an error that all ranks agreed on
    lines = [] if bug is None else [f"rank {environment.rank}:\n", *traceback.format_exception(bug)]
    report = {"number": store.add("reports", 1), "error": described, "traceback": "".join(lines)}
    store.set(_report_key(environment.rank), json.dumps(report))
    everybody = [_report_key(rank) for rank in range(environment.world_size)]
    deadline = time.monotonic() + _LINGER_S
    while not store.check(everybody) and time.monotonic() < deadline:
        time.sleep(0.01)


def _report_key(rank: int) -> str:
    return f"report/{rank}"


# In the launcher, after a failure


def _cause(store: dist.TCPStore, failure: _Failure, num_ranks: int) -> tuple[CheckpointError, str]:
    """Return the error that stands for all ranks, and the traceback of its bug, or ""."""
    keys = {rank: _report_key(rank) for rank in range(num_ranks)}
    reports = {rank: json.loads(store.get(key)) for rank, key in keys.items() if store.check([key])}
    collateral = failure.exitcode == -signal.SIGABRT and reports  # collectives abort when another rank is gone
    if failure.rank not in reports and not collateral:
        return _death(store, *failure), ""
    first = min(reports.values(), key=lambda report: int(report["number"]))
    error = rebuild(first["error"])
    same = [report["traceback"] for report in reports.values() if report["error"]["message"] == str(error)]
    return error, next(filter(None, same), "")


def _death(store: dist.TCPStore, rank: int, exitcode: int) -> RankAbsentError:
    """Return the error of a rank that left no report: its exit code, and the place of its last heartbeat, or of its background save's."""
    beats = list(_last_beats(store, rank))
    busy = [beat for beat in beats if beat.what is not None and not beat.left]
    busy.sort(key=lambda beat: beat.phase == WAITING)
    beat = next(iter(busy), beats[0] if beats else None)
    known = {int(number): number.name for number in signal.Signals}
    killed = f"was killed by {known.get(-exitcode, f'signal {-exitcode}')}"
    how = killed if exitcode < 0 else f"ended with exit code {exitcode}"
    how = "was stopped by a signal, and did not go on," if exitcode == -signal.SIGSTOP else how
    where = beat.place if beat else "before it had joined the other ranks"
    hint = "; the kernel does that when memory runs out" if exitcode == -signal.SIGKILL else ""
    return RankAbsentError(f"rank {rank} {how} {where}{hint}", rank=rank, phase=beat.phase if beat else None)


def _last_beats(store: dist.TCPStore, rank: int) -> Iterator[Beat]:
    """The last heartbeats of a rank: of its main thread, then of its background saves."""
    own = beat_key(rank)
    parts = [key.removesuffix(f"/{own}") for key in store.list_keys() if key.endswith(f"/{own}")]
    for part in sorted(parts, key=len):
        data = StoreClient(dist.PrefixStore(part, store), writer=rank).peek(own)
        if data is not None:
            yield Beat.decode(data)
