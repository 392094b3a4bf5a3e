"""The tables of reference points (`tests/*_ids.md`) name tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
_TEST = re.compile(r"`(tests/[\w/]+\.py)::(?:\w+::)?(\w+)`")


@pytest.mark.parametrize(("table", "num_rows"), [("dist_checkpointing_ids.md", 77), ("weight_sync_ids.md", 40)])
def test_every_row_names_tests_that_exist(table: str, num_rows: int) -> None:
    rows = [line for line in (TESTS / table).read_text(encoding="utf-8").splitlines() if line.startswith("| S")]
    assert len(rows) == num_rows and all(_TEST.search(row) for row in rows)
    sources = {file: (TESTS.parent / file).read_text(encoding="utf-8") for file, _ in _TEST.findall("".join(rows))}
    assert [
        f"{file}::{name}" for file, name in _TEST.findall("".join(rows)) if f"def {name}(" not in sources[file]
    ] == []
