"""One picture of a benchmark: who takes how long, and what the machine's limits are. Needs matplotlib."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from recipes.benchmark.comparison import SECONDS, title_of
from recipes.benchmark.keys import LIMITS, ours

OURS, PEER, LIMIT = "#1f6f8b", "#c9792c", "#9aa0a6"


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Write bars of the medians, with least and most, as a PNG: a panel for saving, and one for each kind of loading."""
    medians = result["medians"]
    columns = [column for column in SECONDS if any(column in figures for figures in medians.values())]
    names = list(medians)[::-1]  # the first one on top
    figure = Figure(figsize=(2 + 3.4 * len(columns), 1.5 + 0.3 * len(names)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(columns), sharey=True, squeeze=False)[0]
    for axes, column in zip(panels, columns, strict=True):
        _fill(axes, column, names, result)
    panels[0].set_yticks(range(len(names)), names)
    figure.suptitle("\n".join(textwrap.wrap(title_of(result), 42 * len(columns))), fontsize=9)
    legend = [
        Patch(color=color, label=label) for color, label in ((OURS, "ours"), (PEER, "others"), (LIMIT, "the machine"))
    ]
    figure.legend(handles=legend, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    figure.savefig(path, dpi=130)


def _fill(axes: Axes, column: str, names: Sequence[str], result: Mapping[str, Any]) -> None:
    for place, name in enumerate(names):
        median, span = result["medians"][name].get(column), result["ranges"][name].get(column)
        if median is None:
            continue
        around = [[median - span[0]], [span[1] - median]]
        axes.barh(place, median, xerr=around, color=_color(name), ecolor="#333333", capsize=2, height=0.7)
        axes.annotate(f"{median:.2f}", (span[1], place), (4, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_title(SECONDS[column], fontsize=10)
    axes.margins(x=0.14)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def _color(name: str) -> str:
    if ours(name) is not None:
        return OURS
    return LIMIT if name in LIMITS else PEER
