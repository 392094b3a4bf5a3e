"""What agreements cost on thousands of ranks, reckoned: the machines of `ckpt.ranks.agreement` run, and a request takes what it takes here.

Each rank has a processor of its own, and all enter a phase at once. The store's one thread answers one request after the other.
"""

from __future__ import annotations

import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from ckpt.ranks.addresses import LOOPBACK
from ckpt.ranks.agreement import Agreement, Conclude, Decided, Do, PhaseIndex, Send, Settle, concluded
from ckpt.ranks.heartbeat import place_every_s
from ckpt.ranks.merging import alike, alike_by_name, first
from ckpt.ranks.store_client import StoreClient
from ckpt.ranks.stores import serve
from ckpt.ranks.topology import Phase
from ckpt.saving.prepared_save import Written
from ckpt.saving.writing import WriteResult
from recipes.benchmark.harness import Figures

PER_HOST = 8
LETTER_BYTES = 4096
"""What the ranks of one host say together in most phases of a save is no longer."""
TIMEOUT_S = 120.0

_TABLE_BYTES = 190
"""Digests of the pieces of one rank's table of addresses, with 10^12 parameters on 10,240 ranks (measure=plan)."""
_PIECES_BYTES = 800_000
"""All distinct pieces of the tables of this state."""
_PACKED = 10
"""By which long results shrink in the store: these digests to a fifteenth, these pieces to a tenth (zlib)."""
_DIGEST = "9e3779b97f4a7c159e3779b97f4a7c15"


def request_costs(num_bytes: int) -> dict[str, float]:
    """Return the seconds of each kind of request here: of a client, alone with the store, and of the store itself, with several."""
    num, data = 2000, b"x" * num_bytes
    server = serve(LOOPBACK, timeout_s=TIMEOUT_S)
    client = StoreClient(server, writer=0)

    def each(call: Callable[[], object], times: int = num) -> float:
        began = time.perf_counter()
        for _ in range(times):
            call()
        return (time.perf_counter() - began) / times

    costs = {"push": each(lambda: client.push("inbox", data)), "pop": each(lambda: client.pop("inbox"))}
    for _ in range(num):
        client.push("inbox", data)
    costs["pop_waiting"] = each(lambda: client.pop_waiting("inbox"), 1) / num
    costs |= {"set": each(lambda: client.put("key", b"x" * 150)), "first": each(lambda: client.put_first("first", b"x" * 100))}
    clients = [StoreClient(server, writer=1) for _ in range(3)]
    with ThreadPoolExecutor(len(clients)) as pool:
        work = partial(pool.map, lambda own: [own.put("key", b"x") for _ in range(num)], clients)
        costs |= {"store": each(lambda: [*work()], 1) / (num * len(clients)), "socket": _socket_s()}
    client.put("long", random.Random(0).randbytes(_PIECES_BYTES), compress=False)
    costs["byte"] = each(lambda: client.peek("long"), 50) / _PIECES_BYTES
    return costs


