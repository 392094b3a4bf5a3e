"""Check that the ranks' shards form one state. Pure: a function of all ranks' metadata, with one result on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from ckpt.dist_checkpointing.global_metadata import Column, GlobalMetadata, LocalMetadata, ShardLayout
from ckpt.dist_checkpointing.mapping import is_main_replica
from ckpt.errors import ShardingError
from ckpt.format.box import Box, overlap, whole

_RANKS_NAMED = 8


class _Run(NamedTuple):
    """Range of a shard's elements, row-major, that the main replica on `rank` holds."""

    start: int
    stop: int
    rank: int


_Shards = Mapping[Box, Sequence[_Run]]
"""Main replicas of one key, by shard."""


def check_sharding(global_metadata: GlobalMetadata | Sequence[LocalMetadata]) -> None:
    """Check that every element and object has exactly one main replica.

    All ranks must describe a key alike. Shards of a regular grid have one shape; where `axis_fragmentations` is None they may have
    any shapes that fill the global shape. The time grows with the number of distinct shards, not with the ranks that hold copies.

    Raises:
        ShardingError: shards overlap or are missing, or ranks describe a key differently; names the key and the ranks.
    """
    all_ranks = GlobalMetadata.of(global_metadata)
    layouts = _layouts(all_ranks)
    shards = _main_shards(all_ranks)
    for key, layout in layouts.items():
        _check_key(key, layout, shards.get(key, {}), all_ranks)


def named_ranks(ranks: Iterable[int]) -> str:
    """Format ranks as ranges.

    Example:
        >>> named_ranks([3]), named_ranks([5, 0, 1, 2])
        ('rank 3', 'ranks 0-2, 5')
    """
    distinct = sorted(set(ranks))
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(distinct), lambda at: at[1] - at[0])]
    shown = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs[:_RANKS_NAMED])
    return f"{'rank' if len(distinct) == 1 else 'ranks'} {shown}{', ...' if len(runs) > _RANKS_NAMED else ''}"


def _layouts(all_ranks: GlobalMetadata) -> dict[str, ShardLayout]:
    """Return the layout of every key. All ranks must agree on it."""
    first_layouts: dict[str, tuple[ShardLayout, int]] = {}
    seen: set[tuple[int, int]] = set()
    for rank, (keys, layouts, _, _) in enumerate(all_ranks.columns):
        if (id(keys), id(layouts)) in seen:
            continue
        seen.add((id(keys), id(layouts)))
        for key, layout in zip(all_ranks.rows(keys), all_ranks.rows(layouts), strict=True):
            first, first_rank = first_layouts.setdefault(key, (layout, rank))
            if layout is not first and _common_part(layout) != _common_part(first):
                raise _mismatch_error(key, first, first_rank, layout, rank)
    return {key: layout for key, (layout, _) in first_layouts.items()}


def _common_part(layout: ShardLayout) -> dict[str, object]:
    """Attributes of a key that must be equal on all ranks."""
    values = {name: getattr(layout, name) for name in ("global_shape", "dtype", "axis_fragmentations", "is_flat")}
    # Chunks of a regular grid have one shape; those of any other grid need only have one number of dimensions.
    is_regular = layout.axis_fragmentations is not None
    return values | {"local_shape": layout.local_shape if is_regular else len(layout.local_shape)}


def _mismatch_error(key: str, first: ShardLayout, first_rank: int, layout: ShardLayout, rank: int) -> ShardingError:
    if bool(first.dtype) != bool(layout.dtype):
        what = [f"is a {'ShardedTensor' if side.dtype else 'ShardedObject'}" for side in (layout, first)]
    elif first.is_flat != layout.is_flat:
        what = [f"has {'a' if side.is_flat else 'no'} flattened_range" for side in (layout, first)]
    else:
        name = next(name for name, value in _common_part(layout).items() if value != _common_part(first)[name])
        what = [f"has {name} {_shown(getattr(side, name))}" for side in (layout, first)]
    return ShardingError(
        f"{key} {what[0]} on rank {rank}, and {what[1]} on rank {first_rank}; all ranks must describe a key alike"
    )


