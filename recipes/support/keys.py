"""Keys of the config files, with their values and comments: for `--help` and the handbook. Imports no torch."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from omegaconf import OmegaConf

from ckpt.cli.config_text import by_dotted_key
from ckpt.errors import SIZES

TARGET = "_target_"
OF_USERS = ("model", "data", "optimizer", "schedule", "loss")
"""The groups of which users name classes of their own, by `_target_`."""
_HYDRAS_OWN = ("_partial_", "_convert_", "_recursive_")
_NOT_CHOSEN = ("hydra", "local")
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
MOVED = {
    **dict.fromkeys(SIZES, " is no key any more: coordinator.memory_budget_mib bounds all host memory of a rank beside the state"),
    "report": " is no key any more: logger= takes the same names",
}
"""The last part of a key that is no more -> what to say behind it."""
_OF_TARGET = "the class or function that is called with the other keys beside it"


@dataclass(frozen=True)
class Key:
    """One key.

    Attributes:
        name: with dots, from the top of the file, or of the config.
        value: as a command line would give it.
        phrase: its comment.
    """

    name: str
    value: str
    phrase: str


@dataclass(frozen=True)
class Group:
    """One choice of a command: `name=choice`, one of `options`."""

    name: str
    choice: str
    options: tuple[str, ...]
    phrase: str


@dataclass(frozen=True)
class ConfigFile:
    """The comments of one file in conf/.

    Attributes:
        phrase: the comment at its top.
        groups: group in its defaults list -> comment.
        choices: group in its defaults list -> choice.
        bases: config files of its own folder in its defaults list.
        keys: its keys with a value, in their order; none of Hydra's own.
        nodes: key of a mapping -> its comment.
        help: its `hydra.help`: header: what the command does, with examples; footer: more of that, for --help-all;
            template: groups and keys that --help shows, with spaces between, where that is not all of this file's.
    """

    phrase: str
    groups: dict[str, str]
    choices: dict[str, str]
    bases: Sequence[str]
    keys: Sequence[Key]
    nodes: Mapping[str, str]
    help: Mapping[str, str]


@dataclass(frozen=True)
class CommandKeys:
    """What the command line of a command takes.

    Attributes:
        header, footer: of `hydra.help`: what the command does, with examples; and more of it.
        shown: groups and keys that `--help` shows.
        extends: the command whose keys this one takes, too; None: no other.
    """

    header: str
    footer: str
    shown: Sequence[str]
    extends: str | None
    groups: Sequence[Group]
    keys: Sequence[Key]


@functools.cache
def read(path: Path) -> ConfigFile:
    """Parse a config file and its comments."""
    return _Reader(path.read_text()).read()


def keys_of_command(conf: Path, config_name: str, overrides: Sequence[str] = ()) -> CommandKeys:
    """Compose the config of a command, and return its keys and choices.

    Args:
        conf: the folder of the config files.
        config_name: the file in it that the command composes, without `.yaml`.
        overrides: of the command line.

    Raises:
        HydraException, OmegaConfBaseException: an override is wrong.
    """
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(conf), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        cfg = compose(config_name, list(overrides), return_hydra_config=True)
        listed = loader.compute_defaults_list(config_name, list(overrides), RunMode.RUN)
        places = [source.path for source in loader.get_sources() if source.scheme() == "file"]
        options = {name: tuple(loader.get_group_options(name)) for name in cfg.hydra.runtime.choices}
    phrases: dict[str, str] = {}
    for default in listed.defaults:
        files = [Path(place, f"{default.config_path}.yaml") for place in places]
        for file in [file for file in files if file.is_file()][:1]:
            comments = read(file)
            for name, phrase in [*comments.nodes.items(), *((key.name, key.phrase) for key in comments.keys)]:
                full = f"{default.package}.{name}" if default.package else name
                phrases[full] = phrase or phrases.get(full, "")
    chosen = cfg.hydra.runtime.choices
    own = with_choice(conf, config_name, chosen)
    groups = _listed(conf, own, "groups")
    values = by_dotted_key({str(key): value for key, value in _plain(cfg).items() if key != "hydra"})
    keys = [Key(name, shown(value), _phrase(name, value, phrases)) for name, value in values.items()]
    keys = [key for key in keys if key.name.rpartition(".")[2] not in _HYDRAS_OWN]
    return CommandKeys(
        header=own.help.get("header", "").strip("\n"),
        footer=own.help.get("footer", "").strip("\n"),
        shown=own.help.get("template", "").split() or [*own.groups, *(key.name for key in own.keys)],
        extends=next(iter(own.bases), None),
        groups=[
            Group(name, shown(chosen.get(name)), options.get(name, ()), phrase)
            for name, phrase in groups.items()
            if options.get(name)
        ],
        keys=sorted(keys, key=lambda key: key.name.partition(".")[0] in groups),
    )


def as_choices(words: Sequence[str], file: Path) -> list[str]:
    """Return a command line as Hydra takes it, where people leave out a `+`, or type one too many.

    `+group=choice` is `group=choice` where the defaults list has the group, as `experiment: null`: Hydra takes the first only for others.
    `group=null` is `~group` where that list has null.
    `optimizer.momentum=0.9` is `++optimizer.momentum=0.9` where the chosen file has no such key: the class that its `_target_` names may
    take it, and `recipes.support.config.bind` refuses what it does not. So is a key of a mapping that the file leaves open, as `{}`.
    """
    if not file.is_file():
        return list(words)
    choices = _listed(file.parent, read(file), "choices")
    plain = [word[1:] if word[:1] == "+" and word[1:].partition("=")[0] in choices else word for word in words]
    plain = [f"~{word[:-5]}" if word.endswith("=null") and choices.get(word[:-5]) == "null" else word for word in plain]
    given = {group: choice for group, _, choice in (word.partition("=") for word in plain) if group in choices}
    return [f"++{word}" if _is_argument(word.partition("=")[0], file.parent, choices, given) else word for word in plain]


def as_typed(override: str) -> str:
    """Return an override of Hydra's without the `++` that `as_choices` has added."""
    return override.removeprefix("++")


