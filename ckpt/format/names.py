"""File and folder names: safe ones made of tensor names, and checks of paths in records. Pure."""

from __future__ import annotations

import re
from urllib.parse import quote

from ckpt.format.digests import digest_of

PLAIN_NAME = "plain.json"
MAX_NAME_CHARS = 150
COMPONENT_KEY = re.compile(r"[A-Za-z0-9_-]+")
"""Valid component names: they are folder names on every file system."""
_STEP = re.compile(r"[0-9]{1,18}")
_PATH_MAX = 4096
_OURS = (PLAIN_NAME, "zarr.json")
_PART = r"(?!\.{1,2}(?:/|\Z))[^/\0\ud800-\udfff]+"
_INNER_PATH = re.compile(rf"(?!\\|[A-Za-z]:[/\\]){_PART}(?:/{_PART})*")


def encode_key(key: str) -> str:
    """Return the folder name of an array. A tensor's name is data: nothing in it may act as a path.

    Percent-encoded are UTF-8 bytes outside `[A-Za-z0-9_.-]`, a leading `.`, and the first letter of our own names (`packed-...`,
    `plain.json`, `zarr.json`). Longer names than `MAX_NAME_CHARS` are cut and end in their digest. Names are never decoded: manifest
    and index hold the key itself.

    Example:
        >>> encode_key("h.0.attn/weight"), encode_key(".."), encode_key("packed-x"), encode_key("")
        ('h.0.attn%2Fweight', '%2E.', '%70acked-x', '%')
    """
    encoded = quote(key, safe="", errors="surrogatepass").replace("~", "%7E")
    if encoded.startswith("."):
        encoded = "%2E" + encoded[1:]
    if encoded.startswith("packed-") or encoded in _OURS:
        encoded = f"%{ord(encoded[0]):02X}{encoded[1:]}"
    if len(encoded) > MAX_NAME_CHARS:
        return f"{encoded[:100]}~{digest_of(key.encode(errors='surrogatepass'))}"
    return encoded or "%"


def step_of(checkpoint_id: str) -> int | None:
    """Return the step that an id is: ASCII digits of a number below 10^18; None: it is none.

    Example:
        >>> step_of("00000005"), step_of("5-keep"), step_of("\N{ARABIC-INDIC DIGIT FIVE}"), step_of("9" * 5000)
        (5, None, None, None)
    """
    return int(checkpoint_id) if _STEP.fullmatch(checkpoint_id) else None


def is_inner_path(path: str) -> bool:
    """Whether this is a relative path, with `/` between parts, that stays inside of its folder. Decided without the file system.

    No part is empty, `.` or `..`, or holds NUL or a lone surrogate. The path begins with no backslash and no drive, and is not longer than
    Linux allows.

    Example:
        >>> [is_inner_path(path) for path in ("model/w/c/0", "", "/etc/passwd", "a/../../b", "a//b", "C:/b")]
        [True, False, False, False, False, False]
    """
    return len(path) < _PATH_MAX and _INNER_PATH.fullmatch(path) is not None
