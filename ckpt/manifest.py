"""The record of a checkpoint: the manifest, written last and read first, and one index per writing rank.

The manifest says what the checkpoint holds and who wrote it; an index says where the bytes lie and what they must be. Both
are JSON, and every path in them is relative, so a renamed or copied checkpoint stays whole. This module turns them into
text and back, and refuses text whose digest is wrong; it decides nothing.
"""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from json.encoder import encode_basestring_ascii as _quoted
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import xxhash

from ckpt.backends.base import ChunkExtent, FileRecord
from ckpt.box import Box
from ckpt.collector import collector_paused
from ckpt.consistency import (
    check_extents,
    check_inner_paths,
    check_manifest,
    check_pieces,
    checked_place,
    hex_digits,
)
from ckpt.dtypes import item_bytes
from ckpt.errors import ConfigurationError, CorruptCheckpointError
from ckpt.strict_json import (
    MAX_RANKS,
    Count,
    Digest,
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

FORMAT_VERSION = 1
MANIFEST_NAME = "checkpoint_manifest.json"
CONFIG_NAME = "config.yaml"
SHARDED = "sharded"
"""The component, and so the folder, of a sharded state dict's tensors."""
MAX_COMMIT_NUMBER = 10**12
"""A greater `commit_number` is not one that saves have counted up to, and counts as none."""
COMMON, OBJECTS = "common", "objects"
"""Folders beside it, each a checkpoint of its own, with what a sharded state dict holds besides."""
_OPTIONAL = ("commit_number", "run_id")


def index_name(rank: int, generation: int = 0) -> str:
    """The file of a rank's index. A checkpoint of which arrays were removed has a later generation of it."""
    return f"index-{rank:05d}.json" if generation == 0 else f"index-{rank:05d}.{generation}.json"


_INDEX = re.compile(r"index-(?P<rank>\d{5,})(?:\.(?P<generation>\d+))?\.json")


def index_generation(path: str) -> int:
    """Of a file that `index_name` named."""
    match = _INDEX.fullmatch(path)
    assert match is not None, path
    return int(match["generation"] or 0)


def digest_of(data: bytes | memoryview) -> str:
    """The xxh3-128 of some bytes, as 32 lower-case hex digits: how every whole file is named in a manifest."""
    return xxhash.xxh3_128_hexdigest(data)


@dataclass(frozen=True, slots=True)
class ArrayEntry:
    """What the manifest knows of one tensor, under the name `<component>/<prefix><key>`.

    Exactly one of three kinds: its own array (`store`, `path`, `grid`, `writers`), packed with others (`store`, `packed_in`),
    or a second name of another tensor (`alias_of`).

    Attributes:
        writers: runs (rank, first chunk, number of chunks) in row-major order of the chunks, covering all of them.
        packed_in: the ranks whose index holds pieces of it.
    """

    dtype: str
    shape: Shape
    store: str | None = None
    path: str | None = None
    grid: tuple[Side, ...] | None = None
    writers: tuple[tuple[Rank, Count, Side], ...] = ()
    packed_in: tuple[Rank, ...] = ()
    alias_of: str | None = None

    @property
    def num_bytes(self) -> int:
        """Of its elements."""
        return math.prod(self.shape) * item_bytes(self.dtype)

    def writer_of(self, chunk: int) -> int:
        """Return the rank whose index knows where row-major `chunk` lies."""
        at = bisect_right(self.writers, chunk, key=lambda run: run[1]) - 1
        rank, first, count = self.writers[at]
        assert first <= chunk < first + count, f"chunk {chunk} of {self.path} has no writer"
        return rank

    def to_json(self) -> dict[str, Any]:
        entry: dict[str, Any] = {"dtype": self.dtype, "shape": list(self.shape)}
        if self.alias_of is not None:
            entry["alias_of"] = self.alias_of
        elif self.grid is None:
            entry["store"] = self.store
            entry["packed_in"] = list(self.packed_in)
        else:
            entry["grid"] = list(self.grid)
            entry["store"] = self.store
            entry["path"] = self.path
            entry["writers"] = [list(run) for run in self.writers]
        return entry


Pattern = Annotated[str, msgspec.Meta(pattern=r"\A(global|per_rank|replicated|per_group|per_node|sharded)\Z")]
"""One of the strings of `SharingPattern`."""


@dataclass(frozen=True, slots=True)
class ComponentManifest:
    """One component of a checkpoint.

    Attributes:
        key: the component, such as "model".
        sharing_pattern: one of the strings of `SharingPattern`.
        ranks: who wrote any of it.
        replicated_across: the ranks that held equal copies when it was saved; for a PER_GROUP or PER_NODE component all
            members of all instances; None where copies are not equal.
        group_name: the process group of a PER_GROUP component.
        size_bytes: bytes of its tensors, each counted once, and of its plain values as stored.
        checksum: xxh3-128 over every writer's digests of it, in rank order.
        plain_in: pattern prefix -> the rank that wrote `<component>/<prefix>plain.json`.
    """

    key: str
    sharing_pattern: Pattern
    ranks: list[Rank]
    replicated_across: list[Rank] | None = None
    group_name: str | None = None
    size_bytes: Count = 0
    checksum: Digest | None = None
    plain_in: dict[str, Rank] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(slots=True)
class CheckpointManifest:
    """A checkpoint as a whole. The JSON has these keys, in this order, and `manifest_digest` as its last.

    Attributes:
        checkpoint_path: always ".": a checkpoint is where its manifest is.
        checkpoint_id: the id it was saved under, whatever its folder is called today.
        timestamp: when it was committed, UTC.
        commit_number: its place in the order of commits below its root; None (no such key): written by an older version, or outside of a
            root. Those come before all that have one, in the order of their timestamps.
        run_id: of the training history it belongs to: a run and those that were resumed from it. None (no such key): unknown.
        topology: "nodes" (global ranks per host) and "groups" (name -> instances -> global ranks) of the saving run.
        training_args_hash: xxh3-128 of config.yaml; None where no config was given.
        arrays: array name -> entry.
        files: path -> (size in bytes, xxh3-128) of every file the lead rank wrote beside its own index's.
    """

    checkpoint_id: str
    timestamp: datetime
    world_size: int
    topology: dict[str, Any]
    components: dict[str, ComponentManifest]
    arrays: dict[str, ArrayEntry]
    files: dict[str, tuple[int, str]]
    training_args_hash: str | None = None
    checkpoint_path: str = "."
    ckpt_version: str | None = None
    pytorch_version: str | None = None
    format_version: int = FORMAT_VERSION
    commit_number: int | None = None
    run_id: str | None = None
    _owned: dict[int, Owned] | None = field(default=None, init=False, repr=False, compare=False)

    @collector_paused()
    def to_bytes(self) -> bytes:
        """The manifest file: one line per key, per component, per array and per file; the digest on the last line but one."""
        head = {
            "format_version": self.format_version,
            "ckpt_version": self.ckpt_version,
            "pytorch_version": self.pytorch_version,
            "timestamp": self.timestamp.isoformat(),
            **{key: value for key in _OPTIONAL if (value := getattr(self, key)) is not None},
            "checkpoint_path": self.checkpoint_path,
            "checkpoint_id": self.checkpoint_id,
            "world_size": self.world_size,
            "topology": self.topology,
            "training_args_hash": self.training_args_hash,
        }
        lines = [f"  {json.dumps(key)}: {_dump(value)},\n" for key, value in head.items()]
        # Arrays that are stored alike have one entry between them, and so one text.
        texts = {id(entry): _dump(entry.to_json()) for entry in {id(a): a for a in self.arrays.values()}.values()}
        lines += [
            f"{_table('components', ((k, _dump(c.to_json())) for k, c in self.components.items()))},\n",
            f"{_table('arrays', ((k, texts[id(a)]) for k, a in self.arrays.items()))},\n",
            f"{_table('files', ((k, _dump(list(f))) for k, f in self.files.items()))},\n",
        ]
        body = ("{\n" + "".join(lines)).encode()
        return body + _closing(digest_of(body))

    @classmethod
    @collector_paused()
    def from_bytes(cls, data: bytes, where: str) -> CheckpointManifest:
        """Check the digest of the raw bytes, then parse. `where` names the file in errors.

        Raises:
            CorruptCheckpointError: the bytes are not the ones that were written, or what they say cannot be: see
                `ckpt.consistency`.
            ConfigurationError: they are of a newer version of this format.
        """
        require_own_digest(data, where)
        with refusing(where):
            text = data.decode()
        head, rows = _parted(text)
        tree = parse(head, where)
        _require_version(tree, where)
        if rows is not None and "arrays" in tree:
            raise corrupt(where, "'arrays' stands twice in it")
        said = fit(tree, _Document, where)
        manifest = cls(
            checkpoint_id=said.checkpoint_id,
            timestamp=said.timestamp,
            world_size=said.world_size,
            topology=tree["topology"],
            components=said.components,
            arrays=fit(tree.get("arrays"), dict[str, ArrayEntry], where) if rows is None else _arrays_in(rows, where),
            files=said.files,
            training_args_hash=said.training_args_hash,
            checkpoint_path=said.checkpoint_path,
            ckpt_version=said.ckpt_version,
            pytorch_version=said.pytorch_version,
            commit_number=said.commit_number,
            run_id=said.run_id,
        )
        with refusing(where):
            check_manifest(manifest)
            _require_known_parts(manifest.files)
        return manifest

    def arrays_of(self, component: str) -> dict[str, ArrayEntry]:
        """The arrays of one component, by the rest of their name: `<prefix><key>`."""
        start = component + "/"
        return {name[len(start) :]: entry for name, entry in self.arrays.items() if name.startswith(start)}

    def owned_by(self, rank: int) -> Owned:
        """What a rank's index must list. Worked out once for all ranks: `arrays` must not change any more."""
        if self._owned is None:
            self._owned = _owned_by_rank(self.arrays.values())
        return self._owned.get(rank, Owned())

    def index_paths(self) -> dict[int, str]:
        """Rank -> file of its index, of the ranks that left one, in order."""
        found = (_INDEX.fullmatch(path) for path in self.files)
        return dict(sorted((int(match["rank"]), match[0]) for match in found if match))

    def listed_indexes(self) -> list[int]:
        """The rank of every index that is listed, even if one rank has several."""
        return [int(match["rank"]) for path in self.files if (match := _INDEX.fullmatch(path))]

    def index_ranks(self) -> list[int]:
        """The ranks that left an index, in order."""
        return list(self.index_paths())


@dataclass(slots=True)
class Owned:
    """What one rank wrote, as the manifest has it.

    Attributes:
        arrays: path -> entry and number of chunks, of the arrays of which it wrote any.
        num_packed: tensors of which it packed a part.
    """

    arrays: dict[str, tuple[ArrayEntry, int]] = field(default_factory=dict)
    num_packed: int = 0


def _owned_by_rank(entries: Collection[ArrayEntry]) -> dict[int, Owned]:
    found: dict[int, Owned] = defaultdict(Owned)
    alike = {id(entry): entry for entry in entries}
    for same, times in Counter(map(id, entries)).items():
        entry = alike[same]
        for rank, _, count in entry.writers:
            arrays = found[rank].arrays
            before = arrays.get(entry.path or "")
            arrays[entry.path or ""] = entry, count + (before[1] if before is not None else 0)
        for rank in entry.packed_in:
            found[rank].num_packed += times
    return dict(found)


class Piece(NamedTuple):
    """A small tensor, or a box of one, inside a packed array.

    Attributes:
        packed: path of the packed array, 1-D and one chunk.
        global_shape: of the tensor.
        box: which of its elements, in global coordinates.
        first: where its first element lies in the packed array, in elements.
    """

    packed: str
    global_shape: tuple[int, ...]
    box: Box
    first: int


@dataclass(slots=True)
class Index:
    """What one rank wrote, or linked to the checkpoint before.

    Attributes:
        files: every file of this rank, by path below the checkpoint.
        chunks: array path -> row-major chunk number -> where it lies and what it must be.
        packed: path of each of this rank's packed arrays -> number of elements.
        pieces: array name (`<component>/<prefix><key>`) -> its pieces in those.
        dead: file -> what lies in it of an earlier checkpoint, and is no chunk of this one. Its digests are kept, so that every byte
            of the file can be checked. Absent from the JSON where there is none. To a version of this package that does not
            know it, such a file, and no other, looks as if its loose bytes had been changed.
    """

    rank: int
    files: dict[str, FileRecord] = field(default_factory=dict)
    chunks: dict[str, dict[int, ChunkExtent]] = field(default_factory=dict)
    packed: dict[str, int] = field(default_factory=dict)
    pieces: dict[str, list[Piece]] = field(default_factory=dict)
    dead: dict[str, list[ChunkExtent]] = field(default_factory=dict)

    def covered(self) -> dict[str, list[ChunkExtent]]:
        """File -> what of it is under digests of its own; the record of the file has one of all the rest."""
        found: dict[str, list[ChunkExtent]] = {}
        for by_number in self.chunks.values():
            for extent in by_number.values():
                found.setdefault(extent.file, []).append(extent)
        for file, extents in self.dead.items():
            found.setdefault(file, []).extend(extents)
        return found

    @collector_paused()
    def to_bytes(self) -> bytes:
        file_number = {file: number for number, file in enumerate(self.files)}
        chunks = {
            path: [
                [number, file_number[e.file], e.offset, e.length, e.block_bytes, _hex(e.digests), int(e.raw)]
                for number, e in by_number.items()
            ]
            for path, by_number in self.chunks.items()
        }
        tables = (
            f'  "rank": {self.rank}',
            _table("files", ((path, _dump([record.size, record.rest])) for path, record in self.files.items())),
            _table("chunks", ((path, _dump(rows)) for path, rows in chunks.items())),
            _table("packed", ((path, str(length)) for path, length in self.packed.items())),
            _table("pieces", self._piece_rows()),
            *(
                [_table("dead", ((file, _dump(_dead_rows(rows))) for file, rows in self.dead.items()))]
                if self.dead
                else ()
            ),
        )
        return ("{\n" + ",\n".join(tables) + "\n}\n").encode()

    def _piece_rows(self) -> Iterator[tuple[str, str]]:
        """The name of each packed tensor, and its pieces as JSON. The places of those that are cut alike are written once."""
        number = {path: str(number) for number, path in enumerate(self.packed)}
        places: dict[tuple[tuple[int, ...], Box], str] = {}
        for name, pieces in self.pieces.items():
            rows = []
            for packed, shape, box, first in pieces:
                place = places.get((shape, box))
                if place is None:
                    place = places[shape, box] = f"{list(shape)}, {list(box.offsets)}, {list(box.shape)}"
                rows.append(f"[{number[packed]}, {place}, {first}]")
            yield name, f"[{', '.join(rows)}]"

    @classmethod
    @collector_paused()
    def from_bytes(cls, data: bytes, where: str = "an index") -> Index:
        """Parse what `to_bytes` made. `where` names the file in errors. Against its manifest, `stored.read_index` checks it.

        Raises:
            CorruptCheckpointError: what it says cannot be: see `ckpt.consistency`.
        """
        said = _index_document(data, where)
        with refusing(where):
            files = list(said.files)
            index = cls(
                rank=said.rank,
                files={path: FileRecord(size, rest) for path, (size, rest) in said.files.items()},
                chunks={path: _extents_of(rows, files) for path, rows in said.chunks.items()},
                packed=said.packed,
                pieces=_pieces_from_json(said.pieces, list(said.packed)),
                dead={
                    file: [
                        ChunkExtent(file, offset, length, _unhex(digests), block_bytes)
                        for offset, length, block_bytes, digests in rows
                    ]
                    for file, rows in said.dead.items()
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
    """An index as JSON. Digests are looked at later, all at once."""

    rank: Rank
    files: dict[str, tuple[Count, str]]
    chunks: dict[str, list[_ChunkRow]]
    packed: dict[str, Count]
    pieces: dict[str, list[_PieceRow]]
    dead: dict[str, list[_DeadRow]] = {}


_INDEX_DECODER = msgspec.json.Decoder(_IndexDocument)


def _index_document(data: bytes, where: str) -> _IndexDocument:
    """Decode an index in one go; where msgspec cannot, or may have lost a key that stands twice, more slowly."""
    try:
        said = _INDEX_DECODER.decode(data)
        tables: Iterable[Mapping[str, object]] = (said.files, said.chunks, said.packed, said.pieces, said.dead)
        is_whole = num_keys(data) == 5 + bool(said.dead) + sum(len(table) for table in tables)
    except (
        msgspec.MsgspecError,
        ValueError,
        RecursionError,
    ):  # or a name is half a surrogate pair, which JSON can hold
        is_whole = False
    if not is_whole:
        said = fit(parse(data, where), _IndexDocument, where)
    with refusing(where):
        hex_digits([rest for _, rest in said.files.values()], 32)
        hex_digits([row[5] for rows in said.chunks.values() for row in rows])
        hex_digits([row[3] for rows in said.dead.values() for row in rows])
    return said


def _extents_of(rows: Sequence[_ChunkRow], files: Sequence[str]) -> dict[int, ChunkExtent]:
    """The chunks of one array, by number."""
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
    """Refuse a manifest that lists another checkpoint inside of this one, beside the two that there may be."""
    for path in files:
        folder, _, name = path.rpartition("/")
        if name == MANIFEST_NAME and folder not in (COMMON, OBJECTS):
            raise Refused(f"it lists {path!r:.200}; a checkpoint inside of another one is called {COMMON} or {OBJECTS}")


def _dead_rows(extents: Iterable[ChunkExtent]) -> list[list[Any]]:
    return [[e.offset, e.length, e.block_bytes, _hex(e.digests)] for e in extents]


def require_own_digest(data: bytes, where: str) -> None:
    """Refuse the bytes of a manifest that are not the ones that were written. `where` names the file.

    Raises:
        CorruptCheckpointError: they do not match the digest that they end in.
    """
    size = len(_closing("0" * 32))
    if len(data) <= size or data[-size:] != _closing(digest_of(memoryview(data)[:-size])):
        raise CorruptCheckpointError(f"{where}: the manifest does not match its own digest; it was changed or cut off")


class _Topology(msgspec.Struct):
    nodes: list[list[Rank]] = []
    groups: dict[str, list[list[Rank]]] = {}


class _Document(msgspec.Struct):
    """A manifest as JSON, without its arrays, which most of it is."""

    timestamp: datetime
    checkpoint_id: str
    world_size: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)]
    topology: _Topology
    components: dict[str, ComponentManifest]
    files: dict[str, tuple[Count, Digest]]
    checkpoint_path: Literal["."] = "."
    training_args_hash: Digest | None = None
    ckpt_version: str | None = None
    pytorch_version: str | None = None
    commit_number: Count | None = None
    run_id: str | None = None


def _require_version(tree: Any, where: str) -> None:
    """Refuse a manifest of another version of the format before anything else in it is looked at.

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
    """The text of a manifest without its arrays, and that of these, a line for each; None if another hand laid it out."""
    start = text.find(_ARRAYS)
    stop = text.find(_END_OF_TABLE, start)
    if start < 0 or stop < 0:
        return text, None
    return text[:start] + text[stop + len(_END_OF_TABLE) - 1 :], text[start + len(_ARRAYS) : stop]


def _arrays_in(rows: str, where: str) -> dict[str, ArrayEntry]:
    """The arrays of a manifest, of which those that are stored alike share one entry: what reads alike is parsed once.

    That takes that each stands on a line of its own, as `to_bytes` writes them. (No string of JSON holds an end of line.)
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
    """The entry in a line whose name ends at `end`."""
    if line[:4].strip() or line[end : end + 1] != ":":
        raise Refused(f"{line!r:.80} is no array")
    try:
        return _ENTRY_DECODER.decode(line[end + 1 :])
    except (msgspec.MsgspecError, RecursionError):  # see `_index_document`
        return fit(parse(line[end + 1 :], where), ArrayEntry, where)


_ENTRY_DECODER = msgspec.json.Decoder(ArrayEntry)


def _pieces_from_json(tree: Mapping[str, Sequence[_PieceRow]], packed: Sequence[str]) -> dict[str, list[Piece]]:
    """The pieces of an index. The places of those that are cut alike are made, and checked, once."""
    places: dict[tuple[Shape, Shape, Shape], tuple[Shape, Box]] = {}
    found: dict[str, list[Piece]] = {}
    for name, rows in tree.items():
        pieces = found[name] = []
        for at, shape, offsets, sides, first in rows:
            same = shape, offsets, sides
            place = places.get(same)
            if place is None:
                place = places[same] = shape, checked_place(shape, offsets, sides)
            try:
                pieces.append(Piece(packed[at], *place, first))
            except IndexError:
                raise Refused(f"{name!r:.80} lies in packed array number {at} of {len(packed)}") from None
    return found


def _table(key: str, rows: Iterable[tuple[str, str]]) -> str:
    """A dictionary as a key of a file's outermost one: a line for each (name, JSON)."""
    lines = ",\n".join([f"    {_quoted(name)}: {row}" for name, row in rows])
    return f'  "{key}": {{\n{lines}\n  }}' if lines else f'  "{key}": {{}}'


_ARRAYS = '\n  "arrays": {\n'
_END_OF_TABLE = "\n  },\n"


def _closing(digest: str) -> bytes:
    return f'  "manifest_digest": "{digest}"\n}}\n'.encode()


def _dump(value: object) -> str:
    return json.dumps(value, separators=(", ", ": "), ensure_ascii=True)


def _hex(digests: Iterable[int]) -> str:
    return "".join(f"{digest:016x}" for digest in digests)


def _unhex(digests: str) -> tuple[int, ...]:
    return tuple(int(digests[at : at + 16], 16) for at in range(0, len(digests), 16))
