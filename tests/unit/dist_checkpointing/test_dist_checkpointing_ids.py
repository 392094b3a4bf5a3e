"""The table of what the first reference's interfaces ask for: every row has tests, they exist, and they say so themselves."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
TABLE = TESTS / "dist_checkpointing_ids.md"
ASKED_FOR = {*range(1, 78)}
"""Those that the table is about; the others up to `LAST` are matters of tests elsewhere."""
LAST = 80
_ROW = re.compile(r"\| S1\.(\d+) \| ([^|]*[^| ]) \| ([^|]*[^| ]) \|")
_TEST = re.compile(r"`(tests/[\w/]+\.py)::(?:(\w+)::)?(\w+)`")
_CITED = re.compile(r"\bS1\.(\d+)")


def rows() -> list[tuple[int, str, str]]:
    """(number, what it asks for, its tests) of every line of the table."""
    lines = [line for line in TABLE.read_text(encoding="utf-8").splitlines() if line.startswith("| S")]
    found = [_ROW.fullmatch(line) for line in lines]
    broken = [line for line, row in zip(lines, found, strict=True) if row is None]
    assert broken == [], "a row is | S1.n | what it asks for | `tests/file.py::test` ... |"
    return [(int(row[1]), row[2], row[3]) for row in found if row is not None]


def named_tests() -> list[tuple[int, str, str | None, str]]:
    """(number, file, class if it is a method, function) of every test that a row names."""
    return [
        (number, file, owner or None, function)
        for number, _, tests in rows()
        for file, owner, function in _TEST.findall(tests)
    ]


@cache
def what_tests_say(file: str) -> dict[tuple[str | None, str], str]:
    """(class, function) of every test of a file -> its docstring and the comment lines directly above it."""
    source = (TESTS.parent / file).read_text(encoding="utf-8")
    lines, said = source.splitlines(), {}
    tree = ast.parse(source)
    owners = [(None, tree), *((node.name, node) for node in tree.body if isinstance(node, ast.ClassDef))]
    for owner, body in owners:
        for node in body.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                first = min(one.lineno for one in (node, *node.decorator_list))
                said[owner, node.name] = f"{_comment_above(lines, first)}\n{ast.get_docstring(node) or ''}"
    return said


def _comment_above(lines: list[str], lineno: int) -> str:
    above = []
    for line in reversed(lines[: lineno - 1]):
        if not line.strip().startswith("#"):
            break
        above.append(line)
    return "\n".join(above)


def citations(text: str) -> set[int]:
    return {int(number) for number in _CITED.findall(text)}


def test_every_id_has_one_row() -> None:
    assert [number for number, _, _ in rows()] == sorted(ASKED_FOR)


def test_a_row_names_nothing_but_tests_and_none_twice() -> None:
    for number, _, tests in rows():
        names = tests.split()
        assert all(_TEST.fullmatch(name) for name in names), f"S1.{number}"
        assert len(set(names)) == len(names), f"S1.{number}"


def test_every_named_test_exists_and_cites_its_id() -> None:
    wrong = []
    for number, file, owner, function in named_tests():
        said = what_tests_say(file).get((owner, function)) if (TESTS.parent / file).is_file() else None
        if said is None:
            wrong.append(f"S1.{number}: there is no {file}::{function}")
        elif number not in citations(said):
            wrong.append(f"S1.{number}: the docstring of {file}::{function} does not cite it")
    assert wrong == []


def test_every_citation_in_the_tests_is_of_a_known_id() -> None:
    cited = {
        (path.name, number) for path in TESTS.rglob("*.py") for number in citations(path.read_text(encoding="utf-8"))
    }
    assert {(file, number) for file, number in cited if not 1 <= number <= LAST} == set()
    assert {number for _, number in cited} >= ASKED_FOR


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('def test_a():\n    """S1.5"""\n', {(None, "test_a"): {5}}),
        ("# S1.5, S1.67\n@mark\ndef test_a(): ...\n", {(None, "test_a"): {5, 67}}),
        ("# S1.5\n\ndef test_a(): ...\n", {(None, "test_a"): set()}),
        ('class TestA:\n    def test_b(self):\n        """S1.12."""\n', {("TestA", "test_b"): {12}}),
        ('def helper():\n    """S1.5"""\n', {}),
    ],
)
def test_what_counts_as_a_citation(
    tmp_path: Path, source: str, expected: dict[tuple[str | None, str], set[int]]
) -> None:
    (tmp_path / "test_x.py").write_text(source)
    found = what_tests_say(str(tmp_path / "test_x.py"))
    assert {name: citations(said) for name, said in found.items()} == expected
