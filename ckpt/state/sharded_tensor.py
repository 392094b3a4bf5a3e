"""`ShardedTensor`: one piece of a global tensor, with its position there."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Self, SupportsIndex

import numpy as np
import numpy.typing as npt
import torch

from ckpt.errors import ShapeMismatchError, ShardingError
from ckpt.format.box import Box, flat_boxes, whole
from ckpt.format.dtypes import is_dtensor
from ckpt.state.sharded_base import ReplicaId, ShardedBase

Coordinates = tuple[npt.NDArray[np.intp], ...]
"""One array per dimension: the index of every element."""


@dataclass(eq=False)
class ShardedTensor(ShardedBase):
    """A piece of a global tensor: the information of a DTensor as plain data.

    Attributes:
        key: name of the global tensor.
        data: the local piece; None for metadata alone.
        dtype: of the piece.
        local_shape: of the local chunk: of `data`, unless that is flattened.
        global_shape: of the whole tensor.
        global_offset: start of the chunk in the global tensor, in elements.
        axis_fragmentations: number of equal chunks along each axis of the global tensor; None for chunks of any size.
        replica_id: 0 (or all zeros) for the main copy; others hold equal bits. NumPy's and torch's numbers become Python's.
        prepend_axis_num: number of leading axes that only the global tensor has; the chunk's side along them is 1.
        allow_shape_mismatch: the saved global shape may differ from `global_shape`, such as that of a padded vocabulary.
        flattened_range: `data` holds this range of the chunk's elements, row-major, as a 1-D tensor; None: all of the chunk.

    Source: the fields of the same name in megatron.core.dist_checkpointing.mapping.ShardedTensor.
    """

    key: str
    data: torch.Tensor | None = field(repr=False)
    dtype: torch.dtype
    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    axis_fragmentations: tuple[int, ...] | None
    replica_id: ReplicaId = 0
    prepend_axis_num: int = 0
    allow_shape_mismatch: bool = False
    flattened_range: slice | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        # JSON refuses NumPy's integers, which products of shapes often are.
        self.local_shape, self.global_shape = _ints(self.local_shape), _ints(self.global_shape)
        self.global_offset = _ints(self.global_offset)
        if self.axis_fragmentations is not None:
            self.axis_fragmentations = _ints(self.axis_fragmentations)
        if self.flattened_range is not None:
            self.flattened_range = _int_slice(self.flattened_range)
        self.validate_metadata_integrity()

    @classmethod
    def at(
        cls,
        key: str,
        data: torch.Tensor,
        global_shape: tuple[int, ...],
        global_offset: tuple[int, ...],
        replica_id: ReplicaId = 0,
    ) -> Self:
        """Make a piece of any size at any offset; the other pieces may have other sizes.

        Example:
            >>> ShardedTensor.at("w", torch.zeros(2, 3), (7, 3), (5, 0)).box
            Box(offsets=(5, 0), shape=(2, 3))
        """
        return cls(key, data, data.dtype, tuple(data.shape), global_shape, global_offset, None, replica_id)

    @classmethod
    def from_rank_offsets(
        cls,
        key: str,
        data: torch.Tensor,
        *rank_offsets: tuple[int, int, int],
        replica_id: ReplicaId = 0,
        prepend_axis_num: int = 0,
        flattened_range: None = None,
        allow_shape_mismatch: bool = False,
    ) -> Self:
        """Make a chunk of a tensor that is split evenly along some axes.

        Args:
            rank_offsets: (axis of the global tensor, this chunk's number along it, number of chunks along it), each axis at
                most once; the others are not split.

        Raises:
            ShardingError: an axis is repeated or does not exist, a number is outside of its count, or a range is given.

        Example:
            >>> ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3), (0, 1, 4)).global_offset
            (2, 0)
        """
        if flattened_range is not None:
            raise ShardingError(f"{key}: from_rank_offsets takes no flattened_range; use from_rank_offsets_flat")
        local_shape = tuple(data.shape)
        shape, offset, counts = _even_grid(key, local_shape, rank_offsets, prepend_axis_num)
        return cls(
            key,
            data,
            data.dtype,
            local_shape,
            shape,
            offset,
            counts,
            replica_id,
            prepend_axis_num,
            allow_shape_mismatch,
        )

    @classmethod
    def from_rank_offsets_flat(
        cls,
        key: str,
        data: torch.Tensor,
        non_flat_local_shape: tuple[int, ...],
        *rank_offsets: tuple[int, int, int],
        flattened_range: slice | None = None,
        replica_id: ReplicaId = 0,
        prepend_axis_num: int = 0,
        allow_shape_mismatch: bool = False,
    ) -> Self:
        """Make a range of elements of a chunk of a tensor that is split evenly along some axes.

        Args:
            data: the elements, 1-D.
            non_flat_local_shape: of the chunk.
            rank_offsets: as for `from_rank_offsets`.
            flattened_range: of `data` in the chunk, row-major; required.

        Raises:
            ShardingError: as `from_rank_offsets`, or the range is missing, has a step or leaves the chunk.
            ShapeMismatchError: `data` is not 1-D, or not as long as the range.
        """
        if flattened_range is None:
            raise ShardingError(
                f"{key}: from_rank_offsets_flat needs flattened_range, the run of elements that data is; for a whole chunk use "
                "from_rank_offsets"
            )
        local_shape = tuple(non_flat_local_shape)
        shape, offset, counts = _even_grid(key, local_shape, rank_offsets, prepend_axis_num)
        return cls(
            key, data, data.dtype, local_shape, shape, offset, counts, replica_id, prepend_axis_num, allow_shape_mismatch,
            flattened_range,
        )  # fmt: skip

    def validate_metadata_integrity(self) -> None:
        _check_dimensions(self)
        _check_range(self)
        _check_data(self)
        _check_position(self)

    @property
    def box(self) -> Box:
        """Box of the local chunk in the global tensor."""
        return Box(self.global_offset, (1,) * self.prepend_axis_num + self.local_shape)

    def pieces(self) -> list[tuple[Box, torch.Tensor]]:
        """Return `data` as boxes of the global tensor, each with a view of `data` in the box's shape.

        A chunk is one box. A flattened range of a chunk with n dimensions (without prepended ones) is at most 2n - 1 boxes, in the
        order of its elements, and none if it is empty.

        Raises:
            ShardingError: `data` is None.
        """
        if self.data is None:
            raise ShardingError(f"{self.key} has no data; give it a tensor, or call init_data")
        data = self.data.detach()
        if self.flattened_range is None:
            return [(self.box, data[(None,) * self.prepend_axis_num])]
        found = []
        for local, at in flat_boxes(self.local_shape, self.flattened_range.start, self.flattened_range.stop):
            sides = (1,) * self.prepend_axis_num + local.shape
            inside = (0,) * self.prepend_axis_num + local.offsets
            offsets = tuple(o + i for o, i in zip(self.global_offset, inside, strict=True))
            found.append((Box(offsets, sides), data[at : at + local.num_elements].view(sides)))
        return found

    def global_slice(self) -> tuple[int | slice, ...]:
        """Return the index of the local chunk in the global tensor: numbers along prepended axes, slices along the others."""
        slices = self.box.slices
        return (*self.global_offset[: self.prepend_axis_num], *slices[self.prepend_axis_num :])

    def local_coordinates(self) -> Coordinates:
        """Return the coordinates in the local chunk of each element of a flattened range.

        Raises:
            ShardingError: the tensor is not flattened.
        """
        run = self._run("local_coordinates")
        # np.unravel_index refuses an array without dimensions.
        return np.unravel_index(np.arange(run.start, run.stop), self.local_shape) if self.local_shape else ()

    def global_coordinates(self) -> Coordinates:
        """Return the coordinates in the global tensor of each element of a flattened range.

        Raises:
            ShardingError: the tensor is not flattened.
        """
        run = self._run("global_coordinates")
        prepended = (np.zeros(run.stop - run.start, dtype=np.intp),) * self.prepend_axis_num
        inside = (*prepended, *self.local_coordinates())
        return tuple(local + offset for local, offset in zip(inside, self.global_offset, strict=True))

    def local_chunk_offset_in_global(self) -> tuple[int, ...]:
        """Return the number of the local chunk along each axis of the global tensor.

        Raises:
            ShardingError: the grid is irregular, so the number of chunks before this one is unknown.
        """
        if self.axis_fragmentations is None and any(self.global_offset):
            raise ShardingError(
                f"{self.key}: the chunk at {self.global_offset} of a grid without axis_fragmentations has no number; describe it "
                "with from_rank_offsets"
            )
        return tuple(o // n if n else 0 for o, n in zip(self.global_offset, self.box.shape, strict=True))

    def max_allowed_chunks(self) -> tuple[int, ...]:
        """Return the largest storage chunk shape with which no two ranks share a chunk.

        Raises:
            ShardingError: the grid is irregular, or does not divide the global shape and `allow_shape_mismatch` is False.
        """
        if self.axis_fragmentations is None:
            raise ShardingError(
                f"{self.key}: axis_fragmentations is None, a grid of any sizes; describe it with from_rank_offsets to have chunks"
            )
        for side, count in zip(self.global_shape, self.axis_fragmentations, strict=True):
            if side % count and not self.allow_shape_mismatch:
                raise ShardingError(
                    f"{self.key}: global shape {self.global_shape} is not divisible by axis_fragmentations "
                    f"{self.axis_fragmentations}; pad it, or set allow_shape_mismatch"
                )
        return tuple(side // count for side, count in zip(self.global_shape, self.axis_fragmentations, strict=True))

    def without_data(self) -> Self:
        return replace(self, data=None)

    def init_data(self, device: str | torch.device, init_fn: Callable[..., torch.Tensor] = torch.empty) -> None:
        """Allocate `data` on a device if it is None: `init_fn(shape of data, dtype=..., device=...)`."""
        if self.data is None:
            self.data = init_fn(self.data_shape, dtype=self.dtype, device=device)

    def narrow(self, dim: int, start: int, length: int) -> list[Self]:
        """Narrow the chunk as torch.narrow does, assuming that every rank does the same. Data are views.

        Args:
            dim: of the chunk, without prepended axes. A flattened piece is narrowed along 0 only.

        Returns:
            One piece; an empty list for a flattened piece without elements there.

        Raises:
            ShardingError: there are no such elements, or the chunks along `dim` may differ in length.
        """
        dim = _narrowed_dim(self, dim, start, length)
        axis, old = dim + self.prepend_axis_num, self.local_shape[dim]
        narrowed = replace(
            self,
            data=None,
            local_shape=_with(self.local_shape, dim, length),
            global_shape=_with(self.global_shape, axis, self.global_shape[axis] // max(old, 1) * length),
            global_offset=_with(self.global_offset, axis, self.global_offset[axis] // max(old, 1) * length),
            flattened_range=None,
        )
        if self.flattened_range is None:
            return [narrowed if self.data is None else replace(narrowed, data=self.data.narrow(dim, start, length))]
        row = math.prod(self.local_shape[1:])
        first = max(self.flattened_range.start, start * row)
        stop = min(self.flattened_range.stop, (start + length) * row)
        if first >= stop:
            return []
        at = first - self.flattened_range.start
        data = None if self.data is None else self.data[at : at + stop - first]
        return [replace(narrowed, data=data, flattened_range=slice(first - start * row, stop - start * row))]

    @property
    def data_shape(self) -> tuple[int, ...]:
        """Shape of `data`, also if that is None."""
        run = self.flattened_range
        return self.local_shape if run is None else (run.stop - run.start,)

    def _run(self, asked: str) -> slice:
        if self.flattened_range is None:
            raise ShardingError(
                f"{self.key}: {asked} is for a flattened tensor, and this one has no flattened_range; use box"
            )
        return self.flattened_range


def _even_grid(
    key: str, local_shape: tuple[int, ...], rank_offsets: tuple[tuple[int, int, int], ...], prepend_axis_num: int
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return (global shape, global offset, number of chunks per axis) for a chunk of a grid of equal chunks."""
    sides = (1,) * prepend_axis_num + local_shape
    numbers, counts = [0] * len(sides), [1] * len(sides)
    seen: set[int] = set()
    for axis, number, count in rank_offsets:
        if not 0 <= axis < len(sides):
            raise ShardingError(
                f"{key}: rank offset {(axis, number, count)} names axis {axis}; the global tensor has {len(sides)} of them, counted from 0"
            )
        if axis in seen:
            raise ShardingError(f"{key}: axis {axis} is given twice in the rank offsets {rank_offsets}")
        if not 0 <= number < count:
            raise ShardingError(f"{key}: rank offset {number} of axis {axis} is outside of 0..{count - 1}")
        seen.add(axis)
        numbers[axis], counts[axis] = number, count
    shape = tuple(side * count for side, count in zip(sides, counts, strict=True))
    offset = tuple(side * number for side, number in zip(sides, numbers, strict=True))
    return shape, offset, tuple(counts)


