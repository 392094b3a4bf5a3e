"""Faults of one rank in the middle of a save, as classes that a config names by `_target_`."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from ckpt.backends.base import Previous, Writer
from ckpt.backends.zarr import ZarrBackend
from ckpt.format.records import ArraySpec

RANK = 1


def full_disk() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "model/wte.weight/c/0/0")


def bug() -> None:
    raise KeyError("a bug of the user")


def hung() -> None:
    time.sleep(3600)


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def ended() -> None:
    os._exit(7)


def none() -> None:
    pass


FAULTS: dict[str, Callable[[], None]] = {f.__name__: f for f in (full_disk, bug, hung, killed, ended, none)}


class Counter:
    """A component of the user's own, with one number per rank; its `state_dict` fails on rank 1 the second time."""

    def __init__(self, *, model: torch.nn.Module, fault: str) -> None:
        self.fault = fault
        self.times = 0

    def state_dict(self) -> dict[str, Any]:
        self.times += 1
        if self.times == 2 and torch.distributed.get_rank() == RANK:
            FAULTS[self.fault]()
        return {"times": self.times}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.times = state_dict["times"]


class FaultyZarr(ZarrBackend):
    """Writes as zarr does, but in the second save rank 1 fails at its third chunk."""

    def __init__(self, *, fault: str, **options: Any) -> None:
        super().__init__(**options)
        self.fault = fault
        self.saves = 0

    def writer(
        self, root: Path, rank: int, progress: Callable[[int], None], previous: Previous | None = None
    ) -> Writer:
        self.saves += 1
        inner = super().writer(root, rank, progress, previous)
        return _FaultyWriter(inner, FAULTS[self.fault]) if (self.saves, rank) == (2, RANK) else inner


class _FaultyWriter:
    def __init__(self, inner: Writer, fault: Callable[[], None]) -> None:
        self._inner = inner
        self._fault = fault
        self._written = 0

    def write(self, array: ArraySpec, chunk: int, host: torch.Tensor, digests: tuple[int, ...] | None = None) -> None:
        self._written += 1
        if self._written == 3:
            self._fault()
        self._inner.write(array, chunk, host, digests)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
