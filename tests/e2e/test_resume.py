"""A run that ended and goes on in a new process is, to the bit, the run that never ended."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from ckpt.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigurationError,
    CorruptCheckpointError,
    WorldSizeError,
)
from ckpt.format.digests import digest_of
from ckpt.ranks.topology import Topology
from ckpt.storage.stored import read_manifest
from recipes.training.schedule import learning_rate_factor
from recipes.training.training import Training
from tests.conf.configs import config
from tests.e2e.conftest import STEPS, Run
from tests.e2e.runs import BACKENDS, SMALL, checkpoint, committed, root_of, run, summary_of
from tests.support.covering import rows
from tests.support.states import cpu

SUMMARY_KEYS = {
    "first_step", "final_step", "losses", "resumed_from", "fell_back_from", "loaded_digest", "state_digest", "world_size",
    "checkpoints", "skipped", "load_s", "bytes_read", "bytes_needed",
}  # fmt: skip
LAYOUTS = {"single": (1, ["parallel=single"]), "ddp 1": (1, []), "ddp 2": (2, []), "ddp 3": (3, []), "ddp 4": (4, [])}


@pytest.mark.full
def test_three_tied_ranks_saved_by_one_backend_go_on_with_the_other_to_the_bit(tmp_path: Path) -> None:
    tied = "model.tie_embeddings=true"
    straight = run(tmp_path / "straight", "train.steps=5", "save.every=2", tied, ranks=3)
    path = checkpoint(tmp_path / "straight", 2)
    resumed = run(tmp_path / "on", "train.steps=5", "save.every=2", tied, "ckpt=tensorstore", f"resume={path}", ranks=3)
    assert resumed["first_step"] == 3
    assert resumed["resumed_from"] == str(path)
    assert resumed["losses"] == straight["losses"][2:]
    assert resumed["state_digest"] == straight["state_digest"]
    assert [read_manifest(one).arrays["model/wte.weight"].store for one in committed(tmp_path / "on")] == ["ocdbt"] * 2


def test_two_ranks_go_on_from_a_path_to_the_bit(straight: Run, in_ocdbt: Run) -> None:
    assert in_ocdbt.summary["first_step"] == STEPS - 1
    assert in_ocdbt.summary["losses"] == straight.summary["losses"][-2:]
    assert in_ocdbt.summary["state_digest"] == straight.summary["state_digest"]


@functools.cache
def _straight(layout: str, tied: bool, dispatch: bool, parent: Path) -> dict[str, Any]:
    """The run without a break, once for all backends: what a save does to it, if anything, would be seen beside them."""
    run_dir = parent / f"straight {layout} {tied} {dispatch}"
    ranks, overrides = LAYOUTS[layout]
    summary = run(run_dir, *_matrix(overrides, tied, dispatch), "train.steps=40", ranks=ranks)
    shutil.rmtree(run_dir)
    return summary


def _matrix(overrides: list[str], tied: bool, dispatch: bool) -> list[str]:
    return [*overrides, "save.every=20", f"model.tie_embeddings={tied}", f"data.dispatch={dispatch}"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("backend", "layout", "tied", "dispatch"),
    rows({"backend": [*BACKENDS], "layout": [*LAYOUTS], "tied": [False, True], "dispatch": [True, False]}, 2),
)
def test_20_steps_and_then_20_more_are_40_steps_to_the_bit(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, backend: str, layout: str, tied: bool, dispatch: bool
) -> None:
    ranks, overrides = LAYOUTS[layout]
    overrides = [*_matrix(overrides, tied, dispatch), *BACKENDS[backend]]
    whole = _straight(layout, tied, dispatch, tmp_path_factory.getbasetemp())
    first = run(tmp_path / "run", *overrides, "train.steps=20", ranks=ranks)
    rest = run(tmp_path / "run", *overrides, "train.steps=40", "resume=latest", ranks=ranks)
    assert (rest["first_step"], rest["final_step"]) == (21, 40)
    assert rest["loaded_digest"] == first["state_digest"]
    assert first["losses"] + rest["losses"] == whole["losses"]
    assert rest["state_digest"] == whole["state_digest"]


@pytest.mark.full
@pytest.mark.parametrize("saved_by", BACKENDS)
@pytest.mark.parametrize("resumed_by", BACKENDS)
def test_each_backend_goes_on_from_what_each_other_saved(tmp_path: Path, saved_by: str, resumed_by: str) -> None:
    run(tmp_path / "run", "train.steps=4", "save.every=2", *BACKENDS[saved_by], ranks=3)
    straight = summary_of(tmp_path / "run")
    path = checkpoint(tmp_path / "run", 2)
    rest = run(tmp_path / "on", "train.steps=4", f"resume={path}", *BACKENDS[resumed_by], ranks=3)
    assert rest["losses"] == straight["losses"][2:]
    assert rest["state_digest"] == straight["state_digest"]
    again = run(tmp_path / "on", "train.steps=4", "resume=latest", *BACKENDS[saved_by], ranks=3)
    assert again["loaded_digest"] == straight["state_digest"]


def test_a_run_resumed_at_its_last_step_saves_nothing_and_writes_a_missing_summary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = run(tmp_path / "run", "train.steps=2")
    files, path = _stamps(tmp_path / "run"), tmp_path / "run" / "summary.json"
    written = path.read_bytes(), path.stat().st_mtime_ns
    run(tmp_path / "run", "train.steps=2", "resume=latest")
    assert "nothing to do" in capsys.readouterr().out
    assert (path.read_bytes(), path.stat().st_mtime_ns) == written
    path.unlink()
    run(tmp_path / "run", "train.steps=2", "resume=latest", "save.every=1")
    after = summary_of(tmp_path / "run")
    assert set(after) == SUMMARY_KEYS
    assert (after["first_step"], after["final_step"], after["losses"], after["checkpoints"]) == (3, 2, [], [])
    assert after["state_digest"] == after["loaded_digest"] == before["state_digest"]
    assert _stamps(tmp_path / "run") == files
    said = capsys.readouterr().out
    assert "nothing to do" in said
    assert "config differs: save.every: 100 -> 1" in said
    assert "differs: resume" not in said


def _stamps(run_dir: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in root_of(run_dir).rglob("*")}


# Values of the checkpoint, and of the command line


def _config_of(path: Path) -> Any:
    return OmegaConf.load(path / "config.yaml")


def _learning_rates(path: Path) -> set[float]:
    """Of all parameters, as a checkpoint holds them."""
    rows = json.loads((path / "optimizer" / "plain.json").read_text())
    return {row[1] for row in rows if row[0][-1] == "lr"}


def test_options_of_the_optimizer_given_at_a_resume_take_effect_and_stay(
    tmp_path: Path, straight: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["optimizer.lr=0.1", "optimizer.weight_decay=0.3", "optimizer.betas=[0.8,0.9]"]
    start = ["train.steps=5", "save.every=1", f"resume={checkpoint(straight.dir, 4)}"]
    equal = ["components.optimizer.validate_replication=true", "components.scheduler.validate_replication=true"]
    changed = run(tmp_path / "on", *start, *given, *equal, ranks=2)
    assert changed["losses"] == straight.summary["losses"][4:5], "the first loss is of the restored weights"
    assert changed["state_digest"] != straight.summary["state_digest"]
    saved = checkpoint(tmp_path / "on", 5)
    assert _learning_rates(saved) == {0.1 * learning_rate_factor(5)}
    now = _config_of(saved).optimizer
    assert (now.lr, now.weight_decay, now.betas, now.eps) == (0.1, 0.3, [0.8, 0.9], 1e-8)
    capsys.readouterr()
    run(tmp_path / "on", "train.steps=6", "resume=latest")  # nothing given: it goes on as it is
    said = capsys.readouterr().out
    assert "optimizer.lr=0.1 as in the checkpoint: the config says 0.002" in said
    assert "config differs: optimizer" not in said
    last = checkpoint(tmp_path / "on", 6)
    assert _learning_rates(last) == {0.1 * learning_rate_factor(6)}
    assert _config_of(last).optimizer == now
    run(tmp_path / "on", "train.steps=6", "resume=latest", "optimizer.lr=0.2")
    assert "optimizer.lr=0.2 given on the command line: 0.1 in the checkpoint" in capsys.readouterr().out


def test_a_resume_that_gives_nothing_goes_on_to_the_bit_with_what_the_run_had_been_given(tmp_path: Path) -> None:
    given = ["train.seed=5", "optimizer.lr=0.01", "optimizer.eps=1e-7"]
    whole = run(tmp_path / "whole", "train.steps=3", *given)
    run(tmp_path / "run", "train.steps=1", *given)
    rest = run(tmp_path / "run", "train.steps=3", "resume=latest")
    assert rest["losses"] == whole["losses"][1:]
    assert rest["state_digest"] == whole["state_digest"]
    now = _config_of(checkpoint(tmp_path / "run", 3))
    assert (now.train.seed, now.optimizer.lr, now.optimizer.eps) == (5, 0.01, 1e-7)
    assert [row[1] for row in _rng_rows(checkpoint(tmp_path / "run", 3)) if row[0] == ["seed"]] == [5]


def _rng_rows(path: Path) -> list[Any]:
    (file,) = path.glob("rng/**/plain.json")
    rows: list[Any] = json.loads(file.read_text())
    return rows


@pytest.mark.parametrize(
    ("override", "told"),
    [
        (
            "train.seed=3",
            "train.seed=3 given on the command line: .* goes on with the random numbers .* of train.seed=0;",
        ),
        ("+optimizer.amsgrad=true", "optimizer.amsgrad=True given on the command line: the checkpoint has False"),
        (
            "optimizer._target_=torch.optim.Adam",
            "holds the optimizer state of torch.optim.AdamW, but this run has optimizer._target_=",
        ),
    ],
)
def test_what_contradicts_a_checkpoint_and_cannot_take_effect_is_refused(
    tmp_path: Path, straight: Run, override: str, told: str
) -> None:
    with pytest.raises(ConfigurationError, match=told):
        run(tmp_path / "on", "train.steps=5", f"resume={checkpoint(straight.dir, 4)}", "load.strict=false", override)
    assert committed(tmp_path / "on") == []


def test_the_summary_of_a_first_and_of_a_resumed_run_say_where_they_began(straight: Run, in_ocdbt: Run) -> None:
    first, second = straight.summary, in_ocdbt.summary
    for one, found in ((straight, first), (in_ocdbt, second)):
        assert summary_of(one.dir) == found
        assert set(found) == SUMMARY_KEYS
        assert found["world_size"] == 2
        assert [(save["path"], save["step"]) for save in found["checkpoints"]] == [
            (str(checkpoint(one.dir, step)), step) for step in range(found["first_step"], STEPS + 1)
        ]
        for save in found["checkpoints"]:
            assert set(save) == {"path", "step", "bytes", "save_s", "blocked_s"}
            files = [path for path in Path(save["path"]).rglob("*") if path.is_file()]
            assert save["bytes"] == sum(path.stat().st_size for path in files)
    assert (first["first_step"], first["final_step"], len(first["losses"])) == (1, STEPS, STEPS)
    assert [first[key] for key in ("resumed_from", "loaded_digest", "load_s", "bytes_read", "bytes_needed")] == [
        None
    ] * 5
    assert (second["first_step"], second["final_step"]) == (STEPS - 1, STEPS)
    assert second["resumed_from"] == str(checkpoint(straight.dir, STEPS - 2))
    assert second["load_s"] > 0
    assert second["bytes_read"] == second["bytes_needed"] > 2 * 2e6
    assert first["fell_back_from"] == second["fell_back_from"] == []


def test_a_checkpoint_holds_the_config_of_its_run_and_the_hash_of_it(straight: Run) -> None:
    path = checkpoint(straight.dir, 1)
    text = (path / "config.yaml").read_bytes()
    assert b"nproc_per_node: 2" in text
    assert b"${" not in text, "it is resolved"
    manifest = json.loads((path / "checkpoint_manifest.json").read_text())
    assert manifest["training_args_hash"] == digest_of(text)
    assert manifest["files"]["config.yaml"] == [len(text), digest_of(text)]


def test_another_layout_goes_on_with_the_same_state_at_the_next_sample(tmp_path: Path, straight: Run) -> None:
    path = checkpoint(straight.dir, STEPS - 1)
    saved = run(tmp_path / "one", f"train.steps={STEPS - 1}", f"resume={path}")
    on = run(
        tmp_path / "on", f"train.steps={STEPS}", f"resume={path}", "parallel=pipeline", "ckpt=tensorstore", ranks=3
    )
    assert saved["losses"] == []
    assert on["loaded_digest"] == saved["loaded_digest"] == saved["state_digest"]
    assert (on["first_step"], on["final_step"], on["world_size"]) == (STEPS, STEPS, 3)
    assert on["losses"] == pytest.approx(straight.summary["losses"][-1:], rel=0.05), "other masks, the same samples"


def test_generators_that_may_not_be_derived_refuse_other_ranks_with_a_way_out_that_works(
    tmp_path: Path, straight: Run
) -> None:
    path = checkpoint(straight.dir, STEPS - 1)
    overrides = [f"train.steps={STEPS}", f"resume={path}", "components.rng.elastic=refuse"]
    with pytest.raises(WorldSizeError) as caught:
        run(tmp_path / "run", *overrides)
    assert str(caught.value) == (
        f"load of {path.name}: component rng is per_rank and was saved by 2 ranks, this run has 1. Run on 2 ranks"
        ", or leave component rng out."
    )
    assert not committed(tmp_path / "run")
    resumed = run(tmp_path / "run", *overrides[:2], "~components.rng", "load.strict=true")
    assert (resumed["first_step"], resumed["final_step"], resumed["world_size"]) == (STEPS, STEPS, 1)


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_any_number_of_ranks_goes_on_and_the_same_number_always_goes_on_alike(
    tmp_path: Path, straight: Run, ranks: int
) -> None:
    """Model, optimizer, schedule and position are the same to the bit; the random numbers follow from seed and step."""
    first = run(tmp_path / "run", "train.steps=2", ranks=2)
    path = checkpoint(tmp_path / "run", 2)
    rest = [run(tmp_path / name, "train.steps=4", f"resume={path}", ranks=ranks) for name in ("a", "b")]
    assert rest[0]["loaded_digest"] == first["state_digest"]
    assert rest[0]["first_step"] == 3
    assert (rest[0]["losses"], rest[0]["state_digest"]) == (rest[1]["losses"], rest[1]["state_digest"])


@pytest.mark.full
@pytest.mark.parametrize(("before", "after"), [("true", "false"), ("false", "true"), ("false", "false")])
def test_other_ranks_take_up_the_text_where_the_saved_ones_stopped(tmp_path: Path, before: str, after: str) -> None:
    """Without dropout and up to the order of sums, the loss of each step is the one of a single rank."""
    common = ["model.dropout=0", "save.every=2"]
    alone = run(tmp_path / "alone", "train.steps=5", *common)
    first = run(tmp_path / "run", "train.steps=2", f"data.dispatch={before}", *common, ranks=2)
    rest = run(tmp_path / "run", "train.steps=5", f"data.dispatch={after}", "resume=latest", *common, ranks=3)
    assert first["losses"] + rest["losses"] == pytest.approx(alone["losses"], rel=1e-4)


def test_an_old_folder_of_pickled_files_goes_on_behind_its_switch_only(tmp_path: Path) -> None:
    """A checkpoint of Forgather's trainers: a file per component, and optimizer state by position."""
    training = Training(config(tmp_path / "old run", *SMALL), Topology.alone(), cpu())
    training.join()
    for _ in range(3):
        training.step()
    old = tmp_path / "checkpoint-3"
    old.mkdir()
    for key, stateful in {
        "model": training.model, "optimizer": training.optimizer, "scheduler": training.scheduler
    }.items():  # fmt: skip
        torch.save(stateful.state_dict(), old / f"{key}_state.pt")
    overrides = ["train.steps=4", f"resume={old}", "~components.dataset", "~components.rng"]
    with pytest.raises(CheckpointNotFoundError, match="allow_pickle"):
        run(tmp_path / "refused", *overrides)
    resumed = run(tmp_path / "on", *overrides, "load.allow_pickle=true", "parallel=fsdp", ranks=2)
    assert resumed["first_step"] == 4
    assert resumed["loaded_digest"] == training.digest()


