"""Trainer with checkpoints of this package, in one process. The oracle is Trainer with its own."""

from __future__ import annotations

import gc
import json
import os
import signal
import time
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate.utils import DistributedType
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import GPT2LMHeadModel, PreTrainedTokenizerFast, Seq2SeqTrainer, Trainer
from transformers.integrations import MLflowCallback, WandbCallback

from ckpt import Checkpointer
from ckpt.catalog.ledger import Ledger
from ckpt.cli.converting import ConvertKeys, convert
from ckpt.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigurationError,
    CorruptCheckpointError,
    MissingStateError,
)
from ckpt.integrations.huggingface import CkptTrainer, CkptTrainerMixin, _Files, _hidden
from ckpt.integrations.huggingface_accelerate import require_covered
from ckpt.ranks.sigterm import TOLD_TO_END
from ckpt.saving.manifest_writer import ManifestWriter
from ckpt.saving.save_settings import SaveSettings
from ckpt.storage.stored import read_manifest
from tests.support.covering import sampled
from tests.support.trainers import STEPS, Seen, Stopped, state_of, stop, trainer
from tests.support.values import same_values


def saved_in(folder: Path) -> list[str]:
    return [one.id.lstrip("0") for one in Ledger(folder / "ckpt", run_id="reader").committed()]


def stopped_at(step: int, folder: Path, **arguments: Any) -> None:
    """Train until a step has begun, as if the process was killed then."""
    with pytest.raises(Stopped):
        trainer(folder, Seen(step, stop), **arguments).train(resume_from_checkpoint="latest")


@pytest.mark.parametrize(
    ("arguments", "ckpt_options"),
    [
        ({}, {"mode": "async", "format": "tensorstore", "load": "two-stage"}),
        ({"gradient_accumulation_steps": 3, "save_strategy": "epoch", "max_steps": -1, "num_train_epochs": 3}, {}),
        ({"ignore_data_skip": True, "logging_steps": 1}, {"format": "kimi-engine"}),
        ({"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps", "eval_steps": 2}, {}),
    ],
    ids=["async", "accumulation-and-epochs", "ignore_data_skip", "plateau"],
)
def test_it_goes_on_to_the_same_bits_as_trainer_with_its_own_checkpoints(
    tmp_path: Path, arguments: dict[str, Any], ckpt_options: dict[str, Any]
) -> None:
    own, straight = trainer(tmp_path / "own", before := Seen(), kind=Trainer, **arguments), Seen()
    own.train()
    at = before.saved[1]
    stopped_at(at + 1, tmp_path / "ours", ckpt=ckpt_options, **arguments)
    resumed = trainer(tmp_path / "ours", straight, ckpt=ckpt_options, **arguments)
    resumed.train(resume_from_checkpoint=True)
    assert min(straight.losses) == at + 1
    assert straight.saved == [step for step in before.saved if step > at]
    if arguments.get("ignore_data_skip"):  # other batches than in the run without a break
        own = trainer(tmp_path / "own", before := Seen(), kind=Trainer, **arguments)
        own.train(resume_from_checkpoint=str(tmp_path / f"own/checkpoint-{at}"))
    assert straight.losses == {step: loss for step, loss in before.losses.items() if step > at}
    assert same_values(state_of(resumed), state_of(own))
    assert not list((tmp_path / "ours").glob("checkpoint-*")), "Trainer's own name is left alone"


def test_a_run_with_checkpoints_of_trainer_goes_on_with_ours(tmp_path: Path) -> None:
    own = trainer(tmp_path, before := Seen(), kind=Trainer)
    own.train()
    for resume in (True, "latest"):
        with pytest.raises(CheckpointNotFoundError, match="Trainer itself has saved .*checkpoint-12; name its path"):
            trainer(tmp_path).train(resume_from_checkpoint=resume)
    resumed = trainer(tmp_path, after := Seen())
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    assert after.losses == {step: before.losses[step] for step in range(9, STEPS + 1)}
    assert same_values(state_of(resumed), state_of(own))
    assert saved_in(tmp_path) == ["12"]


