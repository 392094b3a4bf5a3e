"""Errors of Hydra, OmegaConf and the library about a command line, as one sentence with the next step."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException, InstantiationException, MissingConfigException, OverrideParseException
from omegaconf import BooleanNode, DictConfig, FloatNode, IntegerNode, ListConfig, OmegaConf, StringNode
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    ValidationError,
)

from ckpt.errors import Argument, sentence
from recipes.support.keys import OF_USERS, as_typed, by_dotted_key, moved, shown


def sentence_of(error: BaseException, conf: Path, config_name: str) -> str:
    """Return the one-line text of an error that the user can correct.

    Args:
        conf: the folder of the config files, whose keys are compared with a mistyped one.
        config_name: the file in it that the command composes.
    """
    if isinstance(error, MissingConfigException):
        return _no_such_choice(error)
    if isinstance(error, InstantiationException) and error.__cause__ is not None:
        return sentence_of(error.__cause__, conf, config_name)
    if isinstance(error, (ConfigAttributeError, ConfigKeyError)):
        return _no_such_key(str(error.full_key or error.key), conf, config_name)
    if isinstance(error, MissingMandatoryValue):
        return f"{error.full_key} has no value: give it with {error.full_key}=<value>"
    if isinstance(error, OmegaConfBaseException):
        return wrong_value(error)
    if isinstance(error, HydraException):
        return _of_hydra(error, conf, config_name)
    return sentence(error, in_config_words)


_KEYS = {"backend": "ckpt", "declare": "components", "memory_budget_mib": "coordinator.memory_budget_mib", "saves": "save"}
"""Arguments of the library whose keys have another name."""
_ADVICE = {
    "declare": "set {keys}",
    "in_memory": "ckpt=kimi-engine, ckpt.pool=true",
    "leave_out": "{text} with ~components.{value}",
    "memory_budget": "coordinator.memory_budget_mib",
    "output_dir": "choose another with output_dir=<folder>",
    "pickled_metadata": "{value}, whose metadata is a pickle. To read it here, first convert it with python -m recipes.convert src=<it> "
    "dst=<folder> load.allow_pickle=true; no code in it is run",
    "world_size": "{text} (launch.nproc_per_node={value})",
}
"""Advice of the library, by its name -> what a command says. keys: the argument as keys of the config; text: what the library says."""


def in_config_words(argument: Argument) -> str:
    """Return what a command says of an argument of the library: the keys of the config."""
    top, *below = argument.name.split(".")
    given = by_dotted_key(argument.value, ".".join([_KEYS.get(top, top), *below]))
    keys = " ".join(f"{key}={shown(value)}" for key, value in given.items())
    return _ADVICE.get(argument.name, "{keys}").format(keys=keys, text=argument, value=argument.value)


def sentence_of_arguments(message: str, arguments: Sequence[str]) -> str:
    """Return the one-line text of argparse's error about options that do not exist or lack their value.

    Args:
        arguments: the command line, as the user typed it.
    """
    text = " ".join(message.rpartition(": error: ")[2].split())
    unknown = re.match(r"unrecognized arguments: .*?(?P<word>-\S+)", text)
    if unknown is None:
        return f"{text}; --help shows how the command is used"
    word = unknown["word"]
    key, _, value = word.lstrip("-").partition("=")
    after = list(arguments[arguments.index(word) + 1 :][:1]) if word in arguments else []
    is_value = not value and after and not after[0].startswith("-") and "=" not in after[0]
    shown = f"{word} {after[0]}" if is_value else word
    return f"{shown}: there is no such option; a key is given without dashes, as {key}={after[0] if is_value else value or '<value>'}"


def _of_hydra(error: HydraException, conf: Path, config_name: str) -> str:
    refused = re.match(r"Could not (override|delete)(?: from config\.)? '([^']+)'", str(error))
    if refused is not None and refused[1] == "delete" and refused[2] in _keys(conf, config_name):
        return f"~{refused[2]}: a key whose value is null cannot be taken out; in a file of your own, with --config-dir, leave it out"
    if refused is not None:
        return _no_such_key(refused[2], conf, config_name)
    merging = re.match(r"Error merging override (.*)", str(error))
    if merging is not None and isinstance(error.__cause__, OmegaConfBaseException):
        return f"{merging[1]}: {_first_line(error.__cause__)}"
    several = re.match(r"Ambiguous value for argument '(.*)'$", str(error).splitlines()[0] if str(error) else "")
    if several is not None:
        word = as_typed(several[1])
        key = word.partition("=")[0]
        return f"{word}: several values are a sweep, which needs -m; one value that is a list is {key}=[a,b]"
    text = " ".join(re.sub(r"See https://hydra\.cc\S* for details", "", str(error)).split())
    if isinstance(error, OverrideParseException):
        word = as_typed(error.override)
        key, _, value = word.partition("=")
        has_path = "path" in _keys(conf, config_name)
        if "=" not in word or (has_path and "/" in key):
            hint = f", such as path={word}" if has_path else "; --help shows the keys"
            return f"{word}: expected key=value{hint}"
        quoted = f'"{key}={QuotedString(value, Quote.single).with_quotes()}"'
        return f"{word}: cannot be read as key=value: {text}; in quotes a value, or each of a sweep, is taken as it is: {quoted}"
    return text or type(error).__name__


def sentence_of_choices(message: str, words: Sequence[str], conf: Path) -> str:
    """Return the one-line text of Hydra's error about a choice that is no name, such as `ckpt=null`.

    Args:
        words: the command line.
    """
    for group, _, choice in (word.partition("=") for word in words):
        options = sorted(file.stem for file in (conf / group).glob("*.yaml")) if choice else []
        if options and not isinstance(yaml.safe_load(choice), str | list):
            return f"{group}={choice}: expected a choice; {group} is one of {', '.join(options)}"
    return " ".join(message.split())


_MEANT = {
    "safetensors": "kimi-engine", "ocdbt": "tensorstore",
    "dp": "ddp", "tp": "ddp_tp", "pp": "pipeline",
}  # fmt: skip
"""Other names of choices; those of devices are in `ckpt.memory.device`."""


def _no_such_choice(error: MissingConfigException) -> str:
    group, _, choice = (error.missing_cfg_file or "").rpartition("/")
    if not group or not error.options:
        return " ".join(str(error).split("Config search path")[0].split())
    from ckpt.memory.device import NOT_SUPPORTED, OTHER_NAMES  # it imports torch, which the command does later

    name = choice.lower()
    near = [(_MEANT | OTHER_NAMES).get(name, name)]
    if near[0] not in error.options:
        near = [] if name in NOT_SUPPORTED else difflib.get_close_matches(name, error.options, n=1)
    what = "it is not supported" if name in NOT_SUPPORTED else "there is no such choice"
    hint = f"did you mean {near[0]}? " if near else ""
    own = f", or any class, with {group}._target_=<class>" if group in OF_USERS else ""
    return f"{group}={choice}: {what}; {hint}{group} is one of {', '.join(sorted(error.options))}{own}"


def _no_such_key(key: str, conf: Path, config_name: str) -> str:
    if (instead := moved(key)) is not None:
        return f"{key}{instead}"
    keys = _keys(conf, config_name)
    same = [known for known in keys if known.rpartition(".")[2] == key]  # lr is optimizer.lr
    near = same if len(same) == 1 else difflib.get_close_matches(key, keys, n=1)
    hint = f"did you mean {near[0]}?" if near else "--help-all shows the keys there are"
    return f"{key}: there is no such key; {hint}"


def _keys(conf: Path, config_name: str) -> list[str]:
    """Every dotted key of the command's config, composed with the choices of the command line alone; none if that fails."""
    choices = [word for word in sys.argv[1:] if re.fullmatch(r"\w+=[\w-]+", word) and (conf / word.partition("=")[0]).is_dir()]
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(conf), version_base="1.3"):
            cfg = compose(config_name, choices)
    except HydraException:  # of a --config-dir or --config-name of the user's
        return []
    leaves = [key.split(".") for key in by_dotted_key(OmegaConf.to_container(cfg, resolve=False))]
    return sorted({".".join(parts[: n + 1]) for parts in leaves for n in range(len(parts))})


