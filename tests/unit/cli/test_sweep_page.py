"""The page of a sweep has the figures of sweep.json, and advises what they support, and no more."""

from __future__ import annotations

from typing import Any

import pytest

from ckpt.cli.pages.sweep_advice import advice
from ckpt.cli.pages.sweep_page import sweep_page
from tests.support.pages import SENTENCE, Element, failed, job, parsed


def page_of(jobs: list[dict[str, Any]]) -> Element:
    return parsed(sweep_page(jobs))


def test_every_figure_of_every_job_is_in_the_table_to_the_last_digit() -> None:
    jobs = [
        job("a=1 ckpt=zarr launch.nproc_per_node=1", [0.1, 0.3], 12.5, 4000),
        job("a=1 ckpt=zarr launch.nproc_per_node=2", 0.4, 25.0, 2000, state_digest="cd" * 16),
    ]
    whole = page_of(jobs)
    for row, one, ranks in zip(whole.rows("jobs"), jobs, "12", strict=True):
        assert row["nproc_per_node"].text == ranks and "ckpt" not in row
        columns = {
            "save s": "save_s",
            "load s": "load_s",
            "blocked s": "blocked_s",
            "read": "bytes_read",
            "written": "bytes_written",
        }
        assert {column: float(row[column].attributes["data-value"] or "") for column in columns} == {
            column: one[key] for column, key in columns.items()
        }
        assert (
            row["digest"].text == one["state_digest"][:8]
            and row["digest"].attributes["data-tip"] == one["state_digest"]
        )
    first, second = whole.rows("jobs")
    assert (first["save s"].text, first["load s"].text, first["read"].text) == ("0.200", "12.500", "4.0 kB")
    assert "0.100 to 0.300 in 2 saves" in (first["save s"].attributes["data-tip"] or "")
    (bar,), (line,) = first["save s"].all("i"), first["save s"].all("b")
    most = 0.4 * 1.02  # the slowest save of all jobs
    assert bar.attributes["style"] == f"width:{round(100 * 0.2 / most, 3):g}%"
    assert line.attributes["style"] == f"left:{round(100 * 0.1 / most, 3):g}%;width:{round(100 * 0.2 / most, 3):g}%"
    assert [one.text for one in first["load s"].all("strong", "best")] == ["12.500"] and not second["load s"].all(
        "strong"
    )
    assert [one.text for one in second["read"].all("strong", "best")] == ["2.0 kB"]
    assert {one.text for one in whole.all("span", "chip")} == {"a=1", "ckpt=zarr"}


def test_a_failed_job_is_a_row_with_its_sentence() -> None:
    whole = page_of([job("ckpt=zarr"), failed("ckpt=tensorstore")])
    good, bad = whole.rows("jobs")
    assert bad["ckpt"].text == "tensorstore" and bad["save s"].text == f"failed: {SENTENCE}"
    assert bad["save s"].attributes["colspan"] == str(len(good) - 2)
    assert "1 of them failed" in whole.all("p", "lead")[0].text
    assert not good["save s"].all("strong"), "of one job no figure is the best"


def test_a_sweep_of_failed_jobs_a_job_without_saves_and_hostile_overrides_are_pages() -> None:
    assert page_of([failed("a=1"), failed("a=2")]).text.count(SENTENCE) == 2
    none = dict.fromkeys(("save_s", "load_s", "blocked_s", "bytes_written", "bytes_read"))
    bare = job("ckpt=zarr") | none | {"save_s_each": [], "blocked_s_each": []}
    whole = page_of([bare, job("ckpt=<script>alert(1)</script>"), job("~components.rng")])
    texts = whole.texts("jobs")
    assert texts[0]["save s"] == texts[0]["written"] == "-"
    assert [row["ckpt"] for row in texts] == ["zarr", "<script>alert(1)</script>", "-"]
    assert texts[2]["rng"] == "yes"


def test_a_bar_of_no_time_at_all_is_empty() -> None:
    for row in page_of([job("ckpt=zarr", 0.0), job("ckpt=tensorstore", 0.0)]).rows("jobs"):
        (bar,) = row["save s"].all("i")
        assert bar.attributes["style"] == "width:0%" and not row["save s"].all("b")


