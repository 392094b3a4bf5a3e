"""What a program keeps with a checkpoint beside its state: metrics and metadata, as a manifest can hold them. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from ckpt.errors import ConfigurationError, unlike

_MOST_METADATA = 1 << 20


def storable_metrics(given: Mapping[str, float] | None) -> dict[str, float | None]:
    """Return metrics as plain numbers; None for one that is not finite, which JSON has no number for.

    Raises:
        ConfigurationError: one is no number.
    """
    found = {}
    for name, value in _mapping("metrics", given, "a dictionary: name (a string) -> number").items():
        try:
            if isinstance(value, str | bytes | bytearray):
                raise TypeError  # which float would parse
            number = float(value)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            raise unlike(f"metrics[{name!r}]", value, "a number") from None
        found[name] = number if math.isfinite(number) else None
    return found


def storable_metadata(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return metadata as plain values that JSON gives back unchanged.

    Raises:
        ConfigurationError: it does not, or they are too many.
    """
    found = _mapping("metadata", given, "a dictionary with strings as keys")
    expected = "strings, numbers, True, False, None, and lists and dictionaries of these"
    try:
        text = json.dumps(found, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"metadata cannot be stored ({error}); expected {expected}") from None
    if json.loads(text) != found:
        raise ConfigurationError(f"metadata changes when stored as JSON; expected {expected}, with strings as keys")
    if len(text) > _MOST_METADATA:
        raise ConfigurationError(
            f"metadata takes {len(text):,} bytes as JSON; expected at most {_MOST_METADATA:,}: save an object that holds more than that "
            "as a component"
        )
    return found


def _mapping(name: str, given: Any, expected: str) -> dict[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise unlike(name, given, expected)
    if (bad := next((key for key in given if not isinstance(key, str)), None)) is not None:
        raise ConfigurationError(f"{name} has the key {bad!r:.60}; expected {expected}")
    return dict(given)
