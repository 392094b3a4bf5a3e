"""Adapters of PEFT as components of their own, under DDP, FSDP2 and HSDP: resumed on other ranks, written for PEFT, and read from it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("peft")

from ckpt.cli.converting import ConvertKeys, convert
from ckpt.storage.stored import read_manifest
from tests.support.forked_ranks import RunForked, forked_from
from tests.support.peft_runs import STEPS, TOKENS, adapted, base
from tests.support.ranks import Dead
from tests.support.states import same_bits

pytestmark = pytest.mark.filterwarnings("ignore")
LAST = f"checkpoint-{STEPS:08d}"


@pytest.fixture(scope="module")
def run() -> Iterator[RunForked]:
    with forked_from("tests.support.peft_runs") as run:
        yield run


def require_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    assert not [name for name in one if not same_bits(one[name], other[name])]


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [("fsdp", 2), pytest.param("ddp", 2, marks=pytest.mark.full), pytest.param("hsdp", 4, marks=pytest.mark.full)],
)
def test_a_killed_training_goes_on_to_the_bit(run: RunForked, tmp_path: Path, layout: str, ranks: int) -> None:
    straight = run(ranks, "train", layout, tmp_path / "straight")
    assert run(ranks, "train", layout, tmp_path / "killed", STEPS, 4) == [Dead(-9)] * ranks
    for found in run(ranks, "train", layout, tmp_path / "killed"):
        require_same(found, straight[0])
    manifest = read_manifest(tmp_path / "killed" / LAST)
    assert [*manifest.components] == ["adapter-default", "adapter-other", "base", "optimizer", "rng"]
    assert not manifest.arrays_of("base")
    assert all(".lora_" in name or "lm_head" in name for name in manifest.arrays_of("optimizer"))


def test_two_ranks_four_and_one_hold_the_same_bits(run: RunForked, tmp_path: Path) -> None:
    saved = run(2, "train", "fsdp", tmp_path)[0]
    for layout, ranks in (("fsdp", 4), ("ddp", 2), ("hsdp", 4), ("alone", 1)):
        for found in run(ranks, "restored", layout, tmp_path):
            require_same(found, saved)


@pytest.mark.parametrize("adapter", ["default", "other"])
def test_a_converted_adapter_is_opened_by_peft_with_the_logits_of_the_trained_model(run: RunForked, tmp_path: Path, adapter: str) -> None:
    from peft import PeftModel, load_peft_weights

    trained = run(2, "train", "fsdp", tmp_path / "run")[0]
    convert(ConvertKeys(str(tmp_path / "run" / LAST), str(tmp_path / adapter), to="safetensors", component=f"adapter-{adapter}"))
    whole = adapted()
    whole.load_state_dict({name: value for name, value in trained.items() if " of " not in name})
    whole.set_adapter(adapter)
    whole.save_pretrained(str(tmp_path / "by peft"), selected_adapters=[adapter])
    by_peft = tmp_path / "by peft" / ("" if adapter == "default" else adapter)
    require_same(load_peft_weights(str(tmp_path / adapter)), load_peft_weights(str(by_peft)))
    opened = PeftModel.from_pretrained(base(), str(tmp_path / adapter))
    assert sorted(path.name for path in (tmp_path / adapter).iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    with torch.no_grad():
        assert same_bits(opened(input_ids=TOKENS).logits, whole.eval()(input_ids=TOKENS).logits)


def test_an_adapter_that_peft_has_written_is_loaded_into_shards(run: RunForked, tmp_path: Path) -> None:
    written = adapted()
    with torch.no_grad():
        for name, value in written.named_parameters():
            if ".default." in name:
                value.add_(torch.arange(float(value.numel())).view(value.shape))
    written.save_pretrained(str(tmp_path), selected_adapters=["default"])
    for found in run(2, "loaded", "fsdp", tmp_path):
        require_same(found, written.state_dict())
    for options, expected in (
        ({"r": 2}, "adapter default was saved with r=3, and this run makes it with r=2; make it as it was saved"),
        ({"target_modules": ["v_proj"]}, "was saved with target_modules=['q_proj', 'up_proj'], and this run makes it with target_m"),
    ):
        assert all(expected in str(sentence) for sentence in run(2, "loaded", "fsdp", tmp_path, **options))


def test_other_bases_and_other_adapters_are_refused_on_every_rank_and_nothing_changes(run: RunForked, tmp_path: Path) -> None:
    run(2, "train", "fsdp", tmp_path)
    own = "and this run has models/tiny (digest "
    for options, expected in (
        ({"seed": 5}, own),
        ({"r": 2}, "was saved with r=3, and this run makes it with r=2"),
        ({"lora_alpha": 2}, "was saved with lora_alpha=8, and this run makes it with lora_alpha=2"),
        ({"target_modules": ["q_proj"]}, "was saved with target_modules=['q_proj', 'up_proj'], and"),
        ({"peft_base": "saved"}, "knows the base by its digest alone; go on with peft_base=frozen"),
    ):
        first, second = run(2, "refusal", "fsdp", tmp_path, **options)
        assert first == second
        assert expected in first


def test_a_base_that_is_saved_is_restored_from_there(run: RunForked, tmp_path: Path) -> None:
    options = {"peft_base": "saved", "incremental": True}
    saved = run(2, "train", "fsdp", tmp_path, **options)[0]
    names = read_manifest(tmp_path / LAST).arrays_of("base")
    assert names.keys() >= {"model.layers.0.self_attn.q_proj.weight", "model.embed_tokens.weight", "lm_head.weight"}
    assert names.keys() == base().state_dict().keys()
    require_same(run(1, "train", "alone", tmp_path, seed=5, **options)[0], saved)
    assert "holds the base itself; go on with peft_base=saved" in run(1, "refusal", "alone", tmp_path)[0]


def test_an_adapter_of_shards_is_merged_into_the_base_that_was_saved(run: RunForked, tmp_path: Path) -> None:
    trained = run(2, "train", "fsdp", tmp_path / "run", peft_base="saved")[0]
    base().config.save_pretrained(tmp_path / "config")
    keys = {"component": "adapter-default", "merge_adapters": True, "check": "logits", "config_from": str(tmp_path / "config")}
    convert(ConvertKeys(str(tmp_path / "run" / LAST), str(tmp_path / "hf"), to="safetensors", **keys))
    whole = adapted()
    whole.load_state_dict({name: value for name, value in trained.items() if " of " not in name})
    merged, found = whole.merge_and_unload(), type(base()).from_pretrained(tmp_path / "hf")
    assert found.state_dict().keys() == merged.state_dict().keys()
    for name, value in found.state_dict().items():
        torch.testing.assert_close(value, merged.state_dict()[name], rtol=1e-6, atol=1e-7)
