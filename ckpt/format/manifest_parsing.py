"""Parse manifests and indexes that anybody may have written: return consistent records, or raise one error.

Used for every manifest and index that is read. Schemas of msgspec check types and ranges; `consistency` checks values against each other.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec

from ckpt.errors import ConfigurationError, CorruptCheckpointError
from ckpt.format.box import Box
from ckpt.format.consistency import (
    check_extents,
    check_inner_paths,
    check_manifest,
    check_pieces,
    checked_place,
    hex_digits,
)
from ckpt.format.digests import digest_of
from ckpt.format.gc_pause import gc_paused
from ckpt.format.manifest import (
    COMMON,
    FORMAT_VERSION,
    MANIFEST_NAME,
    OBJECTS,
    ArrayEntry,
    CheckpointManifest,
    Index,
    PackedPiece,
    closing,
)
from ckpt.format.records import ChunkExtent, FileRecord
from ckpt.format.strict_json import (
    Count,
    Rank,
    Refused,
    Shape,
    Side,
    corrupt,
    fit,
    num_keys,
    parse,
    refusing,
)

_ARRAYS = '\n  "arrays": {\n'
_END_OF_TABLE = "\n  },\n"


@gc_paused()
def parse_manifest(data: bytes, where: str) -> CheckpointManifest:
    """Check the digest of the raw bytes, then parse. `where` names the file in errors.

    Raises:
        CorruptCheckpointError: the bytes are not the ones that were written, or what they say cannot be: see
            `ckpt.format.consistency`.
        ConfigurationError: they are of a newer version of this format.
    """
    require_own_digest(data, where)
    with refusing(where):
        text = data.decode()
    head, rows = _parted(text)
    tree = parse(head, where)
    _require_version(tree, where)
    if rows is not None:
        if "arrays" in tree:
            raise corrupt(where, "'arrays' stands twice in it")
        tree["arrays"] = {}
    manifest = fit(tree, CheckpointManifest, where)
    fit(manifest.topology, _Topology, where)
    if rows is not None:
        manifest.arrays = _arrays_in(rows, where)
    with refusing(where):
        check_manifest(manifest)
        _require_known_parts(manifest.files)
    return manifest


@gc_paused()
def parse_index(data: bytes, where: str = "an index") -> Index:
    """Parse an index. `where` names the file in errors. `stored.read_index` then checks it against its manifest.

    Raises:
        CorruptCheckpointError: it is inconsistent: see `ckpt.format.consistency`.
    """
    document = _index_document(data, where)
    with refusing(where):
        files = list(document.files)
        index = Index(
            rank=document.rank,
            files={path: FileRecord(size, rest) for path, (size, rest) in document.files.items()},
            chunks={path: _extents_of(rows, files) for path, rows in document.chunks.items()},
            packed=document.packed,
            pieces=_pieces_from_json(document.pieces, list(document.packed)),
            dead={
                file: [
                    ChunkExtent(file, offset, length, _unhex(digests), block_bytes)
                    for offset, length, block_bytes, digests in rows
                ]
                for file, rows in document.dead.items()
            },
        )
        check_inner_paths((*index.files, *index.chunks, *index.packed, *index.dead))
        check_extents(index)
        check_pieces(index)
    return index


_ChunkRow = tuple[Count, Count, Count, Count, Side, str, Literal[0, 1]]
_DeadRow = tuple[Count, Count, Side, str]
_PieceRow = tuple[Count, Shape, Shape, Shape, Count]


class _IndexDocument(msgspec.Struct):
    """The schema of an index. Digests are checked later, all at once."""

    rank: Rank
    files: dict[str, tuple[Count, str]]
    chunks: dict[str, list[_ChunkRow]]
    packed: dict[str, Count]
    pieces: dict[str, list[_PieceRow]]
    dead: dict[str, list[_DeadRow]] = {}


_INDEX_DECODER = msgspec.json.Decoder(_IndexDocument)


def _index_document(data: bytes, where: str) -> _IndexDocument:
    """Decode an index with msgspec; with the slower strict parser where msgspec fails or may have dropped a repeated key."""
    try:
        document = _INDEX_DECODER.decode(data)
        tables: Iterable[Mapping[str, object]] = (document.files, document.chunks, document.packed, document.pieces, document.dead)
        is_whole = num_keys(data) == 5 + bool(document.dead) + sum(len(table) for table in tables)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        is_whole = False  # such as a name with half a surrogate pair, which JSON can hold
    if not is_whole:
        document = fit(parse(data, where), _IndexDocument, where)
    with refusing(where):
        hex_digits([rest for _, rest in document.files.values()], 32)
        hex_digits([row[5] for rows in document.chunks.values() for row in rows])
        hex_digits([row[3] for rows in document.dead.values() for row in rows])
    return document


def _extents_of(rows: Sequence[_ChunkRow], files: Sequence[str]) -> dict[int, ChunkExtent]:
    """Return the chunks of one array, by number."""
    try:
        extents = {
            number: ChunkExtent(files[file], offset, length, _unhex(digests), block_bytes, bool(raw))
            for number, file, offset, length, block_bytes, digests, raw in rows
        }
    except IndexError:
        raise Refused(f"a chunk lies in file number {max(row[1] for row in rows)} of {len(files)}") from None
    if len(extents) != len(rows):
        raise Refused("a chunk is listed twice")
    return extents


def _require_known_parts(files: Iterable[str]) -> None:
    """Refuse a manifest that lists nested checkpoints other than `COMMON` and `OBJECTS`."""
    for path in files:
        folder, _, name = path.rpartition("/")
        if name == MANIFEST_NAME and folder not in (COMMON, OBJECTS):
            raise Refused(f"it lists {path!r:.200}; a checkpoint inside of another one is called {COMMON} or {OBJECTS}")


def require_own_digest(data: bytes, where: str) -> None:
    """Refuse a manifest whose bytes were changed or cut off after the save. `where` names the file.

    Raises:
        CorruptCheckpointError: the bytes do not match the digest at their end.
    """
    size = len(closing("0" * 32))
    if len(data) <= size or data[-size:] != closing(digest_of(memoryview(data)[:-size])):
        raise CorruptCheckpointError(f"{where}: the manifest does not match its own digest; it was changed or cut off")


_Ranks = Annotated[list[Rank], msgspec.Meta(min_length=1)]


class _Topology(msgspec.Struct):
    """The schema of a manifest's topology, which may have more keys."""

    nodes: list[list[Rank]] = []
    groups: dict[str, Annotated[list[_Ranks], msgspec.Meta(min_length=1)]] = {}


