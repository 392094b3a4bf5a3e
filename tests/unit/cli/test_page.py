"""Pages: texts are escaped, whatever they hold, and a page replaces nothing but a page."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path

import pytest

from ckpt.cli.pages.page import hue, page, write_page
from ckpt.cli.pages.sweep_page import sweep_page
from ckpt.errors import ConfigurationError
from ckpt.format.manifest import MANIFEST_NAME
from tests.support.pages import job, parsed

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'&\x00\u202e\ud800 `${x}` {{ 7 * 7 }}"
SHOWN = HOSTILE.replace("\x00", "\\x00").replace("\u202e", "\\u202e").replace("\ud800", "\\ud800")


def empty(title: str, lead: str = "") -> str:
    return page("page.html", title, lead)


def test_a_hostile_text_is_shown_and_never_an_element_or_an_attribute(monkeypatch: pytest.MonkeyPatch) -> None:
    key = HOSTILE.replace("=", " ")
    overrides = [f"all={HOSTILE}", f"{key}={HOSTILE}"]
    jobs = [job("") | {"overrides": overrides, "state_digest": HOSTILE}, {"overrides": overrides[:1], "error": HOSTILE}]
    monkeypatch.setattr("ckpt.cli.pages.sweep_page.short_names", lambda keys: {key: HOSTILE})
    monkeypatch.setattr("ckpt.cli.pages.sweep_page.digest_digits", lambda jobs: len(HOSTILE))
    text = sweep_page(jobs)
    whole = parsed(text)
    assert not whole.all("img") and len(whole.all("script")) == 1
    (head,) = (one for one in whole.by_id("jobs").all("button") if one.text == SHOWN)
    assert head.attributes["data-tip"] == SHOWN.replace("=", " ")
    first, second = whole.rows("jobs")
    assert first[SHOWN].text == first[SHOWN].attributes["data-label"] == SHOWN
    assert first["digest"].text == first["digest"].attributes["data-value"] == first["digest"].attributes["data-tip"] == SHOWN
    assert second["save s"].text == f"failed: {SHOWN}" and whole.all("span", "chip")[0].text == f"all={SHOWN}"
    text.encode()


def test_a_title_and_the_sentence_below_it_are_escaped_but_for_line_breaks() -> None:
    text = empty(HOSTILE, f"{HOSTILE}\nsecond line")
    whole = parsed(text)
    assert not whole.all("img") and len(whole.all("script")) == 1
    assert whole.all("title")[0].text == whole.all("h1")[0].text == SHOWN
    assert whole.all("p", "lead")[0].text == f"{SHOWN}\nsecond line"
    text.encode()


def test_neighbors_have_colors_that_differ() -> None:
    degrees = [int(hue(number).partition(":")[2]) for number in range(64)]
    assert all(0 <= one < 360 for one in degrees)
    assert all(30 < abs(one - other) % 360 < 330 for one, other in pairwise(degrees))


def test_a_page_is_replaced_and_any_other_file_is_kept(tmp_path: Path) -> None:
    target = tmp_path / "out.html"
    write_page(target, empty("one"))
    write_page(target, empty("two"))
    assert "two" in target.read_text() and [one.name for one in tmp_path.iterdir()] == ["out.html"]
    notes = tmp_path / "notes.html"
    notes.write_text("<title>mine</title>")
    with pytest.raises(ConfigurationError, match="notes.html exists and is not a page of this command; remove it"):
        write_page(notes, empty("one"))
    assert notes.read_text() == "<title>mine</title>"
    os.mkfifo(tmp_path / "pipe")  # nobody writes to it: to read it would take forever
    with pytest.raises(ConfigurationError, match="pipe exists and is not a page of this command"):
        write_page(tmp_path / "pipe", empty("one"))


def test_a_folder_and_the_inside_of_a_checkpoint_are_refused(tmp_path: Path) -> None:
    inside = tmp_path / "checkpoint-1"
    (inside / "model").mkdir(parents=True)
    (inside / MANIFEST_NAME).touch()
    for target, said in (
        (tmp_path, "is a folder; give the path of a file in it, such as .*page.html"),
        (tmp_path / "no" / "out.html", "no does not exist; make that folder"),
        (inside / "out.html", "is inside of .*checkpoint-1: a checkpoint holds no other files"),
        (inside / "model" / "out.html", "is inside of .*checkpoint-1: a checkpoint holds no other files"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            write_page(target, empty("one"))
        assert not target.is_file()
