"""Paths on a command line reach the config as they were typed, and what Hydra's grammar reads keeps its meaning."""

from __future__ import annotations

import string

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from recipes.benchmark.harness import MEASUREMENTS
from recipes.support import CONF
from recipes.support.help import commands
from recipes.support.keys import keys_of_command
from recipes.support.path_values import PATH_KEYS, with_literal_paths

NAMES = (
    "runs/epoch=3-step=10.ckpt", "a==b", "[x]", "/t/[x]", "[", "(1)", "/t/(1)", "a,b", "x{y}", "{a: b}", "a#b", "~x", "it's", 'a"b',
    "a'b\\", "ünïcode", "e\u0301", "日本", "\U0001f600", "a;b", "a&b", "!x", "^", "<>", "`x`", "a\nb", "1e3", "1_000", "true", "inf",
    "choice(a,b)", "range(1,3)", "a=b c", "$x=1", "x y", "50%", "a:b", "007", "-x",
    *(f"a{one}b=" for one in string.punctuation if one not in "/$"),
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_the_grammar_does_not_read_as_text_is_taken_literally(name: str) -> None:
    (word,) = with_literal_paths([f"path={name}"], swept=False)
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        assert compose("inspect", [word]).path == name


@pytest.mark.parametrize(
    "word",
    [
        "path=plain", "path='quoted'", 'path="quoted"', "path=a\\=b", "path=str(1)", "path=null", "path=", "path=${oc.env:HOME}/x",
        "filter=a=b", "optimizer.lr=[1,2]", "~path", "ckpt=a,b",
    ],
)  # fmt: skip
def test_what_the_grammar_reads_and_what_is_no_path_stays(word: str) -> None:
    for swept in (False, True):
        assert with_literal_paths([word], swept=swept) == [word]


def test_an_interpolation_in_a_path_that_the_grammar_does_not_read_is_one_still() -> None:
    (word,) = with_literal_paths(["output_dir=outputs/lr=${oc.env:LR}"], swept=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LR", "0.5")
        value = OverridesParser.create().parse_override(word).value()
        assert OmegaConf.create({"x": value}).x == "outputs/lr=0.5"


def test_a_sweep_keeps_its_meaning() -> None:
    kept = ["resume=a,b", "run_name=choice(a,b)", "resume='x=1','x=2'", "resume=x=1,x=2"]
    assert with_literal_paths(kept, swept=True) == kept
    assert with_literal_paths(["resume=runs/epoch=3.ckpt", "+data.path=é"], swept=True) == [
        "resume='runs/epoch=3.ckpt'",
        "+data.path='é'",
    ]


def test_the_paths_are_keys_of_commands() -> None:
    found = {key.name for name, _ in commands(CONF).values() for key in keys_of_command(CONF, name).keys}
    found |= {key.name for one in ("compare", *MEASUREMENTS) for key in keys_of_command(CONF, "benchmark", [f"measure={one}"]).keys}
    assert found >= PATH_KEYS
