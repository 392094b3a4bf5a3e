"""The command `ls`: one line for each checkpoint, within 80 columns, or for each folder of checkpoints below a folder of runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from ckpt.backends.registry import name_of_store
from ckpt.catalog.catalog import catalog_at
from ckpt.catalog.committed import COMMITTED, Committed, look
from ckpt.catalog.incremental import disk_use
from ckpt.cli.arguments import argued, argument, message_of
from ckpt.cli.reading import code_of, committed_below, committed_in, mark_of
from ckpt.cli.tables import Listing, counted, print_json, show
from ckpt.errors import CheckpointError, CheckpointNotFoundError, ConfigurationError
from ckpt.format.manifest import MANIFEST_NAME, CheckpointManifest
from ckpt.format.places import Place, as_place, step_of
from ckpt.interop.programs import format_at
from ckpt.saving.tiers import memory_of
from ckpt.storage.stored import read_manifest

_MOST_LEVELS = 4
"""Folders between a folder of runs and the checkpoints of one: a date, a sweep, a job and `checkpoints`."""
_UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


@dataclass
class ListKeys:
    """The keys of the command."""

    path: str = argued("a folder of checkpoints, one of runs, or an address")
    best: str | None = argued("the metric by which a checkpoint is the best; without it the only one that was saved", default=None)
    greater: bool = argued("the greatest value of that metric is the best, not the least", default=False)
    json: bool = argued("print only JSON", default=False)


@dataclass(frozen=True)
class Row:
    """A checkpoint in the listing.

    Attributes:
        size_bytes: of its components: tensors and plain values.
        layout: ranks, and the groups of the run that saved it, such as "8 ranks, dp 4, tp 2".
        format: names of the formats that its arrays have.
        mark: "damaged", or "unreadable", which tells nothing of damage; None: its manifest is whole.
        problem: why.
        removed: components that retention has taken out.
    """

    id: str
    path: str
    committed: datetime
    size_bytes: int
    layout: str
    format: str
    metrics: dict[str, float | None]
    mark: str | None = None
    problem: str | None = None
    removed: tuple[str, ...] = ()


def list_checkpoints(keys: ListKeys) -> int:
    """Print the listing; return 1 where a checkpoint is damaged, 2 where one cannot be read, else 0.

    Raises:
        CheckpointNotFoundError: there are no checkpoints at the path.
        ConfigurationError: none of them has the metric.
    """
    root = as_place(keys.path, "path")
    checkpoint = look(root)
    committed = committed_in(root) if checkpoint is None else [checkpoint]
    if not committed and (folders := roots_below(root)):
        return _list_folders(folders, keys)
    if not committed and (kind := format_at(root)) is not None:
        return _list_other(root, kind, keys)
    in_memory = catalog_at(memory_of(root)).committed() if checkpoint is None else []
    rows, kept = (
        [row for checkpoint in found if (row := row_of(checkpoint)) is not None]
        for found in (committed or ([] if in_memory else committed_below(root)), in_memory)
    )
    best = best_of(rows, keys.best, greater=keys.greater)
    if keys.json:
        found = {"checkpoints": [_as_json(row) for row in rows], "in_memory": [_as_json(row) for row in kept]}
        print_json({"path": str(root), "best": best and best.id} | found)
    else:
        _show(rows, kept, best, keys)
    return code_of(row.mark for row in rows)


def _list_other(path: Place, kind: str, keys: ListKeys) -> int:
    """A checkpoint of another program, which has no manifest."""
    size = disk_use([path])[1] if not isinstance(path, Path) or path.is_dir() else path.stat().st_size
    if keys.json:
        print_json({"path": str(path), "format": kind, "size_bytes": size})
    else:
        show(f"{path}: {kind}, {decimal(size)} in files")
    return 0


def row_of(checkpoint: Committed[Place]) -> Row | None:
    """Return the row of a checkpoint; None: it was removed since it was listed."""
    where = checkpoint.id, str(checkpoint.path), checkpoint.timestamp
    try:
        manifest = read_manifest(checkpoint.path)
    except CheckpointNotFoundError:
        return None
    except (CheckpointError, OSError) as error:
        return Row(*where, 0, "", "", {}, mark_of(error), message_of(error))
    size = sum(component.size_bytes for component in manifest.components.values())
    metrics, removed = dict(manifest.metrics), tuple(manifest.removed)
    return Row(*where, size, layout_of(manifest), format_of(manifest), metrics, removed=removed)


def layout_of(manifest: CheckpointManifest) -> str:
    """Return the ranks of the run that saved a checkpoint, and the sizes of its groups that are neither one rank nor all."""
    groups: dict[str, Any] = manifest.topology.get("groups", {})
    sizes = {name: max(map(len, instances), default=0) for name, instances in groups.items()}
    named = [f"{name} {size}" for name, size in sizes.items() if 1 < size < manifest.world_size]
    return ", ".join([counted(manifest.world_size, "rank"), *named])


def format_of(manifest: CheckpointManifest) -> str:
    """Return the names of the formats of a checkpoint's arrays, the most frequent first."""
    stores = Counter(entry.store for entry in manifest.arrays.values() if entry.store is not None)
    return ", ".join(name_of_store(store) for store, _ in stores.most_common()) or "no arrays"


