"""Hosts that ranks of one machine play, each with a folder of its own in a file system of memory; and what is theirs is freed."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from ckpt import CheckpointCoordinator
from ckpt.ranks.addresses import LOOPBACK
from ckpt.ranks.topology import Topology
from ckpt.saving.tiers import Tier, memory, memory_of
from ckpt.storage.keeper.client import own_keeper

KEEP_S = 120.0
"""Memory stays so long if the benchmark is killed."""


@contextmanager
def memory_folder(file_system: str, topology: Topology) -> Iterator[Path]:
    """Make a folder in a file system of memory, and remove it at the end. Collective."""
    with topology.phase("memory") as phase:
        if topology.is_lead:
            phase.from_lead = tempfile.mkdtemp(prefix="ckpt-benchmark-", dir=file_system)
    folder = Path(phase.from_lead)
    try:
        yield folder
    finally:
        if topology.is_lead:
            shutil.rmtree(folder, ignore_errors=True)


def tier_of(host: Path, *, copies: int = 0) -> Tier:
    """Return the tier of the ranks whose host keeps its memory in this folder."""
    host.mkdir(exist_ok=True)
    return memory(path=host, copies=copies, keep_s=KEEP_S)


def go(coordinator: CheckpointCoordinator) -> None:
    """End a coordinator as ranks end that are killed: its memory stays."""
    with suppress(InterruptedError), coordinator:
        raise InterruptedError


def free(home: Path, hosts: Sequence[Path]) -> None:
    """End the keepers of hosts that no rank uses any more, and remove their memory."""
    for folder in (memory_of(home, host) for host in hosts):
        if folder.exists():
            own_keeper(folder, LOOPBACK, keep_s=KEEP_S, removes=True).leave(has_ended=True)
