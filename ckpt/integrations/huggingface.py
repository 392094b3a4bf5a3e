"""Hugging Face transformers: `Trainer`, and trainers made from it such as TRL's, save and resume checkpoints of this package.

    class MyTrainer(CkptTrainerMixin, SFTTrainer): ...

    trainer = MyTrainer(model, args, train_dataset=data, ckpt={"mode": "async"})
    trainer.train(resume_from_checkpoint="latest")

A `TrainerCallback` can save, but not resume: the first one that `train` calls comes after the epoch to begin with and the batches to
skip were read from `trainer_state.json`. So this is a mixin. It replaces what `Trainer` writes and reads itself. The small files of a
checkpoint, `trainer_state.json` and those that `_save_checkpoint` of a subclass adds, pass through a temporary folder, and are a component
here.
"""

from __future__ import annotations

import copy
import math
import os
import tempfile
from collections.abc import Mapping, Set
from contextlib import ExitStack
from numbers import Real
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel, Trainer, TrainingArguments
from transformers.integrations import ClearMLCallback, MLflowCallback, WandbCallback
from transformers.trainer_utils import HubStrategy, SaveStrategy, get_last_checkpoint
from transformers.utils import ENV_VARS_TRUE_VALUES, is_sagemaker_mp_enabled

from ckpt.api.checkpointer import Checkpointer, names_of_objects
from ckpt.errors import CheckpointExistsError, CheckpointNotFoundError, ConfigurationError, CorruptCheckpointError
from ckpt.format.manifest import ArrayEntry
from ckpt.format.places import Place, is_address, place_of
from ckpt.integrations.huggingface_accelerate import require_covered
from ckpt.interop.safetensors.writing import CONFIG_NAME, MODEL_FILES
from ckpt.memory.device import device_of
from ckpt.ranks.merging import Alike, alike, first_difference
from ckpt.ranks.sigterm import TOLD_TO_END
from ckpt.run.arguments import as_checkpoint_id, as_location, as_topology
from ckpt.state.abilities import refusing_state
from ckpt.state.adapters import is_peft, keys_of_parts
from ckpt.state.statefuls import OptimizerState, RNGState
from ckpt.storage.stored import has_manifest, read_manifest

if TYPE_CHECKING:
    from transformers import Trainer as _Base
else:
    _Base = object

FOLDER = "ckpt"
"""Below `output_dir`: the checkpoint root, where `Trainer` looks for no checkpoints of its own."""
_STATE = "trainer_state.json"
_BEST = "best_at_step"
"""The metric of checkpoints that were the best when they were saved, as `Trainer` judges it: their step."""
_MOST_BYTES = 64 << 20
_NOT_CALLED = (
    "save_model",
    "_save",
    "_save_optimizer_and_scheduler",
    "_save_scaler",
    "_save_rng_state",
    "_load_from_checkpoint",
    "_load_rng_state",
    "_load_best_model",
)
"""Methods of `Trainer` that write or read files which a checkpoint of this package does not have."""
_OWN_OBJECTS = ("model", "optimizer", "scheduler", "scaler", "trainer")
_GIVEN = {
    "keep_last": "TrainingArguments(save_total_limit=...)",
    "keep_best": "TrainingArguments(metric_for_best_model=...)",
    "metric": "TrainingArguments(metric_for_best_model=...)",
    "greater_is_better": "TrainingArguments(greater_is_better=...)",
    "every": "TrainingArguments(save_steps=...)",
    "save_at_end": "TrainingArguments(save_strategy=...)",
    "save_rng": "TrainingArguments(save_only_model=...)",
    **dict.fromkeys((*_OWN_OBJECTS, "rng"), "Trainer itself"),
}
"""Arguments of `Checkpointer` that follow from something else."""
_UPLOADS: dict[type, tuple[str, str, Set[str]]] = {
    WandbCallback: ("WANDB_LOG_MODEL", "FALSE", {"CHECKPOINT"}),
    MLflowCallback: ("HF_MLFLOW_LOG_ARTIFACTS", "FALSE", ENV_VARS_TRUE_VALUES),
    ClearMLCallback: ("CLEARML_LOG_MODEL", "TRUE", ENV_VARS_TRUE_VALUES),
}
"""Callbacks that read `<output_dir>/checkpoint-<step>` after a save: the environment variable, its default, and values that say so."""


