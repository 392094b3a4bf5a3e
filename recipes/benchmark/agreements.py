"""`python -m recipes.benchmark.ranks`: the cost of an agreement, by the number of ranks: measured, and reckoned from measured parts.

Measured are ranks that are threads of a few processes. They share the processors of one machine, where ranks of a job have their own. So
seconds on many ranks are an upper bound; requests and bytes are exact. Reckoned is a job whose ranks have a processor each, eight to a
host: the machines of `ckpt.ranks.agreement` run, and each request takes what it takes here, one after the other in the store's thread.
"""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from torch.distributed import PrefixStore

from ckpt.errors import ConfigurationError
from ckpt.ranks import store_client
from ckpt.ranks.addresses import LOOPBACK
from ckpt.ranks.stores import reach, serve
from ckpt.ranks.topology import Topology
from recipes.benchmark.harness import EXTRA, Figures, has_matplotlib, machine_facts
from recipes.benchmark.reckoned_agreements import (
    LETTER_BYTES,
    PER_HOST,
    TIMEOUT_S,
    bytes_for_the_lead,
    reckon,
    reckon_saves,
    request_costs,
)
from recipes.benchmark.tables import print_table, rounds_text, summarized
from recipes.support.local_ranks import start_forkserver


@dataclass
class RanksBenchmarkKeys:
    """The keys of the command; their defaults are in conf/benchmark_ranks.yaml."""

    ranks: list[int]
    reckoned: list[int]
    processes: int
    phases: int
    rounds: int
    payload_bytes: int
    plot: str | None
    json: bool


def keys_of(cfg: DictConfig) -> RanksBenchmarkKeys:
    """Return the config, its types checked.

    Raises:
        ConfigurationError: a number is less than 1, or a plot is asked for and matplotlib is missing.
    """
    keys = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(RanksBenchmarkKeys), cfg))
    assert isinstance(keys, RanksBenchmarkKeys)
    numbers = {"processes": keys.processes, "phases": keys.phases, "rounds": keys.rounds, "payload_bytes": keys.payload_bytes}
    numbers |= {"ranks": min(keys.ranks, default=1), "reckoned": min(keys.reckoned, default=1)}
    if wrong := [f"{name}={number}" for name, number in numbers.items() if number < 1]:
        raise ConfigurationError(f"{', '.join(wrong)}: expected at least 1")
    if keys.plot is not None and not has_matplotlib():
        raise ConfigurationError(f"plot={keys.plot} needs the package matplotlib, which is not installed: {EXTRA}")
    return keys


def benchmark(keys: RanksBenchmarkKeys) -> Figures:
    """Measure every number of ranks in turn, round after round, and reckon the others."""
    start_forkserver([__name__])
    measured: dict[str, list[Figures]] = {f"{num:,}": [] for num in keys.ranks}
    for _ in range(keys.rounds):
        for num in keys.ranks:
            measured[f"{num:,}"].append(_measured(num, keys))
    costs, costs_of_saves = request_costs(keys.payload_bytes * PER_HOST), request_costs(LETTER_BYTES)
    reckoned = {
        f"{num:,}": {
            **reckon(num, bytes_for_the_lead(keys.payload_bytes), costs),
            "least_bytes": num * keys.payload_bytes,
            **reckon_saves(num, costs_of_saves),
        }
        for num in keys.reckoned
    }
    result = {
        "payload_bytes": keys.payload_bytes,
        "rounds": measured,
        **summarized(measured),
        "reckoned": reckoned,
        "costs": costs,
        "machine": machine_facts(Path.cwd()),
    }
    if keys.plot is not None:
        _draw(result, Path(keys.plot))
    return result


def show(result: Mapping[str, Any]) -> None:
    """Print a table of the measured ranks, and one of the reckoned."""
    columns = {
        "phase, ms": lambda row: f"{1e3 * row['phase_s']:.2f}",
        "requests a rank": lambda row: f"{row['requests']:.1f}",
        "MB": lambda row: f"{row['bytes'] / 1e6:.3f}",
        "MB / (ranks x payload)": lambda row: f"{row['bytes'] / row['least_bytes']:.2f}",
    }
    saves = {"a later save, s": lambda row: f"{row['steady_save_s']:.2f}", "a first save, s": lambda row: f"{row['first_save_s']:.2f}"}
    rounds = rounds_text(max(map(len, result["rounds"].values()), default=1))
    for title, rows, cells_of in (
        (f"measured, {rounds}", result["medians"], columns),
        ("reckoned; agreements of a save", result["reckoned"], columns | saves),
    ):
        if rows:
            cells = [(heading, *map(cell, rows.values())) for heading, cell in cells_of.items()]
            what = f"a phase with {result['payload_bytes']:,} bytes of each rank for the lead"
            print_table(f"{what}, {title}", ["", *(f"{name} ranks" for name in rows)], cells)


def _draw(result: Mapping[str, Any], path: Path) -> None:
    """Write seconds and bytes of a phase by the number of ranks, measured and reckoned, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # of the extra [benchmark]
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    FigureCanvasAgg(figure)
    kinds = {"measured, ranks share this machine": "medians", "reckoned, a processor for each": "reckoned"}
    for axes, column in zip(figure.subplots(1, 2), ("phase_s", "bytes"), strict=True):
        for label, rows in ((label, result[kind]) for label, kind in kinds.items()):
            axes.loglog([int(name.replace(",", "")) for name in rows], [row[column] for row in rows.values()], "o-", label=label)
        axes.set_title(f"{'seconds' if column == 'phase_s' else column} of a phase", fontsize=10)
        axes.set_xlabel("ranks")
        axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=130)


# Measured


def _measured(num_ranks: int, keys: RanksBenchmarkKeys) -> Figures:
    """Return the figures of one phase: the seconds of the slowest rank, and what all ranks ask of the store."""
    server = serve(LOOPBACK, timeout_s=TIMEOUT_S)
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
    store = reach(LOOPBACK, port, timeout_s=TIMEOUT_S)
    ready = threading.Barrier(len(ranks), timeout=TIMEOUT_S)
    seconds: dict[int, float] = {}

    def run(rank: int) -> None:
        topology = Topology.join(PrefixStore("job", store), rank, num_ranks, timeout_s=TIMEOUT_S, host=f"host-{rank // PER_HOST}")
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
