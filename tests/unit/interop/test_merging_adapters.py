"""A LoRA adapter and its base become the model that training has seen and PEFT's `merge_and_unload` makes; others are refused."""

from __future__ import annotations

import json
import shutil
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

pytest.importorskip("peft")

import peft

from ckpt import Checkpointer
from ckpt.cli.converting import ConvertKeys, convert_on_ranks, run_of
from ckpt.errors import ConfigurationError
from ckpt.ranks.topology import Topology
from tests.support.ranks import run_threads

pytestmark = pytest.mark.filterwarnings("ignore")

IDS = torch.arange(12).view(1, 12)
_SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 24}
CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(vocab_size=50, max_position_embeddings=32, tie_word_embeddings=False, **_SMALL),
    "gpt2": GPT2Config(vocab_size=50, n_layer=2, n_head=2, n_embd=16, n_positions=32, bos_token_id=1, eos_token_id=2),
}
LORA: dict[str, dict[str, Any]] = {
    "llama": {
        "target_modules": ["q_proj", "up_proj", "embed_tokens"], "rank_pattern": {"up_proj": 3}, "alpha_pattern": {r"layers\.1\..*": 5},
        "use_rslora": True, "modules_to_save": ["lm_head"],
    },
    "gpt2": {"target_modules": ["c_attn", "c_proj"], "modules_to_save": ["lm_head"]},
}  # fmt: skip


def adapted(root: Path, family: str, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """A model whose base was loaded from `root`/base, with an adapter that training has changed."""
    torch.manual_seed(0)
    if not (root / "base").exists():
        AutoModelForCausalLM.from_config(deepcopy(CONFIGS[family])).to(dtype).save_pretrained(root / "base")
    below = AutoModelForCausalLM.from_pretrained(root / "base", dtype=dtype)
    model = peft.get_peft_model(below, peft.LoraConfig(r=2, lora_alpha=7, init_lora_weights=False, **LORA[family] | options))
    with torch.no_grad():
        for value in model.parameters():
            if value.requires_grad:
                value.add_(torch.randn_like(value), alpha=0.1)
    return model.eval()


def saved(root: Path, model: Any, base: str = "frozen") -> Path:
    with Checkpointer(root / "own", model=model, save_rng=False, save_at_end=False, peft_base=base) as checkpoints:
        return Path(str(checkpoints.save(1)))


def merged(src: Path, dst: Path, **keys: Any) -> dict[str, Any]:
    given: dict[str, Any] = {"to": "safetensors", "component": "adapter-default", "merge_adapters": True, "check": "logits"} | keys
    made = ConvertKeys(src=str(src), dst=str(dst), **given)
    made.validate()
    found: dict[str, Any] = convert_on_ranks(run_of(made), Topology.alone())["held"]
    return found


def opened(folder: Path) -> Any:
    found, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values())
    return found.eval()


@pytest.mark.parametrize("base", ["frozen", "saved", "of peft"])
@pytest.mark.parametrize("family", CONFIGS)
def test_the_folder_is_the_model_that_peft_merges(tmp_path: Path, family: str, base: str) -> None:
    model, keys = adapted(tmp_path, family), dict[str, Any]()
    if base == "of peft":
        model.save_pretrained(tmp_path / "adapter")
        src, keys = tmp_path / "adapter", {"component": "model"}
    else:
        src = saved(tmp_path, model, base)
    held = merged(src, tmp_path / "hf", **keys)
    assert held["checked"] == "logits" and held["copied"] == ["config.json", "generation_config.json"]
    found = opened(tmp_path / "hf")
    with torch.inference_mode():
        torch.testing.assert_close(found(IDS).logits, model(IDS).logits)
    own = model.merge_and_unload().state_dict()
    assert found.state_dict().keys() == own.keys() and not found.config.tie_word_embeddings
    for name, value in found.state_dict().items():
        torch.testing.assert_close(value, own[name], rtol=1e-6, atol=1e-7)


def test_a_square_matrix_of_gpt2_is_stored_inputs_first_whatever_the_config_says(tmp_path: Path) -> None:
    """PEFT notes `fan_in_fan_out` as the last layer has it, here the output layer, which is stored outputs first."""
    model = adapted(tmp_path, "gpt2", target_modules=["attn.c_proj", "lm_head"], modules_to_save=None)
    assert model.peft_config["default"].fan_in_fan_out is False
    held = merged(saved(tmp_path, model), tmp_path / "hf")
    assert "config.json: tie_word_embeddings is False, as of the tensors" in held["changed"]
    with torch.inference_mode():
        torch.testing.assert_close(opened(tmp_path / "hf")(IDS).logits, model(IDS).logits)


