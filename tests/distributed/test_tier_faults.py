"""Tiers broken on purpose: a rank, a keeper, a host, the memory or a connection at each phase; then other ranks restore.

A case has two or three lives of the run, one after another, each a set of ranks on hosts of which each has a folder for its memory:

1. saves step 1 into the root and step 2 into the memory with a copy, and then step 3, in which the fault happens, or after which
2. (faults of recovery only) restores, in which the fault happens
3. restores in good health, on some layout, saves and ends

What must be so: life 3 has the bits of one step, which is no earlier than the newest that a save has said to be committed and a fault of
one host leaves; no life lasts longer than its deadline; at the end neither a keeper nor a folder of memory is left.

A run of everything draws 150 of about 4,600 cases. More of them, in eight processes, most of whose time is waiting:

    CKPT_TIER_FAULTS=2000 python -m pytest -n 8 --dist=load -m full tests/distributed/test_tier_faults.py
"""

from __future__ import annotations

import os
import resource
import select
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any, NamedTuple
from unittest import mock

import psutil
import pytest
import torch

from ckpt import CheckpointCoordinator, StateComponent
from ckpt.errors import CheckpointError
from ckpt.format.manifest import MANIFEST_NAME
from ckpt.ranks.addresses import LOOPBACK
from ckpt.ranks.topology import Phase, Topology
from ckpt.saving.tiers import HostTier, memory
from ckpt.state.sharded_tensor import ShardedTensor
from ckpt.storage.keeper.client import Where
from ckpt.storage.keeper.server import HOME
from tests.support.covering import and_in_full
from tests.support.leaks import traces
from tests.support.pace import patience
from tests.support.ranks import Dead, run_ranks
from tests.support.states import Fitted, coordinator, random_bits, same_bits

_ROWS = 48
_NODES = [2, 2]
_AGREE_S = 8.0
_LIFE_S = 60.0
_KEEP_S = 90.0

SAVE = ("collect", "open", "write", "copy", "commit", "publish", "retention")
DRAIN = ("next copy", "claim", "open", "write", "commit", "publish")
LOAD = ("look on the hosts", "choose", "open", "read", "apply")
WHENS = ("before", "inside", "after")
LAYOUTS: dict[str, tuple[list[int], str]] = {
    "same": ([2, 2], "01"),
    "swapped": ([2, 2], "10"),
    "more": ([2, 2, 2], "0n1"),
    "fewer": ([1, 1], "01"),
    "uneven": ([2, 1], "10"),
}
ALONE = {"on the first": ([2], "0"), "on the second": ([3], "1"), "one and a new one": ([2, 2], "n0"), "a new one": ([1, 2], "1n")}
"""Where one of both hosts is gone."""


class Case(NamedTuple):
    """One fault.

    Attributes:
        fault: what happens.
        during: "save", "drain" or "load": its phase is where it happens; "rest": after the ranks of the first life have gone.
        at: name of the phase; for the rest: which files.
        when: of the phase, or how many bytes have passed.
        victim: the rank.
        layout: of the life that restores.
    """

    fault: str
    during: str
    at: str
    when: Any
    victim: int
    layout: str
    mode: str = "sync"

    def __str__(self) -> str:
        return "-".join(map(str, self)).replace(" ", "_")


# Ranks


class _Struck(Topology):
    """Has something happen at one phase."""

    strike: Callable[[str, str], None]

    @contextmanager
    def phase(self, name: str) -> Iterator[Phase]:
        self.strike(name, "before")
        with super().phase(name) as phase:
            self.strike(name, "inside")
            yield phase
            self.strike(name, "after")

    def branch(self, name: str) -> Topology:
        made = super().branch(name)
        return _struck(made, lambda at, when: self.strike(f"{_OF_DRAINS * _is_drains()}{at}", when))


_OF_DRAINS = "drain: "


def _is_drains() -> bool:
    return threading.current_thread().name == "ckpt-drains"


def _struck(topology: Topology, strike: Callable[[str, str], None]) -> Topology:
    topology.__class__ = _Struck
    assert isinstance(topology, _Struck)
    topology.strike = strike
    return topology


