"""What the page of a checkpoint shows: components, a treemap of its tensors, a table of them, and which rank wrote which box."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.filesize import decimal

from ckpt.catalog.incremental import DiskUse
from ckpt.cli.pages.page import figure, hue
from ckpt.cli.pages.sharding_pictures import Alike, Rectangle, alike
from ckpt.cli.pages.treemap import divided
from ckpt.cli.reading import ranks_text, shape_text, where_text
from ckpt.cli.tables import counted
from ckpt.errors import printable
from ckpt.format.manifest import ArrayEntry, CheckpointManifest, ComponentManifest

_MOST_ITEMS = 500
"""Tensors that are shown one by one; more are grouped, into as many groups at most."""
_MOST_CARDS = 40
_MOST_RECTANGLES = 8000
_MOST_NAMES = 12
_MOST_COLUMNS = 256
_MOST_LABELS = 24
_MAP_RATIO = 1080 / 520
"""Width of the treemap to its height, on a wide screen."""
_CARD = 200
"""Width of a picture of boxes, at least."""
_NUMBER = re.compile(r"\d+")
_BREAK = re.compile(r"(?<=[./_])(?=.)")
"""A place at which a name is broken first."""


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


def checkpoint_values(manifests: Mapping[str, CheckpointManifest], use: DiskUse) -> dict[str, Any]:
    """Return the value `checkpoint` of the template checkpoint.html.

    Args:
        manifests: its own under the name "", and those of checkpoints inside of it by their folders.
    """
    entries: dict[str, ArrayEntry] = {}
    components: dict[str, ComponentManifest] = {}
    component_of: dict[str, str] = {}
    for folder, inner in manifests.items():
        above = f"{folder}/" if folder else ""
        components |= {f"{above}{key}": component for key, component in inner.components.items()}
        entries |= {f"{above}{name}": entry for name, entry in inner.arrays.items()}
        component_of |= {f"{above}{name}": f"{above}{name.partition('/')[0]}" for name in inner.arrays}
    cuts = alike(entries)
    cards = {name: f"cut-{number}" for number, cut in enumerate(cuts[:_MOST_CARDS]) for name in cut.names}
    tensors = [Tensor(printable(name), component_of[name], entry, cards.get(name)) for name, entry in entries.items()]
    tensors.sort(key=lambda one: (-one.num_bytes, one.name))
    colors = {key: hue(number) for number, key in enumerate(components)}
    counts = Counter(component_of.values())
    items = _items(tensors, colors)
    return {
        "manifest": manifests[""],
        "use": use,
        "metrics": [(name, figure(value, "number")) for name, value in list(manifests[""].metrics.items())[:8]],
        "num_bytes": sum(tensor.num_bytes for tensor in tensors),
        "num_tensors": len(tensors),
        "components": [
            {
                "key": key,
                "color": colors[key],
                "about": about,
                "num_tensors": counts[key],
                "written_by": ranks_text(about.ranks),
                "equal_on": None if about.replicated_across is None else ranks_text(about.replicated_across),
            }
            for key, about in components.items()
        ],
        "regions": _regions(items),
        "ranks": _ranks(manifests[""].world_size, tensors),
        "cards": _cards(cuts, entries),
        "num_left_out": max(len(cuts) - _MOST_CARDS, 0),
        "tensors": items,
        "groups": _groups(manifests[""]),
    }


def _items(tensors: Sequence[Tensor], colors: Mapping[str, str]) -> list[dict[str, Any]]:
    """Group many tensors whose names differ in numbers only; of the smallest groups, all of a component become one."""
    by_name: dict[tuple[str, str], list[Tensor]] = {}
    for tensor in tensors:
        name = tensor.name if len(tensors) <= _MOST_ITEMS else _NUMBER.sub("*", tensor.name)
        by_name.setdefault((tensor.component, name), []).append(tensor)
    groups: dict[tuple[str, str], list[Tensor]] = {}
    for (component, name), members in sorted(by_name.items(), key=lambda group: -_num_bytes(group[1])):
        groups.setdefault((component, name if len(groups) < _MOST_ITEMS else f"{component}/…"), []).extend(members)
    return [_item(name, members, colors.get(component, hue(0))) for (component, name), members in groups.items()]


def _item(name: str, tensors: Sequence[Tensor], color: str) -> dict[str, Any]:
    """A tensor, or tensors of a component that the page shows as one: the numbers in which their names differ are `*`."""
    first, *others = tensors
    name = name if others else first.name
    number = counted(len(tensors), "tensor") if others else ""
    size = _num_bytes(tensors)
    dtype = _few(tensor.entry.dtype for tensor in tensors)
    shape = _few(shape_text(tensor.entry.shape) for tensor in tensors)
    written = "" if others else where_text(first.entry, name)
    return {
        "name": name,
        "name_parts": _BREAK.split(name.removeprefix(f"{first.component}/")),
        "component": first.component,
        "number": number,
        "num_bytes": size,
        "color": color,
        "card": first.card if len({tensor.card for tensor in tensors}) == 1 else None,
        "dtype": dtype,
        "shape": shape,
        "written": written,
        "tip": f"{name}\n{number or f'{dtype} {shape}'}, {decimal(size)}\n{written}".rstrip("\n"),
    }


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.num_bytes for tensor in tensors)


def _few(texts: Iterable[str]) -> str:
    distinct = list(dict.fromkeys(texts))
    return ", ".join(distinct[:3]) + (", …" if len(distinct) > 3 else "")


def _regions(items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The treemap: a rectangle for each component, divided into its tensors."""
    by_component: dict[str, list[Mapping[str, Any]]] = {}
    for item in sorted(items, key=lambda one: -one["num_bytes"]):
        if item["num_bytes"]:
            by_component.setdefault(item["component"], []).append(item)
    sizes = {key: sum(item["num_bytes"] for item in own) for key, own in by_component.items()}
    shown = sorted(sizes, key=lambda key: -sizes[key])
    regions = []
    for key, place in zip(shown, divided([sizes[key] for key in shown], _MAP_RATIO), strict=True):
        ratio = _MAP_RATIO * place.width / place.height
        tiles = divided([item["num_bytes"] for item in by_component[key]], ratio)
        region = {"name": key, "size": sizes[key], "part": sizes[key] / sum(sizes.values()), "place": place}
        regions.append(region | {"tiles": list(zip(by_component[key], tiles, strict=True))})
    return regions