def best_of(rows: Sequence[Row], asked: str | None, *, greater: bool) -> Row | None:
    """Return the checkpoint with the best value of a metric, the oldest of equal ones; None: no metric, or several and none is chosen.

    Raises:
        ConfigurationError: none has a value of the metric that is asked for.
    """
    named = [row for row in rows if row.metrics]
    names = sorted({name for row in named for name in row.metrics})
    metric = asked or (names[0] if len(names) == 1 else None)
    known = [(value, row) for row in named if metric is not None and (value := row.metrics.get(metric)) is not None]
    if not known and asked is not None and any(row.mark is None for row in rows):
        there = f"they have {', '.join(names)}" if names else "they were saved without metrics"
        raise ConfigurationError(f"{argument('best', asked)}: no checkpoint here has a value of it; {there}")
    if not known:
        return None
    return (max if greater else min)(known, key=lambda pair: pair[0])[1]


def age_of(time: datetime, now: datetime | None = None) -> str:
    """Return how long ago a time was, in one unit, such as "3 h"."""
    seconds = max(0, int(((now or datetime.now(UTC)) - time).total_seconds()))
    size, unit = next(((size, unit) for size, unit in _UNITS if seconds >= size), (1, "s"))
    return f"{seconds // size} {unit}"


def _show(rows: Sequence[Row], in_memory: Sequence[Row], best: Row | None, keys: ListKeys) -> None:
    table = Listing("step", "age", "size", "layout", "format", "marks", right=(1, 2), bare=(1, 2, 3, 4, 5))
    for row in rows:
        marks = ["newest"] if row is rows[-1] and len(rows) > 1 else []
        if row is best:
            values = row.metrics.items() if keys.best is None else [(keys.best, row.metrics[keys.best])]
            marks += [f"best ({name} {value:.4g})" for name, value in values if value is not None]
        marks += [row.mark] if row.mark is not None else []
        marks += [f"without {', '.join(row.removed)}"] if row.removed else []
        size = decimal(row.size_bytes) if row.mark is None else ""
        table.add(_step(row), age_of(row.committed), size, row.layout, row.format, ", ".join(marks))
    for row in in_memory:
        table.add(_step(row), age_of(row.committed), decimal(row.size_bytes), row.layout, row.format, "in memory of this host")
    show(table, *(f"{Path(row.path).name}: {row.problem}" for row in rows if row.problem is not None))


def _step(row: Row) -> str:
    step = step_of(row.id)
    return row.id if step is None else str(step)


def _as_json(row: Row) -> dict[str, Any]:
    return asdict(row) | {"step": step_of(row.id), "committed": row.committed.isoformat()}


def _list_folders(folders: Mapping[Path, Sequence[Committed[Place]]], keys: ListKeys) -> int:
    if keys.json:
        rows = [{"path": str(root), "checkpoints": len(each), "newest": each[-1].id} for root, each in folders.items()]
        print_json({"path": keys.path, "folders": rows})
        return 0
    table = Listing("folder", "checkpoints", "newest", "age", right=(1, 3))
    for root, each in folders.items():
        table.add(str(root), str(len(each)), each[-1].id, age_of(each[-1].timestamp))
    show(table)
    return 0


def roots_below(folder: Place) -> dict[Path, Sequence[Committed[Place]]]:
    """Return the folders that hold committed checkpoints, in a folder of runs or of sweeps, by name, and what they hold."""
    if not isinstance(folder, Path) or not folder.is_dir():
        return {}
    found: set[Path] = set()
    for depth in range(1, _MOST_LEVELS + 1):
        for manifest in folder.glob(f"{'*/' * depth}{COMMITTED}*/{MANIFEST_NAME}"):
            found.add(manifest.parent.parent)
    shown = [root for root in sorted(found) if not any(name.startswith(".") for name in root.relative_to(folder).parts)]
    return {root: committed for root in shown if (committed := catalog_at(root).committed())}
