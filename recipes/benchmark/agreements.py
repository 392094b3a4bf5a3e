"""`python -m recipes.benchmark.ranks`: the cost of an agreement, by the number of ranks: measured, and reckoned from measured parts.

Measured are ranks that are threads of a few processes. They share the processors of one machine, where ranks of a job have their own. So
seconds on many ranks are an upper bound; requests and bytes are exact. Reckoned is a job whose ranks have a processor each, eight to a
host: the machines of `ckpt.ranks.agreement` run, and each request takes what it takes here, one after the other in the store's thread.
"""

from __future__ import annotations

import heapq
import multiprocessing
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from torch.distributed import PrefixStore

from ckpt.errors import ConfigurationError
from ckpt.ranks import store_client
from ckpt.ranks.absence import PhaseIndex
from ckpt.ranks.agreement import Agreement, Conclude, Decided, Do, Send, Settle
from ckpt.ranks.outcomes import Answer, PhaseOutcome, concluded
from ckpt.ranks.store_client import StoreClient
from ckpt.ranks.stores import reach, serve
from ckpt.ranks.topology import Topology
from recipes.benchmark.harness import Figures, machine_facts
from recipes.benchmark.tables import print_table, rounds_text, summarized
from recipes.support.local_ranks import start_forkserver

LOOPBACK = "127.0.0.1"
PER_HOST = 8
_TIMEOUT_S = 120.0


@dataclass
class RanksBenchmarkKeys:
    """The keys of the command; their defaults are in conf/benchmark_ranks.yaml."""

    ranks: list[int]
    reckoned: list[int]
    processes: int
    phases: int
    rounds: int
    payload_bytes: int
    json: bool


def keys_of(cfg: DictConfig) -> RanksBenchmarkKeys:
    """Return the config, its types checked.

    Raises:
        ConfigurationError: a number is less than 1.
    """
    keys = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(RanksBenchmarkKeys), cfg))
    assert isinstance(keys, RanksBenchmarkKeys)
    numbers = {"processes": keys.processes, "phases": keys.phases, "rounds": keys.rounds, "payload_bytes": keys.payload_bytes}
    numbers |= {"ranks": min(keys.ranks, default=1), "reckoned": min(keys.reckoned, default=1)}
    if wrong := [f"{name}={number}" for name, number in numbers.items() if number < 1]:
        raise ConfigurationError(f"{', '.join(wrong)}: expected at least 1")
    return keys


def benchmark(keys: RanksBenchmarkKeys) -> Figures:
    """Measure every number of ranks in turn, round after round, and reckon the others."""
    start_forkserver([__name__])
    measured: dict[str, list[Figures]] = {f"{num:,}": [] for num in keys.ranks}
    for _ in range(keys.rounds):
        for num in keys.ranks:
            measured[f"{num:,}"].append(_measured(num, keys))
    costs = request_costs(keys.payload_bytes * PER_HOST)
    reckoned = {f"{num:,}": [reckon(num, keys.payload_bytes, costs)] for num in keys.reckoned}
    return {
        "payload_bytes": keys.payload_bytes,
        "rounds": measured,
        **summarized(measured),
        "reckoned": {name: rows[0] for name, rows in reckoned.items()},
        "costs": costs,
        "machine": machine_facts(Path.cwd()),
    }


def show(result: Mapping[str, Any]) -> None:
    """Print a table of the measured ranks, and one of the reckoned."""
    columns = {
        "phase, ms": lambda row: f"{1e3 * row['phase_s']:.2f}",
        "requests a rank": lambda row: f"{row['requests']:.1f}",
        "MB": lambda row: f"{row['bytes'] / 1e6:.3f}",
        "MB / (ranks x payload)": lambda row: f"{row['bytes'] / row['least_bytes']:.2f}",
    }
    rounds = rounds_text(max(map(len, result["rounds"].values()), default=1))
    for title, rows in ((f"measured, {rounds}", result["medians"]), ("reckoned", result["reckoned"])):
        if rows:
            cells = [(heading, *map(cell, rows.values())) for heading, cell in columns.items()]
            what = f"a phase with {result['payload_bytes']:,} bytes of each rank for the lead"
            print_table(f"{what}, {title}", ["", *(f"{name} ranks" for name in rows)], cells)


