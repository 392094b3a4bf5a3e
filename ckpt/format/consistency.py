"""Consistency rules between the values of a manifest and of its indexes, beyond what a schema can check. Pure.

A checkpoint that breaks a rule was not written by this package, even if its digests match. Types and ranges of single values are
checked by the schemas in manifest_parsing.py.

    check_manifest          the manifest alone, when it is parsed
    check_inner_paths, check_extents, check_pieces     an index alone, when it is parsed
    check_index             an index against its manifest: every reader of an index calls it, by `stored.read_index`
    check_whole             the pieces of one packed tensor in all indexes
"""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterable, Iterator, Sequence, Set
from itertools import chain

import numpy as np

from ckpt.format.box import Box, chunk_box, num_chunks
from ckpt.format.dtypes import item_bytes
from ckpt.format.manifest import ArrayEntry, CheckpointManifest, ComponentManifest, Index, PackedPiece
from ckpt.format.places import COMPONENT_KEY, PLAIN_NAME, is_inner_path
from ckpt.format.records import ALIGNMENT, CLIPPED_STORES, stored_shape
from ckpt.format.strict_json import MAX_INT, Refused

MAX_FILE_BYTES = 1 << 30
"""Limit for files that are read whole: manifest, index, plain values, array metadata. A million tensors take 0.2 GiB."""
MAX_PIECED_BYTES = 64 << 20
"""Limit for a packed tensor in several pieces. Saves pack tensors below 64 KiB."""

_MOST_DECODED = 1 << 24
"""Bytes that a byte can decode to: in zstd 32 KiB, in a second codec around it a few hundred times as many."""
_ALWAYS_RAW = ("ocdbt", "safetensors")
_HEX = re.compile(r"[0-9a-f]*")
_YEARS = range(1970, 9999)


def check_manifest(manifest: CheckpointManifest) -> None:
    """Refuse a manifest that contradicts itself. O(arrays); arrays that share an entry are checked once.

    Raises:
        Refused
    """
    if manifest.timestamp.tzinfo is None or manifest.timestamp.year not in _YEARS:
        raise Refused(f"the timestamp {manifest.timestamp} is no time of a commit in UTC")
    check_inner_paths(_paths_in(manifest))
    indexes = _index_ranks(manifest)
    _check_files(manifest)
    _check_config(manifest)
    _check_claimed(manifest.files, set().union(*manifest.plain_files.values()))
    for key, component in manifest.components.items():
        _check_component(key, component, manifest, indexes)
    _check_removed(manifest)
    for name, entry in {id(entry): (name, entry) for name, entry in manifest.arrays.items()}.values():
        _check_array(name, entry, manifest, indexes)
    _check_names(manifest)


def check_inner_paths(paths: Iterable[str]) -> None:
    """Refuse paths that lead out of the checkpoint.

    Raises:
        Refused
    """
    for path in paths:
        if not is_inner_path(path):
            raise Refused(f"it names {path!r:.200}, which is not a path inside of the checkpoint")


def _paths_in(manifest: CheckpointManifest) -> Iterator[str]:
    yield from manifest.files
    yield from (entry.path for entry in {id(a): a for a in manifest.arrays.values()}.values() if entry.path is not None)
    for key, component in manifest.components.items():
        yield from (key, component.key)
        yield from component.plain_paths()


def _check_claimed(files: Iterable[str], written: Container[str]) -> None:
    """Refuse plain values that no component has: a load would leave them out."""
    for path in files:
        if path.endswith(f"/{PLAIN_NAME}") and path not in written:
            raise Refused(f"it lists {path!r:.80}, and no component is said to have these plain values")


def _index_ranks(manifest: CheckpointManifest) -> Set[int]:
    """Return the ranks that have an index; refuse two indexes of a rank, and ranks outside of the world."""
    ranks = manifest.listed_indexes()
    if len(ranks) != len(set(ranks)):
        raise Refused("it lists two indexes of one rank")
    _require_ranks(ranks, manifest.world_size, "there is an index")
    groups = [("nodes", manifest.topology.get("nodes", [])), *manifest.topology.get("groups", {}).items()]
    for name, instances in groups:
        members = [rank for ranks in instances for rank in ranks]
        _require_ranks(members, manifest.world_size, f"topology has {name!r:.80}")
        if len(members) != len(set(members)):
            raise Refused(f"a rank is in two of {name!r:.80}")
    return set(ranks)


