"""The command `rm`: remove committed checkpoints, by their owner's rules, after the user has said yes."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import click
from rich.filesize import decimal

from ckpt.catalog.catalog import catalog_at
from ckpt.catalog.committed import Catalog, Committed, look
from ckpt.catalog.incremental import disk_use
from ckpt.catalog.ledger import require_removable
from ckpt.cli.arguments import argued, argument, message_of
from ckpt.cli.tables import counted, show
from ckpt.errors import (
    CheckpointNotFoundError,
    ConfigurationError,
    CorruptCheckpointError,
    FolderInUseError,
    StorageError,
    telling,
)
from ckpt.format.places import Place, as_place
from ckpt.storage.stored import not_a_checkpoint, read_manifest


@dataclass
class RemoveKeys:
    """The keys of the command."""

    paths: list[str] = argued("checkpoints")
    yes: bool = argued("do not ask", default=False)


def remove_checkpoints(keys: RemoveKeys) -> int:
    """Refuse, or ask and remove; return 0, or 1 where the user said no.

    Raises:
        CheckpointNotFoundError: a path is that of no checkpoint. Nothing is removed then, nor in the next four cases.
        ConfigurationError: a path is a symbolic link, or nobody can be asked.
        CorruptCheckpointError: a manifest does not tell which files are the checkpoint's.
        FolderInUseError: a run that lives has saved one of them, or saves in its folder without sharing it.
        OSError: one may not be removed by this user.
        StorageError: one could not be removed.
    """
    doomed = [_checked(as_place(path, "path")) for path in dict.fromkeys(keys.paths)]
    size = disk_use([checkpoint.path for _, checkpoint in doomed])[1]
    what = doomed[0][1].path if len(doomed) == 1 else counted(len(doomed), "checkpoint")
    if not keys.yes and not _asked(f"remove {what}, {decimal(size)} on disk?"):
        return 1
    for catalog, checkpoint in doomed:
        catalog.remove(checkpoint.path)
        if look(checkpoint.path) is not None:
            raise StorageError(f"{checkpoint.path} could not be removed, and is as it was")
        show(f"{checkpoint.path}: removed")
    return 0


def _asked(question: str) -> bool:
    if not sys.stdin.isatty():
        raise ConfigurationError(f"{question} Nobody can be asked here: give {argument('yes')}")
    return click.confirm(question, err=True)


def _checked(path: Place) -> tuple[Catalog[Place], Committed[Place]]:
    if isinstance(path, Path):
        path = path.absolute()
    if isinstance(path, Path) and path.is_symlink():
        raise ConfigurationError(f"{path} is a symbolic link: give the checkpoint that it leads to, or remove the link with rm")
    checkpoint = look(path)
    if checkpoint is None:
        why = not_a_checkpoint(path) if isinstance(path, Path) else f"there is no checkpoint at {path}"
        raise CheckpointNotFoundError(f"{why}; rm removes checkpoints alone")
    try:
        read_manifest(path)
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(f"{message_of(error)}; so rm cannot tell its files from yours: remove the folder by hand") from error
    if isinstance(path, Path):
        with telling(f"{path} cannot be removed"):
            require_removable(path)
    catalog = catalog_at(path.parent)
    if catalog.living():
        raise FolderInUseError(f"{path}: a run is saving in {path.parent} now; end it first, or leave it to its retention")
    return catalog, checkpoint
