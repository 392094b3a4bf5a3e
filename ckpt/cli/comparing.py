"""The command `diff`: what changed between two checkpoints. It writes nothing."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ckpt.cli.arguments import LoadKeys, argued
from ckpt.cli.config_text import values_of
from ckpt.cli.tables import Listing, counted, first_rows, more, most_rows, print_json, show
from ckpt.format.places import as_place
from ckpt.interop.comparing import Difference, compare
from ckpt.interop.other_source import OtherSource
from ckpt.interop.registry import source_at
from ckpt.loading.direct import DirectLoad
from ckpt.ranks.topology import Topology
from ckpt.storage.stored import noticing_removal

_LONGEST = 60


@dataclass
class DiffKeys:
    """The keys of the command."""

    a: str = argued("a checkpoint")
    b: str = argued("a checkpoint")
    load: LoadKeys = field(default_factory=LoadKeys)
    all: bool = argued("print all differences, not the first twenty", default=False)
    json: bool = argued("print only JSON", default=False)


def diff(keys: DiffKeys) -> int:
    """Compare every byte, print the differences, and return 0 if there are none, else 1.

    Raises:
        CheckpointGoneError: one was removed or replaced while it was read.
    """
    with noticing_removal(as_place(keys.a, "a")), noticing_removal(as_place(keys.b, "b")):
        return _diff(keys)


def _diff(keys: DiffKeys) -> int:
    a, b = (
        source_at(as_place(path, "a or b"), Topology.alone(), DirectLoad(), allow_pickle=keys.load.allow_pickle)
        for path in (keys.a, keys.b)
    )
    for source in (a, b):
        if isinstance(source, OtherSource):
            source.leaves_out_unknown = True
    configs = (values_of(a.config_text), values_of(b.config_text)) if a.config_text and b.config_text else ({}, {})
    found = [*of_configs(*configs), *compare(a, b)]
    if keys.json:
        print_json({"equal": not found, "a": keys.a, "b": keys.b, "differences": as_json(found)})
    elif not found:
        show(f"{keys.a} and {keys.b} are equal")
    else:
        counts = sorted(Counter(difference.component for difference in found).items())
        each = f": {', '.join(f'{number:,} in {key}' for key, number in counts)}"
        show(f"{counted(len(found), 'difference')}{each if len(counts) > 1 else f' in {counts[0][0]}'}", "")
        show(*listed(found, all=keys.all))
    return 1 if found else 0


def of_configs(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Difference]:
    """Yield the differences of two configs, given by dotted key."""
    for name in sorted({*a, *b}):
        if name not in a or name not in b:
            yield Difference("config", name, f"only in {'a' if name in a else 'b'}", a.get(name), b.get(name))
        elif a[name] != b[name]:
            yield Difference("config", name, "value", a[name], b[name])


def listed(found: Sequence[Difference], *, all: bool) -> list[str | Listing]:
    """Return the differences for `show`: without `all` a few of each component, and the number of the others."""
    table = Listing(
        "component", "name", "difference", "a", "b", "elements", "largest", right=(5, 6), names=2, bare=(2,)
    )
    for row in first_rows(found, lambda one: one.component, most=most_rows(all=all)):
        of_bits = row.what == "bits"
        cells = [f"norm {value:.6g}" if of_bits else _text(value) for value in (row.a, row.b)]
        numbers = [str(row.num_differ), f"{row.largest:.4g}"] if of_bits else ["", ""]
        table.add(row.component, row.name, row.what, *cells, *numbers)
    return [table, *more(len(found) - len(table), "difference")]


def as_json(found: Sequence[Difference]) -> list[dict[str, Any]]:
    """Return a row of JSON for each difference."""
    return [{name: _as_json(value) for name, value in asdict(difference).items()} for difference in found]


def _text(value: Any) -> str:
    text = "" if value is None else json.dumps(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 4]} ..."


def _as_json(value: Any) -> Any:
    """Strict JSON has no NaN and no infinity."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
