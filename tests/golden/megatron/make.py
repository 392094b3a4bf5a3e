"""Write the golden checkpoints beside this file with the real megatron-core, or check that it reads them.

It needs an environment of its own, for megatron-core 0.10.0 runs with NumPy 1 and zarr 2 only:

    python3.11 -m venv megatron-env
    megatron-env/bin/pip install torch==2.13.0 "numpy<2" "zarr>=2.18,<3" "numcodecs<0.16" "tensorstore<=0.1.45" fasteners packaging
    megatron-env/bin/pip install --no-deps megatron-core==0.10.0
    megatron-env/bin/python tests/golden/megatron/make.py             writes all but old-names, then reads all of them
    megatron-env/bin/python tests/golden/megatron/make.py --check     only reads

`old-names` is written by a second environment with megatron-core==0.6.0 in place of 0.10.0. Each folder `<name>` is a
checkpoint as megatron-core left it; `<name>.json` and `<name>.bin` beside it are the true global values, without pickle:
README.md says how they are read.
"""

from __future__ import annotations

import argparse
import enum
import fcntl
import io
import json
import os
import random
import shutil
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies import zarr as zarr_strategy
from megatron.core.dist_checkpointing.strategies.tensorstore import TensorStoreLoadShardedStrategy
from megatron.core.enums import ModelType

HERE = Path(__file__).resolve().parent
WRITER = version("megatron-core")
OLD_WRITER = "0.6.0"  # the last one that cut the end off the names of object files, see `old_names`

State = dict[str, Any]


# The values: formulas of the key and the row-major index in the global tensor


