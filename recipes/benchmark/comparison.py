"""What the rounds come to: medians, least and most, and ratios; and the tables that say so. Pure, but for the printing."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

from recipes.benchmark.keys import LIMITS, PEERS, RAW, ours

SECONDS = {"save_s": "save s", "load_cold_s": "load s, cold", "load_warm_s": "load s, warm"}
MEMORY = {"save_peak_mib": "save peak MiB", "load_peak_mib": "load peak MiB"}
WIDTH = 150  # of a table that no terminal bounds

Medians = Mapping[str, Mapping[str, float]]


def compared(rounds: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Return what is made of the rounds, by contender and column.

    `medians`; `ranges`, the least and the most; and `ratios`, of medians: `peers` (how many times as long as ours each peer
    takes), `limits` (how many times as long as each limit ours takes), `best_raw` (the same, of the fastest raw way in each
    column) and `two_stage` (how many times as long as two-stage direct loading takes), each by the name of ours.
    """
    medians = {name: _over(rows, statistics.median) for name, rows in rounds.items()}
    return {
        "medians": medians,
        "ranges": {name: _over(rows, lambda values: [min(values), max(values)]) for name, rows in rounds.items()},
        "ratios": {
            "peers": _by_ours(medians, PEERS, lambda own, peer: peer / own),
            "limits": _by_ours(medians, LIMITS, lambda own, limit: own / limit),
            "best_raw": {name: _quotients(medians[name], _best_raw(medians)) for name in medians if ours(name)},
            "two_stage": _direct_over_two_stage(medians),
        },
    }


def show(result: Mapping[str, Any]) -> None:
    """Print the figures and the ratios as tables."""
    console = wide_console()
    print_table(_figures(result), console)
    columns = {
        heading: of_ours for heading, of_ours in _ratio_columns(result["ratios"]).items() if any(of_ours.values())
    }
    if columns:
        print_table(_ratios(columns, [name for name in result["medians"] if ours(name)]), console)
    for name, reason in result["left_out"].items():
        console.print(f"left out: {name}: {reason}", highlight=False)


def wide_console() -> Console:
    """Return a console that is as wide as the terminal, or wide enough for a table where there is none."""
    return Console(width=None if sys.stdout.isatty() else WIDTH)


def print_table(table: Table, console: Console | None = None) -> None:
    """Print a table; where the console is too narrow, as several below each other, each with the first column.

    Args:
        console: None: that of `wide_console`.
    """
    console = console or wide_console()
    for part in parts_of(table, console.width):
        console.print(part)


def parts_of(table: Table, width: int) -> list[Table]:
    """A table of texts as tables that have so many of its columns as fit `width`, the first one in each."""
    texts = [[str(column.header), *map(str, column.cells)] for column in table.columns]
    first, *others = [max(cell_len(line) for text in column for line in text.split("\n")) + 3 for column in texts]
    groups: list[list[int]] = [[]]
    room = width - first - 1
    for number, needed in enumerate(others, 1):
        if groups[-1] and sum(others[at - 1] for at in groups[-1]) + needed > room:
            groups.append([])
        groups[-1].append(number)
    parts = []
    for group in groups:
        part = Table(title=table.title if not parts else None)
        for at in (0, *group):
            part.add_column(texts[at][0], justify=table.columns[at].justify, overflow="fold")
        for row in zip(*(texts[at][1:] for at in (0, *group)), strict=True):
            part.add_row(*row)
        parts.append(part)
    return parts


def title_of(result: Mapping[str, Any]) -> str:
    rounds = len(next(iter(result["rounds"].values())))
    of = "one round" if rounds == 1 else f"medians of {rounds} rounds"
    loaded = "" if result["load_ranks"] == result["ranks"] else f", loaded on {result['load_ranks']}"
    store = "" if result["store_mib_s"] is None else f", read through a store of {result['store_mib_s']:g} MiB/s"
    return (
        f"{result['workload']}: {result['state_bytes'] / 1e9:.2f} GB in {result['tensors']:,} tensors, {result['layout']} on "
        f"{result['ranks']} ranks{loaded}{store}, {result['cores']} cores, {of}"
    )