def _check_files(manifest: CheckpointManifest) -> None:
    """Refuse listed files above `MAX_FILE_BYTES`: they are read whole."""
    for path, (size, _) in manifest.files.items():
        if size > MAX_FILE_BYTES:
            raise Refused(
                f"{path!r:.80} would have {size} bytes; of a file that is read whole {MAX_FILE_BYTES} are the most"
            )


def _check_config(manifest: CheckpointManifest) -> None:
    """The hash of the training arguments is the listed digest of config.yaml."""
    _, digest = manifest.files.get("config.yaml", (0, None))
    if digest != manifest.training_args_hash:
        raise Refused("its training_args_hash is not the digest that it lists for config.yaml")


def _check_component(key: str, component: ComponentManifest, manifest: CheckpointManifest, indexes: Set[int]) -> None:
    """The component's ranks, nodes and groups exist, and its plain values lie in a listed file."""
    if component.key != key or not COMPONENT_KEY.fullmatch(key):
        raise Refused(
            f"component {key!r:.80} calls itself {component.key!r:.80}; a key has letters, digits, '_' and '-' only"
        )
    ranks = (*component.ranks, *(component.replicated_across or ()), *component.plain_in.values())
    _require_ranks(ranks, manifest.world_size, f"component {key!r:.80} is")
    if component.sharing_pattern == "per_node" and not manifest.topology.get("nodes"):
        raise Refused(f"component {key!r:.80} is per_node, and topology has no nodes")
    if component.sharing_pattern == "per_group" and component.group_name not in manifest.topology.get("groups", {}):
        raise Refused(
            f"component {key!r:.80} is per_group of {component.group_name!r:.80}, which topology does not have"
        )
    for prefix, rank in component.plain_in.items():
        if f"{key}/{prefix}plain.json" not in manifest.files and rank not in indexes:
            raise Refused(
                f"the plain values {prefix!r:.80} of component {key!r:.80} are rank {rank}'s, which has no index"
            )


def _check_removed(manifest: CheckpointManifest) -> None:
    """What was taken out are keys of components, and none of them is there."""
    for key in manifest.removed:
        if not COMPONENT_KEY.fullmatch(key) or key in manifest.components or manifest.removed.count(key) > 1:
            raise Refused(f"component {key!r:.80} is said to be removed, and is there, listed twice, or no key of a component")


def _check_array(name: str, entry: ArrayEntry, manifest: CheckpointManifest, indexes: Set[int]) -> None:
    """The array is of one kind, its size fits 64 bits, and each chunk has one writer."""
    kind = entry.alias_of is not None, bool(entry.store), entry.path is not None, entry.grid is not None
    if kind not in ((True, False, False, False), (False, True, False, False), (False, True, True, True)):
        raise Refused(f"{name!r:.80} must be an array of its own, packed, or an alias, and is several of these or none")
    if (entry.writers and entry.grid is None) or (entry.packed_in and (kind[0] or kind[2])):
        raise Refused(f"{name!r:.80} has writers or packed elements that an array of its kind has not")
    if entry.num_bytes > MAX_INT:
        raise Refused(f"{name!r:.80} of shape {list(entry.shape)} would have {entry.num_bytes} bytes")
    if entry.alias_of is not None:
        _check_alias(name, entry, manifest.arrays.get(entry.alias_of))
    if entry.path is not None and entry.path.partition("/")[0] != name.partition("/")[0]:
        raise Refused(f"{name!r:.80} lies in {entry.path!r:.80}, outside of the folder of its component")
    if entry.grid is not None:
        _check_writers(name, entry, entry.grid)
    ranks = {*entry.packed_in, *(run[0] for run in entry.writers)}
    if len(set(entry.packed_in)) != len(entry.packed_in):
        raise Refused(f"{name!r:.80} is packed twice in one index")
    if not ranks <= indexes:
        raise Refused(f"{name!r:.80} was written by rank {min(ranks - indexes)}, which has no index")


