"""Tiny models of random weights, of the families that are served most, as transformers writes them.

    python -m tests.servers.models <family> <seed> <folder>
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

_SIZES: dict[str, Any] = {
    "vocab_size": 515,  # vLLM pads it
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "dtype": "float32",
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "llama_tied": ("Llama", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": True}),
    "qwen3_moe": ("Qwen3Moe", {"tie_word_embeddings": False, **_EXPERTS}),
    "gemma3": ("Gemma3Text", {"tie_word_embeddings": True, "query_pre_attn_scalar": 64}),
}
"""{family: prefix of its classes, settings beside the sizes}."""


def make(family: str, seed: int) -> Any:
    """Return a model with weights that are large enough for each prompt to have its own answer."""
    prefix, settings = FAMILIES[family]
    torch.manual_seed(seed)
    config = getattr(transformers, f"{prefix}Config")(**_SIZES, **settings)
    model = getattr(transformers, f"{prefix.removesuffix('Text')}ForCausalLM")(config)
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(parameter, std=0.15)
    return model


def write(family: str, seed: int, folder: Path) -> Path:
    """Write such a model; return its folder."""
    make(family, seed).save_pretrained(folder)
    return folder


def write_int8(family: str, seed: int, folder: Path) -> Path:
    """Write such a model, its linear layers quantized to int8 with a scale for each output, as llm-compressor does; return its folder."""
    write(family, seed, folder)
    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if name.endswith("_proj.weight")]:
        weight = weights[name]
        scale = weight.abs().amax(1, keepdim=True) / 127
        weights |= {name: (weight / scale).round().to(torch.int8), f"{name}_scale": scale}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    by_8_bits = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {"targets": ["Linear"], "weights": {**by_8_bits, "strategy": "channel"}}
    group["input_activations"] = {**by_8_bits, "strategy": "token", "dynamic": True}
    quantized = {"quant_method": "compressed-tensors", "format": "int-quantized", "ignore": ["lm_head"]}
    quantized["config_groups"] = {"group_0": group}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantized}))
    return folder


if __name__ == "__main__":
    write(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
