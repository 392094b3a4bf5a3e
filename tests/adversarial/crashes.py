"""Kills and errors at the n-th mutating libc call of a save, and errors at the n-th reading call of a load.

Each try begins with a copy of a root that holds checkpoints 1 and 2. What must be so after a try, in a fresh process:

* what was committed before is there, and so is what a save has said it committed; the newest loads, with the bits that were saved under
  its id, and `verify` finds nothing wrong with any;
* a save that an error befell raises a CheckpointError that names the error, the same on all ranks, or has committed all the same;
* the next two saves succeed, and leave nothing in the root but checkpoints.

A load that an error befell raises a CheckpointError, or gives the bits that were saved.
"""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Any

import torch.distributed as dist

from ckpt.errors import CheckpointError
from ckpt.loading.direct import DirectLoad
from ckpt.loading.strategy import LoadingStrategy
from ckpt.ranks.addresses import LOOPBACK
from ckpt.ranks.stores import serve
from ckpt.ranks.topology import Topology
from ckpt.saving.save_settings import SaveSettings
from tests.adversarial import held_state, shim
from tests.adversarial.driver import Case, Child, Ended, Outcome, in_child
from tests.adversarial.shim import Action, Kind, Orders, named
from tests.support.states import spreading

MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "async": {"saves": SaveSettings(mode="async")},
    "incremental": {"saves": SaveSettings(incremental=True)},
    "overwrite": {},
    "keep_last": {"keep_last": 2},
}
Fault = tuple[str, Action, int, int]
"""Its name, what happens, the error's number, and what of the later calls fails (`Orders.let`)."""
FAULTS: tuple[Fault, ...] = (
    ("killed", Action.KILL, 0, 0),
    ("all killed", Action.KILL_ALL, 0, 0),
    ("torn", Action.TORN, 0, 0),
    *((named(error), Action.FAIL, error, 0) for error in (errno.ENOSPC, errno.EIO, errno.EACCES, errno.EINTR)),
    ("disk stays full", Action.FAIL, errno.ENOSPC, 2),
    ("disk stays full, of names too", Action.FAIL, errno.ENOSPC, 1),
    ("short write", Action.SHORT, 0, 0),
)
READ_FAULTS: tuple[Fault, ...] = (
    *((named(error), Action.FAIL, error, 0) for error in (errno.EIO, errno.EACCES, errno.EINTR)),
    ("short read", Action.SHORT, 0, 0),
)
_ENDED = (-signal.SIGTERM, 128 + signal.SIGTERM)
_AGREE_S = 20.0
_LATE_S = 45.0


@dataclass(frozen=True)
class Scenario:
    """One way to save."""

    backend: str
    mode: str
    num_ranks: int

    @property
    def row(self) -> str:
        return f"saves: {self.backend}, {self.mode}, {self.num_ranks} rank{'s' if self.num_ranks > 1 else ''}"

    @property
    def target(self) -> str:
        """The id of the save that something befalls."""
        return "2" if self.mode == "overwrite" else "3"


def save_cases(seed: int, backend: str, points: int = 36) -> list[Case]:
    """Cases for every way to save by a backend.

    Args:
        points: how many tries each way gets.
    """
    ways = [Scenario(*way) for way in itertools.product([backend], MODES, (1, 2))]
    return [Case("crashes:saves", {"scenario": way, "points": points, "seed": f"{seed} {way}"}) for way in ways]


def sample_of_save_cases(seed: int) -> list[Case]:
    """Each mode once; each backend, number of ranks and fault in some of them; dealt by lot."""
    random = Random(f"{seed} ways")
    modes, backends, faults = [*MODES], [*held_state.BACKENDS], [*FAULTS]
    for values in (modes, backends, faults):
        random.shuffle(values)
    cases = []
    for number, mode in enumerate(modes):
        way = Scenario(backends[number % len(backends)], mode, 2 - number % 2)
        own = faults[number :: len(modes)]
        given = {"scenario": way, "points": len(own), "seed": f"{seed} {way}", "faults": own}
        cases.append(Case("crashes:saves", given))
    return cases


