"""Tables on the terminal, of texts that are data: every character is shown, and nothing is cut off."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Any, Literal

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ckpt.errors import printable

_PIPE_WIDTH = 160


class DataConsole(Console):
    """A console of texts that are data: no markup, no codes of emoji, no colours of its own, each text on one line (`printable`)."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)


def print_json(value: Any) -> None:
    """Print the answer of a command with `json=true`. JSON escapes every control character but one, DEL."""
    print(json.dumps(value, indent=2).replace("\x7f", "\\u007f"))


def counted(number: int, thing: str) -> str:
    """Return such as "1 file" or "2 files"."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def table_of(*columns: str, right: Sequence[int] = (), wide: Sequence[int] | None = None) -> Table:
    """Make a table with these headings. A text that is wider than its column is folded.

    Args:
        right: indices of the columns that hold numbers, which are aligned right and not folded.
        wide: indices of the columns that may be folded; None: all but those in `right`.
    """
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for number, column in enumerate(columns):
        folds = number not in right if wide is None else number in wide
        justify: Literal["left", "right"] = "right" if number in right else "left"
        table.add_column(Text(column), justify=justify, overflow="fold", no_wrap=not folds)
    return table


def add_row(table: Table, *cells: str | Sequence[str]) -> None:
    """Add a row of texts; a cell that is a sequence has a line for each of its texts."""
    rows = ([cell] if isinstance(cell, str) else cell for cell in cells)
    table.add_row(*(Text("\n".join(map(printable, lines))) for lines in rows))


def full_line(text: str) -> Text:
    """Return a line of text that is folded at the width of the console."""
    return Text(printable(text), overflow="fold")


def console() -> DataConsole:
    """Return the console on stdout: as wide as the terminal or COLUMNS, and 160 columns in a pipe."""
    known = sys.stdout.isatty() or "COLUMNS" in os.environ
    return DataConsole(file=sys.stdout, width=None if known else _PIPE_WIDTH)