class Graded(CkptTrainer):
    """The metric of step 4n is the n-th one."""

    grades = (3.0, 1.0, 1.0, 2.0, 2.5)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        metrics = {"eval_grade": self.grades[self.state.global_step // 4 - 1]}
        self.log(metrics)
        return metrics


class GradedByTrainer(Trainer):
    evaluate = Graded.evaluate
    grades = Graded.grades


BEST = {
    "eval_strategy": "steps",
    "eval_steps": 4,
    "metric_for_best_model": "grade",
    "greater_is_better": False,
    "max_steps": 20,
}


@sampled(("mode", "is_adapted"), [("sync", False), ("async", False), ("sync", True)])
def test_the_best_checkpoint_stays_and_is_loaded_at_the_end(tmp_path: Path, mode: str, is_adapted: bool) -> None:
    arguments = BEST | {"load_best_model_at_end": True, "save_total_limit": 1, "is_adapted": is_adapted}
    one = trainer(tmp_path / "ours", kind=Graded, ckpt={"mode": mode}, **arguments)
    stopped = Seen(14, stop)
    with pytest.raises(Stopped):
        trainer(tmp_path / "ours", stopped, kind=Graded, ckpt={"mode": mode}, **arguments).train()
    (tmp_path / "ours/checkpoint-4").mkdir()
    one.train(resume_from_checkpoint=True)
    own = trainer(tmp_path / "own", kind=GradedByTrainer, **arguments)
    own.train()
    assert saved_in(tmp_path / "ours") == ["8", "20"], "of equal ones the first is the best, as Trainer judges"
    assert (tmp_path / "ours/checkpoint-4").is_dir(), "of Trainer's own, in an earlier run"
    assert one.state.best_model_checkpoint == str(tmp_path / "ours/ckpt/checkpoint-00000008")
    assert same_values(one.model.state_dict(), own.model.state_dict())
    metrics = read_manifest(tmp_path / "ours/ckpt/checkpoint-00000008").metrics
    assert metrics["eval_grade"] == 1.0
    assert {"loss", "learning_rate", "grad_norm"} <= metrics.keys()


def test_older_checkpoints_keep_weights_alone(tmp_path: Path) -> None:
    arguments = BEST | {"load_best_model_at_end": True, "save_total_limit": 2}
    options = {"keep_last_of": {"optimizer": 1}, "overwrite": True}
    stopped = Seen(14, stop)
    with pytest.raises(Stopped):
        trainer(tmp_path / "ours", stopped, kind=Graded, ckpt=options, **arguments).train()
    one = trainer(tmp_path / "ours", kind=Graded, ckpt=options, **arguments)
    one.train(resume_from_checkpoint="latest")
    own = trainer(tmp_path / "own", kind=GradedByTrainer, **arguments)
    own.train()
    assert same_values(one.model.state_dict(), own.model.state_dict()), "the best model, of an incomplete checkpoint"
    removed = {step: read_manifest(tmp_path / f"ours/ckpt/checkpoint-{int(step):08d}").removed for step in saved_in(tmp_path / "ours")}
    assert removed == {"8": ["optimizer"], "16": ["optimizer"], "20": []}
    with pytest.raises(MissingStateError, match="optimizer was removed from checkpoint-00000016 by retention, and the newest complete one"):
        trainer(tmp_path / "ours", kind=Graded, ckpt=options, **arguments).train(str(tmp_path / "ours/ckpt/checkpoint-00000016"))
    with pytest.raises(ConfigurationError, match="there is no component 'optimiser'; did you mean optimizer"):
        trainer(tmp_path / "ours", ckpt={"keep_last_of": {"optimiser": 1}}).train("latest")


def test_save_strategy_best_and_save_only_model_are_trainers(tmp_path: Path) -> None:
    seen = Seen()
    trainer(tmp_path, seen, kind=Graded, save_strategy="best", save_only_model=True, **BEST).train()
    assert seen.saved == [4, 8]
    assert set(read_manifest(tmp_path / "ckpt/checkpoint-00000008").components) == {"model", "trainer"}
    with pytest.raises(MissingStateError, match="optimizer"):
        trainer(tmp_path, kind=Graded, save_strategy="best", **BEST).train(resume_from_checkpoint="latest")
    resumed = trainer(tmp_path, after := Seen(), kind=Graded, save_strategy="best", save_only_model=True, **BEST)
    resumed.train(resume_from_checkpoint="latest")
    assert min(after.losses) == 9


@sampled("is_adapted", [False, True])
def test_save_only_model_restores_all_that_a_checkpoint_holds(tmp_path: Path, is_adapted: bool) -> None:
    straight = trainer(tmp_path / "straight", before := Seen(), is_adapted=is_adapted)
    straight.train()
    stopped_at(6, tmp_path / "ours", is_adapted=is_adapted)
    resumed = trainer(tmp_path / "ours", after := Seen(), save_only_model=True, is_adapted=is_adapted)
    resumed.train(resume_from_checkpoint="latest")
    assert after.losses == {step: before.losses[step] for step in range(5, STEPS + 1)}
    assert same_values(state_of(resumed), state_of(straight))


def test_a_run_that_has_ended_trains_no_further_step(tmp_path: Path) -> None:
    straight = trainer(tmp_path, max_steps=4)
    straight.train()
    again = trainer(tmp_path, seen := Seen(), max_steps=4)
    assert again.train(resume_from_checkpoint="latest").global_step == 4
    assert (seen.losses, seen.saved) == ({}, [])
    assert same_values(again.model.state_dict(), straight.model.state_dict())
    trainer(tmp_path, seen, max_steps=5).train(resume_from_checkpoint="latest")
    assert [*seen.losses] == [5]


@sampled("resume", [None, "latest"])
def test_a_smaller_batch_after_out_of_memory_replaces_what_was_saved_before(tmp_path: Path, resume: str | None) -> None:
    num_failures, checkpointers = 0, []

    def out_of_memory() -> None:
        nonlocal num_failures
        checkpointers.append(weakref.ref(one._ckpt))
        num_failures += 1
        if num_failures == 1:
            raise RuntimeError("CUDA out of memory.")

    options = {"auto_find_batch_size": True, "per_device_train_batch_size": 4, "save_steps": 2, "max_steps": 6}
    if resume:
        stopped_at(3, tmp_path, **options)
    one = trainer(tmp_path, Seen(5, out_of_memory), **options)
    one.train(resume_from_checkpoint=resume)
    assert num_failures == 2
    assert one._train_batch_size == 3
    assert saved_in(tmp_path) == ["2", "4", "6"]
    assert len([*(tmp_path / "ckpt").glob(".abandoned-*")]) == (1 if resume else 0)
    gc.collect()
    assert [held() for held in checkpointers] == [None, None], "they hold model and optimizer"


def test_training_that_would_mix_with_other_checkpoints_is_refused_before_its_first_step(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match='resume_from_checkpoint="latest" begins anew'):
        trainer(tmp_path).train(resume_from_checkpoint=True)
    trainer(tmp_path).train()
    for resume, why in (
        (None, "holds the checkpoints of an earlier run"),
        (tmp_path / "ckpt/checkpoint-00000004", "newer"),
    ):
        seen = Seen()
        with pytest.raises(CheckpointExistsError, match=f"{why}.*Of a Trainer: train\\(resume"):
            trainer(tmp_path, seen).train(resume_from_checkpoint=resume)
        assert not seen.losses
    assert saved_in(tmp_path) == ["4", "8", "12"]
    older = trainer(tmp_path, Seen(6, stop), ckpt={"overwrite": True})
    with pytest.raises(Stopped):
        older.train(resume_from_checkpoint=str(tmp_path / "ckpt/checkpoint-00000004"))
    assert saved_in(tmp_path) == ["4"]
    anew = trainer(tmp_path, ckpt={"overwrite": True}, save_steps=12)
    anew.train()
    assert saved_in(tmp_path) == ["12"]


def test_sigterm_saves_the_step_and_ends_the_program(tmp_path: Path) -> None:
    told = Seen(6, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit) as ended:
        trainer(tmp_path, told, ckpt={"mode": "async"}).train()
    assert ended.value.code == TOLD_TO_END
    assert told.saved == [4, 7]
    assert saved_in(tmp_path) == ["4", "7"]
    trainer(tmp_path, after := Seen()).train(resume_from_checkpoint=True)
    assert min(after.losses) == 8
    told = Seen(11, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit):
        trainer(tmp_path / "best", told, kind=Graded, save_strategy="best", **BEST).train()
    assert told.saved == [4, 8, 12], "though the last one is not the best"


def test_after_sigterm_one_save_is_made_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Graded, "evaluate", lambda self: pytest.fail("it may take longer than is left"))
    told = Seen(7, lambda: os.kill(os.getpid(), signal.SIGTERM))
    arguments = {"save_strategy": "epoch", "eval_strategy": "steps", "eval_steps": 8}
    with pytest.raises(SystemExit):
        trainer(tmp_path, told, kind=Graded, **arguments).train()
    assert told.saved == [8], "neither at the end of the epoch"
    assert [*told.losses] == [1, 2, 3, 4, 5, 6, 7, 8]


def test_the_save_after_sigterm_is_not_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = ManifestWriter.write
    monkeypatch.setattr(ManifestWriter, "write", lambda *args: (time.sleep(0.2), write(*args))[1])
    told = Seen(4, lambda: os.kill(os.getpid(), signal.SIGTERM))  # the save of step 4 has begun
    with pytest.raises(SystemExit):
        trainer(tmp_path, told, ckpt={"mode": SaveSettings(mode="async", when_busy="skip")}).train()
    assert saved_in(tmp_path) == ["4", "5"]


class _OwnFiles(Trainer):
    num_bytes = 10
    kept: Any = None

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
        (folder / "below").mkdir()
        (folder / "below/own.json").write_text(json.dumps("x" * self.num_bytes))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        self.kept = json.loads((Path(checkpoint or "") / "below/own.json").read_text())


class OwnFiles(CkptTrainerMixin, _OwnFiles):
    """Keeps something in a file of the checkpoint, as trainers of TRL do."""


def test_files_that_a_trainer_adds_to_its_checkpoints_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped_at(6, tmp_path, kind=OwnFiles)
    resumed = trainer(tmp_path, kind=OwnFiles)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.kept == "x" * 10
    monkeypatch.setattr(_OwnFiles, "num_bytes", 65 << 20)
    with pytest.raises(ConfigurationError, match=r"OwnFiles adds 65 MiB of files.*below/own.json"):
        trainer(tmp_path / "large", kind=OwnFiles).train()
    assert saved_in(tmp_path / "large") == []


def test_a_checkpoint_is_exported_with_config_and_tokenizer_without_further_arguments(tmp_path: Path) -> None:
    words = Tokenizer(WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    one = trainer(tmp_path / "run", max_steps=2, save_steps=2)
    one.processing_class = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]")
    one.train()
    src, dst = tmp_path / "run/ckpt/checkpoint-00000002", tmp_path / "hf"
    convert(ConvertKeys(str(src), str(dst), "safetensors", check="logits"))
    found, info = GPT2LMHeadModel.from_pretrained(dst, output_loading_info=True)
    assert not any(info.values()) and same_values(dict(found.state_dict()), dict(one.model.state_dict()))
    assert found.config.architectures == ["GPT2LMHeadModel"] and found.generation_config.eos_token_id == 0
    assert PreTrainedTokenizerFast.from_pretrained(dst).get_vocab() == {"a": 0, "[UNK]": 1}


def test_files_of_a_checkpoint_stay_in_their_folder(tmp_path: Path) -> None:
    for name in ("../out", str(tmp_path / "out")):
        files = _Files()
        files.load_state_dict({"files": {name: b"x"}})
        with pytest.raises(CorruptCheckpointError, match="leads out of its folder"):
            files.write_to(tmp_path / "in")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("state", [{}, {"files": 5}, {"files": {"a": 5}}, {"files": {5: b"a"}}], ids=str)
def test_what_is_no_file_of_a_checkpoint_is_damage(tmp_path: Path, state: dict[str, Any]) -> None:
    files = _Files()
    with pytest.raises(CorruptCheckpointError, match="Trainer cannot load the saved state"):
        files.load_state_dict(state)
        files.write_to(tmp_path)


class _Hidden(Trainer):
    def _load_rng_state(self, checkpoint: str | None) -> None:
        raise AssertionError("it is not called")


class Hiding(CkptTrainerMixin, _Hidden):
    """Never calls what it inherits."""


class Deciding(Hiding):
    """Has a method of its own, which is called."""

    def _load_rng_state(self, checkpoint: str | None) -> None:
        CkptTrainerMixin._load_rng_state(self, checkpoint)


def test_methods_that_would_not_be_called_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError, match=r"Hiding cannot save with ckpt: _Hidden\._load_rng_state would not be"
    ):
        trainer(tmp_path, kind=Hiding)
    for kind in (Deciding, OwnFiles, CkptTrainer, type("Other", (CkptTrainerMixin, Seq2SeqTrainer), {})):
        assert _hidden(kind) is None


