"""A Lightning Trainer, on one process, or on many with DDP: saved, killed at any moment, and resumed by the same command.

pip install -e '.[lightning]'
python examples/lightning_trainer.py
torchrun --standalone --nproc-per-node 2 examples/lightning_trainer.py
"""

import argparse
import os
from collections.abc import Iterator

import torch
from lightning import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from ckpt.integrations.lightning import CkptCheckpointIO, RandomStates


class Batches:
    """Random batches, 25 in an epoch; each rank has its own. The position is kept in a checkpoint."""

    def __init__(self, rank: int) -> None:
        self.rank, self.num_drawn = rank, 0

    def __len__(self) -> int:
        return 25

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for _ in range(self.num_drawn % len(self), len(self)):
            self.num_drawn += 1
            generator = torch.Generator().manual_seed(1000 * self.num_drawn + self.rank)
            inputs = torch.randn(16, 32, generator=generator)
            yield inputs, inputs.square().mean(1, keepdim=True)

    def state_dict(self) -> dict[str, int]:
        return {"num_drawn": self.num_drawn}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.num_drawn = state["num_drawn"]


class Regression(LightningModule):
    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps
        self.net = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 1))

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        inputs, wanted = batch
        loss = nn.functional.mse_loss(self.net(inputs), wanted)
        if self.trainer.is_global_zero:
            print(f"step {self.global_step + 1}: loss {loss.item()!r}", flush=True)
        return loss

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--folder", default="outputs/lightning_trainer")
    args = parser.parse_args()

    seed_everything(0, verbose=False)
    trainer = Trainer(
        accelerator="cpu", devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")), max_steps=args.steps,
        plugins=[CkptCheckpointIO()],
        callbacks=[RandomStates(), ModelCheckpoint(args.folder, every_n_train_steps=20, save_last=True)],
        logger=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Regression(args.steps), Batches(int(os.environ.get("RANK", "0"))), ckpt_path="last")


if __name__ == "__main__":
    main()
