"""A program that saves and loads in all ways, and prints what it found: `python -m tests.support.hash_seeds FOLDER`.

Python draws the order of a set of strings anew for each process. Nothing of it may reach a file or an answer: the program prints one text,
whatever PYTHONHASHSEED is.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import os
import random
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

import ckpt
import recipes.convert
import recipes.diff
import recipes.inspect
from ckpt import dist_checkpointing
from ckpt.dist_checkpointing.mapping import ShardedObject
from ckpt.integrations.dcp import CkptReader, CkptWriter
from ckpt.saving.save_settings import SaveSettings
from ckpt.state.sharded_tensor import ShardedTensor

FORMATS = ("zarr", "tensorstore", "kimi-engine")
WORDS = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta")
_OF_ONE_RUN = re.compile(rb"20\d\d-\d\d-\d\d[T ][0-9:.]+|\b(?:[0-9a-f]{16}|[0-9a-f]{32})\b")
"""Times, ids of runs, and digests, among them those of files with times and ids."""


_NOT_COMPARED = ("tensorstore", "to-dcp", "to-torch")
"""Not by their bytes: names and marks in TensorStore's database are random, and pickles hold sets in the order of the process."""


class Words:
    """An object whose state holds sets."""

    def __init__(self) -> None:
        self.seen = set(WORDS)

    def state_dict(self) -> dict[str, Any]:
        tensors = {word: torch.arange(float(len(word))) for word in WORDS}
        return {"seen": self.seen, "frozen": frozenset(WORDS), "tensors": tensors}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


def nested() -> dict[str, Any]:
    torch.manual_seed(3)
    return {
        "model": torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1)).state_dict(),
        "nested": {"x": {"t": torch.arange(2), "n": 1}, "words": set(WORDS)},
        "list": [torch.arange(2), 5, {"z": 1, "a": torch.arange(3)}],
        "tuple": (torch.arange(4), "b", {"c": torch.arange(5.0)}),
        "of tuples": [(torch.arange(2), 1), 2],
    }


def train(root: Path, format: Any) -> dict[str, Any]:
    """Save three times, each time linking what has not changed, and go on from the second."""
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    model = torch.nn.ModuleDict({word: torch.nn.Linear(90, 90) for word in WORDS})
    optimizer = torch.optim.AdamW(model.parameters())
    words = Words()
    options = {
        "format": format,
        "mode": SaveSettings(incremental=True),
        "on_sigterm": False,
        "save_at_end": False,
    }
    with ckpt.Checkpointer(root, model=model, optimizer=optimizer, words=words, **options) as checkpoints:
        for step, word in enumerate(WORDS[:3], start=1):
            model[word](torch.ones(90)).sum().backward()
            optimizer.step()
            checkpoints.save(step)
        checkpoints.restore(2)
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "words": sorted(words.seen)}


def dist(folder: Path) -> dict[str, Any]:
    def sharded() -> dict[str, Any]:
        tensors = {word: ShardedTensor.from_rank_offsets(word, torch.arange(6.0)) for word in WORDS}
        return {"t": tensors, "o": ShardedObject("o", set(WORDS), (1,), (0,)), "words": set(WORDS)}

    folder.mkdir()
    dist_checkpointing.save(sharded(), folder)
    return {"loaded": dist_checkpointing.load(sharded(), folder)}


def of_dcp(folder: Path) -> dict[str, Any]:
    dcp.save(nested(), storage_writer=CkptWriter(folder))
    into = {"tuple": (), "of tuples": [], "nested": {"words": set()}}
    dcp.load(into, storage_reader=CkptReader(folder))
    whole = _load_state_dict_from_keys(storage_reader=CkptReader(folder))
    return {
        "into": into,
        "whole": whole,
        "part": _load_state_dict_from_keys({"list"}, storage_reader=CkptReader(folder)),
    }


def command(recipe: Any, *overrides: str) -> str:
    sys.argv = [recipe.__name__, *overrides]
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        recipe.main()
    return shown.getvalue()


def error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:
        return str(error)
    raise AssertionError("it is no error")


def text(value: Any) -> str:
    """Text in which nothing is ordered but the items of sets."""
    if isinstance(value, dict):
        return f"{type(value).__name__}({', '.join(f'{text(key)}: {text(one)}' for key, one in value.items())})"
    if isinstance(value, set | frozenset):
        return f"{type(value).__name__}({sorted(map(text, value))})"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}({', '.join(map(text, value))})"
    return repr(value.tolist() if isinstance(value, torch.Tensor) else value)


def main() -> None:
    os.chdir(sys.argv[1])
    warnings.simplefilter("ignore")
    logging.getLogger("ckpt").setLevel(logging.ERROR)
    root = Path()
    found: dict[str, Any] = {format: text(train(root / format, format)) for format in FORMATS}
    ckpt.save(nested() | {"pairs": {frozenset(WORDS): 1}}, root / "saved")
    found |= {"saved": text(ckpt.load("saved")), "dist": text(dist(root / "dist")), "dcp": text(of_dcp(root / "dcp"))}
    checkpoint = "zarr/checkpoint-00000003"
    for to in ("dcp", "torch", "safetensors", "zarr"):
        found[f"convert {to}"] = command(recipes.convert, f"src={checkpoint}", f"dst=to-{to}", f"to={to}")
        found[f"to-{to}"] = text(ckpt.load(f"to-{to}", allow_pickle=to in ("dcp", "torch")))
    found["diff"] = command(recipes.diff, "a=zarr/checkpoint-00000001", f"b={checkpoint}")
    found["inspect"] = command(recipes.inspect, f"path={checkpoint}", "all=true")
    misspelt = {"output_dir": 1, "state_components": 1}
    found["misspelt"] = error_of(lambda: ckpt.Checkpointer("x", model=torch.nn.Linear(1, 1), **misspelt))
    found["near"] = error_of(lambda: ckpt.Checkpointer("x", model=torch.nn.Linear(1, 1), keep_lest=1))
    into = {word: torch.zeros(2) for word in WORDS}
    found["missing"] = error_of(lambda: ckpt.load("saved", into=into))
    files = [file for file in sorted(root.rglob("*")) if file.is_file() and file.parts[0] not in _NOT_COMPARED]
    found["files"] = {str(file): hashlib.sha256(_OF_ONE_RUN.sub(b"", file.read_bytes())).hexdigest() for file in files}
    print(_OF_ONE_RUN.sub(b"", json.dumps(found, indent=1).encode()).decode())


if __name__ == "__main__":
    main()