class Uploading(MLflowCallback):
    """Of a package that is not installed."""

    _auto_end_run = False

    def __init__(self) -> None:
        pass


def test_callbacks_that_upload_trainers_own_checkpoints_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer(tmp_path, Uploading())
    monkeypatch.setenv("HF_MLFLOW_LOG_ARTIFACTS", "1")
    trainer(tmp_path)
    with pytest.raises(ConfigurationError, match="HF_MLFLOW_LOG_ARTIFACTS=1: MLflowCallback would upload"):
        trainer(tmp_path, Uploading())
    monkeypatch.setattr(WandbCallback, "__init__", lambda self: None)
    monkeypatch.setenv("WANDB_LOG_MODEL", "checkpoint")
    with pytest.raises(ConfigurationError, match="WANDB_LOG_MODEL=checkpoint: WandbCallback would upload"):
        trainer(tmp_path, report_to="wandb")


def test_a_save_that_is_skipped_is_not_the_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = trainer(tmp_path, kind=Graded, **BEST)
    monkeypatch.setattr(Checkpointer, "save", lambda *_args, **_options: None)  # as with `when_busy="skip"`
    one.train()
    assert one.state.best_model_checkpoint is None


def test_a_damaged_checkpoint_is_not_trained_from(tmp_path: Path) -> None:
    trainer(tmp_path).train()
    file = next((tmp_path / "ckpt/checkpoint-00000012/optimizer").rglob("c/0*"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    seen = Seen()
    with pytest.raises(CorruptCheckpointError, match="checkpoint-00000012"):
        trainer(tmp_path, seen, max_steps=20).train(resume_from_checkpoint="latest")
    assert not seen.losses
    with pytest.raises(CorruptCheckpointError, match="to go on from .*checkpoint-00000008, the newest sound one, name"):
        trainer(tmp_path, seen, max_steps=20).train(resume_from_checkpoint=True)
    older = trainer(tmp_path, seen, ckpt={"overwrite": True})
    older.train(resume_from_checkpoint=str(tmp_path / "ckpt/checkpoint-00000008"))
    assert [*seen.losses] == [9, 10, 11, 12]


def test_damaged_small_files_have_training_go_on_from_an_older_checkpoint(tmp_path: Path) -> None:
    trainer(tmp_path, before := Seen()).train()
    (tmp_path / "ckpt/checkpoint-00000012/trainer/plain.json").write_text("{}")
    trainer(tmp_path, after := Seen()).train(resume_from_checkpoint="latest")
    assert after.losses == {step: before.losses[step] for step in range(9, STEPS + 1)}
    assert saved_in(tmp_path) == ["4", "8", "12"]
    assert [*(tmp_path / "ckpt").glob(".quarantined-00000012-*.reason.txt")], "as with Checkpointer.restore"


@pytest.mark.parametrize(
    ("arguments", "refusal"),
    [
        ({"ckpt": {"keep_last": 3}}, "follows from TrainingArguments\\(save_total_limit"),
        ({"ckpt": {"rng": object()}}, "follows from Trainer itself"),
        ({"save_on_each_node": True}, "all nodes save one checkpoint together"),
        ({"enable_jit_checkpoint": True}, "SIGTERM saves without it"),
    ],
)
def test_what_is_not_covered_is_refused_when_the_trainer_is_made(
    tmp_path: Path, arguments: dict[str, Any], refusal: str
) -> None:
    handler = signal.getsignal(signal.SIGTERM)  # which enable_jit_checkpoint replaces
    try:
        with pytest.raises(ConfigurationError, match=refusal):
            trainer(tmp_path, **arguments)
    finally:
        signal.signal(signal.SIGTERM, handler)


def test_pushes_of_trainers_own_checkpoints_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trainer, "init_hf_repo", lambda self: None)
    with pytest.raises(ConfigurationError, match='hub_strategy="every_save" pushes files'):
        trainer(tmp_path, push_to_hub=True)
    trainer(tmp_path, push_to_hub=True, hub_strategy="end")


@pytest.mark.parametrize("kind", ["DEEPSPEED", "MEGATRON_LM", "XLA", "FSDP"])
def test_unknown_ways_to_train_are_refused(kind: str) -> None:
    with pytest.raises(ConfigurationError, match="ckpt does not save"):
        require_covered(SimpleNamespace(distributed_type=DistributedType[kind], is_fsdp2=False))
    require_covered(SimpleNamespace(distributed_type=DistributedType.FSDP, is_fsdp2=True))
