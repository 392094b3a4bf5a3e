"""Do the ranks' shards make up one state? A pure function of what all ranks hold: no files, no collectives, equal on every rank."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ckpt.box import Box, overlap, whole
from ckpt.errors import ShardingError
from ckpt.mapping import ShardedObject, ShardedTensor, is_main_replica

Sharded = ShardedTensor | ShardedObject
LocalMetadata = Sequence[Sharded]
"""What one rank holds, or asks for, without data."""
GlobalMetadata = Sequence[LocalMetadata]
"""The same of every rank, by rank."""

_Held = Sequence[tuple[int, Sharded]]
_Run = tuple[int, int, int]
"""(First element, end, rank): which of a shard's elements, counted row by row, the main replica on that rank is."""
_Cells = Mapping[Box, Sequence[_Run]]

_RANKS_NAMED = 8


def check_sharding(global_metadata: GlobalMetadata) -> None:
    """Make sure that every element and object of what the ranks hold together has one main replica, and one alone.

    All ranks must describe a key alike. Shards of a regular grid have one shape; where `axis_fragmentations` is None they may have
    any, and must fill the global shape all the same. Takes time in proportion to the number of shards.

    Raises:
        ShardingError: it names the key, the ranks, and what overlaps or is missing.
    """
    held: dict[str, list[tuple[int, Sharded]]] = {}
    for rank, local in enumerate(global_metadata):
        for one in local:
            held.setdefault(one.key, []).append((rank, one))
    for key, some in held.items():
        _check_alike(key, some)
        _check_cells(key, some[0][1], _cells(some), some)


def named_ranks(ranks: Iterable[int]) -> str:
    """Ranks as people write them.

    Example:
        >>> named_ranks([3]), named_ranks([5, 0, 1, 2])
        ('rank 3', 'ranks 0-2, 5')
    """
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    shown = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs[:_RANKS_NAMED])
    is_one = len(runs) == 1 and runs[0][0] == runs[0][1]
    return f"{'rank' if is_one else 'ranks'} {shown}{', ...' if len(runs) > _RANKS_NAMED else ''}"


def _check_alike(key: str, held: _Held) -> None:
    first_rank, first = held[0]
    form = _form(first)
    for rank, one in held:
        if _form(one) != form:
            _raise_unlike(key, first_rank, first, rank, one)
    if isinstance(first, ShardedObject):
        if any(side < 0 for side in first.global_shape):
            raise ShardingError(
                f"{key}: global_shape {first.global_shape} has a side that is not known; give all of them"
            )
        return
    counts = first.axis_fragmentations
    sides = first.box.shape
    if counts is not None and tuple(n * c for n, c in zip(sides, counts, strict=True)) != first.global_shape:
        raise ShardingError(
            f"{key}: shards of shape {list(sides)}, {list(counts)} of them along the axes, do not make up the global shape "
            f"{list(first.global_shape)}; give the axis_fragmentations of an even grid, or None for shards of any size"
        )


def _form(one: Sharded) -> tuple[object, ...]:
    """What all ranks must say alike of a key."""
    if isinstance(one, ShardedObject):
        return (one.global_shape,)
    counts = one.axis_fragmentations
    # The chunks of a regular grid are of one shape, those of any other need only be of one number of dimensions.
    chunk = len(one.local_shape) if counts is None else one.local_shape
    return one.global_shape, one.dtype, counts, chunk, one.flattened_range is None


_FORM_NAMES = ("global_shape", "dtype", "axis_fragmentations", "local_shape", "flattened_range")


def _raise_unlike(key: str, first_rank: int, first: Sharded, rank: int, one: Sharded) -> None:
    differing = [] if type(first) is not type(one) else zip(_FORM_NAMES, _form(first), _form(one), strict=True)
    name = next((name for name, a, b in differing if a != b), None)
    what, other = (f"a {type(x).__name__}" if name is None else f"{getattr(x, name)}" for x in (one, first))
    raise ShardingError(
        f"{key}: {f'{name} ' if name else ''}is {what} on rank {rank} and {other} on rank {first_rank}; the ranks must describe what "
        "they hold under one key alike"
    )


def _cells(held: _Held) -> _Cells:
    """The main replicas, by shard. Empty ones are left out, of a state that is not."""
    cells: dict[Box, list[_Run]] = {}
    for rank, one in held:
        if not is_main_replica(one.replica_id):
            continue
        if isinstance(one, ShardedObject):
            cells.setdefault(Box(one.global_offset, (1,) * len(one.global_offset)), []).append((0, 1, rank))
            continue
        run = one.flattened_range
        start, stop = (0, math.prod(one.local_shape)) if run is None else (run.start, run.stop)
        if start != stop or 0 in one.global_shape:
            cells.setdefault(one.box, []).append((start, stop, rank))
    return cells


def _check_cells(key: str, first: Sharded, cells: _Cells, held: _Held) -> None:
    """Make sure that main replicas fill each shard, and shards the whole, without overlap."""
    if 0 in first.global_shape:
        if not cells:
            raise _missing(key, first, whole(first.global_shape), held)
        return  # nothing that could be missing or there twice
    for box, runs in cells.items():
        _check_runs(key, first, box, runs)
    if (fault := _first_fault(first.global_shape, cells)) is not None:
        point, is_overlap = fault
        if is_overlap:
            raise _overlap(key, first, [box for box in cells if box.contains(point)], cells)
        raise _missing(key, first, _hole_at(point, first.global_shape, cells), held)


