"""A real Slurm of several nodes on this machine, on loopback: slurmctld, munged, and a slurmd for each made-up node.

The nodes have names that only their processes can resolve, in a mount namespace with a file of hosts of its own. Needs root, and the
packages slurm-wlm and munge (Debian's slurmd is built for several on one machine).
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Self

import psutil

from tests.support.real_stores import free_ports

PROGRAMS = ("slurmctld", "slurmd", "munged", "srun", "sbatch", "scontrol", "unshare")
_BEGINS_S = 60.0
_CONFIG = """
ClusterName=local
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_min_interval=0,batch_sched_delay=1,requeue_delay=1
MpiDefault=none
ReturnToService=2
KillWait=10
SlurmdTimeout=30
JobRequeue=1
SlurmdParameters=config_overrides
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
"""


def why_not() -> str | None:
    """Return what a cluster lacks here; None: nothing."""
    missing = [name for name in PROGRAMS if _program(name) is None]
    if missing:
        return f"needs {', '.join(missing)} (Debian: slurm-wlm, munge)"
    if os.geteuid() != 0:
        return "needs root, as whom Slurm's daemons run"
    return None


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


class SlurmCluster:
    """The daemons, while the block runs.

    Attributes:
        nodes: names of the nodes.
        environment: for commands of Slurm.
    """

    def __init__(self, folder: Path, num_nodes: int = 3, cpus: int = 4) -> None:
        self.folder = folder
        self.nodes = [f"ckpt-node{number}" for number in range(1, num_nodes + 1)]
        self._cpus = cpus
        self._stack = ExitStack()
        self._slurmd: dict[str, subprocess.Popen[bytes]] = {}
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self.environment.pop("OMP_NUM_THREADS", None)

    def __enter__(self) -> Self:
        with ExitStack() as unless_begun:
            unless_begun.callback(self._stack.close)
            self._begin()
            unless_begun.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(subprocess.SubprocessError):
            self.run("scancel", "--state=RUNNING,PENDING", "--user=root", check=False)
            self._wait_until(lambda: not self.run("squeue", "--noheader"), "no job is left", 30.0)
        self._stack.close()

    def run(self, *command: str, check: bool = True, environment: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
        """Run a command of Slurm, in the mount namespace of the nodes; return what it says."""
        done = subprocess.run(
            self._within(command),
            env={**self.environment, **(environment or {})},
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
            check=False,
        )
        if check and done.returncode:
            raise AssertionError(f"{' '.join(command)} ended with {done.returncode}: {done.stdout}")
        return done.stdout

    def state_of(self, job: str) -> dict[str, str]:
        """Return what Slurm says of a job, by its names, such as JobState and Restarts."""
        said = self.run("scontrol", "--oneliner", "show", "job", job, check=False)
        return dict(part.split("=", 1) for part in said.split() if "=" in part)

    def wait_for(self, job: str, *states: str, seconds: float = 180.0) -> dict[str, str]:
        """Wait until a job is in one of these states."""
        self._wait_until(lambda: self.state_of(job).get("JobState") in states, f"job {job} is {' or '.join(states)}", seconds)
        return self.state_of(job)

    def lose(self, node: str) -> None:
        """Kill all that runs on a node, as if its machine was gone, and tell the controller. Those that could tell it first."""
        self._slurmd[node].kill()
        tasks = [psutil.Process(pid) for pid in self._on(node)]
        for kill_steps in (True, False):
            for task in tasks:
                with suppress(psutil.NoSuchProcess):
                    step = task.parent()
                    if not kill_steps:
                        task.kill()
                    elif step is not None and step.name().startswith("slurmstepd"):
                        step.kill()
        self.run("scontrol", "update", f"nodename={node}", "state=down", "reason=lost")

    def give_back(self, node: str) -> None:
        """Start the daemon of a node that was lost, and have jobs run on it again."""
        self._slurmd[node] = self._start("slurmd", "-D", "-N", node)
        self.run("scontrol", "update", f"nodename={node}", "state=resume")

    def _on(self, node: str) -> list[int]:
        """Return the processes of steps on a node: slurmd has set its name for them."""
        found = []
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if entry.name.isdigit() and f"SLURMD_NODENAME={node}\0".encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
        return found

    def _begin(self) -> None:
        self.folder.mkdir(parents=True)
        for name in ("state", *(f"spool-{node}" for node in self.nodes)):
            (self.folder / name).mkdir()
        ports = free_ports(1 + len(self.nodes))
        host = socket.gethostname().partition(".")[0]
        lines = [_CONFIG.format(host=host, ports=ports, folder=self.folder)]
        for node, port in zip(self.nodes, ports[1:], strict=True):
            lines.append(f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={self._cpus} State=UNKNOWN\n")
        lines.append("PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES\n")
        (self.folder / "slurm.conf").write_text("".join(lines))
        known = Path("/etc/hosts").read_text()
        (self.folder / "hosts").write_text(known + f"\n127.0.0.1 {' '.join(self.nodes)}\n")
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        files = ("socket", "key-file", "pid-file", "log-file", "seed-file")
        munge = [f"--{name}={self.folder}/munge.{name.partition('-')[0]}" for name in files]
        self._start("munged", "--foreground", "--force", *munge)
        self._wait_until((self.folder / "munge.socket").exists, "munged listens", 20.0)
        self._start("slurmctld", "-D")
        for node in self.nodes:
            self._slurmd[node] = self._start("slurmd", "-D", "-N", node)
        idle = "sinfo", "-h", "-t", "idle", "-o", "%D"
        self._wait_until(lambda: self.run(*idle, check=False).strip() == str(len(self.nodes)), "all nodes are idle")

    def _start(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        program = _program(name)
        assert program is not None
        log = self._stack.enter_context((self.folder / f"{name}-{len(self._slurmd)}.out").open("wb"))
        command = self._within((program, *arguments))
        process = subprocess.Popen(command, env=self.environment, stdout=log, stderr=log, start_new_session=True)

        def end() -> None:
            process.terminate()
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

        self._stack.callback(end)
        return process

    def _within(self, command: Sequence[str]) -> list[str]:
        script = f"mount --bind {self.folder}/hosts /etc/hosts && exec \"$@\""
        return ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh", *command]

    def _wait_until(self, is_so: Any, what: str, seconds: float = _BEGINS_S) -> None:
        deadline = time.monotonic() + seconds
        while not is_so():
            if time.monotonic() > deadline:
                logs = "".join(f"\n{log}: {log.read_text(errors='replace')[-1500:]}" for log in sorted(self.folder.glob("*.out")))
                raise AssertionError(f"not in {seconds:g} s: {what}{logs}")
            time.sleep(0.2)


PYTHON = sys.executable
