"""Choose the data files of the previous checkpoint to hard-link, so that their unchanged values are not written again.

A data file holds many values. It is linked at its first unchanged value, whose bytes are still at hand if the file system refuses.
The used fraction of a file is known only after all chunks of a save. The used values of a mostly dead file are then copied out of our
link, and the link is removed: dead bytes must not take disk space forever.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence

from ckpt.backends.base import Previous, Written
from ckpt.errors import CorruptCheckpointError
from ckpt.format.places import Place
from ckpt.format.records import ChunkExtent, FileRecord
from ckpt.storage.checkpoint_files import files_below
from ckpt.storage.files import PIECE_BYTES, naming
from ckpt.storage.sink import Pieces, Sink

MOST_FILES = 32
"""Most linked files of one rank and kind. Beyond it, the files with the least used bytes are rewritten, down to half as many."""


class LinkedValues:
    """The values of one rank that stay in linked data files. Call `take` any number of times, then `settle`, then `add_to`.

    Args:
        sink: makes the links, below `root`.
        below: path of the folder of this rank's data files.
        whole: link a file only if no value in it is dead, because other tools would read the dead ones. `key` is then the data type,
            and files are counted for each folder and key.

    Attributes:
        kept: (array path, chunk) -> key and extent of each value that stays in a linked file.
        files: the data files that are linked in the end.
        dead: file -> extents in them that are in use no more.
    """

    def __init__(self, previous: Previous, sink: Sink, root: Place, below: str, *, whole: bool = False) -> None:
        self._previous = previous
        self._sink = sink
        self._root = root
        self._below = below
        self._whole = whole
        self._is_linked: dict[str, bool] = {}
        self._kind_of: dict[str, tuple[str, str]] = {}
        self.kept: dict[tuple[str, int], tuple[str, ChunkExtent]] = {}
        self.files: dict[str, FileRecord] = {}
        self.dead: dict[str, list[ChunkExtent]] = {}

    def take(self, path: str, chunk: int, key: str, source: Pieces, size: int) -> bool:
        """Link the file of this chunk if the chunk is unchanged; return whether that worked. If not, the caller writes the chunk."""
        old = self._previous.chunk(path, chunk, size, raw=True)
        if old is None or not old.file.startswith(self._below) or self._is_linked.get(old.file) is False:
            return False
        if not source.have(old.digests):
            return False
        if old.file not in self._is_linked:
            record = self._previous.files[old.file]
            self._is_linked[old.file] = self._sink.link(old.file, self._previous.folder, record.size)
        if self._is_linked[old.file]:
            self._kind_of[old.file] = path.rpartition("/")[0], key
            self.kept[path, chunk] = key, old
        return self._is_linked[old.file]

    def settle(self) -> Iterator[tuple[str, int, str, int, Pieces]]:
        """Yield the chunks of files that are not worth linking, for the caller to write: array path, number, key, bytes, source.

        Raises:
            CorruptCheckpointError: a chunk does not match its digests in the previous checkpoint.
        """
        used: dict[str, list[tuple[str, int]]] = defaultdict(list)
        for name, (_, extent) in self.kept.items():
            used[extent.file].append(name)
        dead = self._dead_in(used.keys())
        worth = self._worth_linking(
            {file: sum(self.kept[name][1].length for name in used[file]) for file in used}, dead
        )
        for file in sorted(used.keys() - worth):
            for name in sorted(used[file], key=lambda name: self.kept[name][1].offset):
                key, extent = self.kept.pop(name)
                yield *name, key, extent.length, Pieces(self._read(name[0], extent))
            self._sink.unlink(file)
        self.files = {file: self._previous.files[file] for file in sorted(worth)}
        self.dead = {file: dead[file] for file in sorted(worth) if dead[file]}

    def add_to(self, written: Written) -> None:
        """Add the values in linked files, and these files. Called once, after `settle`."""
        written.chunks |= {place: extent for place, (_, extent) in self.kept.items()}
        written.files |= self.files
        written.dead |= self.dead
        written.linked_bytes = sum(record.size for record in self.files.values())

    def _worth_linking(self, live_bytes: Mapping[str, int], dead: Mapping[str, Sequence[ChunkExtent]]) -> set[str]:
        worth = [
            file
            for file in sorted(live_bytes, key=lambda file: (-live_bytes[file], file))
            if self._is_worth_linking(live_bytes[file] / self._previous.files[file].size, bool(dead[file]))
        ]
        by_kind: dict[object, list[str]] = defaultdict(list)
        for file in worth:
            by_kind[self._kind_of[file] if self._whole else None].append(file)
        few = (alike if len(alike) <= MOST_FILES else alike[: MOST_FILES // 2] for alike in by_kind.values())
        return {file for alike in few for file in alike}

    def _is_worth_linking(self, fraction: float, has_dead: bool) -> bool:
        """Whether enough of a file is used: `min_live`, or half of a file without dead values, whose rest is database nodes."""
        if self._whole:
            return not has_dead
        return fraction >= self._previous.min_live or (not has_dead and fraction >= 0.5)

    def _dead_in(self, files: Collection[str]) -> dict[str, list[ChunkExtent]]:
        """Return file -> extents of its dead chunks, in order."""
        dead = {file: list(self._previous.dead.get(file, ())) for file in files}
        for path, by_number in self._previous.chunks.items():
            for number, extent in by_number.items():
                if extent.file in dead and (path, number) not in self.kept:
                    dead[extent.file].append(extent)
        return {file: sorted(extents, key=lambda extent: extent.offset) for file, extents in dead.items()}

    def _read(self, path: str, extent: ChunkExtent) -> Iterator[memoryview]:
        """Yield the bytes of a value, each piece valid until the next; raise at the end if they do not match the digests."""
        buffer = memoryview(bytearray(min(extent.length, PIECE_BYTES)))
        checked = Pieces(_file_pieces(self._root, extent, buffer))
        yield from checked.digested()
        if checked.written(path) != extent.digests:
            raise CorruptCheckpointError(
                f"{path}: bytes {extent.offset} to {extent.offset + extent.length} of {self._previous.folder / extent.file} are not "
                f"those that were saved, and so cannot become part of a new checkpoint. {self._previous.folder.name} is damaged; "
                "the next save goes without it.",
                file=extent.file,
            )


def _file_pieces(root: Place, extent: ChunkExtent, buffer: memoryview) -> Iterator[memoryview]:
    left, at = extent.length, extent.offset
    with naming(root / extent.file), files_below(root) as files, files.opened(extent.file) as file:
        while left and (count := file.read_at([buffer[:left]], at)):
            left, at = left - count, at + count
            yield buffer[:count]
