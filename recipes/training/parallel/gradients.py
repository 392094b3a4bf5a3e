"""Sum gradients over ranks, in a fixed order and few messages: equal bits on every rank, and in every run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import nn

from ckpt.state.address import local_tensor

BUCKET_BYTES = 32 << 20


def sum_gradients(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup, *, mean: bool = False) -> None:
    """Replace each gradient by its sum, or its mean, over the group.

    Collective; all ranks pass parameters of the same shapes, in one order. The sum is for copies of one parameter in different
    pipeline stages, the mean for data parallelism.
    """
    num_ranks = dist.get_world_size(group)
    if num_ranks == 1:
        return
    gradients = (local_tensor(parameter.grad) for parameter in parameters if parameter.grad is not None)
    for bucket in _buckets(gradients):
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
        dist.all_reduce(flat, group=group)
        if mean:
            flat *= 1.0 / num_ranks
        sizes = [gradient.numel() for gradient in bucket]
        for gradient, summed in zip(bucket, flat.split(sizes), strict=True):
            gradient.copy_(summed.view_as(gradient))


def _buckets(gradients: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Group adjacent gradients of one data type up to `BUCKET_BYTES`, to bound the memory of copies."""
    bucket: list[torch.Tensor] = []
    size = 0
    for gradient in gradients:
        if bucket and (gradient.dtype != bucket[0].dtype or size + gradient.nbytes > BUCKET_BYTES):
            yield bucket
            bucket, size = [], 0
        bucket.append(gradient)
        size += gradient.nbytes
    if bucket:
        yield bucket
