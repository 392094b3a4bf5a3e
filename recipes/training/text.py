"""Bytes of real files as training samples."""

from __future__ import annotations

import os
import sysconfig
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from ckpt.errors import ConfigurationError
from ckpt.format.digests import StreamDigest
from ckpt.ranks.topology import Topology
from recipes.training.data import SampleLoader

DEFAULT_BYTES = 4 << 20
"""How much of the standard library's sources is read: enough for a million parameters, and quick to list."""
_EDGE_BYTES = 64 << 10
_NOT_MODULES = {"test", "tests", "site-packages", "dist-packages", "idlelib"}


class TextData:
    """The text of `data.path`, and how ranks share it. Made before any rank starts, so that a wrong path is found there.

    Args:
        path: a file, or a folder whose files are joined; None: the sources of Python's standard library.
        dispatch: rank 0 draws each global batch and broadcasts it. False: each rank draws its own rows.

    Raises:
        ConfigurationError: there is no such file or folder, or it holds no text.
    """

    def __init__(self, *, path: str | None = None, dispatch: bool = True) -> None:
        self.dispatch = dispatch
        root = Path(sysconfig.get_path("stdlib")) if path is None else Path(path)
        if not root.exists():
            raise ConfigurationError(f"data.path={root}: there is no such file or folder")
        self.corpus = Corpus(root, _standard_library(root) if path is None else _files(root))

    def loader(
        self,
        *,
        context: int,
        batch_size: int,
        seed: int,
        topology: Topology,
        device: torch.device,
        share: tuple[int, int],
    ) -> TextLoader:
        """Return the loader of this rank's batches.

        Args:
            context: tokens in a sample; a sample is `context + 1` bytes, of which the last one is only a target.
            batch_size: samples of one step over all ranks; a multiple of the number of shares.
            share: (number, count) of the part of each batch that this rank trains on.
        """
        if self.corpus.num_bytes <= context:
            raise ConfigurationError(
                f"data.path={self.corpus.root} holds {self.corpus.num_bytes} bytes of text, but model.context={context} needs at least "
                f"{context + 1}: give more text with data.path=<folder>"
            )
        return TextLoader(Windows(self.corpus, context + 1), batch_size, share, seed, topology, device, self.dispatch)


class Corpus:
    """Files joined to one row of bytes, read on demand.

    Args:
        root: the path that the user gave, for messages; names in `digest` are relative to it.
        files: path and size in bytes, in order.
    """

    def __init__(self, root: Path, files: Iterable[tuple[Path, int]]) -> None:
        self.root = root
        files = list(files)
        self.files = [path for path, _ in files]
        self.ends = list(accumulate(size for _, size in files))
        self.num_bytes = self.ends[-1] if files else 0
        if self.num_bytes == 0:
            raise ConfigurationError(f"data.path={root} holds no text: name a file, or a folder with files in it")

    def read(self, start: int, length: int) -> bytes:
        """Return `length` bytes from byte `start` of the row, of several files where they cross a border."""
        pieces = []
        at = bisect_right(self.ends, start)
        while length:
            begin = self.ends[at - 1] if at else 0
            piece = _read(self.files[at], start - begin, min(length, self.ends[at] - start))
            pieces.append(piece)
            start, length, at = start + len(piece), length - len(piece), at + 1
        return b"".join(pieces)

    def digest(self) -> str:
        """Return a digest of the files' names, sizes, first and last bytes; equal digests mean, very probably, equal text."""
        state = StreamDigest()
        for path, begin, end in zip(self.files, [0, *self.ends], self.ends, strict=False):
            size = end - begin
            state.update(f"{os.path.relpath(path, self.root)}\0{size}\0".encode())
            state.update(_read(path, 0, min(size, _EDGE_BYTES)))
            state.update(_read(path, max(0, size - _EDGE_BYTES), min(size, _EDGE_BYTES)))
        return state.hexdigest()


class Windows:
    """Adjacent windows of a corpus, as a map-style dataset of uint8 tensors.

    Args:
        length: bytes of a window.
    """

    def __init__(self, corpus: Corpus, length: int) -> None:
        self.corpus = corpus
        self.length = length

    def __len__(self) -> int:
        return self.corpus.num_bytes // self.length

    def __getitem__(self, window: int) -> torch.Tensor:
        return torch.frombuffer(bytearray(self.corpus.read(window * self.length, self.length)), dtype=torch.uint8)

    def identity(self) -> dict[str, Any]:
        """Return what a checkpoint keeps to tell this text from others."""
        return {"windows": len(self), "window_bytes": self.length, "text": self.corpus.digest()}


class TextLoader(SampleLoader):
    """The batches of one rank: tokens (rows, context) and the tokens after each, of the same shape, int64.

    Args:
        dispatch: rank 0 draws the whole batch and broadcasts it: there is one position, and the state is GLOBAL. False: every
            rank draws its own rows and has a position of its own: the state is PER_RANK. A run can go on with the other one.
    """

    def __init__(
        self, windows: Windows, batch_size: int, share: tuple[int, int], seed: int, topology: Topology, device: torch.device, dispatch: bool
    ) -> None:
        self.is_sent = dispatch and topology.world_size > 1
        super().__init__(windows, batch_size, (0, 1) if self.is_sent else share, seed, device)
        self.sharing_pattern = "global" if dispatch else "per_rank"
        self._part = share
        self._is_lead = topology.is_lead

    def next_batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this rank's rows of the next global batch. Collective if `dispatch`."""
        if not self.is_sent:
            rows = super().next_batch()
        else:
            number, count = self._part
            if self._is_lead:
                batch = super().next_batch()
            else:
                batch = torch.empty(self.batch_size, self.dataset.length, dtype=torch.uint8, device=self.device)
                self.position += self.batch_size
            torch.distributed.broadcast(batch, src=0)
            rows = batch.chunk(count)[number]
        rows = rows.long()
        return rows[:, :-1], rows[:, 1:]

    def _what(self) -> str:
        return f"the text in {self.dataset.corpus.root}"


def _files(root: Path) -> Iterator[tuple[Path, int]]:
    """All files at or below `root` that are not empty, with their sizes, in the order of their names; no hidden files."""
    if root.is_file():
        yield root, root.stat().st_size
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for path in (Path(folder, name) for name in sorted(names) if not name.startswith(".")):
            if path.is_file() and (size := path.stat().st_size):  # a broken link is no file
                yield path, size


def _standard_library(root: Path) -> Iterator[tuple[Path, int]]:
    """The library's own modules, without tests and installed packages, up to `DEFAULT_BYTES`."""
    total = 0
    for path, size in _files(root):
        if path.suffix == ".py" and not _NOT_MODULES & set(path.relative_to(root).parts):
            yield path, size
            total += size
        if total >= DEFAULT_BYTES:
            return


def _read(path: Path, offset: int, length: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        data = file.read(length)
    if len(data) != length:
        raise ConfigurationError(f"{path} has changed during the run: expected {length} bytes at offset {offset}")
    return data
