"""Strict JSON parsing of files that anybody may have written: a result that fits its schema, or one error that names file and reason.

Refused is whatever two readers could read differently: text other than UTF-8, repeated keys, NaN and Infinity, booleans as numbers.
Schemas are msgspec's: annotated types, `msgspec.Struct`, dataclasses. Keys outside of a schema are ignored.
"""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from functools import cache
from typing import Annotated, Any, Never, TypeVar

import msgspec
import numpy as np
from msgspec import Meta

from ckpt.errors import LOAD_EARLIER, CorruptCheckpointError, sentence

MAX_INT = (1 << 63) - 1
MAX_RANKS = 1 << 20
"""More ranks than any job has. Bounds the length of lists over ranks."""

Count = Annotated[int, Meta(ge=0, le=MAX_INT)]
"""A number of bytes or elements, or an offset."""
Side = Annotated[int, Meta(ge=1, le=MAX_INT)]
"""A length that is used as a divisor."""
Rank = Annotated[int, Meta(ge=0, lt=MAX_RANKS)]
Digest = Annotated[str, Meta(pattern=r"\A[0-9a-f]{32}\Z")]
"""An xxh3-128."""
Shape = Annotated[tuple[Count, ...], Meta(max_length=64)]
"""At most as many dimensions as NumPy supports."""

_T = TypeVar("_T")
_DESCRIBING = threading.Lock()
_ESCAPED = re.compile(rb"\\.", re.DOTALL)


class Refused(ValueError):
    """A reason to refuse a file, as a clause. `refusing` adds the file's name."""


def fraction(text: str) -> Fraction:
    """Parse what `str` makes of a fraction. `Fraction` itself takes "1e999999999", too, and makes a number of so many digits."""
    above, _, below = text.partition("/")
    return Fraction(int(above), int(below or 1))


def corrupt(where: str, reason: str) -> CorruptCheckpointError:
    """Return the error for a file with impossible content."""
    return CorruptCheckpointError(f"{where}: {reason}", LOAD_EARLIER)


@contextmanager
def refusing(where: str) -> Iterator[None]:
    """Turn parse errors inside the block into a `CorruptCheckpointError` that names the file."""
    try:
        yield
    except CorruptCheckpointError:
        raise
    except Refused as error:
        raise corrupt(where, str(error)) from error
    except RecursionError:
        raise corrupt(where, "it is nested too deeply") from None
    except msgspec.MsgspecError as error:
        raise corrupt(where, f"it is not what it should be: {error}") from error
    except ValueError as error:
        raise corrupt(where, f"it is not what it should be: {sentence(error)}") from error


def parse(data: bytes | str, where: str) -> Any:
    """Parse JSON without a schema.

    Raises:
        CorruptCheckpointError: the file `where` is not strict JSON.
    """
    with refusing(where):
        text = data if isinstance(data, str) else data.decode()
        return json.loads(text, object_pairs_hook=_object, parse_constant=_no_number)


def fit(tree: Any, kind: type[_T], where: str) -> _T:
    """Convert parsed JSON to the type of a schema.

    Raises:
        CorruptCheckpointError: it does not fit.
    """
    with refusing(where):
        return convert(tree, kind)


def read(data: bytes | str, kind: type[_T], where: str) -> _T:
    """`parse`, and `fit` to a schema."""
    return fit(parse(data, where), kind, where)


def convert(tree: Any, kind: type[_T]) -> _T:
    """Return parsed JSON as a `kind`. Like `msgspec.convert`, but threads may meet in the first use of a class.

    Raises:
        msgspec.ValidationError: it does not fit.
    """
    _decoder(kind)
    return msgspec.convert(tree, kind)


def decode(data: bytes, kind: type[_T]) -> _T:
    """Return JSON as a `kind`. Like `msgspec.json.decode`, but threads may meet in the first use of a class.

    Raises:
        msgspec.MsgspecError: it is not JSON, or does not fit.
    """
    decoder: msgspec.json.Decoder[_T] = _decoder(kind)
    return decoder.decode(data)


def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    """Return the decoder of a type. msgspec 0.22 describes a class at its first use, and crashes if two threads do so at once."""
    with _DESCRIBING:
        return _decoder_of(kind)


@cache
def _decoder_of(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def num_keys(data: bytes) -> int:
    """Count the keys of all objects in valid JSON without parsing it: the colons outside of strings."""
    plain = np.frombuffer(_ESCAPED.sub(b"", data) if b"\\" in data else data, np.uint8)
    quotes, colons = np.flatnonzero(plain == ord('"')), np.flatnonzero(plain == ord(":"))
    return int((np.searchsorted(quotes, colons) % 2 == 0).sum())  # after an even number of quotes: outside of strings


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise Refused(f"{twice!r:.80} stands twice in one object")
    return found


def _no_number(name: str) -> Never:
    raise Refused(f"{name} is no JSON")
