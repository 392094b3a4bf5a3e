"""Create a directory atomically: fill a temporary sibling, then rename it."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ckpt.errors import CheckpointError, CheckpointExistsError, StorageError, sentence
from ckpt.format.durable import sync_folder
from ckpt.format.removal import own_name, remove
from ckpt.ranks.topology import Topology


def require_free(dst: Path) -> None:
    """Refuse an existing path, other than an empty folder.

    Raises:
        CheckpointExistsError: the path exists.
    """
    if os.path.lexists(dst) and not (dst.is_dir() and not any(dst.iterdir())):
        raise CheckpointExistsError(
            f"dst={dst} exists and is not empty; choose another, existing files are never overwritten"
        )


@contextmanager
def shared_directory(dst: Path, topology: Topology, *, is_file: bool = False) -> Iterator[Path]:
    """As `atomic_directory`, for all ranks together: they get one folder, which the lead creates, and renames. Collective."""
    with ExitStack() as stack:
        with topology.phase("create") as phase:
            if topology.is_lead:
                phase.payload = str(stack.enter_context(atomic_directory(dst, is_file=is_file)))
        yield Path(phase.payloads[0])
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
        raise StorageError(f"dst={dst} was not created, its content could not be written: {sentence(error)}") from error
    finally:
        remove(around, own_name)
