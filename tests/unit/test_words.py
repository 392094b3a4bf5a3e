"""Names in the code: a loop variable says what it runs over, and words are those of the field."""

from __future__ import annotations

import ast
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path for package in ("ckpt", "recipes") for path in (ROOT / package).rglob("*.py"))


def loop_variables(tree: ast.AST) -> Iterator[ast.Name]:
    for node in ast.walk(tree):
        if isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
            yield from (name for name in ast.walk(node.target) if isinstance(name, ast.Name))


@pytest.mark.parametrize("package", ["ckpt", "recipes"])
def test_a_loop_variable_says_what_it_runs_over(package: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{name.lineno}: {name.id}"
        for path in SOURCES
        if path.is_relative_to(ROOT / package)
        for name in loop_variables(ast.parse(path.read_text(encoding="utf-8")))
        if name.id == "one"
    ]
    assert not found, "a noun in place of `one`"


def test_loops_and_comprehensions_are_looked_at() -> None:
    tree = ast.parse("for one in a:\n    b = [x for k, (x, y) in c if (z := k)]\none = 1")
    assert sorted(name.id for name in loop_variables(tree)) == ["k", "one", "x", "y"]


REPLACED = {
    re.compile(r"\w*(sliver|Sliver)\w*"): "a part of a chunk, sent or received",
    re.compile(r"\w*(landing|Landing)s?"): "a receive buffer; of a device, a filling",
    re.compile(r"\w*contribution\w*"): "rank_state",
    re.compile(r"_?(told|said)|said_by"): "a noun for the value: offer, report, record, reason",
}
"""Names -> what is written instead."""


def in_other_words(path: Path) -> Iterator[str]:
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            instead = [says for name, says in REPLACED.items() if name.fullmatch(token.string)]
            if path.is_relative_to(ROOT / "ckpt" / "saving") and token.string in ("share", "_share"):
                instead.append("write_plan, of a `RankWritePlan`")
            if token.type == tokenize.NAME and instead:
                yield f"{path.relative_to(ROOT)}:{token.start[0]}: {token.string}: {instead[0]}"


@pytest.mark.parametrize("package", ["ckpt", "recipes"])
def test_names_are_words_of_the_field(package: str) -> None:
    found = [line for path in SOURCES if path.is_relative_to(ROOT / package) for line in in_other_words(path)]
    assert not found, "\n".join(found)
