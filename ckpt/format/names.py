"""Names of files and folders: in a checkpoint those made of names of tensors, which may be anything; and what a user gives. Pure."""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import quote, urlsplit

import xxhash

from ckpt.errors import ConfigurationError

PLAIN_NAME = "plain.json"
MAX_NAME_CHARS = 150
COMPONENT_KEY = re.compile(r"[A-Za-z0-9_-]+")
"""What a component may be called: the name of a folder everywhere."""
_PATH_MAX = 4096
_SCHEME = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+):/")
_OURS = (PLAIN_NAME, "zarr.json")
_PART = r"(?!\.{1,2}(?:/|\Z))[^/\0\ud800-\udfff]+"
_INNER_PATH = re.compile(rf"(?!\\|[A-Za-z]:[/\\]){_PART}(?:/{_PART})*")


def encode_key(key: str) -> str:
    """Return the folder name of an array: a tensor's name is data, so nothing in it may act as a path.

    Every UTF-8 byte outside `[A-Za-z0-9_.-]` is percent-encoded, so is a leading `.`, and the first letter of a name that is
    ours: `packed-...`, `plain.json`, `zarr.json`. A name that grows too long for a file system is cut and ends in its own
    digest. Never decoded: manifest and index hold the key itself.

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
        return f"{encoded[:100]}~{xxhash.xxh3_128_hexdigest(key.encode(errors='surrogatepass'))}"
    return encoded or "%"


def is_inner_path(path: str) -> bool:
    """Whether this is the path of something inside of a folder: relative, with `/` between parts, and no part leads back out.

    A file system need not be asked: no part is empty, `.` or `..`, none holds NUL or a lone surrogate, and the whole begins neither
    with a backslash nor with a drive, and is no longer than Linux takes.

    Example:
        >>> [is_inner_path(path) for path in ("model/w/c/0", "", "/etc/passwd", "a/../../b", "a//b", "C:/b")]
        [True, False, False, False, False, False]
    """
    return len(path) < _PATH_MAX and _INNER_PATH.fullmatch(path) is not None


def local_path(path: str | os.PathLike[str], what: str) -> Path:
    """Return a path that a user gave, unless it is an address such as `s3://bucket/x`, which would be a folder `s3:` here.

    A `Path` of it, in which `//` has become `/`, is known, too. A folder whose name looks like that is `./s3:/x`.

    Args:
        what: was asked for, such as "output_dir".

    Raises:
        ConfigurationError: it is an address.
    """
    match = _SCHEME.match(os.fspath(path))
    if match is None:
        return Path(path)
    if match["scheme"].lower() == "file":
        raise ConfigurationError(f"{what} is {path}: give the path alone, {urlsplit(os.fspath(path)).path}")
    raise ConfigurationError(
        f"{what} is {path}: checkpoints are written to mounted file systems only, object stores are not supported yet. Give the path of a "
        "folder that all ranks see."
    )
