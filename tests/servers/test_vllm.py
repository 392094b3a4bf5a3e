"""vLLM itself, on this machine's processor: `.ci/engines` makes its environment, and runs this."""

from __future__ import annotations

import inspect
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

pytest.importorskip("vllm", reason="vLLM has an environment of its own: see .ci/engines")

import peft
import transformers
from safetensors.torch import load_file, save_file
from vllm.distributed.weight_transfer import base, clients, factory
from vllm.lora import lora_model, peft_helper
from vllm.lora import utils as lora_utils

import ckpt
from ckpt.engine import AdapterWeights, HuggingFaceWeights
from ckpt.engine.inference import vllm as plugin
from ckpt.engine.inference.vllm_servers import OfflineVllm, VllmServers, VllmTrainer
from ckpt.errors import MissingStateError
from tests.servers import kills
from tests.servers.models import make, write, write_int8
from tests.servers.vllm_server import ON_CPU, VllmServer
from tests.support import stand_in_vllm
from tests.support.pace import patience
from tests.support.states import require_equal_states

pytestmark = pytest.mark.full
PROMPT = [5, 6, 7]
_START_S = 400.0

CASES: dict[str, tuple[Callable[[str, int, Path], Path], str, int]] = {
    "llama": (write, "llama", 1),
    "llama, tied": (write, "llama_tied", 1),
    "llama, two workers": (write, "llama", 2),
    "llama, tied, two workers": (write, "llama_tied", 2),
    "qwen3": (write, "qwen3", 1),
    "qwen3, experts": (write, "qwen3_moe", 1),
    "gemma3": (write, "gemma3", 1),
    "llama, int8 by the trainer": (write_int8, "llama", 1),
    "llama, int8 by the trainer, two workers": (write_int8, "llama", 2),
}
"""{case: how its checkpoint is written, family, workers}."""


