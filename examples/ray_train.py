"""Ray Train: each worker is a rank. A worker or a node that is lost ends them all; Ray calls `train` again on what is left, and it goes on.

pip install -e '.[ray]' 'ray[train]' && python examples/ray_train.py
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ckpt import Checkpointer


def train(config: dict[str, Any]) -> None:
    """Run in each worker, which is a member of torch's default process group."""
    rank = ray.train.get_context().get_world_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 512), nn.GELU(), nn.Linear(512, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with Checkpointer(config["folder"], model=model, optimizer=optimizer, every=config["every"], keep_last=3) as checkpoints:
        start = checkpoints.restore()
        if rank == 0:
            print(f"begins after step {start}", flush=True)
        for step in range(start + 1, config["steps"] + 1):
            generator = torch.Generator().manual_seed(1000 * step + rank)
            inputs = torch.randn(16, 32, generator=generator)
            loss = nn.functional.mse_loss(model(inputs), inputs.square().mean(1, keepdim=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            checkpoints.step(step, metrics={"loss": loss.item()})
            ray.train.report({"loss": loss.item(), "step": step})
            if rank == 0:
                print(f"step {step}: loss {loss.item()!r}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--folder", default="outputs/ray_train")
    parser.add_argument("--workers", type=int, nargs=2, default=(1, 2), metavar=("LEAST", "MOST"))
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as ray_folder:
        trainer = TorchTrainer(
            train,
            # An absolute path, which all nodes see: Ray runs its workers in a folder of their own.
            train_loop_config={"folder": str(Path(args.folder).absolute()), "steps": args.steps, "every": args.every},
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ScalingConfig(num_workers=tuple(args.workers)),
            run_config=RunConfig(storage_path=ray_folder, failure_config=FailureConfig(max_failures=3)),
        )
        trainer.fit()


if __name__ == "__main__":
    main()
