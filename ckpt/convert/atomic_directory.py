"""A folder that is there when all of it is there, and otherwise not."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ckpt.errors import CheckpointError, CheckpointExistsError, StorageError, sentence
from ckpt.format.durable import sync_folder


def require_free(dst: Path) -> None:
    """Refuse a place where something is. An empty folder is nothing.

    Raises:
        CheckpointExistsError: there is something.
    """
    if os.path.lexists(dst) and not (dst.is_dir() and not any(dst.iterdir())):
        raise CheckpointExistsError(f"dst={dst} exists and is not empty; choose another, nothing is ever written over")


@contextmanager
def atomic_directory(dst: Path) -> Iterator[Path]:
    """A folder beside `dst`, to be filled, which becomes `dst` if the block ends well, and is removed if not.

    Its last name is that of `dst`, for a checkpoint that is no coordinator's goes by the name of its folder. What is in it must be
    durable when the block ends; that it is there is made so here.

    Raises:
        CheckpointExistsError: there is something at `dst`.
        StorageError: the file system refused something in the block, or the folder itself.
    """
    require_free(dst)
    dst = dst.absolute()
    around = dst.parent / f".converting-{dst.name}-{secrets.token_hex(4)}"
    folder = around / dst.name
    try:
        folder.mkdir(parents=True)
        yield folder
        os.rename(folder, dst)
        sync_folder(dst.parent)
    except CheckpointError:
        raise
    except OSError as error:
        raise StorageError(
            f"dst={dst} is not there, for what it should be could not be written: {sentence(error)}"
        ) from error
    finally:
        if around.exists():
            shutil.rmtree(around)
