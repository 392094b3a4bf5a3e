"""The command `diff`: what changed between two checkpoints. It writes nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import MISSING, DictConfig, OmegaConf

from ckpt.convert.comparing import Difference, compare
from ckpt.errors import ConfigurationError
from ckpt.format.names import local_path
from ckpt.loading.direct import DirectLoad
from ckpt.loading.loader import source_at
from ckpt.ranks.topology import Topology
from recipes.support.config import values_of
from recipes.support.tables import add_row, console, counted, printable, table_of

_LONGEST = 60


@dataclass
class DiffLoadKeys:
    """The keys of `load`."""

    allow_pickle: bool = False


@dataclass
class DiffKeys:
    """The keys of the command."""

    a: str = MISSING
    b: str = MISSING
    load: DiffLoadKeys = field(default_factory=DiffLoadKeys)
    json: bool = False


def keys_of(cfg: DictConfig) -> DiffKeys:
    """Return the config of the command, its types checked.

    Raises:
        ConfigurationError: a or b is missing, or the URL of an object store.
    """
    for name in ("a", "b"):
        if OmegaConf.is_missing(cfg, name):
            raise ConfigurationError(f"no {name} is given; add {name}=<a checkpoint>")
    keys = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(DiffKeys), cfg))
    assert isinstance(keys, DiffKeys)
    for name in ("a", "b"):
        local_path(getattr(keys, name), name)
    return keys


def diff(keys: DiffKeys) -> int:
    """Compare every byte, print the differences, and return 0 if there are none, else 1."""
    a, b = Path(keys.a), Path(keys.b)
    found = [*_of_configs(a, b, keys.load.allow_pickle), *compare(a, b, allow_pickle=keys.load.allow_pickle)]
    if keys.json:
        rows = [{name: _as_json(value) for name, value in asdict(one).items()} for one in found]
        print(json.dumps({"equal": not found, "a": keys.a, "b": keys.b, "differences": rows}, indent=2))
    elif not found:
        print(printable(f"{keys.a} and {keys.b} are equal"))
    else:
        _show(found)
    return 1 if found else 0


def _of_configs(a: Path, b: Path, allow_pickle: bool) -> Iterator[Difference]:
    """The keys of the configs that the checkpoints were saved with, where both have one."""
    texts = [source_at(p, Topology.alone(), DirectLoad(), allow_pickle=allow_pickle).config_text for p in (a, b)]
    if not all(texts):
        return
    left, right = (values_of(text) for text in texts)
    for name in sorted({*left, *right}):
        if name not in left or name not in right:
            yield Difference("config", name, f"only in {'a' if name in left else 'b'}", left.get(name), right.get(name))
        elif left[name] != right[name]:
            yield Difference("config", name, "value", left[name], right[name])


def _show(found: list[Difference]) -> None:
    table = table_of("component", "name", "difference", "a", "b", "elements", "largest", right=(5, 6))
    for one in found:
        of_bits = one.what == "bits"
        cells = [f"norm {value:.6g}" if of_bits else _text(value) for value in (one.a, one.b)]
        numbers = [str(one.num_differ), f"{one.largest:.4g}"] if of_bits else ["", ""]
        add_row(table, one.component, one.name, one.what, *cells, *numbers)
    console().print(table)
    components = {one.component for one in found}
    print(f"{counted(len(found), 'difference')} in {', '.join(map(printable, sorted(components)))}")


def _text(value: Any) -> str:
    text = "" if value is None else json.dumps(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 4]} ..."


def _as_json(value: Any) -> Any:
    """Strict JSON has no NaN and no infinity."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
