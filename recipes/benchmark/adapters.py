"""The state of a fine-tune: a LoRA adapter of PEFT on a frozen Llama, with its optimizer; and the way in which its libraries save it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ckpt import StateComponent
from ckpt.errors import importing
from ckpt.memory.device import Device
from ckpt.ranks.topology import Topology
from ckpt.state.adapters import with_adapters
from ckpt.state.optimizer_state import OptimizerState
from ckpt.state.statefuls import ModelState
from recipes.benchmark.measuring import sync_entries, sync_file
from recipes.benchmark.workloads import Contender, State, Workload, fill_optimizer

ADAPTER, OPTIMIZER = "adapter-default", "optimizer"
_HEAD = 64
_VOCABULARY = 32_000


def adapted(device: Device, topology: Topology, *, hidden_size: int, layers: int, rank: int) -> State:
    """Make a Llama in bfloat16, sharded by FSDP2 where there are several ranks, with an adapter at every linear layer. Collective.

    Args:
        hidden_size: a multiple of 64.
        rank: of the adapter.
    """
    with importing("workload=lora"):
        from peft import LoraConfig, get_peft_model
        from transformers import LlamaConfig, LlamaForCausalLM
    device.use(topology.local_rank)
    heads = hidden_size // _HEAD
    sizes = {"hidden_size": hidden_size, "intermediate_size": 3 * hidden_size, "num_hidden_layers": layers, "vocab_size": _VOCABULARY}
    base = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=heads, num_key_value_heads=heads)).to(torch.bfloat16)
    with warnings.catch_warnings():  # PEFT 0.21 asks transformers 5.24 for a name of old
        warnings.simplefilter("ignore", FutureWarning)
        model: Any = get_peft_model(base, LoraConfig(r=rank, target_modules="all-linear")).to(device.torch_device)
    if topology.world_size > 1:
        mesh = init_device_mesh(device.torch_device.type, (topology.world_size,))
        for layer in base.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad])
    fill_optimizer(model, optimizer)
    pattern = "sharded" if topology.world_size > 1 else "replicated"
    components = with_adapters(StateComponent("model", ModelState(model), pattern), "frozen", topology)
    adapter: Any = components[0].stateful
    state = OptimizerState(optimizer, model)
    components.append(StateComponent(OPTIMIZER, state, pattern))
    tree = {"adapter": adapter.tensors(), "optimizer": state.state_dict()["state"]}
    return State(topology, None, device, components, {}, {ADAPTER: adapter, OPTIMIZER: state}, tree)


class Pretrained(Contender):
    """PEFT's `save_pretrained`, and `torch.save` of the optimizer, of what trains, gathered on the lead; fsync of each file."""

    measures = ("save",)

    def __init__(self, workload: Workload) -> None:
        self._topology = workload.saved.topology
        parts: Mapping[str, Any] = workload.saved.statefuls
        self._model, self._optimizer = parts[ADAPTER].module, parts[OPTIMIZER].optimizer

    def save(self, folder: Path) -> None:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
        weights = get_model_state_dict(self._model, options=options)
        moments = get_optimizer_state_dict(self._model, self._optimizer, options=options)
        if self._topology.is_lead:
            self._model.save_pretrained(folder / "adapter", state_dict=weights)
            torch.save(moments, folder / "optimizer.pt")
            for path in [*(folder / "adapter").iterdir(), folder / "optimizer.pt"]:
                sync_file(path)
        sync_entries(folder, self._topology)
