"""Pages of `recipes` in tests: jobs and manifests to make them of, and what a page holds, as `html.parser` reads it."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from html.parser import HTMLParser
from typing import Any

from ckpt.format.manifest import ArrayEntry, CheckpointManifest, ComponentManifest

_VOID = {"meta", "input", "wbr"}


@dataclass
class Element:
    """An element, or the whole page."""

    tag: str
    attributes: dict[str, str | None] = field(default_factory=dict)
    inside: list[Element | str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(one if isinstance(one, str) else one.text for one in self.inside)

    def all(self, tag: str = "", class_: str = "") -> list[Element]:
        """Every element below this one, in order, with this tag and this class."""
        found = []
        for one in self.inside:
            if isinstance(one, Element):
                classes = (one.attributes.get("class") or "").split()
                found += [one] if tag in ("", one.tag) and (not class_ or class_ in classes) else []
                found += one.all(tag, class_)
        return found

    def by_id(self, name: str) -> Element:
        (found,) = (one for one in self.all() if one.attributes.get("id") == name)
        return found

    def rows(self, table: str) -> list[dict[str, Element]]:
        """The rows of a table's body: heading -> cell. A cell that spans the rest of its row has the first of their headings."""
        made = self.by_id(table)
        headings = [one.text for one in made.all("thead")[0].all("th")]
        return [dict(zip(headings, one.all("td"), strict=False)) for one in made.all("tbody")[0].all("tr")]

    def texts(self, table: str) -> list[dict[str, str]]:
        return [{heading: cell.text for heading, cell in row.items()} for row in self.rows(table)]

    def tips(self) -> list[str]:
        return [tip for one in self.all() if (tip := one.attributes.get("data-tip")) is not None]


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open = [Element("page")]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        made = Element(tag, dict(attrs))
        assert len(made.attributes) == len(attrs), f"an attribute of {tag} stands twice"
        self.open[-1].inside.append(made)
        if tag not in _VOID:
            self.open.append(made)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open[-1].inside.append(Element(tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop().tag == tag

    def handle_data(self, data: str) -> None:
        self.open[-1].inside.append(data)


def parsed(text: str, *, served: bool = False) -> Element:
    """Parse a page. It nests as it should, and asks for nothing beyond itself: no network, no script but its own.

    Args:
        served: it may have links to pages of the same server, and ask for itself.
    """
    reader = _Reader()
    reader.feed(text)
    reader.close()
    assert len(reader.open) == 1, "an element is not closed"
    whole = reader.open[0]
    (script,) = whole.all("script")
    allowed = base64.b64encode(hashlib.sha256(script.text.encode()).digest()).decode()
    policy = next(one.attributes["content"] for one in whole.all("meta") if "http-equiv" in one.attributes)
    assert policy is not None and f"script-src 'sha256-{allowed}'" in policy and "default-src 'none'" in policy
    assert ("connect-src" in policy) == served
    for one in whole.all():
        assert one.tag not in ("link", "img", "iframe", "object", "embed", "base", "form")
        assert not any(name.startswith("on") or name in ("src", "srcset", "xlink:href") for name in one.attributes)
        link = one.attributes.get("href") or "#"
        assert link == "#" or re.match(r"[\w.%-]", link) if served else link.startswith("#")
    assert not re.search(r"https?:|url\(|@import|@font-face", text)
    return whole


SENTENCE = "save of checkpoint-00000008 failed in phase write on rank 1: No space left on device"


def job(
    overrides: str, saves: float | list[float] = 0.1, load: float | None = 0.2, read: int = 1000, **more: Any
) -> dict[str, Any]:
    """A row of sweep.json whose saves took these seconds."""
    each = saves if isinstance(saves, list) else [saves * part for part in (0.98, 1.0, 1.02)]
    mean = sum(each) / len(each)
    return {
        "overrides": overrides.split(), "error": None, "save_s": mean, "blocked_s": mean, "save_s_each": each, "blocked_s_each": each,
        "load_s": load, "bytes_read": read, "bytes_needed": 1000, "bytes_written": 1000, "state_digest": "ab" * 16, "run_dir": "/x", **more,
    }  # fmt: skip


def failed(overrides: str) -> dict[str, Any]:
    return {"overrides": overrides.split(), "error": SENTENCE}


HOSTILE = "model/</title><script>alert(1)</script><img src=x onerror=alert(1)>\"'\n\x00\u202e\ud800"
SHOWN = "model/</title><script>alert(1)</script><img src=x onerror=alert(1)>\"'\\n\\x00\\u202e\\ud800"


def manifest(arrays: dict[str, ArrayEntry], world_size: int = 2, **more: object) -> CheckpointManifest:
    keys = dict.fromkeys(name.partition("/")[0] for name in arrays)
    ranks = list(range(world_size))
    sizes = {key: sum(one.num_bytes for name, one in arrays.items() if name.startswith(f"{key}/")) for key in keys}
    components = {key: ComponentManifest(key, "sharded", ranks, size_bytes=sizes[key]) for key in keys}
    when = datetime(2026, 11, 24, 3, 4, 5, tzinfo=UTC)
    topology = {"nodes": [ranks], "groups": {"data_parallel": [ranks]}}
    return CheckpointManifest("00000100", when, world_size, topology, components, arrays, {}, **more)  # type: ignore[arg-type]


def whole(dtype: str, shape: tuple[int, ...], rank: int = 0) -> ArrayEntry:
    return ArrayEntry(dtype, shape, "zarr", "model/w", shape, ((rank, 0, 1),))


@cache
def rows(shape: tuple[int, int], world_size: int = 2) -> ArrayEntry:
    """An array whose rows the ranks wrote, equally many."""
    writers = tuple((rank, rank, 1) for rank in range(world_size))
    return ArrayEntry("float32", shape, "zarr", "model/w", (shape[0] // world_size, shape[1]), writers)