def test_rows_of_an_older_sweep_have_no_figures_of_single_saves() -> None:
    old = {key: value for key, value in job("ckpt=zarr").items() if not key.endswith("_each") and key != "bytes_needed"}
    (row,) = page_of([old]).rows("jobs")
    assert row["save s"].attributes["data-value"] == str(old["save_s"]) and not row["save s"].all("b")


def test_the_advice_names_the_gain_the_price_and_where_to_pay_it() -> None:
    jobs = [job("strategy=direct", load=1.0, read=4000), job("strategy=two-stage", load=1.1, read=1000)]
    said = "two-stage reads 1/4 of the bytes of direct and takes 1.1 times as long to load here: choose it where storage is shared."
    assert advice(jobs) == [said]
    assert [one.text for one in page_of(jobs).all("p", "advice")] == [said]


@pytest.mark.parametrize(
    ("jobs", "said"),
    [
        (
            [job("ckpt=zarr", 1.0), job("ckpt=tensorstore", 0.5)],
            ["tensorstore saves in 1/2 of the time of zarr here: choose it."],
        ),
        (
            [job("ckpt=zarr", 1.0, load=1.0), job("ckpt=tensorstore", 0.5, load=3.0)],
            [
                "zarr loads in 1/3 of the time of tensorstore and takes 2.0 times as long to save here: "
                "choose it where restarts are frequent."
            ],
        ),
        (
            [job("strategy=direct", read=4000), job("strategy=two-stage", load=0.1, read=1000)],
            ["two-stage reads 1/4 of the bytes of direct and loads in 1/2 of the time here: choose it."],
        ),
        (
            [job("strategy=direct", read=4000, load=None), job("strategy=two-stage", load=None, read=1000)],
            ["two-stage reads 1/4 of the bytes of direct here: choose it."],
        ),
        (
            [job("strategy=direct", load=1.0, read=4000), job("strategy=two-stage", load=0.9, read=1000)],
            ["two-stage reads 1/4 of the bytes of direct and loads in about as much time here: choose it."],
        ),
        (
            [job("save.mode=sync", 1.0), job("save.mode=async", 1.3, blocked_s=0.05, blocked_s_each=[0.04, 0.06])],
            [
                "mode=async blocks training for 1/20 of the time of mode=sync and takes 1.3 times as long to save here: "
                "choose it where training must not wait."
            ],
        ),
        (
            [
                job(f"strategy={name} launch.nproc_per_node={ranks}", read=1000 * (ranks if name == "direct" else 1))
                for ranks in (2, 4)
                for name in ("direct", "two-stage")
            ],
            ["two-stage reads 1/4 to 1/2 of the bytes of direct and loads in about as much time here: choose it."],
        ),
        (
            [job("ckpt=zarr", 1.0), job("ckpt=tensorstore", 0.5), job("ckpt=kimi-engine", 0.25)],
            ["kimi-engine saves in 1/2 of the time of tensorstore here: choose it."],
        ),
    ],
)
def test_advice(jobs: list[dict[str, Any]], said: list[str]) -> None:
    assert advice(jobs) == said


@pytest.mark.parametrize(
    "jobs",
    [
        [job("ckpt=zarr", [0.5, 1.5]), job("ckpt=tensorstore", [0.4, 0.6])],  # saves of one are as fast as those of the other
        [job("ckpt=zarr", load=1.0), job("ckpt=tensorstore", load=0.9)],  # measured once, about the same
        [job("ckpt=zarr", 1.0), failed("ckpt=tensorstore")],
        [job("launch.nproc_per_node=1", 1.0), job("launch.nproc_per_node=2", 0.1)],  # the work itself
        [job("ckpt=zarr launch.nproc_per_node=1", 1.0), job("ckpt=tensorstore launch.nproc_per_node=2", 0.1)],  # no pair
        [
            job("ckpt=zarr a=1", 1.0), job("ckpt=tensorstore a=1", 0.5),
            job("ckpt=zarr a=2", 0.5), job("ckpt=tensorstore a=2", 1.0),
        ],  # now this, now that
        [job("ckpt=zarr", 0.0), job("ckpt=tensorstore", 0.0)],
    ],
)  # fmt: skip
def test_no_advice_where_the_figures_support_none(jobs: list[dict[str, Any]]) -> None:
    assert advice(jobs) == []