def _check_runs(key: str, first: Sharded, box: Box, runs: Sequence[_Run]) -> None:
    """Make sure that the main replicas of a shard are one, or flattened ranges that fill it without overlap."""
    if len(runs) > 1 and not _is_flat(first):
        ranks = [rank for _, _, rank in runs]
        twice = f"on {named_ranks(ranks)}" if len(set(ranks)) > 1 else f"all on rank {ranks[0]}"
        raise ShardingError(
            f"{key}: {_the(first, box)} has {len(runs)} main replicas, {twice}; give all but one another replica_id than 0"
        )
    done, done_rank = 0, -1
    for start, stop, rank in sorted(runs):
        if start < done:
            raise ShardingError(
                f"{key}: elements {start} to {min(stop, done)} of {_the(first, box)} are in the flattened ranges of "
                f"{named_ranks([done_rank, rank])}, main replicas both; ranges of main replicas must not overlap"
            )
        if start > done:
            raise _gap(key, first, box, done, start, runs)
        done, done_rank = stop, rank
    if done < box.num_elements:
        raise _gap(key, first, box, done, box.num_elements, runs)


def _first_fault(global_shape: tuple[int, ...], boxes: Iterable[Box]) -> tuple[Box, bool] | None:
    """Find out whether boxes fill a shape exactly; else return one element, as a box, and whether it is in several of them.

    Count at every point how many boxes it is in, less one inside of the shape: the boxes are right if that is 0 everywhere. Taking
    differences along every dimension loses nothing, and leaves of each box only its 2^n corners, with alternating signs. So the
    corners of all must cancel; and the first that does not, row by row, is the first element that is wrong, and its sum is how often
    it is there too often. No box is compared with another one.
    """
    sums: dict[int, int] = {}
    for box, sign in _signed(global_shape, boxes):
        corners = [(0, sign)]
        for offset, side, length in zip(box.offsets, box.shape, global_shape, strict=True):
            # Numbers of points of a grid that is one longer than the shape, because boxes end beside it.
            ends = [(at * (length + 1) + offset + side, -s) for at, s in corners]
            corners = [(at * (length + 1) + offset, s) for at, s in corners] + ends
        for at, s in corners:
            sums[at] = sums.get(at, 0) + s
    first = min((at for at, total in sums.items() if total), default=None)
    if first is None:
        return None
    is_overlap = sums[first] > 0
    point = []
    for length in reversed(global_shape):
        first, at = divmod(first, length + 1)
        point.append(at)
    return Box(tuple(reversed(point)), (1,) * len(point)), is_overlap


def _signed(global_shape: tuple[int, ...], boxes: Iterable[Box]) -> Iterator[tuple[Box, int]]:
    yield whole(global_shape), -1
    for box in boxes:
        yield box, 1


def _hole_at(point: Box, global_shape: tuple[int, ...], boxes: Iterable[Box]) -> Box:
    """A box that begins at an element which is in none of the boxes, and meets none of them."""
    ends = list(global_shape)
    for box in boxes:
        hole = Box(point.offsets, tuple(e - o for e, o in zip(ends, point.offsets, strict=True)))
        if overlap(box, hole) is None:
            continue
        # It begins behind the point in some dimension; cut there, where most is left.
        behind = [dim for dim, (b, p) in enumerate(zip(box.offsets, point.offsets, strict=True)) if b > p]
        dim = max(behind, key=lambda d: (box.offsets[d] - point.offsets[d]) / hole.shape[d])
        ends[dim] = box.offsets[dim]
    return Box(point.offsets, tuple(e - o for e, o in zip(ends, point.offsets, strict=True)))


def _overlap(key: str, first: Sharded, boxes: Sequence[Box], cells: _Cells) -> ShardingError:
    one, other = boxes[:2]
    common = overlap(one, other)
    assert common is not None, "both hold one point"
    held = [f"{_slices(box)} of {named_ranks(rank for _, _, rank in cells[box])}" for box in (one, other)]
    return ShardingError(
        f"{key}: {held[0]} and {held[1]}, main replicas both, overlap in {_slices(common)} of the global shape "
        f"{list(first.global_shape)}; every element must have one main replica"
    )


def _missing(key: str, first: Sharded, hole: Box, held: _Held) -> ShardingError:
    others = [
        rank for rank, one in held if not is_main_replica(one.replica_id) and overlap(_box(one), hole) is not None
    ]
    if others:
        who = f"{named_ranks(others)} {_verb(others)} it as another replica"
    else:
        who = f"{named_ranks(rank for rank, _ in held)} {_verb(rank for rank, _ in held)} other parts of it alone"
    return ShardingError(
        f"{key}: no rank has the main replica of {_the(first, hole)}; {who}. One rank must give it, with replica_id 0."
    )


def _verb(ranks: Iterable[int]) -> str:
    return "has" if len(set(ranks)) == 1 else "have"


def _gap(key: str, first: Sharded, box: Box, start: int, stop: int, runs: Sequence[_Run]) -> ShardingError:
    return ShardingError(
        f"{key}: elements {start} to {stop} of {_the(first, box)} are in no main replica's flattened range; those of "
        f"{named_ranks(rank for _, _, rank in runs)} leave them out, and together they must fill the shard"
    )


def _is_flat(one: Sharded) -> bool:
    return isinstance(one, ShardedTensor) and one.flattened_range is not None


def _box(one: Sharded) -> Box:
    return one.box if isinstance(one, ShardedTensor) else Box(one.global_offset, (1,) * len(one.global_offset))


def _the(first: Sharded, box: Box) -> str:
    if isinstance(first, ShardedTensor):
        return f"the shard {_slices(box)} of global shape {list(first.global_shape)}"
    return f"object {_slices(box)} of a grid {list(first.global_shape)}"


def _slices(box: Box) -> str:
    return "[" + ", ".join(f"{side.start}:{side.stop}" for side in box.slices) + "]"