def answered(*arguments: str) -> list[Any]:
    """Return what `offline.py` prints."""
    ran = subprocess.run(
        [sys.executable, "-m", "tests.servers.offline", *arguments],
        env=os.environ | ON_CPU,
        capture_output=True,
        text=True,
        timeout=patience(_START_S),
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    return [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("[{")]


@pytest.mark.parametrize("case", CASES)
def test_tokens_and_logits_after_updates_are_those_of_a_vllm_of_the_same_weights(case: str, tmp_path: Path) -> None:
    write_one, family, workers = CASES[case]
    settings = json.dumps({"tensor_parallel_size": workers})
    old, new = (str(write_one(family, seed, tmp_path / str(seed))) for seed in (1, 2))
    before, after, again = answered(old, settings, new, old)
    (reference,) = answered(new, settings)
    for at, one in enumerate(reference):
        assert (after[at]["tokens"], after[at]["logprobs"]) == (one["tokens"], one["logprobs"])
        assert (again[at]["tokens"], again[at]["logprobs"]) == (before[at]["tokens"], before[at]["logprobs"])
    assert before[0]["logprobs"] != after[0]["logprobs"]
    assert [one["versions"] for one in after] == [["1"]] * len(after)
    assert [one["versions"] for one in again] == [["2"]] * len(after)


def test_an_update_without_a_scale_is_refused(tmp_path: Path) -> None:
    folder = write_int8("llama", 1, tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.down_proj.weight_scale"]
    shutil.copytree(folder, tmp_path / "less")
    save_file(weights, tmp_path / "less" / "model.safetensors", {"format": "pt"})
    with pytest.raises(AssertionError, match="the update lacks weights or scales of 1 quantized layers"):
        answered(str(folder), "{}", str(tmp_path / "less"))


def test_no_answer_of_half_a_version_when_something_is_killed(capsys: pytest.CaptureFixture[str]) -> None:
    kills.main(3, seed=1)
    assert "none of half a version" in capsys.readouterr().out


def test_the_recipe_trains_and_serves_its_model(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "recipes.sync_weights", "roles.inference=vllm", "engine=broadcast", "model.size=tiny", "train.steps=3"]
    command += [f"output_dir={tmp_path}", "inference.args=['--dtype=float32','--enforce-eager']", "inference.tokens=6"]
    ran = subprocess.run(command, env=os.environ | ON_CPU, capture_output=True, text=True, timeout=patience(_START_S), check=False)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    summary = json.loads((tmp_path / "summary.json").read_text())
    (server,) = summary["rollouts"]
    assert server["version"] == 3 and [update["step"] for update in summary["updates"]] == [1, 2, 3]
    assert len(server["before"]) == len(server["after"]) == 6
    assert all(update["num_bytes"] > 0 and update["blocked_s"] > 0 for update in summary["updates"])


def test_the_example_learns_and_resumes_to_the_bit_when_it_is_killed(tmp_path: Path) -> None:
    def started(folder: str) -> subprocess.Popen[str]:
        command = [sys.executable, "examples/rl_vllm.py", "--steps=12", f"--folder={tmp_path / folder}"]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)

    def said(run: subprocess.Popen[str], until: str) -> list[str]:
        lines = []
        for line in run.stdout or ():
            lines.append(line)
            if line.startswith(until):
                break
        return lines

    whole = started("whole")
    told = said(whole, "step 12:")
    assert whole.wait(patience(60)) == 0
    cut = started("cut")
    said(cut, "step 8:")
    cut.kill()
    again = started("cut")
    assert told[-1] == said(again, "step 12:")[-1]
    assert again.wait(patience(60)) == 0
    try:
        one, other = (ckpt.load(tmp_path / folder / "checkpoints" / "checkpoint-00000012") for folder in ("whole", "cut"))
        require_equal_states(*({name: state[name] for name in ("model", "optimizer")} for state in (one, other)))
        assert float(told[-1].split()[-1]) > 2 * float(told[0].split()[-1])
    finally:
        subprocess.run(["pkill", "-f", str(tmp_path)], check=False)  # the server that the killed run has left


def test_a_server_without_the_plug_ins_backend_is_told_before_anything_is_sent(tmp_path: Path) -> None:
    server = VllmServer(write("llama", 0, tmp_path / "model"), tmp_path / "log", backend="ipc")
    try:
        server.await_up()
        with pytest.raises(Exception, match=f"the inference engine at {server.url}/init_weight_transfer_engine refused"):
            VllmServers([server.url], timeout_s=30.0).init_weight_transfer_engine({"address": "127.0.0.1"})
    finally:
        server.kill()


def adapted(folder: Path, seed: int) -> peft.PeftModel:
    """A model with an adapter of random weights, of modules that vLLM packs with others and of one that it splits by its inputs."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    config = peft.LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj", "gate_proj", "down_proj"], rank_pattern={"v_proj": 2})
    made = peft.get_peft_model(model, config)
    torch.manual_seed(seed)
    for parameter in (one for one in made.parameters() if one.requires_grad):
        torch.nn.init.normal_(parameter, std=0.2)
    return made


@pytest.mark.parametrize("workers", [1, 2])
def test_an_adapter_alone_answers_as_one_that_vllm_reads_from_its_folder(workers: int, tmp_path: Path) -> None:
    folder = write("llama", 0, tmp_path / "model")
    server = VllmServer(folder, tmp_path / "log", workers, more=["--enable-lora", "--max-lora-rank=8", "--max-loras=4"])
    try:
        server.await_up()
        base = server.generate(PROMPT)
        servers = VllmServers([server.url], timeout_s=patience(60.0))
        with VllmTrainer(servers, AdapterWeights(adapted(folder, 0)), adapter="policy") as trainer:
            for step in (1, 2, 3):
                model = adapted(folder, step)
                trainer.source = AdapterWeights(model)
                trainer.send_weights(step)
                model.save_pretrained(tmp_path / str(step))
                body = {"lora_name": f"read-{step}", "lora_path": str(tmp_path / str(step))}
                httpx.post(f"{server.url}/v1/load_lora_adapter", json=body, timeout=60.0).raise_for_status()
                answer, read = (server.generate(PROMPT, model=name) for name in ("policy", f"read-{step}"))
                assert (answer.tokens, answer.logprobs, answer.versions) == (read.tokens, read.logprobs, [str(step)])
                assert answer.logprobs != base.logprobs
                assert trainer.report["num_bytes"] < 100_000 < server.folder.joinpath("model.safetensors").stat().st_size
            after = server.generate(PROMPT)
            assert (after.tokens, after.logprobs) == (base.tokens, base.logprobs), "the model below it is as it was"
            wide = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(hidden_size=192, num_hidden_layers=2))
            trainer.source = AdapterWeights(peft.get_peft_model(wide, peft.LoraConfig(r=4, target_modules=["q_proj"])))
            with pytest.raises(MissingStateError, match=r"has shape \[4, 192\]: the served model .* ask for \[4, 128\]"):
                trainer.send_weights(4)
            still = server.generate(PROMPT, model="policy")
            assert (still.tokens, still.logprobs) == (answer.tokens, answer.logprobs)
        models = [make("llama", seed) for seed in (1, 0)]
        with VllmTrainer(servers, HuggingFaceWeights(models[0])) as trainer:
            trainer.send_weights(5)
            assert server.generate(PROMPT).logprobs != base.logprobs
            trainer.source = HuggingFaceWeights(models[1])
            trainer.send_weights(6)
            back, adapter = server.generate(PROMPT), server.generate(PROMPT, model="policy")
            assert (back.tokens, back.logprobs) == (base.tokens, base.logprobs), "the model below adapters is updated, too"
            assert (adapter.tokens, adapter.logprobs) == (answer.tokens, answer.logprobs)
    finally:
        server.kill()


def test_vllm_finds_the_plug_in_by_its_entry_point() -> None:
    (ours,) = [one for one in entry_points(group="vllm.general_plugins") if one.name == "ckpt"]
    ours.load()()
    plugin.register()
    assert factory.WeightTransferEngineFactory._registry["ckpt"]() is plugin.CkptWeightTransferEngine
    assert factory.WeightTransferTrainerFactory._registry["ckpt"]() is plugin.CkptTrainerWeightTransferEngine


def methods(of: type) -> Iterator[tuple[str, list[str]]]:
    for name, one in vars(of).items():
        if inspect.isfunction(one) and not name.startswith("_"):
            yield name, [*inspect.signature(one).parameters]


@pytest.mark.parametrize("ours", [plugin.CkptWeightTransferEngine, plugin.CkptTrainerWeightTransferEngine])
def test_the_plug_in_has_all_that_vllms_classes_leave_open(ours: type) -> None:
    assert not getattr(ours, "__abstractmethods__", None)
    (theirs,) = [one for one in ours.__mro__ if one.__module__ == base.__name__ and one.__name__ in ours.__name__.replace("Ckpt", "")]
    for name, arguments in methods(theirs):
        own = [*inspect.signature(getattr(ours, name)).parameters]
        given = own if "self" in own or "self" not in arguments else ["self", *own]
        assert given[: len(arguments)] == arguments, name


@pytest.mark.parametrize("ours", [VllmServers, OfflineVllm])
def test_the_clients_have_vllms_protocol(ours: type) -> None:
    for name, arguments in methods(base.VLLMWeightSyncClient):
        assert [*inspect.signature(getattr(ours, name)).parameters] == arguments, name
        assert [*inspect.signature(getattr(clients.HTTPVLLMWeightSyncClient, name)).parameters] == arguments, name


def test_the_stand_ins_adapters_take_what_vllms_take() -> None:
    for stand_in, real in (
        (stand_in_vllm.LoRAModel.from_lora_tensors, lora_model.LoRAModel.from_lora_tensors),
        (stand_in_vllm.PEFTHelper.validate_legal, peft_helper.PEFTHelper.validate_legal),
        (stand_in_vllm.PEFTHelper.from_dict, peft_helper.PEFTHelper.from_dict),
        (stand_in_vllm.PEFTHelper.get_rank_and_scaling, peft_helper.PEFTHelper.get_rank_and_scaling),
        (stand_in_vllm.parse_fine_tuned_lora_name, lora_utils.parse_fine_tuned_lora_name),
    ):
        assert [*inspect.signature(stand_in).parameters] == [*inspect.signature(real).parameters]


@pytest.mark.parametrize("name", ["WeightTransferEngine", "TrainerWeightTransferEngine", "TrainerInitInfo"])
def test_the_stand_in_of_the_default_tests_has_only_what_vllm_has(name: str) -> None:
    stand_in, real = getattr(stand_in_vllm, name), getattr(base, name)
    assert [*inspect.signature(stand_in.__init__).parameters] == [*inspect.signature(real.__init__).parameters]
    for method, arguments in methods(stand_in):
        assert [*inspect.signature(getattr(real, method)).parameters] == arguments
    if name == "TrainerInitInfo":
        assert [one.name for one in fields(stand_in)] == [one.name for one in fields(real)]
