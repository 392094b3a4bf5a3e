"""Between hosts: torch.distributed carries a parcel from the rank that has it to one rank on every host that wants it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from ckpt.errors import ConfigurationError


class Transport(Protocol):
    """Carries bytes between ranks of one group. Used by one thread; who takes part in a call makes it in the same order."""

    def spread(self, buffer: torch.Tensor, source: int, to: Sequence[int]) -> None:
        """Fill `buffer` on the ranks in `to` with that of `source`. Called by these ranks; global numbers."""


class TorchTransport:
    """A broadcast where the whole group takes part, else a tree of sends.

    Args:
        group: its collectives move the memory that is spread.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._members = set(dist.get_process_group_ranks(group))

    def spread(self, buffer: torch.Tensor, source: int, to: Sequence[int]) -> None:
        """See `Transport.spread`."""
        order = [source, *(rank for rank in to if rank != source)]
        if set(order) == self._members:
            dist.broadcast(buffer, source, group=self._group)
            return
        me = order.index(dist.get_rank())
        # Who has the bytes doubles with every round: in the one of width w, ranks below w send to those w above them.
        width = 1
        while width < len(order):
            if me < width and me + width < len(order):
                dist.send(buffer, order[me + width], group=self._group)
            elif width <= me < 2 * width:
                dist.recv(buffer, order[me - width], group=self._group)
            width *= 2


def make_groups(instances: Sequence[Sequence[int]], backend: str, timeout_s: float) -> dict[int, dist.ProcessGroup]:
    """Make a process group of each of these sets of ranks, and return them by member.

    Every rank of the job calls it, those that are in none too, and makes all of them in one order, as torch wants it.

    Raises:
        ConfigurationError: torch.distributed is not initialized.
    """
    if not dist.is_initialized():
        raise ConfigurationError(
            "strategy=two-stage sends over the network through torch.distributed, which is not initialized; call "
            "init_process_group first, or use strategy=direct"
        )
    made: dict[int, dist.ProcessGroup] = {}
    for ranks in sorted(tuple(sorted(instance)) for instance in instances):
        group = dist.new_group(list(ranks), timeout=timedelta(seconds=timeout_s), backend=backend)
        made |= dict.fromkeys(ranks, group)
    return made
