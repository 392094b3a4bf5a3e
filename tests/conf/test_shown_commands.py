"""README, the handbook and the help texts show commands and names: each command composes, each name can be imported."""

from __future__ import annotations

import re
import shlex
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from click import Context
from omegaconf import OmegaConf

from ckpt.cli.main import COMMANDS, ckpt
from tests.support.covering import and_in_full

CHECKOUT = Path(__file__).resolve().parents[2]
CONF = CHECKOUT / "conf"
PAGES = [CHECKOUT / "README.md", CHECKOUT / "CONTRIBUTING.md", *CHECKOUT.glob("docs/**/*.md")]
COMMAND = r"\b(?:python|torchrun(?: --\S+)*) -m (recipes[\w.]*)"
PLACEHOLDERS = {"workload=<name>": "workload=gpt2_fsdp", "<its venv>/bin/python": "python", "<path>": "python"} | {
    "=<one>:": "=cuda",
    "=examples/own_project/conf": f"={CHECKOUT}/examples/own_project/conf",
    "=...": "=outputs",
    "'hydra.searchpath=[file:///path/to/my/conf]' ckpt=bin": "ckpt=zarr",
}


def _commands() -> list[tuple[str, ...]]:
    """Every shown command once: its module, and its arguments up to the first word that is none."""
    found = set()
    for file in [*PAGES, *CONF.glob("*.yaml"), *CONF.glob("measure/*.yaml")]:
        text = file.read_text().replace("\\\n", " ")
        text = re.sub(
            r"```.*?```", lambda block: block[0].replace("\n", "\n\n"), text, flags=re.DOTALL
        )  # a line, a command
        for placeholder, value in PLACEHOLDERS.items():
            text = text.replace(placeholder, value)
        for shown in re.finditer(rf"{COMMAND}([^`\n]*(?:\n[^`\n]*=[^`\n]*)?)", text):
            words = []
            for word in (one.strip("'") for one in shown[2].split()):
                if "=" not in word and word != "-m":
                    break
                words.append(word[1:-1] if word.startswith("[") else word)  # brackets: it may be left out
            found.add((shown[1].rstrip("."), *words))
    return sorted(found)


def _commands_of_ckpt() -> list[str]:
    """Every shown command of `ckpt` with its arguments."""
    texts = [file.read_text() for file in PAGES if file.name != "ckpt.md"] + [entry.text for entry in COMMANDS.values()]
    shown = (found for text in texts for found in re.findall(r"(?m)^\s*(?:\$ )?(ckpt [a-z]+ [^\n#|]*)$|`(ckpt [a-z]+ [^`]*)`", text))
    return sorted({" ".join((line or code).split("||")[0].split()) for line, code in shown})


@pytest.mark.parametrize("command", _commands_of_ckpt())
def test_a_shown_command_of_ckpt_has_the_arguments_that_it_takes(command: str) -> None:
    _, name, *words = shlex.split(command)
    found = ckpt.get_command(Context(ckpt), name)
    assert found is not None, f"there is no ckpt {name}"
    found.make_context(name, words)


def _with_new_keys(commands: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Commands in which each key of each module occurs, the longest first."""
    seen: set[tuple[str, str]] = set()
    chosen = []
    for command in sorted(commands, key=len, reverse=True):
        keys = {(command[0], word.partition("=")[0]) for word in command}
        if not keys <= seen:
            chosen.append(command)
        seen |= keys
    return chosen


@and_in_full(("command",), [(one,) for one in _with_new_keys(_commands())], [(one,) for one in _commands()], ids=" ".join)
def test_a_shown_command_is_a_module_that_takes_these_keys(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module, *words = command
    if "hydra/launcher=ray" in words and find_spec("hydra_plugins.hydra_ray_launcher") is None:
        pytest.skip("Hydra's launcher for Ray is not installed: tests/clusters runs this command")
    if "-m" in words:  # a sweep composes one job for each combination: here the first
        words = [word if "[" in word else word.partition(",")[0] for word in words if word != "-m"]
    is_package = (find_spec(module) or pytest.fail(f"there is no {module}")).submodule_search_locations is not None
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [module, *words, "--cfg", "job"] if module != "recipes" else [module])
    import_module(f"{module}.__main__" if is_package else module).main()
    shown = capsys.readouterr()
    if module == "recipes":  # the list of all commands
        assert "python -m recipes.train " in shown.out
        return
    assert shown.err == "" and not list(tmp_path.iterdir())
    composed = OmegaConf.create(shown.out)
    for word in words:
        key = word.partition("=")[0]
        is_no_key = key.lstrip("+").startswith(("hydra/", "hydra.", "--"))  # of the job
        if not (CONF / key).is_dir() and not is_no_key:  # nor a group
            assert OmegaConf.select(composed, key) == OmegaConf.select(OmegaConf.from_dotlist([word]), key)


def _names() -> list[str]:
    """Every `ckpt....` of the pages that is no key of the config, and every name that their code imports from there."""
    keys = {f"ckpt.{key}" for file in CONF.glob("ckpt/*.yaml") for key in yaml.safe_load(file.read_text())}
    found = set()
    for page in PAGES:
        text = page.read_text()
        for module, names in re.findall(r"from (ckpt[\w.]*) import ([\w, ]+)", text):
            found |= {f"{module}.{name.strip()}" for name in names.split(",")}
        for module, choices in re.findall(r"`from (megatron[\w.]*)\.X import ...`, `X` one of ([`\w, ]+)", text):
            package = module.replace("megatron.core", "ckpt")
            found |= {f"{package}.{choice}" for choice in re.findall(r"`(\w+)`", choices)}
        found |= set(re.findall(r"(?<![\w/.])ckpt(?:\.\w+)+(?![\w/]|\.py)", text)) - keys
    return sorted(name for name in found if not name.endswith(".X"))


def test_every_shown_name_can_be_imported() -> None:
    names = _names()
    assert len(names) > 100
    assert [name for name in names if not _is_there(name)] == []


def _is_there(name: str) -> bool:
    # Of packages that are not installed.
    for plugin in ("ckpt.engine.nemo_rl_plugin", "ckpt.engine.verl_plugin", "ckpt.integrations.torchtitan"):
        if name.startswith(plugin):
            return find_spec(plugin) is not None
    module, _, attribute = name.rpartition(".")
    try:
        import_module(name)
    except ModuleNotFoundError:
        return hasattr(import_module(module), attribute)
    return True
