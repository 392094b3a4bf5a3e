"""Comparison of copies that should be equal, at four levels. Each finds all that the one before finds, and more.

- none: no comparison.
- quick: keys, data types, shapes, plain values, and `SAMPLE` elements of each tensor. Finds different structures and copies that
  have diverged, at a cost independent of tensor sizes.
- tensor: every bit of every tensor, by digest. Finds a single wrong bit; one pass over the state.
- full: also reports how many elements differ, where and by how much. Each rank hashes its tensors again after the write, which
  finds tensors that another thread changed during the save. Two passes.

Tensors are compared by type, shape and bits, which a checkpoint stores; not by device, strides or `requires_grad`.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from ckpt.errors import ConfigurationError, ReplicationError, declare
from ckpt.format.digests import StreamDigest, digest_of
from ckpt.format.dtypes import as_integers, is_dtensor, raw_bytes, real_numbers
from ckpt.state.abilities import RankPrivate, offers
from ckpt.state.address import address_of, local_tensor
from ckpt.state.flatten import TensorLeaf
from ckpt.state.sharded_tensor import ShardedTensor

if TYPE_CHECKING:
    from ckpt.ranks.topology import Topology

SAMPLE = 64
"""Number of elements of each tensor that the level "quick" compares."""
MAX_NAMED = 5
"""Entries that an error names, and whose values the level "full" compares."""
MAX_MEASURED_RANKS = 8
PIECE_BYTES = 4 << 20
"""Largest part of a tensor to be copied for hashing or sending; a contiguous host tensor is hashed without a copy."""
_SHOWN = 40

_GOLDEN = (math.sqrt(5) - 1) / 2


class ValidationLevel(Enum):
    """Level of a comparison of copies, from nothing to everything. Config files hold these strings."""

    NONE = "none"
    QUICK = "quick"
    TENSOR = "tensor"
    FULL = "full"

    def covers(self, other: ValidationLevel) -> bool:
        """Whether this level finds everything that `other` finds."""
        order = list(ValidationLevel)
        return order.index(self) >= order.index(other)


class Fingerprint(NamedTuple):
    """Data type, shape and digest of a leaf, for comparison between ranks.

    Attributes:
        dtype: torch's name of the data type; "" for a plain value.
        shape: of the piece that the rank holds; for a plain value, its length as JSON.
        digest: of its bits, or of a sample of them; "" for a piece of a larger tensor that no other rank can hold.
        place: position in a larger tensor, such as "[0:4, 0:3] of [8, 3]"; None for a whole tensor.
    """

    dtype: str
    shape: tuple[int, ...]
    digest: str
    place: str | None = None

    @property
    def num_bytes(self) -> int:
        """Size of the tensor, or of the plain value as JSON."""
        return math.prod(self.shape) * (getattr(torch, self.dtype).itemsize if self.dtype else 1)


@dataclass(frozen=True, slots=True)
class Difference:
    """One entry of one rank that differs from another rank's.

    Attributes:
        reference: the other rank.
        place: as in `Fingerprint`.
        how: description, such as "bfloat16, not float32"; "" if two tensors differ in bits alone.
    """

    key: str
    rank: int
    reference: int
    place: str | None
    how: str


@dataclass(slots=True)
class Distance:
    """Distance between two tensors of one type and shape.

    Attributes:
        num_differing: number of elements whose bits differ.
        first: index of the first of them in the tensor (or piece).
        largest: largest absolute difference; NaN if one side of each differing pair is not a number.
    """

    num_differing: int = 0
    first: tuple[int, ...] = ()
    largest: float = math.nan

    def add(self, mine: torch.Tensor, theirs: bytes, start: int, shape: tuple[int, ...]) -> None:
        """Add a part of two tensors of this shape: their elements from row-major number `start` on."""
        other = torch.frombuffer(bytearray(theirs), dtype=mine.dtype) if theirs else mine.new_empty(0)
        flat, item = mine.reshape(-1), mine.element_size()
        bits, other_bits = raw_bytes(flat).numpy().reshape(-1, item), np.frombuffer(theirs, np.uint8).reshape(-1, item)
        at = np.flatnonzero((bits != other_bits).any(axis=1))
        if at.size:
            if not self.num_differing:
                self.first = tuple(map(int, np.unravel_index(start + at[0], shape))) if shape else ()
            self.num_differing += at.size
            chosen = torch.from_numpy(at)
            left, right = (
                as_integers(bits)[chosen].view(bits.dtype) for bits in (flat, other)
            )  # torch 2.8 picks no float8
            self.largest = float(np.fmax(self.largest, _largest_difference(left, right)))


def is_piece(leaf: TensorLeaf) -> bool:
    """Whether a leaf has its own position in a larger tensor."""
    return isinstance(leaf, ShardedTensor) or is_dtensor(leaf)


def private_keys(stateful: object, keys: Collection[str]) -> set[str]:
    """Return the entries that an object declares as different on each rank, in its attribute `rank_private`.

    The attribute holds patterns of joined keys, such as `["wrapper.*", "local_rank"]`, for an object that is otherwise equal on all
    ranks. Such entries are never compared, and the checkpoint holds those of the first rank: to keep each rank's own, put them into
    a PER_RANK component.

    Raises:
        ConfigurationError: the attribute is no list of strings.
    """
    patterns = stateful.rank_private if offers(stateful, RankPrivate) else ()
    if isinstance(patterns, str) or not all(isinstance(pattern, str) for pattern in patterns):
        raise ConfigurationError(
            f"{type(stateful).__name__}.rank_private is {patterns!r}; give a list of patterns of joined keys, such as "
            '["wrapper.*"]'
        )
    return {key for pattern in patterns for key in fnmatch.filter(keys, pattern)} if patterns else set()


def fingerprints(
    tensors: Mapping[str, TensorLeaf],
    level: ValidationLevel = ValidationLevel.TENSOR,
    progress: Callable[[], None] = lambda: None,
    *,
    world_size: int | None = None,
) -> dict[str, Fingerprint]:
    """Return the fingerprints of tensors: xxh3-128 of every bit, or of a sample at the level "quick".

    Needs at most `PIECE_BYTES` of memory.

    Args:
        progress: called after each tensor.
        world_size: number of ranks whose fingerprints will be compared; a piece that this rank alone holds of them is not hashed.
            None: every tensor is hashed.
    """
    found = {}
    for key, leaf in tensors.items():
        local = local_tensor(leaf)
        if world_size is not None and _is_held_once(leaf, world_size):
            digest = ""
        else:
            digest = _digest_of_sample(local) if level is ValidationLevel.QUICK else _digest_of_all(local)
        found[key] = Fingerprint(str(local.dtype).removeprefix("torch."), tuple(local.shape), digest, _place(leaf))
        progress()
    return found


def differences(
    copies: Sequence[Mapping[str, Fingerprint]], holders: Sequence[Sequence[int]], *, must_have_all: bool = True
) -> list[Difference]:
    """Compare the fingerprints of ranks that should hold the same.

    A piece of a larger tensor is compared with the same piece on other ranks, and may be missing there.

    Args:
        copies: by rank, the fingerprints by key.
        holders: the sets of ranks that should hold equal copies.
        must_have_all: report a key that only some ranks of a set have.

    Returns:
        differences in the order of the keys on the first rank that has them, then of the ranks.
    """
    found: list[Difference] = []
    for ranks in holders:
        keys = {key: None for rank in ranks for key in copies[rank]}
        for key in keys:
            found += _differences_of(key, copies, ranks, must_have_all)
    return found


def plain_differences(copies: Sequence[Mapping[str, Any]], holders: Sequence[Sequence[int]]) -> list[Difference]:
    """Compare plain values of ranks that should hold the same. `copies`: by rank, key -> [path, value], or [path] for a tensor."""
    found = []
    for ranks in holders:
        reference = ranks[0]
        for key in {key: None for rank in ranks for key in copies[rank]}:
            for rank in ranks[1:]:
                how = _plain_difference(copies[reference].get(key), copies[rank].get(key), reference, rank)
                if how is not None:
                    found.append(Difference(key, rank, reference, None, how))
    return found


def replication_error(
    component: str,
    holders: Sequence[Sequence[int]],
    found: Sequence[Difference],
    distances: Mapping[Difference, Distance] | None = None,
) -> ReplicationError:
    """Make the error that names the differing entries, their differences and ranks.

    Args:
        found: not empty.
        distances: of the measured tensors.
    """
    reference = found[0].reference
    ranks = next(ranks for ranks in holders if reference in ranks)
    entries: dict[tuple[str, str | None, int], list[Difference]] = {}
    for comparison in found:
        entries.setdefault((comparison.key, comparison.place, comparison.reference), []).append(comparison)
    named = []
    for (key, place, against), alike in list(entries.items())[:MAX_NAMED]:
        what = f"{key} {place}" if place else key
        other = "" if against == reference else f" (beside rank {against})"
        named.append(f"{what}{other} on {_on_ranks(alike, distances or {})}")
    left = len(entries) - len(named)
    more = f"; and in {left} more {'entry' if left == 1 else 'entries'}" if left else ""
    return ReplicationError(
        f"component {component} should be the same on ranks {_ranks(ranks)}, but differs from rank {reference} in "
        f"{'; '.join(named)}{more}. Choose another sharing_pattern, or list the "
        "entries that are each rank's own in the object's attribute rank_private, or compare nothing: ",
        declare(component, validation_level="none"), ".",
    )


def measure(
    found: Sequence[Difference],
    copies: Sequence[Mapping[str, Fingerprint]],
    tensors: Mapping[str, TensorLeaf],
    topology: Topology,
) -> dict[Difference, Distance]:
    """Measure the first `MAX_NAMED` entries that differ in bits. Collective.

    The reference rank sends its tensor, `PIECE_BYTES` at a time, through the job's store to at most `MAX_MEASURED_RANKS` others.

    Args:
        found: equal on every rank.
        copies: by rank, the fingerprints by key.
        tensors: of this rank, by key.
    """
    wanted: dict[tuple[str, int], list[Difference]] = {}
    for comparison in found:
        if not comparison.how and (len(wanted) < MAX_NAMED or (comparison.key, comparison.reference) in wanted):
            wanted.setdefault((comparison.key, comparison.reference), []).append(comparison)
    measured: dict[Difference, Distance] = {}
    for (key, reference), alike in wanted.items():
        alike = alike[:MAX_MEASURED_RANKS]
        mine = next((comparison for comparison in alike if comparison.rank == topology.rank), None)
        held = local_tensor(tensors[key]) if mine is not None or topology.rank == reference else None
        if mine is not None:
            measured[mine] = Distance()
        num_seen, seen = 0, copies[reference][key]
        for cut in _cuts(seen.shape, getattr(torch, seen.dtype).itemsize):
            host = _host(held[cut]) if held is not None else None
            outgoing = {}
            if topology.rank == reference:
                assert host is not None
                data = raw_bytes(host).numpy().tobytes()
                outgoing = {comparison.rank: data for comparison in alike}
            got = topology.exchange("values", outgoing, [reference] if mine is not None else [])
            if mine is not None:
                assert host is not None
                measured[mine].add(host, got[reference], num_seen, seen.shape)
                num_seen += host.numel()
    with topology.phase("distances") as phase:
        phase.payload = [
            [comparison.key, comparison.reference, far.num_differing, far.first, repr(far.largest)] for comparison, far in measured.items()
        ] or None
    by_name = {(comparison.key, comparison.rank, comparison.reference): comparison for alike in wanted.values() for comparison in alike}
    return {
        by_name[key, rank, reference]: Distance(num_differing, tuple(first), float(largest))
        for rank, rows in enumerate(phase.payloads)
        if rows
        for key, reference, num_differing, first, largest in rows
    }


def require_unchanged(component: str, before: Mapping[str, Fingerprint], tensors: Mapping[str, TensorLeaf]) -> None:
    """Check that this rank's tensors have not changed since the ranks compared them. Called after the write.

    Raises:
        ReplicationError: names the changed tensors.
    """
    now = fingerprints(tensors)
    changed = [key for key, seen in before.items() if now[key] != seen]
    if changed:
        more = f" and {len(changed) - MAX_NAMED} more" if len(changed) > MAX_NAMED else ""
        named = ", ".join(changed[:MAX_NAMED]) + more
        raise ReplicationError(
            f"component {component} was changed while it was being saved, in {named}; the checkpoint would hold parts of two "
            "moments. Save when no step is running."
        )


def _differences_of(
    key: str, copies: Sequence[Mapping[str, Fingerprint]], ranks: Sequence[int], must_have_all: bool
) -> list[Difference]:
    """Return the differences in one entry. Different pieces of a tensor are compared with their copies alone."""
    firsts: dict[str | None, int] = {}
    if must_have_all and all(copies[rank][key].place is None for rank in ranks if key in copies[rank]):
        firsts[None] = ranks[0]
    found = []
    for rank in ranks:
        mine = copies[rank].get(key)
        reference = firsts.setdefault(mine.place, rank) if mine is not None else firsts.get(None, rank)
        theirs = copies[reference].get(key)
        if reference == rank or mine == theirs or (mine is None and theirs is not None and theirs.place is not None):
            continue
        if not must_have_all and (mine is None or theirs is None):
            continue
        place = mine.place if mine is not None else None
        found.append(Difference(key, rank, reference, place, _difference(theirs, mine, reference, rank)))
    return found


def _difference(theirs: Fingerprint | None, mine: Fingerprint | None, reference: int, rank: int) -> str:
    if mine is None:
        return f"which only rank {reference} has"
    if theirs is None:
        return "which alone has it"
    if mine.dtype != theirs.dtype:
        return f"{mine.dtype or 'a plain value'}, not {theirs.dtype or 'a plain value'}"
    if not mine.dtype:
        return "another plain value"
    return "" if mine.shape == theirs.shape else f"shape {list(mine.shape)}, not {list(theirs.shape)}"


def _plain_difference(theirs: Any, mine: Any, reference: int, rank: int) -> str | None:
    if theirs == mine:
        return None
    if mine is None:
        return f"which only rank {reference} has"
    if theirs is None:
        return "which alone has it"
    if theirs[0] != mine[0]:
        return "nested otherwise"
    if len(mine) != len(theirs):
        return "a tensor on one of the two"
    return f"{_shown(mine[1])}, not {_shown(theirs[1])}"


def _on_ranks(alike: Sequence[Difference], distances: Mapping[Difference, Distance]) -> str:
    """`rank 1, 2 (bfloat16, not float32), 3 (4 elements, the first at [0, 17], by up to 0.5)`."""
    by_how: dict[str, list[int]] = {}
    for comparison in alike:
        distance = distances.get(comparison)
        how = comparison.how
        if distance is not None:
            elements = "1 element" if distance.num_differing == 1 else f"{distance.num_differing} elements"
            far = "NaN on one side" if math.isnan(distance.largest) else f"by up to {distance.largest:.6g}"
            how = f"{elements}, the first at {list(distance.first)}, {far}"
        by_how.setdefault(how, []).append(comparison.rank)
    return "rank " + ", ".join(_ranks(ranks) + (f" ({how})" if how else "") for how, ranks in by_how.items())


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def _ranks(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def _is_held_once(leaf: Any, world_size: int) -> bool:
    """Whether a leaf is a DTensor that is cut along every dimension of a mesh of all ranks: each has another piece of it."""
    if isinstance(leaf, ShardedTensor) or not is_dtensor(leaf) or leaf.device_mesh.size() != world_size:
        return False
    return all(placement.is_shard() for placement in leaf.placements)


def _place(leaf: TensorLeaf) -> str | None:
    """Return the position of a leaf in a larger tensor; None for a whole tensor."""
    if not is_piece(leaf):
        return None
    address = address_of(leaf, "piece")
    sides = ", ".join(f"{side.start}:{side.stop}" for side in address.box.slices)
    return f"[{sides}] of {list(address.global_shape)}"


def _digest_of_all(local: torch.Tensor) -> str:
    if local.device.type == "cpu" and local.is_contiguous():
        return digest_of(raw_bytes(_host(local)).numpy().data)
    state = StreamDigest()
    for cut in _cuts(tuple(local.shape), local.element_size()):
        state.update(raw_bytes(_host(local[cut])).numpy().data)
    return state.hexdigest()


def _digest_of_sample(local: torch.Tensor) -> str:
    """Hash the first and last element and `SAMPLE` in between, at irregular positions (multiples of the golden ratio)."""
    if local.numel() > 2 * SAMPLE:
        inner = np.arange(1, SAMPLE + 1) * _GOLDEN % 1.0
        positions = np.unique(np.append((inner * local.numel()).astype(np.int64), [0, local.numel() - 1]))
        index: tuple[Any, ...] = (positions,)
        if local.is_contiguous():
            local = local.view(-1)
        else:
            index = np.unravel_index(positions, tuple(local.shape))
        whole = local if local.is_conj() or local.is_neg() else as_integers(local)
        local = whole[tuple(torch.from_numpy(at).to(local.device) for at in index)]
    return digest_of(raw_bytes(_host(local)).numpy().data)


def _host(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor on the host, contiguous; itself if it is so already."""
    if tensor.device.type == "cpu" and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
        return tensor
    return tensor.cpu().resolve_conj().resolve_neg().contiguous()


