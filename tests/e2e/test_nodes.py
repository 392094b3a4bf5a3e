"""Several hosts, played by several elastic agents of torchrun: each host's ranks save and load what is their host's own."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ckpt import StateComponent
from ckpt.ranks.topology import Topology
from ckpt.storage.stored import read_manifest
from recipes.support.ranks import RANK_VARIABLES
from recipes.training.training import train
from tests.conf.configs import config
from tests.e2e.nodes import cache_of
from tests.e2e.runs import REPO, TEXT, checkpoint, summary_of
from tests.support.ranks import run_ranks, run_threads
from tests.support.states import Held, coordinator, same_bits

HERE = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
NODES = [[0, 1], [2, 3]]


@dataclass(frozen=True)
class Host:
    """Where an agent runs.

    Attributes:
        enter: what to put before a command to run it there.
        address: of this host, for the others.
        interface: that has the address.
    """

    enter: tuple[str, ...] = ()
    address: str = "127.0.0.1"
    interface: str = "lo"


def train_on(hosts: Sequence[Host], run_dir: Path, *overrides: str) -> None:
    """Run `recipes.train` under one torchrun per host, each with two ranks, and wait for all."""
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    meeting = f"{hosts[0].address}:{_free_port()}"
    agents = []
    for number, host in enumerate(hosts):
        torchrun = [
            *host.enter, sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(hosts)}", "--nproc-per-node=2",
            "--rdzv-backend=c10d", f"--rdzv-endpoint={meeting}", f"--rdzv-conf=is_host={number == 0}",
            f"--rdzv-id={run_dir.name}", f"--local-addr={host.address}",
        ]  # fmt: skip
        command = ["-m", "recipes.train", f"output_dir={run_dir}", *_common(run_dir), *overrides]
        agents.append(
            subprocess.Popen(
                [*torchrun, *command],
                cwd=run_dir.parent,
                env=HERE | {"PYTHONPATH": str(REPO), "GLOO_SOCKET_IFNAME": host.interface, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        )
    try:
        said = [agent.communicate(timeout=150)[0] for agent in agents]
        assert [agent.returncode for agent in agents] == [0] * len(agents), "\n".join(said)
    finally:
        for agent in agents:
            with suppress(ProcessLookupError):
                os.killpg(agent.pid, signal.SIGKILL)
            agent.wait()


def _common(run_dir: Path) -> list[str]:
    cache = f"{{_target_: tests.e2e.nodes.NodeCache, made_in: {run_dir.name}, sharing_pattern: per_node}}"
    return [f"data.path={TEXT}", "save.every=2", "train.steps=4", f"+components.cache={cache}"]


def _train(topology: Topology, cfg: dict[str, Any]) -> None:
    os.environ["GROUP_RANK"] = str(topology.node_rank)
    train(cfg, topology)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def caches_in(path: Path) -> list[dict[str, Any]]:
    """The cache that each of four ranks is given, which has none."""
    manifest = read_manifest(path)
    assert manifest.topology["nodes"] == NODES
    assert manifest.components["cache"].sharing_pattern == "per_node"
    return run_threads(4, _cache_of_rank, path, nodes=[2, 2])


def _cache_of_rank(topology: Topology, path: Path) -> dict[str, Any]:
    held = Held({})
    coordinator(topology, path.parent, [StateComponent("cache", held, "per_node")]).load_checkpoint(path, strict=False)
    assert held.loaded is not None
    return held.loaded


def check_nodes(hosts: Sequence[Host], tmp_path: Path) -> None:
    """Go on from the middle of a run on two hosts; each host's ranks get their host's cache, and the rest is that run."""
    cfg = config(tmp_path / "straight", *_common(tmp_path / "straight"), num_ranks=4)
    run_ranks(4, _train, cfg, nodes=[2, 2], process_group=True)
    train_on(hosts, tmp_path / "resumed", f"resume={checkpoint(tmp_path / 'straight', 2)}")
    straight, resumed = summary_of(tmp_path / "straight"), summary_of(tmp_path / "resumed")
    assert resumed["losses"] == straight["losses"][2:]
    assert resumed["state_digest"] == straight["state_digest"]
    for path in (checkpoint(tmp_path / "straight", 2), checkpoint(tmp_path / "resumed", 4)):
        for rank, cache in enumerate(caches_in(path)):
            wanted = cache_of("straight", rank // 2)
            assert (cache["made_in"], cache["node"]) == ("straight", rank // 2)
            assert same_bits(cache["recent"], wanted["recent"])
            assert same_bits(cache["large"], wanted["large"])


@pytest.mark.full
def test_two_agents_are_two_nodes_and_a_resumed_run_gives_each_its_own_state(tmp_path: Path) -> None:
    check_nodes([Host(), Host()], tmp_path)


@pytest.fixture
def namespaces() -> Iterator[list[Host]]:
    """Two network namespaces, joined by a cable, which see nothing else of each other or of this machine's network."""
    names = [f"ckpt-{os.getpid()}-{number}" for number in range(2)]
    why = _why_no_namespaces(names[0])
    if why:
        pytest.skip(why)
    try:
        _ip("netns", "add", names[1])
        # Interface names hold at most 15 characters.
        ends = [f"c{os.getpid() % 10**9}e{number}" for number in range(2)]
        _ip("link", "add", ends[0], "netns", names[0], "type", "veth", "peer", "name", ends[1], "netns", names[1])
        hosts = []
        for number, (name, end) in enumerate(zip(names, ends, strict=True)):
            address = f"10.203.17.{number + 1}"
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
            for link in ("lo", end):
                _ip("-n", name, "link", "set", link, "up")
            hosts.append(Host(("ip", "netns", "exec", name), address, end))
        yield hosts
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _why_no_namespaces(name: str) -> str:
    """Make the first namespace, or say why that cannot be."""
    if shutil.which("ip") is None:
        return "ip (iproute2) is not installed"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    return f"ip netns add does not work here: {made.stderr.strip()}" if made.returncode else ""


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"


@pytest.mark.full
def test_two_nodes_in_network_namespaces_of_their_own_do_the_same(namespaces: list[Host], tmp_path: Path) -> None:
    seen = subprocess.run(
        [*namespaces[1].enter, "ip", "-o", "-4", "addr"], capture_output=True, text=True, check=True
    ).stdout
    assert namespaces[1].address in seen and namespaces[0].address not in seen
    check_nodes(namespaces, tmp_path)
