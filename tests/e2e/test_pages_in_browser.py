"""The pages in a real browser, headless Chromium: they open, sort, filter and show tips, dark and light, on a screen and a phone."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt import StateComponent
from ckpt.catalog.incremental import DiskUse
from ckpt.cli.pages.checkpoint_page import checkpoint_values
from ckpt.cli.pages.inspect_page import folder_page
from ckpt.cli.pages.page import page
from ckpt.cli.pages.sweep_page import sweep_page
from ckpt.ranks.topology import Topology
from ckpt.saving.save_settings import SaveSettings
from tests.support.pages import HOSTILE, SENTENCE, SHOWN, failed, job, manifest, rows, whole
from tests.support.states import Held, coordinator

pytestmark = pytest.mark.full

BROWSERS = ("chromium", "chromium-browser", "chromium-headless-shell", "google-chrome", "chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with api.sync_playwright() as running:
        own = Path(running.chromium.executable_path)
        found = str(own) if own.exists() else next(filter(None, map(shutil.which, BROWSERS)), None)
        if found is None:
            pytest.skip("no Chromium is installed: neither playwright's own nor one on PATH")
        started = running.chromium.launch(executable_path=found)
        yield started
        started.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A page of each kind, whose names try to break out of it."""
    folder = tmp_path_factory.mktemp("pages")
    jobs = [
        job("ckpt=zarr strategy=direct", [0.3, 0.4], 1.0, 4000),
        job("ckpt=zarr strategy=two-stage", [0.5, 0.6], 1.1, 1000),
        job(
            "ckpt=a-name-without-any-place-to-break-it-that-is-longer-than-a-phone-is-wide strategy=direct",
            0.1,
            2.0,
            4000,
        ),
        failed("ckpt=<img/src=x/onerror=alert(1)> strategy=two-stage"),
    ]
    sharded = {f"model/layers.{n}.weight": rows((300, 100 + n), 4) for n in range(12)}
    sharded |= {HOSTILE: rows((500, 100), 4), "optimizer/avg": whole("float32", (900, 100), rank=3)}
    state = {"frozen": torch.arange(100_000.0), "moving": torch.arange(50_000.0), HOSTILE[:-1]: torch.zeros(300, 200)}
    run = coordinator(
        Topology.alone(),
        folder / "run",
        [StateComponent("model", Held(state), "replicated")],
        saves=SaveSettings(incremental=True),
    )
    for checkpoint_id in ("1", "2", "3"):
        state["moving"] += 1
        run.save_checkpoint(checkpoint_id=checkpoint_id)
    texts = {
        "sweep": sweep_page(jobs),
        "checkpoint": page(
            "inspect.html",
            "checkpoint-1",
            checkpoint=checkpoint_values({"": manifest(sharded, world_size=4)}, DiskUse(5000, 1000)),
        ),
        "folder": folder_page(folder / "run"),
    }
    for name, text in texts.items():
        (folder / f"{name}.html").write_text(text)
    return {name: folder / f"{name}.html" for name in texts}


