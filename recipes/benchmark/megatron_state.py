"""The state of both sides of measure=megatron: a GPT and the moments of Adam as Megatron cuts them for one rank.

It imports nothing of `ckpt`, because ranks of another environment, in which `ckpt` does not run, import it too.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from recipes.benchmark.measuring import make_durable

OPTIMIZERS = ("tensors", "ranges")
MOMENTS = ("exp_avg", "exp_avg_sq")
WORD_EMBEDDINGS = "embedding.word_embeddings.weight"
VOCABULARY_MULTIPLE = 128  # Megatron pads the embedding to a multiple of this on every tensor-parallel rank


@dataclass(frozen=True)
class RankHoldings:
    """The model, and one rank's place in it.

    Attributes:
        vocabulary, context, layers, width: of the GPT.
        optimizer: "tensors": the moments are cut as the weights are, and data-parallel ranks hold them alike; "ranges": each
            of these holds a range of all flattened moments behind each other, as Megatron's distributed optimizer does.
        tp_rank, tp, dp_rank, dp: this rank's number, and the number of ranks, along either axis.
    """

    vocabulary: int
    context: int
    layers: int
    width: int
    optimizer: str
    tp_rank: int
    tp: int
    dp_rank: int
    dp: int


@dataclass(frozen=True)
class ShardArguments:
    """The arguments of a ShardedTensor, but for its data; `start` and `stop` are those of a flattened range."""

    key: str
    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    fragmentations: tuple[int, ...]
    replica_id: tuple[int, int, int]
    prepended: int
    may_differ: bool = False
    start: int | None = None
    stop: int | None = None

    @property
    def num_elements(self) -> int:
        return math.prod(self.local_shape) if self.stop is None else self.stop - (self.start or 0)

    def values(self) -> torch.Tensor:
        """Return float32 values that follow from the place in the global tensor: equal in replicas, else all different."""
        seed = zlib.crc32(f"{self.key} {self.global_offset}".encode()) - 2**31
        start = self.start or 0
        bits = torch.arange(start, start + self.num_elements, dtype=torch.int32).mul_(-1640531527).add_(seed)
        return bits.view(torch.float32).view(self.local_shape if self.stop is None else (-1,))

    def is_equal(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor that was loaded has these values, bit for bit."""
        wanted = self.values()
        same_kind = tensor.dtype == wanted.dtype and tensor.shape == wanted.shape
        return same_kind and torch.equal(tensor.contiguous().view(torch.int32), wanted.view(torch.int32))


def layer_of(width: int) -> dict[str, tuple[tuple[int, ...], int | None]]:
    """Return the parameters of one layer of a GPT by name: shape, and the axis that tensor-parallel ranks cut (None: each holds all)."""
    return {
        "self_attention.linear_proj.weight": ((width, width), 1),
        "self_attention.linear_proj.bias": ((width,), None),
        "self_attention.linear_qkv.layer_norm_weight": ((width,), None),
        "self_attention.linear_qkv.layer_norm_bias": ((width,), None),
        "self_attention.linear_qkv.weight": ((3 * width, width), 0),
        "self_attention.linear_qkv.bias": ((3 * width,), 0),
        "mlp.linear_fc1.layer_norm_weight": ((width,), None),
        "mlp.linear_fc1.layer_norm_bias": ((width,), None),
        "mlp.linear_fc1.weight": ((4 * width, width), 0),
        "mlp.linear_fc1.bias": ((4 * width,), 0),
        "mlp.linear_fc2.weight": ((width, 4 * width), 1),
        "mlp.linear_fc2.bias": ((width,), None),
    }


def shards_of(held: RankHoldings) -> dict[str, ShardArguments]:
    """Return all that one rank holds, by names that are equal on no two entries."""
    model = dict(_model(held))
    found = {f"model {name}": shard for name, shard in model.items()}
    ranges = dict(_ranges(held, model))
    for moment in MOMENTS:
        for name, shard in ranges.items() if held.optimizer == "ranges" else model.items():
            found[f"{moment} {name}"] = replace(shard, key=f"optimizer.state.{moment}.{shard.key}")
    return found


def data_parallel_ranks(held: RankHoldings) -> list[list[int]]:
    """Return, by tensor-parallel rank, the ranks that hold the model alike: neighbours differ in their tensor-parallel rank."""
    return [[dp_rank * held.tp + tp_rank for dp_rank in range(held.dp)] for tp_rank in range(held.tp)]


