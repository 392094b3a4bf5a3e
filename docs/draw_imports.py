"""Draw the imports between the packages of ckpt/ into docs/architecture.md: python docs/draw_imports.py"""

from __future__ import annotations

from pathlib import Path

import grimp

PAGE = Path(__file__).with_name("architecture.md")
BEGIN, END = "<!-- drawn by docs/draw_imports.py -->\n```mermaid\n", "```\n"
LEAVES = {"errors", "version"}  # which everything may import


def drawing() -> str:
    """Return the graph as Mermaid has it: an arrow from each package to those that it imports, but for those it reaches through others."""
    graph = grimp.build_graph("ckpt")
    below: dict[str, set[str]] = {child.removeprefix("ckpt."): set() for child in graph.find_children("ckpt")}
    for name in below:
        for module in {f"ckpt.{name}", *graph.find_descendants(f"ckpt.{name}")}:
            imported = {
                found.split(".")[1] for found in graph.find_modules_directly_imported_by(module) if "." in found
            }
            below[name] |= imported - LEAVES - {name}
    rooms = sorted(below.keys() - LEAVES)
    arrows = [(name, other) for name in rooms for other in sorted(below[name]) if not _reached(below, name, other)]
    return "graph TD\n" + "".join(f"    {name} --> {other}\n" for name, other in arrows)


def drawn(page: str) -> str:
    """Return the page with the drawing of today."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + drawing() + END + rest.partition(END)[2]


def _reached(below: dict[str, set[str]], name: str, other: str) -> bool:
    """Does another package that `name` imports lead to `other`?"""
    todo, seen = list(below[name] - {other}), set[str]()
    while todo:
        if (at := todo.pop()) not in seen:
            seen.add(at)
            todo += below.get(at, ())
    return other in seen


if __name__ == "__main__":
    PAGE.write_text(drawn(PAGE.read_text()))