class Tab:
    """An open page, and whatever went wrong in it."""

    def __init__(self, browser: Any, path: Path, **options: Any) -> None:
        self.page = browser.new_context(**options).new_page()
        self.trouble: list[str] = []
        self.page.on("console", lambda said: self.trouble.append(f"{said.type}: {said.text}"))
        self.page.on("pageerror", lambda error: self.trouble.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.trouble.append(dialog.message), dialog.dismiss()))
        self.page.on("request", lambda asked: self.trouble.append(asked.url) if asked.url != path.as_uri() else None)
        self.page.goto(path.as_uri())

    def column(self, table: str, heading: str) -> list[str]:
        """What a column shows, from top to bottom, without hidden rows."""
        cells = self.page.locator(f"#{table} tbody tr:visible td[data-label='{heading}']")
        return [str(text) for text in cells.all_inner_texts()]

    def click(self, table: str, heading: str) -> None:
        self.page.locator(f"#{table} th button", has_text=heading).first.click()

    def hover(self, selector: str) -> str:
        """Return the tip that shows over the first such element, and see that all of it is on the screen."""
        self.page.locator(selector).first.hover()
        tip = self.page.locator(".tip")
        assert tip.is_visible()
        box, size = tip.bounding_box(), self.page.viewport_size
        assert box["x"] >= 0 and box["x"] + box["width"] <= size["width"] and box["y"] >= 0
        return str(tip.inner_text())

    def overflow(self) -> int:
        """By how many pixels the page is wider than the screen."""
        return int(self.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth"))

    def close(self) -> None:
        assert self.trouble == []
        self.page.context.close()


def test_the_page_of_a_sweep_sorts_and_shows_tips(browser: Any, pages: dict[str, Path]) -> None:
    tab = Tab(browser, pages["sweep"], viewport={"width": 1180, "height": 900})
    assert tab.column("jobs", "job") == ["0", "1", "2", "3"]
    tab.click("jobs", "save s")
    assert tab.column("jobs", "job") == ["2", "0", "1", "3"], "the failed job has no figure, and comes last"
    tab.click("jobs", "save s")
    assert tab.column("jobs", "job") == ["1", "0", "2", "3"]
    assert tab.page.locator("th[aria-sort=descending]").all_inner_texts() == ["save s"]
    tab.click("jobs", "strategy")
    assert tab.column("jobs", "strategy") == ["direct", "direct", "two-stage", "two-stage"]
    assert "0.300 to 0.400 in 2 saves" in tab.hover("td[data-label='save s'] >> text=0.350")
    assert tab.hover("th button >> text=load s") == "Seconds to load the last checkpoint"
    tab.page.keyboard.press("Escape")
    assert not tab.page.locator(".tip").is_visible()
    assert tab.page.locator("td.failed").inner_text().endswith(SENTENCE)
    tab.close()


def test_the_page_of_a_checkpoint_filters_sorts_and_leads_to_pictures(browser: Any, pages: dict[str, Path]) -> None:
    tab = Tab(browser, pages["checkpoint"], viewport={"width": 1180, "height": 900})
    assert tab.column("tensors", "tensor")[0] == "optimizer/avg"
    tab.click("tensors", "size")
    tab.click("tensors", "size")
    assert tab.column("tensors", "tensor")[0] == "model/layers.0.weight"
    tab.click("tensors", "tensor")
    assert tab.column("tensors", "tensor")[2:4] == ["model/layers.1.weight", "model/layers.2.weight"], (
        "numbers sort as numbers"
    )
    tab.page.get_by_placeholder("Filter").fill("LAYERS.1")
    assert tab.column("tensors", "tensor") == [f"model/layers.{n}.weight" for n in (1, 10, 11)]
    assert tab.hover(".treemap a[data-tip^='optimizer/avg']").splitlines()[1:] == [
        "float32 900 x 100, 360.0 kB",
        "zarr model/w by rank 3",
    ]
    assert tab.hover(".treemap a[data-tip*='onerror']").splitlines()[0] == SHOWN
    assert tab.hover(".picture i:nth-of-type(2)") == "rank 1 wrote [125:250, 0:100]"
    tab.page.locator(".treemap a[href]").first.click()
    assert tab.page.locator(".card:target h3").inner_text() == "4 ranks along dimension 0"
    tab.close()


def test_the_page_of_a_folder_has_its_commits_in_time(browser: Any, pages: dict[str, Path]) -> None:
    tab = Tab(browser, pages["folder"], viewport={"width": 1180, "height": 900})
    assert tab.column("checkpoints", "checkpoint") == ["checkpoint-1", "checkpoint-2", "checkpoint-3 newest"]
    tab.click("checkpoints", "committed")
    assert tab.column("checkpoints", "checkpoint")[0] == "checkpoint-3 newest"
    assert tab.hover(".timeline i >> nth=0").startswith("checkpoint-1\ncommitted ")
    assert tab.hover("#shared .heat").startswith("checkpoint-2 shares ")
    tab.close()


@pytest.mark.parametrize("scheme", ["dark", "light"])
@pytest.mark.parametrize("name", ["sweep", "checkpoint", "folder"])
def test_a_page_is_read_in_the_dark_in_the_light_and_on_a_phone(
    browser: Any, pages: dict[str, Path], name: str, scheme: str
) -> None:
    tab = Tab(
        browser,
        pages[name],
        viewport={"width": 360, "height": 740},
        color_scheme=scheme,
        has_touch=True,
        is_mobile=True,
    )
    assert tab.overflow() == 0
    background, text = (_luminance(tab, property) for property in ("backgroundColor", "color"))
    assert background < 40 < 200 < text if scheme == "dark" else text < 60 < 240 < background
    for heading in tab.page.locator("table.sorts th button:visible").all():
        heading.click()
    assert tab.overflow() == 0
    tab.page.set_viewport_size({"width": 1180, "height": 900})
    assert tab.overflow() == 0
    tab.close()


def _luminance(tab: Tab, property: str) -> float:
    """The mean of red, green and blue, from 0 to 255."""
    color = tab.page.evaluate(f"getComputedStyle(document.body).{property}")
    return sum(int(one) for one in color.removeprefix("rgb(").removesuffix(")").split(",")) / 3
