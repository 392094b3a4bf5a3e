"""Pages: texts are escaped, whatever they hold, and a page replaces nothing but a page."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path

import pytest

from ckpt.errors import ConfigurationError
from ckpt.format.manifest import MANIFEST_NAME
from recipes.support.page import Cell, Column, Row, bar, hue, page, table, tag, write_page
from tests.pages import parsed

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'&\x00\u202e\ud800 `${x}`"


def test_a_hostile_text_is_shown_and_never_an_element_or_an_attribute() -> None:
    columns = [Column(HOSTILE, tip=HOSTILE)]
    rows = [Row([Cell(HOSTILE, HOSTILE, tip=HOSTILE)]), Row([Cell([HOSTILE, tag("b", HOSTILE)])])]
    whole = parsed(page(HOSTILE, HOSTILE, table(columns, rows, name="one", filters=True)))
    shown = HOSTILE.replace("\x00", "\\x00").replace("\u202e", "\\u202e").replace("\ud800", "\\ud800")
    assert not whole.all("img") and len(whole.all("script")) == 1
    assert whole.all("title")[0].text == whole.all("h1")[0].text == shown
    first, second = whole.by_id("one").all("tbody")[0].all("td")
    assert first.text == first.attributes["data-value"] == first.attributes["data-tip"] == shown
    assert second.text == shown * 2
    page(HOSTILE, HOSTILE).encode()


def test_attributes_have_their_names_and_absent_ones_are_left_out() -> None:
    made = tag("td", "a < b", class_="number", data_value=3, data_tip=None, hidden=True, colspan=False)
    assert made == '<td class="number" data-value="3" hidden>a &lt; b</td>'
    assert tag("p", ["a", [tag("b", "c"), iter(["d"])]], "e") == "<p>a<b>c</b>de</p>"


def test_a_bar_has_the_length_of_its_value_and_a_line_over_its_spread() -> None:
    assert '<i style="width:25%">' in bar(1, 4) and "<b" not in bar(1, 4)
    assert '<b style="left:12.5%;width:37.5%">' in bar(1, 4, low=0.5, high=2)
    assert "<b" not in bar(1, 4, low=1, high=1)
    assert '<i style="width:0%">' in bar(0, 0)


def test_neighbors_have_colors_that_differ() -> None:
    degrees = [int(hue(number).partition(":")[2]) for number in range(64)]
    assert all(0 <= one < 360 for one in degrees)
    assert all(30 < abs(one - other) % 360 < 330 for one, other in pairwise(degrees))


def test_a_page_is_replaced_and_any_other_file_is_kept(tmp_path: Path) -> None:
    target = tmp_path / "out.html"
    write_page(target, page("one"))
    write_page(target, page("two"))
    assert "two" in target.read_text() and [one.name for one in tmp_path.iterdir()] == ["out.html"]
    notes = tmp_path / "notes.html"
    notes.write_text("<title>mine</title>")
    with pytest.raises(ConfigurationError, match="notes.html exists and is not a page of this command; remove it"):
        write_page(notes, page("one"))
    assert notes.read_text() == "<title>mine</title>"
    os.mkfifo(tmp_path / "pipe")  # nobody writes to it: to read it would take forever
    with pytest.raises(ConfigurationError, match="pipe exists and is not a page of this command"):
        write_page(tmp_path / "pipe", page("one"))


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
            write_page(target, page("one"))
        assert not target.is_file()
