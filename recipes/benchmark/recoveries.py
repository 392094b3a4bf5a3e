"""measure=tiers: ranks restore a state from the memory of their hosts, of which one is lost, onto these and other ranks and layouts.

Hosts are groups of ranks of one machine, each with a folder of its own in memory. In each turn the ranks save, with a copy on another host,
and go as ranks do that are killed, but for their processes, whose start is in no figure. Beside each load the bytes that its ranks need
are moved plainly: by copies of memory where they lie on the rank's own host, and by sockets from the others.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ckpt.errors import ConfigurationError, CorruptCheckpointError
from ckpt.format.box import overlap
from ckpt.ranks.topology import Topology
from ckpt.saving.tiers import partners_of
from ckpt.storage.keeper.hosts import HERE, THERE, nearest_first
from recipes.benchmark import harness
from recipes.benchmark.contenders import coordinator_of
from recipes.benchmark.harness import Figures
from recipes.benchmark.host_memory import free, go, memory_folder, tier_of
from recipes.benchmark.limits import HostCopies
from recipes.benchmark.measuring import gathered, largest, timed, wait_for_ranks
from recipes.benchmark.places import lay_out, least_loaded, sources_of
from recipes.benchmark.slow_store import TokenBucket, slow_reads
from recipes.benchmark.workloads import State, Workload, described, facts_of, prepared, state_on
from recipes.support.config import made

WORKLOADS = ("gpt2_fsdp",)
"""Of other states more than one rank holds a part, and which of them writes it is not for a reference to know."""

RESTARTED, STORE = "restarted", "store"
LOST, COPIES = 1, 1

COLUMNS = {
    "load s": "load_s",
    "memcpy and sockets s": "copy_s",
    "load / these": "copy_s_ratio",
    "times as fast as storage": "store_ratio",
    "bytes of own host / other hosts / storage": "here_bytes there_bytes storage_bytes",
}


class Case(NamedTuple):
    """A load.

    Attributes:
        hosts: given the number of hosts and the ranks on each, returns the host of each rank that loads.
        parallel: their layout; None: the one in which the state was saved.
        is_host_lost: host `LOST` has nothing any more. Where it is named, another one has taken its place.
    """

    hosts: Callable[[int, int], list[int]]
    parallel: str | None = None
    is_host_lost: bool = True


def _all(num_hosts: int, of_each: int) -> list[int]:
    return [host for host in range(num_hosts) for _ in range(of_each)]


def _fewer_hosts(num_hosts: int, of_each: int) -> list[int]:
    return [host for host in _all(num_hosts, of_each) if host != LOST]


def _fewer_ranks(num_hosts: int, of_each: int) -> list[int]:
    return sorted(number % num_hosts for number in range((num_hosts - 1) * of_each))


CASES = {
    RESTARTED: Case(_all, is_host_lost=False),
    "host-lost": Case(_all),
    "fewer-hosts": Case(_fewer_hosts),
    "fewer-ranks": Case(_fewer_ranks),
    "tp_fsdp": Case(_all, parallel="recipes.training.parallel.sharded.TensorThenFullySharded"),
    STORE: Case(_all, is_host_lost=False),
}
"""By the contender's name. Of `STORE` the ranks load from a file system with a given bandwidth."""


def _check(keys: dict[str, Any]) -> None:
    harness.require_choice("workload", keys["workload"], WORKLOADS)
    if keys["hosts"] < 2:
        raise ConfigurationError(f"benchmark.hosts={keys['hosts']}: expected at least 2, one of which is lost")


def benchmark(cfg: dict[str, Any], topology: Topology) -> Figures:
    keys = cfg["benchmark"]
    if topology.world_size % (2 * keys["hosts"]):
        raise ConfigurationError(
            f"benchmark.hosts={keys['hosts']}: {topology.world_size} ranks are not two, four or another even number on each; give "
            f"launch.nproc_per_node={2 * keys['hosts']}"
        )
    with (
        prepared(cfg, topology) as workload,
        harness.scratch_folder(cfg, topology) as folders,
        memory_folder(keys["memory"], topology) as memory,
        Recoveries(cfg, workload, folders, memory) as recoveries,
    ):
        facts = facts_of(cfg, workload) | {name: keys[name] for name in ("hosts", "store_mib_s")}
        harness.announce(_title(facts), keys["contenders"], keys, topology)

        def take_turn(name: str, number: int) -> Figures:
            with harness.turn_folder(folders, name, number, topology) as folder:
                return recoveries.take_turn(name, folder)

        rounds = harness.interleaved(keys["contenders"], keys["repeats"], take_turn, topology, _line)
    return facts | {"rounds": rounds}


