"""A training loop on one process, or on many with DDP: saved, killed at any moment, and resumed by the same command.

python examples/plain_loop.py
torchrun --standalone --nproc-per-node 2 examples/plain_loop.py
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ckpt import Checkpointer


class Batches:
    """Random batches; each rank has its own, and each a position that a checkpoint keeps."""

    def __init__(self, rank: int) -> None:
        self.rank, self.position = rank, 0

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        self.position += 1
        generator = torch.Generator().manual_seed(1000 * self.position + self.rank)
        inputs = torch.randn(16, 32, generator=generator)
        return inputs, inputs.square().mean(1, keepdim=True)

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--folder", default="outputs/plain_loop")
    args = parser.parse_args()

    rank = int(os.environ.get("RANK", "0"))
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 1))
    if dist.is_initialized():
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    data = Batches(rank)

    objects = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "data": data}
    with Checkpointer(args.folder, **objects, every=20, keep_last=3) as checkpoints:
        start = checkpoints.restore()
        for step in range(start + 1, args.steps + 1):
            inputs, wanted = data.next()
            loss = nn.functional.mse_loss(model(inputs), wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            checkpoints.step(step, metrics={"loss": loss.item()})
            if rank == 0:
                print(f"step {step}: loss {loss.item()!r}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
