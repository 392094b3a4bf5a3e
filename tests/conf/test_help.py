"""What a user finds by `--help`, `--help-all`, `python -m recipes` and Tab; and that the handbook says the same."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from omegaconf import OmegaConf

import recipes.__main__
import recipes.inspect
import recipes.train
from ckpt.catalog.incremental import DiskUse
from ckpt.engine import SyncReport
from ckpt.format.manifest import ArrayEntry, ComponentManifest
from ckpt.interop.comparing import Difference
from ckpt.state.pattern_check import Diagnosis
from recipes.benchmark.harness import MEASUREMENTS
from recipes.commands.bisecting import Parting
from recipes.support import CONF
from recipes.support.completion import script
from recipes.support.help import commands, help_text
from recipes.support.keys import by_dotted_key, keys_of_command, read
from recipes.support.report import Summary
from tests.conf.configs import composed
from tests.support.covering import sampled
from tests.support.doc_scripts import doc_script

SCREEN = 45
COMMANDS = {name: module for module, (name, _) in commands(CONF).items()}
HELPS = [(name, []) for name in COMMANDS] + [("benchmark", [f"measure={one}"]) for one in ("compare", *MEASUREMENTS)]
EACH_COMMAND = sampled(("name", "choice"), HELPS, len(COMMANDS) + 2)
"""Of the measurements of a benchmark, by default two."""
Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run the main function of a command in this process, in an empty folder; return exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def run(main: Callable[[], None], *arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["recipes/train.py", *arguments])
        code: object = 0
        try:
            main()
        except SystemExit as stop:
            code = stop.code
        out, err = capsys.readouterr()
        assert not list(tmp_path.iterdir()), "help writes nothing"
        return (code, out, err) if isinstance(code, int) else (1, out, f"{err}{code}\n")

    return run


@EACH_COMMAND
def test_the_help_of_a_command_fits_on_a_screen_and_says_where_the_rest_is(name: str, choice: list[str]) -> None:
    lines = help_text(CONF, name, choice).splitlines()
    assert len(lines) <= SCREEN and max(map(len, lines)) <= 140
    what = [] if choice == ["measure=saves"] else choice
    assert lines[0].startswith(" ".join(["python -m", COMMANDS[name], *what, ""]))
    has_all = help_text(CONF, name, choice, everything=True).splitlines() == lines
    assert has_all != ("--help-all shows every choice and every key." in lines)


@EACH_COMMAND
def test_every_key_and_every_choice_has_a_description(name: str, choice: list[str]) -> None:
    found = keys_of_command(CONF, name, choice)
    assert [key.name for key in found.keys if not key.phrase] == []
    assert [group.name for group in found.groups if not group.phrase] == []
    shown = {key.name for key in found.keys} | {group.name for group in found.groups}
    assert set(found.shown) <= shown, "hydra.help.template names keys that there are"


def test_the_help_of_train_shows_ten_keys_and_every_choice_of_a_group() -> None:
    text = help_text(CONF, "train")
    keys = text.partition("Keys that change most, key=value:\n")[2].partition("\n\n")[0].splitlines()
    assert len([line for line in keys if line.startswith("  ") and line[2] != " "]) == 10
    assert "  ckpt=zarr        storage format of saves; a load reads any (kimi-engine, tensorstore, zarr)\n" in text
    assert "  train.steps=300 " in text and "components." not in text


def test_all_keys_of_the_config_are_in_help_all(tmp_path: Path) -> None:
    text = help_text(CONF, "train", everything=True)
    config = OmegaConf.to_container(composed(tmp_path), resolve=False)
    keys = [key for key in by_dotted_key(config) if key.rpartition(".")[2] not in ("_partial_", "_convert_")]
    assert len(keys) > 80 and [key for key in keys if f"\n  {key}=" not in text] == []


def test_the_help_shows_the_values_that_follow_from_the_other_arguments() -> None:
    text = help_text(CONF, "train", ["parallel=fsdp", "train.steps=7"])
    assert "  parallel=fsdp " in text and "  sharing=fsdp " in text and "  train.steps=7 " in text
    everything = help_text(CONF, "train", ["parallel=fsdp"], everything=True)
    assert "  components.model.sharing_pattern=sharded\n" in everything
    assert "ranks that share batch and model; null: all" in everything


@pytest.mark.parametrize("option", ["--help", "-h", "--help-all"])
def test_the_option_prints_the_help_and_ends_with_0(command: Command, option: str) -> None:
    everything = option == "--help-all"
    assert command(recipes.train.main, option) == (0, help_text(CONF, "train", everything=everything) + "\n", "")
    code, out, _ = command(recipes.inspect.main, option, "path=here")
    assert code == 0 and "\n  path=here " in out


def test_a_mistake_beside_the_option_is_answered_with_the_nearest_key(command: Command) -> None:
    said = "trian.steps: there is no such key; did you mean train.steps?\n"
    assert command(recipes.train.main, "trian.steps=3", "--help") == (1, "", said)


@pytest.mark.parametrize(
    ("argument", "sentence"),
    [
        ("ckpt=zar", "ckpt=zar: there is no such choice; did you mean zarr? ckpt is one of kimi-engine, tensorstore, zarr"),
        ("parallel=fdsp", "parallel=fdsp: there is no such choice; did you mean fsdp? parallel is one of accelerate, ddp, "),
        ("strategy=two_stage", "strategy=two_stage: there is no such choice; did you mean two-stage? strategy is one of "),
        ("train.stpes=3", "train.stpes: there is no such key; did you mean train.steps?"),
        ("lr=0.1", "lr: there is no such key; did you mean optimizer.lr?"),
        ("+every=3", "every: there is no such key; did you mean save.every?"),
        ("components.model.elasti=null", "components.model.elasti: there is no such key; did you mean components.model.elastic?"),
        ("loss=msa", "loss=msa: there is no such choice; did you mean mse? loss is one of bce, cross_entropy, mse, or any class, with lo"),
        ("model.drpout=3", "model.drpout: recipes.training.gpt.GPT takes no drpout; did you mean dropout? it takes size, "),
        ("model.x=1,2", "model.x=1,2: several values are a sweep, which needs -m; "),
        ("qqq=3", "qqq: there is no such key; --help-all shows the keys there are"),
    ],
)  # fmt: skip
def test_a_misspelt_key_or_choice_is_answered_with_the_nearest_one(
    command: Command, argument: str, sentence: str
) -> None:
    code, out, err = command(recipes.train.main, argument)
    assert (code, out) == (1, "")
    assert err.startswith(sentence) and err.count("\n") == 1, err


def test_python_m_recipes_lists_every_command_with_a_sentence(command: Command) -> None:
    code, out, err = command(recipes.__main__.main)
    assert (code, err) == (0, "") and command(recipes.__main__.main, "--help") == (0, out, "")
    modules = [line.split()[2] for line in out.splitlines() if line.startswith("  python -m ")]
    assert modules[0] == "recipes.train" and sorted(modules) == sorted(COMMANDS.values())
    assert "train a small GPT on text" in out and max(map(len, out.splitlines())) <= 100


def test_every_recipe_is_listed() -> None:
    runnable = {f"recipes.{path.stem}" for path in (CONF.parent / "recipes").glob("[a-z]*.py")}
    assert runnable <= set(COMMANDS.values())
    for module in COMMANDS.values():
        assert callable(import_module("recipes.benchmark.__main__" if module == "recipes.benchmark" else module).main)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("train", "the command train has a module of its own: python -m recipes.train"),
        ("recipes.plan", "the command recipes.plan has a module of its own: python -m recipes.plan"),
        ("inpsect", "inpsect: there is no such command; did you mean python -m recipes.inspect?"),
        ("xyz", "xyz: there is no such command; python -m recipes shows the commands there are"),
    ],
)
def test_a_command_s_name_as_an_argument_is_answered_with_its_module(
    command: Command, name: str, sentence: str
) -> None:
    assert command(recipes.__main__.main, name) == (1, "", f"{sentence}\n")


# Completion


def test_completion_in_bash_knows_modules_keys_and_choices(tmp_path: Path) -> None:
    lines = [
        "python -m recipes.tr",
        f"{sys.executable} -m recipes.train parallel=f",
        f"{sys.executable} -m recipes.inspect pat",
    ]
    asked = "\n".join(
        f'COMP_LINE={line!r}; COMP_POINT={len(line)}; _complete_recipes; echo "${{COMPREPLY[*]}}"' for line in lines
    )
    env = os.environ | {"PYTHONPATH": str(CONF.parent), "COMP_WORDBREAKS": " =:"}
    typed = f"{script(CONF)}\nCOMP_WORDBREAKS=' =:'\n{asked}"
    done = subprocess.run(
        ["bash", "-c", typed], cwd=tmp_path, env=env, capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.splitlines() == ["recipes.train", "fsdp", "path="] and done.stderr == ""


def test_the_code_for_bash_is_printed_by_every_command(command: Command) -> None:
    for main in (recipes.train.main, recipes.inspect.main):
        assert command(main, "-sc", "install=bash") == (0, script(CONF) + "\n", "")
    assert "recipes.train recipes.bisect " in script(CONF) and " recipes.benchmark\"" in script(CONF)


# Comments of config files


def test_the_comment_of_a_key_is_the_one_on_its_line_and_on_those_below_it(tmp_path: Path) -> None:
    file = tmp_path / "some.yaml"
    file.write_text(
        "# python -m recipes.some: does something.\n"
        "defaults:\n"
        "  - train\n"
        "  - ckpt: zarr     # storage format\n"
        "  - hydra: default\n"
        "  - _self_\n"
        "steps: 3           # in total\n"
        "size:              # of the model\n"
        "  width: [1, 2]    # of a layer;\n"
        "                   # none: any\n"
        '  text: "# none"\n'
        "  _partial_: true  # for Hydra\n"
        "names:             # one of\n"
        "  - a              # them\n"
        "hydra:\n"
        "  help:\n"
        "    header: |\n"
        "      # no comment\n"
    )
    found = read(file)
    assert found.phrase == "python -m recipes.some: does something."
    assert (found.groups, found.choices, found.bases) == ({"ckpt": "storage format"}, {"ckpt": "zarr"}, ["train"])
    assert [(key.name, key.value, key.phrase) for key in found.keys] == [
        ("steps", "3", "in total"),
        ("size.width", "[1, 2]", "of a layer; none: any"),
        ("size.text", '"# none"', ""),
        ("names", "[a]", "one of them"),
    ]
    assert found.nodes == {"size": "of the model"} and found.help["header"] == "# no comment\n"


# The handbook


@pytest.mark.parametrize(("page", "written"), [("config.md", "config_page"), ("commands.md", "commands_page"), ("ckpt.md", "ckpt_page")])
def test_the_reference_in_the_handbook_is_that_of_today(page: str, written: str) -> None:
    text = (CONF.parent / "docs" / "reference" / page).read_text()
    assert getattr(_write_reference(), written)(text) == text, "run python docs/write_reference.py"


def test_the_reference_has_every_key_of_every_config_file() -> None:
    page = (CONF.parent / "docs" / "reference" / "config.md").read_text()
    for file in CONF.rglob("*.yaml"):
        group = file.parent.name if file.parent != CONF else ""
        if group not in ("hydra", "sharing", "coordinator", "workload"):
            names = [key.name for key in read(file).keys if key.name != "_target_"]
            missing = [name for name in names if f"| `{group}.{name}`" not in page and f"| `{name}`" not in page]
            assert missing == [], file


@pytest.mark.parametrize(
    "reported",
    [Summary, SyncReport, DiskUse, Difference, Diagnosis, Parting, ComponentManifest, ArrayEntry],
    ids=lambda kind: str(kind.__name__),
)
def test_the_page_on_json_has_every_field(reported: Any) -> None:
    page = (CONF.parent / "docs" / "reference" / "summary.md").read_text()
    assert [field.name for field in fields(reported) if f"`{field.name}`" not in page] == []


def _write_reference() -> ModuleType:
    return doc_script("write_reference")
