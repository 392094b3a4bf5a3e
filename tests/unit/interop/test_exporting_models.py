"""What is exported with a config is the model that was trained: names, vocabulary, ties and type, for three families; and it is checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from ckpt.cli.converting import ConvertKeys, convert_on_ranks, run_of
from ckpt.errors import ConfigurationError
from ckpt.interop.safetensors import logits
from ckpt.ranks.topology import Topology
from tests.support.ranks import run_threads
from tests.support.states import Held
from tests.support.trained_models import FAMILIES, PADDED, VOCAB, config_of, saved, trained
from tests.support.values import same_values


def exported(src: Path, dst: Path, **keys: Any) -> dict[str, Any]:
    given = {"to": "safetensors", "check": "logits"} | keys
    found = convert_on_ranks(run_of(ConvertKeys(src=str(src), dst=str(dst), **given)), Topology.alone())
    assert "  without  a tokenizer: there is none beside config.json" in found["lines"]
    return found["held"]


@pytest.mark.parametrize("rows", [VOCAB, PADDED])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_of_any_ties_and_padding_is_exported_as_it_was_trained(
    tmp_path: Path, family: str, tied: bool, rows: int
) -> None:
    model = trained(family, rows, tied=tied)
    held = exported(saved(tmp_path, model), tmp_path / "hf", config_from=str(config_of(tmp_path, family, tie_word_embeddings=tied)))
    assert held["checked"] == "logits" and held["copied"] == ["config.json", "generation_config.json"]
    found, info = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(info.values()) and found.dtype is torch.float32 and found.config.vocab_size == VOCAB
    own = {name: value[:VOCAB] if value.shape[0] == rows else value for name, value in model.state_dict().items()}
    assert same_values(dict(found.state_dict()), own)
    names = load_file(tmp_path / "hf" / "model.safetensors").keys()
    assert ("lm_head.weight" in names) != tied and any(name.endswith(("embed_tokens.weight", "wte.weight")) for name in names)
    cut = [text for text in held["changed"] if text.endswith("without its rows 50 to 55, beyond vocab_size")]
    assert len(cut) == (0 if rows == VOCAB else 1 if tied else 2)
    assert "config.json: dtype is float32, as of the tensors" in held["changed"]


def test_copies_of_a_tied_tensor_are_one_and_the_config_says_what_the_tensors_are(tmp_path: Path) -> None:
    """Stages of a pipeline hold a copy each."""
    state = {name: value.clone() for name, value in trained("llama", PADDED, tied=True).state_dict().items()}
    src, config = saved(tmp_path, Held(state)), str(config_of(tmp_path, "llama", tie_word_embeddings=True))
    held = exported(src, tmp_path / "one", config_from=config)
    assert "lm_head.weight" not in load_file(tmp_path / "one" / "model.safetensors")
    assert "lm_head.weight (tied: it is model.embed_tokens.weight)" in held["left_out"]
    state["lm_head.weight"][3, 3] += 1
    held = exported(saved(tmp_path / "two", Held(state)), tmp_path / "both", config_from=config)
    assert "lm_head.weight" in load_file(tmp_path / "both" / "model.safetensors")
    assert json.loads((tmp_path / "both" / "config.json").read_text())["tie_word_embeddings"] is False
    assert "config.json: tie_word_embeddings is False, as of the tensors" in held["changed"]


def test_the_tied_tensor_has_the_name_of_the_embedding_whichever_was_saved_first(tmp_path: Path) -> None:
    state = dict(reversed(trained("llama", tied=True).state_dict().items()))
    config = str(config_of(tmp_path, "llama", tie_word_embeddings=True))
    exported(saved(tmp_path, Held(state)), tmp_path / "hf", config_from=config)
    names = load_file(tmp_path / "hf" / "model.safetensors").keys()
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names


def test_names_lose_the_parts_of_wrappers(tmp_path: Path) -> None:
    model = trained("qwen2", tied=False)
    save_file({f"module._orig_mod.{name}": value for name, value in model.state_dict().items()}, tmp_path / "ddp.safetensors")
    held = exported(tmp_path / "ddp.safetensors", tmp_path / "hf", config_from=str(config_of(tmp_path, "qwen2")))
    assert load_file(tmp_path / "hf" / "model.safetensors").keys() == model.state_dict().keys()
    assert "module._orig_mod.lm_head.weight: called lm_head.weight, without the names of wrappers" in held["changed"]


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"vocab_size": 51}, r"its vocab_size is 51, and the embedding has 50 rows; give .* by config_from=<folder>$"),
        ({"num_hidden_layers": 3}, r"not that of these tensors \(missing: 9 \(model.layers.2.*\)"),
        ({"num_hidden_layers": 1}, r"not that of these tensors \(unexpected keys: 9 \(model.layers.1.*\)"),
        ({"intermediate_size": 20}, r"of another shape: 6 \(model.layers.0.mlp.gate_proj.weight \(24, 16\) instead of \(20, 16\)"),
        ({"model_type": "hal9000"}, r"check=logits: transformers cannot make the trained model: .*hal9000"),
    ],
)  # fmt: skip
def test_a_config_of_another_model_is_one_sentence_and_nothing_appears(
    tmp_path: Path, values: dict[str, Any], sentence: str
) -> None:
    src, config = saved(tmp_path, trained("llama", tied=False)), config_of(tmp_path, "llama", **values)
    with pytest.raises(ConfigurationError, match=sentence):
        exported(src, tmp_path / "hf", config_from=str(config))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config", "own"]


def test_other_logits_are_one_sentence_and_nothing_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an export that goes wrong: a tensor of the trained model is another one than the exported."""
    src, config = saved(tmp_path, trained("gpt2", tied=True)), str(config_of(tmp_path, "gpt2"))
    fill = logits._fill

    def spoilt(model: Any, selection: Any) -> None:
        fill(model, selection)
        with torch.no_grad():
            model.transformer.h[1].mlp.c_fc.weight[0, 0] += 1

    monkeypatch.setattr(logits, "_fill", spoilt)
    with pytest.raises(ConfigurationError, match=r"^export to .*: check=logits: the logits .* absolute difference: .*\), so nothing"):
        exported(src, tmp_path / "hf", config_from=config)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config", "own"]


