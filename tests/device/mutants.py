"""Faults of the product for its tests to find, told by function and statement, so that they outlive a change of anything else."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Mutant(NamedTuple):
    """One change to a function of the product, and the tests that must see it.

    Attributes:
        name: what the product then does not do.
        where: file and function, such as "ckpt/memory/copies.py: Staging.take".
        old: an expression, or statements in a row, which the function holds once. A body `...` stands for any.
        new: what takes its place; a body `...` is the one that was found. Empty: nothing does.
        killers: names of tests, one of which fails.
    """

    name: str
    where: str
    old: str
    new: str
    killers: tuple[str, ...]

    @property
    def file(self) -> str:
        return self.where.partition(":")[0]


def mutated(mutant: Mutant, text: str) -> str:
    """Return the text of the mutant's file with the change.

    Raises:
        ValueError: there is no such function, or it does not hold what is to be changed once.
    """
    tree = ast.parse(text)
    function = _function(tree, mutant.where.partition(": ")[2])
    old, new = ast.parse(mutant.old).body, ast.parse(mutant.new).body
    found = list(_expressions(function, old[0].value)) if _is_expression(old) else []
    if found:
        (parent, field, at), replacement = found[0], _value(new)
        target = getattr(parent, field)
        if at is None:
            setattr(parent, field, replacement)
        else:
            target[at] = replacement
    else:
        found = list(_statements(function, old))
        if found:
            body, at = found[0]
            kept = [one.body for one in body[at : at + len(old)] if hasattr(one, "body")]
            body[at : at + len(old)] = [_with_body(one, kept) for one in new] or [ast.Pass()]
    if len(found) != 1:
        raise ValueError(f"{mutant.name}: {mutant.where} holds {mutant.old!r} {len(found)} times")
    names = "from contextlib import nullcontext\n" if "nullcontext" in mutant.new else ""
    return _after_future(ast.unparse(ast.fix_missing_locations(tree)), names)


def _function(tree: ast.Module, name: str) -> ast.AST:
    at: ast.AST = tree
    for part in name.split("."):
        inner = [
            node
            for node in ast.walk(at)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == part
        ]
        if not inner:
            raise ValueError(f"there is no {name}")
        at = inner[0]
    return at


def _is_expression(old: Sequence[ast.stmt]) -> bool:
    return len(old) == 1 and isinstance(old[0], ast.Expr)


def _value(new: Sequence[ast.stmt]) -> ast.expr:
    assert len(new) == 1 and isinstance(new[0], ast.Expr), "an expression takes the place of an expression"
    return new[0].value


def _expressions(function: ast.AST, old: ast.expr) -> Iterator[tuple[ast.AST, str, int | None]]:
    """Where an expression stands that is not a statement of its own."""
    wanted = ast.unparse(old)
    for node in ast.walk(function):
        if isinstance(node, ast.Expr):
            continue
        for field, value in ast.iter_fields(node):
            for at, one in enumerate(value) if isinstance(value, list) else [(None, value)]:
                if isinstance(one, ast.expr) and ast.unparse(one) == wanted:
                    yield node, field, at


def _statements(function: ast.AST, old: Sequence[ast.stmt]) -> Iterator[tuple[list[ast.stmt], int]]:
    """Where statements stand in a row, as (the list that holds them, the number of the first)."""
    for node in ast.walk(function):
        for _, value in ast.iter_fields(node):
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                for at in range(len(value) - len(old) + 1):
                    if all(map(_is_like, old, value[at : at + len(old)])):
                        yield value, at


def _is_like(pattern: ast.stmt, found: ast.stmt) -> bool:
    if _is_open(pattern) and type(pattern) is type(found):
        found = copy.copy(found)
        found.body = pattern.body  # type: ignore[attr-defined]
    return ast.unparse(pattern) == ast.unparse(found)


def _is_open(one: ast.stmt) -> bool:
    return ast.unparse(getattr(one, "body", [])) == "..." if hasattr(one, "body") else False


def _with_body(one: ast.stmt, kept: Sequence[list[ast.stmt]]) -> ast.stmt:
    if _is_open(one):
        one.body = kept[0]  # type: ignore[attr-defined]
    return one


def _after_future(text: str, names: str) -> str:
    """Put imports behind the line that must come first."""
    first = "from __future__ import annotations\n"
    return text.replace(first, first + names, 1) if names else text
