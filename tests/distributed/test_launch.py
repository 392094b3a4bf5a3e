"""Started or joined, the ranks of a run end as one: one result or one sentence, and nothing left behind."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch.distributed as dist

import recipes.train
from ckpt.errors import ConfigurationError, RankAbsentError
from ckpt.ranks.addresses import LOOPBACK
from ckpt.ranks.agreement import PhaseIndex
from ckpt.ranks.heartbeat import WAITING, Heartbeat
from ckpt.ranks.sigterm import TOLD_TO_END
from ckpt.ranks.store_client import StoreClient
from ckpt.ranks.stores import serve
from recipes.support.launch import launch
from recipes.support.local_ranks import _death
from recipes.support.ranks import RANK_VARIABLES, _process_group, listening_on, rank_of_environment, ranks_exist
from tests.support import jobs
from tests.support.jobs import (
    SAVE,
    adds_up,
    config,
    outcome_of,
    stands_still_at_the_end,
    stands_still_in_a_save,
    stands_still_in_training,
    was_told_to_end,
)
from tests.support.pace import patience
from tests.support.ranks import forkserver

ROOT = Path(__file__).resolve().parents[2]
HERE = {
    name: value
    for name, value in os.environ.items()
    if name not in RANK_VARIABLES and not name.startswith(("OMP", "TORCH"))  # which other tests may have set
}


def _jobs(*arguments: str, launcher: list[str] | None = None, **environment: str) -> subprocess.Popen[str]:
    command = [*(launcher or [sys.executable]), "-m", "tests.support.jobs", *arguments]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=HERE | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that a test can send what a terminal sends: a signal to all of them
    )


def _outcomes(process: subprocess.Popen[str]) -> tuple[list[Any], str]:
    printed, errors = process.communicate(timeout=120)
    return [json.loads(line) for line in printed.splitlines()], errors


# A rank that stands still


@pytest.fixture(scope="module")
def launched_once() -> None:
    """The process of which ranks are forked runs: to start it is no part of the time in which a run ends."""
    launch(adds_up, config(2))


def _check_stopped(job: Any, num_ranks: int, stopped: int, place: str, **more: Any) -> None:
    """The run ends within its time and 5 s (and what this machine is slower), and names the rank that stands still."""
    cfg = config(num_ranks, stopped=stopped, **more)
    cfg["agree"]["timeout_s"] = 3.0
    began = time.monotonic()
    with pytest.raises(RankAbsentError, match=f"rank {stopped} .*{place}"):
        launch(job, cfg)
    assert time.monotonic() - began < patience(3.0 + 5.0)


@pytest.mark.usefixtures("launched_once")
@pytest.mark.parametrize(("num_ranks", "stopped"), [(2, 1), *(pytest.param(*one, marks=pytest.mark.full) for one in [(2, 0), (8, 5)])])
@pytest.mark.parametrize(
    ("job", "place"),
    [
        (stands_still_in_training, r"has been silent for 3 s, last seen outside of any save or load"),
        (stands_still_in_a_save, r"(made no progress|silent) .*in phase write of save of checkpoint-00000020"),
        (stands_still_at_the_end, r"was stopped by a signal, and did not go on"),
    ],
)
def test_a_run_ends_in_time_and_names_the_rank_that_stands_still(
    job: Any, place: str, num_ranks: int, stopped: int
) -> None:
    _check_stopped(job, num_ranks, stopped, place)


@pytest.mark.usefixtures("launched_once")
@pytest.mark.parametrize("stopped", [0, pytest.param(1, marks=pytest.mark.full)])
def test_a_rank_that_stands_still_while_the_process_group_is_made_is_named(stopped: int) -> None:
    device = config(1)["device"] | {"_target_": "tests.support.jobs.StoppingDevice", "stopped": stopped}
    _check_stopped(adds_up, 2, stopped, "has been silent for 3 s, last seen", device=device)


# The end


def test_ranks_that_have_been_told_to_end_are_left_to_it(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        launch(was_told_to_end, config(2, folder=str(tmp_path)))
    assert ended.value.code == TOLD_TO_END
    assert (tmp_path / "in order").exists(), "rank 0 was not signalled because rank 1 had ended before it"


# One rank: this process itself


def test_one_rank_is_this_process_without_store_or_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    result = launch(adds_up, config(1))
    assert result is not None
    assert [rank["pid"] for rank in result["ranks"]] == [os.getpid()]
    assert not result["has_process_group"]
    assert not ranks_exist()
    assert rank_of_environment() == 0


def test_what_a_job_sets_in_the_environment_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "SET_BY_THE_JOB"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("REMOVED_BY_THE_JOB", "1")
    with listening_on(LOOPBACK):
        assert "GLOO_SOCKET_IFNAME" in os.environ
        monkeypatch.setenv("SET_BY_THE_JOB", "1")
        monkeypatch.delenv("REMOVED_BY_THE_JOB")
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    assert "SET_BY_THE_JOB" in os.environ and "REMOVED_BY_THE_JOB" not in os.environ


@pytest.mark.parametrize("wrong", [{"WORLD_SIZE": "2"}, {"WORLD_SIZE": "two"}, {}])
def test_half_an_environment_of_ranks_is_refused(monkeypatch: pytest.MonkeyPatch, wrong: dict[str, str]) -> None:
    for name in RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in {"RANK": "1", **wrong}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match="the environment says RANK=1, but .* start all ranks with torchrun"):
        launch(adds_up, config(1))


def test_a_world_of_one_that_exists_already_needs_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    result = launch(adds_up, config(4))
    assert result is not None
    assert len(result["ranks"]) == 1


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("torchrun", "this process is no rank of torchrun; start the command with torchrun --nproc-per-node=<ranks> -m ..."),
        ("slurm", "this process is no rank of slurm; start the command with srun --ntasks=<ranks> python -m ..."),
        ("ray", "launch=ray needs the package ray, which is not installed: pip install"),
        ("slrum", "launch.name=slrum: expected one of local, torchrun, slurm, ray"),
    ],
)
def test_a_run_for_a_launcher_that_is_not_there_does_not_run_alone(monkeypatch: pytest.MonkeyPatch, name: str, says: str) -> None:
    for variable in RANK_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    if name == "ray" and importlib.util.find_spec("ray") is not None:
        pytest.skip("ray is installed")
    cfg = config(1)
    cfg["launch"]["name"] = name
    with pytest.raises(ConfigurationError) as caught:
        launch(adds_up, cfg)
    assert says in str(caught.value)


def test_the_only_task_of_slurm_is_a_run_of_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in RANK_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    monkeypatch.setenv("SLURM_PROCID", "0")
    cfg = config(4)
    cfg["launch"]["name"] = "slurm"
    result = launch(adds_up, cfg)
    assert result is not None and len(result["ranks"]) == 1


def test_a_store_at_an_address_that_others_cannot_reach_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian notes a machine's own name at 127.0.1.1, and Slurm knows machines by their names."""
    variables = {"RANK": "0", "WORLD_SIZE": "2", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "gpu007", "MASTER_PORT": "4000"}
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr(socket, "gethostbyname", {"gpu007": "127.0.1.1"}.__getitem__)
    with pytest.raises(ConfigurationError, match="takes its own name, gpu007, for 127.0.1.1 .* set MASTER_ADDR to its address"):
        launch(adds_up, config(1))


