"""Do the ranks' shards make up one state? A pure function of what all ranks hold: no files, no collectives, equal on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ckpt.dist_checkpointing.global_metadata import Column, Form, GlobalMetadata, LocalMetadata
from ckpt.dist_checkpointing.mapping import is_main_replica
from ckpt.errors import ShardingError
from ckpt.format.box import Box, overlap, whole

_RANKS_NAMED = 8


class _Run(NamedTuple):
    """Which elements of a shard, counted row by row, the main replica on a rank is."""

    start: int
    stop: int
    rank: int


_Shards = Mapping[Box, Sequence[_Run]]
"""The main replicas of one key, by shard."""


def check_sharding(global_metadata: GlobalMetadata | Sequence[LocalMetadata]) -> None:
    """Make sure that every element and object of what the ranks hold together has one main replica, and one alone.

    All ranks must describe a key alike. Shards of a regular grid have one shape; where `axis_fragmentations` is None they may have
    any, and must fill the global shape all the same. The time grows with the number of distinct shards, not with the ranks that hold
    equal copies.

    Raises:
        ShardingError: it names the key, the ranks, and what overlaps or is missing.
    """
    everybodys = GlobalMetadata.of(global_metadata)
    forms = _forms(everybodys)
    shards = _main_shards(everybodys)
    for key, form in forms.items():
        _check_key(key, form, shards.get(key, {}), everybodys)


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


def _forms(everybodys: GlobalMetadata) -> dict[str, Form]:
    """The form of every key, which all ranks must say alike."""
    first_said: dict[str, tuple[Form, int]] = {}
    seen: set[tuple[int, int]] = set()
    for rank, (keys, forms, _, _) in enumerate(everybodys.columns):
        if (id(keys), id(forms)) in seen:
            continue
        seen.add((id(keys), id(forms)))
        for key, form in zip(everybodys.rows(keys), everybodys.rows(forms), strict=True):
            first, first_rank = first_said.setdefault(key, (form, rank))
            if form is not first and _alike(form) != _alike(first):
                raise _unlike(key, first, first_rank, form, rank)
    return {key: form for key, (form, _) in first_said.items()}


def _alike(form: Form) -> dict[str, object]:
    """What all ranks must say alike of a key."""
    said = {name: getattr(form, name) for name in ("global_shape", "dtype", "axis_fragmentations", "is_flat")}
    # The chunks of a regular grid are of one shape, those of any other need only be of one number of dimensions.
    return said | {"local_shape": form.local_shape if form.axis_fragmentations is not None else len(form.local_shape)}


def _unlike(key: str, first: Form, first_rank: int, form: Form, rank: int) -> ShardingError:
    if bool(first.dtype) != bool(form.dtype):
        what = [f"is a {'ShardedTensor' if one.dtype else 'ShardedObject'}" for one in (form, first)]
    elif first.is_flat != form.is_flat:
        what = [f"has {'a' if one.is_flat else 'no'} flattened_range" for one in (form, first)]
    else:
        name = next(name for name, said in _alike(form).items() if said != _alike(first)[name])
        what = [f"has {name} {_shown(getattr(one, name))}" for one in (form, first)]
    return ShardingError(
        f"{key} {what[0]} on rank {rank}, and {what[1]} on rank {first_rank}; the ranks must describe what they hold under one key "
        "alike"
    )


def _main_shards(everybodys: GlobalMetadata) -> dict[str, dict[Box, list[_Run]]]:
    """The main replicas of every key. Of a tensor with elements, the empty ones are left out."""
    main_rows: dict[int, list[int]] = {}
    shards: dict[str, dict[Box, list[_Run]]] = {}
    for rank, columns in enumerate(everybodys.columns):
        if id(columns.replica_ids) not in main_rows:
            main_rows[id(columns.replica_ids)] = _main_rows(columns.replica_ids)
        rows = main_rows[id(columns.replica_ids)]
        keys, forms, places = (everybodys.rows(column) for column in columns[:3])
        for row in rows:
            form, place = forms[row], places[row]
            if place.start != place.stop or 0 in form.global_shape:
                runs = shards.setdefault(keys[row], {}).setdefault(Box(place.offset, form.sides), [])
                runs.append(_Run(place.start, place.stop, rank))
    return shards


def _main_rows(replica_ids: Column) -> list[int]:
    values, rows = replica_ids
    is_main = [is_main_replica(value) for value in values]
    return [row for row, number in enumerate(rows) if is_main[number]]


def _check_key(key: str, form: Form, shards: _Shards, everybodys: GlobalMetadata) -> None:
    """Make sure that main replicas fill each shard, and the shards the whole, without overlap."""
    _check_form(key, form)
    if 0 in form.global_shape:
        if not shards:
            raise _missing(key, form, whole(form.global_shape), everybodys)
        return  # there is nothing that could be missing or there twice
    for box, runs in shards.items():
        _check_runs(key, form, box, runs)
    fault = _first_fault(form.global_shape, shards)
    if fault is not None:
        point, is_overlap = fault
        if is_overlap:
            raise _overlapping(key, form, [box for box in shards if box.contains(point)], shards)
        raise _missing(key, form, _hole_at(point, form.global_shape, shards), everybodys)


def _check_form(key: str, form: Form) -> None:
    if any(side < 0 for side in form.global_shape):
        raise ShardingError(
            f"{key}: global_shape {_shown(form.global_shape)} has a side that is not known; give all of them"
        )
    counts = form.axis_fragmentations
    if counts is not None and tuple(n * c for n, c in zip(form.sides, counts, strict=True)) != form.global_shape:
        raise ShardingError(
            f"{key}: {_shown(counts)} shards of shape {_shown(form.sides)} along the axes do not make up the global shape "
            f"{_shown(form.global_shape)}; give the axis_fragmentations of an even grid, or None for shards of any size"
        )


def _check_runs(key: str, form: Form, box: Box, runs: Sequence[_Run]) -> None:
    """Make sure that a shard has one main replica, or ones whose flattened ranges fill it without overlap."""
    if len(runs) > 1 and not form.is_flat:
        ranks = [run.rank for run in runs]
        where = f"on {named_ranks(ranks)}" if len(set(ranks)) > 1 else f"all of them on rank {ranks[0]}"
        raise ShardingError(
            f"{key}: {_the(form, box)} has {len(runs)} main replicas, {where}; give all but one another replica_id than 0"
        )
    before = _Run(0, 0, -1)
    for run in [*sorted(runs), _Run(box.num_elements, box.num_elements, -1)]:
        if run.start > before.stop:
            raise ShardingError(
                f"{key}: elements {before.stop} to {run.start} of {_the(form, box)} are in no main replica's flattened range; "
                f"{named_ranks(run.rank for run in runs)} {_have(run.rank for run in runs)} the others, and together they must fill it"
            )
        if run.start < before.stop:
            raise ShardingError(
                f"{key}: elements {run.start} to {min(run.stop, before.stop)} of {_the(form, box)} are in the flattened ranges of "
                f"two main replicas, on {named_ranks([before.rank, run.rank])}; such ranges must not overlap"
            )
        before = run


def _first_fault(global_shape: tuple[int, ...], boxes: Iterable[Box]) -> tuple[Box, bool] | None:
    """Find out whether boxes fill a shape exactly; if not, return one element, as a box, and whether it is in several of them.

    Count for every element how many boxes it is in, less the one that it should be in: all is well if that is 0 everywhere. Taking
    differences along each dimension loses nothing of it, and leaves of a box only its 2^n corners, with alternating signs. So the
    corners of all must cancel, and no two boxes need be compared. The first that does not cancel, row by row, is the first element
    that is wrong, and its sum is how often it is there too often.
    """
    sums: dict[int, int] = {}
    for box, sign in _signed(global_shape, boxes):
        corners = [(0, sign)]
        for offset, side, length in zip(box.offsets, box.shape, global_shape, strict=True):
            # A corner by its number in a grid that is one longer than the shape, for boxes end beside their last element.
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


def _signed(global_shape: tuple[int, ...], boxes: Iterable[Box]) -> Iterator[tuple[Box, int]]:
    yield whole(global_shape), -1
    for box in boxes:
        yield box, 1


def _hole_at(point: Box, global_shape: tuple[int, ...], boxes: Iterable[Box]) -> Box:
    """A box that begins at an element that is in none of the boxes, and that meets none of them."""
    ends = list(global_shape)
    for box in boxes:
        hole = _between(point.offsets, ends)
        if overlap(box, hole) is None:
            continue
        # Along some dimension it begins behind the element: end before it there.
        dim = next(dim for dim, (b, p) in enumerate(zip(box.offsets, point.offsets, strict=True)) if b > p)
        ends[dim] = box.offsets[dim]
    return _between(point.offsets, ends)


def _between(starts: Sequence[int], ends: Sequence[int]) -> Box:
    return Box(tuple(starts), tuple(end - start for start, end in zip(starts, ends, strict=True)))


def _overlapping(key: str, form: Form, boxes: Sequence[Box], shards: _Shards) -> ShardingError:
    one, other = boxes[:2]
    common = overlap(one, other)
    assert common is not None, "an element is in both"
    held = [f"{_slices(box)} of {named_ranks(run.rank for run in shards[box])}" for box in (one, other)]
    return ShardingError(
        f"{key}: the shards {held[0]} and {held[1]}, main replicas both, overlap in {_slices(common)} of the global shape "
        f"{_shown(form.global_shape)}; every element must have one main replica"
    )


def _missing(key: str, form: Form, hole: Box, everybodys: GlobalMetadata) -> ShardingError:
    holders: list[int] = []
    others: list[int] = []
    for rank, columns in enumerate(everybodys.columns):
        rows = [row for row, other in enumerate(everybodys.rows(columns.keys)) if other == key]
        holders += [rank] * bool(rows)
        forms, places = everybodys.rows(columns.forms), everybodys.rows(columns.places)
        boxes = [Box(places[row].offset, forms[row].sides) for row in rows if places[row].start != places[row].stop]
        others += [rank] * any(overlap(box, hole) is not None for box in boxes)
    who = f"{named_ranks(others)} {_have(others)} it under other replica ids" if others else ""
    who = who or f"{named_ranks(holders)} {_have(holders)} the rest of {key}"
    return ShardingError(
        f"{key}: no rank has the main replica of {_the(form, hole)}; {who}. One rank must give it, with replica_id 0."
    )


def _have(ranks: Iterable[int]) -> str:
    return "has" if len(set(ranks)) == 1 else "have"


def _the(form: Form, box: Box) -> str:
    what = "the shard" if form.dtype else "the object"
    return f"{what} {_slices(box)} of the global shape {_shown(form.global_shape)}"


def _slices(box: Box) -> str:
    return "[" + ", ".join(f"{side.start}:{side.stop}" for side in box.slices) + "]"


def _shown(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value
