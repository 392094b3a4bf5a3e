"""Write the golden checkpoints beside this file with torch_checkpointing, in an environment that has it: torch 2.11 or newer.

python -m tests.golden.torch_checkpointing.write

    sharded/step-7          4 gloo ranks, a mesh of 2 x 2: items with and without a resharder, in JSON and raw bytes, own ones of ranks
    sharded/step-8          the next save of the same manager, which has no metadata.pkl
    safetensors/step-7      2 ranks: the model in safetensors, and its export for Hugging Face
    alone/step-7            one process

torch_checkpointing 0.1.1 exchanges the metadata of ranks by CUDA tensors. Here gloo carries it, as it is.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.device_mesh import init_device_mesh

from tests.golden.torch_checkpointing.contents import own, placed, raw, state

HERE = Path(__file__).resolve().parent


def _gathered(self: Any, data: Any, process_group: Any = None) -> dict[int, Any]:
    found: list[Any] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(found, data, group=process_group)
    return dict(enumerate(found))


def manager(*, model: str = "") -> Any:
    """A manager that saves in the foreground, of items as `contents` names them. `model`: its layout."""
    from torch_checkpointing import CheckpointManager
    from torch_checkpointing.checkpoint_layout import (
        JsonSerialization,
        LayoutInfo,
        RawSerialization,
        SafetensorsSerialization,
    )
    from torch_checkpointing.default_resharder import DefaultResharder
    from torch_checkpointing.metadata_manager import DefaultMetadataManager
    from torch_checkpointing.schema import ItemSpec
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    DefaultMetadataManager._all_gather_pickled_data = _gathered
    config = CheckpointManager.Config.with_sync_save()
    config.storage_config = LocalFileSystemStorageConfig(use_direct_io=False)
    layout = LayoutInfo(model, SafetensorsSerialization()) if model else None
    config.items = {
        "model": ItemSpec(resharder=DefaultResharder(), layout=layout, required=False),
        "optimizer": ItemSpec(resharder=DefaultResharder(), required=False),
        "run": ItemSpec(layout=LayoutInfo("run_{rank}.json", JsonSerialization()), required=False),
        "tokens": ItemSpec(layout=LayoutInfo("data/tokens_{rank}.bin", RawSerialization()), required=False),
    }
    return config.build()


def write(rank: int, ranks: int, out: str, store: str) -> None:
    """Save on one rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}-{ranks}", rank=rank, world_size=ranks)
    whole = state()
    if ranks == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        mine = placed(whole, mesh)
        saves = manager()
        saves.save(f"{out}/sharded/step-7", mine | {"own": own(rank), "tokens": raw(rank)})
        saves.save(f"{out}/sharded/step-8", {"model": mine["model"], "optimizer": mine["optimizer"]})
    else:
        mesh = init_device_mesh("cpu", (1, 2))
        model = {name: one for name, one in placed(whole["model"], mesh).items() if name != "plain"}
        saves = manager(model="model_{rank}.safetensors")
        saves.save(f"{out}/safetensors/step-7", {"model": {"inner": model}, "step": 7})
        dist.barrier()
        from torch_checkpointing.hf.consolidation import consolidate_hf_safetensors_checkpoint
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        storage = LocalFileSystemStorageConfig(use_direct_io=False)
        consolidate_hf_safetensors_checkpoint(f"{out}/safetensors/step-7", storage_config=storage)
    saves.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        Path(scratch, "out").mkdir()
        for ranks in (4, 2):
            arguments = (ranks, f"{scratch}/out", f"{scratch}/store")
            torch.multiprocessing.start_processes(write, arguments, ranks, start_method="spawn")
        alone = manager()
        alone.save(f"{scratch}/out/alone/step-7", state() | {"own": own(0), "tokens": raw(0)})
        alone.close()
        for folder in Path(scratch, "out").iterdir():
            shutil.rmtree(HERE / folder.name, ignore_errors=True)
            shutil.copytree(folder, HERE / folder.name)
