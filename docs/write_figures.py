"""Write the tables of docs/figures.md from the results in docs/figures: python docs/write_figures.py

A result is the JSON file of a benchmark, under the name of its table, which stands between `<!-- figures: NAME -->` and
`<!-- end of figures -->`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # run by path, from anywhere

from recipes.benchmark import background_contenders, contenders, update_contenders
from recipes.benchmark.tables import rounds_text, with_range

PAGE = Path(__file__).with_name("figures.md")
RESULTS = Path(__file__).with_name("figures")

_PLACE = re.compile(r"(<!-- figures: ([\w-]+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)
_SAVES_AND_LOADS = {
    "save s": "save_s",
    "load s, cold": "load_cold_s",
    "load s, warm": "load_warm_s",
    "save / load peak MiB": "save_peak_mib load_peak_mib",
    "read / needed": "bytes_read bytes_needed",
}
_BACKGROUND = {
    "first stall, s": "first_stall_s",
    "later stall, s": "stall_s",
    "steps, times": "slow_down",
    "durable after s": "durable_s",
    "peak MiB": "peak_mib",
}
_UPDATES = {
    "offload s": "offload_s",
    "gather s": "gather_s",
    "transfer s": "transfer_s",
    "reload s": "reload_s",
    "whole update s": "update_s",
}

Result = Mapping[str, Any]


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
    wanted, ours = _kind_of(result)
    columns = {heading: names for heading, names in wanted.items() if _is_there(result, names)}
    head = ["", *columns]
    rows = [
        [f"**{name}**" if name in ours else name, *(_cell(result, name, names.split()) for names in columns.values())]
        for name in result["medians"]
    ]
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join([f"{_caption(result)}:", "", *(f"| {' | '.join(line)} |" for line in lines)])


def _kind_of(result: Result) -> tuple[Mapping[str, str], Collection[str]]:
    """Return the columns of a benchmark's table, and the contenders of it that are ours."""
    figures = {figure for row in result["medians"].values() for figure in row}
    if "stall_s" in figures:
        return _BACKGROUND, background_contenders.OURS
    return (_UPDATES, update_contenders.OURS) if "transfer_s" in figures else (_SAVES_AND_LOADS, contenders.OURS)


def _caption(result: Result) -> str:
    machine, rounds = result["machine"], max(map(len, result["rounds"].values()))
    size, ranks = result.get("state_bytes", result.get("bytes", 0)) / 1e9, result.get("ranks")
    loaded = result.get("load_ranks", ranks)
    if ranks is None:
        layout = f"{result['trainers']} trainers to {result['rollouts']} rollouts"
    else:
        layout = f"{result['layout']}, {ranks} ranks{f', loaded on {loaded}' if loaded != ranks else ''}"
    where = machine["accelerator"] or f"{machine['cores']} cores of {machine['processor']}"
    state = f"{result['tensors']:,} tensors of {size:.2f} GB, {layout}"
    return f"{state}; {rounds_text(rounds)}, {where}, {machine['file_system']}, torch {machine['torch']}, {machine['date']}"


def _is_there(result: Result, names: str) -> bool:
    return any(figure in row for row in result["medians"].values() for figure in names.split())


def _cell(result: Result, name: str, figures: Sequence[str]) -> str:
    medians = result["medians"][name]
    if not any(figure in medians for figure in figures):
        return ""
    if figures == ["bytes_read", "bytes_needed"]:
        return f"{medians['bytes_read'] / medians['bytes_needed']:.2f}"
    if len(figures) == 1 and figures[0].endswith("_s"):
        return with_range(name, figures[0], result)
    return " / ".join(_shown(figure, medians[figure]) if figure in medians else "-" for figure in figures)


def _shown(figure: str, value: float) -> str:
    return f"{value:.0f}" if figure.endswith("_mib") else f"{value:.2f}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(), committed_results()))
