"""README and the handbook as their readers use them: every block runs, every link leads somewhere.

A page's ```python blocks run in order in one namespace, in an empty folder. Its ```bash blocks run in order, each in a shell of its
own, in a copy of what a clone has. What a block needs and no reader does stands before it in a comment that begins with
`<!-- run first`; a block below `<!-- not run: <reason> -->` is left out, and so is a command that .ci/run types itself, below
`<!-- command: <name> -->`.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e import processes
from tests.e2e.runs import REPO
from tests.support.pace import patience
from tests.support.ranks import forkserver

PAGES = [REPO / "README.md", REPO / "CONTRIBUTING.md", REPO / "CHANGELOG.md", *sorted((REPO / "docs").rglob("*.md"))]
IN_A_CLONE = ("ckpt", "conf", "examples", "recipes", "tests", "docs", "constraints.txt", "pyproject.toml")
SAMPLE = {"guides/object-stores.md"}
"""The page whose commands run in every test run; those of all pages run in .ci/full."""

_FENCE = re.compile(r"^ *```(\w*)$")
_LINK = re.compile(r"(?<!!)\[[^]]*\]\(([^)\s]+)\)|!\[[^]]*\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """A part of a page that runs: its language, its text, and the number of its first line."""

    language: str
    text: str
    line: int


def blocks(page: Path) -> Iterator[Block]:
    """Every block of a page that runs, in order, with its preparation before it."""
    lines = page.read_text().splitlines()
    number, prepared, left_out = 0, "", False
    prepared_at = 0
    while number < len(lines):
        line = lines[number]
        if line.startswith("<!-- run first"):
            end = lines.index("-->", number)
            prepared, prepared_at = "\n".join(lines[number + 1 : end]), number + 2
            number = end
        elif re.match(r"<!-- (not run|command): .*-->$", line):
            left_out = True
        elif opened := _FENCE.match(line):
            end = next(at for at in range(number + 1, len(lines)) if lines[at].strip() == "```")
            if opened[1] in ("python", "bash") and not left_out:
                if prepared:
                    yield Block(opened[1], prepared, prepared_at)
                    prepared = ""
                yield Block(opened[1], "\n".join(lines[number + 1 : end]), number + 2)
            number, left_out = end, False
        number += 1


def _name(page: Path) -> str:
    return str(page.relative_to(REPO)).removeprefix("docs/")


def _with(language: str) -> list[Path]:
    return [page for page in PAGES if any(block.language == language for block in blocks(page))]


@pytest.mark.parametrize("page", _with("python"), ids=_name)
def test_the_python_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    found = [block for block in blocks(page) if block.language == "python"]
    lines = [""] * (found[-1].line + found[-1].text.count("\n"))  # a traceback then has the numbers of the page's lines
    for block in found:
        lines[block.line - 1 : block.line + block.text.count("\n")] = block.text.splitlines() or [""]
    reader = forkserver().Process(target=_read, args=("\n".join(lines), str(page), tmp_path))
    reader.start()
    reader.join(patience(60.0))
    if reader.is_alive():
        reader.kill()
    reader.join()
    assert reader.exitcode == 0, (tmp_path / ".said").read_text()


def _read(source: str, page: str, folder: Path) -> None:
    os.chdir(folder)
    said = os.open(".said", os.O_WRONLY | os.O_CREAT)
    os.dup2(said, 1)
    os.dup2(said, 2)
    exec(compile(source, page, "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[] if _name(page) in SAMPLE else pytest.mark.full) for page in _with("bash")],
    ids=_name,
)
def test_the_commands_of_a_page_run_in_order(page: Path, tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    clone.mkdir()
    for name in IN_A_CLONE:
        source = REPO / name
        if source.is_dir():
            shutil.copytree(source, clone / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, clone / name)
    environment = {
        **os.environ,
        **processes.mark(tmp_path),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(clone),
        "OMP_NUM_THREADS": "1",
    }
    for block in blocks(page):
        if block.language == "bash":
            assert not (problem := _typed(block.text, clone, environment)), (
                f"{page.name}:{block.line}\n{block.text}\n{problem}"
            )
    assert not processes.left_after(patience(10.0), lambda: processes.marked(tmp_path))


def _typed(text: str, folder: Path, environment: dict[str, str]) -> str:
    """What a block said, if it failed."""
    shell = subprocess.Popen(
        ["bash", "-euo", "pipefail", "-c", text],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = shell.communicate(timeout=patience(300.0))
    except subprocess.TimeoutExpired:
        os.killpg(shell.pid, signal.SIGKILL)
        return f"still running after 300 s; it had said:\n{shell.communicate()[0]}"
    return said if shell.returncode else ""


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    dead = []
    for match in _LINK.finditer(text):
        target, _, anchor = (match[1] or match[2]).partition("#")
        if re.match(r"\w+:", target):
            continue
        file = (page.parent / target).resolve() if target else page
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in _anchors(file)):
            dead.append(match[1] or match[2])
    assert dead == []


def _anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and mkdocs make them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_readme_is_read_to_the_end() -> None:
    assert len((REPO / "README.md").read_text().splitlines()) <= 150