def reckon(
    num_ranks: int,
    say: Callable[[Phase, int], None],
    costs: Mapping[str, float],
    *,
    answer_bytes: int = 0,
    places: bool = True,
) -> Figures:
    """Return the figures of one phase of a job whose ranks have a processor each, and one store, and enter the phase at once.

    Args:
        say: sets what a rank says in the phase.
        costs: of requests with the payloads of one host.
        answer_bytes: that the lead has for all; long ones are read from the store once by each host.
        places: each rank publishes where it is.
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

    def read(now_s: float) -> float:
        """A long result, which one host reads, and its ranks after it."""
        nonlocal store_free_s
        seconds = answer_bytes * costs["byte"]
        store_free_s = request(now_s, answer_bytes, "pop") + seconds
        return store_free_s + PER_HOST * seconds

    phases = [Phase("measured") for _ in machines]
    for rank, phase in enumerate(phases):
        say(phase, rank)
    verdicts = [phase.verdict("benchmark") for phase in phases]
    arrivals: list[tuple[float, int, list[Send]]] = []
    for hub in range(0, num_ranks, PER_HOST):
        sent: list[Send] = []
        for machine in machines[hub : hub + PER_HOST]:
            sent += [do for do in machine.vote(at, verdicts[machine.rank]) if isinstance(do, Send)]  # of the lead: none
        published = [request(0.0, 170, "set") for _ in range(min(PER_HOST, num_ranks - hub) if places else 0)]
        now_s = max(published, default=0.0) + costs["socket"]
        if hub:
            now_s = request(now_s, sum(len(letter.message[2]) + 40 for letter in sent), "push")
        arrivals.append((now_s, hub, sent))
    lead_s, dos = 0.0, list[Do]()
    for there_s, hub, sent in sorted(arrivals):
        lead_s = max(lead_s, there_s)
        if hub:
            lead_s = request(lead_s, sum(len(letter.message[2]) + 40 for letter in sent), "pop_waiting")
        began = time.perf_counter()
        for letter in sent:
            dos += machines[0].hear(letter.message)
        lead_s += time.perf_counter() - began
    ends_s = lead_s
    while dos:
        began = time.perf_counter()
        do = dos.pop(0)
        match do:
            case Conclude():
                dos += machines[0].concluded(at, concluded(do.verdicts, phases[0].conclude))
                lead_s += time.perf_counter() - began
            case Settle():
                lead_s = request(lead_s, len(do.result), "first")
                dos += machines[0].truth(at, do.result)
            case Send():
                result = do.message[1]
                for hub in sorted({rank - rank % PER_HOST for rank in do.to}):
                    if hub:
                        lead_s = request(lead_s, len(result) + 40 + 6 * PER_HOST, "push")
                        there_s = request(lead_s, len(result) + 40 + 6 * PER_HOST, "pop")
                        if answer_bytes:
                            there_s = max(there_s, read(there_s))
                        ends_s = max(ends_s, there_s)
                for rank in do.to:
                    (decided,) = machines[rank].hear(do.message)
                    assert isinstance(decided, Decided)
                ends_s += costs["socket"]
    return {"phase_s": max(ends_s, lead_s), "requests": count["requests"] / num_ranks, "bytes": count["bytes"]}


def bytes_for_the_lead(num_bytes: int) -> Callable[[Phase, int], None]:
    """Return what a rank says that has so many bytes for the lead."""

    def say(phase: Phase, _rank: int) -> None:
        phase.to_lead = "x" * num_bytes

    return say


def reckon_saves(num_ranks: int, costs: Mapping[str, float]) -> Figures:
    """Return the seconds that a later save and a first save of a job spend on agreements: the entries of their phases, and these."""
    nothing, tables = (_say_nothing, 0), (bytes_for_the_lead(_TABLE_BYTES), _TABLE_BYTES * num_ranks // _PACKED)
    pieces = bytes_for_the_lead(_PIECES_BYTES // num_ranks), _PIECES_BYTES // _PACKED
    collect, first_collect, write = (_say_state, 0), (_say_state, 12 * num_ranks), (_say_written, 0)
    return {
        "steady_save_s": _save_s(num_ranks, [collect, nothing, write, nothing, nothing], costs),
        "first_save_s": _save_s(num_ranks, [*[nothing] * 3, first_collect, tables, pieces, *[nothing] * 3, write, nothing, nothing], costs),
    }


def _say_nothing(_phase: Phase, _rank: int) -> None:
    """As in a phase that only waits for all."""


def _say_state(phase: Phase, _rank: int) -> None:
    """As `ckpt.state.collect.Comparison.say` of a model, its optimizer, a schedule and a state of random numbers."""
    phase.to_lead = _DIGEST
    phase.merge = {
        "failed": first({}),
        "planned": alike(1),
        "digests": alike_by_name({f'["{key}", "names", 0]': _DIGEST for key in ("scheduler", "optimizer", "model")}),
        "merged": alike_by_name({f'["{key}", "{half}"]': 1 for key in ("model", "optimizer") for half in ("names", "plain")}),
    }


def _say_written(phase: Phase, rank: int) -> None:
    each = {"model": _DIGEST, "optimizer": _DIGEST}
    sizes = {"model": 200_000_000 + rank, "optimizer": 1_200_000_000 + rank}
    Written.say(WriteResult([20_000, _DIGEST], True, 1_400_000_000, 0, sizes, each, each, write_s=1.0 + rank), phase, rank)


_Said = tuple[Callable[[Phase, int], None], int]


def _save_s(num_ranks: int, phases: Sequence[_Said], costs: Mapping[str, float]) -> float:
    now_s, placed_s = 0.0, -float("inf")
    known: dict[tuple[_Said, bool], float] = {}
    for phase in [None, *phases, None]:  # the operation begins, and ends
        if places := now_s - placed_s >= place_every_s(num_ranks):
            placed_s = now_s
        if phase is None:
            now_s += num_ranks * costs["store"] if places else 0.0
            continue
        if (phase, places) not in known:
            known[phase, places] = reckon(num_ranks, phase[0], costs, answer_bytes=phase[1], places=places)["phase_s"]
        now_s += known[phase, places]
    return now_s


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