def _check_alias(name: str, entry: ArrayEntry, first: ArrayEntry | None) -> None:
    """An alias names a stored tensor of equal data type and shape."""
    if first is None or first.alias_of is not None:
        raise Refused(f"{name!r:.80} is an alias of {entry.alias_of!r:.80}, under which nothing is stored")
    if (first.dtype, first.shape) != (entry.dtype, entry.shape):
        raise Refused(f"{name!r:.80} is an alias of {entry.alias_of!r:.80}, which has another data type or shape")


def _check_writers(name: str, entry: ArrayEntry, grid: tuple[int, ...]) -> None:
    """The runs of writers follow one another from chunk 0 to the last chunk of the grid."""
    if len(grid) != len(entry.shape) or math.prod(grid) * item_bytes(entry.dtype) > MAX_INT:
        raise Refused(f"{name!r:.80} of shape {list(entry.shape)} cannot be cut by a grid of {list(grid)}")
    at = 0
    for _, first, count in entry.writers:
        if first != at:
            raise Refused(f"{name!r:.80}: a run of chunks begins at {first}, where {at} comes next")
        at += count
    total = math.prod(num_chunks(entry.shape, grid))
    if at != total:
        raise Refused(f"{name!r:.80} has {total} chunks, and writers of {at}")


def _check_names(manifest: CheckpointManifest) -> None:
    """No two arrays have one path, and each belongs to a component."""
    paths = [entry.path for entry in manifest.arrays.values() if entry.path is not None]
    if len(paths) != len(set(paths)):
        raise Refused("two of its arrays have one path")
    for key in sorted({name.partition("/")[0] for name in manifest.arrays}):
        if key not in manifest.components:
            raise Refused(f"it has arrays of {key!r:.80}, which is none of its components")


def _require_ranks(ranks: Iterable[int], world_size: int, what: str) -> None:
    beyond = max(ranks, default=0)
    if beyond >= world_size:
        raise Refused(f"{what} of rank {beyond}, and world_size is {world_size}")


def hex_digits(digests: Sequence[str], length: int | None = None) -> None:
    """Refuse strings other than lower-case hex of this length, or of a whole number of xxh3-64.

    Raises:
        Refused
    """
    if _HEX.fullmatch("".join(digests)) is None or not all(
        len(digest) == length if length is not None else len(digest) % 16 == 0 for digest in digests
    ):
        raise Refused("a digest is no lower-case hex of its length")