def _ints(numbers: Iterable[SupportsIndex]) -> tuple[int, ...]:
    return tuple(map(operator.index, numbers))


def _int_slice(run: slice) -> slice:
    start, stop = (None if end is None else operator.index(end) for end in (run.start, run.stop))
    return slice(start, stop, run.step)


def _with(numbers: tuple[int, ...], position: int, value: int) -> tuple[int, ...]:
    return (*numbers[:position], value, *numbers[position + 1 :])


def _narrowed_dim(tensor: ShardedTensor, dim: int, start: int, length: int) -> int:
    """Return `dim` counted from the first one, after checking that all ranks can narrow alike.

    Raises:
        ShardingError: see `ShardedTensor.narrow`.
    """
    key, local_shape = tensor.key, tensor.local_shape
    if not -len(local_shape) <= dim < len(local_shape):
        raise ShardingError(f"{key}: there is no dim {dim} to narrow in local_shape {local_shape}")
    dim %= len(local_shape)
    local, side = local_shape[dim], tensor.global_shape[dim + tensor.prepend_axis_num]
    if not 0 <= start <= start + length <= local:
        raise ShardingError(
            f"{key}: elements {start} to {start + length} of dim {dim} are asked for, local_shape is {local_shape}"
        )
    if tensor.flattened_range is not None and dim != 0:
        raise ShardingError(
            f"{key}: a flattened tensor is narrowed along dim 0 only, where it stays one run; dim {dim} is asked for"
        )
    if local != side and (tensor.axis_fragmentations is None or not local or side % local):
        raise ShardingError(
            f"{key}: chunks of length {local} along dim {dim} need not divide the global length {side} evenly, so they cannot be "
            "narrowed alike; describe them with from_rank_offsets"
        )
    return dim


