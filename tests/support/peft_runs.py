"""Trainings of adapters of a tiny Llama, for ranks that are forked from a process that has imported PEFT (`forked_ranks`)."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

import ckpt
from ckpt.errors import CheckpointError

STEPS = 6
TOKENS = torch.arange(12).view(2, 6)


def base(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    sizes = {"vocab_size": 17, "hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 2, "max_position_embeddings": 16}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, loss_type="ForCausalLM")).eval()


def adapted(seed: int = 0, **options: Any) -> PeftModel:
    """A model with two adapters, of which the first is trained; its sizes do not divide by the ranks."""
    below = base(seed)
    below.name_or_path = "models/tiny"
    torch.manual_seed(1)
    first = {"r": 3, "target_modules": ["q_proj", "up_proj"], "modules_to_save": ["lm_head"]} | options
    model = get_peft_model(below, LoraConfig(**first))
    model.add_adapter("other", LoraConfig(r=2, target_modules=["v_proj"], init_lora_weights=False))
    return model


def laid_out(model: PeftModel, layout: str) -> torch.nn.Module:
    if layout == "alone":
        return model
    if layout == "ddp":
        return DistributedDataParallel(model, find_unused_parameters=True)
    ranks = dist.get_world_size()
    sizes = {"replicas": 2, "shards": ranks // 2} if layout == "hsdp" else {"shards": ranks}
    mesh = init_device_mesh("cpu", (*sizes.values(),), mesh_dim_names=(*sizes,))
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def train(layout: str, folder: Path, steps: int = STEPS, killed_at: int = 0, seed: int = 0, **options: Any) -> dict[str, torch.Tensor]:
    """Train from the newest checkpoint on; weights and moments by name, whole."""
    model = laid_out(adapted(seed), layout)
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=0.05)
    given = {"peft_base": "frozen"} | options
    with ckpt.Checkpointer(folder, model=model, optimizer=optimizer, every=2, **given) as checkpoints:
        for step in range(checkpoints.restore() + 1, steps + 1):
            if step == killed_at:
                os.kill(os.getpid(), signal.SIGKILL)
            loss = model(input_ids=(TOKENS + step) % 17, labels=(TOKENS + step) % 17).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            checkpoints.step(step)
    return everything(model, optimizer)


def everything(model: torch.nn.Module, optimizer: Any) -> dict[str, torch.Tensor]:
    found = {name.removeprefix("module."): value for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for kind, value in optimizer.state.get(parameter, {}).items():
            found[f"{kind} of {name.removeprefix('module.')}"] = value
    return {name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone() for name, value in found.items()}


def restored(layout: str, folder: Path) -> dict[str, torch.Tensor]:
    """What a program restores whose adapters differ from those saved in every element."""
    model = adapted()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "lora" in name or "modules_to_save" in name:
                value.fill_(7)
    model = laid_out(model, layout)
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=0.05)
    with ckpt.Checkpointer(folder, model=model, optimizer=optimizer, peft_base="frozen", save_at_end=False) as checkpoints:
        assert checkpoints.restore() == STEPS
    return everything(model, optimizer)


def refusal(layout: str, folder: Path, peft_base: str = "frozen", seed: int = 0, **options: Any) -> str:
    """The sentence with which a restore is refused, which changes nothing."""
    model = laid_out(adapted(seed, **options), layout)
    before = everything(model, torch.optim.SGD(model.parameters()))
    with ckpt.Checkpointer(folder, model=model, peft_base=peft_base, optimizer=None, save_at_end=False) as checkpoints:
        try:
            checkpoints.restore()
        except CheckpointError as error:
            after = everything(model, torch.optim.SGD(model.parameters()))
            assert all(torch.equal(after[name], value) for name, value in before.items())
            return str(error)
    return ""


def loaded(layout: str, folder: Path, **options: Any) -> dict[str, torch.Tensor] | str:
    """The model with an adapter that PEFT has written."""
    model = laid_out(adapted(**options), layout)
    try:
        ckpt.load_adapter(model, folder)
    except CheckpointError as error:
        return str(error)
    return everything(model, torch.optim.SGD(model.parameters()))
