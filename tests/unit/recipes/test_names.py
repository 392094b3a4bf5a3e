"""Whatever a tensor is called: errors, logs, reports and what the commands print is one line a message, every character visible."""

from __future__ import annotations

import ast
import io
import json
import logging
import sys
import tempfile
import time
import traceback
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.console import Console

from ckpt import StateComponent, errors
from ckpt.catalog.verify import verify_checkpoint
from ckpt.cli import progress
from ckpt.cli.comparing import DiffKeys, diff
from ckpt.cli.reading import InspectKeys, ReadingKeys, show, verify
from ckpt.cli.tables import DataConsole, print_json
from ckpt.errors import CheckpointError, logger_of, printable
from ckpt.loading.report import ComponentReport, LoadReport, Misfits, Status
from ckpt.ranks.topology import Topology
from recipes.support.cli import recipe
from recipes.support.live_line import LiveLine
from recipes.support.sweep import sweep_table
from tests.support.pace import patience
from tests.support.states import Fitted, Held, coordinator

CKPT = Path(errors.__file__).parent
HOSTILE = (
    "w\x1b]0;pwned\x07\x1b[2J\nERROR root logged in",
    "w\u202e\u2066\u200f\u061cx\u200bx\ufeff",
    "w\x7f\x85\x9b31m\u2028\u2029x",
    "[bold]w[/] [link=https://example.org]x[/link] {0} :smile: %s [/nothing]",
    "\ud800w\udcff",
)
READABLE = "h.0/attn é 中文 😀 ñandú'\"\\"
names = st.text(min_size=1, max_size=12) | st.sampled_from(HOSTILE)


def hidden(text: str) -> list[str]:
    """Characters that a terminal obeys, or does not show."""
    return [c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")]


def is_one_line(text: str) -> bool:
    return not hidden(text) and len(text.splitlines()) <= 1


@contextmanager
def records() -> Iterator[list[str]]:
    """What the package logs in the block, as a handler of the root writes it."""
    said: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    try:
        yield said
    finally:
        logging.getLogger().removeHandler(handler)


def printed(work: Callable[[], object]) -> str:
    with redirect_stdout(io.StringIO()) as out:
        work()
    return out.getvalue()


@given(st.text())
def test_a_printable_text_is_one_line_and_is_not_escaped_twice(text: str) -> None:
    assert is_one_line(printable(text))
    assert printable(printable(text)) == printable(text)
    assert text.replace(" ", "x").isprintable() is (printable(text) == text)


def test_letters_of_every_script_stay_readable() -> None:
    assert printable(READABLE) == READABLE


@pytest.mark.parametrize("text", HOSTILE)
def test_an_error_of_another_library_is_one_line_too(text: str) -> None:
    for error in (ValueError(text), KeyError(text), OSError(2, text, text), RuntimeError(text)):
        assert is_one_line(errors.sentence(error))
        assert str(errors.rebuild(json.loads(json.dumps(errors.describe(error))))) == errors.sentence(error)


@settings(max_examples=12, deadline=None)
@given(names)
@example(HOSTILE[0])
@example(HOSTILE[3])
@example(READABLE)
def test_no_name_of_a_tensor_reaches_a_terminal_or_a_log_as_it_is(name: str) -> None:
    with tempfile.TemporaryDirectory() as folder, records() as said:
        root = Path(folder)
        texts: list[str] = []
        parts = [StateComponent("model", Held({name: torch.arange(40_000.0)}), "replicated")]
        with coordinator(Topology.alone(), root, parts, config_text="a: 1\n") as made:
            for number in (1, 2):
                parts[0].stateful.state[name] += 1.0
                made.save_checkpoint(checkpoint_id=str(number), metadata={name: name})
            one, two = root / "checkpoint-1", root / "checkpoint-2"
            lines = printed(lambda: (show(InspectKeys(str(root))), show(InspectKeys(str(two), limit=None))))
            lines += printed(lambda: show(InspectKeys(str(two), json=True)))
            lines += printed(
                lambda: (diff(DiffKeys(str(one), str(two))), diff(DiffKeys(str(one), str(two), json=True)))
            )
            file = max((one for one in two.rglob("*") if one.is_file()), key=lambda one: one.stat().st_size)
            data = bytearray(file.read_bytes())
            data[100] ^= 1
            file.write_bytes(data)
            lines += printed(lambda: (verify(ReadingKeys(str(two))), verify(ReadingKeys(str(two), json=True))))
            texts += verify_checkpoint(two)
            made.load_checkpoint()
            assert any("is damaged and passed over" in text for text in said)
            with pytest.raises(CheckpointError) as caught:
                made.load_checkpoint(two)
            texts += [str(caught.value), *"".join(traceback.format_exception(caught.value)).split("\n")]
        other = [StateComponent("model", Fitted({f"{name}.other": torch.zeros(3)}), "replicated")]
        with coordinator(Topology.alone(), root, other) as made:
            with pytest.raises(CheckpointError) as caught:
                made.load_checkpoint(one)
            texts.append(str(caught.value))
            other[0].stateful.state[name] = torch.zeros(40_000)
            made.load_checkpoint(one, strict=False)
    assert all(map(is_one_line, texts)), [text for text in texts if not is_one_line(text)]
    assert all(map(is_one_line, said)), [text for text in said if not is_one_line(text)]
    assert not hidden(lines.replace("\n", ""))
    if name == READABLE:
        assert any(name in text for text in texts) and any(name in text for text in said) and name in lines


@pytest.mark.parametrize("text", HOSTILE)
def test_a_report_of_a_load_has_a_line_for_each_component(text: str) -> None:
    parts = (
        ComponentReport("model", Status.PARTLY, misfits=Misfits((text,), (text,), {text: text})),
        ComponentReport("ema", Status.SKIPPED, text),
    )
    assert [is_one_line(line) for line in LoadReport("a", "1", 0, 0, 0, "", components=parts).summary().split("\n")] == [
        True, True,
    ]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE)
