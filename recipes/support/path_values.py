"""Paths on a command line: where Hydra's grammar does not read a value as one text, it is taken literally. Imports no torch.

The grammar knows no second `=`, no letters beyond ASCII and no `( { # ~ '` inside of a value, and takes `[x]` for a list, `1e3` for a
number and `a,b` for a sweep. Files have such names: Lightning's are `epoch=3-step=10.ckpt`.
"""

from __future__ import annotations

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException

PATH_KEYS = frozenset({
    "a", "b", "bad", "benchmark.megatron_python", "checkpoint", "checkpoint_root", "config_from", "data.path", "dst", "html", "output_dir",
    "path", "resume", "run", "run_dir", "run_name", "src", "work_dir",
})  # fmt: skip
"""The keys of all commands whose values are paths, or names of folders."""


def with_literal_paths(words: list[str], *, swept: bool) -> list[str]:
    """Return a command line on which such values of `PATH_KEYS` are quoted. What the grammar reads as one text, or as null, is unchanged.

    Args:
        swept: there is -m: a list with commas keeps its meaning, or its error.

    Example:
        >>> with_literal_paths(["path=epoch=3.ckpt", "path=plain", "a='b c'"], swept=False)
        ["path='epoch=3.ckpt'", 'path=plain', "a='b c'"]
    """
    literal = []
    for word in words:
        key, _, value = word.partition("=")
        is_read = key.lstrip("+") not in PATH_KEYS or _is_text(word, swept=swept) or (swept and "," in value)
        literal.append(word if is_read else f"{key}={QuotedString(value, Quote.single).with_quotes()}")
    return literal


def _is_text(word: str, *, swept: bool) -> bool:
    try:
        read = OverridesParser.create().parse_override(word)
        return swept if read.is_sweep_override() else isinstance(read.value(), str | None)
    except HydraException:
        return False
