"""Self-contained HTML pages: elements that escape their texts, sortable tables, bars, and the style and script of every page.

A page needs no network: its content security policy refuses every request, and every script but the one below. Without scripts it
shows the same; it only cannot sort, filter and show tips.
"""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckpt.errors import ConfigurationError, printable
from ckpt.format.manifest import MANIFEST_NAME
from ckpt.storage.durable import replace_durably
from ckpt.version import __version__

_OURS = '<meta name="generator" content="ckpt '
_HUES = (255, 160, 32, 335, 200, 95, 290, 10)


_WITHOUT_END = {"input": "", "meta": "", "line": "/", "rect": "/"}


class Markup(str):
    """HTML. `tag` escapes every other text."""

    __slots__ = ()


Content = str | Iterable[str]


def tag(name: str, /, *inside: Content, **attributes: str | float | bool | None) -> Markup:
    """Return an element. Texts and attributes are escaped; control characters in them are shown as escapes, but for line breaks.

    Args:
        inside: texts, elements, or iterables of them.
        attributes: `class_` is written class, `data_tip` data-tip; None and False are left out.

    Example:
        >>> tag("td", "a < b", class_="number", data_value=3)
        '<td class="number" data-value="3">a &lt; b</td>'
    """
    written = "".join(
        f" {key.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{escaped(str(value))}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    if name in _WITHOUT_END:
        return Markup(f"<{name}{written}{_WITHOUT_END[name]}>")
    return Markup(f"<{name}{written}>{joined(*inside)}</{name}>")


def joined(*inside: Content) -> Markup:
    """Return texts, escaped, and elements as one piece of HTML."""
    return Markup("".join(escaped(one) if isinstance(one, str) else joined(*one) for one in inside))


def escaped(text: str) -> str:
    """Return a text as HTML; HTML as it is."""
    if isinstance(text, Markup):
        return text
    return html.escape(text if text.isprintable() else "\n".join(map(printable, text.split("\n"))))


def hue(number: int) -> str:
    """Return the style of one of many colors that differ: neighbors do clearly. Light and dark pages choose how light it is."""
    degrees = _HUES[number] if number < len(_HUES) else round(number * 137.508 + 255) % 360
    return f"--h:{degrees}"


def dotted(style: str, *inside: Content) -> Markup:
    """Return a text with a dot before it, in the color of `hue`."""
    return tag("span", *inside, class_="dotted", style=style)


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        is_number: aligned right, and sorted by `Cell.value`.
        tip: what the heading means.
        greatest_first: the first click on the heading sorts so.
    """

    heading: str
    is_number: bool = False
    tip: str | None = None
    greatest_first: bool = False


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Attributes:
        value: to sort by; None: the text.
        span: how many columns it takes, the last of its row.
    """

    inside: Content
    value: float | str | None = None
    span: int | None = None
    tip: str | None = None


@dataclass(frozen=True)
class Row:
    """A row of a table."""

    cells: Sequence[Cell]
    class_: str | None = None


def table(columns: Sequence[Column], rows: Sequence[Row], *, name: str, filters: bool = False) -> Markup:
    """Return a table that sorts by a click on a heading. On a narrow screen each row is a card.

    Args:
        name: its id.
        filters: whether a field above it hides the rows that do not hold a text.
    """
    head = tag("tr", map(_head, columns))
    body = (tag("tr", map(_cell, row.cells, columns), class_=row.class_) for row in rows)
    field = tag("input", type="search", placeholder="Filter", aria_label="Filter the rows", data_filters=name)
    made = tag("table", tag("thead", head), tag("tbody", body), id=name, class_="sorts")
    return joined(field if filters else "", tag("div", made, class_="scrolls"))


def _head(column: Column) -> Markup:
    order = "descending" if column.greatest_first else None
    button = tag("button", column.heading, type="button", data_tip=column.tip)
    return tag("th", button, scope="col", aria_sort="none", class_=_class_of(column), data_first=order)


def _cell(cell: Cell, column: Column) -> Markup:
    if cell.span is not None:
        return tag("td", cell.inside, colspan=cell.span, data_tip=cell.tip)
    own = {"class_": _class_of(column), "data_label": column.heading}
    return tag("td", cell.inside, **own, data_value=cell.value, data_tip=cell.tip)


def _class_of(column: Column) -> str | None:
    return "number" if column.is_number else None


def bar(
    value: float, most: float, *, low: float | None = None, high: float | None = None, best: bool = False
) -> Markup:
    """Return a bar that is full at `most`, and a line over it from `low` to `high` if both are given."""
    full = most or 1.0
    parts = [tag("i", style=f"width:{percent(value / full)}")]
    if low is not None and high is not None and high > low:
        parts.append(tag("b", style=f"left:{percent(low / full)};width:{percent((high - low) / full)}"))
    return tag("span", parts, class_="bar best" if best else "bar")


def chart(name: str, label: str, *inside: Content, style: str | None = None) -> Markup:
    """Return a drawing as wide as its place, of shapes at parts of its sides; `name` is its class."""
    return tag("svg", *inside, class_=f"chart {name}", role="img", aria_label=label, style=style)


def shape(
    name: str, x: float, y: float, width: float, height: float, *inside: Content, **attributes: str | None
) -> Markup:
    """Return a `rect`, or a `svg` of its own, at parts from 0 to 1 of the drawing around it."""
    sides = {"x": x, "y": y, "width": width, "height": height}
    return tag(name, *inside, **{side: percent(part) for side, part in sides.items()}, **attributes)


def percent(part: float) -> str:
    """Return a part of 1 as a length in CSS or SVG."""
    return f"{round(100 * min(max(part, 0.0), 1.0), 3):g}%"


def facts(pairs: Iterable[tuple[str, Content]]) -> Markup:
    """Return names and what they stand for, side by side."""
    return tag("dl", (tag("div", tag("dt", name), tag("dd", value)) for name, value in pairs), class_="facts")


def section(heading: str, *inside: Content, note: Content = "") -> Markup:
    """Return a part of a page below a heading, with a sentence that says how to read it."""
    return tag("section", tag("h2", heading), tag("p", note, class_="note") if note else "", *inside)


def page(title: str, *inside: Content) -> str:
    """Return a whole page with this title as its first heading."""
    script = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{script}'; form-action 'none'; base-uri 'none'"
    head = joined(
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        Markup(f'{_OURS}{__version__}">'),
        tag("title", title),
        Markup(f"<style>{_STYLE}</style>"),
    )
    body = tag("main", tag("h1", title), *inside)
    return f'<!doctype html>\n<html lang="en">\n<head>{head}</head>\n<body>{body}\n<script>{_SCRIPT}</script>\n</body>\n</html>\n'


def write_page(path: Path, text: str) -> None:
    """Write a page atomically; replace an earlier one.

    Raises:
        ConfigurationError: see `refuse_other_files`.
    """
    refuse_other_files(path)
    replace_durably(path, text.encode())


def refuse_other_files(path: Path) -> None:
    """Refuse to write a page to this path if that would replace anything but a page, or damage a checkpoint.

    Raises:
        ConfigurationError: a file that is no page, or a folder, is there; its folder does not exist, or is inside of a checkpoint.
    """
    checkpoint = next((one for one in path.absolute().parents if (one / MANIFEST_NAME).is_file()), None)
    if path.is_dir():
        raise ConfigurationError(f"{path} is a folder; give the path of a file in it, such as {path / 'page.html'}")
    if not path.parent.is_dir():
        raise ConfigurationError(f"{path.parent} does not exist; make that folder, or give another path")
    if checkpoint is not None:
        raise ConfigurationError(
            f"{path} is inside of {checkpoint}: a checkpoint holds no other files; give another path"
        )
    if path.exists() and not (path.is_file() and _is_page(path)):
        raise ConfigurationError(f"{path} exists and is not a page of this command; remove it, or give another path")


def _is_page(path: Path) -> bool:
    with path.open("rb") as file:
        return _OURS.encode() in file.read(4096)


_STYLE = """
:root {
  color-scheme: light dark;
  --page: #ffffff; --panel: #f6f6f9; --line: #e2e3ea; --text: #1c1e26; --dim: #636a79; --accent: #5a45d6; --bar: #a99df0;
  --best: #17804f; --range: #1c1e26; --bad: #b3261e; --bad-panel: #fdf0ef; --good-panel: #eefaf4; --sat: 62%; --lum: 80%; --edge: 58%;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #16171d; --panel: #1e2028; --line: #31343f; --text: #e6e7ec; --dim: #9aa0ae; --accent: #b2a5ff; --bar: #6557c2;
    --best: #2c9a6a; --range: #e6e7ec; --bad: #ff938a; --bad-panel: #33201f; --good-panel: #17291f; --sat: 34%; --lum: 32%; --edge: 50%;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 28px 20px 64px; }
h1 { font-size: 26px; line-height: 1.25; margin: 0 0 6px; letter-spacing: -.01em; overflow-wrap: anywhere; }
h2 { font-size: 18px; line-height: 1.3; margin: 40px 0 4px; }
h2.part { margin-top: 52px; padding-top: 28px; border-top: 1px solid var(--line); font-size: 22px; }
h3 { font-size: 14px; margin: 0; overflow-wrap: anywhere; }
p { margin: 0 0 10px; }
a { color: var(--accent); text-decoration: none; }
a:hover { text-decoration: underline; }
:focus-visible { outline: 2px solid var(--accent); outline-offset: 1px; }
code { font: 13px/1.4 ui-monospace, monospace; overflow-wrap: anywhere; }
.note, .lead { color: var(--dim); max-width: 76ch; }
.note { font-size: 13.5px; }
.chip { display: inline-block; margin: 0 6px 6px 0; padding: 1px 8px; border: 1px solid var(--line); border-radius: 6px;
  background: var(--panel); font: 12.5px/1.5 ui-monospace, monospace; overflow-wrap: anywhere; }
.advice { margin: 16px 0 0; padding: 10px 14px; border-left: 3px solid var(--best); border-radius: 0 6px 6px 0;
  background: var(--good-panel); }
.advice + .advice { margin-top: 8px; }
.facts { display: grid; grid-template-columns: repeat(auto-fill, minmax(190px, 1fr)); margin: 18px 0 0; border: 1px solid var(--line);
  border-radius: 8px; overflow: hidden; }
.facts div { min-width: 0; margin: 0 -1px -1px 0; padding: 8px 12px; border: solid var(--line); border-width: 0 1px 1px 0; }
dt { color: var(--dim); font-size: 12.5px; }
dd { margin: 0; font-weight: 550; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
.scrolls { overflow: auto; max-height: 78vh; margin-top: 12px; border: 1px solid var(--line); border-radius: 8px; }
table { width: 100%; border-collapse: collapse; font-size: 13.5px; font-variant-numeric: tabular-nums; }
th { position: sticky; top: 0; z-index: 1; padding: 0; background: var(--panel); text-align: left; font-weight: 600;
  box-shadow: inset 0 -1px var(--line); }
th button { width: 100%; padding: 8px 12px; border: 0; background: none; color: var(--dim); font: inherit; text-align: inherit;
  white-space: nowrap; cursor: pointer; }
th button:hover { color: var(--text); }
th.number, td.number { text-align: right; }
th.number button { display: flex; flex-direction: row-reverse; }
th.number button::after { margin-right: 5px; }
th button::after { content: "\\2195"; display: inline-block; width: 1.2em; text-align: right; opacity: .35; }
th[aria-sort=ascending] button::after { content: "\\2191"; opacity: 1; }
th[aria-sort=descending] button::after { content: "\\2193"; opacity: 1; }
th[aria-sort=ascending] button, th[aria-sort=descending] button { color: var(--accent); }
td { max-width: 340px; padding: 7px 12px; border-top: 1px solid var(--line); vertical-align: top; overflow-wrap: break-word; }
td.number { white-space: nowrap; }
td:first-child { max-width: 460px; }
tbody tr:first-child td { border-top: 0; }
tbody tr:hover td { background: var(--panel); }
tr.failed td, tbody tr.failed:hover td { background: var(--bad-panel); }
tr.failed td:last-child { color: var(--bad); }
td small { color: var(--dim); font-size: 12px; }
input[type=search] { display: block; width: 100%; max-width: 320px; margin-top: 12px; padding: 6px 10px; border: 1px solid var(--line);
  border-radius: 6px; background: var(--page); color: inherit; font: inherit; font-size: 13.5px; }
.bar { position: relative; display: block; width: 100%; min-width: 84px; height: 7px; margin-top: 4px; border-radius: 3px;
  background: var(--line); }
.bar i, .bar b { position: absolute; left: 0; top: 0; height: 100%; border-radius: 3px; background: var(--bar); }
.bar.best i { background: var(--best); }
.bar b { top: -2px; height: 11px; border: solid var(--range); border-width: 0 1.5px; border-radius: 0; min-width: 3px; opacity: .8;
  background: linear-gradient(var(--range), var(--range)) center / 100% 1.5px no-repeat; }
strong.best { color: var(--best); }
.dotted { position: relative; display: inline-block; max-width: 100%; padding-left: 16px; }
.dotted::before { content: ""; position: absolute; left: 0; top: .45em; width: 9px; height: 9px; border-radius: 50%;
  background: hsl(var(--h) var(--sat) var(--edge)); }
.chart { display: block; width: 100%; margin-top: 12px; }
.chart text { pointer-events: none; fill: var(--text); font: 11.5px system-ui, sans-serif; }
.chart .dim { fill: var(--dim); }
.chart line { stroke: var(--line); }
.tinted { fill: hsl(var(--h) var(--sat) var(--lum)); }
.linked { opacity: .4; }
.treemap { height: 520px; border-radius: 8px; }
.treemap rect, .picture rect { stroke: var(--page); stroke-width: 1px; }
.treemap a:hover rect, .picture rect:hover, .timeline g:hover rect { stroke: var(--text); stroke-width: 1.5px; }
.treemap .small { fill: var(--text); opacity: .85; font-size: 10.5px; }
.treemap .heading { font-weight: 600; }
.timeline { height: 132px; }
.timeline .tinted { fill: hsl(var(--h) var(--sat) var(--edge)); }
.columns { height: 96px; }
.picture { width: 100%; background: var(--panel); }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(230px, 1fr)); gap: 14px; margin-top: 12px; }
.card { padding: 12px; border: 1px solid var(--line); border-radius: 8px; min-width: 0; }
.card:target { border-color: var(--accent); box-shadow: 0 0 0 1px var(--accent); }
.card p, .card summary { margin: 4px 0 8px; color: var(--dim); font-size: 12.5px; }
.card summary { cursor: pointer; margin: 8px 0 0; overflow-wrap: anywhere; }
.card ul { margin: 6px 0 0; padding: 0; list-style: none; font-size: 12.5px; overflow-wrap: anywhere; }
table.grid { width: auto; }
.scrolls:has(> .grid) { width: fit-content; max-width: 100%; }
table.grid th { padding: 7px 12px; font-weight: 500; color: var(--dim); white-space: nowrap; }
table.grid td { border-left: 1px solid var(--line); }
.heat { background: color-mix(in srgb, var(--bar) var(--part), transparent); }
.tip { position: fixed; z-index: 9; max-width: min(420px, 92vw); padding: 6px 10px; border-radius: 6px; background: var(--text);
  color: var(--page);
  font-size: 12.5px; line-height: 1.45; white-space: pre-line; overflow-wrap: anywhere; pointer-events: none; }
.tip[hidden] { display: none; }
footer { margin-top: 44px; color: var(--dim); font-size: 12.5px; }
@media (max-width: 640px) {
  main { padding: 20px 14px 48px; }
  h1 { font-size: 21px; }
  table:not(.grid), table:not(.grid) :is(thead, tbody, tr, th, td) { display: block; width: auto; }
  table:not(.grid) thead tr { display: flex; flex-wrap: wrap; background: var(--panel); border-bottom: 1px solid var(--line); }
  table:not(.grid) th { position: static; box-shadow: none; }
  table:not(.grid) th button { padding: 6px 8px; font-size: 12.5px; }
  table:not(.grid) tbody tr { padding: 8px 12px; border-top: 1px solid var(--line); }
  table:not(.grid) td, table:not(.grid) td.number { max-width: none; display: flex; flex-wrap: wrap; justify-content: space-between;
    gap: 0 12px; padding: 2px 0;
    border: 0; text-align: left; white-space: normal; }
  table:not(.grid) td:empty { display: none; }
  table:not(.grid) td[data-label]::before { content: attr(data-label); color: var(--dim); }
  .facts { grid-template-columns: repeat(auto-fill, minmax(140px, 1fr)); }
  .scrolls { max-height: none; }
  input + .scrolls { max-height: 78vh; }
  .treemap { height: 360px; }
  .treemap .wide { display: none; }
}
"""

_SCRIPT = """
"use strict";
const valueOf = (row, at) => {
  const cell = row.cells[at];
  if (!cell || cell.colSpan > 1) return null;
  const value = cell.dataset.value ?? cell.textContent.trim();
  if (value === "") return null;
  return Number.isNaN(Number(value)) ? value : Number(value);
};
const compare = (a, b) =>
  typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), undefined, { numeric: true });

for (const button of document.querySelectorAll("table.sorts th button")) {
  button.addEventListener("click", () => {
    const head = button.parentElement, at = head.cellIndex, body = head.closest("table").tBodies[0];
    const first = head.dataset.first ?? "ascending", other = first === "ascending" ? "descending" : "ascending";
    const order = head.ariaSort === first ? other : first;
    for (const one of head.parentElement.cells) one.ariaSort = one === head ? order : "none";
    const sign = order === "ascending" ? 1 : -1;
    const rows = [...body.rows].map((row) => ({ row, value: valueOf(row, at) }));
    rows.sort((a, b) => (a.value === null) - (b.value === null) || (a.value === null ? 0 : sign * compare(a.value, b.value)));
    body.append(...rows.map((one) => one.row));
  });
}

for (const field of document.querySelectorAll("[data-filters]")) {
  field.addEventListener("input", () => {
    const wanted = field.value.toLowerCase();
    for (const row of document.getElementById(field.dataset.filters).tBodies[0].rows)
      row.hidden = !row.textContent.toLowerCase().includes(wanted);
  });
}

const tip = document.body.appendChild(document.createElement("div"));
tip.className = "tip";
tip.hidden = true;
tip.setAttribute("role", "tooltip");
const show = (target, x, y) => {
  tip.textContent = target.dataset.tip;
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - width - 4))}px`;
  tip.style.top = `${y + 18 + height > innerHeight ? Math.max(4, y - height - 10) : y + 18}px`;
};
const hide = () => { tip.hidden = true; };
let pointer = null;
const follow = () => {
  const target = pointer && document.elementFromPoint(...pointer)?.closest("[data-tip]");
  if (target) show(target, ...pointer);
  else hide();
};
for (const name of ["pointermove", "pointerdown"])
  document.addEventListener(name, (event) => { pointer = [event.clientX, event.clientY]; follow(); });
document.addEventListener("scroll", follow, { capture: true, passive: true });
document.addEventListener("focusin", (event) => {
  const target = event.target.closest?.("[data-tip]");
  if (target?.matches(":focus-visible")) {
    const box = target.getBoundingClientRect();
    show(target, box.left, box.bottom);
  }
});
document.documentElement.addEventListener("pointerleave", (event) => {
  if (event.pointerType !== "mouse") return;  // a finger that is lifted leaves, too
  pointer = null;
  hide();
});
document.addEventListener("focusout", hide);
document.addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });
"""
