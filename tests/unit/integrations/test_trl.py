"""A trainer of TRL, which the extra `fidelity` has, with checkpoints of this package."""

from __future__ import annotations

import io
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from ckpt.integrations.huggingface import CkptTrainerMixin, _hidden
from ckpt.ranks.topology import Topology
from ckpt.storage.stored import read_manifest
from tests.support.ranks import run_ranks

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore")]
STEPS = 12


def _trainer(folder: Path, *callbacks: Any, is_adapted: bool = False, **options: Any) -> Any:
    trl = pytest.importorskip("trl", reason="TRL is not installed")
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType
    from datasets import Dataset
    from peft import LoraConfig
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from tests.support.trainers import model

    class Tuner(CkptTrainerMixin, trl.SFTTrainer):
        """Keeps the tokens of each step."""

        def training_step(self, model: Any, inputs: dict[str, Any], *rest: Any, **options: Any) -> Any:
            self.__dict__.setdefault("batches", {})[self.state.global_step + 1] = inputs["input_ids"].tolist()
            return super().training_step(model, inputs, *rest, **options)

    words = ["<eos>", *(f"word{number}" for number in range(15))]
    tokens = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<eos>"))
    tokens.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token="<eos>", eos_token="<eos>")
    texts = [" ".join(words[1 + (first * at) % 15] for at in range(6)) for first in range(30)]
    arguments = trl.SFTConfig(
        str(folder),
        max_steps=STEPS,
        save_steps=4,
        per_device_train_batch_size=2,
        logging_steps=1,
        use_cpu=True,
        bf16=False,
        report_to="none",
        disable_tqdm=True,
        **options,
    )
    if options:  # Accelerate leaves FSDP out where devices are CPUs
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    data = Dataset.from_dict({"text": texts})
    adapter = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True) if is_adapted else None
    return Tuner(model(), arguments, train_dataset=data, processing_class=tokenizer, callbacks=[*callbacks], peft_config=adapter)


def _train(topology: Topology, folder: Path, options: dict[str, Any], at: int = 0) -> Any:
    """Train an adapter from the newest checkpoint on. The losses of each step; weights and moments."""
    from tests.support.trainers import Seen, state_of

    size = str(topology.world_size)
    os.environ |= {"RANK": str(topology.rank), "LOCAL_RANK": str(topology.rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    tuner = _trainer(folder, seen := Seen(at, lambda: os.kill(os.getpid(), signal.SIGKILL)), is_adapted=True, **options)
    tuner.train(resume_from_checkpoint="latest")
    assert bool(options) == any(isinstance(parameter, DTensor) for parameter in tuner.model.parameters())
    state = io.BytesIO()
    torch.save(_whole(state_of(tuner)), state)
    return seen.losses, state.getvalue()


def _whole(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _whole(inner) for key, inner in value.items()}
    return value.full_tensor() if isinstance(value, DTensor) else value


@pytest.mark.parametrize(
    "options", [{}, {"fsdp": True, "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["GPT2Block"]}}], ids=["ddp", "fsdp"]
)
def test_an_adapter_that_ranks_train_goes_on_to_the_bit_after_a_kill(tmp_path: Path, options: dict[str, Any]) -> None:
    pytest.importorskip("trl", reason="TRL is not installed")
    pytest.importorskip("peft", reason="PEFT is not installed")
    from tests.support.values import same_values

    ranks = partial(run_ranks, 2, _train, process_group=True, is_only=True, timeout_s=120.0)
    straight = ranks(tmp_path / "straight", options)
    ranks(tmp_path / "killed", options, 10, expect_dead=[0, 1])
    for (losses, state), (again, state_again) in zip(straight, ranks(tmp_path / "killed", options), strict=True):
        assert again == {step: losses[step] for step in range(9, STEPS + 1)}
        assert same_values(*(torch.load(io.BytesIO(data)) for data in (state_again, state)))
    held = read_manifest(tmp_path / "killed/ckpt" / f"checkpoint-{STEPS:08d}").components
    assert [*held][:2] == ["adapter-default", "base"]


def test_sft_goes_on_to_the_bit(tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="TRL is not installed")
    from tests.support.trainers import Seen, Stopped, state_of, stop
    from tests.support.values import same_values

    straight = _trainer(tmp_path / "straight", before := Seen())
    straight.train()
    with pytest.raises(Stopped):
        _trainer(tmp_path / "stopped", Seen(10, stop)).train(resume_from_checkpoint="latest")
    resumed = _trainer(tmp_path / "stopped", after := Seen())
    resumed.train(resume_from_checkpoint="latest")
    assert resumed.batches == {step: straight.batches[step] for step in range(9, STEPS + 1)}, "15 batches in an epoch"
    assert after.losses == {step: before.losses[step] for step in range(9, STEPS + 1)}
    assert same_values(state_of(resumed), state_of(straight))
    assert (tmp_path / "stopped/README.md").exists(), "TRL's own part of a save is done"


def test_no_trainer_overrides_what_would_not_be_called() -> None:
    trl = pytest.importorskip("trl", reason="TRL is not installed")
    kinds = [getattr(trl, name) for name in dir(trl) if name.endswith("Trainer")]
    assert trl.SFTTrainer in kinds
    assert trl.GRPOTrainer in kinds
    for kind in kinds:
        assert _hidden(type(kind.__name__, (CkptTrainerMixin, kind), {})) is None
