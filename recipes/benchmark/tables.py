"""Figures of rounds, by contender and column: medians, ranges and ratios; their tables, and the plot. Pure, but for the printing."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ckpt.cli.tables import Listing, console, show

COLORS = ("#9aa0a6", "#c9792c", "#1f6f8b")
"""Of the machine's limits, of the peers, and of ours."""

Rows = Mapping[str, Mapping[str, str]]
"""Cells of a table by row and heading. A row may lack some."""


def summarized(rounds: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Return `medians` and `ranges` (least, most) by contender, of each figure that is a number in every round."""

    def each(make: Callable[[list[float]], Any]) -> dict[str, Any]:
        return {name: {figure: make(values) for figure, values in numbers(rows)} for name, rows in rounds.items()}

    return {"medians": each(statistics.median), "ranges": each(lambda values: [min(values), max(values)])}


def quotients(one: Mapping[str, float], other: Mapping[str, float], columns: Iterable[str]) -> dict[str, float]:
    """Return one / other of each column that both have, unless the divisor is 0."""
    return {column: one[column] / other[column] for column in columns if column in one and other.get(column)}


def rounds_of(result: Mapping[str, Any]) -> str:
    """Return the number of rounds, for a title."""
    count = max(map(len, result["rounds"].values()), default=1)
    return "one round" if count == 1 else f"medians of {count} rounds"


def rows_of(result: Mapping[str, Any], columns: Mapping[str, str], digits: int = 2) -> Rows:
    """Return a row for each contender: of seconds the median with least and most, such as `0.11 (0.10..0.13)`.

    Args:
        columns: heading -> figure, several with spaces between, or a quotient `one/other`; `<figure>_ratio` is that of `ratios`.
            A column that no row has is left out.
        digits: of seconds and ratios.
    """
    rows: dict[str, dict[str, str]] = {}
    for name, medians in result["medians"].items():
        figures = {**medians, **{f"{figure}_ratio": ratio for figure, ratio in result.get("ratios", {}).get(name, {}).items()}}
        ranges = result.get("ranges", {}).get(name, {})
        rows[name] = {heading: _cell(figures, ranges, wanted, digits) for heading, wanted in columns.items()}
    filled = [heading for heading in columns if any(row[heading] for row in rows.values())]
    return {name: {heading: row[heading] for heading in filled} for name, row in rows.items()}


def _cell(figures: Mapping[str, Any], ranges: Mapping[str, Sequence[float]], wanted: str, digits: int) -> str:
    one, _, other = wanted.partition("/")
    if other:
        return f"{figures[one] / figures[other]:.2f}" if one in figures else ""
    if wanted.endswith("_s") and wanted in ranges:
        least, most = ranges[wanted]
        return f"{figures[wanted]:.{digits}f} ({least:.{digits}f}..{most:.{digits}f})"
    names = wanted.split()
    cells = [_shown(figure, figures[figure], digits) if figure in figures else "-" for figure in names]
    return " / ".join(cells) if figures.keys() & set(names) else ""


def _shown(figure: str, value: float, digits: int) -> str:
    return f"{value:,.0f}" if figure.endswith(("_mib", "chunks", "bytes", "tables")) else f"{value:.{digits}f}"


def print_table(title: str, rows: Rows, *, turned: bool = False) -> None:
    """Print a table; where it is too wide for the console, as several below each other, each with the names of the rows.

    Args:
        turned: rows are columns, and headings are rows.
    """
    if turned:
        rows = {heading: {name: row.get(heading, "") for name, row in rows.items()} for heading in _headings(rows)}
    show(title)
    left = _headings(rows)
    while left:
        counts = range(len(left), 1, -1)
        count = next((count for count in counts if _listing(rows, left[:count]).table(console().width)), 1)
        show(_listing(rows, left[:count]))
        left = left[count:]


def _listing(rows: Rows, headings: Sequence[str]) -> Listing:
    listing = Listing("", *headings, right=range(1, len(headings) + 1))
    for name, row in rows.items():
        listing.add(name, *(row.get(heading, "") for heading in headings))
    return listing


def _headings(rows: Rows) -> list[str]:
    return list(dict.fromkeys(heading for row in rows.values() for heading in row))


def draw(
    result: Mapping[str, Any], path: Path, title: str, columns: Mapping[str, str], kinds: Mapping[str, Collection[str]]
) -> None:
    """Write bars of the medians, with least and most, as a PNG: a panel for each column. Needs matplotlib.

    Args:
        columns: heading of a panel -> its figure. One that no contender has is left out.
        kinds: label in the legend -> the contenders that are drawn in its color; in the order of `COLORS`.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # of the extra [benchmark]
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    columns = {heading: c for heading, c in columns.items() if any(c in row for row in result["medians"].values())}
    names = list(result["medians"])[::-1]  # the first one on top
    colors = dict(zip(kinds, COLORS, strict=True))
    color_of = {name: colors[kind] for kind, members in kinds.items() for name in members}
    figure = Figure(figsize=(2 + 3.4 * len(columns), 1.5 + 0.3 * len(names)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(columns), sharey=True, squeeze=False)[0]
    for axes, (heading, column) in zip(panels, columns.items(), strict=True):
        there = {place: name for place, name in enumerate(names) if column in result["medians"][name]}
        medians = np.array([result["medians"][name][column] for name in there.values()])
        around = np.abs(np.array([result["ranges"][name][column] for name in there.values()]).T - medians)
        drawn = [color_of[name] for name in there.values()]
        bars = axes.barh([*there], medians, xerr=around, color=drawn, ecolor="#333333", capsize=2, height=0.7)
        axes.bar_label(bars, fmt="%.2f", padding=4, fontsize=8)
        axes.set_title(heading, fontsize=10)
        axes.margins(x=0.14)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_yticks(range(len(names)), names)
    figure.suptitle("\n".join(textwrap.wrap(title, 42 * len(columns))), fontsize=9)
    legend = [Patch(color=color, label=label) for label, color in colors.items()]
    figure.legend(handles=legend, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    figure.savefig(path, dpi=130)


def numbers(rows: Sequence[Mapping[str, Any]]) -> Iterable[tuple[str, list[float]]]:
    """Yield (figure, its value in each round) of each figure that is a number in every round."""
    for name in rows[0]:
        if all(isinstance(row.get(name), (int, float)) for row in rows):
            yield name, [row[name] for row in rows]
