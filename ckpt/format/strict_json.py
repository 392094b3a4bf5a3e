"""JSON from a file that anybody may have written: it is what its schema says, or a `CorruptCheckpointError` names file and reason.

Nothing is taken that two readers could read differently: text is UTF-8, a key stands once in its object, NaN and Infinity are no
JSON, a boolean is no number. Schemas are msgspec's: annotated types, `msgspec.Struct`, dataclasses. Keys that a schema does not know
are passed over.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Never, TypeVar

import msgspec
from msgspec import Meta

from ckpt.errors import CorruptCheckpointError, sentence

MAX_INT = (1 << 63) - 1
MAX_RANKS = 1 << 20
"""More ranks than any job has: lists are made that are as long."""

Count = Annotated[int, Meta(ge=0, le=MAX_INT)]
"""A number of bytes or elements, or a position."""
Side = Annotated[int, Meta(ge=1, le=MAX_INT)]
"""A length that is divided by."""
Rank = Annotated[int, Meta(ge=0, lt=MAX_RANKS)]
Digest = Annotated[str, Meta(pattern=r"\A[0-9a-f]{32}\Z")]
"""An xxh3-128."""
Shape = Annotated[tuple[Count, ...], Meta(max_length=64)]
"""As many dimensions as NumPy has."""

_T = TypeVar("_T")
_ESCAPED = re.compile(rb"\\.", re.DOTALL)


class Refused(ValueError):
    """What is wrong with a file, as a clause; `refusing` adds which one."""


def corrupt(where: str, reason: str) -> CorruptCheckpointError:
    """What to raise for a file that says something impossible."""
    return CorruptCheckpointError(f"{where}: {reason}. Load an earlier checkpoint.")


@contextmanager
def refusing(where: str) -> Iterator[None]:
    """Make a `CorruptCheckpointError` that names the file of what goes wrong while its text is taken apart."""
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
    """Return any JSON as it is.

    Raises:
        CorruptCheckpointError: `where`, the file, holds something else.
    """
    with refusing(where):
        text = data if isinstance(data, str) else data.decode()
        return json.loads(text, object_pairs_hook=_object, parse_constant=_no_number)


def fit(tree: Any, kind: type[_T], where: str) -> _T:
    """Return parsed JSON as what a schema makes of it.

    Raises:
        CorruptCheckpointError: it does not fit.
    """
    with refusing(where):
        return msgspec.convert(tree, kind)


def read(data: bytes | str, kind: type[_T], where: str) -> _T:
    """`parse`, and `fit` to a schema."""
    return fit(parse(data, where), kind, where)


def num_keys(data: bytes) -> int:
    """The keys of all objects of valid JSON, counted without parsing it: what is counted are the colons outside of strings."""
    plain = _ESCAPED.sub(b"", data) if b"\\" in data else data
    return b"".join(plain.split(b'"')[::2]).count(b":")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise Refused(f"{twice!r:.80} stands twice in one object")
    return found


def _no_number(name: str) -> Never:
    raise Refused(f"{name} is no JSON")