def test_a_layout_is_checked_by_the_ranks_that_exist(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And not by `launch.nproc_per_node`, which is ignored then."""
    found = []
    monkeypatch.setattr("recipes.support.launch.launch", lambda job, cfg, folder: found.append(cfg))
    monkeypatch.setattr(sys, "argv", ["train", f"output_dir={tmp_path}/run", "parallel=ddp_tp", "model.size=nano"])
    for variable, value in {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": LOOPBACK, "MASTER_PORT": "4000"}.items():
        monkeypatch.setenv(variable, value)
    recipes.train.main()
    assert found and found[0]["launch"]["nproc_per_node"] == 1


def test_a_task_of_several_of_slurm_is_a_rank_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for the others at rank 0's address, and does not run alone. With a daemon: tests/clusters."""
    for variable in RANK_VARIABLES:
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)
    task = {"STEP_NUM_TASKS": "2", "STEP_TASKS_PER_NODE": "1(x2)", "STEP_NODELIST": LOOPBACK, "PROCID": "1", "LOCALID": "0", "NODEID": "1"}
    for variable, value in (task | {"JOB_ID": "7", "STEP_ID": "0"}).items():
        monkeypatch.setenv(f"SLURM_{variable}", value)
    cfg = config(1)
    cfg["agree"]["timeout_s"] = 0.5
    with pytest.raises(RankAbsentError, match=r"rank 1 cannot reach the ranks' store at 127.0.0.1:\d+: is rank 0 running"):
        launch(adds_up, cfg)


