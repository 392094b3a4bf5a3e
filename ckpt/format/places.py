"""Where checkpoints and their files lie: places, on a mounted file system or in an object store, and names below them. Pure.

A place is a path or an object's address, such as `s3://bucket/run`. Names of files and folders are made of the names of tensors, and are
safe; paths in records are checked.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Self
from urllib.parse import quote, unquote, urlsplit

from ckpt.errors import ConfigurationError
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


SCHEMES = {"s3": "S3", "gs": "Google Cloud Storage", "az": "Azure Blob Storage", "memory": "this process's memory"}
"""Scheme of an address -> the kind of store."""

_ADDRESS = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*):/(?P<rest>.*)", re.DOTALL)
_NO_SLASH = re.compile(rf"(?P<scheme>{'|'.join(SCHEMES)}):(?!/)", re.IGNORECASE)
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,221}")
_KEY_PART = re.compile(r"(?!\.{1,2}\Z)[^/\\\x00-\x1f\x7f?#*\ud800-\udfff]+")


@dataclass(frozen=True, slots=True, order=True)
class ObjectPath:
    """The address of an object, or the start that the addresses of several objects share. It has the part of `Path` that needs no files.

    Attributes:
        scheme: one of `SCHEMES`.
        bucket: of the store; for Azure the container.
        key: parts with `/` between them; "": the bucket itself.

    Example:
        >>> run = ObjectPath("s3", "bucket", "a/run")
        >>> str(run / "checkpoint-5"), run.name, str(run.parent), str(run.parent.parent)
        ('s3://bucket/a/run/checkpoint-5', 'run', 's3://bucket/a', 's3://bucket')
    """

    scheme: str
    bucket: str
    key: str = ""

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}" + (f"/{self.key}" if self.key else "")

    def __truediv__(self, below: str | PurePosixPath) -> ObjectPath:
        return ObjectPath(self.scheme, self.bucket, f"{self.key}/{below}" if self.key else str(below))

    @property
    def name(self) -> str:
        return self.key.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.name).suffix

    @property
    def parent(self) -> ObjectPath:
        return ObjectPath(self.scheme, self.bucket, self.key.rpartition("/")[0])

    def with_name(self, name: str) -> ObjectPath:
        return self.parent / name

    def relative_to(self, above: Self) -> PurePosixPath:
        """The rest of the key below another address.

        Raises:
            ValueError: it is not below it.
        """
        if (self.scheme, self.bucket) != (above.scheme, above.bucket):
            raise ValueError(f"{self} is not below {above}")
        return PurePosixPath(self.key).relative_to(above.key)

    def absolute(self) -> Self:
        return self

    def is_absolute(self) -> bool:
        return True

    def as_posix(self) -> str:
        return str(self)


Place = Path | ObjectPath
"""Where a checkpoint, a checkpoint root or a file of one is."""


def is_address(text: str) -> bool:
    """Whether a text is the address of an object."""
    match = _ADDRESS.match(text)
    return match is not None and match["scheme"].lower() in SCHEMES and match["rest"].startswith("/")


def place_of(text: str | Place) -> Place:
    """Return the place that `str` of it has given: in reports and messages between ranks."""
    if not isinstance(text, str):
        return text
    return _address(text, "the place") if is_address(text) else Path(text)


def as_place(given: str | os.PathLike[str] | ObjectPath, what: str) -> Place:
    """Return the place that a user gave: a path, `file://` and a path, or an address such as `s3://bucket/run`.

    A real folder named like the scheme of an address is given as `./s3:/x`.

    Args:
        what: name of the setting, such as "output_dir".

    Raises:
        ConfigurationError: it is empty, the scheme is not known, or the address has no bucket, or parts that a key cannot have.

    Example:
        >>> as_place("s3://bucket/run/", "output_dir"), as_place("file:///x%20y", "output_dir")
        (ObjectPath(scheme='s3', bucket='bucket', key='run'), PosixPath('/x y'))
    """
    if isinstance(given, ObjectPath):
        return given
    text = os.fspath(given)
    if not text:
        raise _unlike(what, "empty", "the path of a folder, or an address; this folder is .")
    if isinstance(given, str) and (match := _NO_SLASH.match(text)) is not None:
        raise _unlike(what, text, f"{match['scheme'].lower()}://bucket/run; a folder of this name is given as ./{_shown(text)}")
    match = _ADDRESS.match(text)
    if match is None:
        return Path(given)
    scheme, rest = match["scheme"].lower(), match["rest"]
    if scheme == "file":
        return _file(text, what)
    if not rest.startswith("/"):
        raise ConfigurationError(
            f"{what} is {_shown(text)}, an address that has lost a slash, as in a Path: give it as a string, such as {scheme}://bucket/run"
        )
    if scheme not in SCHEMES:
        known = ", ".join(f"{scheme}://" for scheme in SCHEMES)
        raise _unlike(what, text, f"the path of a folder, or an address that begins with {known} or file://")
    return _address(text, what)


def local_path(given: str | os.PathLike[str] | ObjectPath, what: str) -> Path:
    """As `as_place`, where a folder of a mounted file system is needed.

    Raises:
        ConfigurationError: also if it is an address in an object store.
    """
    place = as_place(given, what)
    if not isinstance(place, Path):
        raise _unlike(what, str(place), "a folder of a mounted file system here; object stores are not supported for this")
    return place


def _address(text: str, what: str) -> ObjectPath:
    scheme, _, rest = text.partition("://")
    bucket, _, key = rest.partition("/")
    key = key.rstrip("/")
    if not _BUCKET.fullmatch(bucket):
        raise _unlike(what, text, f"{scheme.lower()}://bucket/run, without credentials and port, which the environment has")
    for part in key.split("/") if key else ():
        if not _KEY_PART.fullmatch(part):
            raise ConfigurationError(
                f"{what} is {_shown(text)}, and a part of it cannot be part of an object's key; use names without \\ ? # * and control "
                "characters, and not . or .."
            )
    return ObjectPath(scheme.lower(), bucket, key)


def _file(text: str, what: str) -> Path:
    found = urlsplit(text)
    if found.netloc not in ("", "localhost") or not found.path.startswith("/"):
        raise _unlike(what, text, "file:// and an absolute path, such as file:///data/run")
    return Path(unquote(found.path))


def _unlike(what: str, text: str, expected: str) -> ConfigurationError:
    return ConfigurationError(f"{what} is {_shown(text)}: expected {expected}")


def _shown(text: str) -> str:
    """An address without what may be a secret: what comes before an @, a query and a fragment."""
    scheme, mark, rest = text.partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}{mark}{'...@' if '@' in host else ''}{host.rpartition('@')[2]}{slash}{re.split('[?#]', path)[0]}"
