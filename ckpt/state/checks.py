"""What a sharded tensor may not say of itself."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ckpt.errors import ShapeMismatchError, ShardingError
from ckpt.format.box import whole
from ckpt.format.dtypes import is_dtensor

if TYPE_CHECKING:
    from ckpt.dist_checkpointing.mapping import ShardedTensor


def check(tensor: ShardedTensor) -> None:
    """Refuse a sharded tensor whose fields contradict each other.

    Raises:
        ShapeMismatchError: numbers of dimensions, data types or sizes differ that should be equal.
        ShardingError: the range is no run of the chunk's elements, the chunk has no such place, or the data is a DTensor.
    """
    _check_dimensions(tensor)
    _check_range(tensor)
    _check_data(tensor)
    _check_place(tensor)


def check_narrow(tensor: ShardedTensor, dim: int, start: int, length: int) -> int:
    """Refuse elements that cannot be narrowed to, on all ranks alike; return `dim` counted from the first one.

    Raises:
        ShardingError: naming the tensor, what was asked for and what it has.
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
            f"{key}: chunks of length {local} along dim {dim} need not cut the global length {side} evenly, so they cannot be "
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
    # An empty run may be said to lie anywhere: Megatron's gated experts say slice(-1, -1) of the half that they do not hold.
    if run.start != run.stop and not 0 <= run.start < run.stop <= num_elements:
        raise ShardingError(
            f"{tensor.key}: flattened_range {run} is not a run of the {num_elements} elements of local_shape {tensor.local_shape}"
        )


def _check_data(tensor: ShardedTensor) -> None:
    if tensor.data is None:
        return
    _check_is_local(tensor)
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


def _check_is_local(tensor: ShardedTensor) -> None:
    if is_dtensor(tensor.data):
        raise ShardingError(
            f"{tensor.key}: data is a DTensor, which says itself where it lies; give its to_local(), or put the DTensor itself into "
            "a component of the coordinator"
        )


def _check_place(tensor: ShardedTensor) -> None:
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
