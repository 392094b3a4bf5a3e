"""The bytes of one chunk on their way to storage: digested once, compared with stored digests and with digests of the snapshot."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch

from ckpt.format.digests import BlockDigests
from ckpt.format.dtypes import bits_of, raw_bytes
from ckpt.format.records import BLOCK_BYTES, changed_in_memory
from ckpt.storage.files import PIECE_BYTES

_ZEROS = bytes(1 << 20)


def padded_pieces(host: torch.Tensor, cell: tuple[int, ...]) -> Iterator[memoryview]:
    """Yield the bytes of one whole chunk in pieces: `host` at the start of a grid cell, zeros in the rest."""
    if tuple(host.shape) == cell or tuple(host.shape[1:]) == cell[1:]:
        yield from _cut(raw_bytes(host).numpy().data)
        missing = (math.prod(cell) - host.numel()) * host.element_size()
        for at in range(0, missing, len(_ZEROS)):
            yield memoryview(_ZEROS)[: min(missing - at, len(_ZEROS))]
        return
    bits = bits_of(host)
    padded = np.zeros(cell, bits.dtype)
    padded[tuple(slice(0, n) for n in host.shape)] = bits
    yield from _cut(padded.reshape(-1).view(np.uint8).data)


def _cut(memory: memoryview) -> Iterator[memoryview]:
    for at in range(0, len(memory), PIECE_BYTES):
        yield memory[at : at + PIECE_BYTES]


class Pieces:
    """The bytes of one chunk as they will be stored, in pieces, each digested once: for `have`, or as they are written.

    Args:
        staged: digests from when the bytes were copied from the tensors; `written` compares them.
    """

    def __init__(self, pieces: Iterator[memoryview], staged: tuple[int, ...] | None = None) -> None:
        self._pieces = pieces
        self._staged = staged
        self._digests = BlockDigests(BLOCK_BYTES)
        self._compared: list[memoryview] = []

    def have(self, digests: tuple[int, ...]) -> bool:
        """Whether the bytes have these digests. Uses `staged` if given, else reads up to the first difference."""
        if self._staged is not None:
            return self._staged == digests
        for piece in self._pieces:
            self._compared.append(piece)
            self._digests.update(piece)
            if not self._digests.agree(digests):
                return False
        return self._digests.close() == digests

    def digested(self) -> Iterator[memoryview]:
        """Yield the pieces, each just digested, and so in the processor's cache when it is written."""
        yield from self._compared
        for piece in self._pieces:
            self._digests.update(piece)
            yield piece

    def written(self, path: str) -> tuple[int, ...]:
        """Return the digests after all pieces were written. `path` names the array in errors.

        Raises:
            StorageError: they differ from `staged`.
        """
        digests = self._digests.close()
        if self._staged is not None and digests != self._staged:
            raise changed_in_memory(path)
        return digests