_EXPECTED: dict[type, str] = {
    IntegerNode: "a whole number",
    FloatNode: "a number",
    BooleanNode: "true or false",
    StringNode: "a text",
    ListConfig: "a list, such as [a,b]",
    DictConfig: "keys with values, such as {a:1}",
}
"""The node of a key's type -> what it takes."""


def wrong_value(error: OmegaConfBaseException, key: str = "") -> str:
    """Return the one-line text of an error about the value of a key, or about what the value refers to.

    Args:
        key: the dotted key; "": the one that the error names.
    """
    text = _first_line(error)
    referred = re.match(r"While dereferencing interpolation '\$\{([\w.]+)\}'", text)
    key = referred[1] if referred else key or error.full_key or ""
    if re.match(r"field '.*' is not Optional", text):
        return f"{key}=null: expected {_EXPECTED[DictConfig]}"
    if (merged := re.match(r"Merge error: .* value: (.*)", text)) is not None:
        return f"{key}{'=' if key else ''}{merged[1]}: expected {_EXPECTED[DictConfig]}; --help-all shows the keys"
    expected = _EXPECTED.get(type(error.child_node))
    if expected and isinstance(error, ValidationError):
        value = error.value
        return f"{key}={shown(OmegaConf.to_container(value) if OmegaConf.is_config(value) else value)}: expected {expected}"
    return f"{key}: {text}" if key and key not in text else text


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0]
