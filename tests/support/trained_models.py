"""Tiny models of three families of transformers as training leaves them, whole and cut over ranks, and folders with their configs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedModel, Qwen2Config

from ckpt import Checkpointer

VOCAB, PADDED = 50, 56
_SMALL = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 24,
    "max_position_embeddings": 32,
}  # fmt: skip
FAMILIES: dict[str, Callable[..., Any]] = {
    "llama": lambda **more: LlamaConfig(**_SMALL, **more),
    "gpt2": lambda **more: GPT2Config(n_layer=2, n_head=2, n_embd=16, n_positions=32, bos_token_id=1, eos_token_id=2, **more),
    "qwen2": lambda **more: Qwen2Config(**_SMALL, **more),
}


def trained(family: str, rows: int = VOCAB, *, tied: bool) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(FAMILIES[family](vocab_size=rows, tie_word_embeddings=tied))
    with torch.no_grad():  # as training leaves it
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def saved(root: Path, model: Any) -> Path:
    with Checkpointer(root / "own", model=model, save_rng=False) as checkpoints:
        return Path(str(checkpoints.save(1)))


def config_of(root: Path, family: str, **values: Any) -> Path:
    """A folder with the config, as people have it: of the tokenizer's vocabulary, and of the base model's type."""
    config = FAMILIES[family](vocab_size=VOCAB, dtype="bfloat16")
    config.save_pretrained(root / "config")
    file = root / "config" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
    (root / "config" / "generation_config.json").write_text('{"max_length": 9}')
    return root / "config"


def saved_by_ranks(layout: str, root: Path, *args: Any, **options: Any) -> None:
    """Save a model of `trained` that the ranks hold together. For ranks that are forked (`forked_ranks`)."""
    saved(root, laid_out(trained(*args, **options), layout))


def laid_out(model: PreTrainedModel, layout: str) -> nn.Module:
    """Cut a Llama, or another model of its names, over all ranks: "fsdp", "tp", "tp_fsdp" over pairs, or "pipeline"."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    if layout == "pipeline":
        layers: Any = model.model.layers
        for number in range(len(layers)):
            if number * ranks // len(layers) != rank:
                layers[number] = nn.Identity()
        if rank < ranks - 1:
            model.model.norm = model.lm_head = nn.Identity()
        if rank > 0:
            model.model.embed_tokens = nn.Identity()
        return model
    sides = {"fsdp": (ranks, 1), "tp": (1, ranks), "tp_fsdp": (ranks // 2, 2)}[layout]
    mesh = init_device_mesh("cpu", sides, mesh_dim_names=("dp", "tp"))
    if sides[1] > 1:
        plan: dict[str, Any] = dict.fromkeys(("self_attn.[qkv]_proj", "mlp.gate_proj", "mlp.up_proj"), ColwiseParallel())
        plan |= dict.fromkeys(("self_attn.o_proj", "mlp.down_proj"), RowwiseParallel())
        plan = {f"model.layers.*.{name}": cut for name, cut in plan.items()}
        ends = {"model.embed_tokens": RowwiseParallel(input_layouts=Replicate()), "lm_head": ColwiseParallel(output_layouts=Replicate())}
        parallelize_module(model, mesh["tp"], plan | ends)
    if sides[0] > 1:
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    return model