def _figures(result: Mapping[str, Any]) -> Table:
    table = Table(title=title_of(result) + " (least .. most); peak: of the rank that took most")
    seconds = [column for column in SECONDS if any(column in medians for medians in result["medians"].values())]
    table.add_column("", no_wrap=True)
    for heading in (*(SECONDS[column] for column in seconds), *MEMORY.values(), "read / needed"):
        table.add_column(heading, justify="right")
    for name, medians in result["medians"].items():
        ranges = result["ranges"][name]
        times = [_with_range(medians[c], *ranges[c]) if c in medians else "" for c in seconds]
        memory = [f"{medians[c]:.0f}" if c in medians else "" for c in MEMORY]
        read = f"{medians['bytes_read'] / medians['bytes_needed']:.2f}" if "bytes_read" in medians else ""
        table.add_row(name, *times, *memory, read)
    return table


def _with_range(median: float, least: float, most: float) -> str:
    return f"{median:.2f} ({least:.2f}..{most:.2f})"


def _ratio_columns(ratios: Mapping[str, Any]) -> dict[str, dict[str, Mapping[str, float]]]:
    """Return, by heading, the ratios of each of ours."""
    found: dict[str, dict[str, Mapping[str, float]]] = {}
    for name, peers in ratios["peers"].items():
        for peer, quotients in peers.items():
            found.setdefault(f"{peer} / ours", {})[name] = quotients
    found["direct / two-stage"] = {f"{name}/two-stage": quotients for name, quotients in ratios["two_stage"].items()}
    found["ours / best raw"] = dict(ratios["best_raw"])
    for name, limits in ratios["limits"].items():
        for limit in (limit for limit in limits if limit not in RAW):
            found.setdefault(f"ours / {limit}", {})[name] = limits[limit]
    return found


def _ratios(columns: Mapping[str, Mapping[str, Mapping[str, float]]], names: Sequence[str]) -> Table:
    table = Table(title="ratios of medians: save, load cold, load warm")
    table.add_column("ours", no_wrap=True)
    for heading in columns:
        table.add_column(heading.replace(" / ", " /\n"), justify="right", no_wrap=True)
    for name in names:
        table.add_row(name, *(_cell(of_ours.get(name, {})) for of_ours in columns.values()))
    return table


def _cell(quotients: Mapping[str, float]) -> str:
    """All there are, from the right: what has no figures of saves has them of loads, or of warm loads alone."""
    return "  ".join(f"{quotients[column]:.2f}" for column in SECONDS if column in quotients)


def _over(rows: Sequence[Mapping[str, Any]], make: Any) -> dict[str, Any]:
    """Make one value of each figure that is a number in every round."""
    names = [name for name, value in rows[0].items() if isinstance(value, (int, float))]
    return {name: make([row[name] for row in rows]) for name in names}


def _by_ours(medians: Medians, others: Sequence[str], quotient: Any) -> dict[str, dict[str, dict[str, float]]]:
    own = [name for name in medians if ours(name)]
    return {
        name: {
            other: {c: quotient(medians[name][c], medians[other][c]) for c in _common(medians[name], medians[other])}
            for other in others
            if other in medians
        }
        for name in own
    }


def _best_raw(medians: Medians) -> dict[str, float]:
    raw = [medians[name] for name in RAW if name in medians]
    return {c: min(one[c] for one in raw if c in one) for c in SECONDS if any(c in one for one in raw)}


def _direct_over_two_stage(medians: Medians) -> dict[str, dict[str, float]]:
    """Of loads: what a strategy does is done there."""
    pairs = {name: f"{name}/two-stage" for name in medians if f"{name}/two-stage" in medians}
    found = {name: _quotients(medians[name], medians[other]) for name, other in pairs.items()}
    return {name: {c: ratio for c, ratio in of.items() if c != "save_s"} for name, of in found.items()}


def _quotients(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    return {c: one[c] / other[c] for c in _common(one, other)}


def _common(one: Mapping[str, float], other: Mapping[str, float]) -> list[str]:
    return [c for c in SECONDS if c in one and c in other]
