"""The checkpoints of other programs, which loads do not know by name: who knows them registers what finds and opens them."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from ckpt.format.places import Place
from ckpt.loading.sources import CheckpointSource
from ckpt.loading.strategy import LoadingStrategy
from ckpt.memory.device import Device
from ckpt.ranks.topology import Topology


class Opening(NamedTuple):
    """How a load opens a checkpoint.

    Attributes:
        is_state_alone: the load is of one state dict, not of components.
    """

    strategy: LoadingStrategy
    device: Device
    allow_pickle: bool
    is_state_alone: bool


class Programs(Protocol):
    """What a load asks of the formats of other programs."""

    def found_at(self, path: Place, *, allow_pickle: bool) -> Any:
        """What is at a path, as JSON that the lead tells all ranks; None: there is a checkpoint of this package, or none that is known.

        Raises:
            CheckpointNotFoundError: it holds pickles, and these are not allowed.
        """

    def opened(self, path: Place, found: Any, topology: Topology, opening: Opening) -> CheckpointSource:
        """Open what the lead has found, on every rank. Collective.

        Raises:
            CheckpointNotFoundError: as `found_at`.
            CorruptCheckpointError: what describes it is damaged.
        """

    def advice(self, path: Place) -> str | None:
        """A sentence about a path without a checkpoint that is read: what is there, and what to do; None: no more is known."""


_KNOWN: list[Programs] = []


def register(programs: Programs) -> None:
    """Register what knows other programs, in this process. Replaces an earlier registration."""
    _KNOWN[:] = [programs]


def programs() -> Programs:
    """What is registered: by `ckpt.interop.registry.register_programs`, before a path is loaded that may be of another program."""
    assert _KNOWN, "nobody has called ckpt.interop.registry.register_programs()"
    return _KNOWN[0]
