"""Kill ranks of a run at random moments, take its nodes and give them back, under a real engine; measure how long until it trains again.

    python -m tests.clusters.kills torchrun|own_loop|slurm|ray [number of events] [seed]

Prints a line for each event, and a row of a table for each kind: median and most seconds, to a save of the next life, and ours of it.
Fails if the run has ended by itself, has lost a step that was committed, or comes to other bits than a run that nothing has disturbed.
"""

from __future__ import annotations

import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import psutil

import ckpt
from ckpt.catalog.verify import verify_checkpoint
from recipes.support.ranks import RANK_VARIABLES
from tests.clusters.slurm_cluster import PYTHON, SlurmCluster
from tests.e2e.restarting import AGENT, FOLDER
from tests.support.real_stores import free_ports
from tests.support.states import require_equal_states

REPO = Path(__file__).parents[2]
RUN = ("model.size=nano", "train.steps=1000000", "save.every=2", "save.keep_last=null", "resume=latest")
KILLED, LOST, PREEMPTED, JOINED = "rank killed", "node lost in a save", "preempted", "joined by a node"
_AT_MOST_S = 400.0


@dataclass(frozen=True)
class Recovery:
    """What one event has cost, in seconds after it.

    Attributes:
        ended_s: until the last rank of that life had ended.
        begun_s: until the first rank of the next one was started.
        trains_s: until that one had committed a save, two steps after the one it began at.
    """

    event: str
    ended_s: float
    begun_s: float
    trains_s: float

    def ours_s(self, first_start_s: float) -> float:
        """Return what ranks took to end, and to begin beyond a first start, which imports as much and restores nothing.

        When a node joins, they are told to end when it has come, which is not seen from here.
        """
        return (0.0 if self.event == JOINED else self.ended_s) + max(0.0, self.trains_s - self.begun_s - first_start_s)


class Engine(ABC):
    """A run of two ranks under an engine.

    Args:
        folder: for all that it writes.
    """

    events: ClassVar[tuple[str, ...]]

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self.said = folder / "said"
        self.root = folder / "run" / "checkpoints"
        self._stack = stack
        self._runs: list[subprocess.Popen[bytes]] = []
        self._command = [PYTHON, "-m", "recipes.train", f"output_dir={folder}/run", *RUN]
        self.environment = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
        # As many threads here as there: they decide in which order numbers are summed.
        self.environment |= {"PYTHONPATH": str(REPO), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}

    @abstractmethod
    def start(self) -> None:
        """Start the run."""

    @abstractmethod
    def ranks(self) -> set[psutil.Process]:
        """Return the processes of the ranks that live."""

    def preempt(self) -> None:
        """Tell the run to end, as an engine does that needs its nodes."""
        raise NotImplementedError

    def lose_node(self) -> None:
        """Kill all of a node that has ranks."""
        raise NotImplementedError

    def join_node(self) -> None:
        """Give a node back."""
        raise NotImplementedError

    def stop(self) -> None:
        """Kill the run, its launcher first."""
        for run in reversed(self._runs):
            self._end(run)

    def needs_node(self) -> bool:
        """Whether a node is to come back before the next event."""
        return False

    def steps(self) -> list[int]:
        """Return the steps that are committed."""
        with suppress(OSError):
            return sorted(int(one.removeprefix("checkpoint-")) for one in os.listdir(self.root) if re.fullmatch(r"checkpoint-\d{8}", one))
        return []

    def is_saving(self) -> bool:
        with suppress(OSError):
            return any(".unpublished" in one for one in os.listdir(self.root))
        return False

    def undisturbed(self, step: int) -> Path:
        """Return a checkpoint of this step, of a run on this machine that nothing disturbs."""
        command = [*self._command[:3], f"output_dir={self.folder}/alone", *RUN, f"train.steps={step}", f"save.every={step}"]
        self._ran([*command, "launch.nproc_per_node=2"])
        return self.folder / "alone" / "checkpoints" / f"checkpoint-{step:08d}"

    def happen(self, event: str, draw: random.Random) -> None:
        if event == KILLED:
            draw.choice(sorted(self.ranks(), key=lambda one: one.pid)).kill()
        else:
            {LOST: self.lose_node, PREEMPTED: self.preempt, JOINED: self.join_node}[event]()

    def _ran(self, command: Sequence[str], **more: str) -> None:
        environment = self.environment | more
        done = subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True, timeout=_AT_MOST_S, check=False)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]

    def _started(self, command: Sequence[str], **more: str) -> subprocess.Popen[bytes]:
        log = self._stack.enter_context(self.said.open("ab"))
        run = subprocess.Popen(command, cwd=REPO, env=self.environment | more, stdout=log, stderr=log, start_new_session=True)
        self._stack.callback(self._end, run)
        self._runs.append(run)
        return run

    @staticmethod
    def _end(run: subprocess.Popen[bytes]) -> None:
        with suppress(psutil.NoSuchProcess):
            ranks = psutil.Process(run.pid).children(recursive=True)  # torchrun's have sessions of their own
            for one in (psutil.Process(run.pid), *ranks):
                with suppress(psutil.NoSuchProcess):
                    one.kill()
            psutil.wait_procs(ranks, timeout=10)
        run.wait()


