"""The command `copy`: one checkpoint to a place of its own, or all of a folder that are not in another one yet."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from ckpt.catalog.committed import Committed, look
from ckpt.catalog.copying import copy_checkpoint
from ckpt.catalog.incremental import disk_use
from ckpt.cli.arguments import argued, argument
from ckpt.cli.progress import progress_bar
from ckpt.cli.reading import committed_below, committed_in
from ckpt.cli.tables import counted, print_json, show
from ckpt.errors import CheckpointExistsError, ConfigurationError, printable
from ckpt.format.places import Place, as_place
from ckpt.storage.checkpoint_files import is_inside
from ckpt.storage.stored import read_manifest_bytes


@dataclass
class CopyKeys:
    """The keys of the command."""

    src: str = argued("a checkpoint, or a folder of checkpoints")
    dst: str = argued("where the copy goes: nothing, or of a folder of checkpoints another one")
    last: int | None = argued("of a folder: only so many of the newest", default=None)
    json: bool = argued("print only JSON", default=False)

    def validate(self) -> None:
        """Raise ConfigurationError for a number of checkpoints below 1."""
        if self.last is not None and self.last < 1:
            raise ConfigurationError(f"{argument('last', self.last)}: expected at least 1, or {argument('last', None)} for all")


def copy(keys: CopyKeys) -> int:
    """Copy, and print each checkpoint that was copied, or is there already.

    Raises:
        CheckpointError: see `copy_checkpoint`; or another checkpoint has the name of one that is to be copied.
    """
    src, dst = as_place(keys.src, "src"), as_place(keys.dst, "dst")
    rows = [_copied(old, new, keys, is_there=is_there) for old, new, is_there in _pairs(src, dst, keys)]
    if keys.json:
        print_json({"src": str(src), "dst": str(dst), "checkpoints": rows})
    return 0


def _pairs(src: Place, dst: Place, keys: CopyKeys) -> Sequence[tuple[Place, Place, bool]]:
    """Return each checkpoint, the place of its copy, and whether that is there.

    Raises:
        CheckpointExistsError: something else is there, before anything is copied.
    """
    require_outside(dst, src)
    if look(src) is not None:
        return [(src, dst, look(dst) is not None and _is_copy(src, dst))]
    if isinstance(dst, Path) and os.path.lexists(dst) and not dst.is_dir():
        raise CheckpointExistsError(f"{dst} is no folder; choose another path")
    committed = committed_below(src)[-keys.last if keys.last else 0 :]
    there: dict[str, Committed[Place]] = {checkpoint.id: checkpoint for checkpoint in committed_in(dst)}
    if others := [old.id for old in committed if old.id in there and not _is_copy(old.path, there[old.id].path)]:
        raise CheckpointExistsError(
            f"{dst} has {counted(len(others), 'checkpoint')} of the same name with another content, the first is {others[0]}; "
            "give another folder, nothing was copied"
        )
    return [(old.path, dst / old.path.name, old.id in there) for old in committed]


def require_outside(dst: Place, src: Place) -> None:
    """Refuse a place inside of what is read.

    Raises:
        ConfigurationError: it is that.
    """
    if is_inside(dst, src):
        raise ConfigurationError(f"{dst} is inside of {src}; choose a place outside of it")


def _is_copy(old: Place, new: Place) -> bool:
    """Whether a checkpoint is a copy of another one: the manifests agree but for what depends on the storage."""
    return _content(old) == _content(new)


def _content(place: Place) -> list[bytes]:
    of_storage = b'  "data": ', b'  "fence": ', b'  "manifest_digest": '
    return [line for line in read_manifest_bytes(place).splitlines() if not line.startswith(of_storage)]


def _copied(old: Place, new: Place, keys: CopyKeys, *, is_there: bool) -> dict[str, Any]:
    row: dict[str, Any] = {"src": str(old), "dst": str(new)}
    if is_there:
        if not keys.json:
            show(f"{new}: is there already, with the same content")
        return row | {"copied": False}
    began = time.monotonic()
    with progress_bar(f"copy {printable(old.name)}", 2 * disk_use([old])[1]) as advance:
        try:
            done = copy_checkpoint(old, new, progress=advance)
        except KeyboardInterrupt:
            raise KeyboardInterrupt("the same command goes on from what is copied") from None
    if not keys.json:
        found = f", {counted(done.num_found, 'file')} of them left by an earlier copy" if done.num_found else ""
        speed = f"{decimal(done.num_bytes)}, {time.monotonic() - began:.1f} s"
        show(f"{old} is now also {new}; {counted(done.num_files, 'file')}{found}, {speed}, read back and right")
    return row | {"copied": True} | asdict(done)
