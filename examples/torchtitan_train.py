"""torchtitan's own trainer with FSDP2, killed at any moment, and resumed by the same command; `checkpoint=` is the only line for it.

torchrun --standalone --nproc-per-node 2 examples/torchtitan_train.py     (lines marked CPU are not needed on GPUs)
"""

import argparse
from types import SimpleNamespace
from typing import Any

import cpu_for_torchtitan  # CPU: before the trainer
import torch
import torch.distributed as dist
from torch.utils.data import Dataset
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.config import DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer

from ckpt.integrations.torchtitan import CkptManager


class Rows(Dataset):
    """Random tokens; each rank has its own."""

    def __init__(self, rank: int, length: int) -> None:
        self.rank, self.length = rank, length

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, position: int) -> Any:
        generator = torch.Generator().manual_seed(1000 * position + self.rank)
        row = torch.randint(0, 2048, (self.length + 1,), generator=generator)
        return {"input": row[:-1]}, row[1:]


def loader(*, dp_rank: int, dp_world_size: int, seq_len: int, local_batch_size: int, **_: Any) -> Any:
    return ParallelAwareDataloader(Rows(dp_rank, seq_len), dp_rank, dp_world_size, batch_size=local_batch_size)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--folder", default="outputs/torchtitan_train")
    args = parser.parse_args()

    spec = model_registry("debugmodel", attn_backend="varlen")
    spec.model.layers = spec.model.layers[:1]
    spec.model.layers[0].attention.inner_attention = ScaledDotProductAttention.Config()  # CPU
    trainer = Trainer.Config(
        model_spec=spec,
        dump_folder=args.folder,
        checkpoint=CkptManager.Config(enable=True, interval=20, keep_latest_k=3, last_save_model_only=False),
        tokenizer=SimpleNamespace(build=lambda **_: None),
        dataloader=SimpleNamespace(build=loader),
        loss=CrossEntropyLoss.Config(global_vocab_size=2048),
        optimizer=default_adamw(lr=8e-4),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        training=TrainingConfig(local_batch_size=2, seq_len=32, steps=args.steps, disable_cuda_graphs=True),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),  # CPU
        metrics=MetricsProcessor.Config(log_freq=1),
        debug=DebugConfig(seed=0, enable_structured_logging=False),
        activation_checkpoint=None,
    ).build()
    cpu_for_torchtitan.sum_gradients(trainer.model_parts[0])  # CPU
    if dist.get_rank() == 0:
        trainer.metrics_processor.log = lambda step, loss, *_, **__: print(f"step {step}: loss {loss!r}", flush=True)
    trainer.train()
    trainer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
