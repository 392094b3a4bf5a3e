"""Launchers that restart ranks over the store of the life before: every save is of one life, and the run ends as an undisturbed one."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import ckpt
from ckpt.catalog.verify import verify_checkpoint
from ckpt.storage.stored import read_manifest
from recipes.support.ranks import RANK_VARIABLES
from tests.e2e.restarting import AGENT, FOLDER, PAUSE_S, train, train_in_group
from tests.e2e.runs import REPO, TEXT, checkpoint, run, summary_of
from tests.support.pace import patience
from tests.support.ranks import forkserver
from tests.support.states import same_bits

HERE = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
STEPS = 8


class Agents:
    """Elastic agents of torchrun on this machine, each of two ranks and in a session of its own.

    Args:
        num: agents at most.
        begin: agents that are there from the beginning; None: all.
    """

    def __init__(
        self,
        folder: Path,
        events: Sequence[str],
        program: Sequence[str],
        num: int = 1,
        begin: int | None = None,
        **more: str,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._events = folder / "events"
        self._events.mkdir()
        for number, event in enumerate(events):
            (self._events / f"{number}-{event}").touch()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        torchrun = [
            sys.executable, "-m", "torch.distributed.run", f"--nnodes=1:{num}", "--nproc-per-node=2", "--max-restarts=3",
            "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=run", "--local-addr=127.0.0.1",
            "--monitor-interval=0.1",
        ]  # fmt: skip
        environment = {
            "PYTHONPATH": str(REPO),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            FOLDER: str(folder),
        }
        self._folder = folder
        self._torchrun, self._program, self._environment = torchrun, program, HERE | environment | more
        self._said: list[Path] = []
        self._agents: list[subprocess.Popen[bytes]] = []
        for _ in range(num if begin is None else begin):
            self.join()

    def join(self) -> None:
        """Start one more agent."""
        number = len(self._agents)
        hosts = f"--rdzv-conf=is_host={number == 0},join_timeout=60,last_call_timeout=3,keep_alive_interval=1"
        self._said.append(self._folder / f"agent-{number}")
        with self._said[-1].open("w") as file:
            self._agents.append(
                subprocess.Popen(
                    [*self._torchrun, hosts, *self._program],
                    cwd=self._folder,
                    env=self._environment | {AGENT: str(number)},
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                    start_new_session=True,
                )
            )
        time.sleep(0.5)  # the first one holds the store

    def ended(self, timeout_s: float = 150.0) -> str:
        """Wait for all agents; all that were not killed must have ended well, and every event must have happened. Return their words."""
        deadline = time.monotonic() + patience(timeout_s)
        try:
            codes = [agent.wait(max(0.1, deadline - time.monotonic())) for agent in self._agents]
        except subprocess.TimeoutExpired:
            codes = [1]
        finally:
            for agent in self._agents:
                with suppress(ProcessLookupError):
                    os.killpg(agent.pid, signal.SIGKILL)
                agent.wait()
        said = "".join(file.read_text(errors="replace") for file in self._said)
        assert {code for code in codes if code != -signal.SIGKILL} == {0}, said
        assert not [*self._events.iterdir()], said
        return said


STORES = {
    # Torch's own group meets addresses of the life before over such a store, so no collective is called.
    "one store": ([], {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "0", "TORCH_GLOO_LAZY_INIT": "1"}),
    "a store a life": (["ddp"], {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}),
}


def _loop(folder: Path, *events: str, store: str = "one store", num: int = 1) -> str:
    words, environment = STORES[store]
    program = ["-m", "tests.e2e.restarting", str(folder / "root"), str(STEPS), *words]
    return Agents(folder, events, program, num, **environment).ended()


def _check_same(straight: Path, disturbed: Path) -> None:
    """All checkpoints in the second root are sound, the last one's step and state are those of the undisturbed run."""
    last = [max(root.glob("checkpoint-*")) for root in (straight, disturbed)]
    assert [one.name for one in last] == [f"checkpoint-{STEPS:08d}"] * 2
    for one in disturbed.glob("checkpoint-*"):
        assert verify_checkpoint(one) == []
    wanted, got = ({name: ckpt.load(one)[name] for name in ("model", "optimizer")} for one in last)
    for (name, value), (other_name, other) in zip(_tensors(wanted), _tensors(got), strict=True):
        assert name == other_name
        assert same_bits(value, other), name