def values(key: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return the whole global tensor of a key. Exact in its dtype; neighbours differ, so that a wrong offset shows."""
    index = np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape)
    seed = zlib.crc32(key.encode())
    small = (index * 37 + seed) % 251
    large = index + seed % 1000 * 1000
    if key.startswith("zeros."):  # chunks of nothing but zeros have files as well
        array = np.zeros(shape)
    elif key.startswith("bits."):  # what only a copy of the bits keeps
        array = np.resize(np.array([np.inf, -np.inf, -0.0, 0.0, 2.0**-133, 1 / 3, -1.5]), shape)
        if dtype is torch.float32:  # bfloat16 travels through a float32, which makes another NaN of a NaN
            array = np.where(index % 11 == 5, np.nan, array)
    elif dtype is torch.bool:
        array = small % 2 == 1
    elif dtype is torch.uint8:
        array = small
    elif dtype is torch.int8:
        array = small - 125
    elif dtype.is_complex:
        array = large - 1j * index / 8
    elif dtype in (torch.bfloat16, torch.float16):
        array = (small - 125) / 8
    elif dtype.is_floating_point:
        array = large / 8
    else:
        array = large - 500_000
        if dtype is torch.int16:
            array = index * 37 - 1000
    return torch.from_numpy(np.asarray(array)).to(dtype)


@dataclass
class Builder:
    """Cuts global tensors for one rank of `tp` x `dp` ranks; ranks of one data-parallel group lie `tp` apart."""

    rank: int
    tp: int
    dp: int
    sharded: State = field(default_factory=dict)

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp

    @property
    def dp_rank(self) -> int:
        return self.rank // self.tp

    def split(self, key: str, shape: tuple[int, ...], dtype: torch.dtype, axis: int, **more: Any) -> None:
        """Add a tensor that the tensor-parallel ranks cut along `axis` and the data-parallel ranks hold alike."""
        part = values(key, shape, dtype).chunk(self.tp, axis)[self.tp_rank].contiguous()
        cut = (axis, self.tp_rank, self.tp)
        self.sharded[key] = ShardedTensor.from_rank_offsets(key, part, cut, replica_id=(0, 0, self.dp_rank), **more)

    def whole(self, key: str, shape: tuple[int, ...], dtype: torch.dtype, **more: Any) -> None:
        """Add a tensor that all ranks hold alike; one of them writes it."""
        replica_id = (0, self.tp_rank, self.dp_rank)
        self.sharded[key] = ShardedTensor.from_rank_offsets(
            key, values(key, shape, dtype), replica_id=replica_id, **more
        )

    def layers(self, key: str, shape: tuple[int, ...], dtype: torch.dtype, axis: int | None) -> None:
        """Add a list of layers that are stacked into one tensor: dimension 0 of `shape` counts them, `axis` is cut."""
        stacked = values(key, shape, dtype)
        found = []
        for layer in range(shape[0]):
            cuts = [(0, layer, shape[0])]
            part, replica_id = stacked[layer], (0, self.tp_rank, self.dp_rank)
            if axis is not None:
                part = part.chunk(self.tp, axis - 1)[self.tp_rank]
                cuts.append((axis, self.tp_rank, self.tp))
                replica_id = (0, 0, self.dp_rank)
            made = ShardedTensor.from_rank_offsets(
                key, part.contiguous(), *cuts, replica_id=replica_id, prepend_axis_num=1
            )
            found.append(made)
        self.sharded[key] = found

    def gated(self, key: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Add a tensor of two halves (gate and input), of which each rank holds a part of either: two chunks a rank."""
        quarters = values(key, shape, dtype).chunk(2 * self.tp)

        def build(key: str, data: torch.Tensor, replica_id: Any, flattened_range: Any = None) -> list[ShardedTensor]:
            at = (self.tp_rank, self.tp + self.tp_rank)
            cuts = [(0, place, 2 * self.tp) for place in at]
            return [
                ShardedTensor.from_rank_offsets(key, half.contiguous(), cut, replica_id=replica_id)
                for half, cut in zip(data.chunk(2), cuts, strict=True)
            ]

        held = torch.cat([quarters[self.tp_rank], quarters[self.tp + self.tp_rank]])
        self.sharded[key] = ShardedTensorFactory(key, held, build, torch.cat, (0, 0, self.dp_rank))

    def flat(self, key: str, shape: tuple[int, ...], cuts: list[int], axis: int | None = None) -> None:
        """Add optimizer state: of the rank's chunk of `shape`, cut along `axis`, DP rank i holds [cuts[i], cuts[i+1]).

        The cuts are those of the distributed optimizer, anywhere in a row; a rank without elements adds nothing.
        """
        part = values(key, shape, torch.float32)
        offsets: list[tuple[int, int, int]] = []
        if axis is not None:
            part = part.chunk(self.tp, axis)[self.tp_rank]
            offsets = [(axis, self.tp_rank, self.tp)]
        start, stop = cuts[self.dp_rank], cuts[self.dp_rank + 1]
        if start < stop:
            replica_id = (0, 0 if offsets else self.tp_rank, 0)
            chunk = ShardedTensor.from_rank_offsets(key, part, *offsets, replica_id=replica_id)
            held = part.reshape(-1)[start:stop].clone()
            self.sharded[key] = replace(chunk, data=held, flattened_range=slice(start, stop))

    def object(self, key: str, data: object, shape: tuple[int, ...], at: tuple[int, ...], replica_id: Any) -> None:
        self.sharded[f"{key} {at}"] = ShardedObject(key, data, shape, at, replica_id)


# The checkpoints


def tp2(rank: int) -> tuple[State, State]:
    """Tensor parallel on two ranks: every data type and every way to hold a tensor but the flattened ones; objects."""
    b = Builder(rank, tp=2, dp=1)
    b.split("model.embedding.word_embeddings.weight", (16, 6), torch.float32, 0, allow_shape_mismatch=True)
    b.split("model.output_layer.weight", (5, 8), torch.float32, 1)
    b.layers("model.decoder.layers.self_attention.linear_qkv.weight", (3, 12, 4), torch.bfloat16, 1)
    b.layers("model.decoder.layers.self_attention.linear_proj.weight", (3, 4, 6), torch.bfloat16, 2)
    b.layers("model.decoder.layers.input_layernorm.weight", (3, 4), torch.float32, None)
    b.gated("model.decoder.layers.0.mlp.linear_fc1.weight", (16, 3), torch.bfloat16)
    b.whole("model.decoder.final_layernorm.weight", (7,), torch.bfloat16)
    b.whole("optimizer.state.step", (1,), torch.float32)
    for dtype in (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64):
        b.split(f"types.{_name(dtype)}", (4, 3), dtype, 0)
    for dtype in (torch.float16, torch.float64, torch.complex64, torch.complex128):
        b.split(f"types.{_name(dtype)}", (3, 4), dtype, 1)
    b.split("zeros.weight", (4, 2), torch.float32, 0)
    b.split("bits.float32", (11, 2), torch.float32, 1)
    b.split("bits.bfloat16", (11, 2), torch.bfloat16, 1)
    b.whole("folder/of/weight", (2, 3), torch.float32)
    b.object("rng_state", [_rng_state(b.tp_rank)], (1, 2), (0, b.tp_rank), b.dp_rank)
    for layer in range(3):
        extra = io.BytesIO(f"scales of layer {layer}".encode())
        at = "model.decoder.layers.self_attention.linear_qkv._extra_state"
        b.object(at, extra, (3,), (layer,), (0, b.tp_rank, b.dp_rank))
    b.object("model.decoder.layers.0.mlp._extra_state", None, (1,), (0,), (0, b.tp_rank, 0))
    b.object("bytes", bytes(range(256)), (1,), (0,), (0, b.tp_rank, 0))
    b.object("nested", _nested(), (1, 1, 1), (0, 0, 0), (0, b.tp_rank, 0))
    b.object("folder/of/object", {"depth": 3}, (1,), (0,), (0, b.tp_rank, 0))
    return b.sharded, _common() | {"args": _arguments()}


def dp2(rank: int) -> tuple[State, State]:
    """The distributed optimizer on two data-parallel ranks, in both layouts that tensors have there; plain arguments."""
    b = Builder(rank, tp=1, dp=2)
    shapes = {
        "embedding.word_embeddings.weight": (13, 6),
        "decoder.final_layernorm.weight": (7,),
        "proj.weight": (5, 9),
    }
    cuts = {  # the parameters lie behind each other in one buffer, the last one first, and 65 elements go to rank 0
        "proj.weight": [0, 45, 45],
        "decoder.final_layernorm.weight": [0, 7, 7],
        "embedding.word_embeddings.weight": [0, 13, 78],
    }
    for name, shape in shapes.items():
        b.whole(f"model.{name}", shape, torch.bfloat16, **_mismatch(name))
        for moment in ("fp32_param", "exp_avg", "exp_avg_sq"):
            b.flat(f"optimizer.state.{moment}.model.{name}", shape, cuts[name])
    _bucket(b)
    b.object("optimizer.distributed.dp_group_idx_0.param_state", _param_state(), (1,), (0,), b.dp_rank)
    b.object("rng_state", [_rng_state(b.tp_rank)], (1, 1), (0, 0), b.dp_rank)
    return b.sharded, _common()


def tp2_dp2(rank: int) -> tuple[State, State]:
    """Tensor parallel 2 x data parallel 2: flattened ranges inside tensor-parallel chunks; arguments as Megatron-LM has them."""
    b = Builder(rank, tp=2, dp=2)
    places: dict[str, tuple[tuple[int, ...], int | None, list[int]]] = {
        "embedding.word_embeddings.weight": ((16, 6), 0, [0, 19, 48]),
        "decoder.layers.0.self_attention.linear_proj.weight": ((6, 10), 1, [0, 7, 30]),
        "decoder.layers.0.mlp.linear_fc2.weight": ((2, 4, 6), 2, [0, 23, 24]),
        "decoder.final_layernorm.weight": ((6,), None, [0, 6, 6]),
    }
    for name, (shape, axis, cuts) in places.items():
        if axis is None:
            b.whole(f"model.{name}", shape, torch.bfloat16)
        else:
            b.split(f"model.{name}", shape, torch.bfloat16, axis, **_mismatch(name))
        for moment in ("fp32_param", "exp_avg"):
            b.flat(f"optimizer.state.{moment}.model.{name}", shape, cuts, axis)
    b.object("rng_state", [_rng_state(b.tp_rank)], (1, 2), (0, b.tp_rank), b.dp_rank)
    return b.sharded, _common() | {"args": _arguments(model_type=ModelType.encoder_or_decoder)}


def zero_dim(rank: int) -> tuple[State, State]:
    """0-dim tensors, which no released megatron-core can save: see `_any_offset_is_zero`."""
    b = Builder(rank, tp=2, dp=1)
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        b.whole(f"step.{_name(dtype)}", (), dtype)
    return b.sharded, {"iteration": 7}


def old_names(rank: int) -> tuple[State, State]:
    """Written by 0.6.0: object files lack the last number of their shape when it has more than one."""
    b = Builder(rank, tp=1, dp=2)
    b.whole("model.proj.weight", (5, 9), torch.bfloat16)
    b.flat("optimizer.state.exp_avg.model.proj.weight", (5, 9), [0, 13, 45])
    b.object("rng_state", {"rank": b.dp_rank, "seed": 1234 + b.dp_rank}, (1, 2), (0, b.dp_rank), 0)
    for layer in range(3):
        b.object("extra_state", io.BytesIO(f"layer {layer}".encode()), (3,), (layer,), b.dp_rank)
    for at in range(3):
        b.object("cube", f"object {at}", (1, 1, 3), (0, 0, at), b.dp_rank)
    return b.sharded, {"iteration": 7, "checkpoint_version": 3.0}


@dataclass(frozen=True)
class Golden:
    build: Callable[[int], tuple[State, State]]
    ranks: int
    writer: str = "0.10.0"


GOLDEN = {
    "tp2": Golden(tp2, 2),
    "dp2": Golden(dp2, 2),
    "tp2-dp2": Golden(tp2_dp2, 4),
    "zero-dim": Golden(zero_dim, 2),
    "old-names": Golden(old_names, 2, OLD_WRITER),
}


def _mismatch(name: str) -> dict[str, bool]:
    return {"allow_shape_mismatch": True} if "word_embeddings" in name else {}


def _bucket(b: Builder) -> None:
    """Add one bucket of the layout "fully_sharded_bucket_space": 1-D, each rank's 40 elements in pieces, padding last."""
    prefix = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0"
    for moment in ("param", "exp_avg", "exp_avg_sq"):
        key = f"{prefix}.{moment}"
        mine = values(key, (80,), torch.float32).chunk(2)[b.dp_rank]
        cuts = [(0, 11), (11, 28), (28, 40)] if b.dp_rank == 0 else [(0, 33), (33, 40)]
        b.sharded[key] = [
            ShardedTensor(
                key,
                mine[start:stop].clone(),
                torch.float32,
                local_shape=(40,),
                global_shape=(80,),
                global_offset=(40 * b.dp_rank,),
                axis_fragmentations=(2,),
                flattened_range=slice(start, stop),
                allow_shape_mismatch=True,
            )
            for start, stop in cuts
        ]


def _rng_state(seed: int) -> State:
    return {
        "random_rng_state": random.Random(seed).getstate(),
        "np_rng_state": np.random.RandomState(seed).get_state(),
        "torch_rng_state": torch.Generator().manual_seed(seed).get_state(),
        "cuda_rng_state": torch.arange(seed, seed + 16, dtype=torch.uint8),
        "rng_tracker_states": {"model-parallel-rng": torch.arange(16, dtype=torch.uint8) * (seed + 1)},
    }


def _nested() -> State:
    return {
        "tensor": values("nested.tensor", (2, 3), torch.bfloat16),
        "array": np.arange(6, dtype=np.float64).reshape(2, 3) / 3,
        "parts": [b"\x00\xff", ("a tuple", 1, None), {"deep": [True, -1.5]}],
        "size": torch.Size([2, 3]),
        "type": torch.bfloat16,
    }


def _param_state() -> State:
    """The layout "dp_zero_gather_scatter": all of the optimizer in one object, with keys that are no strings."""
    tensors = {name: values(f"gathered.{name}", (40,), torch.float32) for name in ("param", "exp_avg", "exp_avg_sq")}
    return {
        "buckets_coalesced": True,
        "per_bucket_numel": [{(torch.bfloat16, torch.float32): [40]}],
        0: {(torch.bfloat16, torch.float32): tensors},
    }


def _common() -> State:
    group = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "step": 7, "params": [0, 1, 2]}
    return {
        "checkpoint_version": 3.0,
        "iteration": 7,
        "num_floating_point_operations_so_far": 2**70 + 1,
        "opt_param_scheduler": {
            "max_lr": 3e-4,
            "lr_decay_style": "cosine",
            "num_steps": 56,
            "wd_incr_style": "constant",
        },
        "optimizer": {
            "optimizer": {"param_groups": [group, {**group, "weight_decay": 0.0, "params": []}]},
            "grad_scaler": {"scale": torch.tensor([65536.0]), "growth_tracker": torch.tensor([3], dtype=torch.int32)},
            "common_step": torch.tensor(7.0),
        },
        "nested": {"list": [1, {"a": (1, 2)}, []], "none": None, "text": "Schlüssel", 5: "a key that is a number"},
        "tensor": values("common.tensor", (3, 4), torch.bfloat16),
    }


