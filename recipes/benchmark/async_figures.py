"""What the steps of all ranks come to: how long training stood still, how much slower it went, and the tables. Pure, but for printing."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.table import Table

from recipes.benchmark.async_keys import DCP, OURS
from recipes.benchmark.comparison import print_table

Told = dict[str, Any]
"""What one rank saw of one save: `call_s`, `finish_s`, `durable_s`, `peak_mib`; `before_s` of the steps before it; and `beside`, for each
step beside it when it began and ended after the call, and how long it computed, reduced, waited and optimized."""

Figures = dict[str, Any]

COLUMNS = {"stall_s": "stall s", "slow_down": "steps, times", "durable_s": "durable s", "lost_s": "lost s"}
"""What is compared, and how it is headed."""

SECONDS = ("stall_s", "durable_s", "lost_s")


def figures_of(ranks: Sequence[Told]) -> Figures:
    """Return what one save cost, from what all ranks saw.

    - `stall_s`: of the rank that stood still longest: in the call, before an optimizer's step, and for the report at the end.
    - `slow_down`: how many times as long as the steps before it those took that ended before the save was durable on all ranks, the
      stall left out. A save that is durable before one has ended is held against the first; one that leaves no step to be
      disturbed has none.
    - `lost_s`: how much later training was where it was when the save was durable, all in all.
    """
    step_s = statistics.mean(seconds for told in ranks for seconds in told["before_s"])
    calls = [told["call_s"] for told in ranks]
    waits = [sum(wait_s for *_, wait_s, _ in told["beside"]) for told in ranks]
    finishes = [told["finish_s"] for told in ranks]
    num_steps = len(ranks[0]["beside"])
    figures: Figures = {
        "stall_s": max(map(sum, zip(calls, waits, finishes, strict=True))),
        "call_s": max(calls),
        "wait_s": max(waits),
        "finish_s": max(finishes),
        "lost_s": max(told["beside"][-1][1] for told in ranks) - num_steps * step_s + max(finishes),
        "step_s": step_s,
        "steps": num_steps,
        "peak_mib": max(told["peak_mib"] for told in ranks),
        "peak_mib_of_ranks": [told["peak_mib"] for told in ranks],
    }
    durables = [told["durable_s"] for told in ranks if told["durable_s"] is not None]
    if durables:
        figures["durable_s"] = max(durables)
    counted = _num_counted(ranks, figures.get("durable_s"))
    if counted:
        end = max(told["beside"][counted - 1][1] for told in ranks)
        stall = max(map(sum, zip(calls, waits, strict=True)))
        figures["slow_down"] = (end - stall) / (counted * step_s)
    return figures


def _num_counted(ranks: Sequence[Told], durable_s: float | None) -> int:
    """How many steps were beside the save from beginning to end; without a save, all that were to be.

    The last step is none of them: it began when all ranks knew already that the save was durable.
    """
    steps = list(zip(*(told["beside"][:-1] for told in ranks), strict=True))
    if durable_s is None:
        return len(steps)
    whole = sum(all(one[1] <= durable_s for one in of_ranks) for of_ranks in steps)
    return whole or min(1, len(steps))


def compared(rounds: Mapping[str, Sequence[Figures]]) -> dict[str, Any]:
    """Return what is made of the rounds: `medians` and `ranges` by contender and figure, and `ratios`: of each of ours to each of DCP's."""
    medians = {name: _over(rows, statistics.median) for name, rows in rounds.items()}
    return {
        "medians": medians,
        "ranges": {name: _over(rows, lambda values: [min(values), max(values)]) for name, rows in rounds.items()},
        "ratios": {
            name: {peer: _quotients(medians[name], medians[peer]) for peer in DCP if peer in medians}
            for name in medians
            if name in OURS
        },
    }


def line(figures: Figures) -> str:
    """Say in a line what one save cost."""
    slow_down = f", steps beside {figures['slow_down']:.2f} times as long" if "slow_down" in figures else ""
    durable = f", durable after {figures['durable_s']:.2f} s" if "durable_s" in figures else ""
    return f"stall {figures['stall_s']:.3f} s{slow_down}{durable}, {figures['lost_s']:.2f} s lost in all"


def show(result: Mapping[str, Any]) -> None:
    """Print the figures and the ratios as tables."""
    print_table(_figures(result))
    if any(result["ratios"].values()):
        print_table(_ratios(result["ratios"]))


def title_of(result: Mapping[str, Any]) -> str:
    rounds = len(next(iter(result["rounds"].values())))
    of = "one round" if rounds == 1 else f"medians of {rounds} rounds"
    caps = {"cores": result["writer_cores"], "MiB/s": result["writer_mib_s"]}
    cap = " and ".join(f"{value} {unit}" for unit, value in caps.items() if value is not None)
    return (
        f"{result['workload']}: {result['state_bytes'] / 1e9:.2f} GB in {result['tensors']:,} tensors, {result['layout']} on "
        f"{result['ranks']} ranks, {result['cores']} cores, {of}" + (f"; capped: {cap} for each rank" if cap else "")
    )


def _figures(result: Mapping[str, Any]) -> Table:
    table = Table(title=title_of(result) + " (least .. most)")
    table.add_column("", no_wrap=True)
    for heading in (COLUMNS["stall_s"], "call", "wait", *list(COLUMNS.values())[1:], "MiB", "GB"):
        table.add_column(heading, justify="right")
    for name, medians in result["medians"].items():
        ranges = result["ranges"][name]
        stall, *others = [_with_range(medians[c], *ranges[c]) if c in medians else "" for c in COLUMNS]
        parts = [f"{medians[c]:.3f}" for c in ("call_s", "wait_s")]
        sizes = [f"{medians['peak_mib']:.0f}", f"{medians['written_bytes'] / 1e9:.2f}"]
        table.add_row(name, stall, *parts, *others, *sizes)
    return table


def _with_range(median: float, least: float, most: float) -> str:
    return f"{median:.2f} ({least:.2f}..{most:.2f})"


def _ratios(ratios: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Table:
    table = Table(title=f"ours / theirs, of medians: {', '.join(COLUMNS[c] for c in SECONDS)}")
    table.add_column("ours", no_wrap=True)
    peers = next(iter(ratios.values()))
    for peer in peers:
        table.add_column(peer, justify="right", no_wrap=True)
    for name, of_peers in ratios.items():
        cells = ("  ".join(f"{of[c]:.2f}" if c in of else "-" for c in SECONDS) for of in of_peers.values())
        table.add_row(name, *cells)
    return table


def _over(rows: Sequence[Figures], make: Callable[[list[float]], Any]) -> dict[str, Any]:
    """Make one value of each figure that is a number in every round."""
    names = [name for name in rows[0] if all(isinstance(row.get(name), (int, float)) for row in rows)]
    return {name: make([row[name] for row in rows]) for name in names}


def _quotients(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    return {c: one[c] / other[c] for c in COLUMNS if c in one and other.get(c)}
