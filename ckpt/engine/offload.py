"""A trainer's weights, copied to its host one by one, in the types in which they travel."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch

from ckpt.engine.base import CASTABLE, NamedTensor, Weights
from ckpt.engine.wire.layout import WeightLayout
from ckpt.engine.wire.pool import HostPool
from ckpt.errors import refused
from ckpt.format.dtypes import is_dtensor

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in CASTABLE}
_PAUSE_EVERY = 16  # tensors after which a sender's event loop may do something else


class TravelTypes:
    """The type in which each weight travels; see `rollout_dtype` and `keep_dtype` of `VersionedEngine`.

    Raises:
        ConfigurationError: weights cannot be cast to this type.
    """

    def __init__(self, rollout_dtype: str | torch.dtype | None, keep_dtype: Sequence[str]) -> None:
        name = None if rollout_dtype is None else str(rollout_dtype).removeprefix("torch.")
        if name is not None and name not in _DTYPES:
            raise refused("engine.rollout_dtype", name, f"one of {', '.join(sorted(_DTYPES))}, or null")
        self._dtype = None if name is None else _DTYPES[name]
        self._kept = tuple(keep_dtype)

    def of(self, name: str, dtype: torch.dtype) -> torch.dtype:
        if self._dtype is None or dtype not in CASTABLE or any(fnmatchcase(name, pattern) for pattern in self._kept):
            return dtype
        return self._dtype


@dataclass
class Offloaded:
    """The weights of an update on one trainer's host.

    Attributes:
        began: start of the update, by `time.perf_counter`.
        digests: of this rank's buckets.
        error: of the copy, which the other ranks are told in the update.
        seconds: that the copy took.
    """

    layout: WeightLayout
    began: float
    digests: dict[int, str] = field(default_factory=dict)
    error: Exception | None = None
    seconds: float = 0.0

    async def take(
        self,
        weights: Weights,
        travels_as: Callable[[str, torch.dtype], torch.dtype],
        pool: HostPool,
        *,
        progress: Callable[[], None],
        seal: Callable[[], Awaitable[dict[int, str]]],
    ) -> None:
        """Copy the parts that this rank owns to the host. An error is kept, and the iteration goes on: exporting may be collective.

        Args:
            travels_as: gives the type in which a weight travels, from its name and type.
            progress: called for each weight.
            seal: calls `pool.seal` in a thread that may wait.
        """
        try:
            numbers = itertools.count(1)
            async for name, tensor in _each(weights):
                whole = tensor.detach().full_tensor() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]
                if self.error is None:
                    try:
                        weight = self.layout.add(name, travels_as(name, whole.dtype), whole.shape)
                        pool.put(self.layout, weight, whole)
                    except Exception as error:
                        self.error = error
                progress()
                if next(numbers) % _PAUSE_EVERY == 0:
                    await asyncio.sleep(0)
            if self.error is None:
                self.digests = await seal()
        except Exception as error:
            self.error = self.error or error
        self.seconds = time.perf_counter() - self.began


async def _each(weights: Weights) -> AsyncIterator[NamedTensor]:
    if isinstance(weights, AsyncIterable):
        async for named in weights:
            yield named
    else:
        for named in weights:
            yield named
