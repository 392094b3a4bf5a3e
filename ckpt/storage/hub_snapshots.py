"""Files of snapshots in Hugging Face's cache: links `models--<org>--<name>/snapshots/<revision>/<file>` to `../../blobs/<name>`.

No link is followed. Its text is taken as the name of a blob, and the blob is opened as a file below `models--<org>--<name>`, by the rules
of `CheckpointFolder`: so a snapshot from a stranger leads to the files beside it alone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

from ckpt.errors import CorruptCheckpointError
from ckpt.format.places import Place

_SNAPSHOTS, _MODEL = "snapshots", "models--"
_BLOB = re.compile(r"\.\./\.\./blobs/([^/]+)")


def files_in(folder: Place) -> tuple[Place, Callable[[str], str]]:
    """Return a folder to open, and a function from the name of a file in `folder` to its path below the folder to open.

    That is `folder` itself, unless it is a snapshot. The function raises:
        CorruptCheckpointError: the file is a link to anything but a blob of its snapshot.
    """
    if not isinstance(folder, Path):  # stores have no links
        return folder, lambda name: name
    snapshot = Path(os.path.realpath(folder))  # it may be given through a link, or as "."
    model = snapshot.parent.parent
    if snapshot.parent.name != _SNAPSHOTS or not model.name.startswith(_MODEL):
        return folder, lambda name: name
    return model, partial(_below_model, snapshot)


def _below_model(snapshot: Path, name: str) -> str:
    here = f"{_SNAPSHOTS}/{snapshot.name}/{name}"
    if "/" in name:  # a link there is refused when it is opened
        return here
    try:
        target = os.readlink(snapshot / name)
    except (OSError, ValueError):  # no link, no file, or no name of one
        return here
    blob = _BLOB.fullmatch(target)
    if blob is None:
        raise CorruptCheckpointError(
            f"{snapshot / name} is a link to {target!r:.200}: in a snapshot of Hugging Face's, links to ../../blobs/<name> alone are read",
            file=name,
        )
    return f"blobs/{blob[1]}"
