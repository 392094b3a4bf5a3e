"""PYTHONHASHSEED, and with it the order of a set of strings, changes no byte of a checkpoint and no answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.one_by_one import one_by_one

PROGRAM = "tests.support.hash_seeds"


def test_programs_under_two_hash_seeds_write_the_same_bytes_and_find_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is a process that is started with a seed; one is forked, with that which Python has drawn for this test run."""
    for name in ("started", "forked", "said"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("COLUMNS", "120")  # not every way to start a process leaves a terminal to ask
    seed = "1" if os.environ.get("PYTHONHASHSEED") == "0" else "0"
    environment = os.environ | {"PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", PROGRAM, str(tmp_path / "started")]
    started = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True)
    with one_by_one(Path.cwd(), tmp_path / "said") as run:
        forked = run(PROGRAM, str(tmp_path / "forked"))
    said, _ = started.communicate()
    assert (started.returncode, forked.code) == (0, 0), forked.err
    first, other = json.loads(said), json.loads(forked.out)
    assert len(first["files"]) > 50
    assert [key for key in first if first[key] != other[key]] == []
