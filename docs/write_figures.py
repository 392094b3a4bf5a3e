"""Write the tables of docs/figures.md from the results in docs/figures: python docs/write_figures.py

A result is the JSON file of a benchmark, under the name of its table, which stands between `<!-- figures: NAME -->` and
`<!-- end of figures -->`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))  # run by path, from anywhere

from ckpt.cli.converting import DESTINATIONS
from ckpt.cli.tables import counted
from recipes.benchmark import (
    background_contenders,
    contenders,
    conversions,
    recoveries,
    update_contenders,
    validation_costs,
)
from recipes.benchmark.tables import rounds_of, rows_of

PAGE = Path(__file__).with_name("figures.md")
RESULTS = Path(__file__).with_name("figures")

Result = Mapping[str, Any]


class Kind(NamedTuple):
    """Table of the results of one benchmark.

    Attributes:
        columns: heading -> figure, as of `recipes.benchmark.tables.rows_of`. A column that no row has is left out.
        ours: names of contenders that are ours, each without its part behind a comma.
        digits: of seconds and ratios.
    """

    columns: Mapping[str, str]
    ours: Collection[str]
    digits: int = 2


_PLACE = re.compile(r"(<!-- figures: ([\w-]+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)
_SAVES_AND_LOADS = Kind(
    {
        "save s": "save_s",
        "load s, cold": "load_cold_s",
        "load s, warm": "load_warm_s",
        "save / load peak MiB": "save_peak_mib load_peak_mib",
        "read / needed": "bytes_read/bytes_needed",
        "megatron / ours: save, cold, warm": "save_s_ratio load_cold_s_ratio load_warm_s_ratio",
    },
    contenders.OURS,
)
_OTHERS = {  # by a figure that only this benchmark has
    "stall_s": Kind(
        {
            "first stall, s": "first_stall_s",
            "later stall, s": "stall_s",
            "steps, times": "slow_down",
            "durable after s": "durable_s",
            "steps with a save after each, times": "each_times",
            "stall of each s": "each_stall_s",
            "peak MiB": "peak_mib",
        },
        background_contenders.OURS,
    ),
    "here_bytes": Kind(recoveries.COLUMNS, ()),
    "transfer_s": Kind(
        {
            "offload s": "offload_s",
            "gather s": "gather_s",
            "transfer s": "transfer_s",
            "reload s": "reload_s",
            "whole update s": "update_s",
        },
        update_contenders.OURS,
    ),
    "convert_s": Kind(
        {"s": "convert_s", "speed, relative to cp": "convert_s_ratio", "peak MiB": "peak_mib"},
        {conversions.VERIFIED, *DESTINATIONS},
    ),
    "per_gb_s": Kind(
        {"s": "total_s", "s more than none": "more_s", "s per GB": "per_gb_s"},
        validation_costs.OURS,
        digits=3,
    ),
    "plan_s": Kind(
        {
            "chunks": "chunks",
            "first save, s": "total_s",
            "later saves, s": "cached_s",
            "peak MiB": "peak_mib",
            "bytes of the busiest / least busy writer, relative to the mean": "max_to_mean min_to_mean",
        },
        (),
        digits=3,
    ),
}


def page(text: str, results: Mapping[str, Result]) -> str:
    """Return the page with the tables of today.

    Raises:
        KeyError: a table has no result.
    """
    return _PLACE.sub(lambda found: f"{found[1]}{table_of(results[found[2]])}\n{found[3]}", text)


def committed_results() -> dict[str, Result]:
    """Return name -> result, of all files in docs/figures."""
    return {file.stem: json.loads(file.read_text()) for file in sorted(RESULTS.glob("*.json"))}


def table_of(result: Result) -> str:
    """Return what was measured, and on what, and the medians as a table, with least and most of the seconds."""
    known = {figure for figures in result["medians"].values() for figure in figures}
    kind = next((kind for figure, kind in _OTHERS.items() if figure in known), _SAVES_AND_LOADS)
    rows = rows_of(result, kind.columns, kind.digits)
    head = ["", *next(iter(rows.values()))]
    marked = [[f"**{name}**" if name.split(", ")[0] in kind.ours else name, *row.values()] for name, row in rows.items()]
    lines = [head, ["---"] * len(head), *marked]
    return "\n".join([f"{_caption(result)}:", "", *(f"| {' | '.join(line)} |" for line in lines)])


def _caption(result: Result) -> str:
    machine = result["machine"]
    size = result.get("state_bytes", result.get("bytes", 0)) / 1e9
    where = machine["accelerator"] or f"{machine['cores']} cores of {machine['processor']}"
    state = f"{result['tensors']:,} tensors of {size:,.2f} GB, {_layout(result)}"
    return f"{state}; {rounds_of(result)}, {where}, {machine['file_system']}, torch {machine['torch']}, {machine['date']}"


def _layout(result: Result) -> str:
    if "trainers" in result:
        return f"{counted(result['trainers'], 'trainer')} to {counted(result['rollouts'], 'rollout')}"
    ranks, store = result.get("ranks"), result.get("store_mib_s")
    parts = [result["layout"]]
    parts += [f"{ranks} ranks"] if ranks else []
    parts += [f"{result['hosts']} hosts"] if "hosts" in result else []
    parts += [f"loaded on {result['load_ranks']}"] if result.get("load_ranks", ranks) != ranks else []
    parts += [f"read at {store:g} MiB/s"] if store else []
    return ", ".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(), committed_results()))