def load_cases(seed: int, points: int, sample: int | None = None) -> list[Case]:
    """Cases for both loading strategies on two ranks, or a sample of them, which share the faults."""
    ways = list(itertools.product(held_state.BACKENDS, ("direct", "two-stage")))
    if sample is not None:
        ways = Random(f"{seed} loads").sample(ways, sample)
    return [
        Case(
            "crashes:loads",
            {
                "backend": backend,
                "strategy": strategy,
                "points": points,
                "seed": f"{seed} {backend}",
                "faults": READ_FAULTS if sample is None else READ_FAULTS[number::sample],
            },
        )
        for number, (backend, strategy) in enumerate(ways)
    ]


def saves(
    folder: Path, scenario: Scenario, points: int, seed: str, faults: Sequence[Fault] = FAULTS
) -> Iterator[Outcome]:
    """Count the calls of a save, then let something happen at some of them."""
    with Ranks(scenario.num_ranks) as ranks:
        base = folder / "base"
        _require_returned(ranks.run(_save_what_lies_before, scenario, base, ("1", "2")))
        count = _counted(folder, base, ranks, scenario)
        for number, ((fault, action, error, lasts), at) in enumerate(_points(faults, count, points, Random(seed))):
            root = _copied(base, folder / f"root-{number}")
            orders = Orders(folder / "orders", root)
            orders.let(action, at, error=error, lasts=lasts)
            ended = ranks.run(_save, scenario, root, orders=orders)
            fell = _why_fell(scenario, root, action, error, ended)
            where = f"{fault} at call {at} of {count} ({orders.fired_at or 'which did not come'})"
            if orders.fired_at or fell:  # a save by threads makes a few calls more or less from time to time
                yield Outcome(scenario.row, f"{scenario.row}: {where}", fell)
            if not fell:
                shutil.rmtree(root)


def loads(
    folder: Path, backend: str, strategy: str, points: int, seed: str, faults: Sequence[Fault] = READ_FAULTS
) -> Iterator[Outcome]:
    """Count the calls that read in a load by two ranks, then let something happen at some of them."""
    row = f"loads: {backend}, {strategy}, 2 ranks"
    with Ranks(2) as ranks:
        base = folder / "base"
        _require_returned(ranks.run(_save_what_lies_before, Scenario(backend, "sync", 2), base, ("1",)))
        orders = Orders(folder / "count", base)
        orders.let(Action.COUNT, kinds=Kind.READS)
        _require_returned(ranks.run(_load, base, strategy, orders=orders))
        for (fault, action, error, lasts), at in _points(faults, orders.count, points, Random(seed)):
            orders = Orders(folder / "orders", base)
            orders.let(action, at, kinds=Kind.READS, error=error, lasts=lasts)
            ended = ranks.run(_load, base, strategy, orders=orders)
            fell = _why_not_alike(ended, [os.strerror(error)] if error else [])
            if orders.fired_at or fell:
                yield Outcome(row, f"{row}: {fault} at call {at} ({orders.fired_at})", fell)


