"""The facts of a run for rollouts that join are data: a rollout makes its config by its own conf/, and calls nothing from them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir

from ckpt.engine.elastic.membership import Rendezvous
from ckpt.errors import ConfigurationError
from recipes.support import CONF
from recipes.support.config import made
from recipes.training.facts import facts_of, run_of
from recipes.training.joining import join_rollout
from recipes.training.sync_config import checked_join, checked_sync
from tests.conf.configs import composed

NOTHING_OF_ITS_OWN: dict[str, Any] = {"engine": None, "model": None}


def joining(*overrides: str) -> dict[str, Any]:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return checked_join(compose("join_rollout", ["wait_s=0", *overrides]))


def of_a_run(run_dir: Path, *overrides: str) -> tuple[dict[str, Any], Rendezvous]:
    cfg = checked_sync(composed(run_dir, *overrides, root="sync_weights"))
    return cfg, Rendezvous("127.0.0.1", 4711, "ef" * 16, facts_of(cfg))


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["engine=broadcast", "engine.bucket_mib=1", "engine.rollout_dtype=bfloat16", "engine.keep_dtype=['*ln*']"],
        ["model.tie_embeddings=true", "model.dropout=0", "train.seed=7", "checkpoint_root=elsewhere"],
    ],
)
def test_a_rollout_makes_the_run_s_engine_and_model_of_its_facts(overrides: list[str], tmp_path: Path) -> None:
    cfg, told = of_a_run(tmp_path, *overrides)
    read = Rendezvous.decode(told.encode(), "here")
    assert read == told
    assert "_target_" not in told.encode().decode()
    run = run_of(read.facts, NOTHING_OF_ITS_OWN, "here")
    assert (run.engine, run.model) == (cfg["engine"], cfg["model"])
    assert (run.seed, run.checkpoint_root) == (cfg["train"]["seed"], cfg["checkpoint_root"])


def test_a_class_that_conf_does_not_have_is_given_on_the_rollout_s_own_command_line(tmp_path: Path) -> None:
    own = ["model=gpt", "model._target_=tests.conf.test_facts.a_model"]
    _, told = of_a_run(tmp_path, *own)
    with pytest.raises(
        ConfigurationError, match="here: the run's model is none of this installation's, gpt: give model="
    ):
        run_of(told.facts, NOTHING_OF_ITS_OWN, "here")
    assert made(run_of(told.facts, joining("run=run", *own), "here").model, seed=3) == ("tiny", 3)


def a_model(size: str, seed: int, tie_embeddings: bool = False, dropout: float = 0.0) -> tuple[str, int]:
    return size, seed


Change = Callable[[dict[str, Any], Any], Any]


def _of_version_0_1(said: dict[str, Any], run: Any) -> Any:
    facts = said.pop("facts")
    said["config"] = {"engine": run, "model": run, "train": {"seed": 0}, "checkpoint_root": facts["checkpoint_root"]}


CRAFTS: dict[str, tuple[Change, str]] = {
    "a config, as it was once": (_of_version_0_1, "is no rendezvous"),
    "a class as engine": (lambda said, run: said["facts"].update(engine=run), "_target_"),
    "a class beside the values": (lambda said, run: said["facts"]["engine"].update(run), "_target_"),
    "a class among the values": (lambda said, run: said["facts"]["engine"]["values"].update(run), "_target_"),
    "a class in a value": (lambda said, run: said["facts"]["engine"]["values"].update(keep_dtype=[run]), "_target_"),
    "an interpolation": (lambda said, _: said["facts"]["model"]["values"].update(size="${oc.env:HOME}"), "model.size"),
    "a list of lists": (lambda said, _: said["facts"]["engine"]["values"].update(keep_dtype=[["*"]]), "keep_dtype"),
    "a file of another folder": (lambda said, _: said["facts"]["engine"].update(choice="../hydra/default"), "none of"),
    "a key that is none": (lambda said, _: said["facts"]["model"]["values"].update(hooks="x"), "model.hooks"),
    "a value of another type": (lambda said, _: said["facts"]["engine"]["values"].update(bucket_mib="x"), "bucket_mib"),
    "no seed": (lambda said, _: said["facts"].pop("seed"), "seed"),
    "a seed that is none": (lambda said, _: said["facts"].update(seed=True), "seed"),
    "no facts": (lambda said, _: said.update(facts=[]), "Expected `object`, got `array` - at `$.facts`"),
    "a port that is none": (lambda said, _: said.update(port=1 << 16), "Expected `int` <= 65535 - at `$.port`"),
    "a port that is true": (lambda said, _: said.update(port=True), "Expected `int`, got `bool` - at `$.port`"),
    "an address that is none": (lambda said, _: said.update(address="a b"), "- at `$.address`"),
    "a job that is none": (lambda said, _: said.update(job="x"), "- at `$.job`"),
}


@pytest.mark.parametrize("craft", CRAFTS)
def test_nothing_that_a_rendezvous_names_is_run(craft: str, tmp_path: Path) -> None:
    _, told = of_a_run(tmp_path / "run")
    said, ran = json.loads(told.encode()), tmp_path / "ran"
    change, sentence = CRAFTS[craft]
    change(said, {"_target_": "builtins.dict", "inner": {"_target_": "os.mkdir", "path": str(ran)}})
    (tmp_path / "rendezvous.json").write_text(json.dumps(said))
    with pytest.raises(ConfigurationError) as refused:
        join_rollout(joining(f"run={tmp_path}"))
    assert sentence in str(refused.value)
    assert str(tmp_path / "rendezvous.json") in str(refused.value) or "engine." in str(refused.value)
    assert not ran.exists()


@pytest.mark.parametrize("data", [b"[" * 100_000, b"\xff\xfe", b" " * (2 << 20)])
def test_a_file_that_is_no_json_is_one_sentence(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "rendezvous.json").write_bytes(data)
    with pytest.raises(ConfigurationError, match="is no rendezvous of a job"):
        join_rollout(joining(f"run={tmp_path}"))
