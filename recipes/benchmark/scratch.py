"""Folders that benchmarks save in, and what they leave behind: nothing that the next one would feel."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ckpt.ranks.topology import Topology
from recipes.benchmark.measuring import make_durable


@contextmanager
def scratch(folder: Path, topology: Topology) -> Iterator[Path]:
    """A new folder that is gone afterwards, whatever happens. Collective."""
    with topology.phase("scratch"):
        if topology.is_lead:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        if topology.is_lead:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def turn(path: Path, topology: Topology) -> Iterator[Path]:
    """A new folder for one turn of one contender; what it leaves on the disk is none of the next one's business. Collective.

    Afterwards its files are empty, and removed with all others at the end: for a minute after files were removed, ext4 takes up to
    a millisecond for each that is made.
    """
    with topology.phase("folder"):
        if topology.is_lead:
            path.mkdir()
            make_durable(path)
    yield path
    with topology.phase("folder"):
        if topology.is_lead:
            for file in path.rglob("*"):
                if file.is_file():
                    os.truncate(file, 0)
            make_durable(path)