def _arguments(**more: Any) -> argparse.Namespace:
    known = {
        "num_layers": 3,
        "hidden_size": 4,
        "padded_vocab_size": 16,
        "tensor_model_parallel_size": 2,
        "params_dtype": torch.bfloat16,
        "data_path": ["a", "b"],
        "lr": 3e-4,
        "load": None,
    }
    return argparse.Namespace(**known, **more)


# Writing and checking, on every rank


def _write(rank: int, name: str, folder: Path, store: str) -> None:
    golden = GOLDEN[name]
    _join(rank, golden.ranks, store)
    sharded, common = golden.build(rank)
    _record_truth(name, sharded, common)
    _run_without_cuda()
    _write_ranges_one_by_one(store + ".lock")
    if name == "zero-dim":
        zarr_strategy._should_create_array = _any_offset_is_zero
    strategy = zarr_strategy.ZarrSaveShardedStrategy("zarr", 1)
    dist_checkpointing.save({**sharded, **common}, str(folder), sharded_strategy=strategy)
    dist.destroy_process_group()


def _check(rank: int, name: str, folder: Path, store: str) -> None:
    """Read a checkpoint with megatron-core's own loader, on the layout that wrote it, and compare every bit."""
    golden = GOLDEN[name]
    _join(rank, golden.ranks, store)
    os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"  # its torch.load dates from when pickle was the default
    sharded, common = golden.build(rank)
    request, _ = golden.build(rank)
    for leaf in _leaves(request):
        if leaf.data is not None and not isinstance(leaf, ShardedObject):
            leaf.data = torch.zeros_like(leaf.data)
    loaded = dist_checkpointing.load(request, str(folder), TensorStoreLoadShardedStrategy())
    wanted = {**_without_sharding(sharded), **common}
    assert loaded.keys() == wanted.keys(), loaded.keys() ^ wanted.keys()
    for key in wanted:
        if _bits(loaded[key]) != _bits(wanted[key]):
            raise AssertionError(f"{name}, rank {rank}: megatron-core reads {loaded[key]} for {key}, not {wanted[key]}")
    dist.destroy_process_group()


