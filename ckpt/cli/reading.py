"""The commands `inspect` and `verify`, for a checkpoint or a folder of checkpoints: what they print. They change nothing at the path."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from glob import escape
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from ckpt.catalog.catalog import catalog_at
from ckpt.catalog.committed import Committed, look
from ckpt.catalog.incremental import DiskUse, disk_use, linked_with
from ckpt.catalog.verify import Verification, examine
from ckpt.cli.arguments import LoadKeys, argued, argument, message_of
from ckpt.cli.pages.page import refuse_other_files
from ckpt.cli.progress import SHOWN_AFTER_S, progress_bar
from ckpt.cli.reading_others import OtherAt, other_at
from ckpt.cli.tables import MOST_ROWS, Listing, counted, first_rows, more, most_rows, print_json
from ckpt.cli.tables import show as show_parts
from ckpt.errors import CheckpointError, CheckpointNotFoundError, ConfigurationError, is_unread, printable
from ckpt.format.manifest import MANIFEST_NAME, ArrayEntry, CheckpointManifest, ComponentManifest
from ckpt.format.places import Place, as_place, local_path
from ckpt.interop.recognised import recognised
from ckpt.loading.report import some_of
from ckpt.storage.checkpoint_files import files_below
from ckpt.storage.stored import checkpoints_below, gone, identity_of, not_a_checkpoint, noticing_removal, read_manifest

_VERSIONS = ("format_version", "ckpt_version", "pytorch_version")
_HEAD = ("checkpoint_id", *_VERSIONS, "world_size", "topology", "training_args_hash", "removed")
DAMAGED, UNREADABLE = "damaged", "unreadable"
"""Marks of checkpoints in listings. What cannot be read, such as for lack of permission, may be whole."""


@dataclass
class ReadingKeys:
    """The keys of a command that only reads."""

    path: str = argued("a checkpoint or a folder of checkpoints")
    load: LoadKeys = field(default_factory=LoadKeys)
    all: bool = argued("print all rows, not the first ones", default=False)
    json: bool = argued("print only JSON", default=False)


@dataclass
class InspectKeys(ReadingKeys):
    """The keys of `inspect`. `filter`, `limit` and `all` are for people: JSON and a page have everything."""

    filter: str | None = argued("list only those whose names contain this; with * or ?, a pattern for the whole name", default=None)
    limit: int | None = argued("the most rows", default=MOST_ROWS)
    html: str | None = argued("leave a page in this file", default=None)

    def validate(self) -> None:
        """Raise ConfigurationError for a limit below 1, or where a page cannot be written to `html`."""
        if self.limit is not None and self.limit < 1:
            raise ConfigurationError(f"{argument('limit', self.limit)}: expected at least 1, or {argument('limit', None)} for all")
        if self.html is not None:
            refuse_other_files(local_path(self.html, "html"))


def mark_of(error: Exception) -> str:
    """Return the mark of a checkpoint that was met with this error."""
    return UNREADABLE if is_unread(error) else DAMAGED


def code_of(marks: Iterable[str | None]) -> int:
    """Return the exit code of a command that has looked at several checkpoints: as `diff` and `fsck` have it."""
    found = {*marks}
    return 1 if DAMAGED in found else 2 if UNREADABLE in found else 0


def _mark(found: Verification) -> str | None:
    return (DAMAGED if len(found.problems) > len(found.unread) else UNREADABLE) if found.problems else None


def verify(keys: ReadingKeys) -> int:
    """Read every byte of every checkpoint at the path, print the problems, and return the exit code."""
    results: list[dict[str, Any]] = []
    removed = []
    at = as_place(keys.path, "path")
    if (other := _other_at(at, keys)) is not None:
        return _verify_other(other, keys)
    for path in checkpoints_at(at):
        began, size = time.monotonic(), disk_use([path])[0][path].apparent_bytes
        found = _examined(path, size)
        seconds = time.monotonic() - began
        if found is None:
            removed.append(str(path))
            continue
        others = [str(other) for other in linked_with(path.absolute().parent, path, found.damaged)]
        row = {"path": str(path), "mark": _mark(found), "problems": found.problems, "num_files": found.num_files}
        results.append(row | {"num_bytes": size, "damage_shared_with": others, "removed_components": found.removed})
        if not keys.json:
            speed = f", {seconds:.1f} s, {size / seconds / 1e9:.2f} GB/s" if seconds > SHOWN_AFTER_S else ""
            counts = f"{found.num_files} files, {size} bytes{speed}{told_of_removal(found.removed)}"
            _tell_result(path, found, counts, others, all=keys.all)
    if removed == [keys.path]:
        raise gone(at)
    code = code_of(result["mark"] for result in results)
    if keys.json:
        print_json({"ok": code == 0, "checkpoints": results, "removed": removed})
    for folder in removed if not keys.json else ():
        show_parts(f"{folder}: removed while it was read")
    return code


def show(keys: InspectKeys) -> int:
    """Show what a checkpoint holds, or which checkpoints a folder holds; return the exit code."""
    path = as_place(keys.path, "path")
    if is_checkpoint(path):
        with noticing_removal(path):
            manifest = read_manifest(path)
            use = disk_use([path])[0][path]
            if keys.json:
                print_json(_checkpoint_as_json(path, manifest) | asdict(use))
            else:
                _show_checkpoint(path, manifest, use, keys)
        return 0
    if (other := _other_at(path, keys)) is not None:
        _show_other(other, keys)
        return 0
    committed = committed_below(path)
    each, on_disk = disk_use(commit.path for commit in committed)
    rows = [row | asdict(each[commit.path]) for commit in committed if (row := _row(commit)) is not None]
    if keys.json:
        print_json({"path": str(path), "on_disk_bytes": on_disk, "checkpoints": rows})
    else:
        _show_root(path, rows, on_disk, keys)
    return code_of(row["mark"] for row in rows)


def told_of_removal(removed: Sequence[str]) -> str:
    """The end of a line about a checkpoint that retention has taken components out of."""
    return f", without {', '.join(removed)}, which retention removed" if removed else ""


def is_checkpoint(path: Place) -> bool:
    return look(path) is not None


def _other_at(path: Place, keys: ReadingKeys) -> OtherAt | None:
    return other_at(path, allow_pickle=keys.load.allow_pickle)


def committed_in(root: Place) -> Sequence[Committed[Place]]:
    """Return the checkpoints of a folder, the oldest commit first; none: there are none, or no such folder."""
    return catalog_at(root).committed() if not isinstance(root, Path) or root.is_dir() else []


def committed_below(root: Place) -> Sequence[Committed[Place]]:
    """Return the checkpoints of a folder, the oldest commit first.

    Raises:
        CheckpointNotFoundError: there are none, or no such folder.
    """
    if committed := committed_in(root):
        return committed
    if not isinstance(root, Path):
        raise CheckpointNotFoundError(f"there is no checkpoint at {root}, and none below it; give the address of one, or of those of a run")
    if (advice := recognised(root)) is not None:
        raise CheckpointNotFoundError(advice)
    if not root.exists():
        raise CheckpointNotFoundError(f"{root} does not exist; give a checkpoint or a folder of checkpoints")
    if found := checkpoints_below(root):
        newest = found[0]
        raise CheckpointNotFoundError(
            f"{not_a_checkpoint(root)}; give {newest if newest.parent == root else newest.parent}"
        )
    raise CheckpointNotFoundError(
        f"{not_a_checkpoint(root)}, and no committed checkpoint-*; give a checkpoint or a folder of checkpoints"
    )


def checkpoints_at(path: Place) -> list[Place]:
    """Return the checkpoint at a path, or all in it: committed ones, then folders named checkpoint-* that are not committed."""
    if is_checkpoint(path):
        return [path]
    committed = [commit.path for commit in committed_below(path)]
    if not isinstance(path, Path):
        return committed
    return committed + sorted(folder for folder in path.glob("checkpoint-*") if folder.is_dir() and folder not in committed)


def _examined(path: Place, size: int) -> Verification | None:
    """Examine a checkpoint; None: it was removed meanwhile."""
    before = identity_of(path)
    try:
        with progress_bar(f"verify {printable(path.name)}", size) as advance:
            found = examine(path, progress=advance)
    except (CheckpointError, OSError) as error:
        found = Verification()
        found.note(error)
    is_gone = identity_of(path) != before or (isinstance(path, Path) and not path.exists())
    return None if found.problems and is_gone else found


def _tell_result(path: Place, found: Verification, counts: str, others: Sequence[str], *, all: bool) -> None:
    problems = found.problems
    if not problems:
        show_parts(f"{path}: ok, {counts}")
        return
    shown = first_rows(problems, most=most_rows(all=all))
    shared = [f"  damaged files are shared with {', '.join(Path(other).name for other in others)}"] if others else []
    left_out = [f"  {line}" for line in more(len(problems) - len(shown), "problem")]
    what = "could not be read" if _mark(found) == UNREADABLE else counted(len(problems), "problem")
    lines = [f"{path}: {what}", *(f"  {problem}" for problem in shown), *left_out, *shared]
    show_parts(*lines)


def _verify_other(other: OtherAt, keys: ReadingKeys) -> int:
    """Read all tensors and values of a checkpoint without digests: what is missing, cut off or undecodable is found."""
    tensors = other.tensors
    num_bytes = sum(tensor.num_bytes for tensor in tensors.values())
    with progress_bar(f"read {printable(other.path.name)}", num_bytes) as advance:
        found = other.examined(advance)
    if keys.json:
        row = {
            "path": str(other.path),
            "mark": _mark(found),
            "problems": found.problems,
            "num_tensors": len(tensors),
            "num_bytes": num_bytes,
            "digests": False,
        }
        print_json({"ok": not found.problems, "checkpoints": [row], "removed": []})
    elif found.problems:
        _tell_result(other.path, found, "", [], all=keys.all)
    else:
        read = f"{counted(len(tensors), 'tensor')}, {num_bytes} bytes, can be read"
        show_parts(f"{other.path}: {other.kind} has no digests: nothing to verify; {read}")
    return code_of([_mark(found)])


def _show_other(other: OtherAt, keys: InspectKeys) -> None:
    tensors, values = other.tensors, other.values
    if keys.json:
        arrays = {name: tensor.to_json() | {"size_bytes": tensor.num_bytes} for name, tensor in tensors.items()}
        print_json(
            {"path": str(other.path), "format": other.kind, "arrays": arrays, "values": values, "unread": other.unread}
        )
        return
    size = decimal(sum(tensor.num_bytes for tensor in tensors.values()))
    head = f"{other.path}: {other.kind}, {counted(len(tensors), 'tensor')}, {size}, no digests"
    head += f"; {counted(len(values), 'plain value')}: {some_of(values, MOST_ROWS)}" if values else ""
    named = [(name, tensor) for name, tensor in tensors.items() if _is_chosen(name, keys.filter)]
    arrays_table = Listing("array", "dtype", "shape", "size", "", right=(3,), text=(4,), bare=(1, 2, 3))
    for name, entry in first_rows(named, most=None if keys.all else keys.limit):
        tied = f"is {entry.alias_of}" if entry.alias_of is not None else ""
        arrays_table.add(name, entry.dtype, shape_text(entry.shape), decimal(entry.num_bytes), tied)
    below = _left_out(list(tensors), len(named), len(arrays_table), "array", "", keys)
    shown: list[str | Listing] = ["", arrays_table] if named else []
    show_parts(head, *shown, *(["", *below] if below else []), *other.unread)


def _row(one: Committed[Place]) -> dict[str, Any] | None:
    """Return the row of a checkpoint in the table; None: it was removed since it was listed."""
    row: dict[str, Any] = {"id": one.id, "path": str(one.path), "timestamp": one.timestamp.isoformat()}
    try:
        manifest = read_manifest(one.path)
    except CheckpointNotFoundError:
        return None
    except (CheckpointError, OSError) as error:
        return row | {"mark": mark_of(error), "problem": message_of(error)}
    return row | {
        "mark": None,
        "problem": None,
        "world_size": manifest.world_size,
        "components": list(manifest.components),
        "removed": manifest.removed,
        "num_arrays": len(manifest.arrays),
        "size_bytes": sum(component.size_bytes for component in manifest.components.values()),
    }


def manifests_below(path: Place, manifest: CheckpointManifest) -> dict[str, CheckpointManifest]:
    """The manifests of checkpoints inside of a checkpoint, by folder."""
    folders = [str(Path(file).parent) for file in manifest.files if Path(file).name == MANIFEST_NAME]
    with files_below(path) as above:
        for folder in folders:
            above.require_folder(folder)
    return {folder: read_manifest(path / folder) for folder in folders}


def _checkpoint_as_json(path: Place, manifest: CheckpointManifest) -> dict[str, Any]:
    return {
        "path": str(path),
        **{name: getattr(manifest, name) for name in _HEAD},
        "timestamp": manifest.timestamp.isoformat(),
        "components": {key: component.to_json() for key, component in manifest.components.items()},
        "arrays": {name: entry.to_json() | {"size_bytes": entry.num_bytes} for name, entry in manifest.arrays.items()},
        "below": {
            folder: _checkpoint_as_json(path / folder, inner) for folder, inner in manifests_below(path, manifest).items()
        },
    }


def _show_root(root: Place, rows: Sequence[dict[str, Any]], on_disk: int, keys: InspectKeys) -> None:
    """Components that all checkpoints share are shown once above the table, problems below it, in the whole width."""
    names = [Path(row["path"]).name for row in rows]
    named = [row for row, name in zip(rows, names, strict=True) if _is_chosen(name, keys.filter)]
    limit = None if keys.all else keys.limit
    shown = named[-limit:] if limit is not None else named
    headings = "checkpoint", "committed\n(UTC)", "ranks", "arrays", "size", "files", "unique"
    table = Listing(*headings, right=(2, 3, 4, 5, 6))
    sound = [row for row in rows if row["problem"] is None]
    alike = len({tuple(sorted({*row["components"], *row["removed"]})) for row in sound}) == 1
    for row in shown:
        name, when = Path(row["path"]).name, row["timestamp"][:19].split("T")
        mark = ["  the newest"] if row is rows[-1] else []
        mark += [f"  without {', '.join(row['removed'])}"] if row.get("removed") else []
        use = decimal(row["apparent_bytes"]), decimal(row["unique_bytes"])
        if row["problem"] is not None:
            table.add([name, *mark], when, row["mark"], "", "", *use)
            continue
        own = [] if alike else [f"  {', '.join(row['components'])}"]
        table.add(
            [name, *mark, *own],
            when,
            str(row["world_size"]),
            str(row["num_arrays"]),
            decimal(row["size_bytes"]),
            *use,
        )
    head = [f"{root}: {counted(len(rows), 'checkpoint')}, the oldest commit first, {decimal(on_disk)} on disk"]
    head += [f"components: {', '.join(sound[-1]['components'])}"] if alike else []
    problems = [f"{Path(row['path']).name}: {row['problem']}" for row in rows if row["problem"] is not None]
    below = [*_left_out(names, len(named), len(shown), "checkpoint", "older ", keys), *problems]
    show_parts(*head, "", *([table] if shown else []), *([""] if below and shown else []), *below)


def _is_chosen(name: str, wanted: str | None) -> bool:
    """Whether `filter` chooses a name: it is a part of it, in capitals or not; or, with `*` or `?`, a pattern for all of it."""
    if wanted is None:
        return True
    pattern = wanted.lower() if set("*?") & set(wanted) else f"*{escape(wanted.lower())}*"
    return fnmatchcase(name.lower(), pattern)


def _left_out(
    names: Sequence[str], num_named: int, num_shown: int, what: str, which: str, keys: InspectKeys
) -> list[str]:
    """Say how many rows of a table `filter` and `limit` leave out, and how to see them; or that nothing is left, and what there is."""
    if names and not num_named:
        parts = dict.fromkeys(
            part for name in names for part in re.split(r"[/.]", name) if part and not part.isdecimal()
        )
        none = f"{argument('filter', keys.filter)} chooses none of {counted(len(names), what)}"
        return [f"{none}; parts of their names: {some_of(list(parts), MOST_ROWS)}"]
    out = len(names) - num_named
    clauses = [f"{argument('filter', keys.filter)} leaves out {out:,} of {counted(len(names), what)}"] if out else []
    num_more = num_named - num_shown
    part = argument("filter", f"<part of {'its' if num_more == 1 else 'their'} name>")
    narrow = "" if keys.filter is not None else f"{part} or "
    return clauses + more(num_more, f"{which}{what}", narrow=narrow)


def _show_checkpoint(path: Place, manifest: CheckpointManifest, use: DiskUse, keys: InspectKeys) -> None:
    when = manifest.timestamp.isoformat(timespec="seconds")
    head = (
        f"{path}: id {manifest.checkpoint_id}, committed {when} by {counted(manifest.world_size, 'rank')}, format "
        f"version {manifest.format_version}, ckpt {manifest.ckpt_version}, torch {manifest.pytorch_version}, "
        f"{decimal(use.apparent_bytes)} in files, {decimal(use.unique_bytes)} of them its own{told_of_removal(manifest.removed)}"
    )
    components = Listing("component", "pattern", "group", "written by", "equal on", "arrays", "size", right=(5, 6))
    arrays = Listing("array", "dtype", "shape", "size", "where", right=(3,), text=(4,), bare=(1, 2, 3, 4))
    every: list[tuple[str, ArrayEntry]] = []
    for inner in (manifest, *manifests_below(path, manifest).values()):
        for key, component in inner.components.items():
            num_arrays, size = str(len(inner.arrays_of(key))), decimal(component.size_bytes)
            components.add(key, *_component_cells(component), num_arrays, size)
        every += inner.arrays.items()
    named = [(name, entry) for name, entry in every if _is_chosen(name, keys.filter)]
    for name, entry in first_rows(named, most=None if keys.all else keys.limit):
        size = decimal(entry.num_bytes)
        arrays.add(name, entry.dtype, shape_text(entry.shape), size, where_text(entry, name))
    below = _left_out([name for name, _ in every], len(named), len(arrays), "array", "", keys)
    listed: list[str | Listing] = ["", arrays] if named else []
    show_parts(head, "", components, *listed, *(["", *below] if below else []))


def _component_cells(component: ComponentManifest) -> tuple[str, str, str, str]:
    equal_on = "" if component.replicated_across is None else ranks_text(component.replicated_across)
    return component.sharing_pattern, component.group_name or "", ranks_text(component.ranks), equal_on


def where_text(entry: ArrayEntry, name: str) -> str:
    """Where an array is stored: its folder, if that is not the array's name, its writers, and its chunks, if it has several."""
    if entry.alias_of is not None:
        return f"is {entry.alias_of}"
    if entry.packed_in:
        return f"packed by {ranks_text(entry.packed_in)}"
    writers = ranks_text(rank for rank, _, _ in entry.writers)
    folder = "" if entry.path == name else f" {entry.path}"
    chunks = "" if entry.grid in (None, entry.shape) else f", in chunks of {shape_text(entry.grid or ())}"
    return f"{entry.store}{folder} by {writers}{chunks}"


def shape_text(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


def ranks_text(ranks: Iterable[int]) -> str:
    """`rank 3`, `ranks 0-3, 6`, or `nobody`."""
    distinct = sorted(set(ranks))
    runs: list[list[int]] = []
    for rank in distinct:
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    listed = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"rank{'' if len(distinct) == 1 else 's'} {listed}" if runs else "nobody"