class Torchrun(Engine):
    """Two agents of torchrun with a rank each; the first one holds the rendezvous, and is not lost. Variables are torchrun's defaults."""

    events = (KILLED, KILLED, PREEMPTED)
    nodes = "2"

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        super().__init__(folder, stack)
        self._agents: dict[int, subprocess.Popen[bytes]] = {}
        self._program = ["-m", "recipes.train", *self._command[3:]]

    def start(self) -> None:
        self._port = free_ports(1)[0]
        for number in range(2):
            self._begin(number)
            time.sleep(0.5)

    def _begin(self, number: int) -> None:
        hosts = f"--rdzv-conf=is_host={number == 0},join_timeout=60,last_call_timeout=2,keep_alive_interval=1"
        torchrun = [PYTHON, "-m", "torch.distributed.run", f"--nnodes={self.nodes}", "--nproc-per-node=1", "--max-restarts=1000"]
        torchrun += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{self._port}", "--local-addr=127.0.0.1", "--rdzv-id=run", hosts]
        self._agents[number] = self._started([*torchrun, *self._program], **{AGENT: str(number)})

    def ranks(self) -> set[psutil.Process]:
        return {rank for agent in self._agents.values() for rank in _children(agent.pid)}

    def preempt(self) -> None:
        for agent in self._agents.values():
            agent.terminate()
        for agent in self._agents.values():
            agent.wait()
        self.start()  # as the scheduler's script does


class OwnLoop(Torchrun):
    """A loop with `Checkpointer`, whose ranks train alike, however many there are."""

    events = (LOST, KILLED, JOINED)
    nodes = "1:2"

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        super().__init__(folder, stack)
        self.root = folder / "root"
        self._program = ["-m", "tests.e2e.restarting", str(self.root), "1000000", "ddp"]
        self.environment |= {FOLDER: str(folder), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        (folder / "events").mkdir()

    def lose_node(self) -> None:
        agent = self._agents.pop(1)
        ranks = _children(agent.pid)
        agent.kill()
        for rank in ranks:
            rank.kill()
        agent.wait()

    def join_node(self) -> None:
        self._begin(1)

    def needs_node(self) -> bool:
        return len(self._agents) < 2

    def undisturbed(self, step: int) -> Path:
        alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0])}
        command = [PYTHON, "-m", "tests.e2e.restarting", str(self.folder / "alone"), str(step), "ddp"]
        self._ran(command, **alone, LOCAL_RANK="0", **{AGENT: "0"})
        return self.folder / "alone" / f"checkpoint-{step:08d}"


