"""Chunks of a Megatron-Core zarr checkpoint for loading strategies: file and decoding of each."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ckpt.dist_checkpointing.megatron.zarr import MegatronZarr
from ckpt.format.box import Box
from ckpt.format.held import NOTHING_HELD
from ckpt.format.records import ArraySpec, ChunkExtent
from ckpt.loading.strategy import ReadRequest, StoredPart
from ckpt.planning.plan import needed_chunks
from ckpt.storage.runs import WantedBox


class MegatronChunks:
    """See `ckpt.loading.strategy.Stored`. Chunks have no digests; missing and truncated ones are detected."""

    has_digests = False
    held = NOTHING_HELD

    def __init__(self, arrays: MegatronZarr) -> None:
        self.root = arrays.folder
        self.arrays = arrays

    def parts(self, request: ReadRequest) -> Iterator[StoredPart]:
        """Yield the parts of the wanted box, one per chunk; `request.name` is the tensor's key."""
        if 0 in request.box.shape:
            return
        array = self.arrays.arrays[request.name]
        spec = ArraySpec(array.key, array.dtype, array.shape, array.grid)
        for number, chunk_box, wanted in needed_chunks(array.shape, array.grid, request.box):
            file = self.arrays.require_chunk(array, number)
            chunk = ChunkExtent(file.relative_to(self.root).as_posix(), 0, file.stat().st_size, (), raw=array.is_raw)
            out = request.out[wanted.relative_to(request.box).slices]
            part = WantedBox(0, array.grid, wanted.relative_to(chunk_box), out, request.label)
            yield StoredPart(chunk, part, spec, "megatron", wanted)

    def decode(self, stored: StoredPart, box: Box, out: torch.Tensor) -> None:
        """See `ckpt.loading.strategy.Stored.decode`."""
        self.arrays.read(stored.array.path, box, out)
