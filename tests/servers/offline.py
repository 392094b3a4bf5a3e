"""A `vllm.LLM`: what it answers with the weights of its folder, and, after each update, with those of another folder. A program for tests.

    python -m tests.servers.offline <folder> <settings of LLM, JSON> [<folder of newer weights> ...]

Prints a line of JSON for each.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import transformers
from safetensors.torch import load_file
from vllm import LLM, SamplingParams

from ckpt.engine.export import HuggingFaceWeights
from ckpt.engine.inference.vllm_servers import OfflineVllm, VllmTrainer

PROMPTS = [[5, 6, 7], [400, 17, 17, 2, 99, 250], [511]]
SETTINGS: dict[str, Any] = {"dtype": "float32", "enforce_eager": True, "max_model_len": 128, "skip_tokenizer_init": True, "seed": 0}


def answers(llm: Any) -> list[Any]:
    """Return the most probable tokens, with their log-probabilities, and the versions of the weights that they come from."""
    sampling = SamplingParams(temperature=0, max_tokens=8, logprobs=5, detokenize=False, ignore_eos=True)
    outputs = [one.outputs[0] for one in llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], sampling, use_tqdm=False)]
    return [
        {
            "tokens": list(one.token_ids),
            "logprobs": [{token: value.logprob for token, value in at.items()} for at in one.logprobs],
            "versions": [span.version for span in one.weight_versions or ()],
        }
        for one in outputs
    ]


def main(folder: str, settings: str, *newer: str) -> None:
    llm = LLM(folder, weight_transfer_config={"backend": "ckpt"}, **SETTINGS, **json.loads(settings))
    print(json.dumps(answers(llm)), flush=True)
    for step, other in enumerate(newer, 1):
        weights = load_file(f"{other}/model.safetensors").items()
        if "quantization_config" not in json.loads(Path(other, "config.json").read_text()):
            weights = HuggingFaceWeights(transformers.AutoModelForCausalLM.from_pretrained(other, dtype="auto"))
        with VllmTrainer(OfflineVllm(llm), weights) as trainer:
            trainer.send_weights(step)
        print(json.dumps(answers(llm)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
