"""Draw the imports between the packages of ckpt/ as docs/img/packages.svg: python docs/draw_imports.py"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import grimp

PICTURE = Path(__file__).with_name("img") / "packages.svg"
LEAVES = {"errors", "version"}  # which everything may import
_ROW, _WIDTH, _LEFT, _BOX = 38, 370, 100, 170
_STYLE = """\
text { font: 14px system-ui, sans-serif; fill: #1f2430; }
rect { fill: #eef1fb; stroke: #6b7cc4; }
path { fill: none; stroke: #6b7cc4; stroke-width: 1.4; }
marker path { fill: #6b7cc4; stroke: none; }
@media (prefers-color-scheme: dark) {
  text { fill: #e4e7f2; }
  rect { fill: #2b3150; }
}"""


def arrows() -> list[tuple[str, str]]:
    """Return (package, one that it imports), without pairs that a longer path of imports connects."""
    below = _imports()
    return [
        (name, other) for name in sorted(below) for other in sorted(below[name]) if not _reached(below, name, other)
    ]


def drawing() -> str:
    """Return the picture: packages from top to bottom, arcs to those that they import. Every arc leads down."""
    names = _from_top_to_bottom(_imports())
    middle = {name: 14 + number * _ROW + 12 for number, name in enumerate(names)}
    height = 28 + len(names) * _ROW
    boxes = [
        f'<rect x="{_LEFT}" y="{y - 12}" width="{_BOX}" height="24" rx="4"/>'
        f'<text x="{_LEFT + _BOX / 2:g}" y="{y + 5}" text-anchor="middle">{name}</text>'
        for name, y in middle.items()
    ]
    arcs = [_arc(middle[name], middle[other], number) for number, (name, other) in enumerate(arrows())]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}" role="img">',
            "<title>Imports between the packages of ckpt</title>",
            f"<style>\n{_STYLE}\n</style>",
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            '<path d="M0 0 L8 4 L0 8 z"/></marker></defs>',
            *boxes,
            *arcs,
            "</svg>\n",
        ]
    )


def _arc(start: int, end: int, number: int) -> str:
    """An arc beside the boxes, as far out as it is long; neighbours are connected by a straight line."""
    if end - start == _ROW:
        middle = _LEFT + _BOX / 2
        return f'<path d="M{middle:g} {start + 12} V{end - 13}" marker-end="url(#head)"/>'
    reach = min(130, 14 + (end - start) * 0.42)
    side, sign = (_LEFT + _BOX, 1) if number % 2 else (_LEFT, -1)
    out = side + sign * reach
    return f'<path d="M{side} {start + 5} C{out:g} {start + 5} {out:g} {end - 5} {side + sign} {end - 5}" marker-end="url(#head)"/>'


def _imports() -> dict[str, set[str]]:
    graph = grimp.build_graph("ckpt")
    below: dict[str, set[str]] = {child.removeprefix("ckpt."): set() for child in graph.find_children("ckpt")}
    for name in below:
        for module in {f"ckpt.{name}", *graph.find_descendants(f"ckpt.{name}")}:
            imported = {
                found.split(".")[1] for found in graph.find_modules_directly_imported_by(module) if "." in found
            }
            below[name] |= imported - LEAVES - {name}
    return {name: others for name, others in below.items() if name not in LEAVES}


def _from_top_to_bottom(below: Mapping[str, set[str]]) -> list[str]:
    """Order the packages so that each stands above those that it imports."""
    placed: list[str] = []

    def place(names: Iterable[str]) -> None:
        for name in sorted(names):
            if name not in placed:
                place(below[name])
                placed.append(name)

    place(below)
    return placed[::-1]


def _reached(below: Mapping[str, set[str]], name: str, other: str) -> bool:
    """Whether another package that `name` imports leads to `other`."""
    todo, seen = list(below[name] - {other}), set[str]()
    while todo:
        if (at := todo.pop()) not in seen:
            seen.add(at)
            todo += below.get(at, ())
    return other in seen


if __name__ == "__main__":
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(drawing())
