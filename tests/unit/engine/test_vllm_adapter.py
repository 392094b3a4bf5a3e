"""Adapters (LoRA) alone, to vLLM's servers: kilobytes instead of the model. On a stand-in; tests/servers has the real vLLM."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("peft")

from peft import LoraConfig, PeftModel, get_peft_model

from ckpt.engine import AdapterWeights
from ckpt.engine.inference.vllm_servers import OfflineVllm, VllmServers, VllmTrainer
from ckpt.errors import CheckpointError, ConfigurationError, MissingStateError
from tests.support.stand_in_vllm import Server, Source

TIMEOUT_S = 20.0
ADAPTER_BYTES = 2 * (70 + 300) * 4


class Base(torch.nn.Module):
    """The model below the adapter; the server has the module `one` of 70 inputs."""

    def __init__(self, size: int = 70, name: str = "one") -> None:
        super().__init__()
        self.add_module(name, torch.nn.Linear(size, 300, bias=False))


def adapted(step: int, rank: int = 2, name: str = "one", size: int = 70) -> PeftModel:
    model = get_peft_model(Base(size, name), LoraConfig(r=rank, lora_alpha=8, target_modules=[name]))
    with torch.no_grad():
        for number, parameter in enumerate(one for one in model.parameters() if one.requires_grad):
            parameter.copy_(torch.arange(parameter.numel()).reshape(parameter.shape) + 1000.0 * step + number)
    return model


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


@pytest.fixture
def client(server: Server) -> VllmServers:
    return VllmServers([server.url], timeout_s=TIMEOUT_S)


def joined(client: VllmServers, model: PeftModel, adapter: str = "policy") -> VllmTrainer:
    return VllmTrainer(client, AdapterWeights(model), adapter=adapter, settings={"timeout_s": TIMEOUT_S})


def generated(server: Server, model: str) -> tuple[str, Any]:
    said = httpx.post(f"{server.url}/generate", json={"model": model}, timeout=TIMEOUT_S).json()
    return said["weight_version"], said["holds"]


def require_served(server: Server, model: PeftModel, folder: Path, adapter: str = "policy") -> None:
    """Both workers serve what `save_pretrained` writes."""
    model.save_pretrained(folder)
    written = {name: tensor.tolist() for name, tensor in load_file(folder / "adapter_model.safetensors").items()}
    for tensors, config in generated(server, adapter)[1]:
        assert tensors == written
        assert json.loads(config).items() >= {"r": 2, "lora_alpha": 8, "target_modules": ["one"], "peft_type": "LORA"}.items()


def test_each_version_of_the_adapter_is_served_by_all_workers_and_only_the_adapter_is_sent(
    server: Server, client: VllmServers, tmp_path: Path
) -> None:
    with VllmTrainer(client, Source(), settings={"timeout_s": TIMEOUT_S}) as trainer:
        trainer.source.step = 1  # type: ignore[attr-defined]
        trainer.send_weights(1)
    with joined(client, adapted(0)) as trainer:
        for step in (4, 5, 9):
            trainer.source = AdapterWeights(model := adapted(step))
            trainer.send_weights(step)
            require_served(server, model, tmp_path / str(step))
            assert trainer.report["num_bytes"] == ADAPTER_BYTES
        assert generated(server, "model") == ("9", [1, 1]), "the model below it is as it was"
        trainer.rejoin()  # as new trainers do: vLLM does not forget where the adapter lies
        trainer.source = AdapterWeights(model := adapted(11))
        trainer.send_weights(11)
        require_served(server, model, tmp_path / "11")
    descriptors = Path(f"/proc/{server.workers[-1].process.pid}/fd")
    held = [one for one in descriptors.iterdir() if "memfd:policy" in str(one.readlink())]
    assert len(held) == 1, "versions before are freed, and this one is when the process ends, however it ends"
    assert (Path(server.adapters["policy"]) / "adapter_model.safetensors").readlink().parent == descriptors


def test_two_adapters_have_two_names(server: Server, client: VllmServers, tmp_path: Path) -> None:
    models = {name: adapted(step) for step, name in enumerate(("a", "b"), 20)}
    for step, (name, model) in enumerate(models.items(), 20):
        with joined(client, model, name) as trainer:
            trainer.send_weights(step)
    for name, model in models.items():
        require_served(server, model, tmp_path / name, name)


def test_an_adapter_of_another_base_is_refused_before_a_byte_moves(server: Server, client: VllmServers, tmp_path: Path) -> None:
    with joined(client, adapted(0)) as trainer:
        trainer.source = AdapterWeights(model := adapted(30))
        trainer.send_weights(30)
        for other, found in (
            (adapted(31, size=64), r"lora_A.weight has shape \[2, 64\]: the served model .* ask for \[2, 70\]"),
            (adapted(31, rank=3), r"has shape \[3, 70\]: the served model .* ask for \[2, 70\]"),
            (adapted(31, name="two"), "two.lora_A.weight: the served model takes no adapter for two"),
        ):
            trainer.source = AdapterWeights(other)
            with pytest.raises(MissingStateError, match=found):
                trainer.send_weights(31)
            assert "pause" not in server.asked[-1:] and server.running.is_set()
            require_served(server, model, tmp_path / "before")
            assert server.version == "30"
        trainer.source = AdapterWeights(model := adapted(32))
        trainer.send_weights(32)
        require_served(server, model, tmp_path / "32")


def test_a_worker_that_cannot_load_an_adapter_is_named_and_the_next_version_is_served(
    server: Server, client: VllmServers, tmp_path: Path
) -> None:
    with joined(client, adapted(0)) as trainer:
        trainer.send_weights(40)
        server.workers[1].call("set_fails", True)
        with pytest.raises(CheckpointError, match="rank 2.*the model does not take this adapter"):
            trainer.send_weights(41)
        server.workers[1].call("set_fails", False)
        trainer.source = AdapterWeights(model := adapted(42))
        trainer.send_weights(42)
        require_served(server, model, tmp_path)


def test_what_a_server_cannot_serve_is_refused_when_trainers_join(server: Server, client: VllmServers) -> None:
    with pytest.raises(CheckpointError, match="the adapter policy does not fit this server: LoRA rank 9 is greater than max_lora_rank 8"):
        joined(client, adapted(0, rank=9))
    with pytest.raises(CheckpointError, match="serves model from /model already: choose another name"):
        joined(client, adapted(0), "model")
    for worker in server.workers:
        worker.call("set_takes_adapters", False)
    try:
        with pytest.raises(CheckpointError, match="this server takes no adapters: start it with --enable-lora"):
            joined(client, adapted(0), "fresh")
    finally:
        for worker in server.workers:
            worker.call("set_takes_adapters", True)


def test_bad_arguments_are_refused_in_one_sentence(client: VllmServers) -> None:
    with pytest.raises(ConfigurationError, match="adapter=policy: expected a client VllmServers, and a source AdapterWeights"):
        VllmTrainer(client, Source(), adapter="policy")
    with pytest.raises(ConfigurationError, match="adapter=policy: expected a client VllmServers"):
        VllmTrainer(OfflineVllm(None), AdapterWeights(adapted(0)), adapter="policy")
    with pytest.raises(ConfigurationError, match=r"adapter=other: expected a LoRA adapter of a PeftModel, found \['default'\]"):
        AdapterWeights(adapted(0), "other")
    with pytest.raises(ConfigurationError, match=r"adapter=default: expected a LoRA adapter of a PeftModel, found \[\]"):
        AdapterWeights(Base())
