"""The page of `inspect`: one checkpoint; or the commits of a folder in time, the bytes they share, and the newest checkpoint."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.filesize import decimal

from ckpt.catalog.committed import Committed
from ckpt.catalog.incremental import DiskUse, disk_use, files_of
from ckpt.errors import CheckpointError, CheckpointNotFoundError, ConfigurationError, printable, sentence
from ckpt.format.manifest import CheckpointManifest
from ckpt.format.places import Place, as_place
from ckpt.storage.stored import noticing_removal, read_manifest
from recipes.commands.checkpoint_page import checkpoint_sections
from recipes.commands.reading import InspectKeys, committed_below, is_checkpoint, manifests_below
from recipes.commands.reading_others import other_at
from recipes.support.page import (
    Cell,
    Column,
    Content,
    Markup,
    Row,
    chart,
    facts,
    hue,
    joined,
    page,
    percent,
    section,
    shape,
    table,
    tag,
    write_page,
)

_MOST_COMMITS = 400
"""Checkpoints on a page: the newest ones."""
_MOST_SHARING = 12
"""Checkpoints in the table of shared bytes."""
_MOST_METRICS = 4

Files = Mapping[tuple[int, int], int]


@dataclass(frozen=True)
class Commit:
    """A checkpoint of a folder.

    Attributes:
        files: bytes of each of its files.
        new_bytes: of the files that no earlier checkpoint of the page has.
        head: its manifest without arrays; None: it is damaged.
        problem: why it is.
    """

    one: Committed
    use: DiskUse
    files: Files
    new_bytes: int
    num_arrays: int
    head: CheckpointManifest | None
    problem: str | None

    @property
    def name(self) -> str:
        return self.one.path.name


def leave_page(keys: InspectKeys) -> None:
    """Write the page, and say so unless only JSON is wanted.

    Raises:
        CheckpointError: there is no checkpoint at the path, it is damaged, or the page cannot be written there.
    """
    assert keys.html is not None
    path, target = as_place(keys.path, "path"), Path(keys.html)
    if other_at(path, allow_pickle=keys.load.allow_pickle) is not None:
        raise ConfigurationError(
            f"html={keys.html}: a page shows a checkpoint of this project, and {path} is none; leave html out"
        )
    text = checkpoint_page(path) if is_checkpoint(path) else folder_page(path)
    write_page(target, text)
    if not keys.json:
        print(printable(f"{target}: a page of {path}, {decimal(len(text.encode()))}"))


def checkpoint_page(path: Place) -> str:
    """Return the page of one checkpoint."""
    with noticing_removal(path):
        sections = _sections(path, read_manifest(path), disk_use([path])[0][path])
    return page(path.absolute().name, tag("p", f"The checkpoint {path}", class_="lead"), sections)


def folder_page(root: Place) -> str:
    """Return the page of a folder of checkpoints.

    Raises:
        CheckpointNotFoundError: there are none, or all were removed meanwhile.
    """
    committed = committed_below(root)
    each, on_disk = disk_use(one.path for one in committed)
    commits = _commits(committed[-_MOST_COMMITS:], each)
    if not commits:
        raise CheckpointNotFoundError(f"{root} holds no checkpoint any more: all were removed while they were read")
    newest = commits[-1]
    left_out = len(committed) - _MOST_COMMITS
    more = f"; the {left_out} oldest checkpoints are left out" if left_out > 0 else ""
    overview: list[tuple[str, Content]] = [
        ("checkpoints", str(len(committed))),
        ("on disk", decimal(on_disk)),
        ("if none shared a file", decimal(sum(use.apparent_bytes for use in each.values()))),
        ("newest", newest.name),
        ("committed (UTC)", _when(newest)),
    ]
    return page(
        f"Checkpoints of {root.absolute().parent.name if root.name == 'checkpoints' else root.absolute().name}",
        tag("p", f"The folder {root}{more}", class_="lead"),
        facts(overview),
        _timeline(commits),
        _table(commits),
        _sharing(commits[-_MOST_SHARING:]),
        _newest(commits),
    )


def _commits(listed: Sequence[Committed], each: Mapping[Place, DiskUse]) -> list[Commit]:
    """Return the checkpoints in commit order, without those that were removed since they were listed."""
    found: list[Commit] = []
    seen: set[Hashable] = set()
    for one in listed:
        head, num_arrays, problem = None, 0, None
        try:
            head = read_manifest(one.path)
            num_arrays, head.arrays = len(head.arrays), {}
        except CheckpointNotFoundError:
            continue
        except (CheckpointError, OSError) as error:
            problem = sentence(error)
        files = files_of(one.path)
        new = sum(size for inode, size in files.items() if inode not in seen)
        seen |= files.keys()
        found.append(Commit(one, each[one.path], files, new, num_arrays, head, problem))
    return found


def _when(commit: Commit) -> str:
    return commit.one.timestamp.isoformat(" ", "seconds").removesuffix("+00:00")


def _timeline(commits: Sequence[Commit]) -> Markup:
    """A column for each commit: at its time, as high as its bytes; those it links from earlier checkpoints are paler."""
    times = [commit.one.timestamp.timestamp() for commit in commits]
    first, span = min(times), max(times) - min(times)
    most = max(commit.use.apparent_bytes for commit in commits) or 1
    runs = {run: number for number, run in enumerate(dict.fromkeys(commit.one.run_id for commit in commits))}
    width = min(0.03, 0.6 / len(commits))
    columns = []
    for commit, at in zip(commits, times, strict=True):
        x = (at - first) / span * (1 - width) if span else 0.5 - width / 2
        whole, new = (0.84 * part / most for part in (commit.use.apparent_bytes, commit.new_bytes))
        linked = shape("rect", x, 0.86 - whole, width, whole - new, class_="tinted linked")
        own = shape("rect", x, 0.86 - new, width, new, class_="tinted")
        columns.append(tag("g", linked, own, style=hue(runs[commit.one.run_id]), data_tip=_tip(commit)))
    axis = tag("line", x1="0", x2="100%", y1="86%", y2="86%")
    labels = [tag("text", _when(commits[0]), x=0, y="99%", class_="dim")]
    if span:
        labels.append(tag("text", _when(commits[-1]), x="100%", y="99%", text_anchor="end", class_="dim"))
    svg = chart("timeline", "A column for each commit", axis, columns, labels)
    histories = f" Colors are the {len(runs)} runs." if len(runs) > 1 else ""
    return section(
        "Commits",
        svg,
        note=f"A column is a commit, as high as its bytes; pale are those in files of earlier checkpoints.{histories}",
    )


def _tip(commit: Commit) -> str:
    lines = [commit.name, f"committed {_when(commit)} UTC"]
    lines += [f"{decimal(commit.use.apparent_bytes)}, {decimal(commit.new_bytes)} of them new"]
    lines += [f"run {commit.one.run_id}"] if commit.one.run_id else []
    return "\n".join(lines)


def _table(commits: Sequence[Commit]) -> Markup:
    heads = [commit.head for commit in commits if commit.head is not None]
    metrics = list(dict.fromkeys(name for head in heads for name in head.metrics))[:_MOST_METRICS]
    columns = [
        Column("checkpoint"),
        Column("committed (UTC)", greatest_first=True),
        Column("ranks", is_number=True),
        Column("components"),
        Column("tensors", is_number=True),
        *(Column(name, is_number=True) for name in metrics),
        Column("size", is_number=True, greatest_first=True, tip="Of all its files: the size of a copy"),
        Column("new", is_number=True, greatest_first=True, tip="Of files that no earlier checkpoint has"),
        Column(
            "freed", is_number=True, greatest_first=True, tip="By removing it: of files that no other checkpoint has"
        ),
    ]
    rows = [_row(commit, metrics, is_newest=commit is commits[-1]) for commit in commits]
    return section("Checkpoints", table(columns, rows, name="checkpoints", filters=len(rows) > 20))


def _row(commit: Commit, metrics: Sequence[str], *, is_newest: bool) -> Row:
    name = [commit.name, tag("small", " newest")] if is_newest else commit.name
    cells = [Cell(name, commit.name), Cell(_when(commit), commit.one.timestamp.timestamp())]
    if commit.head is None:
        return Row(
            [*cells, Cell([tag("strong", "damaged: "), commit.problem or ""], span=6 + len(metrics))], class_="failed"
        )
    cells += [Cell(str(commit.head.world_size), commit.head.world_size), Cell(", ".join(commit.head.components))]
    cells += [Cell(f"{commit.num_arrays:,}", commit.num_arrays)]
    for metric in metrics:
        value = commit.head.metrics.get(metric)
        cells.append(Cell("-", "") if value is None else Cell(f"{value:.6g}", value))
    sizes = (commit.use.apparent_bytes, commit.new_bytes, commit.use.unique_bytes)
    return Row([*cells, *(Cell(decimal(size), size) for size in sizes)])


def _sharing(commits: Sequence[Commit]) -> Markup:
    """The bytes of files that each two of the newest checkpoints share; nothing where none do."""
    shared = {
        (row, column): sum(size for inode, size in one.files.items() if inode in other.files)
        for row, one in enumerate(commits)
        for column, other in enumerate(commits[:row])
    }
    if not any(shared.values()):
        return Markup("")
    names = [commit.name.removeprefix("checkpoint-") for commit in commits]
    head = tag("tr", tag("th"), (tag("th", name, scope="col") for name in names[:-1]))
    rows = []
    for row, later in enumerate(commits[1:], 1):
        cells = (_shared(shared[row, column], later, earlier) for column, earlier in enumerate(commits[:row]))
        rows.append(tag("tr", tag("th", names[row], scope="row"), cells, (tag("td") for _ in commits[row + 1 :])))
    of = f" of the newest {len(commits)}" if len(commits) == _MOST_SHARING else ""
    grid = tag("table", tag("thead", head), tag("tbody", rows), class_="grid", id="shared")
    note = (
        f"Bytes of files that two checkpoints{of} share, the darker the greater part of the later one. Incremental saves link files "
        "that have not changed."
    )
    return section("Bytes shared between checkpoints", tag("div", grid, class_="scrolls"), note=note)


def _shared(num_bytes: int, later: Commit, earlier: Commit) -> Markup:
    part = num_bytes / (later.use.apparent_bytes or 1)
    tip = f"{later.name} shares {decimal(num_bytes)} with {earlier.name}, {part:.0%} of it"
    shade = f"--part:{percent(0.8 * part)}"
    return tag(
        "td",
        decimal(num_bytes) if num_bytes else "-",
        class_="number heat",
        style=shade,
        data_value=num_bytes,
        data_tip=tip,
    )


def _newest(commits: Sequence[Commit]) -> Markup:
    """The sections about the newest checkpoint that is whole and still there."""
    for commit in reversed(commits):
        try:
            sections = _sections(commit.one.path, read_manifest(commit.one.path), commit.use)
        except (CheckpointError, OSError):  # the table says so of damaged ones
            continue
        return joined(tag("h2", f"The newest: {commit.name}", class_="part"), sections)
    return Markup("")


def _sections(path: Place, manifest: CheckpointManifest, use: DiskUse) -> Markup:
    return checkpoint_sections({"": manifest, **manifests_below(path, manifest)}, use)