def _tensors(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    return random_bits((_ROWS, 500), torch.float32, 2 * step), random_bits((1500,), torch.float32, 2 * step + 1)


def _set(tensors: Sequence[torch.Tensor], topology: Topology, step: int) -> None:
    rows, model = _tensors(step)
    tensors[0].copy_(model)
    tensors[1].copy_(rows.chunk(topology.world_size)[topology.rank])


def _place(topology: Topology, folder: Path, hosts: str) -> Path:
    place = folder / f"host-{hosts[topology.node_rank]}"
    place.mkdir(exist_ok=True)
    return place


def _made(topology: Topology, folder: Path, hosts: str, mode: str) -> tuple[CheckpointCoordinator, list[torch.Tensor]]:
    tensors = [t.clone() for t in _tensors(0)]
    tensors = [tensors[1], tensors[0].chunk(topology.world_size)[topology.rank].clone()]
    shard = ShardedTensor.from_rank_offsets("w", tensors[1], (0, topology.rank, topology.world_size))
    parts = [StateComponent("model", Fitted({"b": tensors[0]}), "replicated"), StateComponent("shard", Fitted({"w": shard}), "sharded")]
    tier = memory(path=_place(topology, folder, hosts), copies=min(1, len(topology.nodes) - 1), keep_s=_KEEP_S)
    options: dict[str, Any] = {"async": {"saves": "async"}, "incremental": {"incremental": True}}.get(mode, {})
    backend = "zarr" if mode == "incremental" else ("ocdbt" if mode == "tensorstore" else "zarr")
    return coordinator(topology, folder / "root", parts, tiers=[tier], backend=backend, **options), tensors


def _first_life(topology: Topology, folder: Path, case: Case) -> str:
    """Save steps 1 to 3; return what came of the third."""
    made, tensors = _made(topology, folder, "01", case.mode)
    said = "nothing"
    with pytest.raises(InterruptedError), made:
        for step, goes_home in ((1, True), (2, False)):
            _set(tensors, topology, step)
            made.save_checkpoint(checkpoint_id=step, goes_home=goes_home)
            made.wait()
            assert made._tiered is not None
            made._tiered.wait()
        _set(tensors, topology, 3)
        with _striking(topology, folder, case, "save", "drain"):
            try:
                if case.during != "rest" or case.at != "two":
                    made.save_checkpoint(checkpoint_id=3, goes_home=case.during == "drain")
                    made.wait()
                    said = "saved"
                    made._tiered.wait()
            except CheckpointError as error:
                if said != "saved":
                    said = f"{type(error).__name__}: {error}"
        raise InterruptedError
    return said


def _later_life(topology: Topology, folder: Path, case: Case, hosts: str, is_last: bool) -> tuple[int, str]:
    """Restore; return the step that it was, and what is left in this process. The last life saves, too, and ends as it should."""
    before = traces()
    made, tensors = _made(topology, folder, hosts, case.mode)
    step = -1
    try:
        with made:
            with _striking(topology, folder, case, *(["load"] if not is_last else [])):
                try:
                    made.load_checkpoint()
                    step = _step_of(topology, tensors)
                except CheckpointError as error:
                    if is_last:
                        raise
                    return -2, f"{type(error).__name__}: {error}"  # and leaves as one does who knows of no error
            if not is_last:
                raise InterruptedError
            _set(tensors, topology, 9)
            made.save_checkpoint(checkpoint_id=9)
    except InterruptedError:
        pass
    after = traces(before)
    for thread in after.threads - before.threads:  # those that have been told to end, and whom nobody awaits
        thread.join(patience(2.0))
    left = [thread.name for thread in after.threads - before.threads if thread.is_alive()]
    sockets = after.descriptors["socket"] - before.descriptors["socket"]
    return step, f"{left} {sockets} sockets" if left or sockets > 0 else ""


def _step_of(topology: Topology, tensors: Sequence[torch.Tensor]) -> int:
    """The step whose bits these are, all of them; -9: of none, or of two."""
    for step in (1, 2, 3):
        rows, model = _tensors(step)
        if same_bits(tensors[0], model) and same_bits(tensors[1], rows.chunk(topology.world_size)[topology.rank]):
            return step
    return -9


@contextmanager
def _striking(topology: Topology, folder: Path, case: Case, *during: str) -> Iterator[None]:
    """Have the fault of a case happen inside the block, if it is the victim's, and of this part of a life."""
    if case.during not in during:
        yield
        return
    assert isinstance(topology, _Struck)
    at = f"{_OF_DRAINS}{case.at}" if case.during == "drain" else case.at
    has_struck = threading.Event()

    def strike(name: str, when: str) -> None:
        if topology.rank == case.victim and (name, when) == (at, case.when) and not has_struck.is_set():
            has_struck.set()
            (folder / "struck").touch()
            _strike(topology, folder, case.fault)

    if case.fault in ("cut", "swallowed", "slow"):
        with _proxied(case.fault, case.when, topology.node_rank == case.victim // 2):
            yield
        return
    topology.strike = strike
    try:
        yield
    finally:
        topology.strike = lambda *_: None
        if case.fault == "memory full" and has_struck.is_set():
            _limit_files(folder / f"host-{topology.node_rank}", resource.RLIM_INFINITY)


def _strike(topology: Topology, folder: Path, fault: str) -> None:
    host = f"host-{topology.node_rank}"
    match fault:
        case "rank killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "keeper killed":
            _signal_keepers(folder / host, signal.SIGKILL)
        case "keeper stopped":
            _signal_keepers(folder / host, signal.SIGSTOP)
        case "memory full":
            _limit_files(folder / host, 1000)
        case "folder removed":
            _remove_memory(folder / host)
        case "host lost":
            _signal_keepers(folder / host, signal.SIGKILL)
            mates = [int(pid) for pid in (folder / "pids" / host).read_text().split() if int(pid) != os.getpid()]
            for pid in mates:
                os.kill(pid, signal.SIGKILL)
            _remove_memory(folder / host)
            os.kill(os.getpid(), signal.SIGKILL)


def _limit_files(host: Path, num_bytes: int) -> None:
    """No file of this process, and of the keeper, gets longer: as if memory were full, without a file system of its own."""
    for pid in (os.getpid(), *(process.pid for process in _keepers(host))):
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))


