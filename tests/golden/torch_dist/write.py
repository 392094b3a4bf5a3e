"""Write a golden torch_dist checkpoint with the real Megatron-Core, on 2 gloo ranks, into a folder named after its version.

    python3.11 -m venv megatron-env
    megatron-env/bin/pip install torch==2.13.0 numpy psutil megatron-core==0.10.0      (then again with megatron-core==0.16.1)
    megatron-env/bin/python tests/golden/torch_dist/write.py

Patched in the process: there is no GPU, so `torch.cuda.synchronize` does nothing, and `torch.cuda.current_device` says "cpu".
0.10.0 tells torch of its own rank's ranges of a 1-D tensor alone; torch 2.13 then misses the others' and refuses, so this check is
off. The files are the same. It also calls `numpy.product`, which NumPy 2 has as `prod`,
and torch's `_write_item` with the arguments of its time.
"""

from __future__ import annotations

import argparse
import io
import shutil
import sys
import tempfile
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.checkpoint.filesystem import SerializationFormat, _StorageWriterTransforms

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
VERSION = version("megatron-core")


def pieces(key: str, cut: Any, rank: int) -> Any:
    """The ShardedTensors of one rank."""
    from contents import values
    from megatron.core.dist_checkpointing import ShardedTensor

    whole = values(key, cut.shape, cut.dtype)
    replica = 0 if cut.ranges or cut.axis is not None else rank
    mine = whole if cut.axis is None else whole.chunk(2, cut.axis)[rank]
    offsets = () if cut.axis is None else ((cut.axis, rank, 2),)
    found = []
    for layer in range(cut.shape[0]) if cut.layers else (None,):
        chunk = (mine if layer is None else mine[layer]).contiguous()
        where = offsets if layer is None else ((0, layer, cut.shape[0]), *offsets)
        more = {"replica_id": replica, "prepend_axis_num": int(cut.layers)}
        if cut.padded:
            more["allow_shape_mismatch"] = True
        if cut.ranges is None:
            found.append(ShardedTensor.from_rank_offsets(key, chunk, *where, **more))
        else:
            for start, stop in cut.ranges[rank]:
                part = chunk.flatten()[start:stop].clone()
                found.append(
                    ShardedTensor.from_rank_offsets_flat(
                        key, part, tuple(chunk.shape), *where, flattened_range=slice(start, stop), **more
                    )
                )
    return found


def _write_item(of_torch: Any, stream: Any, data: Any, item: Any, key: str) -> Any:
    return of_torch(_StorageWriterTransforms(), stream, data, item, key, SerializationFormat.TORCH_SAVE)


def write(rank: int, folder: str, store: str) -> None:
    """Save on one rank."""
    from contents import ARGUMENTS, RANGES, WHOLE_CHUNKS, common, random_state
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedObject
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.enums import ModelType

    torch.set_num_threads(1)
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_device = lambda: "cpu"
    for module in [one for name, one in sys.modules.items() if name.startswith("torch.distributed._shard")]:
        if "check_tensor" in vars(module):
            module.check_tensor = lambda *_: None
    numpy.product = numpy.prod
    if VERSION == "0.10.0":
        filesystem_async._write_item = partial(_write_item, filesystem_async._write_item)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    with_ranges = hasattr(dist_checkpointing.ShardedTensor, "from_rank_offsets_flat")
    cuts = WHOLE_CHUNKS | (RANGES if with_ranges else {})
    state = {
        "tensors": {str(number): pieces(key, cut, rank) for number, (key, cut) in enumerate(cuts.items())},
        "rng": ShardedObject("rng_state", random_state(rank), (2,), (rank,)),
        "extra": ShardedObject("decoder.extra_state", io.BytesIO(b"extra"), (1,), (0,), replica_id=rank),
        "rerun": ShardedObject("rerun", {"mode": ModelType.encoder_or_decoder, "step": 5}, (1,), (0,), replica_id=rank),
        "args": argparse.Namespace(**ARGUMENTS, model_type=ModelType.encoder_or_decoder),
        **common(),
    }
    dist_checkpointing.save(state, folder, ("torch_dist", 1))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    folder = HERE / f"core-{VERSION}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    with tempfile.TemporaryDirectory() as scratch:
        torch.multiprocessing.start_processes(write, (str(folder), f"{scratch}/store"), 2, start_method="spawn")