@dataclass
class Side:
    """One rank's tensors, and how they are saved and loaded: by our strategies, or by megatron-core's. Every method is collective.

    Attributes:
        shards: names and arguments of the tensors.
        make, save_state, load_state: `ShardedTensor`, `save` and `load` of this side.
        measured: does a piece of work together with the other ranks, and returns `seconds` and `peak_mib` of this rank.
        is_lead: whether this rank makes the whole save durable.
        data: tensors with the values of `shards`.
    """

    shards: Mapping[str, ShardArguments]
    make: Callable[..., Any]
    save_state: Callable[..., object]
    load_state: Callable[..., Any]
    measured: Callable[[Callable[[], None]], dict[str, Any]]
    is_lead: bool

    def __post_init__(self) -> None:
        self.data = {name: shard.values() for name, shard in self.shards.items()}

    def save(self, folder: Path, strategy: Any) -> dict[str, Any]:
        """Save to a folder that exists. Both sides sync the file system, as one of them has to."""

        def work() -> None:
            self.save_state(self._state(), str(folder), strategy)
            if self.is_lead:
                make_durable(folder)

        return self.measured(work)

    def load(self, folder: Path, strategy: Any, *, fills: bool) -> dict[str, Any]:
        """Load; the names of tensors that came back wrong are added, as `wrong`.

        Args:
            fills: the tensors that exist are filled. They are zeroed before, and those that came back wrong are mended.
        """
        loaded: dict[str, Any] = {}
        for tensor in self.data.values() if fills else []:
            tensor.zero_()
        cost = self.measured(lambda: loaded.update(self.load_state(self._state(), str(folder), strategy)))
        wrong = [name for name, shard in self.shards.items() if not shard.is_equal(loaded[name])]
        for name in wrong if fills else []:
            self.data[name].copy_(self.shards[name].values())
        return cost | {"wrong": wrong}

    def _state(self) -> dict[str, Any]:
        """A sharded state dict, with some common state."""
        state: dict[str, Any] = {"iteration": 7, "checkpoint_version": 3.0, "lr": 3e-4}
        for name, shard in self.shards.items():
            place = shard.local_shape, shard.global_shape, shard.global_offset, shard.fragmentations, shard.replica_id
            flattened = None if shard.stop is None else slice(shard.start, shard.stop)
            state[name] = self.make(
                shard.key, self.data[name], torch.float32, *place, shard.prepended, shard.may_differ, flattened
            )
        return state


def _model(held: RankHoldings) -> Iterator[tuple[str, ShardArguments]]:
    """The parameters of one rank; those of the layers are stacked."""
    width, multiple = held.width, VOCABULARY_MULTIPLE * held.tp
    vocabulary = -(-held.vocabulary // multiple) * multiple
    layers = {f"decoder.layers.{name}": parameter for name, parameter in layer_of(width).items()}
    parameters = {
        WORD_EMBEDDINGS: ((vocabulary, width), 0),
        "embedding.position_embeddings.weight": ((held.context, width), None),
        **layers,
        "decoder.final_layernorm.weight": ((width,), None),
        "decoder.final_layernorm.bias": ((width,), None),
    }
    for name, (shape, axis) in parameters.items():
        for layer in range(held.layers) if name in layers else [None]:
            yield f"{name} {layer}", _shard(name, shape, axis, layer, held)


def _shard(name: str, shape: tuple[int, ...], axis: int | None, layer: int | None, held: RankHoldings) -> ShardArguments:
    local, whole, offset, cuts = list(shape), list(shape), [0] * len(shape), [1] * len(shape)
    if axis is not None:
        local[axis] //= held.tp
        offset[axis] = held.tp_rank * local[axis]
        cuts[axis] = held.tp
    if layer is not None:
        whole, offset, cuts = [held.layers, *whole], [layer, *offset], [held.layers, *cuts]
    return ShardArguments(
        key=name,
        local_shape=tuple(local),
        global_shape=tuple(whole),
        global_offset=tuple(offset),
        fragmentations=tuple(cuts),
        replica_id=(0, held.tp_rank if axis is None else 0, held.dp_rank),
        prepended=0 if layer is None else 1,
        may_differ=name == WORD_EMBEDDINGS,
    )


def _ranges(held: RankHoldings, model: Mapping[str, ShardArguments]) -> Iterator[tuple[str, ShardArguments]]:
    """The range that this rank holds of the flattened parameters, the last parameter first."""
    part = -(-sum(shard.num_elements for shard in model.values()) // held.dp)
    at = -held.dp_rank * part
    for name, shard in reversed(model.items()):
        start, stop = max(0, -at), min(shard.num_elements, part - at)
        if start < stop:
            yield name, replace(shard, replica_id=(*shard.replica_id[:2], 0), start=start, stop=stop)
        at += shard.num_elements