class Slurm(Engine):
    """A job of two tasks on two of three nodes, whose script has it queued again."""

    events = (KILLED, LOST, PREEMPTED)

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        super().__init__(folder, stack)
        self._cluster = stack.enter_context(SlurmCluster(folder / "cluster"))
        self._lost: str | None = None

    def start(self) -> None:
        from tests.clusters.test_slurm import JOB  # which needs pytest

        script = self.folder / "job.sh"
        text = JOB.format(folder=self.folder, python=PYTHON, overrides=" ".join(RUN), options="", minutes=300)
        script.write_text(text.replace("-lt 20", "-lt 2000").replace("srun ", "OMP_NUM_THREADS=1 srun "))
        self.said = self.folder / "job.out"
        self._job = self._cluster.run("sbatch", "--parsable", str(script), cwd=REPO).strip()

    def ranks(self) -> set[psutil.Process]:
        return {one for one in _running(PYTHON, "recipes.train") if _variable(one, "SLURM_PROCID") is not None}

    def preempt(self) -> None:
        self._cluster.run("scancel", "--signal=TERM", self._job)

    def stop(self) -> None:
        self._cluster.run("scancel", "--signal=KILL", "--full", self._job)
        self._cluster.run("scancel", self._job)

    def lose_node(self) -> None:
        self._lost = str(_variable(min(self.ranks(), key=lambda one: one.pid), "SLURMD_NODENAME"))
        self._cluster.lose(self._lost)

    def needs_node(self) -> bool:
        return self._lost is not None

    def join_node(self) -> None:
        assert self._lost is not None
        self._cluster.give_back(self._lost)
        self._lost = None


class Ray(Engine):
    """Two actors on two nodes of two processors each, and a head without."""

    events = (KILLED, LOST, PREEMPTED)

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        super().__init__(folder, stack)
        from tests.clusters.test_ray import RayCluster

        self._cluster = RayCluster(2)
        stack.callback(self._cluster.close)

    def start(self) -> None:
        launch = ["launch=ray", "launch.nproc_per_node=2", "launch.least_ranks=2", "launch.max_restarts=1000"]
        self._launcher = self._started([*self._command, *launch], RAY_ADDRESS=self._cluster.address)

    def ranks(self) -> set[psutil.Process]:
        return set(_running("ray::_Rank"))

    def preempt(self) -> None:
        self._launcher.terminate()
        self._launcher.wait()
        self.start()

    def lose_node(self) -> None:
        self._cluster.lose(with_actor=min(self.ranks(), key=lambda one: one.pid))

    def needs_node(self) -> bool:
        return len(self._cluster.nodes) < 2

    def join_node(self) -> None:
        self._cluster.add()


ENGINES = {"torchrun": Torchrun, "own_loop": OwnLoop, "slurm": Slurm, "ray": Ray}


def campaign(name: str, num_events: int, seed: int) -> list[str]:
    """Run one engine through all events; return the rows of its table."""
    draw = random.Random(seed)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=f"kills-{name}-")))
        engine = ENGINES[name](folder, stack)
        engine.start()
        try:
            return _campaign(engine, name, num_events, draw)
        except BaseException:
            print(engine.said.read_text(errors="replace")[-6000:] if engine.said.exists() else "nothing was said", file=sys.stderr)
            raise


