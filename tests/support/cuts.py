"""How a global tensor may lie on ranks. Each cut gives one rank's pieces, which hold the true values.

Together the ranks of a cut hold every element once as main replica, as `validate_access_integrity` asks for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product

import torch

from ckpt.state.sharded_tensor import ShardedTensor

Cut = Callable[[str, torch.Tensor, int, int], list[ShardedTensor]]
"""(key, the whole tensor, rank, number of ranks) -> the pieces of this rank."""


def on_every_rank(key: str, tensor: torch.Tensor, rank: int, ranks: int) -> list[ShardedTensor]:
    """Tensor parallel 1."""
    return [ShardedTensor.from_rank_offsets(key, tensor, replica_id=(0, 0, rank))]


def chunks_of(shape: tuple[int, ...]) -> Cut:
    """Chunks of this shape, dealt to the ranks in turn; some may get none."""

    def cut(key: str, tensor: torch.Tensor, rank: int, ranks: int) -> list[ShardedTensor]:
        counts = [side // chunk for side, chunk in zip(tensor.shape, shape, strict=True)]
        found = []
        for number, at in enumerate(product(*map(range, counts))):
            if number % ranks == rank:
                part = tensor[tuple(slice(i * n, (i + 1) * n) for i, n in zip(at, shape, strict=True))]
                offsets = [(axis, i, count) for axis, (i, count) in enumerate(zip(at, counts, strict=True))]
                found.append(ShardedTensor.from_rank_offsets(key, part, *offsets))
        return found

    return cut


def along(axis: int) -> Cut:
    """A piece per rank along one axis: of equal size where that goes, and else of any size, some perhaps empty."""

    def cut(key: str, tensor: torch.Tensor, rank: int, ranks: int) -> list[ShardedTensor]:
        positive = axis % tensor.dim()
        part = tensor.tensor_split(ranks, positive)[rank]
        if tensor.shape[positive] % ranks == 0:
            return [ShardedTensor.from_rank_offsets(key, part, (positive, rank, ranks))]
        first = sum(one.shape[positive] for one in tensor.tensor_split(ranks, positive)[:rank])
        offset = [0] * tensor.dim()
        offset[positive] = first
        return [ShardedTensor.at(key, part, tuple(tensor.shape), tuple(offset))]

    return cut


def flattened(key: str, tensor: torch.Tensor, rank: int, ranks: int) -> list[ShardedTensor]:
    """Runs of the whole tensor, of very different lengths, that end anywhere in a row; some may be empty."""
    return [_run_of(key, tensor, rank, ranks)]


def flattened_in_halves(key: str, tensor: torch.Tensor, rank: int, ranks: int) -> list[ShardedTensor]:
    """The distributed optimizer below tensor parallel 2 along the last axis; where either does not go, without that."""
    if ranks % 2 or tensor.shape[-1] % 2:
        return flattened(key, tensor, rank, ranks)
    half = tensor.chunk(2, -1)[rank % 2]
    return [_run_of(key, half, rank // 2, ranks // 2, (tensor.dim() - 1, rank % 2, 2))]


def layers_in_a_pipeline(key: str, tensor: torch.Tensor, rank: int, ranks: int) -> list[ShardedTensor]:
    """The first axis counts layers, which only the global tensor knows of; each rank holds some of them whole."""
    count = len(tensor)
    mine = range(rank, count, ranks)
    return [ShardedTensor.from_rank_offsets(key, tensor[at], (0, at, count), prepend_axis_num=1) for at in mine]


def layers_cut(key: str, tensor: torch.Tensor, rank: int, ranks: int) -> list[ShardedTensor]:
    """Every rank holds every layer: a part of it along the last axis where that goes, and else all of it."""
    count, last = len(tensor), tensor.dim() - 1
    is_cut = last > 0 and tensor.shape[-1] % ranks == 0
    found = []
    for at in range(count):
        part = tensor[at].chunk(ranks, -1)[rank] if is_cut else tensor[at]
        offsets = [(0, at, count), *([(last, rank, ranks)] if is_cut else [])]
        replica = 0 if is_cut else rank
        found.append(ShardedTensor.from_rank_offsets(key, part, *offsets, replica_id=replica, prepend_axis_num=1))
    return found


def layers_flattened(key: str, tensor: torch.Tensor, rank: int, ranks: int) -> list[ShardedTensor]:
    """The distributed optimizer above stacked layers: a run of every layer."""
    count = len(tensor)
    return [_run_of(key, tensor[at], rank, ranks, (0, at, count), prepend_axis_num=1) for at in range(count)]


def padded(multiple: int) -> Cut:
    """Rows up to a multiple of this number, of which the last ones are zeros, cut evenly; a rank may hold nothing else."""

    def cut(key: str, tensor: torch.Tensor, rank: int, ranks: int) -> list[ShardedTensor]:
        larger = _with_rows(tensor, multiple, ranks)
        part = larger.chunk(ranks)[rank]
        return [ShardedTensor.from_rank_offsets(key, part, (0, rank, ranks), allow_shape_mismatch=True)]

    return cut


def padded_and_flattened(key: str, tensor: torch.Tensor, rank: int, ranks: int) -> list[ShardedTensor]:
    """The distributed optimizer of a padded tensor."""
    return [_run_of(key, _with_rows(tensor, 16, ranks), rank, ranks, allow_shape_mismatch=True)]


def fitted(key: str, tensor: torch.Tensor, rank: int, ranks: int) -> list[ShardedTensor]:
    """Tensor parallel 1 with fewer rows than there are and, of two axes and more, two more columns."""
    rows = tensor[: max(1, len(tensor) - 3)]
    wider = torch.nn.functional.pad(rows, (0, 2 if tensor.dim() > 1 else 0))
    return [ShardedTensor.from_rank_offsets(key, wider, replica_id=rank, allow_shape_mismatch=True)]


CUTS: dict[str, tuple[int, Cut]] = {
    "on every rank": (0, on_every_rank),
    "flattened": (0, flattened),
    "along the first axis": (1, along(0)),
    "flattened in halves": (1, flattened_in_halves),
    "layers in a pipeline": (1, layers_in_a_pipeline),
    "layers cut": (1, layers_cut),
    "padded to 16": (1, padded(16)),
    "padded to 24": (1, padded(24)),
    "padded and flattened": (1, padded_and_flattened),
    "fitted": (1, fitted),
    "along the last axis": (2, along(-1)),
    "layers flattened": (2, layers_flattened),
}
"""Name -> (for tensors of at least so many dimensions, the cut)."""


def _run_of(
    key: str,
    chunk: torch.Tensor,
    rank: int,
    ranks: int,
    *offsets: tuple[int, int, int],
    prepend_axis_num: int = 0,
    allow_shape_mismatch: bool = False,
) -> ShardedTensor:
    start, stop = (chunk.numel() * i * i // ranks**2 for i in (rank, rank + 1))
    return ShardedTensor.from_rank_offsets_flat(
        key,
        chunk.reshape(-1)[start:stop].clone(memory_format=torch.contiguous_format),
        tuple(chunk.shape),
        *offsets,
        flattened_range=slice(start, stop),
        prepend_axis_num=prepend_axis_num,
        allow_shape_mismatch=allow_shape_mismatch,
    )


def _with_rows(tensor: torch.Tensor, multiple: int, ranks: int) -> torch.Tensor:
    step = math.lcm(multiple, ranks)
    rows = -(-len(tensor) // step) * step
    return torch.cat([tensor, tensor.new_zeros(rows - len(tensor), *tensor.shape[1:])])
