"""Bytes of real files as training samples, in an order in which one number is the position."""

from __future__ import annotations

import os
import sysconfig
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from ckpt.errors import ConfigurationError
from ckpt.format.digests import StreamDigest, block_digest_of
from ckpt.ranks.topology import Topology

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
        num_samples = self.corpus.num_bytes // (context + 1)
        if num_samples < 1:
            raise ConfigurationError(
                f"data.path={self.corpus.root} holds {self.corpus.num_bytes} bytes of text, but model.context={context} needs at least "
                f"{context + 1}: give more text with data.path=<folder>"
            )
        samples = Samples(self.corpus, context + 1, num=num_samples, seed=seed)
        return TextLoader(samples, batch_size, share, topology, device, self.dispatch)


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


@dataclass(eq=False)
class Samples:
    """Endless samples: all windows of the corpus, in a new order in every epoch.

    Sample number n, counted over all epochs, depends only on n, the seed and the text.

    Args:
        length: bytes of a window; windows are adjacent.
        num: number of windows.
    """

    corpus: Corpus
    length: int
    num: int
    seed: int

    def __getitem__(self, number: int) -> torch.Tensor:
        epoch, at = divmod(number, self.num)
        window = shuffled(at, self.num, f"{self.seed}/{epoch}")
        return torch.frombuffer(bytearray(self.corpus.read(window * self.length, self.length)), dtype=torch.uint8)


@dataclass(eq=False)
class TextLoader:
    """The batches of one rank: step s trains on samples [s * B, (s + 1) * B).

    A checkpoint keeps the position in samples alone, so a run can go on with any number of ranks, and with either `dispatch`.

    Args:
        batch_size: B, over all ranks.
        share: (number, count) of this rank's part of each batch: rows [number * B / count, (number + 1) * B / count).
        dispatch: rank 0 draws the whole batch and broadcasts it: there is one position, and the state is GLOBAL. False: every
            rank draws its own rows and has a position of its own: the state is PER_RANK.
    """

    samples: Samples
    batch_size: int
    share: tuple[int, int]
    topology: Topology
    device: torch.device
    dispatch: bool
    position: int = 0

    def __post_init__(self) -> None:
        self.sharing_pattern = "global" if self.dispatch else "per_rank"
        self.text = self.samples.corpus.digest()

    def state_dict(self) -> dict[str, Any]:
        """Return the position, in samples since the first epoch began, and the properties of the text that it belongs to."""
        own = self.samples
        place = {"position": self.position, "epoch": self.position // own.num}
        return place | {"seed": own.seed, "windows": own.num, "window_bytes": own.length, "text": self.text}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the position of a checkpoint.

        Raises:
            ConfigurationError: the text differs, or has windows of another size, so the position does not apply.
        """
        own = self.state_dict()
        for name in ("text", "windows", "window_bytes"):
            if state[name] != own[name]:
                raise ConfigurationError(
                    f"the text in {self.samples.corpus.root} differs from the checkpoint's ({name} {state[name]}, now {own[name]}): "
                    "give that text with data.path=, or start this text at its beginning with ~components.dataset"
                )
        self.position = int(state["position"])
        self.samples.seed = int(state["seed"])

    def fits(self, saved: Mapping[str, Any]) -> bool:
        """Return True: the position is the whole run's, whichever rank saved it."""
        return True

    def load_changed(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Continue from the copies of other ranks, so that no sample is repeated or left out.

        Raises:
            ConfigurationError: the copies have different positions; or see `load_state_dict`.
        """
        places = {(copy["position"], copy["seed"]) for copy in saved}
        if len(places) > 1:
            raise ConfigurationError(
                f"the saved positions of the ranks differ, (position, seed) is one of {sorted(places)}: they did not share one order of "
                "samples, so it cannot be repartitioned"
            )
        self.load_state_dict(saved[0])

    def next_batch(self) -> torch.Tensor:
        """Return this rank's rows of the next global batch: (batch_size / shares, context + 1), int64. Collective if `dispatch`."""
        number, count = self.share
        if not self.dispatch or self.topology.world_size == 1:
            num = self.batch_size // count
            return self._rows(number * num, num).long()
        if self.topology.is_lead:
            batch = self._rows(0, self.batch_size)
        else:
            batch = torch.empty(self.batch_size, self.samples.length, dtype=torch.uint8, device=self.device)
            self.position += self.batch_size
        torch.distributed.broadcast(batch, src=0)
        return batch.chunk(count)[number].long()

    def _rows(self, first: int, num: int) -> torch.Tensor:
        """Return rows [first, first + num) of the next batch, (num, context + 1), uint8, and advance to the batch after it."""
        rows = torch.stack([self.samples[self.position + row] for row in range(first, first + num)])
        self.position += self.batch_size
        return rows.to(self.device)


def shuffled(at: int, num: int, key: str) -> int:
    """Return the image of `at` under the permutation of range(num) named `key`, without listing the permutation.

    Source: a Feistel network permutes the next larger power of four; an image outside of range(num) is permuted again
    (cycle walking).
    """
    half = max(1, (num - 1).bit_length() + 1 >> 1)
    mask = (1 << half) - 1
    while True:
        left, right = at >> half, at & mask
        for turn in range(4):
            left, right = right, left ^ (block_digest_of(f"{key}/{turn}/{right}".encode()) & mask)
        at = left << half | right
        if at < num:
            return at


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
