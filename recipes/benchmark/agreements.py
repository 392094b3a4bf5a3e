"""measure=ranks: the cost of an agreement, by the number of ranks: measured, and reckoned from measured parts.

Measured are ranks that are threads of a few processes. They share the processors of one machine, where ranks of a job have their own. So
seconds on many ranks are an upper bound; requests and bytes are exact. Reckoned is a job whose ranks have a processor each, eight to a
host: the machines of `ckpt.ranks.agreement` run, and each request takes what it takes here, one after the other in the store's thread.
"""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from torch.distributed import PrefixStore

from ckpt.ranks import store_client
from ckpt.ranks.addresses import LOOPBACK
from ckpt.ranks.stores import reach, serve
from ckpt.ranks.topology import Topology
from recipes.benchmark import harness
from recipes.benchmark.harness import Figures
from recipes.benchmark.reckoned_agreements import (
    LETTER_BYTES,
    PER_HOST,
    TIMEOUT_S,
    bytes_for_the_lead,
    reckon,
    reckon_saves,
    request_costs,
)
from recipes.benchmark.tables import Rows, rows_of
from recipes.support.local_ranks import start_forkserver

COLUMNS = {"a phase, s": "phase_s", "requests a rank": "requests", "bytes": "bytes", "bytes / (ranks x payload)": "bytes/least_bytes"}
DIGITS = 5


def benchmark(cfg: dict[str, Any], topology: Topology) -> Figures:
    """Measure every number of ranks in turn, round after round, and reckon the others."""
    keys = cfg["benchmark"]
    start_forkserver([__name__])
    names = {f"{num:,}": num for num in keys["ranks"]}
    rounds = harness.interleaved(names, keys["repeats"], lambda name, _: _measured(names[name], keys), topology)
    num_bytes = keys["payload_bytes"]
    costs, costs_of_saves = request_costs(num_bytes * PER_HOST), request_costs(LETTER_BYTES)
    reckoned = {
        f"{num:,}": {
            **reckon(num, bytes_for_the_lead(num_bytes), costs),
            "least_bytes": num * num_bytes,
            **reckon_saves(num, costs_of_saves),
        }
        for num in keys["reckoned"]
    }
    return {"payload_bytes": num_bytes, "rounds": rounds, "reckoned": reckoned, "costs": costs}


def _tables(result: Mapping[str, Any]) -> dict[str, Rows]:
    columns = COLUMNS | {"a later save, s": "steady_save_s", "a first save, s": "first_save_s"}
    return {f"{_title(result)}, reckoned; agreements of a save": rows_of({"medians": result["reckoned"]}, columns, DIGITS)}


def _title(result: Mapping[str, Any]) -> str:
    return f"a phase with {result['payload_bytes']:,} bytes of each rank for the lead"


# Measured


def _measured(num_ranks: int, keys: Mapping[str, Any]) -> Figures:
    """Return the figures of one phase: the seconds of the slowest rank, and what all ranks ask of the store."""
    server = serve(LOOPBACK, timeout_s=TIMEOUT_S)
    processes = min(keys["processes"], num_ranks)
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(processes, context) as pool:
        shares = [range(first, num_ranks, processes) for first in range(processes)]
        jobs = [pool.submit(_phases, server.port, share, num_ranks, keys["phases"], keys["payload_bytes"]) for share in shares]
        found = [job.result() for job in jobs]
    count: Counter[str] = sum((counted for _, counted in found), Counter())
    return {
        "phase_s": max(seconds for seconds, _ in found) / keys["phases"],
        "requests": count["requests"] / keys["phases"] / num_ranks,
        "bytes": count["bytes"] / keys["phases"],
        "least_bytes": num_ranks * keys["payload_bytes"],
    }


def _phases(port: int, ranks: Sequence[int], num_ranks: int, num_phases: int, num_bytes: int) -> tuple[float, Counter[str]]:
    """Let these ranks, threads of this process, go through phases; return the seconds of the slowest, and their requests."""
    count, lock = Counter[str](), threading.Lock()
    store = reach(LOOPBACK, port, timeout_s=TIMEOUT_S)
    ready = threading.Barrier(len(ranks), timeout=TIMEOUT_S)

    def run(rank: int) -> tuple[float, Counter[str]]:
        with Topology.join(PrefixStore("job", store), rank, num_ranks, timeout_s=TIMEOUT_S, host=f"host-{rank // PER_HOST}") as topology:
            with topology.phase("begin"):
                ready.wait()
            if rank == ranks[0]:
                with lock:
                    count.clear()
            began = time.perf_counter()
            for _ in range(num_phases):
                with topology.operation("benchmark"), topology.phase("measured") as phase:
                    phase.to_lead = "x" * num_bytes
            ended, counted = time.perf_counter(), Counter(count)
            ready.wait()
        return ended - began, counted

    with counting(count, lock), ThreadPoolExecutor(len(ranks)) as threads:
        found = list(threads.map(run, ranks))
    return max(seconds for seconds, _ in found), found[0][1]


@contextmanager
def counting(count: Counter[str], lock: threading.Lock) -> Iterator[None]:
    """Count the requests to stores, and their bytes both ways, inside the block."""
    real = store_client._Wire.call

    def call(wire: Any, method: Callable[..., Any], *args: Any) -> Any:
        got = real(wire, method, *args)
        with lock:
            count["requests"] += 1
            count["bytes"] += sum(map(_size, (*args, got)))
        return got

    store_client._Wire.call = call  # type: ignore[method-assign]
    try:
        yield
    finally:
        store_client._Wire.call = real  # type: ignore[method-assign]


def _size(value: Any) -> int:
    if isinstance(value, list):
        return sum(map(_size, value))
    return len(value) if isinstance(value, str | bytes) else 0


MEASUREMENT = harness.Measurement(
    {**dict.fromkeys(("ranks", "reckoned"), list[int]), **dict.fromkeys(("processes", "phases", "repeats", "payload_bytes"), int)},
    benchmark,
    _title,
    COLUMNS,
    tables=_tables,
    check_run=harness.checked_folder,
    digits=DIGITS,
)
