"""The weights of an adapter (LoRA) to publish: whole on each rank, whatever the layout of training, as `save_pretrained` names them."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

pytest.importorskip("peft")

from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict

from ckpt.engine import AdapterWeights
from ckpt.ranks.topology import Topology
from tests.support.ranks import run_ranks
from tests.support.states import same_bits


def adapted() -> PeftModel:
    """A model with two adapters; the sizes do not divide by the ranks."""
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Embedding(11, 7), torch.nn.Linear(7, 5), torch.nn.Linear(5, 3))
    made = get_peft_model(layers, LoraConfig(r=3, target_modules=["0", "1"], init_lora_weights=False))
    made.add_adapter("other", LoraConfig(r=2, target_modules=["2"], init_lora_weights=False))
    return made


def require_whole(topology: Topology) -> None:
    whole, sharded = adapted(), adapted()
    mesh = init_device_mesh("cpu", (topology.world_size,))
    for layer in sharded.base_model.model:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    for adapter in ("default", "other"):
        expected = get_peft_model_state_dict(whole, adapter_name=adapter, save_embedding_layers=False)
        found = dict(AdapterWeights(sharded, adapter, topology))
        assert found.keys() == expected.keys() and all("lora" in name and adapter not in name for name in found)
        assert all(same_bits(found[name], expected[name]) for name in expected)


def test_shards_are_gathered_and_nothing_of_the_model_below_or_of_other_adapters_comes_along() -> None:
    run_ranks(2, require_whole, process_group=True)
