"""Write a golden checkpoint as Megatron-LM saves fsdp_dtensor, on 2 gloo ranks, into a folder named after Megatron-Core's version.

    python3.11 -m venv megatron-env
    megatron-env/bin/pip install torch==2.13.0 numpy psutil megatron-core==0.16.1
    megatron-env/bin/python tests/golden/fsdp_dtensor/write.py

`save_checkpoint` of megatron/training/checkpointing.py gives the state dict's DTensors, which are cut unevenly, the boxes that they are
of (`preprocess_state_dict_for_uneven_dtensor`), and calls `torch.distributed.checkpoint.save`. Megatron-FSDP itself needs a GPU, so the
DTensors are made here. It writes no `metadata.json`.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.checkpoint import FileSystemWriter, save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))


def write(rank: int, folder: str, store: str) -> None:
    """Save on one rank."""
    from contents import UNEVEN, param_to_group_meta, plain, tensors
    from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import (
        preprocess_state_dict_for_uneven_dtensor,
    )

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    state: dict[str, Any] = {"optimizer": {"param_to_group_meta": param_to_group_meta()}, **plain()}
    for path, whole in tensors().items():
        mine = whole.split(UNEVEN[whole.shape[0]])[rank].contiguous()
        at = state
        for step in path[:-1]:
            at = at.setdefault(step, {})
        at[path[-1]] = DTensor.from_local(mine, mesh, [Shard(0)], shape=whole.shape, stride=whole.stride())
    preprocess_state_dict_for_uneven_dtensor(state)
    save(state, storage_writer=FileSystemWriter(folder))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    folder = HERE / f"core-{version('megatron-core')}" / "iter_0000007"
    shutil.rmtree(folder.parent, ignore_errors=True)
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch:
        torch.multiprocessing.start_processes(write, (str(folder), f"{scratch}/store"), 2, start_method="spawn")