class Recoveries(ExitStack):
    """The states of all cases, on their hosts; released at the end of the block. Collective, as all methods are.

    Args:
        scratch: for the file of the slow storage.
        memory: where each host gets a folder.
    """

    def __init__(self, cfg: dict[str, Any], workload: Workload, scratch: Path, memory: Path) -> None:
        super().__init__()
        self._cfg = cfg
        self._workload = workload
        self._topology = workload.saved.topology
        self._num_hosts = cfg["benchmark"]["hosts"]
        self._hosts = [memory / f"host-{number}" for number in range(self._num_hosts)]
        self._layout = lay_out(workload.holdings, self._topology.world_size, least_loaded)
        self._digest = workload.saved.digest()
        self._states: dict[tuple[str | None, int], State | None] = {(None, self._topology.world_size): workload.saved}
        self._topologies: dict[tuple[int, ...], Topology | None] = {}
        self._copies = HostCopies()
        self._ports = gathered(self.enter_context(self._copies.serving()), self._topology)
        self._bucket = TokenBucket(scratch / "bucket", cfg["benchmark"]["store_mib_s"] * 2**20)
        self.callback(self._bucket.close)

    def take_turn(self, name: str, folder: Path) -> Figures:
        """Save, lose, and load again; return the figures of the load, and of the same bytes moved plainly."""
        case, topology = CASES[name], self._topology
        hosts = case.hosts(self._num_hosts, topology.world_size // self._num_hosts)
        state = self._state(case, hosts)
        try:
            self._save(folder, in_memory=name != STORE)
            if case.is_host_lost and topology.is_lead:
                free(folder, self._hosts[LOST : LOST + 1])
            mine: Figures = {}
            if name != STORE:
                mine["copy_s"] = timed(partial(self._move, state, self._needed(state, case, hosts), hosts), topology)
            if state is not None:
                mine |= self._load(name, state, folder, hosts)
            return largest(gathered(mine, topology))
        finally:
            if topology.is_lead:
                free(folder, self._hosts)

    def _topology_of(self, hosts: Sequence[int]) -> Topology | None:
        """The ranks that load, on their hosts; None: this rank does not."""
        key = tuple(hosts)
        if key not in self._topologies:
            rank, store = self._topology.rank, self._topology.store_for("hosts " + " ".join(map(str, key)))
            joined = None
            if rank < len(key):
                assert store is not None, "there are at least four ranks"
                host, timeout_s = f"host-{key[rank]}", self._topology.timeout_s
                joined = self.enter_context(Topology.join(store, rank, len(key), host=host, timeout_s=timeout_s))
            self._topologies[key] = joined
        return self._topologies[key]

    def _state(self, case: Case, hosts: Sequence[int]) -> State | None:
        """The state that a case loads into: one of each layout and number of ranks; None: this rank does not load."""
        topology, key = self._topology_of(hosts), (case.parallel, len(hosts))
        if key not in self._states:
            cfg = self._cfg if case.parallel is None else self._cfg | {"parallel": {"_target_": case.parallel}}
            self._states[key] = state_on(topology, len(hosts), cfg, self._workload.saved.device)
        state = self._states[key]
        return None if state is None or topology is None else replace(state, topology=topology)

    def _save(self, folder: Path, *, in_memory: bool) -> None:
        """Save on all hosts, and leave."""
        hosts = _all(self._num_hosts, self._topology.world_size // self._num_hosts)
        state = self._state(CASES[RESTARTED], hosts)
        assert state is not None, "every rank saves"
        options = {"tiers": [tier_of(self._hosts[hosts[self._topology.rank]], copies=COPIES)]} if in_memory else {}
        saving = coordinator_of(self._cfg, state, output_dir=folder, keep_last=None, **options)
        saving.save_checkpoint(checkpoint_id=1, goes_home=not in_memory)
        go(saving)
        wait_for_ranks(self._topology)

    def _needed(self, state: State | None, case: Case, hosts: Sequence[int]) -> dict[int, int]:
        """The bytes that this rank needs, by the nearest host that has them."""
        found: Counter[int] = Counter()
        for source in sources_of({} if state is None else state.places, self._layout):
            writer = source.location.writer // (self._topology.world_size // self._num_hosts)
            having = {writer, *partners_of(writer, self._num_hosts, COPIES)} - ({LOST} if case.is_host_lost else set())
            both = overlap(source.saved, source.wanted)
            assert both is not None, "they overlap"
            found[nearest_first([*having], hosts[self._topology.rank])[0]] += math.prod(both.shape) * source.tensor.element_size()
        return found

    def _move(self, state: State | None, needed: Mapping[int, int], hosts: Sequence[int]) -> None:
        """Move the bytes that this rank needs, from the hosts that have them, without a checkpoint."""
        if state is None:
            return
        rank = self._topology.rank
        there = {}
        for host, num_bytes in needed.items():
            if host != hosts[rank]:
                senders = [sender for sender, its in enumerate(hosts) if its == host]
                there[self._ports[senders[rank % len(senders)]]] = num_bytes
        self._copies.fill(state.places.values(), needed.get(hosts[rank], 0), there)

    def _load(self, name: str, state: State, folder: Path, hosts: Sequence[int]) -> Figures:
        options: dict[str, Any] = {"tiers": [tier_of(self._hosts[hosts[state.topology.rank]])]}
        if name == STORE:
            options = {"strategy": made(self._cfg["strategy"], read_at=slow_reads(self._bucket))}
        loading = coordinator_of(self._cfg, state, output_dir=folder, keep_last=None, **options)
        try:
            state.scramble()
            seconds = timed(loading.load_checkpoint, state.topology, state.group)
            report = loading.last_load
        finally:
            go(loading)
        assert report is not None
        digest = state.digest()
        with state.topology.phase("compare"):
            if digest != self._digest:
                raise CorruptCheckpointError(f"{name}: what was loaded is not what was saved")
        here, there = (report.requests.get(kind, (0, 0))[1] for kind in (HERE, THERE))
        of_storage = report.bytes_read if name == STORE else sum(n for kind, (_, n) in report.requests.items() if kind not in (HERE, THERE))
        return {"load_s": seconds, "here_bytes": here, "there_bytes": there, "storage_bytes": of_storage}


def compared(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return `ratios` of medians: load / plain copies, `copy_s`, and load from storage / load, `store`."""
    medians = result["medians"]
    stored = medians.get(STORE, {}).get("load_s")
    ratios: dict[str, dict[str, float]] = {name: {} for name in medians}
    for name, row in medians.items():
        if "copy_s" in row:
            ratios[name]["copy_s"] = row["load_s"] / row["copy_s"]
        if stored is not None and name != STORE:
            ratios[name]["store"] = stored / row["load_s"]
    return {"ratios": ratios}


def _title(result: Mapping[str, Any]) -> str:
    return f"{described(result)} of {result['hosts']} hosts, storage of {result['store_mib_s']} MiB/s"


def _line(figures: Figures) -> str:
    plain = f", memcpy and sockets {figures['copy_s']:.3f} s" if "copy_s" in figures else ""
    return f"load {figures['load_s']:.3f} s{plain}"


MEASUREMENT = harness.Measurement(
    {"workload": str, "repeats": int, "contenders": list[str], "hosts": int, "store_mib_s": int, "memory": str, "plot": bool | None},
    benchmark,
    _title,
    COLUMNS,
    compare=compared,
    contenders={
        "all ranks restarted": [RESTARTED],
        "from storage": [STORE],
        "one host lost": [name for name, case in CASES.items() if case.is_host_lost],
    },
    check=_check,
    scratch=True,
)
