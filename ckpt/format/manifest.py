"""The records of a checkpoint: the manifest, written last and read first, and one index per writing rank.

The manifest lists components, arrays and the ranks that wrote them, and keeps metrics and metadata of the program (`storable_metrics`); an
index lists where the bytes lie, and their digests. Both are JSON with relative paths, so a renamed or copied checkpoint stays whole. This
module holds and writes them; `manifest_parsing` reads them.
"""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from itertools import chain
from json.encoder import encode_basestring_ascii as _quoted
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np

from ckpt.errors import ConfigurationError, unlike
from ckpt.format.box import Box
from ckpt.format.digests import digest_of
from ckpt.format.dtypes import item_bytes
from ckpt.format.gc_pause import gc_paused
from ckpt.format.places import PLAIN_NAME
from ckpt.format.records import ChunkExtent, FileRecord
from ckpt.format.strict_json import MAX_RANKS, Count, Digest, Rank, Shape, Side

FORMAT_VERSION = 1
MANIFEST_NAME = "checkpoint_manifest.json"
CONFIG_NAME = "config.yaml"
STATE = "state"
"""The component of a checkpoint of one state dict, as `ckpt.save` writes it."""
SHARDED = "sharded"
"""The component, and so the folder, of a sharded state dict's tensors."""
MAX_COMMIT_NUMBER = 10**12
"""A greater `commit_number` was not counted up by saves, and counts as none."""
COMMON, OBJECTS = "common", "objects"
"""Folders beside it, each a checkpoint of its own: the common state and the objects of a sharded state dict."""
_OPTIONAL = ("commit_number", "run_id", "data", "fence")
_FENCE = re.compile(rb'\{\n  "fence": "[0-9a-f]+"\n\}\n')
_NOTES = ("history", "metrics", "metadata")


def index_name(rank: int, generation: int = 0) -> str:
    """Return the file name of a rank's index. Removing arrays from a checkpoint writes a later generation."""
    return f"index-{rank:05d}.json" if generation == 0 else f"index-{rank:05d}.{generation}.json"


_INDEX = re.compile(r"index-(?P<rank>[0-9]{5,})(?:\.(?P<generation>[0-9]+))?\.json")


def index_rank(name: str) -> int | None:
    """Return the rank in a name that `index_name` makes; None: it is another name."""
    match = _INDEX.fullmatch(name)
    return None if match is None else int(match["rank"])


def index_generation(path: str) -> int:
    """Return the generation in a name that `index_name` made."""
    match = _INDEX.fullmatch(path)
    assert match is not None, path
    return int(match["generation"] or 0)


@dataclass(frozen=True, slots=True)
class ArrayEntry:
    """The manifest's entry of one tensor, under the name `<component>/<prefix><key>`.

    One of three kinds: an array of its own (`store`, `path`, `grid`, `writers`), packed with others (`store`, `packed_in`), or
    a second name of another tensor (`alias_of`).

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
        """Bytes of its elements."""
        return math.prod(self.shape) * item_bytes(self.dtype)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of the elements of one whole chunk."""
        return math.prod(self.grid or ()) * item_bytes(self.dtype)

    def writer_of(self, chunk: int) -> int:
        """Return the rank that wrote row-major `chunk`, and whose index lists it."""
        at = bisect_right(self.writers, chunk, key=lambda run: run[1]) - 1
        rank, first, count = self.writers[at]
        assert first <= chunk < first + count, f"chunk {chunk} of {self.path} has no writer"
        return rank

    def to_text(self) -> str:
        """Return the entry as JSON. Of thousands of ranks the writers are most of a manifest."""
        head = _dump(self._head())
        return head if self.grid is None else f'{head[:-1]}, "writers": {msgspec.json.encode(self.writers).decode()}}}'

    def to_json(self) -> dict[str, Any]:
        writers = {} if self.grid is None else {"writers": [list(run) for run in self.writers]}
        return {**self._head(), **writers}

    def _head(self) -> dict[str, Any]:
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
        return entry


Pattern = Annotated[str, msgspec.Meta(pattern=r"\A(global|per_rank|replicated|per_group|per_node|sharded)\Z")]
"""One of the strings of `SharingPattern`."""


