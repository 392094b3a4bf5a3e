"""Bring the tensors of each item to the host, while training waits. (`ckpt.saving.background.snapshot` copies them instead.)"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import starmap
from typing import Protocol

import torch

from ckpt.format.box import Box
from ckpt.format.dtypes import contiguous, raw_bytes, torch_dtype
from ckpt.memory.copies import Halves, Staging
from ckpt.planning.plan import SavePlan
from ckpt.saving.writing import Item, Pack, RankWritePlan, Staged
from ckpt.state.collect import RankState


class ByteSource(Protocol):
    """The source of a share's bytes in one save. Called by the thread that writes the share: `sends`, `items`, `check`."""

    def sends(self) -> dict[int, bytes]:
        """Rank -> the partial chunks for it, end to end."""

    def items(self) -> Iterator[Staged]:
        """Yield every item once, in any order. Its memory is valid until the next one is requested."""

    def check(self) -> None:
        """Raise if the state has changed since the save began."""


class Regions:
    """Finds the memory of this rank behind a box of a global array."""

    def __init__(self, plan: SavePlan, contribution: RankState) -> None:
        self._plan = plan
        self._contribution = contribution
        self._by_box: dict[str, dict[Box, torch.Tensor]] = {}

    def of_item(self, item: Item) -> list[torch.Tensor]:
        """The tensors of an item: this rank's boxes of a chunk, or those of a pack."""
        if isinstance(item, Pack):
            return [self.of(name, box) for name, box in item.tasks]
        return [self.of(item.name, box) for box in item.own]

    def of(self, name: str, box: Box) -> torch.Tensor:
        """The part of an array in a box; on its own device, with its own strides."""
        if 0 in box.shape:
            return torch.empty(box.shape, dtype=torch_dtype(self._plan.arrays[name].dtype), device="cpu")
        held, local = self._held(name, box)
        return local if box == held else local[box.relative_to(held).slices]

    def _held(self, name: str, box: Box) -> tuple[Box, torch.Tensor]:
        """The piece of this rank's memory that contains a box. A whole piece, the usual case, is found in constant time."""
        pieces = self._contribution.held[name]
        if len(pieces) == 1:
            return pieces[0]
        if name not in self._by_box:
            self._by_box[name] = dict(pieces)
        if box in self._by_box[name]:
            return box, self._by_box[name][box]
        return next(piece for piece in pieces if piece[0].contains(box))


class LiveTensors:
    """The state itself as the source of a save: host tensors are not copied, and device tensors come while the one before is written."""

    def __init__(self, share: RankWritePlan, plan: SavePlan, contribution: RankState, pinned_bytes: int) -> None:
        self._share = share
        self._contribution = contribution
        self._regions = Regions(plan, contribution)
        self._staging = Staging(Halves(pinned_bytes))

    def sends(self) -> dict[int, bytes]:
        return sent(self._share, self._regions, self._staging)

    def items(self) -> Iterator[Staged]:
        numbered = ((number, self._regions.of_item(item)) for number, item in enumerate(self._share.items))
        return starmap(Staged, self._staging.ahead(numbered))

    def check(self) -> None:
        self._contribution.require_unchanged()


def sent(share: RankWritePlan, regions: Regions, staging: Staging) -> dict[int, bytes]:
    """Rank -> copies of the partial chunks that it writes, end to end."""
    outgoing: dict[int, list[bytes]] = defaultdict(list)
    tensors = ((send.to, [regions.of(send.name, send.box)]) for send in share.sends)
    for to, (host,) in staging.ahead(tensors):
        outgoing[to].append(raw_bytes(contiguous(host)).numpy().tobytes())
    return {to: b"".join(parts) for to, parts in outgoing.items()}