class CkptTrainerMixin(_Base):
    """Gives a trainer checkpoints of this package. It is named before the trainer's class: `class MyTrainer(CkptTrainerMixin, SFTTrainer)`.

    A checkpoint is `<output_dir>/ckpt/checkpoint-<step>`, saved by all ranks and committed by one rename. It holds the model, optimizer,
    schedule, gradient scaler, the random generators of each rank, and the small files that `_save_checkpoint` of `Trainer` or a subclass
    adds. It is no folder for `from_pretrained`: `trainer.save_model(folder)` writes one, and `ckpt convert --to safetensors` makes
    one of a checkpoint, which holds the model's configs and tokenizer for that. `ckpt.load` reads a checkpoint.

    `TrainingArguments` say when to save, and what: `save_strategy`, `save_steps`, `save_only_model`. With the last one, as in `Trainer`,
    an optimizer that the checkpoint holds is restored all the same; otherwise training goes on with a new one. The `save_total_limit`
    newest checkpoints stay, and beside them the best one if there is `metric_for_best_model`. What was logged at a step is in the
    manifest as its metrics.

    SIGTERM to any rank saves after its step, without the evaluation if one is due, and ends the program with exit code 143, without
    `enable_jit_checkpoint`. `SaveSettings.grace_s`, 20 s, is the time for all of that: a step or an evaluation that goes on for longer
    ends unsaved. `ckpt={"mode": SaveSettings(grace_s=...)}` sets it (`ckpt.saving.save_settings`).

    `train(resume_from_checkpoint=...)` takes "latest": the newest checkpoint, or the start of training if there is none; True: the
    newest, or an error; a path, also of a checkpoint that `Trainer` saved. As in `Trainer`, batches are skipped, and the random generators
    are set after that. Other numbers of ranks go on from the same step, with generators derived from the program's seed. A run that has
    ended trains no further step. Training that begins anew where checkpoints are is refused, as is one that goes on from an older
    checkpoint than the newest: with `ckpt={"overwrite": True}` it replaces them, or sets the newer ones aside. `auto_find_batch_size`
    does so with what an attempt has saved that ran out of memory.

    Of a PEFT model each adapter is a component, and the base is known by its source and digest: `peft_base="frozen"` of `Checkpointer`,
    which `ckpt={"peft_base": ...}` replaces.

    `save_model`, `save_state`, `push_to_hub` and `hub_strategy="end"` write what they do without it.

    Args:
        ckpt: arguments of `ckpt.Checkpointer` by name: `format`, `load`, `mode`, `keep_every`, `keep_last_of`, ..., and further
            objects with `state_dict` and `load_state_dict` to save. `folder` is the checkpoint root in place of `<output_dir>/ckpt`: a
            folder, or an address in an object store, such as s3://bucket/run.
        args, kwargs: of the trainer.

    Raises:
        ConfigurationError: DeepSpeed, FSDP1, SageMaker or XLA; an option of `TrainingArguments`, a callback, or a method of
            the trainer's class that needs the files of `Trainer`'s own checkpoints; or an argument in `ckpt` that follows from
            `TrainingArguments`.
    """

    _ckpt: Checkpointer  # while it trains

    def __init__(self, *args: Any, ckpt: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        self._ckpt_options = {"peft_base": "frozen"} | dict(ckpt or {})
        root = self._ckpt_options.pop("folder", None)
        self._ckpt_root = None if root is None else as_location("ckpt['folder']", root)
        self._ckpt_files = _Files()
        self._ckpt_path: Place | None = None  # of the checkpoint to resume from, if it is not Trainer's own
        self._ckpt_rng: dict[str, Any] | None = None
        self._ckpt_output: str | None = None  # in place of `output_dir`
        self._ckpt_is_saving = False
        for name in filter(_GIVEN.__contains__, self._ckpt_options):
            raise ConfigurationError(f"ckpt[{name!r}] follows from {_GIVEN[name]}; leave it out")
        for arg in (*args, *kwargs.values()):  # before Trainer makes a folder of that name
            if isinstance(arg, TrainingArguments) and is_address(str(arg.output_dir)):
                raise ConfigurationError(
                    f"output_dir {arg.output_dir} is a folder, in which Trainer itself writes; checkpoints go to an object store with "
                    f"ckpt={{'folder': '{arg.output_dir}'}}"
                )
        super().__init__(*args, **kwargs)
        require_covered(self.accelerator)
        if reason := _not_covered(self):
            raise ConfigurationError(f"{type(self).__name__} cannot save with ckpt: {reason}")

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """Train, and go on from a checkpoint: see the class. Collective.

        Raises:
            CheckpointNotFoundError: there is no checkpoint to resume from.
            CheckpointExistsError: training is to begin anew, or from an older checkpoint, where others are.
            CorruptCheckpointError: the checkpoint is damaged. Of "latest" the error names an older, sound one; but if the damage is in the
                small files, which are read first, training goes on from that one.
            SystemExit: SIGTERM has come; the step is saved.
        """
        output_dir = self._ckpt_beside = Path(self._get_output_dir(trial))
        self._ckpt_folder = output_dir / FOLDER if self._ckpt_root is None else self._ckpt_root
        if trial is not None and self._ckpt_root is not None:
            self._ckpt_folder = self._ckpt_root / output_dir.name
        self._ckpt_path = self._ckpt_rng = None
        self._ckpt_is_told = self._ckpt_is_retry = False
        is_ours = self._ckpt_agreed(resume_from_checkpoint)
        with tempfile.TemporaryDirectory(prefix="ckpt-trainer-") as files, ExitStack() as self._ckpt_open:
            self._ckpt_is_latest = resume_from_checkpoint in (True, "latest")
            if resume_from_checkpoint and is_ours:
                self._ckpt_path = self._ckpt_found(resume_from_checkpoint, Path(files))
                resume_from_checkpoint = files if self._ckpt_path is not None else None
            output = super().train(resume_from_checkpoint, trial=trial, ignore_keys_for_eval=ignore_keys_for_eval)
        if self._ckpt_is_told:
            raise SystemExit(TOLD_TO_END)
        return output

    def _ckpt_agreed(self, resume: str | bool | None) -> bool:
        """Whether the checkpoint to resume from is none of `Trainer` itself. Collective.

        Raises:
            ConfigurationError: ranks are to resume from different ones.
        """
        is_ours = not isinstance(resume, str | PathLike) or is_address(str(resume)) or not (Path(resume) / _STATE).is_file()
        topology = as_topology(None)
        with topology.operation("start of training"), topology.phase("resume") as phase:
            phase.merge = {
                "resume_from_checkpoint": alike(str(resume)),
                "output_dir": alike(str(self._ckpt_folder.parent if self._ckpt_root is None else self._ckpt_folder)),
                "whether Trainer wrote it": alike(not is_ours),
            }
            phase.answer = lambda: _require_one_start(phase.merged)
        return is_ours

    def _ckpt_found(self, resume: str | bool, files: Path) -> Place | None:
        """Return the checkpoint to resume from, and write its small files; None: there is none yet. Collective."""
        which = "latest" if self._ckpt_is_latest else as_location("resume_from_checkpoint", str(resume))
        path = self._ckpt_read(which, trainer=self._ckpt_files)
        if path is None:
            own = get_last_checkpoint(str(self._ckpt_beside)) if self._ckpt_beside.is_dir() else None
            if own is not None:
                raise CheckpointNotFoundError(
                    f"there is no checkpoint in {self._ckpt_folder}, but Trainer itself has saved {own}; name its path in "
                    "resume_from_checkpoint to go on from it"
                )
            if resume is True:
                raise CheckpointNotFoundError(
                    f'there is no checkpoint in {self._ckpt_folder}; resume_from_checkpoint="latest" begins anew then'
                )
        if path is not None:
            self._ckpt_files.write_to(files)
        return path

    def _ckpt_read(self, which: str | Place, *, save_rng: bool = False, **objects: Any) -> Place | None:
        """Restore objects, and nothing else of what this trainer saves. Collective."""
        load = self._ckpt_options.get("load")
        load = load if isinstance(load, str) else "direct"  # an object is in use
        device = device_of(self.model.parameters())
        names = [*_OWN_OBJECTS, *names_of_objects(self._ckpt_options)]
        if "model" not in objects and is_peft(self.model_wrapped):
            names += keys_of_parts("model", self.model_wrapped)
        given: dict[str, Any] = {name: objects.get(name) for name in names}
        with Checkpointer(
            self._ckpt_folder,
            load=load,
            device=device,
            save_rng=save_rng,
            on_sigterm=False,
            peft_base=self._ckpt_options.get("peft_base"),
            **given,
        ) as checkpoints:
            return checkpoints.restore(which).path

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        self._ckpt_open.close()  # that of a batch size that did not fit
        prepared = super()._prepare_for_training(*args, **kwargs)
        self._ckpt_open.callback(self.__dict__.pop, "_ckpt", None)  # it holds model and optimizer
        self._ckpt = self._ckpt_open.enter_context(self._checkpointer())
        if self._ckpt_path is not None:
            self._ckpt_restore(self._ckpt_path)
        self._ckpt_is_retry, self._ckpt_is_latest = True, False  # the next time
        if self.args.save_strategy != SaveStrategy.NO:
            try:
                self._ckpt.check_folder()
            except CheckpointExistsError as error:
                raise CheckpointExistsError(
                    f'{error}. Of a Trainer: train(resume_from_checkpoint="latest"), or ckpt={{"overwrite": True}}'
                ) from error
        return prepared

    def _ckpt_restore(self, path: Place) -> None:
        """Restore all state of the checkpoint whose small files have been read. Collective.

        Raises:
            CorruptCheckpointError: it was the newest one, and is damaged.
        """
        # Batches are skipped with the generators as they are now, and training goes on with the saved ones.
        generators = self._generators()
        now = generators.state_dict()
        passes_over = self._ckpt_is_latest and not self._ckpt_options_now.get("overwrite")
        restored = self._ckpt.restore("latest" if passes_over else path).path
        if restored != path:
            raise CorruptCheckpointError(
                f"{path} is damaged; to go on from {restored}, the newest sound one, name its path in resume_from_checkpoint, with "
                'ckpt={"overwrite": True}'
            )
        has_rng = True
        if self.args.save_only_model:
            topology = as_topology(None)
            with topology.operation(f"load of {path.name}"), topology.phase("components") as phase:
                if topology.is_lead:
                    phase.from_lead = [*read_manifest(path).components]
            state = self._training_state()
            state["optimizer"] = OptimizerState(state["optimizer"], self.model_wrapped)
            saved = {name: component for name, component in state.items() if name in phase.from_lead}
            has_rng = "rng" in phase.from_lead
            if saved or has_rng:
                self._ckpt_read(path, save_rng=has_rng, **saved)
        if has_rng:
            self._ckpt_rng = generators.state_dict()
        generators.load_state_dict(now)

    @property
    def _ckpt_options_now(self) -> dict[str, Any]:
        """As given; what an attempt has saved that ran out of memory gives way to the next."""
        overwrites = self._ckpt_is_retry and not self._ckpt_options.get("shared_root")
        return self._ckpt_options | ({"overwrite": True} if overwrites else {})

    def _training_state(self) -> dict[str, Any]:
        optimizer = self.optimizer.optimizer  # without Accelerate's wrapper
        return {"optimizer": optimizer, "scheduler": self.lr_scheduler, "scaler": self.accelerator.scaler}

    def _checkpointer(self) -> Checkpointer:
        objects: dict[str, Any] = dict.fromkeys(_OWN_OBJECTS)
        objects |= {"model": self.model_wrapped, "trainer": self._ckpt_files}
        with as_topology(None).phase("files of the model"):
            self._ckpt_files.of_model = self._model_files() if self.args.should_save else {}
        if not self.args.save_only_model:
            objects |= self._training_state()
        limit = self.args.save_total_limit
        has_best = limit is not None and limit > 0 and self.args.metric_for_best_model is not None
        return Checkpointer(
            self._ckpt_folder,
            keep_last=limit if limit is not None and limit > 0 else None,
            keep_best=1 if has_best else None,
            metric=_BEST if has_best else None,
            greater_is_better=True,
            save_rng=not self.args.save_only_model,
            save_at_end=False,
            **objects,
            **({"on_sigterm": False} if self.args.save_strategy == SaveStrategy.NO else {}) | self._ckpt_options_now,
        )

    def _model_files(self) -> dict[str, torch.Tensor]:
        """Name -> bytes of the files that `Trainer` writes beside the weights: configs and tokenizer. `ckpt convert` exports them."""
        model = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        model = model.get_base_model() if is_peft(model) else model
        tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        with tempfile.TemporaryDirectory(prefix="ckpt-trainer-") as folder:
            if isinstance(model, PreTrainedModel):
                config = copy.deepcopy(model.config)
                config.architectures = [type(model).__name__.removeprefix("FSDP")]
                config.to_json_file(Path(folder, CONFIG_NAME))
                if model.can_generate():
                    model.generation_config.to_json_file(Path(folder, "generation_config.json"))
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
            paths = [path for path in Path(folder).iterdir() if path.is_file()]
            return {path.name: torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8) for path in paths}

    def _generators(self) -> RNGState:
        return RNGState(device_of(self.model.parameters()))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self._ckpt_path is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if self._ckpt_path is None:
            super()._load_rng_state(checkpoint)
        elif self._ckpt_rng is not None:
            self._generators().load_state_dict(self._ckpt_rng)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        if self.state.global_step >= self.state.max_steps:  # Trainer would train one step more
            self.control.should_training_stop = True
            return
        super()._run_epoch(*args, **kwargs)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        if self._ckpt_is_told:  # the end of an epoch that was cut short after the save
            self.control.should_log = self.control.should_evaluate = self.control.should_save = False
            return
        if self._ckpt.is_told_to_end(self.state.global_step):
            self._ckpt.wait()  # else `when_busy="skip"` could leave this save out
            self._ckpt_is_told = self.control.should_save = self.control.should_training_stop = True
            self.control.should_evaluate = False  # it may take longer than is left
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Have the trainer write its small files into a temporary folder, and save these and all state. Collective."""
        step, best_before = self.state.global_step, self.state.best_model_checkpoint
        with tempfile.TemporaryDirectory(prefix="ckpt-trainer-") as folder:
            files = Path(folder) / f"checkpoint-{step}"
            files.mkdir()
            self._ckpt_output, self._ckpt_is_saving = folder, True
            try:
                super()._save_checkpoint(model, trial)
            finally:
                self._ckpt_output, self._ckpt_is_saving = None, False
            is_best = self.state.best_global_step == step
            best = str(self._ckpt_folder / f"checkpoint-{as_checkpoint_id(step)}") if is_best else best_before
            self.state.best_model_checkpoint = best
            if self.args.should_save:
                self.state.save_to_json(str(files / _STATE))
            self._ckpt_files.read_from(files, type(self).__name__)
        logged = [entry for entry in self.state.log_history if entry.get("step") == step]
        metrics = {name: float(value) for entry in logged for name, value in entry.items() if isinstance(value, Real)}
        metrics.pop("step", None)
        if self.args.metric_for_best_model is not None:
            metrics[_BEST] = step if is_best else math.nan
        if self._ckpt.save(step, metrics=metrics) is None:  # skipped
            self.state.best_model_checkpoint = best_before

    def _get_output_dir(self, trial: Any) -> str:
        return self._ckpt_output or str(super()._get_output_dir(trial))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if not self._ckpt_is_saving:
            super().save_model(output_dir, _internal_call)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self._ckpt_is_saving:
            super()._save_optimizer_and_scheduler(output_dir)

    def _save_scaler(self, output_dir: str) -> None:
        if not self._ckpt_is_saving:
            super()._save_scaler(output_dir)

    def _save_rng_state(self, output_dir: str) -> None:
        if not self._ckpt_is_saving:
            super()._save_rng_state(output_dir)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self._ckpt.wait()
        with tempfile.TemporaryDirectory(prefix="ckpt-trainer-") as empty:
            self._ckpt_output = empty  # Trainer deletes checkpoints of its own, of an earlier run
            try:
                return super()._finalize_training(*args, **kwargs)
            finally:
                self._ckpt_output = None

    def _load_best_model(self) -> None:
        best = place_of(self.state.best_model_checkpoint)
        if not has_manifest(best):  # of an earlier run without this class
            super()._load_best_model()
        else:
            self._ckpt_read(best, model=self.model_wrapped)


class CkptTrainer(CkptTrainerMixin, Trainer):
    """`transformers.Trainer` with checkpoints of this package: see `CkptTrainerMixin`."""


def _not_covered(trainer: Any) -> str | None:
    """What of a trainer cannot be saved here, or would be lost."""
    args = trainer.args
    if is_sagemaker_mp_enabled():
        return "it trains with SageMaker's model parallelism"
    if args.push_to_hub and args.hub_strategy != HubStrategy.END:
        return f'hub_strategy="{args.hub_strategy.value}" pushes files of Trainer\'s own checkpoints; use hub_strategy="end"'
    if args.save_on_each_node:
        return "save_on_each_node=True: all nodes save one checkpoint together, in a folder that they share"
    if args.enable_jit_checkpoint:
        return "enable_jit_checkpoint=True: ranks would save at different steps; SIGTERM saves without it"
    for kind, (variable, default, values) in _UPLOADS.items():
        value = os.getenv(variable, default)
        if value.upper() in values and any(isinstance(callback, kind) for callback in trainer.callback_handler.callbacks):
            return f"{variable}={value}: {kind.__name__} would upload a checkpoint of Trainer's own; set it to false"
    return _hidden(type(trainer))


def _hidden(kind: type) -> str | None:
    """The first method of `_NOT_CALLED` that is overridden after the mixin, and not before it."""
    kinds = kind.__mro__
    for name in _NOT_CALLED:
        owner = next(base for base in kinds if base is not CkptTrainerMixin and name in vars(base))
        if owner is not Trainer and kinds.index(owner) > kinds.index(CkptTrainerMixin):
            return (
                f"{owner.__name__}.{name} would not be called, for a checkpoint here has no files of that kind; leave that to "
                f"_save_checkpoint, or to a {name} of {kind.__name__}"
            )
    return None


class _Files:
    """The small files of a checkpoint of `Trainer`, from all ranks together."""

    sharing_pattern = "sharded"

    def __init__(self) -> None:
        self._files: dict[str, bytes] = {}
        self.of_model: dict[str, torch.Tensor] = {}
        self._to_fill: dict[str, Any] | None = None
        self._refusal: str | None = None

    def read_from(self, folder: Path, owner: str) -> None:
        self._files = {}
        files = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
        size = sum(path.stat().st_size for path in files.values())
        self._refusal = None
        if size > _MOST_BYTES:
            names = ", ".join(files)
            self._refusal = f"{owner} adds {size >> 20} MiB of files to a checkpoint ({names}), expected at most {_MOST_BYTES >> 20}; give"
            self._refusal += ' an object with so much state in ckpt={"<name>": <object>}'
            return
        self._files = {name: path.read_bytes() for name, path in files.items()}

    @refusing_state("Trainer")
    def write_to(self, folder: Path) -> None:
        """Write the files.

        Raises:
            CorruptCheckpointError: a name leads out of the folder, or there is something else than files.
        """
        for name, data in self._files.items():
            path = Path(name)
            if path.is_absolute() or ".." in path.parts:
                raise CorruptCheckpointError(
                    f"a file of the component trainer is named {name!r}, which leads out of its folder"
                )
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(data)

    def state_dict(self) -> dict[str, Any]:
        if self._refusal is not None:
            raise ConfigurationError(self._refusal)
        if self._to_fill is not None:
            return self._to_fill
        return {"files": self._files, MODEL_FILES: self.of_model}

    def prepare_to_load(self, saved: Mapping[str, ArrayEntry]) -> None:
        """Make room for the files of the model, which are read and left: a run has its own."""
        self._to_fill = {name: torch.empty(entry.shape, dtype=torch.uint8, device="cpu") for name, entry in saved.items()}

    def forget_prepared(self) -> None:
        self._to_fill = None

    @refusing_state("Trainer")
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._to_fill = None
        self._files = dict(state_dict["files"])


def _require_one_start(starts: Mapping[str, Alike]) -> None:
    if (difference := first_difference(starts)) is not None:
        name, rank, here, on_lead = difference
        raise ConfigurationError(
            f"ranks would resume from different checkpoints: {name} is {here} on rank {rank}, and {on_lead} on rank 0"
        )