def _require_version(tree: Any, where: str) -> None:
    """Refuse a manifest of another format version, before the rest is parsed.

    Raises:
        CorruptCheckpointError: it says no version.
        ConfigurationError: it says another one.
    """
    version = tree.get("format_version") if isinstance(tree, dict) else None
    if type(version) is not int or version < 1:
        raise corrupt(where, f"format_version is {version!r:.40}, which no version of ckpt wrote")
    if version != FORMAT_VERSION:
        raise ConfigurationError(
            f"{where} has format version {version}; this version of ckpt reads version "
            f"{FORMAT_VERSION}. Read it with the version that wrote it, ckpt {tree.get('ckpt_version')}."
        )


def _parted(text: str) -> tuple[str, str | None]:
    """Split a manifest's text into the part without arrays, and the arrays, a line each; None if it is laid out otherwise."""
    start = text.find(_ARRAYS)
    stop = text.find(_END_OF_TABLE, start)
    if start < 0 or stop < 0:
        return text, None
    return text[:start] + text[stop + len(_END_OF_TABLE) - 1 :], text[start + len(_ARRAYS) : stop]


def _arrays_in(rows: str, where: str) -> dict[str, ArrayEntry]:
    """Parse the arrays of a manifest. Equal texts are parsed once, and share one entry.

    Each array has a line of its own, as `to_bytes` writes them. (JSON strings contain no line breaks.)
    """
    arrays = {}
    known: dict[str, ArrayEntry] = {}
    name_at = json.JSONDecoder().raw_decode
    lines = rows.split(",\n")
    with refusing(where):
        for line in lines:
            name, end = name_at(line, 4)
            entry = known.get(line[end:])
            if entry is None:
                entry = known[line[end:]] = _entry_in(line, end, where)
            arrays[name] = entry
    if len(arrays) != len(lines) or not all(type(name) is str for name in arrays):
        raise corrupt(where, "a name stands twice among its arrays, or is none")
    return arrays


def _entry_in(line: str, end: int, where: str) -> ArrayEntry:
    """Parse the entry in a line whose name ends at `end`."""
    if line[:4].strip() or line[end : end + 1] != ":":
        raise Refused(f"{line!r:.80} is no array")
    try:
        return _ENTRY_DECODER.decode(line[end + 1 :])
    except (msgspec.MsgspecError, RecursionError):  # see `_index_document`
        return fit(parse(line[end + 1 :], where), ArrayEntry, where)


_ENTRY_DECODER = msgspec.json.Decoder(ArrayEntry)


def _pieces_from_json(tree: Mapping[str, Sequence[_PieceRow]], packed: Sequence[str]) -> dict[str, list[PackedPiece]]:
    """Return the pieces of an index. Equal places are built and checked once."""
    places: dict[tuple[Shape, Shape, Shape], tuple[Shape, Box]] = {}
    found: dict[str, list[PackedPiece]] = {}
    for name, rows in tree.items():
        pieces = found[name] = []
        for at, shape, offsets, sides, first in rows:
            same = shape, offsets, sides
            place = places.get(same)
            if place is None:
                place = places[same] = shape, checked_place(shape, offsets, sides)
            try:
                pieces.append(PackedPiece(packed[at], *place, first))
            except IndexError:
                raise Refused(f"{name!r:.80} lies in packed array number {at} of {len(packed)}") from None
    return found


def _unhex(digests: str) -> tuple[int, ...]:
    return tuple(int(digests[at : at + 16], 16) for at in range(0, len(digests), 16))
