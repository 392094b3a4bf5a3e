"""Takes tensors out of safetensors files.

Such a file has no gaps, so what remains is copied; to another file, for other checkpoints may link the one that there was.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import xxhash

from ckpt.backends.safetensors_format import INDEX_NAME, SUFFIX, Entry, Header, SafetensorsFile, index_bytes, read_shard
from ckpt.errors import CorruptCheckpointError
from ckpt.format.durable import replace_durably, sync_folder
from ckpt.format.names import encode_key
from ckpt.format.records import FileRecord
from ckpt.storage.files import PIECE_BYTES, naming, write_all


class Remains(NamedTuple):
    """What is left of a file.

    Attributes:
        record: of the new file.
        moved: where a tensor began in the old file -> where it begins in the new one, in bytes.
    """

    record: FileRecord
    moved: Mapping[int, int]


def names_of(entries: Iterable[Entry]) -> set[str]:
    """The names of the arrays' paths in their folder."""
    return {encode_key(entry.content.key) for entry in entries}


def copy_without(source: Path, target: Path, names: Collection[str], progress: Callable[[int], None]) -> Remains | None:
    """Copy a safetensors file without the arrays of these names, durably but for the new file's name.

    Args:
        names: as `names_of` gives them.
        progress: called with bytes as they move.

    Returns:
        None, and there is no file, where nothing would be in it.

    Raises:
        CorruptCheckpointError: `source` is no safetensors file.
        OSError: it names the file.
    """
    shard = read_shard(source)
    kept = [entry for entry in shard.entries if encode_key(entry.content.key) not in names]
    if not kept:
        return None
    header = Header(kept)
    at, placed, moved = 0, [], {}
    for entry in sorted(kept, key=lambda entry: (entry.start, entry.num_bytes)):
        placed.append((at, [entry._replace(start=0)]))
        if entry.num_bytes:
            moved[shard.data_start + entry.start] = header.num_bytes + at
        at += entry.num_bytes
    first = header.to_bytes(placed)
    with naming(target), source.open("rb", buffering=0) as old, target.open("xb", buffering=0) as new:
        write_all(new.fileno(), memoryview(first))
        for begin, end in _runs(shard, kept):
            for piece in _pieces(old, begin, end):
                write_all(new.fileno(), piece)
                progress(len(piece))
        os.fsync(new.fileno())
    return Remains(FileRecord(header.num_bytes + at, xxhash.xxh3_128_hexdigest(first)), moved)


def remove_from_files(root: Path, paths: Collection[str]) -> None:
    """Take the arrays at these paths out of the files of their folders, and of the folders' indexes."""
    by_folder: dict[str, set[str]] = {}
    for path in paths:
        folder, _, name = path.rpartition("/")
        by_folder.setdefault(folder, set()).add(name)
    for folder, names in by_folder.items():
        files = sorted((root / folder).glob(f"*{SUFFIX}"))
        concerned = [file for file in files if names & names_of(read_shard(file).entries)]
        for file in concerned:
            _replace_without(file, names)
        if concerned:
            _renew_index(root / folder, [file.name for file in files if file.exists()])


def _replace_without(file: Path, names: Collection[str]) -> None:
    beside = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    try:
        if copy_without(file, beside, names, lambda _: None) is None:
            file.unlink()
        else:
            os.replace(beside, file)
    finally:
        beside.unlink(missing_ok=True)


def _renew_index(folder: Path, files: Sequence[str]) -> None:
    if files:
        replace_durably(folder / INDEX_NAME, index_bytes(folder, files, lambda _: None))
    else:
        (folder / INDEX_NAME).unlink(missing_ok=True)
        sync_folder(folder)


def _runs(shard: SafetensorsFile, entries: Iterable[Entry]) -> Iterator[tuple[int, int]]:
    """Yield where the entries lie in the file, neighbours together."""
    begin = end = shard.data_start
    for entry in sorted(entries, key=lambda entry: entry.start):
        start = shard.data_start + entry.start
        if start != end:
            yield begin, end
            begin = start
        end = start + entry.num_bytes
    yield begin, end


def _pieces(file: BinaryIO, begin: int, end: int) -> Iterator[memoryview]:
    """Yield these bytes, each piece good until the next."""
    buffer = memoryview(bytearray(min(PIECE_BYTES, end - begin)))
    file.seek(begin)
    while begin < end:
        num = file.readinto(buffer[: end - begin])  # type: ignore[attr-defined]
        if not num:
            raise CorruptCheckpointError(f"{file.name} ends at byte {begin}, and a tensor at byte {end}")
        begin += num
        yield buffer[:num]