def _is_argument(key: str, conf: Path, choices: Mapping[str, str], given: Mapping[str, str]) -> bool:
    """Whether a dotted key is of a group whose files name a `_target_`, and the chosen file may lack it, or of a mapping that is left open.

    Args:
        choices: of the defaults list, by group.
        given: of the command line. A user's own file, or an experiment, may choose others; what it chooses Hydra alone knows.
    """
    group, dot, name = key.partition(".")
    chosen = conf / group / f"{(choices | given).get(group)}.yaml"
    if chosen.is_file() and any(key.value == "{}" and f"{name}.".startswith(f"{key.name}.") for key in read(chosen).keys):
        return True
    if not dot or group not in choices or not any(_names(file) >= {TARGET} for file in (conf / group).glob("*.yaml")):
        return False
    files = [conf / other / f"{choice}.yaml" for other, choice in given.items()]
    if not all(file.is_file() and "override /" not in file.read_text() for file in files):
        return True
    return not chosen.is_file() or name not in _names(chosen)


def _names(file: Path) -> set[str]:
    return {key.name for key in read(file).keys} | {*read(file).nodes}


def with_choice(conf: Path, config_name: str, chosen: Mapping[str, Any]) -> ConfigFile:
    """Return the file of a command, joined with the file of a choice that has a help of its own, as those of `measure=` have.

    Args:
        chosen: choice by group.
    """
    own = read(conf / f"{config_name}.yaml")
    for group in own.groups:
        file = conf / group / f"{chosen.get(group, own.choices[group])}.yaml"
        if file.is_file() and (one := read(file)).help:
            groups, choices = own.groups | one.groups, own.choices | one.choices
            return ConfigFile(one.phrase, groups, choices, [*own.bases, *one.bases], [*own.keys, *one.keys], one.nodes, one.help)
    return own


def moved(key: str) -> str | None:
    """Return what to say behind a key of a former version; None: there was no such key."""
    return MOVED.get(key.rpartition(".")[2])


def shown(value: Any) -> str:
    """Return a value as a command line gives it."""
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(shown, value))}]"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{shown(item)}' for key, item in value.items())}}}"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _plain(cfg: Any) -> dict[str, Any]:
    with_hydra = OmegaConf.to_container(cfg, resolve=False)
    assert isinstance(with_hydra, dict)
    return {str(key): value for key, value in with_hydra.items()}


