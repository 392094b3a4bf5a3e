"""Broadcasts for two-stage loads, in the process groups that weight updates use: independent of torch's default group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch.distributed import Store

from ckpt.engine.wire.group import Groups, OwnGroup
from ckpt.memory.device import Device


class EngineTransport:
    """One rank's `ckpt.loading.two_stage.network.Transport`. Used for many loads, by one thread at a time.

    Ranks that exchange a block have a group, made at their first block.

    Args:
        store: of all ranks.
        name: equal on all ranks, used once in this store.
        device: its collectives move the memory.
        timeout_s: of each broadcast.

    Attributes:
        name: as given.
    """

    def __init__(self, store: Store, name: str, rank: int, *, device: Device, timeout_s: float) -> None:
        self.name = name
        self._groups = Groups(partial(OwnGroup, store, rank=rank, device=device, timeout_s=timeout_s))

    def begin(self, buffer: torch.Tensor, source: int, to: Sequence[int]) -> Callable[[], None]:
        """See `Transport.begin`.

        Raises:
            RankLeftError: it has been given up, before or while a rank waits.
        """
        members = sorted({source, *to})
        name = f"{self.name}-{'-'.join(map(str, members))}"
        return self._groups.of(name, members).broadcast(buffer, source)

    def give_up(self) -> None:
        """Leave in the middle, and wait for no other rank; any thread. It is of no more use."""
        self._groups.give_up()

    def close(self) -> None:
        """Leave. Nothing is under way any more."""
        self._groups.close()
