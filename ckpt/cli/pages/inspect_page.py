"""The page of `inspect`: one checkpoint; or the commits of a folder in time, the bytes they share, and the newest checkpoint."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from ckpt.catalog.committed import Committed
from ckpt.catalog.incremental import DiskUse, disk_use, files_of
from ckpt.cli.arguments import argument, message_of
from ckpt.cli.pages.checkpoint_page import checkpoint_values
from ckpt.cli.pages.page import Served, page, utc, write_page
from ckpt.cli.reading import InspectKeys, committed_below, is_checkpoint, manifests_below, mark_of, show
from ckpt.cli.reading_others import other_at
from ckpt.errors import CheckpointError, CheckpointNotFoundError, ConfigurationError, printable
from ckpt.format.manifest import CheckpointManifest
from ckpt.format.places import Place, as_place
from ckpt.storage.stored import noticing_removal, read_manifest

_MOST_COMMITS = 400
"""Checkpoints on a page: the newest ones."""
_MOST_SHARING = 12
"""Checkpoints in the table of shared bytes."""
_MOST_METRICS = 4


@dataclass(frozen=True)
class Commit:
    """A checkpoint of a folder.

    Attributes:
        files: bytes of each of its files.
        new_bytes: of the files that no earlier checkpoint of the page has.
        head: its manifest without arrays; None: it is damaged, or cannot be read.
        mark, problem: which of the two, and why.
    """

    committed: Committed[Place]
    use: DiskUse
    files: Mapping[Hashable, int]
    new_bytes: int
    num_arrays: int
    head: CheckpointManifest | None
    mark: str | None
    problem: str | None

    @property
    def name(self) -> str:
        return self.committed.path.name

    @property
    def time(self) -> float:
        return self.committed.timestamp.timestamp()

    @property
    def size(self) -> int:
        return self.use.apparent_bytes

    @property
    def tip(self) -> str:
        run = f"\nrun {self.committed.run_id}" if self.committed.run_id else ""
        sizes = f"{decimal(self.size)}, {decimal(self.new_bytes)} of them new"
        return f"{self.name}\ncommitted {utc(self.committed.timestamp)} UTC\n{sizes}{run}"


def inspect(keys: InspectKeys) -> int:
    """Show what `show` shows; or, where a file is given for it, leave the page, and show no more than JSON beside it."""
    if keys.html is not None:
        leave_page(keys)
    return show(keys) if keys.html is None or keys.json else 0


def leave_page(keys: InspectKeys) -> None:
    """Write the page, and say so unless only JSON is wanted.

    Raises:
        CheckpointError: there is no checkpoint at the path, it is damaged, or the page cannot be written there.
    """
    assert keys.html is not None
    path, target = as_place(keys.path, "path"), Path(keys.html)
    if other_at(path, allow_pickle=keys.load.allow_pickle) is not None:
        raise ConfigurationError(
            f"{argument('html', keys.html)}: a page shows a checkpoint of this project, and {path} is none; leave it out"
        )
    text = checkpoint_page(path) if is_checkpoint(path) else folder_page(path)
    write_page(target, text)
    if not keys.json:
        print(printable(f"{target}: a page of {path}, {decimal(len(text.encode()))}"))


def checkpoint_page(path: Place, served: Served | None = None) -> str:
    """Return the page of one checkpoint."""
    with noticing_removal(path):
        checkpoint = _values(path, disk_use([path])[0][path])
    return page("inspect.html", path.absolute().name, lead=f"The checkpoint {path}", served=served, checkpoint=checkpoint)


def folder_page(root: Place, served: Served | None = None) -> str:
    """Return the page of a folder of checkpoints.

    Raises:
        CheckpointNotFoundError: there are none, or all were removed meanwhile.
    """
    committed = committed_below(root)
    each, on_disk = disk_use(commit.path for commit in committed)
    commits = _commits(committed[-_MOST_COMMITS:], each)
    if not commits:
        raise CheckpointNotFoundError(f"{root} holds no checkpoint any more: all were removed while they were read")
    left_out = len(committed) - _MOST_COMMITS
    more = f"; the {left_out} oldest checkpoints are left out" if left_out > 0 else ""
    name, checkpoint = _newest(commits)
    return page(
        "inspect.html",
        f"Checkpoints of {root.absolute().parent.name if root.name == 'checkpoints' else root.absolute().name}",
        lead=f"The folder {root}{more}",
        served=served,
        num_checkpoints=len(committed),
        on_disk=on_disk,
        apparent_bytes=sum(use.apparent_bytes for use in each.values()),
        commits=commits,
        metrics=list(dict.fromkeys(name for commit in commits if commit.head for name in commit.head.metrics))[:_MOST_METRICS],
        runs=list(dict.fromkeys(commit.committed.run_id for commit in commits)),
        sharing=commits[-_MOST_SHARING:],
        shared=_shared(commits[-_MOST_SHARING:]),
        most_sharing=_MOST_SHARING,
        newest=name,
        checkpoint=checkpoint,
    )


def _commits(listed: Sequence[Committed[Place]], each: Mapping[Place, DiskUse]) -> list[Commit]:
    """Return the checkpoints in commit order, without those that were removed since they were listed."""
    found: list[Commit] = []
    seen: set[Hashable] = set()
    for checkpoint in listed:
        head, num_arrays, mark, problem = None, 0, None, None
        try:
            head = read_manifest(checkpoint.path)
            num_arrays, head.arrays = len(head.arrays), {}
        except CheckpointNotFoundError:
            continue
        except (CheckpointError, OSError) as error:
            mark, problem = mark_of(error), message_of(error)
        files = files_of(checkpoint.path)
        new = sum(size for inode, size in files.items() if inode not in seen)
        seen |= files.keys()
        found.append(Commit(checkpoint, each[checkpoint.path], files, new, num_arrays, head, mark, problem))
    return found


def _shared(commits: Sequence[Commit]) -> list[list[int]]:
    """For each commit but the first, the bytes of files that it shares with each earlier one; nothing where none do."""
    shared = [
        [sum(size for inode, size in commit.files.items() if inode in other.files) for other in commits[:row]]
        for row, commit in enumerate(commits)
    ][1:]
    return shared if any(map(any, shared)) else []


def _newest(commits: Sequence[Commit]) -> tuple[str, dict[str, Any] | None]:
    """The name of the newest checkpoint that is whole and still there, and what the page shows of it."""
    for commit in reversed(commits):
        try:
            return commit.name, _values(commit.committed.path, commit.use)
        except (CheckpointError, OSError):  # the table says so of damaged ones
            continue
    return "", None


def _values(path: Place, use: DiskUse) -> dict[str, Any]:
    manifest = read_manifest(path)
    return checkpoint_values({"": manifest, **manifests_below(path, manifest)}, use)
