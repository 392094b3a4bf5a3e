"""The pictures of a checkpoint's page: a treemap of its tensors, the bytes of each rank, and boxes of tensors that several ranks wrote."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.filesize import decimal

from ckpt.errors import printable
from ckpt.format.manifest import ArrayEntry
from recipes.commands.reading import ranks_text, shape_text, where_text
from recipes.commands.sharding_pictures import Alike, Picture, Rectangle
from recipes.commands.treemap import Tile, squarified
from recipes.support.page import Content, Markup, chart, hue, joined, percent, section, shape, tag
from recipes.support.tables import counted

MOST_CARDS = 40
_MOST_RECTANGLES = 8000
_MOST_NAMES = 12
_MOST_COLUMNS = 256
_MOST_LABELS = 24
_MAP = Tile(0, 0, 1080, 520)
"""The treemap on a wide screen, in pixels."""
_LINE = 22
"""Height of a component's heading in it."""
_CHAR = 6.8
"""Width of a character, about."""
_PHONE = 0.3
"""The width of the treemap on a phone, as a part of that on a wide screen. Texts of class "wide" do not fit there."""
_MOST_LINES = 4
_CARD = 200
"""Width of a picture of boxes, at least."""


@dataclass(frozen=True)
class Tensor:
    """A tensor of the checkpoint, or of one inside of it.

    Attributes:
        name: `<component>/<prefix><key>`, with control characters escaped.
        card: id of the picture that shows its cuts; None: there is none.
    """

    name: str
    component: str
    entry: ArrayEntry
    card: str | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes that it adds to the checkpoint: none for a second name."""
        return 0 if self.entry.alias_of is not None else self.entry.num_bytes

    def tip(self) -> str:
        kind = f"{self.entry.dtype} {shape_text(self.entry.shape)}, {decimal(self.num_bytes)}"
        return f"{self.name}\n{kind}\n{where_text(self.entry, self.name)}"


@dataclass(frozen=True)
class Group:
    """Tensors of a component that the page shows as one: their names differ in numbers only, which are `*` here."""

    name: str
    component: str
    tensors: Sequence[Tensor]

    @property
    def num_bytes(self) -> int:
        return sum(one.num_bytes for one in self.tensors)

    @property
    def card(self) -> str | None:
        """The picture of all of them."""
        cards = {one.card for one in self.tensors}
        return cards.pop() if len(cards) == 1 else None

    def tip(self) -> str:
        return f"{self.name}\n{num_tensors(len(self.tensors))}, {decimal(self.num_bytes)}"


Item = Tensor | Group


def num_tensors(number: int) -> str:
    """Return such as "1 tensor" or "20,000 tensors"."""
    return f"{number:,} tensor{'' if number == 1 else 's'}"


def treemap(items: Sequence[Item], hues: Mapping[str, str]) -> Markup:
    """A rectangle for each component, divided into its tensors."""
    by_component: dict[str, list[Item]] = {}
    for one in items:
        by_component.setdefault(one.component, []).append(one)
    sizes = {key: sum(one.num_bytes for one in own) for key, own in by_component.items()}
    shown = sorted((key for key in sizes if sizes[key]), key=lambda key: -sizes[key])
    if not shown:
        return Markup("")
    areas = squarified([sizes[key] for key in shown], _MAP)
    total = sum(sizes.values())
    tiles = [
        _region(key, by_component[key], area, hues.get(key, hue(0)), sizes[key], total)
        for key, area in zip(shown, areas, strict=True)
    ]
    note = (
        "Areas are bytes, colors are components. Hover over a tensor for its shape and writers; a click on one that several ranks "
        "wrote leads to its picture."
    )
    return section("Tensors by bytes", chart("treemap", "Treemap of the tensors by bytes", tiles), note=note)


def _region(key: str, items: Sequence[Item], area: Tile, color: str, num_bytes: int, total: int) -> Markup:
    """A component: its name in a line above its tensors, where there is room for one."""
    heading = area.height > 3 * _LINE and area.width > 60
    inner = Tile(area.x, area.y + _LINE, area.width, area.height - _LINE) if heading else area
    label = f"{key}  {decimal(num_bytes)}, {num_bytes / total:.0%}"
    head = _box(Tile(area.x, area.y, area.width, _LINE), _text(label, 15, "heading")) if heading else Markup("")
    ordered = sorted(items, key=lambda one: -one.num_bytes)
    tiles = squarified([one.num_bytes for one in ordered], inner)
    drawn = [_tile(one, tile) for one, tile in zip(ordered, tiles, strict=True) if one.num_bytes]
    return tag("g", head, drawn, class_="tinted", style=color)


def _tile(one: Item, tile: Tile) -> Markup:
    name, size = one.name.removeprefix(f"{one.component}/"), decimal(one.num_bytes)
    room = int((0.87 * tile.width - 8) / _CHAR)  # on a narrower screen
    lines = _lines(name, room, int(tile.height - 8) // 15 - 1) if tile.height > 20 and room >= 5 else []
    on_phones = None if all(len(line) * _CHAR < _PHONE * tile.width for line in lines) else "wide"
    texts = [_text(line, 15 * number, on_phones) for number, line in enumerate(lines, 1)]
    if texts and tile.height > 23 + 15 * len(lines) and room >= len(size):
        texts.append(_text(size, 15 * len(lines) + 15, "dim small" if on_phones is None else "dim small wide"))
    box = _box(tile, tag("rect", width="100%", height="100%"), texts)
    return tag("a", box, href=f"#{one.card}" if one.card else None, data_tip=one.tip())


def _lines(name: str, room: int, most: int) -> list[str]:
    """Break a name behind its dots into lines of at most `room` characters, the last ones if there are too many.

    Example:
        >>> _lines("h.0.mlp.c_fc.weight", 8, 3), _lines("h.0.mlp.c_fc.weight", 8, 1)
        (['h.0.mlp.', 'c_fc.', 'weight'], ['…weight'])
    """
    lines = [""]
    for part in name.replace(".", ".\0").split("\0"):
        if len(lines[-1]) + len(part) > room:
            lines.append("")
        while len(part) > room:
            lines[-1], part = part[:room], part[room:]
            lines.append("")
        lines[-1] += part
    lines = [line for line in lines if line]
    num_whole = max(1, min(most, _MOST_LINES)) - 1
    if len(lines) <= num_whole + 1:
        return lines
    whole = lines[len(lines) - num_whole :]
    rest = name[: len(name) - sum(map(len, whole))]
    return [f"…{rest[1 - room :].lstrip('.')}", *whole]


def _box(tile: Tile, *inside: Content) -> Markup:
    """A viewport of its own: texts keep their size on every screen, and are cut off at its edges."""
    x, y, width, height = tile
    return shape("svg", x / _MAP.width, y / _MAP.height, width / _MAP.width, height / _MAP.height, *inside)


def _text(text: str, y: int, class_: str | None = None) -> Markup:
    return tag("text", text, x=5, y=y, class_=class_)


def writers(world_size: int, tensors: Sequence[Tensor]) -> Markup:
    """A column for each rank: the bytes that it wrote. The manifest does not say them of tensors that several ranks packed."""
    written, unknown = Counter[int](), 0
    in_chunks = Counter[tuple[tuple[int, int, int], ...]]()  # many tensors have the same writers
    for one in tensors:
        packed_in = one.entry.packed_in
        if len(packed_in) == 1:
            written[packed_in[0]] += one.num_bytes
        elif packed_in:
            unknown += one.num_bytes
        in_chunks[one.entry.writers] += one.num_bytes
    for runs, num_bytes in in_chunks.items():
        num_chunks = sum(count for _, _, count in runs)
        for rank, _, count in runs:
            written[rank] += num_bytes * count // num_chunks
    if world_size < 2 or not written.total():
        return Markup("")
    each = -(-world_size // _MOST_COLUMNS)
    bins = [range(at, min(at + each, world_size)) for at in range(0, world_size, each)]
    means = [sum(written[rank] for rank in ranks) / len(ranks) for ranks in bins]
    width = 1 / max(len(bins), 6)
    columns = []
    for at, (ranks, mean) in enumerate(zip(bins, means, strict=True)):
        height = mean / max(means)
        tip = f"{ranks_text(ranks)}: {decimal(round(mean))}{' each' if each > 1 else ''}"
        place = (at + 0.06) * width, 1 - height, 0.88 * width, height
        columns.append(shape("rect", *place, class_="tinted", style=hue(ranks[0]), data_tip=tip))
        if len(bins) <= _MOST_LABELS:
            label = f"rank {ranks[0]}" if len(bins) <= 6 else str(ranks[0])
            columns.append(tag("text", label, x=percent((at + 0.5) * width), y="92%", text_anchor="middle"))
    all_written = [written[rank] for rank in range(world_size)]
    more = f" {decimal(unknown)} more are in small tensors that several ranks packed together." if unknown else ""
    note = f"A column is a rank. The most: {decimal(max(all_written))}, the least: {decimal(min(all_written))}.{more}"
    return section(
        "Bytes written by each rank",
        chart("columns", "A column for each rank, as high as its bytes", columns),
        note=note,
    )


def cards_of(cuts: Sequence[Alike], entries: Mapping[str, ArrayEntry]) -> Markup:
    """A card for each way in which tensors are cut: its picture and its tensors."""
    cards, room = [], _MOST_RECTANGLES
    for number, cut in enumerate(cuts[:MOST_CARDS]):
        room -= len(cut.picture.rectangles)
        cards.append(_card(f"cut-{number}", cut, entries, is_drawn=room >= 0))
    if not cards:
        return Markup("")
    left = len(cuts) - len(cards)
    more = f" {left} more ways in which tensors are cut have no picture here." if left else ""
    note = (
        "Tensors that are cut alike share a picture, in the proportions of the largest of them. Hover over a box for its indices and "
        f"its writer.{more}"
    )
    return section("Which rank wrote which box", tag("div", cards, class_="cards"), note=note)


def _card(card: str, cut: Alike, entries: Mapping[str, ArrayEntry], *, is_drawn: bool) -> Markup:
    first, *_ = names = cut.names
    listed = [tag("li", f"{printable(name)} ({shape_text(entries[name].shape)})") for name in names[:_MOST_NAMES]]
    listed += [tag("li", f"and {len(names) - _MOST_NAMES:,} more")] if len(names) > _MOST_NAMES else []
    drawn = _drawn(cut.picture, entries[first]) if is_drawn else tag("p", "Too many boxes to draw on this page.")
    return tag(
        "article",
        tag("h3", f"{counted(len(cut.ranks), 'rank')} along {_dims(cut.dims)}"),
        tag("p", f"{num_tensors(len(names))}, {decimal(sum(entries[name].num_bytes for name in names))}"),
        drawn,
        tag("details", tag("summary", "Names"), tag("ul", listed)),
        id=card,
        class_="card",
    )


def _dims(dims: Sequence[int]) -> str:
    return f"dimension{'' if len(dims) == 1 else 's'} {' and '.join(map(str, dims))}"


def _drawn(picture: Picture, entry: ArrayEntry) -> Markup:
    sides = [entry.shape[dim] for dim in picture.dims]
    height = 40 if len(sides) == 1 else round(min(max(_CARD * sides[0] / sides[1], 96), 260))
    of = "" if len(picture.dims) == len(entry.shape) else f" of {_dims(picture.dims)}"
    boxes = [
        shape(
            "rect",
            one.x,
            one.y,
            one.width,
            one.height,
            class_="tinted",
            style=hue(one.ranks[0]),
            data_tip=_written(one) + of,
        )
        for one in picture.rectangles
    ]
    labels = [_label(one) for one in picture.rectangles if one.width * _CARD > 18 and one.height * height > 14]
    svg = chart("picture", "The boxes that ranks wrote", boxes, labels, style=f"height:{height}px")
    if picture.is_whole:
        return svg
    marked = " x ".join(f"{side}{'*' if dim in picture.dims else ''}" for dim, side in enumerate(entry.shape))
    return joined(svg, tag("p", f"Of {marked} the sides marked * are shown, and not every cut."))


def _written(one: Rectangle) -> str:
    return f"{ranks_text(one.ranks)} wrote [{', '.join(f'{first}:{last + 1}' for first, last in one.box)}]"


def _label(one: Rectangle) -> Markup:
    text = str(one.ranks[0]) if len(one.ranks) == 1 else f"{one.ranks[0]}, …"
    middle = {"x": percent(one.x + one.width / 2), "y": percent(one.y + one.height / 2)}
    return tag("text", text, **middle, text_anchor="middle", dominant_baseline="central")