# Measured


def _measured(num_ranks: int, keys: RanksBenchmarkKeys) -> Figures:
    """Return the figures of one phase: the seconds of the slowest rank, and what all ranks ask of the store."""
    server = serve(LOOPBACK, timeout_s=_TIMEOUT_S)
    processes = min(keys.processes, num_ranks)
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(processes, context) as pool:
        shares = [range(first, num_ranks, processes) for first in range(processes)]
        jobs = [pool.submit(_phases, server.port, share, num_ranks, keys.phases, keys.payload_bytes) for share in shares]
        found = [job.result() for job in jobs]
    count: Counter[str] = sum((counted for _, counted in found), Counter())
    return {
        "phase_s": max(seconds for seconds, _ in found) / keys.phases,
        "requests": count["requests"] / keys.phases / num_ranks,
        "bytes": count["bytes"] / keys.phases,
        "least_bytes": num_ranks * keys.payload_bytes,
    }


def _phases(port: int, ranks: Sequence[int], num_ranks: int, num_phases: int, num_bytes: int) -> tuple[float, Counter[str]]:
    """Let these ranks, threads of this process, go through phases; return the seconds of the slowest, and their requests."""
    count, lock = Counter[str](), threading.Lock()
    store = reach(LOOPBACK, port, timeout_s=_TIMEOUT_S)
    ready = threading.Barrier(len(ranks), timeout=_TIMEOUT_S)
    seconds: dict[int, float] = {}

    def run(rank: int) -> None:
        topology = Topology.join(PrefixStore("job", store), rank, num_ranks, timeout_s=_TIMEOUT_S, host=f"host-{rank // PER_HOST}")
        with topology:
            with topology.phase("begin"):
                ready.wait()
            if rank == ranks[0]:
                with lock:
                    count.clear()
            began = time.perf_counter()
            for _ in range(num_phases):
                with topology.operation("benchmark"), topology.phase("measured") as phase:
                    phase.to_lead = "x" * num_bytes
            seconds[rank] = time.perf_counter() - began
            counted = Counter(count)
            ready.wait()
            if rank == ranks[0]:
                count.clear()
                count.update(counted)

    with counting(count, lock):
        threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return max(seconds.values()), count


class counting:  # used like a function
    """Count the requests to stores, and their bytes both ways, inside the block."""

    def __init__(self, count: Counter[str], lock: threading.Lock) -> None:
        self._count, self._lock = count, lock
        self._real = store_client._Wire.call

    def __enter__(self) -> None:
        def call(wire: Any, method: Callable[..., Any], *args: Any) -> Any:
            got = self._real(wire, method, *args)
            with self._lock:
                self._count["requests"] += 1
                self._count["bytes"] += sum(map(_size, (*args, got)))
            return got

        store_client._Wire.call = call  # type: ignore[method-assign]

    def __exit__(self, *_: object) -> None:
        store_client._Wire.call = self._real  # type: ignore[method-assign]


def _size(value: Any) -> int:
    if isinstance(value, list):
        return sum(map(_size, value))
    return len(value) if isinstance(value, str | bytes) else 0


# Reckoned


def request_costs(num_bytes: int) -> dict[str, float]:
    """Return the seconds of each kind of request here: of a client, alone with the store, and of the store itself, with several."""
    num, data = 2000, b"x" * num_bytes
    with ExitStack() as stack:
        server = serve(LOOPBACK, timeout_s=_TIMEOUT_S)
        stack.callback(lambda: server)
        client = StoreClient(server, writer=0)

        def each(call: Callable[[], object]) -> float:
            began = time.perf_counter()
            for _ in range(num):
                call()
            return (time.perf_counter() - began) / num

        costs = {"push": each(lambda: client.push("inbox", data)), "pop": each(lambda: client.pop("inbox"))}
        for _ in range(num):
            client.push("inbox", data)
        began = time.perf_counter()
        client.pop_waiting("inbox")
        costs["pop_waiting"] = (time.perf_counter() - began) / num
        costs |= {"set": each(lambda: client.put("key", b"x" * 150)), "first": each(lambda: client.put_first("first", b"x" * 100))}
        clients = [StoreClient(server, writer=1) for _ in range(3)]
        began = time.perf_counter()
        threads = [threading.Thread(target=lambda one=one: [one.put("key", b"x") for _ in range(num)]) for one in clients]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        costs |= {"store": (time.perf_counter() - began) / (num * len(clients)), "socket": _socket_s()}
    return costs