# Several ranks, started here: jobs of a sweep, all in one process

SWEEP = [
    "adds_up:2",
    "fills_the_disk:3",
    "has_a_bug_in_a_save:2",
    "has_a_bug:2",
    "is_killed_in_a_save:3",
    "is_killed_in_training:2",
    "hangs_in_a_save:2",
    "ends_without_a_word:2",
    "exits:2",
    "exits_well:2",
    "adds_up:3",
]


@pytest.fixture(scope="module")
def sweep() -> tuple[dict[str, Any], str]:
    outcomes, errors = _outcomes(_jobs(*SWEEP, A_VARIABLE_OF_THE_LAUNCHER="seen"))
    assert len(outcomes) == len(SWEEP), errors
    return dict(zip(SWEEP, outcomes, strict=True)), errors


@pytest.mark.full
@pytest.mark.parametrize("job", ["adds_up:2", "adds_up:3"])
def test_the_result_of_rank_0_comes_back(sweep: tuple[dict[str, Any], str], job: str) -> None:
    result = sweep[0][job]["result"]
    num_ranks = int(job[-1])
    assert result["total"] == sum(range(num_ranks))
    assert [rank["local_rank"] for rank in result["ranks"]] == list(range(num_ranks))
    assert len({rank["pid"] for rank in result["ranks"]}) == num_ranks
    assert result["nodes"] == [list(range(num_ranks))]
    assert result["has_process_group"]


@pytest.mark.full
def test_ranks_share_the_cores_and_see_the_launcher_s_environment_and_folder(sweep: tuple[dict[str, Any], str]) -> None:
    result = sweep[0]["adds_up:2"]["result"]
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    assert (result["threads"], result["omp"]) == (share, str(share))
    assert (result["from_the_launcher"], result["folder"]) == ("seen", str(ROOT))


FAILING = {
    "fills_the_disk:3": (
        "StorageError",
        f"{SAVE} failed in phase write on rank 1: model: No space left on device: 'w'",
    ),
    "has_a_bug_in_a_save:2": (
        "CheckpointError",
        f"{SAVE} failed in phase write on rank 1: KeyError: 'a bug in a save'",
    ),
    "has_a_bug:2": ("CheckpointError", "rank 1 failed: ZeroDivisionError: a bug in training"),
    "exits:2": ("CheckpointError", "rank 1 failed: SystemExit: 3"),
    "is_killed_in_a_save:3": (
        "RankAbsentError",
        f"rank 1 was killed by SIGKILL in phase write of {SAVE}; the kernel does that when memory runs out",
    ),
    "is_killed_in_training:2": (
        "RankAbsentError",
        "rank 1 was killed by SIGKILL outside of any save or load; the kernel does that when memory runs out",
    ),
    "ends_without_a_word:2": ("RankAbsentError", "rank 1 ended with exit code 3 outside of any save or load"),
}