@dataclass(frozen=True, slots=True)
class ComponentManifest:
    """One component of a checkpoint.

    Attributes:
        key: the component, such as "model".
        sharing_pattern: one of the strings of `SharingPattern`.
        ranks: that wrote a part of it.
        replicated_across: the ranks that held equal copies when it was saved; for a PER_GROUP or PER_NODE component all
            members of all instances; None where copies are not equal.
        group_name: the process group of a PER_GROUP component.
        size_bytes: bytes of its tensors, each counted once, and of its plain values as stored.
        checksum: xxh3-128 over every writer's digests of it, in rank order.
        plain_in: pattern prefix -> the rank that wrote `<component>/<prefix>plain.json`.

    Example:
        >>> from ckpt.storage.stored import read_manifest
        >>> _ = ckpt.save({"weight": torch.arange(6.0)}, "checkpoint")
        >>> read_manifest(Path("checkpoint")).components["state"].sharing_pattern
        'replicated'
    """

    key: str
    sharing_pattern: Pattern
    ranks: list[Rank]
    replicated_across: list[Rank] | None = None
    group_name: str | None = None
    size_bytes: Count = 0
    checksum: Digest | None = None
    plain_in: dict[str, Rank] = field(default_factory=dict)

    def plain_paths(self) -> dict[str, int]:
        """Return {file of its plain values: the rank that wrote it}."""
        return {f"{self.key}/{prefix}{PLAIN_NAME}": rank for prefix, rank in self.plain_in.items()}

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass
class CheckpointManifest:
    """A checkpoint as a whole. The JSON has these keys, in this order, and `manifest_digest` as its last.

    The types are also its schema: `manifest_parsing` refuses other values.

    Attributes:
        checkpoint_path: always ".": a checkpoint is where its manifest is.
        checkpoint_id: the id it was saved under, whatever its folder is called today.
        timestamp: when it was committed, UTC.
        commit_number: its place in the order of commits below its root; None (no such key): written by an older version, or outside of a
            root. Those come before all that have one, in the order of their timestamps.
        run_id: of the run that saved it; None (no such key): unknown. Older versions gave resumed runs the id of the first.
        history: run id -> commit number up to which the run's checkpoints belong to the history of this one, of the runs that it goes on
            from, as far as checkpoints of theirs were left. No such key where there are none.
        data: name of the place, below the checkpoint, that its files are in, as an object store needs it; None (no such key): they are in
            the checkpoint itself. A checkpoint that was copied from one kind of storage to another stays as it is.
        removed: keys of components that it was saved with and that retention has taken out since; no such key where there are none.
        fence: put into the manifest of a checkpoint in an object store to make the commit of a process that was taken for dead fail.
        metrics: name -> value at this step, such as a loss; None: not a finite number. No such key where none were given.
        metadata: plain values that the program keeps with the checkpoint. No such key where none were given.
        topology: "nodes" (global ranks per host) and "groups" (name -> instances -> global ranks) of the saving run.
        training_args_hash: xxh3-128 of config.yaml; None where no config was given.
        arrays: array name -> entry.
        files: path -> (size in bytes, xxh3-128) of every file the lead rank wrote beside its own index's.

    Example:
        >>> from ckpt.storage.stored import read_manifest
        >>> _ = ckpt.save({"weight": torch.arange(6.0)}, "checkpoint")
        >>> read_manifest(Path("checkpoint")).arrays["state/weight"].shape
        (6,)
    """

    checkpoint_id: str
    timestamp: datetime
    world_size: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)]
    topology: dict[str, Any]
    components: dict[str, ComponentManifest]
    arrays: dict[str, ArrayEntry]
    files: dict[str, tuple[Count, Digest]]
    training_args_hash: Digest | None = None
    checkpoint_path: Literal["."] = "."
    ckpt_version: str | None = None
    pytorch_version: str | None = None
    format_version: int = FORMAT_VERSION
    commit_number: Count | None = None
    run_id: str | None = None
    data: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{8,64}\Z")] | None = None
    fence: str | None = None
    removed: Annotated[list[str], msgspec.Meta(min_length=1)] = field(default_factory=list)
    history: dict[str, Count] = field(default_factory=dict)
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @gc_paused()
    def to_bytes(self) -> bytes:
        """Return the bytes of the file: one line for each key, component, array and file; the digest on the last line but one."""
        head = {
            "format_version": self.format_version,
            "ckpt_version": self.ckpt_version,
            "pytorch_version": self.pytorch_version,
            "timestamp": self.timestamp.isoformat(),
            **{key: value for key in _OPTIONAL if (value := getattr(self, key)) is not None},
            **({"removed": self.removed} if self.removed else {}),
            "checkpoint_path": self.checkpoint_path,
            "checkpoint_id": self.checkpoint_id,
            "world_size": self.world_size,
            "topology": self.topology,
            "training_args_hash": self.training_args_hash,
            **{key: value for key in _NOTES if (value := getattr(self, key))},
        }
        lines = [f"  {json.dumps(key)}: {_dump(value)},\n" for key, value in head.items()]
        # Arrays that are stored alike share one entry, and one text.
        texts = {id(entry): entry.to_text() for entry in {id(a): a for a in self.arrays.values()}.values()}
        lines += [
            f"{_table('components', ((k, _dump(c.to_json())) for k, c in self.components.items()))},\n",
            f"{_table('arrays', ((k, texts[id(a)]) for k, a in self.arrays.items()))},\n",
            f"{_table('files', ((k, _dump(list(f))) for k, f in self.files.items()))},\n",
        ]
        body = ("{\n" + "".join(lines)).encode()
        return body + closing(digest_of(body))

    def arrays_of(self, component: str) -> dict[str, ArrayEntry]:
        """Return the arrays of one component, by `<prefix><key>`."""
        start = component + "/"
        return {name[len(start) :]: entry for name, entry in self.arrays.items() if name.startswith(start)}

    def owned_by(self, rank: int) -> Owned:
        """Return what a rank's index must list. `arrays` must not change afterwards."""
        return self._writers.owned_by(rank)

    @cached_property
    def _writers(self) -> _Writers:
        return _Writers(self.arrays.values())

    @cached_property
    def plain_files(self) -> dict[int, set[str]]:
        """{rank: files of plain values that it wrote}. `components` must not change afterwards."""
        files: dict[int, set[str]] = {}
        for component in self.components.values():
            for path, rank in component.plain_paths().items():
                files.setdefault(rank, set()).add(path)
        return files

    def index_paths(self) -> dict[int, str]:
        """Return rank -> index file, for the ranks that have one, in order."""
        found = (_INDEX.fullmatch(path) for path in self.files)
        return dict(sorted((int(match["rank"]), match[0]) for match in found if match))

    def listed_indexes(self) -> list[int]:
        """Return the rank of each listed index file, repeated where a rank has several."""
        return [int(match["rank"]) for path in self.files if (match := _INDEX.fullmatch(path))]

    def index_ranks(self) -> list[int]:
        """Return the ranks that have an index, in order."""
        return list(self.index_paths())