def _check_dimensions(tensor: ShardedTensor) -> None:
    num_axes = len(tensor.global_shape)
    if len(tensor.global_offset) != num_axes:
        raise ShapeMismatchError(
            f"{tensor.key}: global_shape {tensor.global_shape} and global_offset {tensor.global_offset} differ in number of "
            "dimensions; give one offset per axis"
        )
    if len(tensor.local_shape) + tensor.prepend_axis_num != num_axes:
        raise ShapeMismatchError(
            f"{tensor.key}: local_shape {tensor.local_shape} with {tensor.prepend_axis_num} prepended axes and global_shape "
            f"{tensor.global_shape} differ in number of dimensions; prepend_axis_num counts the axes that only the global tensor has"
        )
    if tensor.axis_fragmentations is not None and len(tensor.axis_fragmentations) != num_axes:
        raise ShapeMismatchError(
            f"{tensor.key}: axis_fragmentations {tensor.axis_fragmentations} and global_shape {tensor.global_shape} differ in "
            "number of dimensions; give one count per axis, or None for chunks of any size"
        )
    if any(count < 1 for count in tensor.axis_fragmentations or ()):
        raise ShardingError(f"{tensor.key}: axis_fragmentations {tensor.axis_fragmentations} has a count below 1")


def _check_range(tensor: ShardedTensor) -> None:
    run = tensor.flattened_range
    if run is None:
        return
    if run.step is not None:
        raise ShardingError(
            f"{tensor.key}: flattened_range {run} has a step; give a run of consecutive elements, slice(start, stop)"
        )
    if run.start is None or run.stop is None:
        raise ShardingError(f"{tensor.key}: flattened_range {run} has an open end; give both, slice(start, stop)")
    num_elements = math.prod(tensor.local_shape)
    # An empty range may lie anywhere: Megatron's gated experts give slice(-1, -1) for the half that they do not hold.
    if run.start != run.stop and not 0 <= run.start < run.stop <= num_elements:
        raise ShardingError(
            f"{tensor.key}: flattened_range {run} is not a run of the {num_elements} elements of local_shape {tensor.local_shape}"
        )


