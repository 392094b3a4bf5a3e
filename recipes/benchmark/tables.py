"""Figures of rounds, by contender and column: medians, ranges and ratios; their tables, and the plot. Pure, but for the printing."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from rich.table import Table

from ckpt.cli.tables import console

COLORS = ("#1f6f8b", "#c9792c", "#9aa0a6")
"""Of ours, of the peers, and of the machine's limits."""


def summarized(rounds: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Return `medians` and `ranges` (least, most) by contender, of each figure that is a number in every round."""

    def each(make: Callable[[list[float]], Any]) -> dict[str, Any]:
        return {name: {figure: make(values) for figure, values in numbers(rows)} for name, rows in rounds.items()}

    return {"medians": each(statistics.median), "ranges": each(lambda values: [min(values), max(values)])}


def quotients(one: Mapping[str, float], other: Mapping[str, float], columns: Iterable[str]) -> dict[str, float]:
    """Return one / other of each column that both have, unless the divisor is 0."""
    return {column: one[column] / other[column] for column in columns if column in one and other.get(column)}


def with_range(name: str, column: str, result: Mapping[str, Any], digits: int = 2) -> str:
    """Return a cell such as `0.11 (0.10..0.13)`: the median, the least and the most; empty of a figure that is not there."""
    if column not in result["medians"][name]:
        return ""
    least, most = result["ranges"][name][column]
    return f"{result['medians'][name][column]:.{digits}f} ({least:.{digits}f}..{most:.{digits}f})"


def rounds_text(count: int) -> str:
    return "one round" if count == 1 else f"medians of {count} rounds"


def rounds_of(result: Mapping[str, Any]) -> str:
    """Return the number of rounds, for a title."""
    return rounds_text(max(map(len, result["rounds"].values()), default=1))


def cores_and_rounds(result: Mapping[str, Any]) -> str:
    return f"{result['machine']['cores']} cores, {rounds_of(result)}"


def rows_of(result: Mapping[str, Any], columns: Mapping[str, str], digits: int = 2) -> tuple[list[str], list[list[str]]]:
    """Return headings and rows, one for each contender: of seconds the median with least and most.

    Args:
        columns: heading -> figures, several with spaces between; `<figure>_ratio` is that of `ratios`. One that no row has is left out.
        digits: of seconds and ratios.
    """
    figures_of = {
        name: {**medians, **{f"{figure}_ratio": ratio for figure, ratio in result.get("ratios", {}).get(name, {}).items()}}
        for name, medians in result["medians"].items()
    }
    known = {figure for figures in figures_of.values() for figure in figures}
    wanted = {heading: names.split() for heading, names in columns.items() if known.intersection(names.split())}
    rows = [
        [name, *(_cell(result, name, column, figures, digits) for column in wanted.values())] for name, figures in figures_of.items()
    ]
    return ["", *wanted], rows


def _cell(result: Mapping[str, Any], name: str, wanted: Sequence[str], figures: Mapping[str, Any], digits: int) -> str:
    if not any(figure in figures for figure in wanted):
        return ""
    if wanted == ["bytes_read", "bytes_needed"]:
        return f"{figures['bytes_read'] / figures['bytes_needed']:.2f}"
    if len(wanted) == 1 and wanted[0].endswith("_s"):
        return with_range(name, wanted[0], result, digits)
    return " / ".join(_shown(figure, figures[figure], digits) if figure in figures else "-" for figure in wanted)


def _shown(figure: str, value: float, digits: int) -> str:
    return f"{value:,.0f}" if figure.endswith(("_mib", "chunks")) else f"{value:.{digits}f}"


def print_table(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table; on a narrow console as several below each other, each with the first column."""
    for part in tables_of(title, headings, rows, console().width):
        console().print(part, crop=False)


def tables_of(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]], width: int) -> list[Table]:
    """Return tables of as many columns as fit `width` characters, with the first column in each."""
    columns = [*zip(headings, *rows, strict=True)]
    first, *others = [max(map(cell_len, column)) + 3 for column in columns]
    groups: list[list[int]] = [[]]
    room = width - first - 1
    for number, needed in enumerate(others, 1):
        if groups[-1] and sum(others[at - 1] for at in groups[-1]) + needed > room:
            groups.append([])
        groups[-1].append(number)
    parts = []
    for group in groups:
        part = Table(title=title if not parts else None)
        for at in (0, *group):
            width = max(map(cell_len, columns[at]))
            part.add_column(columns[at][0], justify="right" if at else "left", min_width=width, no_wrap=True)
        for row in zip(*(columns[at][1:] for at in (0, *group)), strict=True):
            part.add_row(*row)
        parts.append(part)
    return parts


def draw(
    result: Mapping[str, Any], path: Path, title: str, columns: Mapping[str, str], kinds: Mapping[str, Collection[str]]
) -> None:
    """Write bars of the medians, with least and most, as a PNG: a panel for each column. Needs matplotlib.

    Args:
        columns: figure -> heading of its panel.
        kinds: label in the legend -> the contenders that are drawn in its color; in the order of `COLORS`.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # of the extra [benchmark]
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    columns = {c: heading for c, heading in columns.items() if any(c in row for row in result["medians"].values())}
    names = list(result["medians"])[::-1]  # the first one on top
    colors = dict(zip(kinds, COLORS, strict=True))
    color_of = {name: colors[kind] for kind, members in kinds.items() for name in members}
    figure = Figure(figsize=(2 + 3.4 * len(columns), 1.5 + 0.3 * len(names)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(columns), sharey=True, squeeze=False)[0]
    for axes, (column, heading) in zip(panels, columns.items(), strict=True):
        for place, name in enumerate(names):
            if column not in result["medians"][name]:
                continue
            median, (least, most) = result["medians"][name][column], result["ranges"][name][column]
            around = [[median - least], [most - median]]
            axes.barh(place, median, xerr=around, color=color_of[name], ecolor="#333333", capsize=2, height=0.7)
            axes.annotate(f"{median:.2f}", (most, place), (4, 0), textcoords="offset points", va="center", fontsize=8)
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
