"""Tensors that a load converts to another data type: read in batches that share scratch memory, each converted before the next is read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from ckpt.errors import Argument, refused
from ckpt.format.box import Box
from ckpt.loading.strategy import ReadRequest
from ckpt.memory.device import telling_of_room, wait_for_all

SCRATCH_BYTES = 64 << 20
"""Of a batch; more where a component would have more than `MOST_BATCHES`, each of which is a reading of its own."""
MOST_BATCHES = 16
_ALIGNED = 64

Components = bool | Collection[str]
"""Which components a load may convert: True: all, but optimizers keep the data types of their state; or the keys of those."""


class Cast(NamedTuple):
    """A box to read, and to convert into memory of another data type.

    Attributes:
        request: `out` is the memory to convert into.
        dtype: that was saved.
    """

    request: ReadRequest
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """As it was saved."""
        return self.request.out.numel() * self.dtype.itemsize


CAST = Argument("load.cast", True)
"""The advice to convert."""


def check_cast(cast: object, components: Collection[str]) -> None:
    """Check the argument `cast` of a load.

    Raises:
        ConfigurationError: it is neither a truth value nor keys of components.
    """
    if isinstance(cast, bool):
        return
    if isinstance(cast, str) or not isinstance(cast, Collection) or not all(key in components for key in cast):
        raise refused("load.cast", cast, f"True, False, or keys of components, which are {', '.join(components)}")


def batches_of(casts: Sequence[Cast]) -> list[list[Cast]]:
    """Divide what is to be converted into batches, the boxes of large tensors by rows. Of one rank: others may have more."""
    limit = max(SCRATCH_BYTES, -(-sum(cast.num_bytes for cast in casts) // MOST_BATCHES))
    batches: list[list[Cast]] = []
    left = 0
    for piece in (piece for cast in casts for piece in _by_rows(cast, limit)):
        if not batches or piece.num_bytes > left:
            batches.append([])
            left = limit
        batches[-1].append(piece)
        left -= piece.num_bytes + _ALIGNED
    return batches


def readings_of(batches: Sequence[Sequence[Cast]]) -> list[tuple[list[ReadRequest], Callable[[], None]]]:
    """Return the requests of each batch, into scratch memory, and what converts them when they are filled.

    Raises:
        DeviceMemoryError: a device has no room for a batch.
    """
    sizes: dict[torch.device, int] = {}
    for batch in batches:
        for device in {cast.request.out.device for cast in batch}:
            here = sum(cast.num_bytes + _ALIGNED for cast in batch if cast.request.out.device == device)
            sizes[device] = max(sizes.get(device, 0), here)
    scratch = {}
    for device, num_bytes in sizes.items():
        with telling_of_room(device, num_bytes):
            scratch[device] = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    return [_reading_of(batch, scratch) for batch in batches]


def _reading_of(batch: Sequence[Cast], scratch: dict[torch.device, torch.Tensor]) -> tuple[list[ReadRequest], Callable[[], None]]:
    begins = dict.fromkeys(scratch, 0)
    requests = []
    for request, dtype in batch:
        begin = begins[request.out.device]
        end = begin + request.out.numel() * dtype.itemsize
        begins[request.out.device] = -(-end // _ALIGNED) * _ALIGNED
        memory = scratch[request.out.device][begin:end].view(dtype).view(request.out.shape)
        requests.append(replace(request, out=memory))

    def convert() -> None:
        convert_into((cast.request.out for cast in batch), (request.out for request in requests))

    return requests, convert


@torch.no_grad()
def convert_into(outs: Iterable[torch.Tensor], read: Iterable[torch.Tensor]) -> None:
    """Copy tensors into others, which may have other data types, and wait for it."""
    outs = list(outs)
    for out, tensor in zip(outs, read, strict=True):
        if out is not tensor:
            out.copy_(tensor)
    wait_for_all(outs)


def _by_rows(cast: Cast, limit: int) -> Iterator[Cast]:
    """Cut a box along its first axis into pieces of at most `limit` bytes, or of one row."""
    request, box = cast.request, cast.request.box
    if cast.num_bytes <= limit or not box.shape:
        yield cast
        return
    rows = max(1, limit * box.shape[0] // cast.num_bytes)
    for begin in range(0, box.shape[0], rows):
        out = request.out[begin : begin + rows]
        piece = Box((box.offsets[0] + begin, *box.offsets[1:]), tuple(out.shape))
        yield Cast(replace(request, box=piece, out=out), cast.dtype)
