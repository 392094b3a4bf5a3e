"""PYTHONHASHSEED, and with it the order of a set of strings, changes no byte of a checkpoint and no answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

SEEDS = (0, 1)


def test_programs_under_several_hash_seeds_write_the_same_bytes_and_find_the_same(tmp_path: Path) -> None:
    processes = []
    for seed in SEEDS:
        (folder := tmp_path / str(seed)).mkdir()
        environment = {**os.environ, "PYTHONHASHSEED": str(seed), "OMP_NUM_THREADS": "1"}
        words = [sys.executable, "-m", "tests.support.hash_seeds", str(folder)]
        processes.append(subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True))
    first, *others = (_found(process) for process in processes)
    assert len(first["files"]) > 50
    for other in others:
        assert [key for key in first if first[key] != other[key]] == []


def _found(process: subprocess.Popen[str]) -> dict[str, Any]:
    said, _ = process.communicate()
    assert process.returncode == 0
    found: dict[str, Any] = json.loads(said)
    return found
