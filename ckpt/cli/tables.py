"""Tables on the terminal, of texts that are data: every character is shown, and nothing is cut off.

A `Listing` is for names: none is broken, so that it can be found and copied. A command prints its summary first, then `MOST_ROWS` rows, and
says how many more there are: the argument `all` prints them.
"""

from __future__ import annotations

import json
import os
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal, TypeVar

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ckpt.cli.arguments import argument
from ckpt.errors import printable

_PIPE_WIDTH = 160

MOST_ROWS = 20
"""The most rows of a listing without the argument `all`."""

_Row = TypeVar("_Row")


class DataConsole(Console):
    """A console of texts that are data: no markup, no codes of emoji, no colours of its own, each text on one line (`printable`)."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)


def print_json(value: Any) -> None:
    """Print the answer of a command that was asked for JSON. JSON escapes every control character but one, DEL."""
    print(json.dumps(value, indent=2).replace("\x7f", "\\u007f"))


def counted(number: int, thing: str) -> str:
    """Return such as "1 file" or "2 files"."""
    return f"{number} {thing}" if number == 1 else f"{number:,} {thing}s"


def first_rows(
    rows: Sequence[_Row], group_of: Callable[[_Row], Hashable] = lambda row: None, *, most: int | None
) -> list[_Row]:
    """Return at most so many rows, in their order: the first ones of each group, of all groups alike many. None: all."""
    if most is None or len(rows) <= most:
        return list(rows)
    seen: Counter[Hashable] = Counter()
    turns = []
    for at, row in enumerate(rows):
        group = group_of(row)
        turns.append((seen[group], at))
        seen[group] += 1
    return [rows[at] for at in sorted(at for _, at in sorted(turns)[:most])]


def most_rows(*, all: bool) -> int | None:
    """Return what `all=` means for `first_rows`."""
    return None if all else MOST_ROWS


def more(number: int, thing: str, *, narrow: str = "") -> list[str]:
    """Return the line that says how many rows a listing leaves out; none if it has all.

    Args:
        narrow: another way to see them, such as "--filter <part of its name> or ".
    """
    them = "it" if number == 1 else "them"
    return [f"{counted(number, f'more {thing}')}: give {narrow}{argument('all')} to see {them}"] if number else []


class Listing:
    """Rows of texts, for `show`. A table, or where that is too wide for the console, a few lines for each row.

    Args:
        right: indices of the columns that hold numbers, which are aligned right.
        text: indices of the columns that hold sentences, which may be cut at spaces.
        names: how many columns, from the first on, name a row.
        bare: indices of the others that need no heading where there is no table.
    """

    def __init__(
        self,
        *headings: str,
        right: Sequence[int] = (),
        text: Sequence[int] = (),
        names: int = 1,
        bare: Sequence[int] = (),
    ) -> None:
        self._headings = headings
        self._right, self._text, self._names, self._bare = right, text, names, bare
        self._rows: list[list[list[str]]] = []

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, *cells: str | Sequence[str]) -> None:
        """Add a row of texts; a cell that is a sequence has a line for each of its texts."""
        rows = ([cell] if isinstance(cell, str) else cell for cell in cells)
        self._rows.append([[printable(line) for line in lines] for lines in rows])

    def table(self, width: int) -> Table | None:
        """Return a table that fits the width; None: there is none without broken words."""
        widths = self._widths(width)
        if widths is None:
            return None
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
        for number, (heading, least) in enumerate(zip(self._headings, widths, strict=True)):
            justify: Literal["left", "right"] = "right" if number in self._right else "left"
            table.add_column(Text(heading), justify=justify, width=least, no_wrap=number not in self._text)
        for row in self._rows:
            table.add_row(*(Text("\n".join(lines)) for lines in row))
        return table

    def lines(self, width: int) -> list[str]:
        """Return each row as one line, or where that is too long as its name and, below it, the other cells that are not empty."""
        headings = [" ".join(heading.split()) for heading in self._headings]
        found = []
        for row in self._rows:
            cells = [" ".join(map(str.strip, lines)) for lines in row]
            name = "  ".join(filter(None, cells[: self._names]))
            others = [(at, cell) for at, cell in enumerate(cells) if cell and at >= self._names]
            rest = "  ".join(cell if at in self._bare else f"{headings[at]}: {cell}" for at, cell in others)
            fits = cell_len(name) + cell_len(rest) + 2 <= width
            found += [f"{name}  {rest}".rstrip()] if fits else [name, f"  {rest}"]
        return found

    def _widths(self, width: int) -> list[int] | None:
        columns = [[heading.split("\n"), *cells] for heading, *cells in zip(self._headings, *self._rows, strict=True)]
        each = [[line for lines in column for line in lines] for column in columns]
        natural = [max(map(cell_len, lines)) for lines in each]
        words = {at: max(cell_len(word) for line in each[at] for word in [*line.split(), ""]) for at in self._text}
        widths = [words.get(at, least) for at, least in enumerate(natural)]
        room = width - sum(widths) - 2 * len(widths) + 1
        if room < 0:
            return None
        for at in self._text:
            added = min(room, natural[at] - widths[at])
            widths[at] += added
            room -= added
        return widths


def show(*parts: str | Listing) -> None:
    """Print lines and listings. On a terminal a line is cut at spaces, in a pipe it stays whole; a word is never broken."""
    out = console()
    for part in parts:
        table = part.table(out.width) if isinstance(part, Listing) else None
        if table is not None:
            out.print(table)
            continue
        for line in part.lines(out.width) if isinstance(part, Listing) else [printable(part)]:
            indent = " " * (len(line) - len(line.lstrip()))
            cut = textwrap.wrap(
                line,
                out.width,
                subsequent_indent=indent + ("  " if indent else ""),
                break_long_words=False,
                break_on_hyphens=False,
            )
            print("\n".join(cut) if _is_terminal() else line)


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
    return DataConsole(file=sys.stdout, width=None if _is_terminal() else _PIPE_WIDTH)


def _is_terminal() -> bool:
    return sys.stdout.isatty() or "COLUMNS" in os.environ
