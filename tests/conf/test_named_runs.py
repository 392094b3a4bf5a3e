"""Hydra's habits, as people type them: named runs, several loggers and callbacks, a sweeper that is not there, keys of a machine."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

import recipes.sync_weights
import recipes.train
from tests.conf.configs import composed, config


def printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str, main: object = recipes.train.main) -> str:
    monkeypatch.setattr(sys, "argv", ["recipes/train.py", *words, "--cfg", "job"])
    main()  # type: ignore[operator]
    return capsys.readouterr().out


def test_both_ways_to_name_a_run_are_the_same(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    plain, added = (printed(capsys, monkeypatch, f"{word}=big_model", "save.every=7") for word in ("experiment", "+experiment"))
    assert plain == added
    run = yaml.safe_load(plain)
    assert (run["run_name"], run["save"]["mode"], run["save"]["every"]) == ("big_model", "async", 7)
    sync = yaml.safe_load(printed(capsys, monkeypatch, "+experiment=rl_weight_sync", main=recipes.sync_weights.main))
    assert sync["roles"]["rollout"] == 2


def test_several_loggers_and_callbacks_are_a_list(tmp_path: Path) -> None:
    run = config(tmp_path, "logger=[csv,tensorboard]", "callbacks=[early_stop,keep_best]", "callbacks.early_stop.patience=3")
    assert list(run["logger"]) == ["csv", "tensorboard"]
    assert run["callbacks"]["early_stop"]["patience"] == 3
    assert (run["save"]["keep_best"], run["save"]["keep_last"]) == (1, 1)
    assert config(tmp_path, "callbacks=keep_best", "save.keep_last=5")["save"]["keep_last"] == 5


def test_debug_overrides_a_named_run(tmp_path: Path) -> None:
    run = composed(tmp_path, "debug=ranks", "experiment=frequent_saves")
    assert (run.run_name, run.train.steps, run.launch.nproc_per_node, run.save.mode) == ("debug", 1, 2, "async")


def test_keys_of_a_machine_are_taken_from_a_folder_that_need_not_exist(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "default.yaml").write_text("# @package _global_\nrun_name: here\ntags: [of this machine]\n")
    run = yaml.safe_load(printed(capsys, monkeypatch, f"--config-dir={tmp_path}"))
    assert (run["run_name"], run["tags"]) == ("here", ["of this machine"])
    run = yaml.safe_load(printed(capsys, monkeypatch, f"--config-dir={tmp_path}", "experiment=layouts"))
    assert run["run_name"] == "layouts"


def test_a_search_without_its_sweeper_is_one_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if find_spec("hydra_plugins.hydra_optuna_sweeper") is not None:
        pytest.skip("hydra-optuna-sweeper is installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["recipes/train.py", "-m", "hparams_search=optuna"])
    with pytest.raises(SystemExit) as stopped:
        recipes.train.main()
    said = "hparams_search= needs the package hydra-optuna-sweeper, which is not installed: pip install hydra-optuna-sweeper"
    assert stopped.value.code == 1 and capsys.readouterr().err.startswith(said)
    assert list(tmp_path.iterdir()) == []
