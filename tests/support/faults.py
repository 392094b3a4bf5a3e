"""One fault of one rank at any phase of a save or load, and what every rank says of it.

Which phases there are is found out, not listed: a save and a load are made in good health first, and written down. Then
each fault gets a job, its own or one after others, with folder, store and topology. Many jobs are threads of the same
processes, side by side, so that a matrix of hundreds takes as long as a few: jobs that hang, hang together, and one signal
kills them all.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from ckpt import CheckpointCoordinator, StateComponent
from ckpt.backends.base import Backend
from ckpt.backends.kimi_engine import KimiEngineBackend
from ckpt.catalog.ledger import ROOT_OWNER
from ckpt.dist_checkpointing import ShardedTensor
from ckpt.errors import CheckpointError
from ckpt.loading.direct import DirectLoad
from ckpt.ranks.store_client import StoreClient
from ckpt.ranks.topology import Phase, Topology
from tests.distributed.test_elastic import Queue
from tests.distributed.test_elastic import component as elastic_component
from tests.distributed.test_patterns import LARGE, blank, groups_of, seed_of, state_of
from tests.support.pace import patience
from tests.support.states import Held, coordinator, random_bits, same_bits, spreading

OPERATIONS = ("save", "load")
AWAITED = ("is absent", "hangs")
FAULTS = ("raises", "raises before", "goes elsewhere", "is absent", "hangs", "is killed")
BY_OTHERS = "per_rank, saved by other ranks"  # a pattern more for loads: what each rank had is handed to all
CUTS = {
    3: (0, 7, 20, 48),
    4: (0, 7, 20, 33, 48),
}  # by how many ranks, rows of the sharded tensor: its shards are no whole chunks, and parts of them are sent
_PATIENCE_S = patience(60.0)
_LOOK_S = 0.05
_T = TypeVar("_T")


class Step(NamedTuple):
    """One phase of a call: the how-manyth it is, what its operation is called (None: it has none), and its name."""

    call: str
    number: int
    what: str | None
    phase: str


class Case(NamedTuple):
    """What befalls one rank, at one step."""

    pattern: str
    fault: str
    step: Step
    victim: int

    def __str__(self) -> str:
        return f"{self.pattern}: rank {self.victim} {self.fault} at phase {self.step.number} of a {self.step.call}, {self.step.phase}"


@dataclass(frozen=True)
class Told:
    """What one rank can say of a case; times are by the clock that all processes of a machine share.

    Attributes:
        fault_at_s: when the fault began, on the rank it befell.
        committed: the checkpoints that are new in the folder, once every rank had raised.
        recovered: after the last case of its job, all ranks saved, and loaded the same bits; None where one of them is dead.
        left: what lies beside the checkpoints after that.
    """

    kind: str
    message: str
    rank: int | None
    phase: str | None
    raised_at_s: float
    fault_at_s: float | None
    committed: list[str]
    recovered: bool | None
    left: list[str]


class FaultyTopology(Topology):
    """Writes down the phases that this rank enters, and lets one of them go wrong.

    Attributes:
        befall: called with a phase's number, "before" it and "inside".
        stray_at: number of the phase in whose place this rank enters another one.
        short_at: number of the phase from which on the patience with other ranks is `agree_s`. Until then it is long: a
            rank that is slow because many jobs run side by side shall not be taken for the one that fails.
        on_branch: given the topology of saves in the background, which is one of this kind, too, when it is made.
    """

    steps: list[tuple[str | None, str]]
    befall: Callable[[int, str], None]
    stray_at: int
    short_at: int
    agree_s: float
    on_branch: Callable[[FaultyTopology], None]

    @classmethod
    def of(cls, joined: Topology, agree_s: float) -> FaultyTopology:
        """Make a topology into one of this kind."""
        joined.__class__ = cls
        assert isinstance(joined, FaultyTopology)
        joined.agree_s = agree_s
        joined.recover()
        return joined

    def recover(self) -> None:
        """Have no fault, and count phases from 0 again."""
        self.steps, self.befall, self.stray_at, self.short_at = [], lambda number, where: None, -1, -1
        self.on_branch = lambda branch: None
        self.be_patient(_PATIENCE_S)

    def branch(self, name: str) -> FaultyTopology:
        made = FaultyTopology.of(super().branch(name), self.agree_s)
        self.on_branch(made)
        return made

    def be_patient(self, seconds: float) -> None:
        """From the next agreement on."""
        assert self._agreement is not None
        self.timeout_s = self._agreement.timeout_s = seconds

    @contextmanager
    def phase(self, name: str) -> Iterator[Phase]:
        number = len(self.steps)
        self.steps.append((self._what, name))
        if number == self.short_at:
            self.be_patient(self.agree_s)
        self.befall(number, "before")
        with super().phase("another" if number == self.stray_at else name) as phase:
            self.befall(number, "inside")
            yield phase


class _OneConnection(dist.Store):
    """The store of one job, over the connection that all jobs of this process share. Parts of it (PrefixStore) use it, too.

    A new connection asks the name server who is at its other end; hundreds at once wait seconds for answers that got lost.
    """

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self._store: Any = store  # the stub lacks some of its methods

    def clone(self) -> _OneConnection:
        return self

    def set_timeout(self, _: timedelta) -> None:
        """As it is for all the jobs."""

    # A part finds only methods that are written in Python.

    def set(self, key: str, value: str | bytes) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> Any:
        return self._store.get(key)

    def multi_get(self, keys: list[str]) -> Any:
        return self._store.multi_get(keys)

    def check(self, keys: list[str]) -> Any:
        return self._store.check(keys)

    def add(self, key: str, amount: int) -> Any:
        return self._store.add(key, amount)

    def compare_set(self, key: str, expected: str | bytes, wanted: str | bytes) -> Any:
        return self._store.compare_set(key, expected, wanted)

    def delete_key(self, key: str) -> Any:
        return self._store.delete_key(key)

    deleteKey = delete_key  # what a part calls


@dataclass(frozen=True)
class Job:
    """One of the jobs that run side by side, as one rank sees it."""

    topology: FaultyTopology
    root: Path
    mailbox: StoreClient
    store: dist.Store


def run_jobs(topology: Topology, root: Path, jobs: Sequence[Callable[[Job], _T]], *, agree_s: float) -> list[_T]:
    """Run jobs that have nothing to do with each other on the ranks of this one; return what each returned on this rank.

    Args:
        root: job n works in root / str(n); a name that was not used before.
    """
    connection = topology._client.connection

    def run(number: int) -> _T:
        store = dist.PrefixStore(f"{root}/{number}", connection)
        shared: Any = _OneConnection(store)
        host = f"host-{topology.node_rank}"
        rank, world_size = topology.rank, topology.world_size
        with Topology.join(shared, rank, world_size, host=host, timeout_s=_PATIENCE_S) as joined:
            mailbox = StoreClient(shared, writer=rank)
            return jobs[number](Job(FaultyTopology.of(joined, agree_s), root / str(number), mailbox, store))

    root.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(max(1, len(jobs))) as threads:
        return [one.result() for one in [threads.submit(run, number) for number in range(len(jobs))]]


class ThroughStore:
    """Carries blocks between ranks that are threads, and so have no process group. See `ckpt.loading.two_stage.network.Transport`."""

    def __init__(self, topology: Topology) -> None:
        self._rank = topology.rank
        self._mailbox = StoreClient(topology._client.connection, writer=topology.rank)
        self._number = topology.made = getattr(topology, "made", 0) + 1  # type: ignore[attr-defined]  # all ranks make as many
        self._spread: Counter[int] = Counter()

    def begin(self, buffer: torch.Tensor, source: int, to: Sequence[int]) -> Callable[[], None]:
        self._spread[source] += 1
        key = f"parcel/{self._number}/{source}/{self._spread[source]}"
        if self._rank == source:
            self._mailbox.put(key, buffer.numpy().tobytes(), compress=False)
            return lambda: None
        return partial(self._fill, buffer, key, source)

    def _fill(self, buffer: torch.Tensor, key: str, source: int) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while (data := self._mailbox.peek(key)) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {source} sent nothing")
            time.sleep(0.002)
        buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))


TWO_STAGE = ("replicated", "per_node")
"""Patterns whose loads are spread, within hosts and between them; all others load directly."""


BY_BACKEND: dict[str, Callable[[], str | Backend]] = {
    "global": lambda: "safetensors",
    "per_rank": KimiEngineBackend,  # which keeps what it saves in memory
    "sharded": lambda: "ocdbt",
}
"""What patterns are saved by; all others by zarr."""


class State:
    """What one rank holds under one pattern, and a coordinator that has done nothing yet."""

    def __init__(self, topology: Topology, root: Path, pattern: str, *, empty: bool = False, **options: Any) -> None:
        self.wanted: dict[str, Any] = {}
        if pattern == BY_OTHERS:
            self.held: Any = Queue(topology, [topology.rank])
            component = elastic_component(self.held)
        else:
            self.wanted = _state_of(pattern, topology)
            self.held = Held(blank(self.wanted) if empty else self.wanted)
            group = "dp" if pattern == "per_group" else None
            component = StateComponent(pattern, self.held, pattern, process_group_name=group)
        groups = groups_of(topology) if pattern == "per_group" else None
        strategy = spreading(transport=ThroughStore(topology)) if pattern in TWO_STAGE else DirectLoad()
        self.coordinator: CheckpointCoordinator = coordinator(
            topology,
            root,
            [component],
            backend=BY_BACKEND.get(pattern, lambda: "zarr")(),
            process_groups=groups,
            keep_last=2,
            strategy=strategy,
            **options,
        )

    def is_whole(self, saved_by: int) -> bool:
        """Has it been given, to the bit, what its pattern says this rank should hold?"""
        if isinstance(self.held, Queue) and self.held.changed is not None:
            return [copy["documents"] for copy in self.held.changed] == [[rank] for rank in range(saved_by)]
        got = self.held.loaded
        return got is not None and all(_equal(got[key], want) for key, want in self.wanted.items() if key != "plain")


def _state_of(pattern: str, topology: Topology) -> dict[str, Any]:
    state: dict[str, Any] = state_of(pattern, topology)
    if pattern == "sharded":
        first, end = CUTS[topology.world_size][topology.rank : topology.rank + 2]
        rows = random_bits(LARGE, torch.float32, seed_of(pattern, topology))[first:end].clone()
        state["w"] = ShardedTensor.at("w", rows, LARGE, (first, 0))
    return state


def _equal(got: Any, want: Any) -> bool:
    if isinstance(want, ShardedTensor):
        return same_bits(got.data, want.data)
    return same_bits(got, want) if isinstance(want, torch.Tensor) else bool(got == want)


def find_steps(topology: Topology, root: Path, pattern: str) -> list[Step]:
    """Save and load in good health, and return every phase of it; the same on every rank."""

    def note(job: Job) -> list[Step]:
        found = []
        for call in OPERATIONS if pattern != BY_OTHERS else ("load",):
            _be_ready(job, pattern, call)
            act = _prepared(job, pattern, call)
            job.topology.recover()
            act()
            found += [Step(call, number, *step) for number, step in enumerate(job.topology.steps)]
        return found

    return run_jobs(topology, root, [note], agree_s=_PATIENCE_S)[0]


def run_cases(
    topology: Topology, root: Path, cases: Sequence[Case], *, agree_s: float, in_a_row: int = 1
) -> list[Told]:
    """Run the cases, so many of them in one job, one after another, and all jobs at once; return what this rank can say of each.

    Cases that fail the same call of the same pattern share a job. After its last one, the ranks of a job save and load.

    If ranks are to be killed, it is one and the same in all cases, each a job of its own, and it does not return. When is in
    root / "killed-at".
    """
    doom = _Doom(len(cases), root / "killed-at")
    rows = _rows_of(cases, in_a_row)

    def job_of(row: Sequence[int]) -> Callable[[Job], list[Told]]:
        return lambda job: _run_row(job, [cases[number] for number in row], doom)

    told = run_jobs(topology, root, [job_of(row) for row in rows], agree_s=agree_s)
    by_number = {
        number: one for row, of_row in zip(rows, told, strict=True) for number, one in zip(row, of_row, strict=True)
    }
    return [by_number[number] for number in range(len(cases))]


def _rows_of(cases: Sequence[Case], length: int) -> list[list[int]]:
    """Numbers of cases, in rows of one pattern and call. The rows of a call share out its faults that others wait for."""
    if length == 1:
        return [[number] for number in range(len(cases))]
    alike: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for number, case in sorted(enumerate(cases), key=lambda one: one[1].fault in AWAITED):
        alike[case.pattern, case.step.call].append(number)
    return [
        numbers[at :: -(-len(numbers) // length)]
        for numbers in alike.values()
        for at in range(-(-len(numbers) // length))
    ]


class _Doom:
    """Kills this process once all its jobs have come to the phase in which they are to die."""

    def __init__(self, jobs: int, note: Path) -> None:
        self._missing = jobs
        self._note = note
        self._lock = threading.Lock()

    def meet(self, topology: Topology) -> None:
        with self._lock:
            self._missing -= 1
        deadline = time.monotonic() + _PATIENCE_S
        while self._missing:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self._missing} of the jobs did not come to the phase in which they are to die")
            topology.progress()  # else the others would take the wait for a hang
            time.sleep(0.01)
        with self._lock:
            self._note.write_text(repr(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)


def _run_row(job: Job, cases: Sequence[Case], doom: _Doom) -> list[Told]:
    pattern, call = cases[0].pattern, cases[0].step.call
    _be_ready(job, pattern, call)
    told: list[Told] = []
    there: list[str] = []
    for number, case in enumerate(cases):
        told.append(_run_case(job, case, number, doom))
        if case.fault != "is killed":
            before, there = there, [name for name in names_in(job) if name.startswith("checkpoint-")]
            told[-1] = replace(told[-1], committed=[name for name in there if name not in before])
    if any(case.fault == "is killed" for case in cases):
        return told
    recovered = works(job, pattern)
    left = [name for name in names_in(job) if not name.startswith("checkpoint-")]
    return [replace(one, recovered=recovered, left=left) for one in told]


def _run_case(job: Job, case: Case, number_in_row: int, doom: _Doom) -> Told:
    """Befall one rank; what is committed and left, and whether the ranks recover, is seen later."""
    topology, pattern = job.topology, case.pattern
    others = [f"raised/{number_in_row}/{rank}" for rank in range(topology.world_size) if rank != case.victim]
    began: list[float] = []

    def befall(number: int, where: str) -> None:
        if (number, where) != (
            case.step.number,
            "before" if case.fault in ("is absent", "raises before") else "inside",
        ):
            return
        began.append(time.monotonic())
        match case.fault:
            case "raises" | "raises before":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "a file")
            case "hangs" | "is absent":  # until they have raised: longer than their patience
                while not job.mailbox.has(others):
                    time.sleep(_LOOK_S)
            case "is killed":
                doom.meet(topology)

    act = _prepared(job, pattern, case.step.call)
    topology.recover()
    topology.short_at = case.step.number
    if topology.rank == case.victim:
        topology.befall = befall
        topology.stray_at = case.step.number if case.fault == "goes elsewhere" else -1
    raised = _raised_by(act)
    raised_at_s = time.monotonic()
    job.mailbox.put(f"raised/{number_in_row}/{topology.rank}", b"")
    topology.recover()
    kind = type(raised).__name__
    fault_at_s = began[0] if began else None
    return Told(kind, str(raised), raised.rank, raised.phase, raised_at_s, fault_at_s, [], None, [])


def _raised_by(act: Callable[[], object]) -> CheckpointError:
    try:
        act()
    except CheckpointError as error:
        return error
    raise AssertionError("nothing was raised")


def _prepared(job: Job, pattern: str, call: str) -> Callable[[], object]:
    state = State(job.topology, job.root, pattern, empty=call == "load")
    return state.coordinator.save_checkpoint if call == "save" else state.coordinator.load_checkpoint


def _be_ready(job: Job, pattern: str, call: str) -> None:
    """A load needs a checkpoint."""
    topology = job.topology
    if call == "save":
        return
    if pattern != BY_OTHERS:
        State(topology, job.root, pattern).coordinator.save_checkpoint(checkpoint_id="1")
        return
    fewer = topology.world_size - 1
    if topology.rank < fewer:
        store: Any = _OneConnection(dist.PrefixStore("saved by others", job.store))
        with Topology.join(store, topology.rank, fewer, timeout_s=topology.timeout_s) as others:
            State(others, job.root, pattern).coordinator.save_checkpoint(checkpoint_id="1")
    with topology.phase("be ready"):
        pass


def names_in(job: Job) -> list[str]:
    """What lies in the checkpoint root once every rank is here, but for the claim of the coordinators that are open."""
    with job.topology.phase("be here"):
        pass
    with job.topology.phase("look") as phase:
        phase.payload = sorted({*os.listdir(job.root)} - {ROOT_OWNER}) if job.root.exists() else []
    return list(phase.payloads[0])


def works(job: Job, pattern: str) -> bool:
    """Save and load once more with the same ranks, and compare."""
    State(job.topology, job.root, pattern).coordinator.save_checkpoint(checkpoint_id="again")
    loaded = State(job.topology, job.root, pattern, empty=True)
    loaded.coordinator.load_checkpoint()
    return loaded.is_whole(job.topology.world_size)
