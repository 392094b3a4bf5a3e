"""`ckpt serve`: the pages, what they follow, and who may ask for them."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urljoin, urlsplit

import pytest

from ckpt.catalog.catalog import catalog_at
from ckpt.cli.main import run
from ckpt.cli.serving import LOOPBACK, Site, SiteServer
from ckpt.format.places import Place, place_of
from ckpt.storage.objects import store as stores
from tests.support.object_server import ObjectServer
from tests.support.pages import job, parsed
from tests.unit.cli.test_main import saved


class Browser:
    """Asks a server as a browser does."""

    def __init__(self, server: SiteServer) -> None:
        self.server = server
        self.address = server.address

    def ask(self, link: str = "", *, method: str = "GET", host: str | None = None, **headers: str) -> tuple[int, dict[str, str], str]:
        address = urlsplit(urljoin(self.address, link))
        connection = http.client.HTTPConnection(LOOPBACK, self.server.server_port, timeout=60)
        try:
            connection.putrequest(method, address.path, skip_host=True)
            connection.putheader("Host", host or address.netloc)
            for name, value in headers.items():
                connection.putheader(name, value)
            connection.endheaders()
            answer = connection.getresponse()
            return answer.status, {name.lower(): value for name, value in answer.headers.items()}, answer.read().decode()
        finally:
            connection.close()

    def open(self, link: str = "") -> str:
        status, _, text = self.ask(link)
        assert status == 200, text
        self.address = urljoin(self.address, link)
        return text

    def links(self) -> dict[str, str]:
        found = {link.text: link.attributes.get("href") or "#" for link in parsed(self.open(), served=True).all("a")}
        return {text: link for text, link in found.items() if link[0] != "#"}


@contextmanager
def served(root: Place) -> Iterator[Browser]:
    with SiteServer(Site(root), 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield Browser(server)
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def outputs(tmp_path: Path) -> Path:
    saved(tmp_path / "outputs" / "a b" / "checkpoints", 2)
    saved(tmp_path / "outputs" / "sweep" / "0" / "checkpoints", 1)
    jobs = [job("ckpt=zarr"), job("ckpt=tensorstore", save_s=9.0), {"overrides": ["ckpt=no"], "error": "there is no such choice"}]
    (tmp_path / "outputs" / "sweep" / "sweep.json").write_text(json.dumps(jobs))
    return tmp_path / "outputs"


def test_all_pages_are_reached_by_links_from_the_first(outputs: Path) -> None:
    with served(outputs) as browser:
        links = browser.links()
        assert set(links) == {"a b/checkpoints", "sweep/0/checkpoints", "sweep"}
        browser.open(links["a b/checkpoints"])
        inner = browser.links()
        assert set(inner) == {"all", "checkpoint-00000001", "checkpoint-00000002"}
        page = parsed(browser.open(inner["checkpoint-00000002"]), served=True)
        assert page.all("h1")[0].text == "checkpoint-00000002" and "model/w" in page.text
        assert set(browser.links()) == {"all", "checkpoints"}
        browser.open(browser.links()["all"])
        assert "3 jobs" in parsed(browser.open(links["sweep"]), served=True).all("h1")[0].text


def test_a_folder_of_checkpoints_is_the_first_page_and_an_address_is_too(
    outputs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stores, "RETRY_S", 0.3)
    with ObjectServer() as store, store.used():
        assert run(["copy", str(outputs / "a b" / "checkpoints"), "s3://bucket/run"]) == 0
        for root in (outputs / "a b" / "checkpoints", place_of("s3://bucket/run")):
            with served(root) as browser:
                links = browser.links()
                assert set(links) == {"checkpoint-00000001", "checkpoint-00000002"}
                assert "model/w" in browser.open(links["checkpoint-00000001"])


def test_a_page_has_another_tag_once_a_run_has_saved_and_the_same_before(outputs: Path) -> None:
    root = outputs / "a b" / "checkpoints"
    with served(outputs) as browser:
        for link in ("", "runs/a%20b/checkpoints/"):
            tags = {browser.ask(link, method=method)[1]["etag"] for method in ("GET", "HEAD", "HEAD")}
            (tag,) = tags
            assert f"data-tag={tag}" in browser.ask(link)[2]
            catalog_at(root).remove(catalog_at(root).committed()[0].path)
            assert browser.ask(link, method="HEAD")[1].get("etag") != tag
            catalog_at(root).committed() or saved(root, 2)


def test_only_who_knows_the_address_gets_an_answer(outputs: Path) -> None:
    with served(outputs) as browser:
        port = browser.server.server_port
        for link in ("/", "/wrong/", f"/{browser.server.secret[:-1]}/", f"/{browser.server.secret}x/"):
            assert browser.ask(link)[0] == 404
        assert browser.ask(host=f"evil.example:{port}")[0] == browser.ask(host="evil.example")[0] == 404
        assert browser.ask(host=f"localhost:{port}")[0] == 200
        assert browser.ask(method="POST")[0] == browser.ask(method="DELETE")[0] == 501


@pytest.mark.parametrize(
    "link",
    ["../x/", "runs/", "runs/no/", "runs/a%20b/", "runs/a%20b/checkpoints/no/", "sweeps/..%2Fsweep/", "runs/%2e%2e%2f/", "%00/", "%ff/"],
)
def test_what_no_listing_has_is_not_found_whatever_the_path(outputs: Path, link: str) -> None:
    (outputs.parent / "secret").write_text("s")
    with served(outputs) as browser:
        assert browser.ask(link)[0] == 404


def test_answers_cannot_be_framed_cached_or_taken_for_something_else(outputs: Path) -> None:
    with served(outputs) as browser:
        _, headers, text = browser.ask()
        assert headers["x-frame-options"] == "DENY" and headers["cache-control"] == "no-store"
        assert headers["x-content-type-options"] == "nosniff" and "python" not in headers["server"].lower()
        assert "default-src 'none'" in text and "connect-src 'self'" in text
        status, headers, _ = browser.ask("runs/a%20b/checkpoints")
        assert (status, headers["location"]) == (301, "checkpoints/")


def test_damage_is_a_sentence_on_a_page_and_not_the_end_of_the_server(outputs: Path) -> None:
    (outputs / "sweep" / "sweep.json").write_text('[{"error": null}]')
    (outputs / "bad").mkdir()
    with served(outputs) as browser:
        status, _, text = browser.ask("sweeps/sweep/")
        assert status == 500 and "is not the table of a sweep" in text
        (outputs / "sweep" / "sweep.json").write_text("{")
        text = browser.open()  # the runs beside it are shown
        assert "damaged" in text and "is not the table of a sweep" in text and "a b/checkpoints" in text
        (outputs / "sweep" / "sweep.json").unlink()
        assert browser.ask()[0] == 200


def test_an_empty_folder_waits_for_its_first_run_and_one_that_is_not_there_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "new").mkdir()
    with served(tmp_path / "new") as browser:
        assert "waits for the first checkpoint" in browser.open()
        saved(tmp_path / "new" / "run" / "checkpoints", 1)
        assert set(browser.links()) == {"run/checkpoints"}
    assert run(["serve", str(tmp_path / "no")]) == 2 and "is no folder" in capsys.readouterr().err
    with SiteServer(Site(tmp_path), 0) as other:
        assert run(["serve", str(tmp_path), "--port", str(other.server_port)]) == 2
    assert "give another one, or 0" in capsys.readouterr().err
    assert run(["serve", str(tmp_path), "--port", "70000"]) == 2
