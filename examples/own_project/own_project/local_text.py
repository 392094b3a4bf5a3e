"""Lines of a local file for a language model of Hugging Face. transformers reads model and tokenizer from a local folder."""

import json
from pathlib import Path

import torch
from transformers import AutoTokenizer


class LocalText:
    """A map-style dataset: the text of a `.jsonl` file, as windows of token ids.

    Args:
        path: each line is a JSON object with the key `text`.
        tokenizer: a local folder that `from_pretrained` reads.
        length: tokens of a window.
    """

    def __init__(self, *, path: str, tokenizer: str, length: int) -> None:
        texts = [json.loads(line)["text"] for line in Path(path).read_text().splitlines()]
        tokens = AutoTokenizer.from_pretrained(tokenizer, local_files_only=True)(" ".join(texts))["input_ids"]
        self.windows = torch.tensor(tokens[: len(tokens) // length * length]).view(-1, length)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.windows[number], "labels": self.windows[number]}