def test_a_command_prints_an_error_on_one_line(
    text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    @recipe("verify", writes=False)
    def refuses(cfg: object) -> None:
        raise OSError(text)

    monkeypatch.setattr(sys, "argv", ["verify", "path=x"])
    with pytest.raises(SystemExit):
        refuses()
    said = capsys.readouterr().err
    assert said.endswith("\n") and is_one_line(said[:-1]) and "OSError: " in said


@pytest.mark.parametrize("text", HOSTILE)
def test_consoles_show_texts_as_they_are_but_for_what_cannot_be_seen(text: str) -> None:
    row = {"overrides": [f"run_name={text}", "a=1"], "error": text}
    line = LiveLine(Console(width=300), 3, 1)
    with line.moving(text):
        line._moving = text
        shown = line.text().plain
    out = io.StringIO()
    console = DataConsole(file=out, width=300)
    console.print(text, style="bold red")
    console.print(sweep_table([row, row | {"overrides": ["run_name=b", "a=1"]}]))
    assert out.getvalue().splitlines()[0] == printable(text)
    assert not hidden(out.getvalue().replace("\n", "")) and is_one_line(shown)
    assert not hidden(printed(lambda: print_json({text: [text]})).replace("\n", ""))


@pytest.mark.parametrize("text", HOSTILE)
def test_the_bar_of_bytes_takes_any_name(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(progress, "SHOWN_AFTER_S", 0.0)
    monkeypatch.setenv("COLUMNS", "300")
    began = time.monotonic()
    with progress.progress_bar(text, 10):
        while printable(text) not in screen.getvalue() and time.monotonic() - began < patience(5):
            time.sleep(0.001)
    assert printable(text) in screen.getvalue()
    assert text == printable(text) or text not in screen.getvalue()


def test_every_record_of_the_package_passes_the_escapes() -> None:
    """A logger does not filter what its children log: so each is of `logger_of`, or is "ckpt" itself."""
    for file in CKPT.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "getLogger":
                given = node.args[0] if node.args else None
                is_own = file.name == "errors.py"
                assert is_own or (isinstance(given, ast.Constant) and given.value == "ckpt"), f"{file}:{node.lineno}"
    with records() as said:
        logger_of("ckpt.a.child").warning("%s", HOSTILE[0])
        logging.getLogger("ckpt").warning("%s", HOSTILE[0])
    assert said == [printable(HOSTILE[0])] * 2