def test_an_adapted_embedding_is_not_tied_any_more(tmp_path: Path) -> None:
    """The output layer has seen no adapter in training."""
    model = adapted(tmp_path, "gpt2", target_modules=["wte"], modules_to_save=None)
    merged(saved(tmp_path, model, "saved"), tmp_path / "hf")
    with torch.inference_mode():
        torch.testing.assert_close(opened(tmp_path / "hf")(IDS).logits, model(IDS).logits)
    with pytest.raises(ConfigurationError, match=r"changes transformer.wte.weight, to which .* may be tied .*peft_base=saved"):
        merged(saved(tmp_path / "other", model), tmp_path / "two")


def test_the_base_is_merged_in_the_type_of_training(tmp_path: Path) -> None:
    adapted(tmp_path, "llama", torch.bfloat16)
    model = adapted(tmp_path, "llama")  # which loads that base as float32
    held = merged(saved(tmp_path, model), tmp_path / "hf")
    assert f"the base: float32, as it was trained, and not as it is in {tmp_path / 'base'}" in held["changed"]
    found, own = load_file(tmp_path / "hf" / "model.safetensors"), model.merge_and_unload().state_dict()
    assert all(value.dtype is torch.float32 for value in found.values())
    torch.testing.assert_close(found, {name: own[name] for name in found}, rtol=1e-6, atol=1e-7)


def test_a_model_of_bfloat16_is_merged_as_peft_does(tmp_path: Path) -> None:
    """To the bit, but for embeddings: there PEFT rounds what it adds, too."""
    model = adapted(tmp_path, "llama", torch.bfloat16, target_modules=["q_proj", "up_proj"])
    merged(saved(tmp_path, model, "saved"), tmp_path / "hf")
    found, own = load_file(tmp_path / "hf" / "model.safetensors"), model.merge_and_unload().state_dict()
    assert found["model.layers.0.self_attn.q_proj.weight"].dtype is torch.bfloat16
    torch.testing.assert_close(found, {name: own[name] for name in found}, rtol=0, atol=0)


def _merge(topology: Topology, cfg: dict[str, Any]) -> None:
    convert_on_ranks(cfg, topology)


