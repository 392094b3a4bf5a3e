"""Self-contained HTML pages from the templates in `ckpt/cli/pages/templates`.

A page needs no network: its content security policy refuses every request, and every script but `page.js`. Without scripts it shows
the same; it only cannot sort, filter and show tips.

    page.html, page.css, page.js   the frame, style and script of every page
    parts.html                     macros: sections, sortable tables, facts, bars
    sweep.html                     the page of a sweep
    site.html                      the runs and sweeps below a folder
    inspect.html, checkpoint.html  the page of a checkpoint or a folder of them; the sections about one checkpoint
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.filesize import decimal

from ckpt.errors import ConfigurationError, printable
from ckpt.format.manifest import MANIFEST_NAME
from ckpt.storage.files import replace_durably
from ckpt.version import __version__

if TYPE_CHECKING:
    from jinja2 import Environment

_TEMPLATES = Path(__file__).resolve().parent / "templates"
_OURS = '<meta name="generator" content="ckpt '
_HUES = (255, 160, 32, 335, 200, 95, 290, 10)
_FORMS: dict[str, Callable[[Any], str]] = {
    "count": "{:,}".format,
    "bytes": decimal,
    "number": "{:.6g}".format,
    "seconds": lambda value: f"{value:.3f}" if value < 100 else f"{value:.1f}",
}


class Served(NamedTuple):
    """What a page has that `ckpt serve` answers with.

    Attributes:
        tag: of what it shows; the page asks for itself again when that has changed.
        path: names and relative links of the pages above it.
    """

    tag: str
    path: Sequence[tuple[str, str]] = ()


def page(template: str, title: str, /, lead: str = "", served: Served | None = None, **values: object) -> str:
    """Return a whole page with this title as its first heading, and a sentence below it.

    Every value is escaped; control characters in it are shown as escapes, but for line breaks.

    Args:
        served: None: a file.
        values: the variables of the template.
    """
    return _environment().get_template(template).render(title=title, lead=lead, served=served, **values)


@cache
def _environment() -> Environment:
    from jinja2 import ChainableUndefined, Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    class Missing(ChainableUndefined, StrictUndefined):
        """What a row has where there is none, in the heading of a table: attributes, but no text."""

    def shown(value: object) -> object:
        if isinstance(value, Markup) or not isinstance(value, str):
            return value
        return "\n".join(map(printable, value.split("\n")))

    made = Environment(
        autoescape=True, finalize=shown, loader=FileSystemLoader(_TEMPLATES), lstrip_blocks=True, trim_blocks=True, undefined=Missing
    )
    script = (_TEMPLATES / "page.js").read_text(encoding="utf-8")
    made.globals |= {"script": Markup(script), "script_digest": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}
    made.globals |= {"generator": Markup(f'{_OURS}{__version__}">')}
    made.filters |= {"figure": figure, "hue": hue, "percent": percent, "utc": utc}
    return made


def figure(value: float | None, form: str) -> str:
    """Return a number as a text: "count", "bytes", "number", or "seconds" with milliseconds below 100."""
    return "-" if value is None else _FORMS[form](value)


def hue(number: int) -> str:
    """Return the style of one of many colors that differ: neighbors do clearly. Light and dark pages choose how light it is."""
    degrees = _HUES[number] if number < len(_HUES) else round(number * 137.508 + 255) % 360
    return f"--h:{degrees}"


def percent(part: float) -> str:
    """Return a part of 1 as a length in CSS."""
    return f"{round(100 * min(max(part, 0.0), 1.0), 3):g}%"


def utc(time: datetime) -> str:
    """Return a time in UTC to the second."""
    return time.isoformat(" ", "seconds").removesuffix("+00:00")


def write_page(path: Path, text: str) -> None:
    """Write a page atomically; replace an earlier one.

    Raises:
        ConfigurationError: see `refuse_other_files`.
    """
    refuse_other_files(path)
    replace_durably(path, text.encode())


def refuse_other_files(path: Path) -> None:
    """Refuse to write a page to this path if that would replace anything but a page, or damage a checkpoint.

    Raises:
        ConfigurationError: a file that is no page, or a folder, is there; its folder does not exist, or is inside of a checkpoint.
    """
    checkpoint = next((parent for parent in path.absolute().parents if (parent / MANIFEST_NAME).is_file()), None)
    if path.is_dir():
        raise ConfigurationError(f"{path} is a folder; give the path of a file in it, such as {path / 'page.html'}")
    if not path.parent.is_dir():
        raise ConfigurationError(f"{path.parent} does not exist; make that folder, or give another path")
    if checkpoint is not None:
        raise ConfigurationError(
            f"{path} is inside of {checkpoint}: a checkpoint holds no other files; give another path"
        )
    if path.exists() and not (path.is_file() and _is_page(path)):
        raise ConfigurationError(f"{path} exists and is not a page of this command; remove it, or give another path")


def _is_page(path: Path) -> bool:
    with path.open("rb") as file:
        return _OURS.encode() in file.read(4096)