def _export(topology: Topology, cfg: dict[str, Any]) -> list[str]:
    return convert_on_ranks(cfg, topology)["held"]["changed"]


def test_several_ranks_export_what_one_does_and_fail_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    src, config = saved(tmp_path, trained("qwen2", PADDED, tied=True)), str(config_of(tmp_path, "qwen2"))
    changed = exported(src, tmp_path / "one", config_from=config)["changed"]
    keys = ConvertKeys(str(src), str(tmp_path / "two"), "safetensors", config_from=config, check="logits")
    assert run_threads(2, _export, run_of(keys), agree_s=60.0) == [changed, changed]
    for file in (tmp_path / "one").iterdir():
        assert file.read_bytes() == (tmp_path / "two" / file.name).read_bytes()
    monkeypatch.setattr(logits, "_logits", lambda *_: torch.rand(1, 2, 3))
    with pytest.raises(ConfigurationError, match="so nothing is written"):
        run_threads(2, _export, run_of(ConvertKeys(**vars(keys) | {"dst": str(tmp_path / "three")})), agree_s=60.0)
    assert not list(tmp_path.glob("*three*"))


def test_the_check_needs_a_config_and_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    src = saved(tmp_path, trained("llama", tied=False))
    with pytest.raises(ConfigurationError, match="check=logits needs the model's config.json, .*; give config_from=<folder>$"):
        exported(src, tmp_path / "hf")
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(ConfigurationError, match="the check of the logits .*transformers"):
        exported(src, tmp_path / "hf", config_from=str(config_of(tmp_path, "llama")))
    for keys, sentence in (({"check": "shapes"}, "choose logits, or check=None"), ({"check": "logits"}, "is for to=safetensors")):
        with pytest.raises(ConfigurationError, match=sentence):
            ConvertKeys(src="a", dst="b", to="safetensors" if keys["check"] != "logits" else "zarr", **keys).validate()