def _tensors(state: object, name: str = "") -> list[tuple[str, torch.Tensor]]:
    if isinstance(state, torch.Tensor):
        return [(name, state)]
    inside = state.items() if isinstance(state, dict) else []
    return [one for key, value in inside for one in _tensors(value, f"{name}.{key}")]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one rank: of several, each trains as if it were alone."""
    folder = tmp_path_factory.mktemp("straight")
    (folder / "events").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {FOLDER: str(folder), AGENT: "0", "LOCAL_RANK": "0"}.items():
            patch.setenv(name, value)
        train(folder / "root", STEPS)
    return folder


def test_a_loop_whose_rank_is_killed_in_a_save_ends_as_if_undisturbed(straight: Path, tmp_path: Path) -> None:
    """As under torchrun, which is this agent in a Python of its own. Here agent and ranks are forked."""
    (tmp_path / "events").mkdir()
    (tmp_path / "events" / "0-kill-0.1-4").touch()
    agent = forkserver().Process(target=_be_agent, args=(tmp_path,))
    agent.start()
    agent.join(patience(120))
    if agent.exitcode is None:
        agent.kill()
        agent.join()
    assert agent.exitcode == 0, (tmp_path / "said").read_text(errors="replace")
    assert not [*(tmp_path / "events").iterdir()]
    _check_same(straight / "root", tmp_path / "root")


def _be_agent(folder: Path) -> None:
    for name in RANK_VARIABLES:
        os.environ.pop(name, None)
    _, variables = STORES["one store"]
    os.environ.update(variables | {"GLOO_SOCKET_IFNAME": "lo", FOLDER: str(folder), AGENT: "0"})
    for stream in (1, 2):
        os.dup2(os.open(folder / "said", os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    chosen = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        run_id="run",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        start_method="fork",
        monitor_interval=0.1,
        max_restarts=3,
    )
    elastic_launch(chosen, train_in_group)(folder / "root", STEPS)


@pytest.mark.full
@pytest.mark.parametrize("store", STORES)
def test_a_loop_that_is_killed_in_a_save_and_then_fails_one_ends_as_if_undisturbed(
    straight: Path, tmp_path: Path, store: str
) -> None:
    said = _loop(tmp_path, "kill-0.1-4", "fail-0.0-6", store=store)
    assert said.count("No space left on device") >= 2, said  # both ranks of the second life raise
    _check_same(straight / "root", tmp_path / "root")


@pytest.mark.full
@pytest.mark.parametrize("store", STORES)
def test_a_loop_that_loses_one_of_two_machines_in_a_save_goes_on_with_the_other(
    straight: Path, tmp_path: Path, store: str
) -> None:
    _loop(tmp_path, "agent-1.0-4", store=store, num=2)
    _check_same(straight / "root", tmp_path / "root")


def _recipe(folder: Path, steps: int = STEPS) -> list[str]:
    events = "{_target_: tests.e2e.restarting.Events, sharing_pattern: per_rank, elastic: replica}"
    return [
        "-m", "recipes.train", f"output_dir={folder / 'run'}", f"data.path={TEXT}", "model.size=nano", "save.every=2",
        f"train.steps={steps}", "resume=latest", f"+components.events={events}",
    ]  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("what", ["own loop", "recipe"])
def test_a_machine_that_joins_later_is_taken_in(tmp_path: Path, what: str) -> None:
    """All ranks begin again, twice as many, from the newest checkpoint; what has been committed stays."""
    steps, root = 40, tmp_path / ("root" if what == "own loop" else "run/checkpoints")
    loop = ["-m", "tests.e2e.restarting", str(root), str(steps), "ddp"]
    words, (_, variables) = loop if what == "own loop" else _recipe(tmp_path, steps), STORES["a store a life"]
    agents = Agents(tmp_path, [], words, num=2, begin=1, **(variables | {PAUSE_S: "1"}))  # by a shared store, torch waits for itself
    deadline = time.monotonic() + patience(60.0)
    while not [*root.glob("checkpoint-00000004")] and time.monotonic() < deadline:
        time.sleep(0.05)
    agents.join()
    said = agents.ended()
    sizes = [read_manifest(one).world_size for one in sorted(root.glob("checkpoint-*"))]
    assert sizes == sorted(sizes) and {*sizes} == {2, 4}, said
    assert all(verify_checkpoint(one) == [] for one in root.glob("checkpoint-*"))
    assert max(root.glob("checkpoint-*")).name == f"checkpoint-{steps:08d}"


@pytest.mark.full
@pytest.mark.parametrize(
    ("num", "events"),
    [
        (1, ["kill-0.1-4", "fail-0.0-6"]),
        (2, ["kill-0.1-4", "agent-1.1-6"]),
        (2, ["kill-1.1-4", "fail-0.0-6"]),
    ],
)
def test_a_recipe_whose_ranks_are_restarted_in_saves_ends_as_if_undisturbed(
    tmp_path: Path, num: int, events: list[str]
) -> None:
    Agents(tmp_path, events, _recipe(tmp_path), num).ended()
    run(tmp_path / "straight", "save.every=4", f"train.steps={STEPS}", ranks=2)
    here, there = (summary_of(tmp_path / name) for name in ("run", "straight"))
    if num == 1:
        assert here["state_digest"] == there["state_digest"]
        assert here["losses"] == there["losses"][-len(here["losses"]) :]
    assert here["final_step"] == STEPS
    assert verify_checkpoint(checkpoint(tmp_path / "run", STEPS)) == []
