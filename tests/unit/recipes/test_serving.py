"""The recipe's model as transformers and vLLM know it, and the keys of inference servers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt.errors import ConfigurationError
from recipes.training.gpt import GPT
from recipes.training.serving import check_inference, write_gpt2

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("tied", [False, True])
def test_the_model_that_is_served_has_the_logits_of_the_one_that_trains(tied: bool, tmp_path: Path) -> None:
    model = GPT(size="nano", tie_embeddings=tied, dropout=0.0, seed=3).double().eval()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(number))
    write_gpt2(tmp_path, model)
    served = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert type(served).__name__ == "GPT2LMHeadModel"
    tokens = torch.randint(256, (2, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(served.eval()(tokens).logits, model(tokens), rtol=1e-10, atol=1e-10)


RUN: dict[str, Any] = {
    "roles": {"inference": "vllm", "colocated": False},
    "model": {"_target_": "recipes.training.gpt.GPT"},
    "inference": {"prompt": "The "},
}


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"roles": {"inference": "sglang"}}, "roles.inference=sglang: expected vllm"),
        ({"roles": {"inference": "vllm", "colocated": True}}, "give roles.colocated=false"),
        ({"model": {"_target_": "my.Model"}}, "serves model=gpt alone"),
        ({"inference": {"prompt": ""}}, "inference.prompt is empty"),
    ],
)
def test_keys_that_do_not_fit_are_refused(changed: dict[str, Any], sentence: str) -> None:
    check_inference(RUN)
    with pytest.raises(ConfigurationError, match=sentence):
        check_inference(RUN | changed)