def _bits(value: Any) -> tuple[Any, bytearray]:
    data = bytearray()
    return _encode(value, data), data


def _join(rank: int, ranks: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)


def _run_without_cuda() -> None:
    torch.cuda.synchronize = lambda *_: None


def _write_ranges_one_by_one(lock: str) -> None:
    """Let one rank at a time write a flattened range: the rank that made the array takes no lock, and loses to others."""
    write = zarr_strategy._save_to_existing_array

    def locked(tensor: ShardedTensor, array: Any) -> None:
        with open(lock, "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            write(tensor, array)

    zarr_strategy._save_to_existing_array = locked


def _any_offset_is_zero(tensor: ShardedTensor) -> bool:
    """The rule for who creates an array, true of 0-dim tensors too.

    `set(offset) == {0}` is false of the empty offset, so nobody creates the array, and the rank that is to write it
    fails: "Array ... not found".
    """
    at_start = tensor.flattened_range is None or tensor.flattened_range.start == 0
    return zarr_strategy.is_main_replica(tensor.replica_id) and not any(tensor.global_offset) and at_start


def _leaves(state: Any) -> Iterator[Any]:
    if isinstance(state, dict | list):
        for value in state.values() if isinstance(state, dict) else state:
            yield from _leaves(value)
    else:
        yield state


def _without_sharding(state: Any) -> Any:
    """What a load should return for this state: the data in place of what describes it."""
    if isinstance(state, dict):
        return {key: _without_sharding(value) for key, value in state.items()}
    return [_without_sharding(value) for value in state] if isinstance(state, list) else state.data


# The record of the true values


def _record_truth(name: str, sharded: State, common: State) -> None:
    """Write `<name>.json` and `<name>.bin`, on rank 0. Collective."""
    tensors: dict[str, Any] = {}
    objects: dict[str, Any] = {}
    for leaf in _leaves(sharded):
        if isinstance(leaf, ShardedObject):
            objects[leaf.unique_key] = leaf.data
            continue
        for one in _leaves(leaf.build()) if isinstance(leaf, ShardedTensorFactory) else [leaf]:
            tensors[one.key] = (tuple(one.global_shape), one.dtype, one.max_allowed_chunks())
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, (tensors, objects))
    if dist.get_rank() > 0:
        return
    for more_tensors, more_objects in reversed(everybody):
        tensors.update(more_tensors)
        objects.update(more_objects)
    data = bytearray()
    record = {
        "written_by": f"megatron-core {WRITER}",
        "ranks": dist.get_world_size(),
        "tensors": {
            key: _put(values(key, shape, dtype), data) | {"chunks": list(chunks)}
            for key, (shape, dtype, chunks) in sorted(tensors.items())
        },
        "objects": {key: _encode(value, data) for key, value in sorted(objects.items())},
        "common": _encode(common, data),
    }
    (HERE / f"{name}.json").write_text(_text(record), encoding="utf-8")
    (HERE / f"{name}.bin").write_bytes(data)


