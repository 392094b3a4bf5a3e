"""The examples in docstrings of the library: they run, and print what they say. Each public name has one."""

from __future__ import annotations

import ast
import doctest
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import ckpt
from ckpt.format.box import Box

PACKAGE = Path(ckpt.__file__).parent
WITH_EXAMPLES = [
    ".".join(("ckpt", *path.relative_to(PACKAGE).with_suffix("").parts))
    for path in sorted(PACKAGE.rglob("*.py"))
    if ">>> " in path.read_text()
]


@pytest.mark.parametrize("module", WITH_EXAMPLES)
def test_the_examples_of_a_module_print_what_they_say(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = import_module(module)
    runner = doctest.DocTestRunner()
    stateful = SimpleNamespace(state_dict=dict, load_state_dict=dict)
    given = {"ckpt": ckpt, "torch": torch, "Box": Box, "Path": Path, "stateful": stateful}
    for number, example in enumerate(doctest.DocTestFinder().find(found, extraglobs=given)):
        (tmp_path / str(number)).mkdir()
        monkeypatch.chdir(tmp_path / str(number))
        said: list[str] = []
        assert runner.run(example, out=said.append).failed == 0, "".join(said)


def test_dir_shows_the_public_names_alone_and_each_has_an_example() -> None:
    assert dir(ckpt) == sorted(ckpt.__all__)
    for name in set(ckpt.__all__) - {"__version__"}:
        home = ast.parse(Path(import_module(getattr(ckpt, name).__module__).__file__ or "").read_text())
        (defined,) = [one for one in ast.walk(home) if getattr(one, "name", None) == name and hasattr(one, "body")]
        assert isinstance(defined, ast.FunctionDef | ast.ClassDef)
        assert ">>> " in (ast.get_docstring(defined) or ""), name
