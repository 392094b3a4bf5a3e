"""Create a directory atomically: fill a temporary sibling, then rename it."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ckpt.catalog.catalog import catalog_at
from ckpt.errors import CheckpointError, CheckpointExistsError, StorageError, sentence
from ckpt.format.manifest import MANIFEST_NAME
from ckpt.format.places import Place, place_of
from ckpt.ranks.topology import Topology
from ckpt.storage.durable import replace_durably, sync_folder
from ckpt.storage.removal import own_name, remove


def require_free(dst: Place) -> None:
    """Refuse an existing path, other than an empty folder; an address at which there is a checkpoint, or something else.

    Raises:
        CheckpointExistsError: the path exists.
    """
    if not isinstance(dst, Path):
        catalog_at(dst.parent).require_free(dst)
        return
    if os.path.lexists(dst) and not (dst.is_dir() and not any(dst.iterdir())):
        raise CheckpointExistsError(
            f"{dst} exists and is not empty; choose another, existing files are never overwritten"
        )


class NewPlace(NamedTuple):
    """A checkpoint that is being made.

    Attributes:
        folder: where its files go.
        record: takes its manifest, once all other files are written. The lead.
    """

    folder: Place
    record: Callable[[bytes], None]


@contextmanager
def shared_place(dst: Place, topology: Topology) -> Iterator[NewPlace]:
    """As `shared_directory`, for a checkpoint of ours, which may go into an object store: the manifest commits it there. Collective."""
    if isinstance(dst, Path):
        with shared_directory(dst, topology) as folder:
            yield NewPlace(folder, partial(replace_durably, folder / MANIFEST_NAME))
        return
    catalog = catalog_at(dst.parent, run_id=str(dst))
    try:
        with topology.phase("create") as phase:
            if topology.is_lead:
                catalog.require_free(dst)
                phase.from_lead = str(catalog.open_at(dst))
        place = place_of(phase.from_lead)
        yield NewPlace(place, partial(catalog.record, place))
        with topology.phase("publish"):
            topology.require_awaited()
            if topology.is_lead:
                catalog.publish_at(place, dst)
    except BaseException:
        catalog.discard_all()
        raise


@contextmanager
def shared_directory(dst: Path, topology: Topology, *, is_file: bool = False) -> Iterator[Path]:
    """As `atomic_directory`, for all ranks together: they get one folder, which the lead creates, and renames. Collective."""
    with ExitStack() as stack:
        with topology.phase("create") as phase:
            if topology.is_lead:
                phase.from_lead = str(stack.enter_context(atomic_directory(dst, is_file=is_file)))
        yield Path(phase.from_lead)
        with topology.phase("publish"):
            topology.require_awaited()
            stack.close()


@contextmanager
def atomic_directory(dst: Path, *, is_file: bool = False) -> Iterator[Path]:
    """Yield a temporary folder beside `dst`. It is renamed to `dst` at the end of the block, or removed after an error.

    Args:
        is_file: yield a path at which the block makes a file.

    Its last part is that of `dst`, because the id of a sharded state dict's checkpoint is the name of its folder. The block makes the
    content durable; the rename is made durable here.

    Raises:
        CheckpointExistsError: `dst` exists.
        StorageError: an `OSError` in the block, or of the folder itself.
    """
    require_free(dst)
    dst = dst.absolute()
    around = dst.parent / f".converting-{dst.name}-{secrets.token_hex(4)}"
    folder = around / dst.name
    try:
        (around if is_file else folder).mkdir(parents=True)
        yield folder
        require_free(dst)  # still: a file would be replaced
        os.rename(folder, dst)
        sync_folder(dst.parent)
    except CheckpointError:
        raise
    except OSError as error:
        raise StorageError(f"{dst} was not created, its content could not be written: {sentence(error)}") from error
    finally:
        remove(around, own_name)
