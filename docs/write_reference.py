"""Write the config keys and the help of commands into docs/reference: python docs/write_reference.py"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # run by path, from anywhere

from click import Context

from ckpt.cli.main import ckpt
from recipes.support import CONF
from recipes.support.help import commands, help_text
from recipes.support.keys import TARGET, ConfigFile, Key, read

PAGES = Path(__file__).with_name("reference")
BEGIN = "<!-- written by docs/write_reference.py -->\n"
_ELSEWHERE = ("sharing", "coordinator")
"""Groups with a section of their own."""


def config_page(page: str) -> str:
    """Return docs/reference/config.md with the keys of today."""
    train = read(CONF / "train.yaml")
    groups = read(CONF / "sync_weights.yaml").groups | train.groups
    parts = ["## A training run", "File `conf/train.yaml`. " + _sentence(train.phrase.partition(": ")[2])]
    parts += ["### Choices", _table(["choice", "default", "options", "meaning"], _rows_of_groups(train))]
    parts += ["### Keys", _table_of_keys(train.keys)]
    for group in [*train.groups, "engine"]:
        parts += [] if group in _ELSEWHERE else _of_group(group, groups[group])
    parts += _of_components()
    coordinator = read(CONF / "coordinator" / "default.yaml")
    own = [key for key in coordinator.keys if "${" not in key.value]
    parts += [
        "## coordinator=",
        f"{_sentence(coordinator.phrase)} Its own are:",
        _table_of_keys(_prefixed("coordinator", own)),
    ]
    for module, (name, _) in commands(CONF).items():
        if name != "train":
            found = read(CONF / f"{name}.yaml")
            parts += _of_command(module, found, found.phrase.partition(": ")[2])
            for choice, option in _with_help(name).items():
                parts += _of_command(f"{module} {choice}", option, option.phrase)
    return _replaced(page, parts)


def commands_page(page: str) -> str:
    """Return docs/reference/commands.md with the help of today."""
    parts = []
    for module, (name, phrase) in commands(CONF).items():
        parts += [f"## python -m {module}", _sentence(phrase), f"```text\n{help_text(CONF, name)}\n```"]
        for choice, option in _with_help(name).items():
            if (text := help_text(CONF, name, [choice])) != help_text(CONF, name):
                parts += [f"## python -m {module} {choice}", _sentence(option.phrase), f"```text\n{text}\n```"]
    return _replaced(page, parts)


def ckpt_page(page: str) -> str:
    """Return docs/reference/ckpt.md with the help of today."""
    parts = []
    above = Context(ckpt, info_name="ckpt", **ckpt.context_settings)
    for name in ckpt.list_commands(above):
        command = ckpt.get_command(above, name)
        assert command is not None
        context = Context(command, info_name=name, parent=above, terminal_width=100)
        parts += [f"## ckpt {name}", f"```text\n{command.get_help(context)}\n```"]
    return _replaced(page, parts)


def _replaced(page: str, parts: Iterable[str]) -> str:
    before, marker, _ = page.partition(BEGIN)
    assert marker, "the page has no place for the written part"
    return before + BEGIN + "\n" + "\n\n".join(parts) + "\n"


def _of_group(group: str, phrase: str) -> list[str]:
    """The files of a group: one table for each, under its name on the command line."""
    parts = [f"## {group}=", _sentence(phrase)]
    for file in _options(group):
        found = read(CONF / group / f"{file}.yaml")
        target = next((f"Class: `{key.value}`." for key in found.keys if key.name == TARGET), "")
        said = " ".join([*([_sentence(found.phrase)] if found.phrase else []), *([target] if target else [])])
        keys = _prefixed(group, found.keys)
        parts += [f"### {group}={file}", *([said] if said else []), _table_of_keys(keys) if keys else "It has no keys."]
    return parts


def _of_components() -> list[str]:
    """The sharing patterns of each layout, and the keys of a component."""
    patterns = {layout: _patterns(layout) for layout in _options("sharing")}
    names = list(next(iter(patterns.values())))
    rows = [[f"`{layout}`", *(f"`{found[name]}`" for name in names)] for layout, found in patterns.items()]
    keys = [key for key in read(CONF / "sharing" / "ddp.yaml").keys if key.name.startswith("components.model.")]
    named = [Key(key.name.replace(".model.", ".<name>."), key.value, key.phrase) for key in keys]
    return [
        "## sharing= and components",
        "The sharing pattern of each component, by layout. `null`: the data loader's own.",
        _table(["`sharing=`", *names], rows),
        "The keys of a component. The values are those of `components.model` with `sharing=ddp`.",
        _table_of_keys(named),
        "`'+components.<name>={_target_: my.Class, sharing_pattern: global}'` adds a component, `~components.<name>` leaves one out.",
    ]


def _patterns(layout: str) -> dict[str, str]:
    found: dict[str, str] = {}
    file = read(CONF / "sharing" / f"{layout}.yaml")
    for base in file.bases:
        found |= _patterns(base)
    own = {key.name.split(".")[1]: key.value for key in file.keys if key.name.endswith(".sharing_pattern")}
    return found | own


def _with_help(name: str) -> dict[str, ConfigFile]:
    """Return `group=option` -> its file, of the options of a command that have a help of their own."""
    groups = read(CONF / f"{name}.yaml").groups
    files = {f"{group}={option}": read(CONF / group / f"{option}.yaml") for group in groups for option in _options(group)}
    return {choice: file for choice, file in files.items() if file.help}


def _of_command(title: str, found: ConfigFile, phrase: str) -> list[str]:
    base = next(iter(found.bases), None)
    parts = [f"## Keys of python -m {title}", _sentence(phrase)]
    parts += [f"It takes all keys of `python -m recipes.{base}`, too; some have another default here."] if base else []
    if found.groups:
        parts.append(_table(["choice", "default", "options", "meaning"], _rows_of_groups(found)))
    known = {key.name: key.phrase for key in read(CONF / f"{base}.yaml").keys} if base else {}
    keys = [Key(key.name, key.value, key.phrase or known.get(key.name) or _elsewhere(key.name)) for key in found.keys]
    return [*parts, _table_of_keys(keys)] if keys else parts


def _elsewhere(name: str) -> str:
    """The comment of a key in the first file of its group."""
    group, _, key = name.partition(".")
    for file in _options(group):
        for one in read(CONF / group / f"{file}.yaml").keys:
            if one.name == key:
                return one.phrase
    return ""


def _rows_of_groups(found: ConfigFile) -> list[list[str]]:
    return [
        [f"`{name}`", f"`{found.choices[name]}`", ", ".join(f"`{one}`" for one in _options(name)), phrase]
        for name, phrase in found.groups.items()
    ]


def _options(group: str) -> list[str]:
    return sorted(file.stem for file in (CONF / group).glob("*.yaml"))


def _prefixed(group: str, keys: Iterable[Key]) -> list[Key]:
    return [Key(f"{group}.{key.name}", key.value, key.phrase) for key in keys if key.name != TARGET]


def _table_of_keys(keys: Iterable[Key]) -> str:
    return _table(["key", "default", "meaning"], [[f"`{one.name}`", f"`{one.value}`", one.phrase] for one in keys])


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *([_cell(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(text: str) -> str:
    escaped = text.replace("|", "\\|")
    return escaped if text.startswith("`") else escaped.replace("<", "&lt;").replace("*", "\\*")


def _sentence(phrase: str) -> str:
    """Begin with a capital, end with a full stop."""
    text = _cell(phrase[:1].upper() + phrase[1:])
    return text if text.endswith(".") else f"{text}."


if __name__ == "__main__":
    for name, written in (("config.md", config_page), ("commands.md", commands_page), ("ckpt.md", ckpt_page)):
        place = PAGES / name
        place.write_text(written(place.read_text()))