def reckon(num_ranks: int, num_bytes: int, costs: Mapping[str, float], per_host: int = PER_HOST) -> Figures:
    """Return the figures of one phase of a job whose ranks have a processor each, and one store, and enter the phase at once.

    Args:
        costs: of requests with the payloads of one host.
    """
    at, count = PhaseIndex(0, 0), Counter[str]()
    machines = [Agreement(rank, num_ranks, 300.0) for rank in range(num_ranks)]
    store_free_s = 0.0

    def request(now_s: float, num: int, kind: str) -> float:
        """A request; return when it is answered, or, of a push, sent."""
        nonlocal store_free_s
        count["requests"] += 1
        count["bytes"] += num
        store_free_s = max(store_free_s, now_s) + costs["store"]
        return now_s + costs[kind] if kind == "push" else max(store_free_s, now_s + costs[kind])

    verdict = PhaseOutcome("benchmark", "measured", to_lead=b'"' + b"x" * num_bytes + b'"')
    arrivals: list[tuple[float, int, list[Send]]] = []
    for hub in range(0, num_ranks, per_host):
        sent: list[Send] = []
        for machine in machines[hub : hub + per_host]:
            sent += [do for do in machine.vote(at, verdict) if isinstance(do, Send)]  # of the lead: none
        now_s = max(request(0.0, 170, "set") for _ in range(min(per_host, num_ranks - hub))) + costs["socket"]
        if hub:
            now_s = request(now_s, sum(len(one.message[2]) + 40 for one in sent), "push")
        heapq.heappush(arrivals, (now_s, hub, sent))
    lead_s, dos = 0.0, list[Do]()
    while arrivals:
        there_s, hub, sent = heapq.heappop(arrivals)
        lead_s = max(lead_s, there_s)
        if hub:
            lead_s = request(lead_s, sum(len(one.message[2]) + 40 for one in sent), "pop_waiting")
        began = time.perf_counter()
        for one in sent:
            dos += machines[0].hear(one.message)
        lead_s += time.perf_counter() - began
    ends_s = lead_s
    while dos:
        began = time.perf_counter()
        do = dos.pop(0)
        match do:
            case Conclude():
                dos += machines[0].concluded(at, concluded(do.verdicts, lambda verdicts: Answer(b'"%d"' % len(verdicts))))
                lead_s += time.perf_counter() - began
            case Settle():
                lead_s = request(lead_s, len(do.result), "first")
                dos += machines[0].truth(at, do.result)
            case Send():
                told = do.message[1]
                for hub in sorted({rank - rank % per_host for rank in do.to}):
                    if hub:
                        lead_s = request(lead_s, len(told) + 40 + 6 * per_host, "push")
                        ends_s = max(ends_s, request(lead_s, len(told) + 40 + 6 * per_host, "pop"))
                for rank in do.to:
                    (decided,) = machines[rank].hear(do.message)
                    assert isinstance(decided, Decided)
                ends_s += costs["socket"]
    return {
        "phase_s": max(ends_s, lead_s),
        "requests": count["requests"] / num_ranks,
        "bytes": count["bytes"],
        "least_bytes": num_ranks * num_bytes,
    }


def _socket_s() -> float:
    """Seconds of a letter between two threads, one after the other."""
    one, other = socket.socketpair()
    with one, other:
        thread = threading.Thread(target=lambda: [other.send(other.recv(1)) for _ in range(1000)])
        thread.start()
        began = time.perf_counter()
        for _ in range(1000):
            one.send(b"x")
            one.recv(1)
        thread.join()
        return (time.perf_counter() - began) / 2000