def test_several_ranks_merge_what_one_does(tmp_path: Path) -> None:
    src = saved(tmp_path, adapted(tmp_path, "llama"))
    merged(src, tmp_path / "one")
    keys = ConvertKeys(str(src), str(tmp_path / "two"), "safetensors", "adapter-default", merge_adapters=True)
    run_threads(2, _merge, run_of(keys), agree_s=60.0)
    assert (tmp_path / "one" / "model.safetensors").read_bytes() == (tmp_path / "two" / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"use_dora": True}, r"merge_adapters=True is for plain LoRA, and the adapter has use_dora=True; merge it with PEFT$"),
        ({"lora_bias": True, "target_modules": ["c_attn"]}, "has lora_bias=True"),
        ({"bias": "all"}, "the adapter has peft_type=LORA, bias=all"),
    ],
)
def test_other_kinds_of_adapters_are_one_sentence(tmp_path: Path, options: dict[str, Any], sentence: str) -> None:
    src = saved(tmp_path, adapted(tmp_path, "gpt2", **{"modules_to_save": None, **options}))
    with pytest.raises(ConfigurationError, match=sentence):
        merged(src, tmp_path / "hf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "own"]


def test_another_base_or_none_is_one_sentence(tmp_path: Path) -> None:
    model = adapted(tmp_path, "llama")
    src, held = saved(tmp_path, model), saved(tmp_path / "with base", model, "saved")
    other = shutil.copytree(tmp_path / "base", tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, other / "model.safetensors")
    with pytest.raises(ConfigurationError, match=r"trained on another base \(digest .*\) than .*other .*, whose tensors are float32,"):
        merged(src, tmp_path / "hf", base_from=str(other))
    with pytest.raises(ConfigurationError, match="the checkpoint holds the base as base; leave out base_from=<folder>$"):
        merged(held, tmp_path / "hf", base_from=str(other))
    with pytest.raises(ConfigurationError, match=r"holds no adapter of PEFT as component=base, which merge_adapters=True needs$"):
        merged(held, tmp_path / "hf", component="base")
    with pytest.raises(ConfigurationError, match=r"and adapter-default is an adapter; .*merge it with merge_adapters=True$"):
        merged(held, tmp_path / "hf", merge_adapters=False)
    for keys, name in (({"base_from": "x", "merge_adapters": False}, "base_from=x"), ({"to": "dcp", "check": None}, "merge_adapters=True")):
        with pytest.raises(ConfigurationError, match=f"{name} is for "):
            merged(src, tmp_path / "hf", **keys)
    shutil.rmtree(tmp_path / "base")
    with pytest.raises(ConfigurationError, match=r"the base .*base is not in the checkpoint; give base_from=<folder>$"):
        merged(src, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_an_adapter_that_does_not_fit_the_base_is_one_sentence(tmp_path: Path) -> None:
    """Of a folder of PEFT, which holds no digest."""
    adapted(tmp_path, "llama").save_pretrained(tmp_path / "adapter")
    file, config = tmp_path / "adapter" / "adapter_model.safetensors", tmp_path / "adapter" / "adapter_config.json"
    options, tensors = json.loads(config.read_text()), load_file(file)
    q = "base_model.model.model.layers.0.self_attn.q_proj.lora_"

    def refused(sentence: str, changed: dict[str, Any], **of_config: Any) -> None:
        save_file({name: value for name, value in (tensors | changed).items() if value is not None}, file)
        config.write_text(json.dumps(options | of_config))
        with pytest.raises(ConfigurationError, match=sentence):
            merged(tmp_path / "adapter", tmp_path / "hf", component="model")

    refused(r"the base has no layers.9.v.weight; give .* base_from=<folder>$", {"base_model.model.layers.9.v.weight": torch.ones(2)})
    refused(r"lm_head.weight is \(51, 16\) in the adapter and \(50, 16\)", {"base_model.model.lm_head.weight": torch.ones(51, 16)})
    refused(r"self_attn.q_proj.weight is \(16, 16\) .* rank 2 has \(2, 15\) and \(16, 2\)", {f"{q}A.weight": torch.ones(2, 15)})
    refused(r"embed_tokens.weight is \(50, 16\) in the base, and the adapter of rank 4", {}, r=4)
    refused(r"of .*q_proj.weight the adapter has B alone", {f"{q}A.weight": None})
    refused(r"q_proj.weight is float32 in the base, and float16 and float32", {f"{q}A.weight": torch.ones(2, 16).half()})
    refused("is for plain LoRA, and the adapter has .*lora_magnitude", {f"{q}magnitude_vector.weight": torch.ones(2)})
    refused("no rank and scale for .*embed_tokens: ", {}, rank_pattern={"(": 2})
    for pattern in ("(a|aa)*b", "a*a*a*b"):
        refused("has a pattern with many repetitions, ", {}, alpha_pattern={pattern: 2})
    refused("init_lora_weights=pissa changes the base, and .* does not know how", {}, init_lora_weights="pissa")
    refused("has peft_type=IA3", {}, peft_type="IA3")


def test_other_logits_than_those_of_the_adapter_are_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    src = saved(tmp_path, adapted(tmp_path, "llama"))
    monkeypatch.setattr(peft, "set_peft_model_state_dict", lambda *_: SimpleNamespace(missing_keys=[], unexpected_keys=[]))
    with pytest.raises(ConfigurationError, match="logits of the merged model are not those of the adapter on its base, so nothing"):
        merged(src, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_a_checkpoint_of_a_trainer_has_all_that_is_needed(tmp_path: Path) -> None:
    from tests.support.trainers import trainer

    tuner = trainer(tmp_path, is_adapted=True, ckpt={"peft_base": "saved"}, max_steps=1, save_steps=1)
    tuner.train()
    held = merged(next((tmp_path / "ckpt").glob("checkpoint-*")), tmp_path / "hf")
    assert held["copied"] == ["config.json", "generation_config.json"]
    with torch.inference_mode():
        torch.testing.assert_close(opened(tmp_path / "hf")(IDS[:, :8]).logits, tuner.model.eval()(IDS[:, :8]).logits)
