"""A model that ranks hold together, in any cut, is exported as the model that it is: one folder for `from_pretrained`, with its logits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from ckpt.cli.converting import ConvertKeys, convert
from tests.support.forked_ranks import RunForked, forked_from
from tests.support.trained_models import VOCAB, config_of, trained
from tests.support.values import same_values

pytestmark = pytest.mark.filterwarnings("ignore")
ROWS = 57  # of the embedding: more than tokens, and not to be divided


@pytest.fixture(scope="module")
def run() -> Iterator[RunForked]:
    with forked_from("tests.support.trained_models") as run:
        yield run


@pytest.mark.parametrize(
    ("layout", "ranks", "family", "tied"),
    [
        ("fsdp", 3, "qwen2", True),
        ("tp", 2, "llama", False),
        ("tp_fsdp", 6, "llama", False),
        ("pipeline", 2, "llama", False),
        ("pipeline", 2, "qwen2", True),
    ],
)
def test_a_model_that_ranks_hold_together_is_exported_whole(
    run: RunForked, tmp_path: Path, layout: str, ranks: int, family: str, tied: bool
) -> None:
    run(ranks, "saved_by_ranks", layout, tmp_path, family, ROWS, tied=tied)
    config = config_of(tmp_path, family, tie_word_embeddings=tied)
    src = tmp_path / "own" / "checkpoint-00000001"
    convert(ConvertKeys(str(src), str(tmp_path / "hf"), to="safetensors", config_from=str(config), check="logits"))
    found, info = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(info.values()) and found.config.vocab_size == VOCAB and found.config.tie_word_embeddings is tied
    own = trained(family, ROWS, tied=tied).state_dict()
    assert same_values(dict(found.state_dict()), {name: value[:VOCAB] if len(value) == ROWS else value for name, value in own.items()})