@dataclass(slots=True)
class Owned:
    """The arrays of one rank according to the manifest.

    Attributes:
        arrays: path -> entry and number of chunks that the rank wrote.
        num_packed: number of tensors of which it packed a part.
    """

    arrays: dict[str, tuple[ArrayEntry, int]] = field(default_factory=dict)
    num_packed: int = 0


class _Writers:
    """The ranks that wrote arrays, sorted once: of thousands of ranks a reader asks for few."""

    def __init__(self, entries: Collection[ArrayEntry]) -> None:
        times = Counter(map(id, entries))
        self._entries = [*{id(entry): entry for entry in entries}.values()]
        self._num_packed: Counter[int] = Counter()
        for entry in self._entries:
            self._num_packed.update(dict.fromkeys(entry.packed_in, times[id(entry)]))
        runs = chain.from_iterable(chain.from_iterable(entry.writers for entry in self._entries))
        ranks, _, counts = np.fromiter(runs, np.int64).reshape(-1, 3).T
        numbers = np.repeat(np.arange(len(self._entries)), [len(entry.writers) for entry in self._entries])
        order = np.argsort(ranks, kind="stable")
        self._ranks, self._counts, self._numbers = ranks[order], counts[order], numbers[order]

    def owned_by(self, rank: int) -> Owned:
        runs = slice(*np.searchsorted(self._ranks, [rank, rank + 1]))
        owned = Owned(num_packed=self._num_packed[rank])
        for number, count in zip(self._numbers[runs].tolist(), self._counts[runs].tolist(), strict=True):
            entry = self._entries[number]
            path = entry.path or ""
            owned.arrays[path] = entry, count + owned.arrays.get(path, (entry, 0))[1]
        return owned


class PackedPiece(NamedTuple):
    """A small tensor, or a box of one, inside a packed array.

    Attributes:
        packed: path of the packed array, 1-D and one chunk.
        global_shape: of the tensor.
        box: in global coordinates.
        first: where its first element lies in the packed array, in elements.
    """

    packed: str
    global_shape: tuple[int, ...]
    box: Box
    first: int


def covered_by(
    chunks: Mapping[str, Mapping[int, ChunkExtent]], dead: Mapping[str, Sequence[ChunkExtent]]
) -> dict[str, list[ChunkExtent]]:
    """Return file -> the extents in it that have digests of their own; its `FileRecord` has the digest of the rest. See `Index`."""
    found: dict[str, list[ChunkExtent]] = {}
    for by_number in chunks.values():
        for extent in by_number.values():
            found.setdefault(extent.file, []).append(extent)
    for file, extents in dead.items():
        found.setdefault(file, []).extend(extents)
    return found


