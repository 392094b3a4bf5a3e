"""What a trainer publishes of its model: whole tensors under the names of the whole model, on whatever layout it is trained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from ckpt.dtypes import contiguous, is_dtensor, raw_bytes, torch_dtype, zarr_name
from ckpt.engine.base import NamedTensor
from ckpt.errors import ShardingError
from ckpt.flatten import flatten
from ckpt.sharing import Stateful, find_aliases
from ckpt.topology import Topology


class WholeWeights:
    """The tensors of a stateful, one after the other; DTensors gathered, and those of other pipeline stages fetched from there.

    Iterating is collective among the trainers: all take everything, in one order. A tied tensor comes once, under its first name.

    Args:
        stateful: such as `ckpt.statefuls.ModelState(module)`.
        topology: of the trainers alone, whose ranks are those of torch's default process group.

    Attributes:
        tied_names: {alias: name under which it comes}.
    """

    def __init__(self, stateful: Stateful, topology: Topology) -> None:
        self._stateful = stateful
        self._topology = topology
        self.tied_names: dict[str, str] = {}
        self._rows: list[tuple[str, str, tuple[int, ...], int]] = []
        self._agree()

    def __iter__(self) -> Iterator[NamedTensor]:
        leaves = flatten(self._stateful.state_dict(), "model").tensors
        for name, dtype, shape, holder in self._rows:
            tensor = leaves.get(name)
            if holder is EVERYBODY:
                assert isinstance(tensor, torch.Tensor)
                yield name, tensor.full_tensor() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]
            else:
                yield name, self._fetched(tensor, dtype, shape, holder)

    def _agree(self) -> None:
        """Learn who has what, once: a model keeps its names."""
        leaves = flatten(self._stateful.state_dict(), "model").tensors
        aliases = find_aliases(leaves, getattr(self._stateful, "tied_names", {}))
        with self._topology.operation("the weights to publish"), self._topology.phase("names") as phase:
            phase.payload = [[_row(name, leaf) for name, leaf in leaves.items() if name not in aliases], aliases]
        holders: dict[str, list[int]] = {}
        found: dict[str, tuple[str, tuple[int, ...]]] = {}
        for rank, (rows, tied) in enumerate(phase.payloads):
            self.tied_names |= tied
            for name, dtype, shape in rows:
                holders.setdefault(name, []).append(rank)
                found.setdefault(name, (dtype, tuple(shape)))
        world_size = self._topology.world_size
        for name, ranks in holders.items():
            holder = EVERYBODY if len(ranks) == world_size else ranks[0]
            if holder is not EVERYBODY and any(is_dtensor(leaf) for leaf in (leaves.get(name),) if leaf is not None):
                raise ShardingError(
                    f"{name}: only ranks {ranks} of {world_size} hold parts of it, as DTensors; weights of pipelines whose stages "
                    "are sharded cannot be published: choose parallel=fsdp or parallel=tp_fsdp"
                )
            self._rows.append((name, *found[name], holder))

    def _fetched(self, tensor: Any, dtype: str, shape: tuple[int, ...], holder: int) -> torch.Tensor:
        mine = self._topology.rank == holder
        whole = contiguous(tensor) if mine else torch.empty(shape, dtype=torch_dtype(dtype), device=self._device())
        if whole.numel():
            dist.broadcast(raw_bytes(whole), holder)
        return whole

    def _device(self) -> torch.device:
        leaves: Mapping[str, Any] = flatten(self._stateful.state_dict(), "model").tensors
        return next((leaf.device for leaf in leaves.values() if isinstance(leaf, torch.Tensor)), torch.device("cpu"))


EVERYBODY = -1
"""In place of the rank that holds a tensor."""


def _row(name: str, leaf: Any) -> list[Any]:
    return [name, zarr_name(leaf.dtype), list(leaf.shape)]