def _cuts(shape: tuple[int, ...], item_bytes: int) -> Iterator[tuple[int | slice, ...]]:
    """Split a tensor into parts of at most `PIECE_BYTES`, in the order of its elements. Depends on its shape alone."""
    row_bytes = math.prod(shape[1:]) * item_bytes
    if not shape or row_bytes * shape[0] <= PIECE_BYTES:
        yield ()
    elif row_bytes > PIECE_BYTES:
        for row in range(shape[0]):
            yield from ((row, *rest) for rest in _cuts(shape[1:], item_bytes))
    else:
        step = PIECE_BYTES // row_bytes
        yield from ((slice(first, first + step),) for first in range(0, shape[0], step))


def _largest_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the largest absolute difference, exact for integers; NaN if one of each pair is not a number."""
    if a.dtype.is_complex:
        gaps = (a.to(torch.complex128) - b.to(torch.complex128)).abs().numpy()
    elif a.dtype.is_floating_point:
        gaps = (real_numbers(a) - real_numbers(b)).abs().flatten().numpy()
    else:
        left, right = (t.to(torch.uint8).numpy() if t.dtype is torch.bool else t.numpy() for t in (a, b))
        gaps = np.where(left > right, left, right).astype(np.uint64) - np.where(left > right, right, left).astype(
            np.uint64
        )
    return float(np.fmax.reduce(gaps))
