"""FSDP2, saved and resumed on any number of ranks, by the same command.

torchrun --standalone --nproc-per-node 2 examples/fsdp2.py
torchrun --standalone --nproc-per-node 3 examples/fsdp2.py --steps 400
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ckpt import Checkpointer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--folder", default="outputs/fsdp2")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)), nn.Linear(64, 1))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)

    with Checkpointer(
        args.folder, model=model, optimizer=optimizer, scheduler=scheduler, every=20, keep_last=3, mode="async"
    ) as checkpoints:
        start = checkpoints.restore()
        for step in range(start + 1, args.steps + 1):
            generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
            inputs = torch.randn(16, 64, generator=generator)
            loss = nn.functional.mse_loss(model(inputs), inputs.square().mean(1, keepdim=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            checkpoints.step(step)
            if dist.get_rank() == 0:
                print(f"step {step}: loss {loss.item()!r}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