@pytest.mark.full
@pytest.mark.parametrize("job", FAILING)
def test_a_failed_job_is_one_error_that_says_why(sweep: tuple[dict[str, Any], str], job: str) -> None:
    outcome = sweep[0][job]
    assert (outcome["error"], outcome["message"], outcome["rank"]) == (*FAILING[job], 1)


@pytest.mark.parametrize("job", FAILING)
def test_a_failed_job_that_a_program_launches_is_one_error_that_says_why(job: str) -> None:
    name, _, num_ranks = job.partition(":")
    outcome = outcome_of(getattr(jobs, name), config(int(num_ranks)))
    assert (outcome["error"], outcome["message"], outcome["rank"]) == (*FAILING[job], 1)


@pytest.mark.full
def test_a_rank_that_hangs_is_named_and_does_not_hold_up_the_end_for_long(sweep: tuple[dict[str, Any], str]) -> None:
    outcome = sweep[0]["hangs_in_a_save:2"]
    assert outcome["error"] == "RankAbsentError"
    assert outcome["message"].startswith("rank 1 (pid ")
    assert outcome["message"].endswith(f" made no progress for 2 s in phase write of {SAVE}")
    assert outcome["seconds"] < 2 + 10


@pytest.mark.full
def test_a_rank_that_exits_with_0_has_done_its_part(sweep: tuple[dict[str, Any], str]) -> None:
    assert sweep[0]["exits_well:2"]["result"] == {"rank": 0}


@pytest.mark.full
def test_stderr_holds_the_tracebacks_of_the_bugs_once_and_nothing_else(sweep: tuple[dict[str, Any], str]) -> None:
    errors = sweep[1]
    assert errors.count("Traceback") == 2
    assert errors.count("KeyError: 'a bug in a save'\n") == 1
    assert errors.count("ZeroDivisionError: a bug in training\n") == 1
    for line in errors.splitlines():
        assert line.startswith((" ", "rank 1:", "Traceback", "KeyError", "ZeroDivisionError")), errors


@pytest.mark.full
def test_a_sweep_leaves_nothing_behind_but_the_forkserver(sweep: tuple[dict[str, Any], str]) -> None:
    left = [outcome["left"] for outcome in sweep[0].values()]
    assert left == [left[0]] * len(left)
    assert left[0]["threads"] == ["MainThread"]
    assert [child.partition("multiprocessing.")[2].split(" ")[0] for child in left[0]["children"]] == [
        "forkserver",
        "resource_tracker",
    ]
    assert left[0]["environment"] == []
    assert left[0]["handlers"][:2] == ["<Handlers.SIG_DFL: 0>", "<built-in function default_int_handler>"]
    assert not left[0]["process_group"]


def test_the_collector_of_a_rank_leaves_alone_what_its_forkserver_has_loaded() -> None:
    """To look through torch would take each rank 0.2 s, and copy all the memory that it shares with the others."""
    result = launch(adds_up, config(2))
    assert result is not None and result["frozen"] > 50_000


# The end of a launcher


@contextmanager
def _running(folder: Path, num_ranks: int) -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process]]]:
    """Start ranks that save without end, wait until all have saved; yield the launcher and all processes below it."""
    (folder / "temporary").mkdir()
    launcher = _jobs(f"says_who_runs:{num_ranks}", FOLDER_OF_PIDS=str(folder), TMPDIR=str(folder / "temporary"))
    family: list[psutil.Process] = []
    try:
        deadline = time.monotonic() + 60
        while len(list(folder.glob("saved-*"))) < num_ranks:
            assert launcher.poll() is None and time.monotonic() < deadline, launcher.communicate()
            time.sleep(0.05)
        family = psutil.Process(launcher.pid).children(recursive=True)
        ranks = {int((folder / str(rank)).read_text()) for rank in range(num_ranks)}
        assert ranks < {process.pid for process in family}
        assert len(family) == num_ranks + 2, "the ranks, the forkserver, its helper"
        yield launcher, family
    finally:
        for process in [*family, launcher]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        launcher.communicate()


