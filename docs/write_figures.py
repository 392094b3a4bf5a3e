"""Write the tables of docs/figures.md from the results in docs/figures: python docs/write_figures.py

A result is the JSON file of a benchmark, under the name of its table, which stands between `<!-- figures: NAME -->` and
`<!-- end of figures -->`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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
_NOT_OURS = ("raw", "memcpy", "broadcast", "safetensors", "dcp", "none", "reference", "per-tensor")

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
    """Return what was measured, and on what, and the medians as a table; least and most of a figure where rounds differ by a tenth."""
    columns = {heading: names for heading, names in _columns_of(result).items() if _is_there(result, names)}
    head = ["", *columns]
    rows = [
        [_label(name, result), *(_cell(result, name, names.split()) for names in columns.values())]
        for name in result["medians"]
    ]
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join([f"{_caption(result)}:", "", *(f"| {' | '.join(line)} |" for line in lines)])


def _columns_of(result: Result) -> Mapping[str, str]:
    figures = {figure for row in result["medians"].values() for figure in row}
    if "stall_s" in figures:
        return _BACKGROUND
    return _UPDATES if "transfer_s" in figures else _SAVES_AND_LOADS


def _caption(result: Result) -> str:
    machine, rounds = result["machine"], max(map(len, result["rounds"].values()))
    size, ranks = result.get("state_bytes", result.get("bytes", 0)) / 1e9, result.get("ranks")
    loaded = result.get("load_ranks", ranks)
    if ranks is None:
        layout = f"{result['trainers']} trainers to {result['rollouts']} rollouts"
    else:
        layout = f"{result['layout']}, {ranks} ranks{f', loaded on {loaded}' if loaded != ranks else ''}"
    where = machine["accelerator"] or f"{machine['cores']} cores of {machine['processor']}"
    count = "1 round" if rounds == 1 else f"{rounds} rounds"
    state = f"{result['tensors']:,} tensors of {size:.2f} GB, {layout}"
    return f"{state}; medians of {count}, {where}, {machine['file_system']}, torch {machine['torch']}, {machine['date']}"


def _label(name: str, result: Result) -> str:
    is_ours = name.split("-")[0].split("/")[0] not in _NOT_OURS
    return f"**{name}**" if is_ours else name


def _is_there(result: Result, names: str) -> bool:
    return any(figure in row for row in result["medians"].values() for figure in names.split())


def _cell(result: Result, name: str, figures: Sequence[str]) -> str:
    medians, ranges = result["medians"][name], result["ranges"][name]
    if not any(figure in medians for figure in figures):
        return ""
    if figures == ["bytes_read", "bytes_needed"]:
        return f"{medians['bytes_read'] / medians['bytes_needed']:.2f}"
    if len(figures) > 1:
        return " / ".join(_shown(figure, medians[figure]) if figure in medians else "-" for figure in figures)
    (figure,) = figures
    least, most = ranges[figure]
    varies = figure.endswith("_s") and most - least > medians[figure] / 10
    spread = f" ({_shown(figure, least)}..{_shown(figure, most)})" if varies else ""
    return f"{_shown(figure, medians[figure])}{spread}"


def _shown(figure: str, value: float) -> str:
    return f"{value:.0f}" if figure.endswith("_mib") else f"{value:.2f}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(), committed_results()))
