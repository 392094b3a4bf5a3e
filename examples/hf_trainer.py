"""Hugging Face's Trainer, on one process, or on many with DDP: killed at any moment, and resumed by the same command.

pip install -e '.[huggingface]'
python examples/hf_trainer.py
torchrun --standalone --nproc-per-node 2 examples/hf_trainer.py
"""

import argparse
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments

from ckpt.integrations.huggingface import CkptTrainer


class Sequences(Dataset):
    """Random walks: each token is near the one before."""

    def __len__(self) -> int:
        return 200

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        steps = torch.randint(-2, 3, (32,), generator=torch.Generator().manual_seed(number))
        tokens = (steps.cumsum(0) + number) % 64
        return {"input_ids": tokens, "labels": tokens}


class Losses(TrainerCallback):
    """Prints the loss of each step."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        if "loss" in logs and state.is_world_process_zero:
            print(f"step {state.global_step}: loss {logs['loss']!r}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--folder", default="outputs/hf_trainer")
    args = parser.parse_args()

    arguments = TrainingArguments(
        args.folder,
        max_steps=args.steps,
        per_device_train_batch_size=4,
        save_steps=20,
        save_total_limit=3,
        logging_steps=1,
        disable_tqdm=True,
        report_to="none",
        use_cpu=True,
    )
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2))
    trainer = CkptTrainer(model, arguments, train_dataset=Sequences(), callbacks=[Losses()], ckpt={"mode": "async"})
    trainer.train(resume_from_checkpoint="latest")


if __name__ == "__main__":
    main()
