"""The table of what verl's engine asks for: every row has tests, and they exist."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[2]
TABLE = TESTS / "weight_sync_ids.md"
ELSEWHERE = {10}
"""CONTRIBUTING.md."""
_ROW = re.compile(r"\| S2\.(\d+) \| [^|]*[^| ] \| ([^|]*[^| ]) \|")
_TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def test_every_point_has_one_row_and_every_row_names_tests_that_there_are() -> None:
    rows = [_ROW.fullmatch(line) for line in TABLE.read_text(encoding="utf-8").splitlines() if line.startswith("| S")]
    assert [int(row[1]) for row in rows if row] == sorted({*range(1, 42)} - ELSEWHERE)
    assert None not in rows
    missing = []
    for row in rows:
        assert row is not None
        names = row[2].split()
        assert all(_TEST.fullmatch(name) for name in names), row[0]
        for file, function in _TEST.findall(row[2]):
            path = TESTS.parent / file
            if not path.is_file() or f"\ndef {function}(" not in path.read_text(encoding="utf-8"):
                missing.append(f"S2.{row[1]}: there is no {file}::{function}")
    assert missing == []