def _main_shards(all_ranks: GlobalMetadata) -> dict[str, dict[Box, list[_Run]]]:
    """Main replicas of every key. Empty ones of a tensor with elements are left out."""
    main_rows: dict[int, list[int]] = {}
    shards: dict[str, dict[Box, list[_Run]]] = {}
    for rank, columns in enumerate(all_ranks.columns):
        if id(columns.replica_ids) not in main_rows:
            main_rows[id(columns.replica_ids)] = _main_rows(columns.replica_ids)
        rows = main_rows[id(columns.replica_ids)]
        keys, layouts, positions = (all_ranks.rows(column) for column in columns[:3])
        for row in rows:
            layout, at = layouts[row], positions[row]
            if at.start != at.stop or 0 in layout.global_shape:
                runs = shards.setdefault(keys[row], {}).setdefault(Box(at.offset, layout.sides), [])
                runs.append(_Run(at.start, at.stop, rank))
    return shards


def _main_rows(replica_ids: Column) -> list[int]:
    values, rows = replica_ids
    is_main = [is_main_replica(value) for value in values]
    return [row for row, number in enumerate(rows) if is_main[number]]


def _check_key(key: str, layout: ShardLayout, shards: _Shards, all_ranks: GlobalMetadata) -> None:
    """Check that main replicas fill each shard, and the shards the global shape, without overlap."""
    _check_layout(key, layout)
    if 0 in layout.global_shape:
        if not shards:
            raise _gap_error(key, layout, whole(layout.global_shape), all_ranks)
        return  # no elements
    for box, runs in shards.items():
        _check_runs(key, layout, box, runs)
    fault = _first_fault(layout.global_shape, shards)
    if fault is not None:
        point, is_overlap = fault
        if is_overlap:
            raise _overlap_error(key, layout, [box for box in shards if box.contains(point)], shards)
        raise _gap_error(key, layout, _hole_at(point, layout.global_shape, shards), all_ranks)


def _check_layout(key: str, layout: ShardLayout) -> None:
    if any(side < 0 for side in layout.global_shape):
        raise ShardingError(f"{key}: global_shape {_shown(layout.global_shape)} has an unknown side; give all of them")
    counts = layout.axis_fragmentations
    if counts is not None and tuple(n * c for n, c in zip(layout.sides, counts, strict=True)) != layout.global_shape:
        raise ShardingError(
            f"{key}: {_shown(counts)} shards of shape {_shown(layout.sides)} along the axes do not make up the global shape "
            f"{_shown(layout.global_shape)}; give the axis_fragmentations of an even grid, or None for shards of any size"
        )


def _check_runs(key: str, layout: ShardLayout, box: Box, runs: Sequence[_Run]) -> None:
    """Check that a shard has one main replica, or several whose flattened ranges fill it without overlap."""
    if len(runs) > 1 and not layout.is_flat:
        ranks = [run.rank for run in runs]
        where = f"on {named_ranks(ranks)}" if len(set(ranks)) > 1 else f"all of them on rank {ranks[0]}"
        raise ShardingError(
            f"{key}: {_described(layout, box)} has {len(runs)} main replicas, {where}; give all but one another replica_id than 0"
        )
    before = _Run(0, 0, -1)
    for run in [*sorted(runs), _Run(box.num_elements, box.num_elements, -1)]:
        if run.start > before.stop:
            raise ShardingError(
                f"{key}: elements {before.stop} to {run.start} of {_described(layout, box)} are in no main replica's flattened range; "
                f"the others are on {named_ranks(run.rank for run in runs)}, and together they must fill it"
            )
        if run.start < before.stop:
            raise ShardingError(
                f"{key}: elements {run.start} to {min(run.stop, before.stop)} of {_described(layout, box)} are in the flattened ranges of "
                f"two main replicas, on {named_ranks([before.rank, run.rank])}; such ranges must not overlap"
            )
        before = run