def test_going_on_where_there_is_nothing_begins_at_step_1(tmp_path: Path) -> None:
    found = run(tmp_path / "run", "train.steps=1", "resume=latest")
    assert (found["first_step"], found["final_step"], found["resumed_from"]) == (1, 1, None)


def test_a_path_that_is_no_checkpoint_is_an_error(tmp_path: Path, straight: Run) -> None:
    for path in (tmp_path / "checkpoint-00000007", straight.dir):
        with pytest.raises(CheckpointNotFoundError, match=f"{path}"):
            run(tmp_path / "run", "train.steps=1", f"resume={path}")
    assert not committed(tmp_path / "run")


def test_a_root_whose_checkpoints_are_all_damaged_is_an_error(tmp_path: Path) -> None:
    run(tmp_path / "run", "train.steps=2", "save.every=1")
    for path in committed(tmp_path / "run"):
        (path / "config.yaml").write_text("nothing\n")
    with pytest.raises(CorruptCheckpointError, match="every checkpoint in .* is damaged: .*config.yaml.*config.yaml"):
        run(tmp_path / "run", "train.steps=3", "resume=latest")
    assert len(committed(tmp_path / "run")) == 2


def test_a_fresh_run_over_existing_checkpoints_is_refused_with_three_ways_out(tmp_path: Path, straight: Run) -> None:
    with pytest.raises(CheckpointExistsError) as caught:
        run(straight.dir, "train.steps=1", ranks=2)
    for way_out in ("resume=latest", "run_name=", "overwrite=true"):
        assert way_out in str(caught.value)
    assert summary_of(straight.dir) == straight.summary


@pytest.mark.full
def test_overwriting_leaves_the_old_checkpoints_until_the_first_new_one_is_there(tmp_path: Path) -> None:
    run(tmp_path / "run", "train.steps=3", "save.every=1", ranks=2)
    found = run(tmp_path / "run", "train.steps=2", "save.every=1", "overwrite=true", "train.seed=1", ranks=2)
    assert found["resumed_from"] is None
    assert [path.name for path in committed(tmp_path / "run")] == ["checkpoint-00000001", "checkpoint-00000002"]
