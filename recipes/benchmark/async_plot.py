"""One picture of what saves beside training cost it. Needs matplotlib."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from recipes.benchmark.async_figures import COLUMNS, title_of
from recipes.benchmark.async_keys import DCP, OURS
from recipes.benchmark.plot import LIMIT, PEER
from recipes.benchmark.plot import OURS as OUR_COLOR


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Write bars of the medians, with least and most, as a PNG: a panel for each figure that is compared."""
    names = list(result["medians"])[::-1]  # the first one on top
    figure = Figure(figsize=(2 + 3.2 * len(COLUMNS), 1.5 + 0.3 * len(names)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(COLUMNS), sharey=True, squeeze=False)[0]
    for axes, (column, heading) in zip(panels, COLUMNS.items(), strict=True):
        for place, name in enumerate(names):
            median, span = result["medians"][name].get(column), result["ranges"][name].get(column)
            if median is None:
                continue
            around = [[median - span[0]], [span[1] - median]]
            axes.barh(place, median, xerr=around, color=_color(name), ecolor="#333333", capsize=2, height=0.7)
            axes.annotate(
                f"{median:.2f}", (span[1], place), (4, 0), textcoords="offset points", va="center", fontsize=8
            )
        axes.set_title(heading, fontsize=10)
        axes.margins(x=0.14)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_yticks(range(len(names)), names)
    figure.suptitle("\n".join(textwrap.wrap(title_of(result), 40 * len(COLUMNS))), fontsize=9)
    colors = ((OUR_COLOR, "ours"), (PEER, "torch.distributed.checkpoint"), (LIMIT, "no save"))
    legend = [Patch(color=color, label=label) for color, label in colors]
    figure.legend(handles=legend, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    figure.savefig(path, dpi=130)


def _color(name: str) -> str:
    return OUR_COLOR if name in OURS else PEER if name in DCP else LIMIT