def _alive(processes: list[psutil.Process], after_s: float) -> list[psutil.Process]:
    """Return those that still run after so long; where nobody waits for orphans, a dead one stays as a zombie."""
    deadline = time.monotonic() + after_s
    while running := [process for process in processes if _runs(process)]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    return running


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_nobody_and_nothing_survives_a_kill_of_the_launcher_for_a_second(tmp_path: Path) -> None:
    with _running(tmp_path, 3) as (launcher, family):
        launcher.kill()
        assert _alive(family, 1.0) == []
    left = [one.name for one in (tmp_path / "temporary").iterdir()]
    assert [name for name in left if not name.startswith("torchinductor")] == [], "torch keeps one folder for each user"


@pytest.mark.parametrize(
    ("number", "to_all"),
    [
        pytest.param(signal.SIGTERM, False, id="SIGTERM", marks=pytest.mark.full),
        pytest.param(signal.SIGINT, False, id="SIGINT", marks=pytest.mark.full),
        pytest.param(signal.SIGINT, True, id="Ctrl-C", marks=pytest.mark.full),
    ],
)
def test_a_launcher_that_is_asked_to_end_ends_its_ranks_first(
    tmp_path: Path, number: signal.Signals, to_all: bool
) -> None:
    with _running(tmp_path, 2) as (launcher, family):
        os.killpg(launcher.pid, number) if to_all else launcher.send_signal(number)
        _, errors = launcher.communicate(timeout=20)
        assert launcher.returncode == -number
        assert _alive(family, 1.0) == []
    before, *tracebacks = errors.split("Traceback (most recent call last):\n")
    assert before == ""
    assert len(tracebacks) == (number == signal.SIGINT), "only the launcher's own KeyboardInterrupt, as of any program"


# Ranks that exist already


JOINED = ["adds_up", "adds_up", "fills_the_disk", "adds_up"]


@pytest.mark.full
def test_jobs_under_torchrun_join_its_ranks_one_after_another_and_run_rank_0_s_configuration() -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    outcomes, errors = _outcomes(_jobs(*JOINED, launcher=torchrun, AGREE_S="30"))
    _check_joined(outcomes, errors)


def test_jobs_under_torch_s_elastic_agent_join_its_ranks_one_after_another(tmp_path: Path) -> None:
    """As under torchrun, which is this agent in a Python of its own. Here agent and ranks are forked."""
    agent = forkserver().Process(target=_be_agent, args=(tmp_path,))
    agent.start()
    agent.join(patience(120))
    is_late = agent.exitcode is None
    if is_late:
        agent.kill()
        agent.join()
    outcomes, errors = (Path(tmp_path, name).read_text() for name in ("out", "err"))
    assert (is_late, agent.exitcode) == (False, 0), errors
    _check_joined([json.loads(line) for line in outcomes.splitlines()], errors)


def _be_agent(said: Path) -> None:
    for name in RANK_VARIABLES:
        os.environ.pop(name, None)
    os.environ["AGREE_S"] = "30"
    for stream, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(said / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    chosen = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        run_id="here",
        rdzv_backend="c10d",
        rdzv_endpoint=f"{LOOPBACK}:0",
        local_addr=LOOPBACK,
        start_method="fork",
        monitor_interval=0.02,
        max_restarts=0,
    )
    elastic_launch(chosen, jobs.main)(JOINED)


def _by_hand(*arguments: str, **more: str) -> list[subprocess.Popen[str]]:
    """Two ranks for which nobody holds a store."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **more}
    return [_jobs(*arguments, **environment, RANK=str(rank)) for rank in (0, 1)]


def test_a_store_that_stands_still_is_named_also_while_the_process_group_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a rank that is late: rank 0, which holds the store, has its group, and stands still in a save."""

    def silent(*_: object, **__: object) -> None:
        raise dist.DistNetworkError("Socket Timeout")

    monkeypatch.setattr(dist, "init_process_group", silent)
    store = serve(LOOPBACK, timeout_s=5.0)
    late: Any = SimpleNamespace(rank=1, world_size=2)
    says = f"the store at {LOOPBACK}:{store.port} did not answer as the process group was made: DistNetworkError: Socket Timeout"
    with pytest.raises(RankAbsentError, match=says), _process_group("cpu:gloo", store, late, 2):
        raise AssertionError


