"""The config that a run has left in its checkpoints, config.yaml: read without Hydra, and compared key by key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from ckpt.errors import CorruptCheckpointError

_MOST_CHARS, _MOST_LEVELS = 1 << 20, 64
_TIMESTAMP = "tag:yaml.org,2002:timestamp"


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no types
    """Plain values without dates: neither JSON nor OmegaConf has them."""

    yaml_implicit_resolvers = {  # noqa: RUF012  # as PyYAML declares it
        first: [(tag, form) for tag, form in resolvers if tag != _TIMESTAMP]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


def values_of(text: str) -> dict[str, Any]:
    """Return the values of a checkpoint's config.yaml by dotted key; none if the checkpoint has no such file.

    Raises:
        CorruptCheckpointError: no run wrote this text. A run writes no aliases, which can expand five lines to gigabytes.
    """
    try:
        _require_plain(text)
        return by_dotted_key(_mapping(text)) if text else {}
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise CorruptCheckpointError(
            f"the checkpoint's config.yaml is not the config of a run: {' '.join(str(error).split()):.200}"
        ) from error


def by_dotted_key(node: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten nested dictionaries: `{"a": {"b": 1}}` becomes `{"a.b": 1}`. An empty dictionary is a value."""
    if not (isinstance(node, Mapping) and node):
        return {prefix: node}
    found: dict[str, Any] = {}
    for key, value in node.items():
        found |= by_dotted_key(value, f"{prefix}.{key}" if prefix else str(key))
    return found


def _mapping(text: str) -> Mapping[Any, Any]:
    values = yaml.load(text, _Loader)
    if not isinstance(values, Mapping):
        raise ValueError("expected keys with values")
    return values


def _require_plain(text: str) -> None:
    depth = 0
    if len(text) > _MOST_CHARS:
        raise ValueError("it is too long for one")
    for event in yaml.parse(text):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if isinstance(event, yaml.AliasEvent) or depth > _MOST_LEVELS:
            raise ValueError("it has aliases, or is nested too deeply")
