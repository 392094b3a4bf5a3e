"""Weights such as those of a transformer, with random bits, that change as a whole from one update to the next."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ckpt.format.digests import digest_of
from ckpt.format.dtypes import raw_bytes, torch_dtype, zarr_name
from ckpt.format.manifest import ArrayEntry

VOCABULARY = 16
"""Rows of the embedding for each of the model's columns."""

Row = tuple[str, torch.dtype, tuple[int, ...]]


class NamedTensors:
    """A state of named tensors, each with memory of its own: a component that is saved, a trainer's weights, or a live model's."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = dict(tensors)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def state_dict(self) -> dict[str, Any]:
        return dict(self.tensors)

    def prepare_to_load(self, saved: Mapping[str, ArrayEntry]) -> None:
        """Do nothing: a load fills the tensors in place, as those of a module."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name, tensor in self.tensors.items():
            if tensor is not state_dict[name]:
                tensor.copy_(state_dict[name])

    def change(self, frozen: float = 0.0) -> None:
        """Give every byte another value, the same on all that held equal ones; none that it had in the last 200 changes.

        Args:
            frozen: the first tensors stay as they are, and of the last of these a part: this share of all bytes.
        """
        kept = int(frozen * self.num_bytes)
        for tensor in self.tensors.values():
            raw_bytes(tensor)[min(kept, tensor.nbytes) :].add_(1)
            kept = max(kept - tensor.nbytes, 0)

    def overwrite(self) -> None:
        """Overwrite every byte."""
        for tensor in self.tensors.values():
            raw_bytes(tensor).fill_(0xA5)

    def fingerprint(self) -> str:
        """Return a digest of all names and bits."""
        digests = [name + digest_of(raw_bytes(tensor.cpu()).numpy().data) for name, tensor in self.tensors.items()]
        return digest_of("".join(digests).encode())


def rows_of(num_bytes: int, width: int, dtypes: Sequence[str]) -> list[Row]:
    """Return name, type and shape of a transformer's tensors, of as few layers as make up `num_bytes`.

    Args:
        dtypes: of the matrices, in turn.
    """
    kinds = itertools.cycle([torch_dtype(name) for name in dtypes])
    found: list[Row] = []
    size = 0
    for name, shape in _shapes(width):
        dtype = next(kinds) if len(shape) == 2 else torch.int64 if not shape else torch.float32
        found.append((name, dtype, shape))
        size += math.prod(shape) * dtype.itemsize
        if size >= num_bytes:
            break
    return found


def made_of(rows: Sequence[Row], device: torch.device, seed: int) -> NamedTensors:
    """Return weights with random bits: the same for the same seed, whatever the device."""
    generator = torch.Generator().manual_seed(seed)
    return NamedTensors({name: _random(dtype, shape, generator).to(device) for name, dtype, shape in rows})


def described(rows: Sequence[Row]) -> dict[str, int]:
    """Return the number of tensors of each type."""
    return dict(Counter(zarr_name(dtype) for _, dtype, _ in rows))


def _shapes(width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "steps", ()
    yield "embedding.weight", (VOCABULARY * width, width)
    for layer in itertools.count():
        of = f"layers.{layer}"
        yield f"{of}.norm1.weight", (width,)
        yield f"{of}.attention.qkv.weight", (3 * width, width)
        yield f"{of}.attention.qkv.bias", (3 * width,)
        yield f"{of}.attention.out.weight", (width, width)
        yield f"{of}.norm2.weight", (width,)
        yield f"{of}.mlp.up.weight", (4 * width, width)
        yield f"{of}.mlp.down.weight", (width, 4 * width)


def _random(dtype: torch.dtype, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    count = math.prod(shape) * dtype.itemsize
    words = torch.randint(-(2**63), 2**63 - 1, (-(-count // 8),), generator=generator, dtype=torch.int64)
    return words.view(torch.uint8)[:count].clone().view(dtype).view(shape)
