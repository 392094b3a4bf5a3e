"""Write the golden checkpoints of torch.distributed.checkpoint beside this file, on 2 gloo ranks with FSDP2.

python tests/golden/dcp/write.py              torch-2.13.0: model and optimizer by get_state_dict, saved by dcp.save
python tests/golden/dcp/write.py torchtitan   torchtitan-0.3.0: by its CheckpointManager, in an environment that has it (see .ci/full)
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing
from torch.distributed.checkpoint.state_dict import get_state_dict

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))


def by_torch(rank: int, folder: Path) -> None:
    """As torch's tutorials save."""
    from contents import run_of

    model, optimizer = get_state_dict(*run_of(2, filled=True))
    dcp.save({"model": model, "optimizer": optimizer, "step": 7}, checkpoint_id=folder / "step-7")


def by_torchtitan(rank: int, folder: Path) -> None:
    """As torchtitan's trainer saves: step-7, with a state of the data loader and the schedule."""
    from contents import run_of
    from torch.utils.data import Dataset
    from torchtitan.components.checkpointer import CheckpointManager
    from torchtitan.components.dataloader import ParallelAwareDataloader
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

    class Numbers(Dataset):
        def __len__(self) -> int:
            return 100

        def __getitem__(self, position: int) -> int:
            return position

    class TrainState:
        def state_dict(self) -> dict[str, int]:
            return {"step": 7, "ntokens_seen": 99}

        def load_state_dict(self, state: dict[str, int]) -> None:
            raise NotImplementedError

    model, filled = run_of(2, filled=True)
    optimizers = default_adamw(lr=0.25).build(model_parts=[model])
    (inner,) = optimizers.optimizers
    for parameter in model.parameters():
        inner.state[parameter] = dict(filled.state[parameter])
    manager = CheckpointManager.Config(enable=True, interval=1).build(
        dataloader=ParallelAwareDataloader(Numbers(), rank, 2, batch_size=2),
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=LRSchedulersContainer.Config(warmup_steps=2).build(optimizers=optimizers, training_steps=10),
        states={"train_state": TrainState()},
        sd_adapter=None,
        base_folder=str(folder),
    )
    manager.save(7)
    manager.close()


def write(rank: int, kind: str, folder: str, store: str) -> None:
    """Save on one rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    (by_torchtitan if kind == "torchtitan" else by_torch)(rank, Path(folder))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    kind = (sys.argv[1:] or ["torch"])[0]
    folder = HERE / f"{kind}-{version(kind).partition('+')[0]}"
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory() as scratch:
        arguments = (kind, f"{scratch}/saved", f"{scratch}/store")
        torch.multiprocessing.start_processes(write, arguments, 2, start_method="spawn")
        step = next(Path(scratch, "saved").rglob("step-7"))
        shutil.copytree(step, folder / "step-7")
