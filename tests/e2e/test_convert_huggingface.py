"""What `recipes.convert` writes for Hugging Face is read by transformers itself, and the other way round: bits, names, tied weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedModel, PreTrainedTokenizerFast

import ckpt
from ckpt import Checkpointer
from ckpt.cli.converting import ConvertKeys, convert_on_ranks, run_of
from ckpt.ranks.topology import Topology
from tests.support.values import same_values

TIED = "gpt2"
CONFIGS = {
    TIED: lambda: GPT2Config(
        n_layer=2, n_head=2, n_embd=32, vocab_size=61, n_positions=16, bos_token_id=1, eos_token_id=2
    ),
    "llama": lambda: LlamaConfig(
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, hidden_size=32, intermediate_size=48,
        vocab_size=61,
    ),
}  # fmt: skip
SIZES = ["5GB", "20KB"]


def made(name: str, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.bfloat16)
    return model


def converted(src: Path, dst: Path, **keys: Any) -> dict[str, Any]:
    return convert_on_ranks(run_of(ConvertKeys(src=str(src), dst=str(dst), **keys)), Topology.alone())


def require_same(found: PreTrainedModel, model: PreTrainedModel, name: str) -> None:
    assert same_values(dict(found.state_dict()), dict(model.state_dict()))
    is_tied = found.get_output_embeddings().weight is found.get_input_embeddings().weight
    assert is_tied == (name == TIED)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CONFIGS)
def test_from_pretrained_reads_what_a_checkpointer_saved(tmp_path: Path, name: str, size: str) -> None:
    model = made(name, 0)
    with Checkpointer(tmp_path / "own", model=model) as checkpoints:
        src = checkpoints.save(1)
    assert src is not None
    model.config.save_pretrained(tmp_path / "config")
    keys = {"max_shard_size": size, "config_from": str(tmp_path / "config")}
    told = converted(Path(src), tmp_path / "plain", to="safetensors", **keys)
    assert (tmp_path / "plain" / "model.safetensors.index.json").exists() == (size != "5GB")
    assert len(told["held"]["left_out"]) == (name == TIED)
    assert told["held"]["copied"] == ["config.json"]
    found, info = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", output_loading_info=True)
    assert not any(info.values()), info
    require_same(found, model, name)


@pytest.mark.parametrize("name", CONFIGS)
def test_from_pretrained_reads_the_model_of_one_rank_in_a_checkpoint_of_kimi_engine(tmp_path: Path, name: str) -> None:
    model = made(name, 0)
    with Checkpointer(tmp_path / "own", model=model, format="kimi-engine") as checkpoints:
        folder = Path(str(checkpoints.save(1)), "model")
    copy = shutil.copytree(folder, tmp_path / "plain")
    model.config.save_pretrained(copy)
    found, info = AutoModelForCausalLM.from_pretrained(copy, output_loading_info=True)
    assert not any(info.values()), info
    require_same(found, model, name)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_goes_on_from_what_save_pretrained_wrote(tmp_path: Path, name: str, size: str) -> None:
    model, hf = made(name, 0), tmp_path / "hf"
    model.save_pretrained(hf, max_shard_size=size)
    assert (hf / "model.safetensors.index.json").exists() == (size != "5GB")
    assert same_values(
        ckpt.load(hf),
        {key: value for key, value in model.state_dict().items() if name != TIED or key != "lm_head.weight"},
    )
    converted(hf, tmp_path / "7")
    for number, src in enumerate((hf, tmp_path / "7")):
        live = made(name, 1)
        with Checkpointer(tmp_path / f"own-{number}", model=live, save_rng=False) as checkpoints:
            checkpoints.restore(src)
        require_same(live, model, name)


def test_a_folder_that_is_cut_anew_keeps_its_config_and_tokenizer(tmp_path: Path) -> None:
    model, hf, new = made(TIED, 0), tmp_path / "hf", tmp_path / "new"
    model.save_pretrained(hf)
    words = {
        "version": "1.0",
        "added_tokens": [],
        "model": {"type": "WordLevel", "vocab": {"a": 0, "[UNK]": 1}, "unk_token": "[UNK]"},
    }
    (hf / "tokenizer.json").write_text(json.dumps(words))
    PreTrainedTokenizerFast.from_pretrained(hf).save_pretrained(hf)
    for other in ("trainer_state.json", "optimizer.pt"):
        (hf / other).write_text("{}")
    (hf / "vocab.json").symlink_to(tmp_path / "secret.json")
    (tmp_path / "secret.json").write_text("{}")
    told = converted(hf, new, to="safetensors", max_shard_size="20KB")
    copied = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
    assert sorted(told["held"]["copied"]) == copied
    assert told["num_files"] == sum(1 for _ in new.iterdir()) == len(told["held"]["files"]) + 1 + len(copied)
    assert told["num_bytes"] == sum(path.stat().st_size for path in new.iterdir())
    require_same(AutoModelForCausalLM.from_pretrained(new), model, TIED)
    assert PreTrainedTokenizerFast.from_pretrained(new).get_vocab() == {"a": 0, "[UNK]": 1}


@pytest.mark.parametrize("size", SIZES)
def test_a_snapshot_of_the_hub_is_converted_with_its_config(tmp_path: Path, size: str) -> None:
    """In the layout of Hugging Face's cache: every file is a link to a blob."""
    model, hf = made("llama", 0), tmp_path / "hf"
    model.save_pretrained(hf, max_shard_size=size)
    blobs, snapshot = (tmp_path / "models--org--llama" / below for below in ("blobs", "snapshots/5f0b"))
    for folder in (blobs, snapshot):
        folder.mkdir(parents=True)
    for number, file in enumerate(sorted(hf.iterdir())):
        file.rename(blobs / f"{number:064x}")
        (snapshot / file.name).symlink_to(f"../../blobs/{number:064x}")
    told = converted(snapshot, tmp_path / "plain", to="safetensors", max_shard_size="20KB")
    assert told["held"]["copied"] == ["config.json", "generation_config.json"]
    assert not any(path.is_symlink() for path in (tmp_path / "plain").iterdir())
    require_same(AutoModelForCausalLM.from_pretrained(tmp_path / "plain"), model, "llama")
    converted(snapshot, tmp_path / "7")
    live = made("llama", 1)
    with Checkpointer(tmp_path / "own", model=live, save_rng=False) as checkpoints:
        checkpoints.restore(tmp_path / "7")
    require_same(live, model, "llama")