class Ranks:
    """Ranks as processes of their own, that find each other, if there are several, through one store, served by a process of its own."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._tries = 0
        self._store: Child | None = None
        self._port = 0

    def __enter__(self) -> Ranks:
        if self._num_ranks == 1:
            return self
        here, there = os.pipe()
        self._store = Child(_serve_store, there)
        os.close(there)
        with os.fdopen(here) as said:
            self._port = int(said.readline())
        return self

    def __exit__(self, *_: object) -> None:
        if self._store is not None:
            os.kill(self._store.pid, signal.SIGKILL)
            self._store.ended()

    def run(self, function: Any, *args: Any, orders: Orders | None = None) -> list[Ended]:
        """Call `function(topology, *args)` on each rank. If one dies, the others are told by SIGTERM, as launchers do."""
        self._tries += 1
        children: list[Child] = []
        for rank in range(self._num_ranks):
            group = children[0].pid if children else 0
            job = (self._port, str(self._tries), rank, self._num_ranks, function, args, orders)
            children.append(Child(_rank, *job, group=group))
        return _all_ended(children)


def _all_ended(children: Sequence[Child]) -> list[Ended]:
    deadline = time.monotonic() + _LATE_S
    told = False
    while any(child.is_running for child in children) and time.monotonic() < deadline:
        if not told and any(child.has_died for child in children):
            told = True
            time.sleep(0.05)
            for child in children:
                child.terminate()
        time.sleep(0.002)
    return [child.ended(deadline - time.monotonic()) for child in children]


def _serve_store(pipe: int) -> None:
    server = serve(LOOPBACK, timeout_s=300.0)
    os.write(pipe, f"{server.port}\n".encode())
    os.close(pipe)
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(0.2)


def _rank(
    port: int, name: str, rank: int, num_ranks: int, function: Any, args: tuple[Any, ...], orders: Orders | None
) -> Any:
    if orders is not None and rank == 0:
        orders.set_group(os.getpid())
    if num_ranks == 1:
        shim.use(orders)
        return function(Topology.alone(), *args)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=30))
    with Topology.join(
        dist.PrefixStore(name, store), rank, num_ranks, host="host", timeout_s=_AGREE_S, grace_s=5.0
    ) as topology:
        shim.use(orders)
        return function(topology, *args)


def _save_what_lies_before(topology: Topology, scenario: Scenario, root: Path, ids: Sequence[str]) -> tuple[str, str]:
    saves = MODES[scenario.mode].get("saves", SaveSettings())
    options = {} if saves.is_async else {"saves": saves}
    with held_state.Run(root, scenario.backend, topology, **options) as run:
        for checkpoint_id in ids:
            run.save(checkpoint_id)
    return "saved", ""


def _save(topology: Topology, scenario: Scenario, root: Path) -> tuple[str, str]:
    """Save another state than those that lie there; return "saved", or what was raised, and its sentence."""
    try:
        with held_state.Run(root, scenario.backend, topology, **MODES[scenario.mode]) as run:
            run.resume()  # what retention and overwriting remove is this run's own
            run.save(scenario.target, f"{scenario.target}new")
            run.coordinator.wait()
    except CheckpointError as error:
        return type(error).__name__, str(error)
    return "saved", ""


def _load(topology: Topology, root: Path, strategy: str) -> tuple[str, str]:
    chosen: LoadingStrategy = DirectLoad() if strategy == "direct" else spreading()
    try:
        held_state.load(root / "checkpoint-1", root, topology, 2, strategy=chosen)
    except CheckpointError as error:
        return type(error).__name__, str(error)
    return "loaded", ""


def _require_returned(ended: Sequence[Ended]) -> None:
    for one in ended:
        assert one.how == "returned" and one.value[0] in ("saved", "loaded"), one


def _counted(folder: Path, base: Path, ranks: Ranks, scenario: Scenario) -> int:
    """How many calls the save makes."""
    root = _copied(base, folder / "counted")
    orders = Orders(folder / "count", root)
    orders.let(Action.COUNT)
    _require_returned(ranks.run(_save, scenario, root, orders=orders))
    return orders.count


def _points(faults: Sequence[Fault], count: int, points: int, random: Random) -> list[tuple[Fault, int]]:
    """Faults in turn, each at calls that are spread over the whole save."""
    each = -(-points // len(faults))
    chosen = []
    for fault in faults:
        step = count / each
        chosen += [(fault, 1 + int(step * number + random.random() * step)) for number in range(each)]
    random.shuffle(chosen)
    return chosen[:points]


def _copied(base: Path, root: Path) -> Path:
    """A copy in which files that are linked stay linked."""
    places: dict[int, Path] = {}
    for folder, _, files in os.walk(base):
        there = root / Path(folder).relative_to(base)
        there.mkdir()
        for name in files:
            inode = os.stat(os.path.join(folder, name)).st_ino
            if inode in places:
                os.link(places[inode], there / name)
            else:
                places[inode] = Path(shutil.copyfile(os.path.join(folder, name), there / name))
    return root


def _why_fell(scenario: Scenario, root: Path, action: Action, error: int, ended: Sequence[Ended]) -> str:
    kills = action in (Action.KILL, Action.KILL_ALL, Action.TORN)
    wrong = _why_not_told(ended) if kills else _why_not_alike(ended, [os.strerror(error)] if error else [])
    if wrong:
        return wrong
    said_saved = any(one.how == "returned" and one.value[0] == "saved" for one in ended)
    checked = in_child(_why_damaged, scenario, root, said_saved, bool(error))
    return str(checked.value) if checked.how == "returned" else f"the check {checked.how}: {checked.value}"


def _why_not_told(ended: Sequence[Ended]) -> str:
    """What is wrong with the ends of ranks some of which were killed."""
    for one in ended:
        if one.how in ("raised", "late"):
            return f"a rank {one.how}: {one.value}"
        if one.how == "died" and one.value not in (-signal.SIGKILL, *_ENDED):
            return f"a rank died by {one.value}"
    return ""


def _why_not_alike(ended: Sequence[Ended], causes: Sequence[str]) -> str:
    """What is wrong with the ends of ranks that must all succeed, or all raise one error that names a cause."""
    for one in ended:
        if one.how != "returned":
            return f"a rank {one.how}: {one.value}"
    said = [one.value for one in ended]
    if any(one != said[0] for one in said) and not all(
        "is committed" in text for kind, text in said if kind != "saved"
    ):
        return f"the ranks say different things: {said}"
    for kind, text in said:
        if kind not in ("saved", "loaded") and not any(cause in text for cause in causes):
            return f"the error does not name its cause ({', '.join(causes) or 'there is none'}): {kind}: {text}"
    return ""


def _why_damaged(scenario: Scenario, root: Path, said_saved: bool, is_refused: bool) -> str:
    """What is wrong with a root after a try, by one fresh process."""
    committed = held_state.committed(root)
    ids = {one.id for one in committed}
    expected = {"1", "2", scenario.target} if said_saved else {"1", "2"}
    if scenario.mode == "keep_last" and "3" in ids:
        expected.discard("1")
        if (
            said_saved and not is_refused and "1" in ids
        ):  # a removal that the disk refuses is told, and no save fails for it
            return "checkpoint-1 should have been removed"
    if not expected <= ids:
        return f"of {sorted(expected)} only {sorted(ids)} are there: {os.listdir(root)}"
    for one in committed:
        if problems := held_state.problems_of(one.path):
            return f"verify of {one.path.name}: {'; '.join(problems)}"
        held_state.load(one.path, root, Topology.alone(), scenario.num_ranks, _variants(scenario, one.id, said_saved))
    newest = committed[-1].id
    found = held_state.load(None, root, Topology.alone(), scenario.num_ranks, _variants(scenario, newest, said_saved))
    return f"latest gave {found} and not {newest}" if found != newest else _why_not_cleaned(scenario, root)


def _variants(scenario: Scenario, checkpoint_id: str, said_saved: bool) -> list[str]:
    """The states that may lie under an id: of one that is replaced the old one or the new one, but whole."""
    if checkpoint_id != scenario.target:
        return [checkpoint_id]
    is_old_allowed = scenario.mode == "overwrite" and not said_saved
    return [f"{checkpoint_id}new", checkpoint_id] if is_old_allowed else [f"{checkpoint_id}new"]


def _why_not_cleaned(scenario: Scenario, root: Path) -> str:
    """Save twice more, as a run that goes on."""
    for checkpoint_id in ("8", "9"):
        with held_state.trainer(Topology.alone(), root, checkpoint_id, scenario.backend) as run:
            run.save_checkpoint(checkpoint_id=checkpoint_id)
    assert held_state.load(None, root, Topology.alone(), 1) == "9"
    left = sorted(name for name in os.listdir(root) if not name.startswith("checkpoint-"))
    return f"two saves later there is still {', '.join(left)}" if left else ""
