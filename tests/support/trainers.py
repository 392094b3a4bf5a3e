"""A tiny program of Hugging Face's Trainer, for tests: a model of random weights, and what it prints."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from ckpt.integrations.huggingface import CkptTrainer

STEPS = 12


class Stopped(Exception):
    """In place of a kill."""


class Sequences(Dataset):
    def __init__(self, count: int = 40) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 16, (8,), generator=torch.Generator().manual_seed(number))
        return {"input_ids": tokens, "labels": tokens}


class Seen(TrainerCallback):
    """Keeps losses, and which steps were saved; does something at the end of a step."""

    def __init__(self, at: int = 0, do: Callable[[], None] = lambda: None) -> None:
        self.losses: dict[int, float] = {}
        self.saved: list[int] = []
        self._at, self._do = at, do

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        if "loss" in logs:
            self.losses[state.global_step] = logs["loss"]

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.saved.append(state.global_step)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._at and state.global_step == self._at:
            self._do()


def stop() -> None:
    raise Stopped


def model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=16,
        n_positions=8,
        n_embd=8,
        n_layer=1,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        loss_type="ForCausalLM",
    )
    return GPT2LMHeadModel(config)


def adapted() -> Any:
    """The model with an adapter of PEFT."""
    from peft import LoraConfig, get_peft_model

    with warnings.catch_warnings():  # PEFT 0.21 asks transformers 5.24 for a name of old
        warnings.simplefilter("ignore", FutureWarning)
        return get_peft_model(model(), LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))


def trainer(
    folder: Path,
    seen: Seen | None = None,
    *,
    kind: type[Trainer] = CkptTrainer,
    ckpt: Any = None,
    is_adapted: bool = False,
    **arguments: Any,
) -> Trainer:
    """A trainer over batches of two, which logs every step and saves every fourth one."""
    given: dict[str, Any] = {
        "max_steps": STEPS,
        "save_steps": 4,
        "per_device_train_batch_size": 2,
        "logging_steps": 1,
        "learning_rate": 0.01,
        "use_cpu": True,
        "disable_tqdm": True,
        "report_to": "none",
        "dataloader_pin_memory": False,
    }
    args = TrainingArguments(str(folder), **(given | arguments))
    if args.fsdp:  # Accelerate leaves FSDP out where devices are CPUs
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    options = {} if ckpt is None else {"ckpt": ckpt}
    callbacks = [] if seen is None else [seen]
    options |= {"train_dataset": Sequences(), "eval_dataset": Sequences(6), "callbacks": callbacks}
    return kind(adapted() if is_adapted else model(), args, **options)


def state_of(one: Trainer) -> dict[str, Any]:
    """All that training goes on from."""
    state = {"model": one.model.state_dict(), "optimizer": one.optimizer.state_dict()}
    return copy.deepcopy(state | {"schedule": one.lr_scheduler.state_dict(), "generator": torch.get_rng_state()})