@pytest.mark.full
@pytest.mark.parametrize("job", ["stands_still_in_training", "stands_still_in_a_save"])
@pytest.mark.parametrize("stopped", [0, 1])
def test_ranks_that_exist_end_in_time_and_name_the_one_that_stands_still(job: str, stopped: int) -> None:
    ranks = _by_hand(job, AGREE_S="5", STOPPED=str(stopped))
    try:
        while psutil.Process(ranks[stopped].pid).status() != psutil.STATUS_STOPPED:
            time.sleep(0.05)
        began = time.monotonic()
        printed, errors = ranks[1 - stopped].communicate(timeout=patience(60))
        assert time.monotonic() - began < patience(5.0 + 5.0)
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    said = printed + errors
    silent_store = "the store at 127.0.0.1:"  # rank 0 holds it
    assert silent_store in said if stopped == 0 else "rank 1 (pid " in said, said
    assert "Traceback" not in said


@pytest.mark.full
def test_ranks_that_nobody_holds_a_store_for_hold_it_themselves() -> None:
    ranks = _by_hand(*JOINED, AGREE_S="30")
    said = [_outcomes(rank) for rank in ranks]
    _check_joined([outcome for outcomes, _ in said for outcome in outcomes], "".join(errors for _, errors in said))


def _check_joined(outcomes: list[Any], errors: str) -> None:
    by_rank = {rank: [outcome for outcome in outcomes if outcome["here"] == rank] for rank in (0, 1)}
    assert [len(outcomes) for outcomes in by_rank.values()] == [4, 4], errors
    for number in (0, 1, 3):
        result = by_rank[0][number]["result"]
        assert (result["total"], result["nodes"], result["composed_by"]) == (1.0, [[0, 1]], 0)
        assert by_rank[1][number]["result"] is None
    for rank in (0, 1):
        message = f"{SAVE} failed in phase write on rank 1: model: No space left on device: 'w'"
        assert (by_rank[rank][2]["error"], by_rank[rank][2]["message"]) == ("StorageError", message)
        assert not by_rank[rank][3]["left"]["process_group"]
        assert by_rank[rank][3]["left"]["threads"] == ["MainThread"]
    assert "Traceback" not in errors


# Where a rank was that could not say so itself


def _beat(store: dist.Store, part: str) -> Heartbeat:
    return Heartbeat(StoreClient(dist.PrefixStore(part, store), writer=1), 1, host="here", interval_s=60.0)


@pytest.mark.parametrize(
    ("own", "beside", "where"),
    [
        (None, None, "outside of any save or load"),
        (None, "save of 4", "in phase write of save of 4"),
        ("load of 2", "save of 4", "in phase write of load of 2"),
        ("finalization", "save of 4", "in phase write of save of 4"),
    ],
)
@pytest.mark.parametrize("has_left", [False, True])
def test_a_death_is_placed_by_the_last_heartbeats_of_the_rank(
    own: str | None, beside: str | None, where: str, has_left: bool
) -> None:
    store = serve(LOOPBACK, timeout_s=300.0)
    assert str(_death(store, 1, 3)) == "rank 1 ended with exit code 3 before it had joined the other ranks"
    for part, what in (("topology", own), ("topology/branch 1/1", beside)):
        beat = _beat(store, part)
        phase = WAITING if what == "finalization" else "write"
        beat.enter(PhaseIndex(1, 0), what, phase if what else None)
        if has_left:
            beat.stop()
    if has_left:  # then it has ended its saves, too, and its own last place is told
        phase = WAITING if own == "finalization" else "write"
        where = "outside of any save or load" if own is None else f"in phase {phase} of {own}"
    assert str(_death(store, 1, 3)) == f"rank 1 ended with exit code 3 {where}"