def _check_data(tensor: ShardedTensor) -> None:
    if tensor.data is None:
        return
    if is_dtensor(tensor.data):
        raise ShardingError(
            f"{tensor.key}: data is a DTensor, which has placements of its own; give its to_local(), or put the DTensor itself into "
            "a component of the coordinator"
        )
    shape = tuple(tensor.data.shape)
    if tensor.data.dtype != tensor.dtype:
        raise ShapeMismatchError(f"{tensor.key}: data has dtype {tensor.data.dtype}, dtype says {tensor.dtype}")
    if tensor.flattened_range is None:
        if shape != tensor.local_shape:
            raise ShapeMismatchError(f"{tensor.key}: data has shape {shape}, local_shape says {tensor.local_shape}")
        return
    if len(shape) != 1:
        raise ShapeMismatchError(
            f"{tensor.key}: data of shape {shape} comes with a flattened_range, which is for 1-D data; flatten it"
        )
    if shape != tensor.data_shape:
        raise ShapeMismatchError(
            f"{tensor.key}: data has {shape[0]} elements, flattened_range {tensor.flattened_range} says {tensor.data_shape[0]}"
        )


def _check_position(tensor: ShardedTensor) -> None:
    box = tensor.box
    regular = tensor.axis_fragmentations is not None
    if regular and any(offset % side if side else offset for offset, side in zip(box.offsets, box.shape, strict=True)):
        raise ShardingError(
            f"{tensor.key}: global_offset {box.offsets} is not divisible by the chunk's shape {box.shape}, as it is where all "
            "chunks have equal size; for pieces of any size leave axis_fragmentations None, as ShardedTensor.at does"
        )
    if not whole(tensor.global_shape).contains(box):
        raise ShardingError(
            f"{tensor.key}: the piece of shape {box.shape} at {box.offsets} leaves the global shape {tensor.global_shape}"
        )
