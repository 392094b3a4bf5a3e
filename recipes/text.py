"""Bytes of real files as training samples, in an order that a checkpoint can name by one number."""

from __future__ import annotations

import os
import sysconfig
from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import xxhash

from ckpt.errors import ConfigurationError
from ckpt.topology import Topology

DEFAULT_BYTES = 4 << 20
"""How much of the standard library's sources is read: enough for a million parameters, and listed in no time."""
_EDGE_BYTES = 64 << 10


class TextData:
    """Where the text is and how the ranks share it. Made before any rank starts, so a wrong path costs nothing.

    Args:
        path: a file, or a folder whose files are taken together; None: the sources of Python's standard library.
        dispatch: rank 0 draws each global batch and sends it to all. False: each rank draws from a part of its own.

    Raises:
        ConfigurationError: there is no such file or folder, or it holds no text.
    """

    def __init__(self, *, path: str | None = None, dispatch: bool = True) -> None:
        self.dispatch = dispatch
        root = Path(sysconfig.get_path("stdlib")) if path is None else Path(path)
        self.corpus = Corpus(root, _standard_library(root) if path is None else _files(root))

    def loader(
        self, *, context: int, batch_size: int, seed: int, topology: Topology, device: torch.device
    ) -> DispatchedLoader | OwnLoader:
        """Return this rank's batches.

        Args:
            context: tokens in a sample; a sample is `context + 1` bytes, of which the last is only a target.
            batch_size: of one step over all ranks; a multiple of their number.
        """
        parts = 1 if self.dispatch else topology.world_size
        num_samples = self.corpus.num_bytes // (context + 1) // parts
        if num_samples < 1:
            raise ConfigurationError(
                f"data.path={self.corpus.root} holds {self.corpus.num_bytes} bytes of text, but the model's context of "
                f"{context} needs at least {(context + 1) * parts}: give more text with data.path=<folder>"
            )
        if self.dispatch:
            samples = Samples(self.corpus, context + 1, first=0, num=num_samples, seed=seed)
            return DispatchedLoader(samples, batch_size, topology, device)
        samples = Samples(self.corpus, context + 1, first=topology.rank * num_samples, num=num_samples, seed=seed)
        return OwnLoader(samples, batch_size // topology.world_size, device)


class Corpus:
    """Files as one long row of bytes, read where they are wanted and never held.

    Args:
        root: what the user named, for messages; names in `digest` are relative to it.
        files: path and size in bytes, in order.
    """

    def __init__(self, root: Path, files: list[tuple[Path, int]]) -> None:
        self.root = root
        self.files = [path for path, _ in files]
        self.ends = list(accumulate(size for _, size in files))
        self.num_bytes = self.ends[-1] if files else 0
        if self.num_bytes == 0:
            raise ConfigurationError(f"data.path={root} holds no text: name a file, or a folder with files in it")

    def read(self, start: int, length: int) -> bytes:
        """Return `length` bytes from byte `start` of the row, which may run over the end of a file."""
        pieces = []
        at = bisect_right(self.ends, start)
        while length:
            begin = self.ends[at - 1] if at else 0
            piece = _read(self.files[at], start - begin, min(length, self.ends[at] - start))
            pieces.append(piece)
            start, length, at = start + len(piece), length - len(piece), at + 1
        return b"".join(pieces)

    def digest(self) -> str:
        """Return a digest of the files' names, sizes and both ends: equal if, in all likelihood, the text is."""
        state = xxhash.xxh3_128()
        for path, begin, end in zip(self.files, [0, *self.ends], self.ends, strict=False):
            size = end - begin
            state.update(f"{os.path.relpath(path, self.root)}\0{size}\0".encode())
            state.update(_read(path, 0, min(size, _EDGE_BYTES)))
            state.update(_read(path, max(0, size - _EDGE_BYTES), min(size, _EDGE_BYTES)))
        return state.hexdigest()


class Samples:
    """Endless samples: all windows of a part of the corpus, shuffled anew in every epoch.

    Sample number n, counted over all epochs, depends on n, the seed and the text alone.

    Args:
        length: bytes of a window; windows lie side by side.
        first: number of the part's first window in the corpus.
        num: number of windows in the part.
    """

    def __init__(self, corpus: Corpus, length: int, *, first: int, num: int, seed: int) -> None:
        self.corpus = corpus
        self.length = length
        self.first = first
        self.num = num
        self.seed = seed

    def __getitem__(self, number: int) -> torch.Tensor:
        epoch, at = divmod(number, self.num)
        window = self.first + shuffled(at, self.num, f"{self.seed}/{epoch}")
        return torch.frombuffer(bytearray(self.corpus.read(window * self.length, self.length)), dtype=torch.uint8)


class _Loader:
    """What both ways of sharing the text have in common: a position, and the state that a checkpoint keeps of it."""

    sharing_pattern: str

    def __init__(self, samples: Samples, num_drawn: int) -> None:
        self.samples = samples
        self.num_drawn = num_drawn
        self.position = 0
        self.text = samples.corpus.digest()

    def state_dict(self) -> dict[str, Any]:
        """Return the position, in samples since the first epoch began, and what gives it its meaning."""
        own = self.samples
        place = {"position": self.position, "epoch": self.position // own.num}
        return place | {"seed": own.seed, "windows": own.num, "window_bytes": own.length, "text": self.text}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a run stopped.

        Raises:
            ConfigurationError: the text is another one, or cut in other windows, so that the position means nothing.
        """
        own = self.state_dict()
        for name in ("text", "windows", "window_bytes"):
            if state[name] != own[name]:
                raise ConfigurationError(
                    f"the text in {self.samples.corpus.root} is not the one the checkpoint was saved with ({name} "
                    f"{state[name]}, now {own[name]}): give that text with data.path=, or begin this one at its start "
                    "with ~components.dataset"
                )
        self.position = int(state["position"])
        self.samples.seed = int(state["seed"])

    def _draw(self) -> torch.Tensor:
        rows = torch.stack([self.samples[self.position + i] for i in range(self.num_drawn)])
        self.position += self.num_drawn
        return rows


class DispatchedLoader(_Loader):
    """Rank 0 draws the global batch and sends it; every rank takes its rows. Step s holds samples [s * B, (s + 1) * B).

    There is one position, so the state is GLOBAL, and a run may go on with another number of ranks.
    """

    sharing_pattern = "global"

    def __init__(self, samples: Samples, batch_size: int, topology: Topology, device: torch.device) -> None:
        super().__init__(samples, batch_size)
        self.topology = topology
        self.device = device

    def next_batch(self) -> torch.Tensor:
        """Return this rank's rows of the next global batch: (batch_size / ranks, context + 1), int64. Collective."""
        rank, ranks = self.topology.rank, self.topology.world_size
        if ranks == 1:
            return self._draw().to(self.device).long()
        if rank == 0:
            batch = self._draw().to(self.device)
        else:
            batch = torch.empty(self.num_drawn, self.samples.length, dtype=torch.uint8, device=self.device)
            self.position += self.num_drawn
        torch.distributed.broadcast(batch, src=0)
        return batch.chunk(ranks)[rank].long()


class OwnLoader(_Loader):
    """Every rank draws from its own part of the text: positions belong to ranks, so the state is PER_RANK."""

    sharing_pattern = "per_rank"

    def __init__(self, samples: Samples, batch_size: int, device: torch.device) -> None:
        super().__init__(samples, batch_size)
        self.device = device

    def next_batch(self) -> torch.Tensor:
        """Return this rank's next rows: (batch_size / ranks, context + 1), int64."""
        return self._draw().to(self.device).long()


def shuffled(at: int, num: int, key: str) -> int:
    """Return where position `at` of range(num) goes in the permutation named `key`, without making the permutation.

    A Feistel network permutes the next larger square power of two; what falls outside goes through it again.
    """
    half = max(1, (num - 1).bit_length() + 1 >> 1)
    mask = (1 << half) - 1
    while True:
        left, right = at >> half, at & mask
        for turn in range(4):
            left, right = right, left ^ (xxhash.xxh3_64_intdigest(f"{key}/{turn}/{right}".encode()) & mask)
        at = left << half | right
        if at < num:
            return at


def _files(root: Path) -> list[tuple[Path, int]]:
    """All files at or below `root` with their sizes, in the order of their names; hidden ones are left out."""
    if root.is_file():
        return [(root, root.stat().st_size)]
    if not root.is_dir():
        raise ConfigurationError(f"data.path={root}: there is no such file or folder")
    return [(path, size) for path in _walk(root) if (size := _regular_size(path)) > 0]


def _walk(root: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(folder, name) for name in sorted(names) if not name.startswith("."))


def _regular_size(path: Path) -> int:
    """Size in bytes; 0 for what is not a file, such as a broken link."""
    return path.stat().st_size if path.is_file() else 0


def _standard_library(root: Path) -> list[tuple[Path, int]]:
    """The library's own modules, without tests and installed packages, up to `DEFAULT_BYTES`."""
    files: list[tuple[Path, int]] = []
    total = 0
    for path in _walk(root):
        parts = path.relative_to(root).parts
        if path.suffix != ".py" or {"test", "tests", "site-packages", "dist-packages", "idlelib"} & set(parts):
            continue
        size = _regular_size(path)
        if size:
            files.append((path, size))
            total += size
        if total >= DEFAULT_BYTES:
            break
    return files


def _read(path: Path, offset: int, length: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        data = file.read(length)
    if len(data) != length:
        raise ConfigurationError(f"{path} has changed during the run: expected {length} bytes at offset {offset}")
    return data
