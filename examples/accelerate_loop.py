"""Accelerate, on one process or on many: `save_state` and `load_state` as ever, killed at any moment, and resumed by the same command.

pip install accelerate
python examples/accelerate_loop.py
torchrun --standalone --nproc-per-node 2 examples/accelerate_loop.py
"""

import argparse

import torch
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ckpt.integrations.huggingface_accelerate import CkptAccelerator


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--folder", default="outputs/accelerate_loop")
    args = parser.parse_args()

    project = ProjectConfiguration(args.folder, automatic_checkpoint_naming=True, total_limit=3)
    loading = DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = CkptAccelerator(cpu=True, project_config=project, dataloader_config=loading)
    set_seed(0)
    inputs = torch.randn(480, 32)
    data = TensorDataset(inputs, inputs.square().mean(1, keepdim=True))
    loader = DataLoader(data, batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(0))
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps * accelerator.num_processes)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    step = Step()
    accelerator.register_for_checkpointing(step)

    if accelerator.find_latest() is not None:
        accelerator.load_state()
    while step.number < args.steps:
        epoch, position = divmod(step.number, len(loader))
        loader.set_epoch(epoch)
        for batch, wanted in accelerator.skip_first_batches(loader, position):
            loss = nn.functional.mse_loss(model(batch), wanted)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            step.number += 1
            if step.number % 20 == 0:
                accelerator.save_state()
            accelerator.print(f"step {step.number}: loss {loss.item()!r}", flush=True)
            if step.number == args.steps:
                break
    accelerator.end_training()


class Step:
    """The number of steps that were made, which a checkpoint keeps."""

    def __init__(self) -> None:
        self.number = 0

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.number = state["number"]


if __name__ == "__main__":
    main()