def _ranks(world_size: int, tensors: Sequence[Tensor]) -> dict[str, Any] | None:
    """The bytes that each rank wrote; None where there is nothing to compare.

    The manifest does not say them of tensors that several ranks packed.
    """
    written, unknown = Counter[int](), 0
    in_chunks = Counter[tuple[tuple[int, int, int], ...]]()  # many tensors have the same writers
    for tensor in tensors:
        packed_in = tensor.entry.packed_in
        if len(packed_in) == 1:
            written[packed_in[0]] += tensor.num_bytes
        elif packed_in:
            unknown += tensor.num_bytes
        in_chunks[tensor.entry.writers] += tensor.num_bytes
    for runs, num_bytes in in_chunks.items():
        num_chunks = sum(count for _, _, count in runs)
        for rank, _, count in runs:
            written[rank] += num_bytes * count // num_chunks
    if world_size < 2 or not written.total():
        return None
    each = -(-world_size // _MOST_COLUMNS)
    bins = [range(at, min(at + each, world_size)) for at in range(0, world_size, each)]
    means = [sum(written[rank] for rank in ranks) / len(ranks) for ranks in bins]
    all_written = [written[rank] for rank in range(world_size)]
    return {
        "most": max(all_written),
        "least": min(all_written),
        "unknown": unknown,
        "columns": [
            {
                "first": ranks[0],
                "part": mean / max(means),
                "tip": f"{ranks_text(ranks)}: {decimal(round(mean))}{' each' if each > 1 else ''}",
                "label": f"rank {ranks[0]}" if len(bins) <= 6 else ranks[0] if len(bins) <= _MOST_LABELS else "",
            }
            for ranks, mean in zip(bins, means, strict=True)
        ],
    }


def _cards(cuts: Sequence[Alike], entries: Mapping[str, ArrayEntry]) -> list[dict[str, Any]]:
    """A card for each way in which tensors are cut: its picture and its tensors."""
    cards, room = [], _MOST_RECTANGLES
    for number, cut in enumerate(cuts[:_MOST_CARDS]):
        picture, names, entry = cut.picture, cut.names, entries[cut.names[0]]
        room -= len(picture.rectangles)
        sides = [entry.shape[dim] for dim in picture.dims]
        height = 40 if len(sides) == 1 else round(min(max(_CARD * sides[0] / sides[1], 96), 260))
        of = "" if len(picture.dims) == len(entry.shape) else f" of {_dims(picture.dims)}"
        marked = " x ".join(f"{side}{'*' if dim in picture.dims else ''}" for dim, side in enumerate(entry.shape))
        listed = [f"{printable(name)} ({shape_text(entries[name].shape)})" for name in names[:_MOST_NAMES]]
        cards.append(
            {
                "id": f"cut-{number}",
                "heading": f"{counted(len(cut.ranks), 'rank')} along {_dims(cut.dims)}",
                "size": f"{counted(len(names), 'tensor')}, {decimal(sum(entries[name].num_bytes for name in names))}",
                "height": height,
                "boxes": [(box, _written(box) + of, _label(box, height)) for box in picture.rectangles if room >= 0],
                "note": "" if picture.is_whole else f"Of {marked} the sides marked * are shown, and not every cut.",
                "names": listed + ([f"and {len(names) - _MOST_NAMES:,} more"] if len(names) > _MOST_NAMES else []),
            }
        )
    return cards


def _dims(dims: Sequence[int]) -> str:
    return f"dimension{'' if len(dims) == 1 else 's'} {' and '.join(map(str, dims))}"


def _written(one: Rectangle) -> str:
    return f"{ranks_text(one.ranks)} wrote [{', '.join(f'{first}:{last + 1}' for first, last in one.box)}]"


def _label(one: Rectangle, height: int) -> str:
    if one.width * _CARD <= 18 or one.height * height <= 14:
        return ""
    return str(one.ranks[0]) if len(one.ranks) == 1 else f"{one.ranks[0]}, …"


def _groups(manifest: CheckpointManifest) -> list[dict[str, Any]]:
    """The process groups of the run, the first instances of each."""
    groups = manifest.topology.get("groups")
    found = []
    for name, instances in list(groups.items())[:64] if isinstance(groups, dict) else ():
        shown = ["[" + ", ".join(map(str, instance[:8])) + (", …]" if len(instance) > 8 else "]") for instance in instances[:16]]
        found.append({"name": name, "num": len(instances), "ranks": " ".join(shown) + (" …" if len(instances) > 16 else "")})
    return found