def _text(record: State) -> str:
    """JSON with one line for each tensor, object and plain value."""
    lines = []
    for part, content in record.items():
        if part == "common":
            content = dict(content["dict"])
        if isinstance(content, dict):
            inner = [f"    {json.dumps(key)}: {json.dumps(value)}" for key, value in content.items()]
            lines.append(f"  {json.dumps(part)}: {{\n" + ",\n".join(inner) + "\n  }")
        else:
            lines.append(f"  {json.dumps(part)}: {json.dumps(content)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _encode(value: Any, data: bytearray) -> Any:
    """Return `value` as JSON that says what it was; the elements of tensors and arrays are added to `data`."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.Tensor):
        return {"tensor": _put(value, data)}
    if isinstance(value, np.ndarray):
        return {"ndarray": _put(torch.from_numpy(value.astype(value.dtype)), data, str(value.dtype))}
    if isinstance(value, list):
        return [_encode(one, data) for one in value]
    if isinstance(value, torch.Size):
        return {"Size": list(value)}
    if isinstance(value, tuple):
        return {"tuple": [_encode(one, data) for one in value]}
    if isinstance(value, dict):
        return {"dict": [[_encode(key, data), _encode(one, data)] for key, one in value.items()]}
    if isinstance(value, argparse.Namespace):
        return {"Namespace": [[key, _encode(one, data)] for key, one in vars(value).items()]}
    if isinstance(value, bytes | io.BytesIO):
        raw = value.getvalue() if isinstance(value, io.BytesIO) else value
        return {type(value).__name__: raw.hex()}
    if isinstance(value, torch.dtype):
        return {"dtype": _name(value)}
    assert isinstance(value, enum.Enum), type(value)
    return {"enum": [f"{type(value).__module__}.{type(value).__qualname__}", value.name, value.value]}


def _put(tensor: torch.Tensor, data: bytearray, dtype: str | None = None) -> State:
    at = len(data)
    data += tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return {"dtype": dtype or _name(tensor.dtype), "shape": list(tensor.shape), "at": at, "bytes": len(data) - at}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _run(rank: int, work: Callable[..., None], *arguments: Any) -> None:
    work(rank, *arguments)


def main() -> None:
    written = [name for name, golden in GOLDEN.items() if golden.writer == WRITER and "--check" not in sys.argv]
    read = [] if WRITER == OLD_WRITER else [*GOLDEN]  # 0.6.0 cannot read the names of later ones
    for work, names in ((_write, written), (_check, read)):
        for name in names:
            folder = HERE / name
            if work is _write:
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
            with tempfile.TemporaryDirectory() as scratch:
                arguments = (work, name, folder, f"{scratch}/store")
                torch.multiprocessing.start_processes(_run, arguments, GOLDEN[name].ranks, start_method="fork")
            print(f"{name}: {'written' if work is _write else 'read by megatron-core, every bit equal'}")


if __name__ == "__main__":
    main()
