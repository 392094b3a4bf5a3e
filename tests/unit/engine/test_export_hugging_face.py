"""Weights to publish of a transformers model: names, cuts and bits are those of the files that `save_pretrained` writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("transformers")

from ckpt.engine import HuggingFaceWeights
from tests.servers.models import FAMILIES, make


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_those_of_its_files(family: str, tmp_path: Path) -> None:
    model = make(family, 3)
    model.save_pretrained(tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    yielded = list(HuggingFaceWeights(model))
    assert sorted(name for name, _ in yielded) == sorted(written), "each once"
    for name, tensor in yielded:
        assert torch.equal(tensor, written[name]), name
    with torch.no_grad():
        model.get_input_embeddings().weight.zero_()
    assert not dict(HuggingFaceWeights(model))["model.embed_tokens.weight"].any(), "what the model holds now"
