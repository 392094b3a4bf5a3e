"""Whole tensors of a model for publishing, under the names of the whole model, whatever the parallel layout of training."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from ckpt.engine.base import NamedTensor
from ckpt.errors import ConfigurationError, MissingStateError, ShardingError
from ckpt.format.dtypes import contiguous, is_dtensor, raw_bytes, torch_dtype, zarr_name
from ckpt.ranks.default_topology import current_topology
from ckpt.ranks.topology import Topology
from ckpt.state.abilities import tied_names
from ckpt.state.adapters import AdapterState
from ckpt.state.flatten import TensorLeaf, flatten
from ckpt.state.sharded_tensor import ShardedTensor
from ckpt.state.sharing import find_aliases
from ckpt.state.statefuls import ModelState

_OPERATION = "the weights to publish"


class HasState(Protocol):
    """What is asked of an object whose weights are published."""

    def state_dict(self) -> dict[str, Any]: ...


class WholeWeights:
    """Iterable over the tensors of a stateful: DTensors are gathered, tensors of other pipeline stages broadcast from there.

    Iteration is collective among the trainers: all iterate to the end, in one order. A tied tensor is yielded once, under its first name.

    Args:
        stateful: such as `ckpt.state.statefuls.ModelState(module)`; its names, shapes and data types must not change.
        topology: of the trainers only, whose ranks are those of torch's default process group.

    Attributes:
        tied_names: {alias: name under which it is yielded}.

    Raises:
        ShardingError: a tensor cannot be published; on all ranks.
        MissingStateError: at an iteration: names, shapes or types have changed; on all ranks.
    """

    def __init__(self, stateful: HasState, topology: Topology) -> None:
        self._stateful = stateful
        self._topology = topology
        self.tied_names: dict[str, str] = {}
        self._rows: list[tuple[_Row, int]] = []
        self._agree()

    def __iter__(self) -> Iterator[NamedTensor]:
        leaves = self._leaves()
        for row, holder in self._rows:
            tensor = leaves.get(row.name)
            if holder is not EVERYBODY:
                yield row.name, self._fetched(row, tensor, holder)
            elif is_dtensor(tensor):
                yield row.name, tensor.detach().full_tensor()  # type: ignore[union-attr]
            else:
                yield row.name, tensor  # type: ignore[misc]

    def _leaves(self) -> dict[str, TensorLeaf]:
        """Return the tensors, checked against those agreed on; collective if iterating is, for a rank that raised alone would block it."""
        together = any(row.is_sharded or holder is not EVERYBODY for row, holder in self._rows)
        with ExitStack() as context:
            if together:
                context.enter_context(self._topology.operation(_OPERATION))
                context.enter_context(self._topology.phase("compare"))
            leaves = flatten(self._stateful.state_dict(), "model").tensors
            for row, holder in self._rows:
                if holder in (EVERYBODY, self._topology.rank):
                    _require_as_agreed(row, leaves.get(row.name))
        return leaves

    def _agree(self) -> None:
        """Exchange which rank holds which tensor. Collective; once."""
        with self._topology.operation(_OPERATION), self._topology.phase("names") as phase:
            leaves = flatten(self._stateful.state_dict(), "model").tensors
            aliases = find_aliases(leaves, tied_names(self._stateful))
            phase.payload = [[_row_of(name, leaf) for name, leaf in leaves.items() if name not in aliases], aliases]
        holders: dict[str, list[int]] = {}
        found: dict[str, _Row] = {}
        for rank, (rows, tied) in enumerate(phase.payloads):
            self.tied_names |= tied
            for fields in rows:
                row = _Row(*fields)
                holders.setdefault(row.name, []).append(rank)
                found.setdefault(row.name, row)
        world_size = self._topology.world_size
        for name, ranks in holders.items():
            holder = EVERYBODY if len(ranks) == world_size else ranks[0]
            if holder is not EVERYBODY and found[name].is_sharded:
                raise ShardingError(
                    f"{name}: only ranks {ranks} of {world_size} hold parts of it, as DTensors; weights of pipelines whose stages "
                    "are sharded cannot be published: take a layout without stages, such as FSDP, or FSDP and tensor parallelism"
                )
            self._rows.append((found[name], holder))

    def _fetched(self, row: _Row, tensor: Any, holder: int) -> torch.Tensor:
        if self._topology.rank == holder:
            whole = contiguous(tensor)
        else:
            # A device type without an index means this rank's device.
            whole = torch.empty(row.shape, dtype=torch_dtype(row.dtype), device=row.device)
        if whole.numel():
            dist.broadcast(raw_bytes(whole), holder)
        return whole


class HuggingFaceWeights:
    """Iterable over the weights of a transformers model as its `save_pretrained` names and cuts them, such as one expert after the other.

    Inference engines expect them so. Collective as `WholeWeights`, which gathers one layer at a time. A tied weight is yielded once.

    Args:
        model: a `PreTrainedModel`, sharded in place or not.
        topology: of the trainers only; None: the ranks of torch's default process group, or this process alone.
    """

    def __init__(self, model: Any, topology: Topology | None = None) -> None:
        self._model = model
        self._whole = WholeWeights(ModelState(model), topology or current_topology())

    def __iter__(self) -> Iterator[NamedTensor]:
        from transformers.core_model_loading import revert_weight_conversion

        for _, layer in groupby(self._whole, _layer_of):
            yield from revert_weight_conversion(self._model, dict(layer)).items()


class AdapterWeights:
    """Iterable over the weights of one adapter of a PEFT model, under the names that its file has. Collective as `WholeWeights`.

    Args:
        model: a `PeftModel`, sharded in place or not.
        adapter: its name in the model.
        topology: of the trainers only; None: the ranks of torch's default process group, or this process alone.

    Attributes:
        config: content of its `adapter_config.json`.

    Raises:
        ConfigurationError: the model has no such adapter, or it is no LoRA.
    """

    def __init__(self, model: Any, adapter: str = "default", topology: Topology | None = None) -> None:
        configs = getattr(model, "peft_config", {})
        if adapter not in configs or configs[adapter].peft_type != "LORA":
            raise ConfigurationError(f"adapter={adapter}: expected a LoRA adapter of a PeftModel, found {[*configs]}")
        state = AdapterState(model, adapter)
        self.config = state.config
        self._whole = WholeWeights(state, topology or current_topology())

    def __iter__(self) -> Iterator[NamedTensor]:
        return iter(self._whole)


class _Row(NamedTuple):
    """Description of a tensor by the first rank that holds it, or a part of it.

    Attributes:
        dtype: Zarr v3 name.
        shape: global.
        device: type, without an index.
    """

    name: str
    dtype: str
    shape: list[int]
    device: str
    is_sharded: bool


_LAYER = re.compile(r".*?\.\d+\.")
"""Prefix of the names of a layer."""
EVERYBODY = -1
"""In place of a rank: all ranks hold the tensor."""


def _layer_of(named: NamedTensor) -> str | None:
    found = _LAYER.match(named[0])
    return found and found[0]


def _row_of(name: str, leaf: TensorLeaf) -> _Row:
    if isinstance(leaf, ShardedTensor):
        raise ShardingError(
            f"{name} is a ShardedTensor, which cannot be published: give a DTensor, or the whole tensor"
        )
    return _Row(name, zarr_name(leaf.dtype), list(leaf.shape), leaf.device.type, is_dtensor(leaf))


def _require_as_agreed(row: _Row, leaf: TensorLeaf | None) -> None:
    if leaf is None or (zarr_name(leaf.dtype), [*leaf.shape]) != (row.dtype, row.shape):  # type: ignore[union-attr]
        now = "gone" if leaf is None else f"{zarr_name(leaf.dtype)} {list(leaf.shape)}"  # type: ignore[union-attr]
        raise MissingStateError(
            f"{row.name} was {row.dtype} {row.shape} when the weights to publish were agreed on, and is {now}: make a new WholeWeights"
        )