@dataclass(slots=True)
class Index:
    """The files, chunks and packed pieces that one rank wrote, or linked to an earlier checkpoint.

    Attributes:
        files: every file of this rank, by path below the checkpoint.
        chunks: array path -> row-major chunk number -> extent with digests.
        packed: path of each of this rank's packed arrays -> number of elements.
        pieces: array name (`<component>/<prefix><key>`) -> its pieces in those.
        dead: file -> extents in it that belong to an earlier checkpoint and to no chunk of this one, with digests, so that every byte
            of the file can be checked. Absent from the JSON where there is none. Versions of this package without this key report
            such files, and no others, as changed.
    """

    rank: int
    files: dict[str, FileRecord] = field(default_factory=dict)
    chunks: dict[str, dict[int, ChunkExtent]] = field(default_factory=dict)
    packed: dict[str, int] = field(default_factory=dict)
    pieces: dict[str, list[PackedPiece]] = field(default_factory=dict)
    dead: dict[str, list[ChunkExtent]] = field(default_factory=dict)

    def covered(self) -> dict[str, list[ChunkExtent]]:
        """See `covered_by`."""
        return covered_by(self.chunks, self.dead)

    @gc_paused()
    def to_bytes(self) -> bytes:
        file_number = {file: number for number, file in enumerate(self.files)}
        chunks = {
            path: [
                [number, file_number[e.file], e.offset, e.length, e.block_bytes, _hex(e.digests), int(e.raw)]
                for number, e in by_number.items()
            ]
            for path, by_number in self.chunks.items()
        }
        tables = [
            f'  "rank": {self.rank}',
            _table("files", ((path, _dump([record.size, record.rest])) for path, record in self.files.items())),
            _table("chunks", ((path, _dump(rows)) for path, rows in chunks.items())),
            _table("packed", ((path, str(length)) for path, length in self.packed.items())),
            _table("pieces", self._piece_rows()),
        ]
        if self.dead:
            dead = {file: [[e.offset, e.length, e.block_bytes, _hex(e.digests)] for e in extents] for file, extents in self.dead.items()}
            tables.append(_table("dead", ((file, _dump(rows)) for file, rows in dead.items())))
        return ("{\n" + ",\n".join(tables) + "\n}\n").encode()

    def _piece_rows(self) -> Iterator[tuple[str, str]]:
        """Yield each packed tensor's name and its pieces as JSON. The text of equal places is made once."""
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


def _table(key: str, rows: Iterable[tuple[str, str]]) -> str:
    """Return a top-level key of a file with a dictionary in it: one line for each (name, JSON)."""
    lines = ",\n".join([f"    {_quoted(name)}: {row}" for name, row in rows])
    return f'  "{key}": {{\n{lines}\n  }}' if lines else f'  "{key}": {{}}'


def is_fence(data: bytes) -> bool:
    """Whether an object in the place of a manifest is a mark alone, of an id whose attempt was cleaned up: there is no checkpoint."""
    return _FENCE.fullmatch(data) is not None


def fence(nonce: str) -> bytes:
    """Return such a mark."""
    return f'{{\n  "fence": "{nonce}"\n}}\n'.encode()


def closing(digest: str) -> bytes:
    """Return the last bytes of a manifest, with the digest of all bytes before them."""
    return f'  "manifest_digest": "{digest}"\n}}\n'.encode()


def _dump(value: object) -> str:
    return json.dumps(value, separators=(", ", ": "), ensure_ascii=True)


def _hex(digests: Iterable[int]) -> str:
    return "".join(f"{digest:016x}" for digest in digests)


_MOST_METADATA = 1 << 20


def storable_metrics(given: Mapping[str, float] | None) -> dict[str, float | None]:
    """Return metrics as plain numbers; None for one that is not finite, which JSON has no number for.

    Raises:
        ConfigurationError: one is no number.
    """
    found = {}
    for name, value in _mapping("metrics", given, "a dictionary: name (a string) -> number").items():
        try:
            if isinstance(value, str | bytes | bytearray):
                raise TypeError  # which float would parse
            number = float(value)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            raise unlike(f"metrics[{name!r}]", value, "a number") from None
        found[name] = number if math.isfinite(number) else None
    return found


def storable_metadata(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return metadata as plain values that JSON gives back unchanged.

    Raises:
        ConfigurationError: it does not, or they are too many.
    """
    found = _mapping("metadata", given, "a dictionary with strings as keys")
    expected = "strings, numbers, True, False, None, and lists and dictionaries of these"
    try:
        text = json.dumps(found, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"metadata cannot be stored ({error}); expected {expected}") from None
    if json.loads(text) != found:
        raise ConfigurationError(f"metadata changes when stored as JSON; expected {expected}, with strings as keys")
    if len(text) > _MOST_METADATA:
        raise ConfigurationError(
            f"metadata takes {len(text):,} bytes as JSON; expected at most {_MOST_METADATA:,}: save an object that holds more than that "
            "as a component"
        )
    return found


def _mapping(name: str, given: Any, expected: str) -> dict[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise unlike(name, given, expected)
    if (bad := next((key for key in given if not isinstance(key, str)), None)) is not None:
        raise ConfigurationError(f"{name} has the key {bad!r:.60}; expected {expected}")
    return dict(given)