def _campaign(engine: Engine, name: str, num_events: int, draw: random.Random) -> list[str]:
    _until(lambda: bool(engine.ranks()), "the first rank begins")
    began = time.monotonic()
    _until(lambda: bool(engine.steps()), "the first save is committed")
    first_start_s = time.monotonic() - began
    print(f"{name}: a first start takes {first_start_s:.1f} s from its first rank to its first save", flush=True)
    found: list[Recovery] = []
    in_turn = [event for _ in range(-(-num_events // len(engine.events))) for event in engine.events]
    # A node can only join after one was lost; other events come in any order.
    events = (in_turn if JOINED in in_turn else draw.sample(in_turn, len(in_turn)))[:num_events]
    for number, event in enumerate(events):
        time.sleep(draw.uniform(0.0, 3.0))
        if event == LOST:
            _until(engine.is_saving, "a save is under way")
        found.append(_observed(engine, event, draw))
        if engine.needs_node() and JOINED not in engine.events:
            engine.join_node()
        one = found[-1]
        print(
            f"{number + 1:3} {event:20} ended {one.ended_s:6.2f}  next begun {one.begun_s:6.2f}  trains {one.trains_s:6.2f}  "
            f"ours {one.ours_s(first_start_s):5.2f}",
            flush=True,
        )
    engine.stop()
    last = engine.steps()[-1]
    damaged = [step for step in engine.steps() for path in [engine.root / f"checkpoint-{step:08d}"] if verify_checkpoint(path)]
    assert not damaged, damaged
    alone = engine.undisturbed(last)
    _check_equal(engine.root / f"checkpoint-{last:08d}", alone)
    print(f"{name}: {len(found)} events, 0 runs lost, step {last} to the bit of a run that nothing disturbed")
    return [_row(name, event, [one for one in found if one.event == event], first_start_s) for event in dict.fromkeys(engine.events)]


def _observed(engine: Engine, event: str, draw: random.Random) -> Recovery:
    _until(lambda: bool(engine.ranks()), "ranks live")
    before, newest = engine.ranks(), engine.steps()[-1]
    happened = time.time()
    engine.happen(event, draw)
    seen: dict[str, float] = {}

    def trains() -> bool:
        now = time.time() - happened
        if not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in before if _is_there(one)):
            seen.setdefault("ended", now)
        new = [one.create_time() for one in engine.ranks() - before if _is_there(one)]
        if new and "ended" in seen:
            seen.setdefault("begun", max(min(new) - happened, 0.0))
            steps = engine.steps()
            seen.setdefault("newest", float(steps[-1]))  # with what the old life has committed in the end
            return steps[-1] > seen["newest"]
        return False

    _until(trains, f"the run trains again after {event}")
    assert seen["newest"] >= newest, "a committed step is gone"
    return Recovery(event, seen["ended"], seen["begun"], time.time() - happened)


def _check_equal(here: Path, there: Path) -> None:
    require_equal_states(*({name: ckpt.load(one)[name] for name in ("model", "optimizer")} for one in (there, here)))


def _row(name: str, event: str, found: Iterable[Recovery], first_start_s: float) -> str:
    found = list(found)
    if not found:
        return f"| {name} | {event} | - | - |"
    seconds = [one.trains_s for one in found], [one.ours_s(first_start_s) for one in found]
    cells = [f"{statistics.median(one):.1f} ({max(one):.1f})" for one in seconds]
    return f"| {name} | {event} | {len(found)} | {' | '.join(cells)} |"


def _until(is_so: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _AT_MOST_S
    while not is_so():
        assert time.monotonic() < deadline, f"not in {_AT_MOST_S:g} s: {what}"
        time.sleep(0.01)


def _is_there(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running())
    except psutil.Error:
        return False


def _children(pid: int) -> set[psutil.Process]:
    try:
        return set(psutil.Process(pid).children())
    except psutil.NoSuchProcess:
        return set()


def _running(program: str, *words: str) -> Iterable[psutil.Process]:
    """Processes of a program, with these words, that another one of them has not forked."""
    found = {}
    for one in psutil.process_iter():
        with suppress(psutil.Error):
            said = one.cmdline()
            if said and said[0].startswith(program) and {*words} <= {*said} and one.status() != psutil.STATUS_ZOMBIE:
                found[one.pid] = one
    for one in found.values():
        with suppress(psutil.Error):
            if one.ppid() not in found:
                yield one


def _variable(process: psutil.Process, name: str) -> str | None:
    try:
        return process.environ().get(name)
    except psutil.Error:
        return None


if __name__ == "__main__":
    name, num, seed = (*sys.argv[1:], *("20", "0")[len(sys.argv) - 2 :])
    for row in campaign(name, int(num), int(seed)):
        print(row)
