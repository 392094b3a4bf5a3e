"""A model and data of a user's own under `python -m recipes.train`, killed and resumed to the bit; nothing of the repository is changed."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.processes import left_after
from tests.e2e.runs import REPO, Forked, committed, summary_of
from tests.support.pace import patience

EXAMPLE = REPO / "examples" / "own_project"
OWN = [f"--config-dir={EXAMPLE / 'conf'}", "model=mine", "data=mine", "data.points=100"]
STEPS = 20


@pytest.fixture(autouse=True)
def _is_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of this process, and so of the commands and ranks that come of it; a user sets PYTHONPATH."""
    monkeypatch.syspath_prepend(EXAMPLE)


def start(run_dir: Path, *overrides: str, config: tuple[str, ...] = tuple(OWN)) -> Forked:
    return Forked("recipes.train", [*config, f"output_dir={run_dir}", *overrides], run_dir.parent)


def trained(run_dir: Path, *overrides: str, config: tuple[str, ...] = tuple(OWN)) -> dict[str, Any]:
    command = start(run_dir, *overrides, config=config).ended()
    assert command.code == 0, command.out + command.err
    return summary_of(run_dir)


def kill_in_training(run_dir: Path, *overrides: str, config: tuple[str, ...] = tuple(OWN)) -> None:
    """Start a run, and kill all of its processes once it has saved twice and goes on."""
    others = set(psutil.Process().children(recursive=True))
    command = start(run_dir, *overrides, config=config)
    deadline = time.monotonic() + patience(120)
    try:
        while len(committed(run_dir)) < 2:
            assert command.process.is_alive() and time.monotonic() < deadline, committed(run_dir)
            time.sleep(0.01)
    finally:
        ours = set(psutil.Process().children(recursive=True)) - others
        for process in ours:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        command.ended()
    assert command.code != 0 and not (run_dir / "summary.json").exists()
    assert left_after(patience(10.0), lambda: [process for process in ours if process.is_running()]) == []


def goes_on_to_the_bit(folder: Path, *overrides: str, config: tuple[str, ...] = tuple(OWN)) -> None:
    run = (f"train.steps={STEPS}", *overrides)
    straight = trained(folder / "straight", *run, config=config)
    kill_in_training(folder / "killed", *run, "save.every=2", config=config)
    rest = trained(folder / "killed", *run, "resume=latest", config=config)
    assert rest["first_step"] > 4
    assert rest["losses"] == straight["losses"][rest["first_step"] - 1 :]
    assert rest["state_digest"] == straight["state_digest"]


@pytest.mark.parametrize(
    "overrides",
    [
        ["experiment=mine", "launch.nproc_per_node=2"],
        pytest.param(["launch.nproc_per_node=2"], marks=pytest.mark.full),
        pytest.param(["parallel=single"], marks=pytest.mark.full),
        pytest.param(["parallel=fsdp", "launch.nproc_per_node=2"], marks=pytest.mark.full),
        pytest.param(["parallel=hsdp", "launch.nproc_per_node=2"], marks=pytest.mark.full),
        pytest.param(["parallel=accelerate", "launch.nproc_per_node=2"], marks=pytest.mark.full),
        pytest.param(
            ["parallel=ddp_tp", "parallel.plan._target_=own_project.plans.tensor_plan", "launch.nproc_per_node=2"],
            marks=pytest.mark.full,
        ),
        pytest.param(
            ["parallel=pipeline", "parallel.stages._target_=own_project.plans.keep_stage", "launch.nproc_per_node=2"],
            marks=pytest.mark.full,
        ),
    ],
    ids=lambda overrides: overrides[0],
)
def test_the_example_is_killed_and_goes_on_to_the_bit(tmp_path: Path, overrides: list[str]) -> None:
    goes_on_to_the_bit(tmp_path, *overrides)


@pytest.mark.full
def test_it_goes_on_with_another_optimizer_schedule_and_loss_of_its_own(tmp_path: Path) -> None:
    own = ["optimizer._target_=torch.optim.SGD", "optimizer.momentum=0.9"]
    own += ["schedule._target_=torch.optim.lr_scheduler.CosineAnnealingLR", "schedule.T_max=${train.steps}"]
    own += ["loss._target_=torch.nn.CrossEntropyLoss", "loss.label_smoothing=0.1"]
    goes_on_to_the_bit(tmp_path, *own)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["parallel=ddp_tp"], "parallel=ddp_tp cuts inside the model, and Net has no tensor_plan that says how: give parallel.plan._ta"),
        (["parallel=pipeline"], "parallel=pipeline cuts inside the model, and Net has no keep_stage that says how: give parallel.sta"),
    ],
)
def test_a_layout_that_needs_a_plan_says_so_before_a_rank_starts(tmp_path: Path, overrides: list[str], said: str) -> None:
    command = start(tmp_path / "run", *overrides, "launch.nproc_per_node=2").ended()
    assert (command.code, command.err.count("\n")) == (1, 1) and command.err.startswith(said), command.err
    assert not (tmp_path / "run").exists()


def test_a_model_of_hugging_face_from_a_local_folder_is_killed_and_goes_on_to_the_bit(tmp_path: Path) -> None:
    model, text = local_model(tmp_path / "hub"), tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": f"the {n} of {n * n} and {n + 1}"}) + "\n" for n in range(300)))
    conf = tmp_path / "conf"
    for group, lines in {
        "model": [
            "_target_: transformers.AutoModelForCausalLM.from_pretrained",
            f"pretrained_model_name_or_path: {model}",
            "local_files_only: true",
        ],
        "data": ["_target_: own_project.local_text.LocalText", f"path: {text}", f"tokenizer: {model}", "length: 16"],
    }.items():
        (conf / group).mkdir(parents=True)
        (conf / group / "hub.yaml").write_text("\n".join(lines) + "\n")
    goes_on_to_the_bit(tmp_path, "parallel=single", config=(f"--config-dir={conf}", "model=hub", "data=hub"))


def local_model(folder: Path) -> Path:
    """A tiny GPT-2 with random weights, and a tokenizer of whole words, as `from_pretrained` reads them."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({str(n): n for n in range(400)} | {"the": 400, "of": 401, "and": 402, "?": 403}, "?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(folder)
    GPT2LMHeadModel(GPT2Config(vocab_size=404, n_positions=16, n_embd=32, n_layer=2, n_head=2)).save_pretrained(folder)
    return folder