def check_extents(index: Index) -> None:
    """Every extent lies inside its file, has a digest for each block, and shares no byte with another, dead ones included.

    Files without an extent are descriptions and plain values, which are read whole.

    Raises:
        Refused
    """
    ends: dict[str, int] = {}
    mixed = set()
    of_chunks = (by_number.values() for by_number in index.chunks.values())
    extents = [*chain.from_iterable(of_chunks), *chain.from_iterable(index.dead.values())]
    for extent in extents:
        file, offset, length = extent.file, extent.offset, extent.length
        if len(extent.digests) != -(-length // extent.block_bytes):
            raise Refused(
                f"{len(extent.digests)} digests are given for {length} bytes of {file!r:.80} in blocks of {extent.block_bytes}"
            )
        if extent.raw and extent.block_bytes % ALIGNMENT:
            raise Refused(f"blocks of {extent.block_bytes} bytes would split elements of {file!r:.80}")
        record = index.files.get(file)
        if record is None or offset + length > record.size:
            size = "not listed" if record is None else f"{record.size} bytes long"
            raise Refused(f"bytes {offset} to {offset + length} are said to lie in {file!r:.80}, which is {size}")
        if offset < ends.get(file, 0):
            mixed.add(file)
        ends[file] = offset + length
    for file in sorted(mixed):
        within = [(chunk.offset, chunk.offset + chunk.length) for chunk in extents if chunk.file == file]
        require_apart(within, f"bytes of {file!r:.80}")
    for file, record in index.files.items():
        if record.size > MAX_FILE_BYTES and file not in ends:
            raise Refused(f"{file!r:.80} would have {record.size} bytes, and no array lies in it")


def checked_place(shape: tuple[int, ...], offsets: tuple[int, ...], sides: tuple[int, ...]) -> Box:
    """Return the box of a piece, after a check that it lies inside its tensor.

    Raises:
        Refused
    """
    if not len(shape) == len(offsets) == len(sides) or any(
        o + n > m for o, n, m in zip(offsets, sides, shape, strict=True)
    ):
        raise Refused(
            f"a piece of shape {list(sides)} at {list(offsets)} is no part of a tensor of shape {list(shape)}"
        )
    return Box(offsets, sides)


def check_pieces(index: Index) -> None:
    """Every piece lies inside its packed array and shares no element of it with another.

    Raises:
        Refused
    """
    ends: dict[str, int] = {}
    mixed = set()
    for name, pieces in index.pieces.items():
        for packed, _, box, first in pieces:
            end = first + math.prod(box.shape)
            if end > index.packed[packed]:
                raise Refused(f"{name!r:.80} ends at element {end} of {packed!r:.80}, which has {index.packed[packed]}")
            if first < ends.get(packed, 0):
                mixed.add(packed)
            ends[packed] = end
    for path in sorted(mixed):
        within = [
            (piece.first, piece.first + piece.box.num_elements)
            for pieces in index.pieces.values()
            for piece in pieces
            if piece.packed == path
        ]
        require_apart(within, f"elements of {path!r:.80}")


def require_apart(ranges: Iterable[tuple[int, int]], what: str) -> None:
    """Refuse ranges [begin, end) that overlap.

    Raises:
        Refused
    """
    at = 0
    for begin, end in sorted(pair for pair in ranges if pair[0] < pair[1]):
        if begin < at:
            raise Refused(f"{what} are used twice, from {begin} to {min(at, end)}")
        at = end


def check_index(index: Index, manifest: CheckpointManifest, rank: int) -> None:
    """Refuse an index that differs from its manifest in what its rank wrote.

    Raises:
        Refused
    """
    if index.rank != rank:
        raise Refused(f"it is the index of rank {index.rank}, not of rank {rank}")
    _check_chunks(index, manifest)
    _check_packed(index, manifest)
    written = manifest.plain_files.get(rank, set())
    for path in written - index.files.keys() - manifest.files.keys():
        raise Refused(f"it does not list {path!r:.80}, which rank {rank} wrote")
    if manifest.components:  # of a step that is held in memory, ranks know the arrays alone
        _check_claimed(index.files, written)


def _check_chunks(index: Index, manifest: CheckpointManifest) -> None:
    """The index lists the chunks that the rank wrote, each with the length of its elements."""
    owned = manifest.owned_by(index.rank).arrays
    for path, (entry, count) in owned.items():
        known = index.chunks.get(path, {})
        if len(known) != count:
            raise Refused(f"it lists {len(known)} chunks of {path!r:.80}, of which rank {index.rank} wrote {count}")
        last = entry.writers[-1][1] + entry.writers[-1][2]
        for number, extent in known.items():
            if number >= last or entry.writer_of(number) != index.rank:
                raise Refused(f"it lists chunk {number} of {path!r:.80}, which rank {index.rank} did not write")
            if not extent.raw and entry.store in _ALWAYS_RAW:
                raise Refused(f"chunk {number} of {path!r:.80} is said to be encoded, which none is in {entry.store}")
            if not extent.raw and entry.chunk_bytes > extent.length * _MOST_DECODED:
                raise Refused(
                    f"no {extent.length} bytes decode to the {entry.chunk_bytes} of chunk {number} of {path!r:.80}"
                )
            if extent.raw and extent.length != _raw_bytes(entry, number):
                raise Refused(
                    f"chunk {number} of {path!r:.80} would have {extent.length} bytes, and its elements have {_raw_bytes(entry, number)}"
                )
    for path in index.chunks:
        if path not in owned and path not in index.packed:
            raise Refused(f"it lists chunks of {path!r:.80}, of which rank {index.rank} wrote none")


def _raw_bytes(entry: ArrayEntry, number: int) -> int:
    """Return the bytes of a raw chunk."""
    assert entry.grid is not None and entry.store is not None
    clipped = entry.grid
    if entry.store in CLIPPED_STORES and entry.grid != entry.shape:
        clipped = chunk_box(entry.shape, entry.grid, number).shape
    return math.prod(stored_shape(entry.store, entry.grid, clipped)) * item_bytes(entry.dtype)


def _check_packed(index: Index, manifest: CheckpointManifest) -> None:
    """Each packed array is one chunk of one data type, and holds the tensors that the rank packed, completely."""
    owned = manifest.owned_by(index.rank)
    if len(index.pieces) != owned.num_packed:
        names = [name for name, entry in manifest.arrays.items() if index.rank in entry.packed_in]
        differing = sorted({*names} ^ {*index.pieces})
        raise Refused(f"it lacks packed elements, or has some that it should not have, of {differing[0]!r:.80}")
    form_of: dict[str, tuple[str, str | None]] = {}
    sound: set[tuple[int, int, str]] = set()  # entries and boxes are shared by tensors that are stored alike
    for name, pieces in index.pieces.items():
        entry = manifest.arrays.get(name)
        alike = (id(entry), id(pieces[0].box), pieces[0].packed) if len(pieces) == 1 else None
        if alike in sound:
            continue
        if entry is None or index.rank not in entry.packed_in:
            raise Refused(f"it lists packed elements of {name!r:.80}, of which rank {index.rank} packed none")
        for packed, shape, _, _ in pieces:
            form = entry.dtype, entry.store
            if shape != entry.shape or form_of.setdefault(packed, form) != form:
                raise Refused(f"{name!r:.80} is packed with another shape, data type or store than it has")
        if len(entry.packed_in) == 1:
            check_whole(name, entry, pieces)
        if alike is not None:
            sound.add(alike)
    for path, length in index.packed.items():
        # the manifest that a rank keeps in memory (saving/host_cache.py) has arrays and files, but no components
        if manifest.components and path.partition("/")[0] not in manifest.components:
            raise Refused(f"the packed array {path!r:.80} lies in the folder of none of the components")
        _check_packed_array(path, length, index, *form_of.get(path, (None, None)))
        if path in owned.arrays:
            raise Refused(f"{path!r:.80} is a packed array and one of its own")


def _check_packed_array(path: str, length: int, index: Index, dtype: str | None, store: str | None) -> None:
    by_number = index.chunks.get(path, {})
    if list(by_number) != ([0] if length else []):
        raise Refused(f"the packed array {path!r:.80} of {length} elements is not one chunk")
    chunk = by_number.get(0)
    if chunk is not None and not chunk.raw and store in _ALWAYS_RAW:
        raise Refused(f"the packed array {path!r:.80} is said to be encoded, which none is in {store}")
    if chunk is not None and chunk.raw and dtype is not None and chunk.length != length * item_bytes(dtype):
        raise Refused(f"the packed array {path!r:.80} would have {chunk.length} bytes, and holds {length} of {dtype}")


def check_whole(name: str, entry: ArrayEntry, pieces: Sequence[PackedPiece]) -> None:
    """Refuse a packed tensor whose pieces, in all indexes together, leave elements out or repeat them.

    Raises:
        Refused
    """
    shape = entry.shape
    if len(pieces) == 1 and pieces[0].box.shape == shape:
        return
    found, wanted = sum(math.prod(piece.box.shape) for piece in pieces), math.prod(shape)
    if found != wanted:
        raise Refused(f"the indexes of ranks {list(entry.packed_in)} list {found} of {wanted} elements of {name!r:.80}")
    if _are_rows(shape, pieces):
        return
    if entry.num_bytes > MAX_PIECED_BYTES:
        raise Refused(f"{name!r:.80} is packed in pieces, and too long for that")
    seen = np.zeros(shape, bool)
    for piece in pieces:
        if seen[piece.box.slices].any():
            raise Refused(f"two pieces of {name!r:.80} have elements in common")
        seen[piece.box.slices] = True


def _are_rows(shape: tuple[int, ...], pieces: Sequence[PackedPiece]) -> bool:
    """Whether the pieces, sorted, are consecutive runs of whole rows. Most are."""
    at = 0
    for box in sorted(piece.box for piece in pieces):
        if box.shape[1:] != shape[1:] or box.offsets[:1] != (at,):
            return False
        at += box.shape[0]
    return True
