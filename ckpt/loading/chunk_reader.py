"""Read the chunks of one checkpoint: raw ones by their byte ranges in files, encoded ones through the library of their format.

Both strategies read the bytes of tensors here: a direct load into tensors (`ChunkReader.read`), a two-stage load also into blocks
that travel (`ChunkReader.fetch`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ckpt.format.box import Box, chunk_box, chunks_meeting
from ckpt.format.dtypes import raw_bytes, torch_dtype
from ckpt.format.records import ChunkExtent
from ckpt.loading.strategy import Stored, StoredPart
from ckpt.memory.copies import Filling
from ckpt.storage.extents import ExtentReader, ReadAt
from ckpt.storage.objects.files import REQUESTS
from ckpt.storage.wanted_bytes import WantedBytes


class ChunkReader:
    """Reader of one rank for one load; one thread reads at a time. It keeps files and page-locked memory until `close`.

    Args:
        verify: compare block digests, where the checkpoint has any.
        slab_bytes: bytes asked for at once, and the memory for bytes that cannot be read into tensors as they are.
        progress: called with a number of bytes as they arrive.
        read_at: how bytes come from an open file.
        role: of the side streams that copy to devices; see `Filling`.
        in_order: chunks are read in storage order; see `ExtentReader`.
        num_requests: of `read_soon`, at a time.
    """

    def __init__(
        self,
        checkpoint: Stored,
        *,
        verify: bool,
        slab_bytes: int,
        progress: Callable[[int], None],
        read_at: ReadAt,
        role: str = "filling",
        in_order: bool = False,
        num_requests: int = REQUESTS,
    ) -> None:
        self._num_requests = num_requests
        self._checkpoint = checkpoint
        self._verify = verify and checkpoint.has_digests
        self.filling = Filling(slab_bytes, role)
        self._extents = ExtentReader(
            checkpoint.root,
            verify=self._verify,
            progress=progress,
            read_at=read_at,
            slab_bytes=slab_bytes,
            landing=self.filling,
            held=checkpoint.held,
            checked=checkpoint.checked,
            in_order=in_order,
        )
        self._decoded: tuple[ChunkExtent, torch.Tensor] | None = None
        self._bytes_unchecked = 0  # read by a format's library alone

    @property
    def bytes_read(self) -> int:
        """Bytes read from storage so far; bytes found in host memory do not count."""
        return self._extents.bytes_read + self._bytes_unchecked

    def read_ahead(self, parts: Sequence[StoredPart], most_bytes: int) -> None:
        """Have the kernel read the first bytes of a chunk that will be read soon, if its file is not open yet and all of it is wanted.

        Within an open file the kernel reads ahead by itself. Does not wait, and does not fail.
        """
        chunk = parts[0].chunk
        if not chunk.raw or sum([part.part.out.nbytes for part in parts]) >= chunk.length:
            self._extents.read_ahead(chunk, most_bytes)

    def read_soon(self, ranges: Iterable[tuple[StoredPart, int, int]]) -> None:
        """Tell which bytes [start, stop) of chunks will be read, in their order, so that an object store sends several at a time."""
        wanted = ((run.chunk, start, stop) for run, start, stop in ranges if run.chunk.raw)
        self._extents.read_soon(wanted, self._num_requests)

    def is_cached(self, chunk: ChunkExtent, ranges: Sequence[tuple[int, int]]) -> bool:
        """Whether the page cache of this host seems to have these bytes [start, stop) of a chunk, as they are wanted. Does not fail."""
        return chunk.raw and self._extents.is_cached(chunk, ranges)

    def ranges_of(self, parts: Sequence[StoredPart], most_bytes: int) -> list[tuple[int, int]] | None:
        """Return the bytes [start, stop) of a chunk that its parts want, cut into pieces that can be read apart; None: it is read whole.

        Args:
            most_bytes: of a piece, but at least a block.
        """
        chunk = parts[0].chunk
        if not chunk.raw:
            return None
        unit = self._extents.unit_of(chunk)
        step = max(most_bytes // unit, 1) * unit
        wanted = WantedBytes(chunk, [part.part for part in parts]).stretches(unit)
        return [(at, min(at + step, stop)) for start, stop in wanted for at in range(start, stop, step)]

    def read(self, parts: Sequence[StoredPart], ranges: Sequence[tuple[int, int]] | None = None) -> None:
        """Fill the parts of one chunk, on any device.

        Args:
            ranges: read these bytes [start, stop) of a raw chunk alone; None: all that the parts want.

        Raises:
            CorruptCheckpointError: bytes are missing or not as they were written.
            OSError: the file system failed.
        """
        if parts[0].chunk.raw:
            self._extents.read(parts[0].chunk, [part.part for part in parts], ranges)
            return
        self._check(parts[0])
        for part in parts:
            self._decode_part(part)

    def fetch(self, one: StoredPart, start: int, memory: torch.Tensor, name_of: Callable[[int, int], str]) -> None:
        """Read bytes of the chunk that a part lies in, from byte `start` on, into host memory. A decoded chunk is kept for the next call.

        Args:
            memory: flat uint8, as long as the bytes; of a raw chunk with digests, whole blocks.
            name_of: name of the tensor that wants the bytes [begin, end), for messages.

        Raises: as `read`.
        """
        if one.chunk.raw:
            flat: Any = memory.numpy()
            self._extents.fetch(one.chunk, start, memoryview(flat), name_of)
            return
        if self._decoded is None or self._decoded[0] is not one.chunk:
            self._decoded = one.chunk, self._decode_chunk(one)
        memory.copy_(self._decoded[1][start : start + len(memory)])

    def close(self) -> None:
        """Wait for copies to devices, close the files, and let go of all memory."""
        try:
            self.filling.close()
        finally:
            self._extents.close()
            self._decoded = None

    def _check(self, one: StoredPart) -> None:
        """Compare the digests of an encoded chunk; without `verify` only its presence and length."""
        self._extents.check(one.chunk, one.part.name)
        self._bytes_unchecked += 0 if self._verify else one.chunk.length

    def _decode_part(self, one: StoredPart) -> None:
        """Decode one part; a piece of a packed array is decoded flat, and cut here."""
        part = one.part
        is_box = one.source.shape == tuple(part.out.shape)
        if is_box and part.out.device.type == "cpu":
            self._checkpoint.decode(one, one.source, part.out)
            return
        host = torch.empty(one.source.shape, dtype=part.out.dtype, device="cpu")
        self._checkpoint.decode(one, one.source, host)
        self.filling.fill(part.out, host if is_box else host.view(part.region)[part.box.slices])

    def _decode_chunk(self, one: StoredPart) -> torch.Tensor:
        """All bytes of an encoded chunk, decoded, with the padding of a chunk at the array's edge."""
        self._check(one)
        array, box = one.array, _chunk_of(one)
        decoded = torch.empty(array.grid, dtype=torch_dtype(array.dtype), device="cpu")
        raw_bytes(decoded).zero_()  # torch has no zeros of float4
        inside = decoded[tuple(slice(0, side) for side in box.shape)]
        out = inside if inside.is_contiguous() else torch.empty(box.shape, dtype=inside.dtype, device="cpu")
        self._checkpoint.decode(one, box, out)
        if out is not inside:
            inside.copy_(out)
        return raw_bytes(decoded)


def _chunk_of(one: StoredPart) -> Box:
    """The box, in global coordinates, of the chunk that a part lies in."""
    array = one.array
    (number,) = chunks_meeting(array.shape, array.grid, one.source)
    return chunk_box(array.shape, array.grid, number)
