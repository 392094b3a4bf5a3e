"""The help of a command: `--help` fits on one screen, `--help-all` has every key. Imports no torch."""

from __future__ import annotations

import difflib
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path

from recipes.support.keys import Group, Key, keys_of_command, read

_WIDTH = 100
_LONGEST_VALUE = 40
_NAME_OF_COMMAND = re.compile(r"python -m (?P<module>recipes[\w.]*)[^:]*: (?P<phrase>.*)")


def help_text(conf: Path, config_name: str, overrides: Sequence[str] = (), *, everything: bool = False) -> str:
    """Return what `--help` prints, or `--help-all`.

    Args:
        conf: the folder of the config files.
        config_name: the file in it that the command composes, without `.yaml`.
        overrides: of the command line; the help shows the values that follow from them.
        everything: every choice and every key, not only those that runs change most.

    Raises:
        HydraException, OmegaConfBaseException: an override is wrong.
    """
    command = keys_of_command(conf, config_name, overrides)
    groups, keys = list(command.groups), list(command.keys)
    parts = [command.header]
    if everything:
        parts += [command.footer] if command.footer else []
    else:
        groups = [group for group in groups if group.name in command.shown and len(group.options) > 1]
        keys = sorted((key for key in keys if key.name in command.shown), key=lambda key: command.shown.index(key.name))
    if groups:
        parts.append("\n".join(["Choices, group=choice:", *_table([_of_group(group) for group in groups])]))
    is_all = everything or len(keys) == len(command.keys)
    title = "Keys, key=value:" if is_all else "Keys that change most, key=value:"
    parts.append("\n".join([title, *_table([_of_key(key) for key in keys])]))
    parts.append("\n".join(_ending(command.extends, keys, is_all=everything or (is_all and not command.footer))))
    return "\n\n".join(parts)


def commands(conf: Path) -> dict[str, tuple[str, str]]:
    """Return module of a command -> its config file's name and what it does: training first, benchmarks last."""
    found = {}
    for file in conf.glob("*.yaml"):
        named = _NAME_OF_COMMAND.match(read(file).phrase)
        if named is not None:
            found[named["module"]] = file.stem, named["phrase"]
    return dict(sorted(found.items(), key=lambda one: (one[1][0] != "train", "benchmark" in one[0], one[0])))


def list_of_commands(conf: Path) -> str:
    """Return what `python -m recipes` prints."""
    rows = [(f"python -m {module}", phrase) for module, (_, phrase) in commands(conf).items()]
    return "\n".join([*_table(rows), "", "Each of them has --help. A key is given as key=value."])


def no_such_command(name: str, conf: Path) -> str:
    """Return the sentence for `python -m recipes <name>`."""
    names = {module.removeprefix("recipes."): module for module in commands(conf)}
    near = difflib.get_close_matches(name.removeprefix("recipes."), names, n=1)
    if near and near[0] == name.removeprefix("recipes."):
        return f"the command {name} has a module of its own: python -m {names[near[0]]}"
    hint = f"did you mean python -m {names[near[0]]}?" if near else "python -m recipes shows the commands there are"
    return f"{name}: there is no such command; {hint}"


def _of_group(group: Group) -> tuple[str, str]:
    options = ", ".join(group.options)
    return f"{group.name}={group.choice}", f"{group.phrase} ({options})" if group.phrase else options


def _of_key(key: Key) -> tuple[str, str]:
    value = key.value
    if len(value) > _LONGEST_VALUE:
        value = f"{value[:_LONGEST_VALUE].rpartition(',')[0] or value[:_LONGEST_VALUE]}..."
    return f"{key.name}={value}", key.phrase


def _table(rows: Sequence[tuple[str, str]]) -> list[str]:
    """Two columns; a phrase begins below its key where that is too long for the first column."""
    column = min(max(len(left) for left, _ in rows) + 4, 40)
    lines = []
    for left, right in rows:
        wrapped = textwrap.wrap(right, _WIDTH - column, break_long_words=False, break_on_hyphens=False) or [""]
        if len(left) + 4 > column:
            lines += [f"  {left}", *(f"{'':{column}}{line}" for line in wrapped)]
        else:
            lines += [f"{f'  {left}':{column}}{wrapped[0]}".rstrip(), *(f"{'':{column}}{line}" for line in wrapped[1:])]
    return lines


def _ending(extends: str | None, keys: Sequence[Key], *, is_all: bool) -> list[str]:
    lines = ["???: this key must be given."] if any(key.value == "???" for key in keys) else []
    if extends is not None and not is_all:
        lines.append(f"Takes the keys of python -m recipes.{extends}, too.")
    where = [] if is_all else ["--help-all shows every choice and every key."]
    return [*lines, *where, "--cfg job shows the config without a run."]