def _listed(conf: Path, own: ConfigFile, what: str) -> dict[str, str]:
    """The `groups`, or `choices`, in the defaults list of a command, and of the command that it extends."""
    found: dict[str, str] = {}
    for base in own.bases:
        found |= _listed(conf, read(conf / f"{base}.yaml"), what)
    return found | getattr(own, what)


def _phrase(name: str, value: Any, phrases: Mapping[str, str]) -> str:
    """The comment of a key, or else of the first one of its name below the same top key, such as in another component."""
    top, _, rest = name.partition(".")
    last = rest.rpartition(".")[2]
    if phrases.get(name):
        return phrases[name]
    if last == TARGET:
        return _OF_TARGET
    alike = (text for other, text in phrases.items() if other.startswith(f"{top}.") and other.endswith(f".{last}") and text)
    reference = re.fullmatch(r"\$\{([\w.]+)\}", str(value))
    return f"the value of {reference[1]}" if reference else next(alike, "") if "." in rest else ""


class _Reader:
    """One file: YAML's parser finds the places of keys and values, whose comments follow on the line."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._lines = text.splitlines()

    def read(self) -> ConfigFile:
        root = yaml.compose(self._text, Loader=_LOADER)
        top = []
        for line in self._lines:
            if not line.startswith("#"):
                break
            top.append(line.lstrip("# ").rstrip())
        groups, choices, bases, keys, nodes = {}, {}, [], [], {}
        own_help = (yaml.load(self._text, Loader=_LOADER) or {}).get("hydra", {}).get("help", {})
        for name, key, value in self._walk(root, "") if isinstance(root, yaml.MappingNode) else ():
            if name == "defaults":
                for item in value.value:
                    if isinstance(item, yaml.MappingNode):
                        ((key, choice),) = item.value
                        group = key.value.removeprefix("optional ").removeprefix("/")
                        if not group.startswith("override") and group not in _NOT_CHOSEN:
                            groups[group] = self._comment(key, choice)
                            choices[group] = choice.value
                    elif item.value != "_self_":
                        bases.append(item.value.removeprefix("/"))
            elif isinstance(value, yaml.MappingNode) and value.value:
                nodes[name] = self._comment(key, value)
            else:
                keys.append(Key(name, self._source(value), self._comment(key, value)))
        phrase = " ".join(line for line in top if not line.startswith("@package"))
        return ConfigFile(phrase, groups, choices, bases, keys, nodes, own_help)

    def _walk(self, node: yaml.MappingNode, prefix: str) -> Iterator[tuple[str, yaml.Node, yaml.Node]]:
        for key, value in node.value:
            name = f"{prefix}{key.value}"
            if name == "hydra" or key.value in _HYDRAS_OWN:
                continue
            yield name, key, value
            if isinstance(value, yaml.MappingNode):
                yield from self._walk(value, f"{name}.")

    def _source(self, value: yaml.Node) -> str:
        if isinstance(value, yaml.SequenceNode) and not value.flow_style:
            return f"[{', '.join(child.value for child in value.value)}]"
        return " ".join(self._text[value.start_mark.index : value.end_mark.index].split())

    def _comment(self, key: yaml.Node, value: yaml.Node) -> str:
        """The comment on the line where a value ends, and on the lines below it that begin in the same column."""
        is_block = isinstance(value, yaml.CollectionNode) and not value.flow_style
        end = key.end_mark if is_block else value.end_mark
        number, column = end.line, self._lines[end.line].find("#", end.column)
        inside = (
            range(value.start_mark.line, value.end_mark.line)
            if isinstance(value, yaml.SequenceNode) and is_block
            else ()
        )
        if column < 0:
            items = ((child.value, self._comment(child, child)) for child in value.value) if inside else ()
            return "; ".join(f"{name}: {phrase}" for name, phrase in items if phrase)
        parts = [self._lines[number][column + 1 :]]
        for line in self._lines[number + 1 :]:
            number += 1
            if line[column : column + 1] != "#" or (line[:column].strip() and number not in inside):
                break
            parts.append(line[column + 1 :])
        return " ".join(part.strip() for part in parts)
