"""Lightning's Trainer with our checkpoints, on real ranks: DDP, and FSDP2 by `CkptModelParallelStrategy`."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from tests.support.covering import sampled
from tests.support.forked_ranks import RunForked, forked_from
from tests.support.ranks import Dead

KILLED = Dead(-9)
ASYNC = {"mode": "async", "format": "tensorstore", "load": "two-stage"}


@pytest.fixture(scope="module")
def run() -> Iterator[RunForked]:
    with forked_from("tests.support.lightning_runs") as run:
        yield run


@pytest.fixture(scope="module")
def straight(run: RunForked, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[Any]]]:
    """Trainings without interruption, of 2 ranks: their folder, and what `lightning_runs.train` returned."""
    folders = {kind: tmp_path_factory.mktemp("straight") / kind for kind in ("ddp", "fsdp")}
    return {kind: (folder, run(2, "train", kind, folder, 12, {})) for kind, folder in folders.items()}


@sampled(
    ("kind", "options"),
    [
        ("ddp", {}),
        ("fsdp", ASYNC),
        pytest.param("ddp", ASYNC, marks=pytest.mark.full),
        pytest.param("fsdp", {}, marks=pytest.mark.full),
        pytest.param("fsdp", {"format": "kimi-engine"}, marks=pytest.mark.full),
    ],
)
def test_a_killed_training_goes_on_to_the_bit(
    run: RunForked, straight: dict[str, tuple[Path, list[Any]]], tmp_path: Path, kind: str, options: dict[str, Any]
) -> None:
    assert run(2, "train", kind, tmp_path, 12, options, 8) == [KILLED, KILLED]
    resumed = run(2, "train", kind, tmp_path, 12, options)
    for (losses, *rest), (all_losses, *expected) in zip(resumed, straight[kind][1], strict=True):
        assert 3 < min(losses) <= 9, "it went on, and did not begin anew"
        assert losses == {step: all_losses[step] for step in range(min(losses), 13)}
        assert rest == expected, "state and random numbers"


def test_fsdp2_of_two_ranks_goes_on_with_one_three_and_with_one_device(
    run: RunForked, straight: dict[str, tuple[Path, list[Any]]], tmp_path: Path
) -> None:
    folder, ((_, saved, _), _) = straight["fsdp"]
    assert run(1, "loaded", "fsdp", folder / "last.ckpt", 12) == [saved]
    assert run(3, "loaded", "fsdp", folder / "last.ckpt", 12) == [saved] * 3
    assert run(1, "loaded", "ddp", folder / "last.ckpt", 12) == [saved], "by CkptCheckpointIO"
    shutil.copytree(folder, tmp_path / "copy")
    ((losses, _, _),) = run(1, "train", "fsdp", tmp_path / "copy", 15, {})
    assert sorted(losses) == [13, 14, 15]


def test_a_model_is_validated_by_any_strategy_and_read_by_name(
    run: RunForked, straight: dict[str, tuple[Path, list[Any]]]
) -> None:
    for kind, (folder, ((_, saved, _), _)) in straight.items():
        found = {run(1, "validated", other, folder / "epoch=2-step=12.ckpt")[0] for other in ("ddp", "fsdp")}
        assert len(found) == 1, kind
        weights = ckpt.load(folder / "epoch=2-step=12.ckpt")["state_dict"]
        assert weights["net.0.weight"].tolist() == saved[0]


@pytest.mark.parametrize(("kind", "num_ranks"), [("ddp", 1), ("fsdp", 2)])
def test_what_changes_right_after_an_async_save_began_does_not_reach_it(
    run: RunForked, tmp_path: Path, kind: str, num_ranks: int
) -> None:
    for saved, restored in run(num_ranks, "save_and_change", kind, tmp_path / "x=1.ckpt", {"mode": "async"}):
        assert saved == restored


@pytest.mark.parametrize(
    ("kind", "num_ranks", "mode"),
    [("ddp", 1, "async"), ("fsdp", 2, "async"), pytest.param("fsdp", 2, "sync", marks=pytest.mark.full)],
)
def test_a_save_that_fails_is_told_to_every_rank_and_costs_no_older_checkpoint(
    run: RunForked, tmp_path: Path, kind: str, num_ranks: int, mode: str
) -> None:
    told = run(num_ranks, "train_until_disk_is_full", kind, tmp_path, {"mode": mode}, 2)
    assert len(set(told)) == 1
    assert told[0].startswith(f"save into {tmp_path}/epoch=1-step=9.ckpt") and "No space left on device" in told[0]
    assert [one.name for one in tmp_path.iterdir()] == ["epoch=1-step=6.ckpt"]


@pytest.mark.parametrize(
    "of_saves",
    [
        pytest.param({}, id="at the end of an epoch"),
        pytest.param({"save_on_train_epoch_end": False}, id="after its validation", marks=pytest.mark.full),
        pytest.param({"every_n_train_steps": 4}, id="after its last batch", marks=pytest.mark.full),
    ],
)
def test_shuffled_epochs_go_on_to_the_bit(run: RunForked, tmp_path: Path, of_saves: dict[str, Any]) -> None:
    (all_losses,) = run(1, "train_by_epochs", tmp_path / "straight", 4, of_saves)
    (first,) = run(1, "train_by_epochs", tmp_path / "two parts", 2, of_saves)
    (rest,) = run(1, "train_by_epochs", tmp_path / "two parts", 4, of_saves)
    assert sorted(rest) == list(range(9, 17))
    assert {**first, **rest} == all_losses


def test_lightning_names_and_retires_checkpoints(run: RunForked, tmp_path: Path) -> None:
    ((names, state),) = run(
        1, "names_and_state", "ddp", tmp_path / "link", {"save_last": "link", "every_n_train_steps": 4}
    )  # fmt: skip
    assert names == ["epoch=2-step=12.ckpt", "last.ckpt"]
    assert (tmp_path / "link" / "last.ckpt").readlink() == Path("epoch=2-step=12.ckpt")
    assert len({run(1, "validated", "ddp", tmp_path / "link" / name)[0] for name in names}) == 1
    for names, state in run(
        2, "names_and_state", "fsdp", tmp_path / "best",
        {"monitor": "loss", "mode": "max", "save_top_k": 2, "every_n_train_steps": 2, "filename": "{epoch}, {loss:.3f} at {step}"},
    ):  # fmt: skip
        assert len(state["best_k_models"]) == 2
        assert sorted(Path(one).name for one in state["best_k_models"]) == names
    best = ckpt.load(state["best_model_path"])["trainer"]
    (kept,) = best["callbacks"].values()
    assert torch.equal(kept["best_model_score"], state["best_model_score"])
    assert kept["best_k_models"].keys() >= {state["best_model_path"]}


def test_a_training_with_files_of_lightning_goes_on_with_ours(run: RunForked, tmp_path: Path) -> None:
    ((straight, changed),) = run(1, "from_torch_file", tmp_path)
    assert changed == {step: straight[step] for step in (7, 8, 9)}
    assert ckpt.load(tmp_path / "changed" / "last.ckpt")["trainer"]["global_step"] == 9
    (kept,) = tmp_path.glob("changed/last.replaced-*.ckpt")
    assert kept.is_file(), "Lightning's own file stays, under another name"


def test_an_error_of_one_rank_ends_all_while_a_save_goes_on(run: RunForked, tmp_path: Path) -> None:
    told = run(2, "train_until_end", "fsdp", tmp_path, "an error", timeout_s=30.0)
    assert told[1] == "ZeroDivisionError: of this rank alone"
    assert "it has not failed" not in told


def test_sigterm_ends_a_training_once_its_save_is_committed(run: RunForked, tmp_path: Path) -> None:
    (told,) = run(1, "train_until_end", "ddp", tmp_path, "SIGTERM")
    assert told.startswith("SIGTERMException")
    assert [one.name for one in tmp_path.iterdir()] == ["epoch=0-step=4.ckpt"]
    assert ckpt.load(tmp_path / "epoch=0-step=4.ckpt")["trainer"]["global_step"] == 4


@pytest.mark.parametrize(("kind", "num_ranks"), [("ddp", 1), pytest.param("fsdp", 2, marks=pytest.mark.full)])
def test_a_save_outside_of_fit_is_there_when_the_call_returns(
    run: RunForked, tmp_path: Path, kind: str, num_ranks: int
) -> None:
    for first, loss, second, other_loss, names in run(num_ranks, "save_outside_of_fit", kind, tmp_path):
        assert (first, second) == (["2.ckpt", "own"], ["2.ckpt", "4.ckpt", "own"])
        assert loss != other_loss
        assert len(names) == 6, "the second began anew, beside the first"


def test_two_callbacks_that_choose_one_name_while_it_is_saved_are_refused(run: RunForked, tmp_path: Path) -> None:
    ((told, names),) = run(1, "two_callbacks_of_one_name", tmp_path, timeout_s=20.0)
    assert told.startswith(f"{tmp_path}/epoch=0-step=2.ckpt is to be saved twice at step 2: two ModelCheckpoints")
    assert names == ["epoch=0-step=2.ckpt"]


def test_only_saves_inside_of_fit_are_not_waited_for(run: RunForked, tmp_path: Path) -> None:
    (found,) = run(1, "saves_that_are_waited_for", tmp_path)
    assert found[:3] == ["hpc_ckpt_1.ckpt", "after.ckpt", "after.ckpt"]
    assert found[3:] == ["after.ckpt", "hpc_ckpt_1.ckpt", "inside again.ckpt", "inside.ckpt"]


@pytest.mark.full
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_save_after_a_fit_that_failed_or_had_nothing_to_do_is_waited_for(
    run: RunForked, tmp_path: Path, kind: str
) -> None:
    assert run(1, "save_after_an_error", kind, tmp_path) == [[True, True]]


def test_a_signal_by_which_a_handler_saves_is_put_off_while_another_save_is_under_way(
    run: RunForked, tmp_path: Path
) -> None:
    (names,) = run(1, "save_by_signal", tmp_path)
    assert names == ["async.ckpt", "hpc_ckpt_1.ckpt", "hpc_ckpt_2.ckpt", "sync.ckpt"]


def test_a_parameter_that_never_had_a_gradient_has_no_state_after_a_load(run: RunForked, tmp_path: Path) -> None:
    ((straight, resumed),) = run(1, "resume_partly_used", tmp_path)
    assert resumed == straight
    assert resumed[2] == [None, None]


def test_a_trainer_that_has_trained_validates_weights_alone(run: RunForked, tmp_path: Path) -> None:
    ((before, after),) = run(1, "validate_after_fit", tmp_path)
    assert before == after


def test_a_plugin_of_the_strategy_saves_with_ddp_on_one_rank(run: RunForked, tmp_path: Path) -> None:
    assert run(2, "one_plugin_for_two_strategies", tmp_path, timeout_s=15.0) == [True, True]


@pytest.mark.full
def test_a_sharded_checkpoint_of_lightnings_own_is_loaded(run: RunForked, tmp_path: Path) -> None:
    for saved, found in run(2, "from_sharded_folder", tmp_path / "x.ckpt"):
        assert saved == found


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_keys_that_are_missing_are_an_error_unless_loading_is_not_strict(
    run: RunForked, straight: dict[str, tuple[Path, list[Any]]], kind: str
) -> None:
    folder, ((_, saved, _), _) = straight[kind]
    ((error, weights),) = run(1, "load_with_other_keys", kind, folder / "last.ckpt")
    assert "extra.weight" in error
    assert weights == str(saved[0])


def test_what_cannot_be_is_refused_in_words_and_what_is_no_checkpoint_stays(run: RunForked, tmp_path: Path) -> None:
    (found,) = run(1, "refusals", tmp_path)
    for sentence, expected in zip(found, _REFUSALS, strict=True):
        assert expected in sentence


_REFUSALS = [
    "ConfigurationError: save into F/odd: hyper_parameters: cfg.x[0] is a tests.support.lightning_runs.refusals.<locals>.Odd, which is",
    "ConfigurationError: storage_options have no effect here",
    "ConfigurationError: path is hdfs://bucket/x: expected the path of a folder, or an address",
    "CheckpointNotFoundError: load of F/nothing: F/nothing is not a checkpoint",
    "ConfigurationError: F/of another is a checkpoint, but none of Lightning's: it holds a",
    "ConfigurationError: map_location is a function; expected a device, or None",
    "ConfigurationError: saves.when_busy=skip: the framework would count a skipped checkpoint as saved",
    "ConfigurationError: saves.incremental=True has no effect where a framework gives the state",
    "ConfigurationError: format is 'pt'; expected one of",
    "ConfigurationError: CkptModelParallelStrategy saves by CkptCheckpointIO; found AsyncCheckpointIO",
    "ConfigurationError: CkptModelParallelStrategy(save_distributed_checkpoint=False): every rank saves its part",
    "ConfigurationError: saves.grace_s=60 has no effect: Lightning handles SIGTERM",
    "ConfigurationError: ModelParallelStrategy does not save by CkptCheckpointIO: use CkptModelParallelStrategy",
    "notes.txt",
    "of another",
]


@sampled(("kind", "num_ranks", "steps"), [("ddp", 2, 0), ("plugin alone", 1, 2), ("fsdp", 2, 0)], 2)
def test_hyperparameters_that_are_not_plain_are_refused_by_name_as_training_begins(
    run: RunForked, tmp_path: Path, kind: str, num_ranks: int, steps: int
) -> None:
    for said, trained in run(num_ranks, "hyperparameters_kept", kind, tmp_path, ()):
        assert re.search(
            r"hyper_parameters: act is a builtins.type, .* self.save_hyperparameters\(ignore=\['act', 'cfg'\]\)", said
        )
        assert trained == steps
    assert list(tmp_path.iterdir()) == []
    for kept in run(num_ranks, "hyperparameters_kept", kind, tmp_path, ("act", "cfg")):
        assert kept == {"folder": tmp_path, "device": torch.device("cpu")}
        assert type(kept["folder"]) is type(tmp_path)


def test_hyperparameters_that_are_one_container_of_another_library_are_refused(run: RunForked, tmp_path: Path) -> None:
    for said in run(2, "hyperparameters_in_a_container", tmp_path):
        assert "hyper_parameters are one DictConfig" in said and "OmegaConf.to_container" in said