def _remove_memory(host: Path) -> None:
    for _ in range(20):  # what still writes there makes it again
        shutil.rmtree(host, ignore_errors=True)
        if not host.exists():
            break


def _keepers(folder: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        if process.info["status"] != psutil.STATUS_ZOMBIE and any(f"{folder}/" in word for word in process.info["cmdline"] or []):
            found.append(process)
    return found


def _signal_keepers(host: Path, number: int) -> None:
    for process in _keepers(host):
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


@contextmanager
def _proxied(fault: str, num_bytes: int, is_here: bool) -> Iterator[None]:
    """Have the other hosts reach the keeper of this one through a connection that fails after so many bytes."""
    if not is_here:
        yield
        return
    prepare, proxies = HostTier.prepare, []

    def behind(tier: HostTier) -> Where | None:
        where = prepare(tier)
        if where is None:
            return None
        proxies.append(_Proxy(where, fault, num_bytes))
        return Where(LOOPBACK, proxies[-1].port, where.secret)

    with mock.patch.object(HostTier, "prepare", behind):
        try:
            yield
        finally:
            for proxy in proxies:
                proxy.close()


class _Proxy:
    """Forwards connections to a keeper."""

    def __init__(self, where: Where, fault: str, num_bytes: int) -> None:
        self._where, self._fault, self._left = where, fault, num_bytes
        self._server = socket.create_server((LOOPBACK, 0))
        self.port = self._server.getsockname()[1]
        self._is_closing = threading.Event()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def close(self) -> None:
        self._is_closing.set()
        for thread in self._threads:
            thread.join()
        self._server.close()

    def _accept(self) -> None:
        while not self._is_closing.is_set():
            if select.select([self._server], [], [], 0.05)[0]:
                link, _ = self._server.accept()
                self._threads.append(threading.Thread(target=self._forward, args=(link,), daemon=True))
                self._threads[-1].start()

    def _forward(self, link: socket.socket) -> None:
        with link, socket.create_connection(self._where[:2]) as keeper, suppress(OSError):
            other = {link: keeper, keeper: link}
            while not self._is_closing.is_set():
                for ready in select.select([*other], [], [], 0.05)[0]:
                    data = ready.recv(1024 if self._fault == "slow" else 1 << 16)
                    if not data:
                        return
                    if self._fault == "slow":
                        time.sleep(0.02)
                    elif self._left < len(data):
                        if self._fault == "cut":
                            other[ready].sendall(data[: max(0, self._left)])
                            self._left = 0
                            return
                        self._left = 0
                        continue
                    self._left -= len(data)
                    other[ready].sendall(data)


# Lives


def _with_pid(topology: Topology, life: Callable[..., Any], folder: Path, *args: Any) -> Any:
    """Note the processes of each host first, so that one of them can take the others with it."""
    with topology.phase("processes") as phase:
        phase.payload = os.getpid()
    (folder / "pids").mkdir(exist_ok=True)
    if topology.rank == topology.nodes[topology.node_rank][0]:
        pids = [str(phase.payloads[rank]) for rank in topology.nodes[topology.node_rank]]
        (folder / "pids" / f"host-{topology.node_rank}").write_text(" ".join(pids))
    with topology.phase("known"):
        pass
    return life(_struck(topology, lambda *_: None), folder, *args)


def _live(nodes: Sequence[int], life: Callable[..., Any], folder: Path, *args: Any, dead: set[int], agree_s: float = _AGREE_S) -> list[Any]:
    return run_ranks(sum(nodes), _with_pid, life, folder, *args, nodes=nodes, expect_dead=dead, agree_s=agree_s, timeout_s=_LIFE_S)


def _dead(case: Case, during: Sequence[str]) -> set[int]:
    if case.during in during and case.fault == "rank killed":
        return {case.victim}
    return {2 * (case.victim // 2), 2 * (case.victim // 2) + 1} if case.during in during and case.fault == "host lost" else set()


def _play(folder: Path, case: Case) -> None:
    (folder / "pids").mkdir()
    said = [one for one in _live(_NODES, _first_life, folder, case, dead=_dead(case, ("save", "drain"))) if not isinstance(one, Dead)]
    assert len(set(said)) == 1, f"all ranks say the same: {said}"
    least = 3 if said[0] == "saved" else 2
    if case.during == "rest":
        least = min(least, _damage(folder, case))
    if case.during == "load":
        told = _live(_NODES, _later_life, folder, case, "01", False, dead=_dead(case, ("load",)))
        for one in told:
            assert isinstance(one, Dead) or one[0] in (-2, least), f"the life that is broken restores step {least}, or says why not: {told}"
    if case.during != "rest" and case.fault not in ("cut", "swallowed", "slow"):
        assert (folder / "struck").exists(), "the fault has happened"
    nodes, hosts = {**LAYOUTS, **ALONE}[case.layout]
    last = _live(nodes, _later_life, folder, case, hosts, True, dead=set(), agree_s=30.0)
    assert len({step for step, _ in last}) == 1 and least <= last[0][0] <= 3, f"at least step {least}: {last}; the third save: {said[0]}"
    assert not [left for _, left in last if left], f"what the last life leaves: {last}"
    assert (folder / "root" / "checkpoint-00000009").exists()
    for host in {0, 1} - {int(host) for host in hosts if host != "n"}:  # where nobody has come back, the keeper waits
        _signal_keepers(folder / f"host-{host}", signal.SIGCONT)
        _signal_keepers(folder / f"host-{host}", signal.SIGKILL)
        _remove_memory(folder / f"host-{host}")
    until = time.monotonic() + patience(5.0)
    while (left := [*folder.glob("host-*/ckpt-*/*"), *_keepers(folder)]) and time.monotonic() < until:
        time.sleep(0.05)
    assert not left, f"memory is returned: {left}"


def _damage(folder: Path, case: Case) -> int:
    """Damage what has been saved; return the step that must be there all the same."""
    random = Random(str(case))
    host = folder / f"host-{case.victim // 2}"
    if case.fault == "host lost":
        _signal_keepers(host, signal.SIGKILL)
        _remove_memory(host)
        return 3
    if case.fault in ("keeper killed", "keeper stopped"):
        _signal_keepers(host, signal.SIGKILL if case.fault == "keeper killed" else signal.SIGSTOP)
        return 3
    found = [path for path in sorted(host.glob("ckpt-*/*/checkpoint-*/**/*")) if path.is_file() and HOME not in path.parts]
    relative = {path: str(path).partition("checkpoint-")[2] for path in found}
    chosen = {
        "manifest": [path for path in found if path.name == MANIFEST_NAME],
        "indexes": [path for path in found if "index" in path.name],
        "a file": [random.choice([path for path in found if path.name != MANIFEST_NAME])],
        "all": found,
        "both": [random.choice([path for path in found if path.name != MANIFEST_NAME and path.stat().st_size])],
    }[case.at]
    assert chosen
    for path in chosen:
        _break(path, case.fault, random)
        if case.at == "both":
            other = folder / f"host-{1 - case.victim // 2}"
            for copy in other.glob(f"ckpt-*/*/checkpoint-{relative[path]}"):
                _break(copy, case.fault, random)
    return 1 if case.at == "both" else 3


def _break(path: Path, fault: str, random: Random) -> None:
    data = bytearray(path.read_bytes())
    if fault == "removed":
        path.unlink()
    elif fault == "cut short":
        path.write_bytes(data[: random.randrange(len(data))] if data else b"more")
    elif data:
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)
        path.write_bytes(data)


# Cases


def _all_cases() -> list[Case]:
    cases = []
    layouts = [*LAYOUTS]
    for during, phases in (("save", SAVE), ("drain", DRAIN), ("load", LOAD)):
        for fault in ("rank killed", "host lost", "keeper killed", "keeper stopped", "folder removed", "memory full"):
            for at in phases:
                for when in WHENS:
                    for victim in range(sum(_NODES)):
                        for mode in ("sync", "async", "incremental", "tensorstore"):
                            if fault in ("folder removed", "memory full") and during != "save":
                                continue
                            if during == "load" and mode in ("async", "incremental"):
                                continue
                            number = len(cases)
                            lost = fault in ("host lost", "folder removed")
                            fits = [name for name, (_, hosts) in ALONE.items() if str(victim // 2) not in hosts] if lost else layouts
                            cases.append(Case(fault, during, at, when, victim, fits[number % len(fits)], mode))
    for during in ("save", "load"):
        for fault in ("cut", "swallowed"):
            for num_bytes in (0, 10, 60, 110, 150, 200, 500, 2000, 10_000, 30_000, 60_000, 100_000):
                for victim in (0, 2):
                    for layout in layouts:
                        cases.append(Case(fault, during, "connection", num_bytes, victim, layout))
        cases += [Case("slow", during, "connection", 0, victim, layout) for victim in (0, 2) for layout in ("same", "more")]
    for fault in ("flipped", "cut short", "removed"):
        for at in ("manifest", "indexes", "a file", "all", "both"):
            for victim in (0, 2):
                for layout in layouts:
                    for mode in ("sync", "tensorstore", "incremental"):
                        cases.append(Case(fault, "rest", at, 0, victim, layout, mode))
    for victim in (0, 2):
        for layout, (_, hosts) in ALONE.items():
            if str(victim // 2) not in hosts:
                cases += [Case("host lost", "rest", "all", 0, victim, layout, mode) for mode in ("sync", "async", "tensorstore")]
        for layout in layouts:
            cases += [Case(fault, "rest", "keeper", 0, victim, layout) for fault in ("keeper killed", "keeper stopped")]
    return cases


CASES = _all_cases()


def _few() -> list[Case]:
    """One of each fault, by lot; of the death of a rank one in each part of a life; and what has been found so."""
    kinds: dict[tuple[str, str], list[Case]] = {}
    for case in CASES:
        kinds.setdefault((case.fault, case.during if case.fault == "rank killed" else ""), []).append(case)
    remade = Case("folder removed", "save", "copy", "before", 0, "on the second")  # by copies of the other host's files
    return [remade, *(Random(20).choice(cases) for cases in kinds.values())]


def _drawn() -> list[Case]:
    return Random(20).sample(CASES, min(len(CASES), int(os.environ.get("CKPT_TIER_FAULTS", "150"))))


@and_in_full(("case",), [(case,) for case in _few()], [(case,) for case in _drawn()], ids=str)
def test_no_fault_of_one_host_loses_a_committed_save(tmp_path: Path, case: Case) -> None:
    try:
        _play(tmp_path, case)
    finally:
        _signal_keepers(tmp_path, signal.SIGKILL)


def _note_phases(topology: Topology, folder: Path) -> list[str]:
    seen: list[str] = []
    topology = _struck(topology, lambda name, when: seen.append(name) if when == "before" else None)
    made, _ = _made(topology, folder, "01", "sync")
    with made:
        made.save_checkpoint(checkpoint_id=1)
        made._tiered.wait()  # type: ignore[union-attr]
        made.load_checkpoint()
    return seen


def test_the_cases_go_through_the_phases_of_a_save_a_copy_and_a_restore(tmp_path: Path) -> None:
    seen = run_ranks(4, _note_phases, tmp_path, nodes=_NODES)[0]
    assert {*SAVE, *LOAD, *(f"drain: {name}" for name in DRAIN)} <= {*seen}, seen