def _first_fault(global_shape: tuple[int, ...], boxes: Iterable[Box]) -> tuple[Box, bool] | None:
    """Return None if boxes fill a shape exactly; else one wrong element, as a box, and whether several boxes contain it.

    Let c be the number of boxes that contain an element, minus 1: it must be 0 everywhere. Differences of c along each dimension
    lose no information, and reduce a box to its 2^n corners, with alternating signs. So the corners of all boxes must cancel, and no
    two boxes are compared. The first corner that does not cancel, row by row, is the first wrong element, and its sum is c there.
    """
    sums: dict[int, int] = {}
    for box, sign in [(whole(global_shape), -1), *((box, 1) for box in boxes)]:
        corners = [(0, sign)]
        for offset, side, length in zip(box.offsets, box.shape, global_shape, strict=True):
            # A corner is numbered in a grid one longer than the shape: a box ends behind its last element.
            begins = [(number * (length + 1) + offset, s) for number, s in corners]
            corners = begins + [(number + side, -s) for number, s in begins]
        for number, s in corners:
            sums[number] = sums.get(number, 0) + s
    first = min((number for number, total in sums.items() if total), default=None)
    if first is None:
        return None
    point, number = [], first
    for length in reversed(global_shape):
        number, at = divmod(number, length + 1)
        point.append(at)
    return Box(tuple(reversed(point)), (1,) * len(point)), sums[first] > 0


def _hole_at(point: Box, global_shape: tuple[int, ...], boxes: Iterable[Box]) -> Box:
    """Return a box that starts at an element outside of all boxes and overlaps none of them."""
    ends = list(global_shape)
    for box in boxes:
        hole = _between(point.offsets, ends)
        if overlap(box, hole) is None:
            continue
        # Along some dimension the box starts behind the element: end the hole there.
        dim = next(dim for dim, (b, p) in enumerate(zip(box.offsets, point.offsets, strict=True)) if b > p)
        ends[dim] = box.offsets[dim]
    return _between(point.offsets, ends)


def _between(starts: Sequence[int], ends: Sequence[int]) -> Box:
    return Box(tuple(starts), tuple(end - start for start, end in zip(starts, ends, strict=True)))


def _overlap_error(key: str, layout: ShardLayout, boxes: Sequence[Box], shards: _Shards) -> ShardingError:
    one, other = boxes[:2]
    common = overlap(one, other)
    assert common is not None, "an element is in both"
    held = [f"{_slices(box)} of {named_ranks(run.rank for run in shards[box])}" for box in (one, other)]
    return ShardingError(
        f"{key}: the shards {held[0]} and {held[1]}, main replicas both, overlap in {_slices(common)} of the global shape "
        f"{_shown(layout.global_shape)}; every element must have one main replica"
    )


def _gap_error(key: str, layout: ShardLayout, hole: Box, all_ranks: GlobalMetadata) -> ShardingError:
    holders: list[int] = []
    others: list[int] = []
    for rank, columns in enumerate(all_ranks.columns):
        rows = [row for row, other in enumerate(all_ranks.rows(columns.keys)) if other == key]
        holders += [rank] * bool(rows)
        layouts, positions = all_ranks.rows(columns.layouts), all_ranks.rows(columns.positions)
        held = [(layouts[row], positions[row]) for row in rows]
        boxes = [Box(at.offset, layout.sides) for layout, at in held if at.start != at.stop]
        others += [rank] * any(overlap(box, hole) is not None for box in boxes)
    rest = f"the rest of {key} is on {named_ranks(holders)}"
    who = f"it is on {named_ranks(others)} under other replica ids" if others else rest
    return ShardingError(
        f"{key}: no rank has the main replica of {_described(layout, hole)}; {who}. One rank must give it, with replica_id 0."
    )


def _described(layout: ShardLayout, box: Box) -> str:
    what = "the shard" if layout.dtype else "the object"
    return f"{what} {_slices(box)} of the global shape {_shown(layout.global_shape)}"


def _slices(box: Box) -> str:
    return "[" + ", ".join(f"{side.start}:{side.stop}" for side in box.slices) + "]"


def _shown(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value
