"""Two pipeline stages, one on each rank: saved as one model, killed at any moment, and resumed by the same command.

torchrun --standalone --nproc-per-node 2 examples/pipeline.py
torchrun --standalone --nproc-per-node 4 examples/pipeline.py --steps 400
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from ckpt import Checkpointer


def stage_of(rank: int, num_stages: int) -> nn.Module:
    """Return the layers of one stage. Each layer keeps its place, and so its name, in the whole model."""
    blocks = [nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.1)) for _ in range(7)]
    layers = [*blocks, nn.Linear(32, 1)]
    stages = [place * num_stages // len(layers) for place in range(len(layers))]
    return nn.Sequential(
        *(layer if stage == rank else nn.Identity() for layer, stage in zip(layers, stages, strict=True))
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--folder", default="outputs/pipeline")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, num_stages = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = stage_of(rank, num_stages)
    torch.manual_seed(1 + rank)  # each stage draws its own dropout masks
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    stage = PipelineStage(model, rank, num_stages, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)

    with Checkpointer(
        args.folder, model=model, optimizer=optimizer, scheduler=scheduler, every=20, keep_last=3
    ) as checkpoints:
        start = checkpoints.restore()
        for step in range(start + 1, args.steps + 1):
            inputs = torch.randn(16, 32, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            losses: list[torch.Tensor] = []
            schedule.step(
                *([inputs] if stage.is_first else []),
                **({"target": inputs.square().mean(1, keepdim=True), "losses": losses} if stage.is_last else {}),
            )
            optimizer.step()
            scheduler.step()
            checkpoints.step(step)
            if stage.is_last:
                print(f"step {step}: loss {torch.stack(losses).mean().item()!r}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
