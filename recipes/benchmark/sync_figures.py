"""What the rounds of weight updates come to: medians, speeds and ratios, and the tables that say so. Pure, but for printing."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from recipes.benchmark.comparison import print_table
from recipes.benchmark.sync_keys import DELTA, OURS, RAW, RAW_ALL, REFERENCE, TUNED, WITHOUT_DELTA

Seconds = Mapping[str, float]

PARTS = {"offload_s": "offload", "gather_s": "gather", "transfer_s": "transfer", "reload_s": "reload"}
UPDATE = "update_s"
SPEEDS = ("offload_s", "transfer_s", "reload_s", UPDATE)
"""The parts in which all bytes move."""


def compared(first: Mapping[str, Seconds], rounds: Mapping[str, Sequence[Seconds]], num_bytes: int) -> dict[str, Any]:
    """Return what is made of the rounds: `medians`, `ranges` and `gb_s` by contender and part, and `ratios`.

    Ratios are made within each round, and of these the median: a busy moment slows neighbours alike. By name of ours:

    - `of_raw`, `of_raw_all`: the bandwidth of our transfer over that of bare broadcasts; 1 is the limit.
    - `reference`, `tuned`: how many times as long as our whole update each takes.
    - `offload`: our median offload over the first one.
    - `full`: of who sends what has changed: how many times as long as its whole update one takes that sends everything.
    """
    medians = {name: _over(rows, statistics.median) for name, rows in rounds.items()}
    return {
        "medians": medians,
        "ranges": {name: _over(rows, lambda values: [min(values), max(values)]) for name, rows in rounds.items()},
        "gb_s": {
            name: {part: num_bytes / 1e9 / row[part] for part in SPEEDS if row.get(part)}
            for name, row in medians.items()
        },
        "ratios": {name: _ratios(name, first, rounds) for name in rounds if name in OURS},
    }


def line(seconds: Seconds) -> str:
    """Say in a line how long one update took."""
    parts = [f"{heading} {seconds[part]:.3f}" for part, heading in PARTS.items() if part in seconds]
    return f"update {seconds[UPDATE]:.3f} s ({', '.join(parts)})"


def show(result: Mapping[str, Any]) -> None:
    """Print the figures and the ratios as tables."""
    print_table(_figures(result))
    if result["ratios"]:
        print_table(_ratio_table(result["ratios"]))


def title_of(result: Mapping[str, Any]) -> str:
    rounds = "one round" if result["repeats"] == 1 else f"medians of {result['repeats']} rounds"
    ranks = f"{_count(result['trainers'], 'trainer')}, {_count(result['rollouts'], 'rollout')}"
    return (
        f"{result['bytes'] / 1e9:.2f} GB in {result['tensors']} tensors, buckets of {result['bucket_bytes'] / 2**20:.0f} MiB, {ranks}, "
        f"{result['device']} by {result['collectives']}, {result['machine']['cores']} cores, {result['frozen']:.0%} frozen, {rounds}; "
        "seconds (GB/s)"
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _figures(result: Mapping[str, Any]) -> Table:
    table = Table(title=title_of(result))
    table.add_column("", no_wrap=True)
    for heading in ("buckets", "sent", "first offload", *PARTS.values(), "whole update", "least .. most"):
        table.add_column(heading, justify="right")
    for name, medians in result["medians"].items():
        first = result["first"][name].get("offload_s")
        speeds = result["gb_s"][name]
        cells = [_cell(medians.get(part), speeds.get(part)) for part in (*PARTS, UPDATE)]
        least, most = result["ranges"][name][UPDATE]
        buckets, sent = result["buckets"][name], result["sent_bytes"][name]
        table.add_row(
            name,
            "" if buckets is None else str(buckets),
            "" if sent is None else f"{sent / result['bytes']:.0%}",
            _cell(first, None),
            *cells,
            f"{least:.2f} .. {most:.2f}",
        )
    return table


def _cell(seconds: float | None, speed: float | None) -> str:
    if seconds is None:
        return ""
    return f"{seconds:.3f}" + ("" if speed is None else f" ({speed:.2f})")


_RATIOS = {
    "of_raw": "transfer GB/s\n/ raw",
    "of_raw_all": "transfer GB/s\n/ raw-all",
    "offload": "later offloads\n/ first",
    "reference": "reference\n/ ours",
    "tuned": "reference/tuned\n/ ours",
    "full": "everything\n/ changes",
}


def _ratio_table(ratios: Mapping[str, Seconds]) -> Table:
    table = Table(title="medians of the rounds' ratios")
    table.add_column("ours", no_wrap=True)
    for heading in _RATIOS.values():
        table.add_column(heading, justify="right", no_wrap=True)
    for name, of in ratios.items():
        table.add_row(name, *(f"{of[ratio]:.2f}" if ratio in of else "" for ratio in _RATIOS))
    return table


def _ratios(name: str, first: Mapping[str, Seconds], rounds: Mapping[str, Sequence[Seconds]]) -> dict[str, float]:
    found = {}
    for ratio, other, part in (
        ("of_raw", RAW, "transfer_s"),
        ("of_raw_all", RAW_ALL, "transfer_s"),
        ("reference", REFERENCE, UPDATE),
        ("tuned", TUNED, UPDATE),
        ("full", WITHOUT_DELTA, UPDATE),
    ):
        if other in rounds and (ratio != "full" or name == DELTA):
            pairs = zip(rounds[other], rounds[name], strict=True)
            found[ratio] = statistics.median(theirs[part] / ours[part] for theirs, ours in pairs)
    found["offload"] = statistics.median(row["offload_s"] for row in rounds[name]) / first[name]["offload_s"]
    return found


def _over(rows: Sequence[Seconds], make: Any) -> dict[str, Any]:
    return {part: make([row[part] for row in rows]) for part in rows[0]}
