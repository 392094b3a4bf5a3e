"""A checkpoint as a page: components, a treemap of its tensors, a table of them, and which rank wrote which box."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from rich.filesize import decimal

from ckpt.catalog.incremental import DiskUse
from ckpt.errors import printable
from ckpt.format.manifest import ArrayEntry, CheckpointManifest, ComponentManifest
from recipes.commands.checkpoint_pictures import (
    MOST_CARDS,
    Group,
    Item,
    Tensor,
    cards_of,
    num_tensors,
    treemap,
    writers,
)
from recipes.commands.reading import ranks_text, shape_text, where_text
from recipes.commands.sharding_pictures import alike
from recipes.support.page import (
    Cell,
    Column,
    Content,
    Markup,
    Row,
    dotted,
    facts,
    hue,
    joined,
    section,
    table,
    tag,
)

_MOST_ITEMS = 500
"""Tensors that are shown one by one; more are grouped, into as many groups at most."""
_NUMBER = re.compile(r"\d+")


def checkpoint_sections(manifests: Mapping[str, CheckpointManifest], use: DiskUse) -> Markup:
    """Return the sections about one checkpoint.

    Args:
        manifests: its own under the name "", and those of checkpoints inside of it by their folders.
    """
    entries: dict[str, ArrayEntry] = {}
    components: dict[str, ComponentManifest] = {}
    component_of: dict[str, str] = {}
    for folder, one in manifests.items():
        above = f"{folder}/" if folder else ""
        components |= {f"{above}{key}": component for key, component in one.components.items()}
        entries |= {f"{above}{name}": entry for name, entry in one.arrays.items()}
        component_of |= {f"{above}{name}": f"{above}{name.partition('/')[0]}" for name in one.arrays}
    cuts = alike(entries)
    cards = {name: f"cut-{number}" for number, cut in enumerate(cuts[:MOST_CARDS]) for name in cut.names}
    tensors = [Tensor(printable(name), component_of[name], entry, cards.get(name)) for name, entry in entries.items()]
    tensors.sort(key=lambda one: (-one.num_bytes, one.name))
    items = tensors if len(tensors) <= _MOST_ITEMS else _groups(tensors)
    hues = {key: hue(number) for number, key in enumerate(components)}
    manifest = manifests[""]
    return joined(
        _facts(manifest, tensors, use),
        _components(components, tensors, hues),
        treemap(items, hues),
        writers(manifest.world_size, tensors),
        cards_of(cuts, entries),
        _tensors(len(tensors), items, hues),
        _topology(manifest),
    )


def _facts(manifest: CheckpointManifest, tensors: Sequence[Tensor], use: DiskUse) -> Markup:
    pairs: list[tuple[str, Content]] = [
        ("checkpoint id", manifest.checkpoint_id),
        ("committed (UTC)", manifest.timestamp.isoformat(" ", "seconds").removesuffix("+00:00")),
        ("ranks", str(manifest.world_size)),
        ("tensors", f"{len(tensors):,}"),
        ("bytes of tensors", decimal(sum(one.num_bytes for one in tensors))),
        ("in files", decimal(use.apparent_bytes)),
        ("files of its own", decimal(use.unique_bytes)),
        ("ckpt", manifest.ckpt_version or "-"),
        ("torch", manifest.pytorch_version or "-"),
        ("format", f"version {manifest.format_version}"),
    ]
    pairs += [(name, "-" if value is None else f"{value:.6g}") for name, value in list(manifest.metrics.items())[:8]]
    return facts(pairs)


def _components(
    components: Mapping[str, ComponentManifest], tensors: Sequence[Tensor], hues: Mapping[str, str]
) -> Markup:
    counts = Counter(one.component for one in tensors)
    columns = [
        Column("component"),
        Column("pattern", tip="How the ranks shared it when it was saved"),
        Column("group", tip="The process group whose members shared it"),
        Column("written by"),
        Column("equal on", tip="The ranks that held equal copies"),
        Column("tensors", is_number=True, greatest_first=True),
        Column("size", is_number=True, greatest_first=True, tip="Tensors, each counted once, and plain values"),
    ]
    rows = []
    for key, one in components.items():
        equal_on = "" if one.replicated_across is None else ranks_text(one.replicated_across)
        texts = (one.sharing_pattern, one.group_name or "", ranks_text(one.ranks), equal_on)
        numbers = Cell(f"{counts[key]:,}", counts[key]), Cell(decimal(one.size_bytes), one.size_bytes)
        rows.append(Row([Cell(dotted(hues[key], key), key), *map(Cell, texts), *numbers]))
    return section("Components", table(columns, rows, name="components"))


def _tensors(number: int, items: Sequence[Item], hues: Mapping[str, str]) -> Markup:
    columns = [
        Column("tensor"),
        Column("dtype"),
        Column("shape"),
        Column("size", is_number=True, greatest_first=True),
        Column("written", tip="Storage format, folder, and the ranks that wrote it"),
    ]
    note = "Tensors whose names differ in numbers only share a row." if len(items) < number else ""
    rows = [_row(one, hues.get(one.component, hue(0))) for one in items]
    made = table(columns, rows, name="tensors", filters=len(rows) > 8)
    return section(num_tensors(number), made, note=note)


def _row(one: Item, color: str) -> Row:
    tensors = [one] if isinstance(one, Tensor) else one.tensors
    name = tag("a", one.name, href=f"#{one.card}") if one.card else one.name
    number = tag("small", f" {num_tensors(len(tensors))}") if isinstance(one, Group) else ""
    texts = (
        [tensor.entry.dtype for tensor in tensors],
        [shape_text(tensor.entry.shape) for tensor in tensors],
        [where_text(tensor.entry, tensor.name) for tensor in tensors] if isinstance(one, Tensor) else [""],
    )
    dtype, shape, where = (Cell(_few(text)) for text in texts)
    return Row(
        [Cell(dotted(color, name, number), one.name), dtype, shape, Cell(decimal(one.num_bytes), one.num_bytes), where]
    )


def _few(texts: Iterable[str]) -> str:
    distinct = list(dict.fromkeys(texts))
    return ", ".join(distinct[:3]) + (", …" if len(distinct) > 3 else "")


def _groups(tensors: Sequence[Tensor]) -> list[Item]:
    """Group tensors whose names differ in numbers only; of the smallest groups, all of a component become one."""
    found: dict[tuple[str, str], list[Tensor]] = {}
    for one in tensors:
        found.setdefault((one.component, _NUMBER.sub("*", one.name)), []).append(one)
    by_bytes = sorted(found.items(), key=lambda group: -sum(one.num_bytes for one in group[1]))
    items: list[Item] = [
        members[0] if len(members) == 1 else Group(name, component, members)
        for (component, name), members in by_bytes[:_MOST_ITEMS]
    ]
    others: dict[str, list[Tensor]] = {}
    for (component, _), members in by_bytes[_MOST_ITEMS:]:
        others.setdefault(component, []).extend(members)
    return [*items, *(Group(f"{component}/…", component, members) for component, members in others.items())]


def _topology(manifest: CheckpointManifest) -> Markup:
    groups = manifest.topology.get("groups")
    if not isinstance(groups, dict) or not groups:
        return Markup("")
    columns = [Column("group"), Column("instances", is_number=True), Column("ranks of each")]
    rows = []
    for name, instances in list(groups.items())[:64]:
        shown = ["[" + ", ".join(map(str, one[:8])) + (", …]" if len(one) > 8 else "]") for one in instances[:16]]
        rows.append(
            Row(
                [
                    Cell(name),
                    Cell(str(len(instances)), len(instances)),
                    Cell(" ".join(shown) + (" …" if len(instances) > 16 else "")),
                ]
            )
        )
    return section("Process groups", table(columns, rows, name="groups"))
