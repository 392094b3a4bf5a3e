"""Every answer in conf/ composes, and every `_target_` in it takes the keys that the file gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from recipes.benchmark.harness import MEASUREMENTS
from recipes.support import CONF
from recipes.support.config import AT_RUN_TIME, OFFERED, RunKeys, bind, checked, leave_out_unset, loss_of
from recipes.support.keys import as_choices
from recipes.training.sync_config import checked_sync
from tests.conf.configs import composed, config

LAYOUTS = {"single", "ddp", "accelerate", "fsdp", "hsdp", "tp_fsdp", "ddp_tp", "pipeline", "ddp_pipeline"}
GROUPS = {
    "ckpt": {"zarr", "tensorstore", "kimi-engine"},
    "strategy": {"direct", "two-stage"},
    "device": {"cpu", "cuda", "npu"},
    "parallel": LAYOUTS,
    "sharing": LAYOUTS,
    "model": {"gpt"},
    "data": {"text"},
    "optimizer": {"adamw"},
    "schedule": {"warmup"},
    "loss": {"cross_entropy", "mse", "bce"},
    "logger": {"tensorboard", "wandb", "mlflow", "csv"},
    "callbacks": {"early_stop", "keep_best"},
    "debug": {"step", "ranks", "profiler"},
    "launch": {"local", "ray", "slurm", "torchrun"},
    "save": {"default"},
    "tiers": {"memory", "memory_and_disks"},
    "coordinator": {"default"},
    "hydra": {"default"},
}
WORKLOADS = {
    "gpt2_ddp",
    "gpt2_fsdp",
    "gpt2_large",
    "gpt2_tp_fsdp",
    "lora",
    "reshard",
    "slow_store",
    "small_tensors",
}  # tests/conf/test_benchmark_workloads.py
MEASURED = {"compare", *MEASUREMENTS}
EXPERIMENTS = {
    "formats": "train", "layouts": "train", "big_model": "train", "frequent_saves": "train", "rl_weight_sync": "sync_weights",
}  # fmt: skip
"""Named runs -> the command that they are of."""
ENGINES = {"broadcast", "kimi", "naive"}  # tests/conf/test_sync_config.py
FOR_CODE = {"read_at", "settings"}
"""What a program passes and no command line can: a function, and settings by themselves."""
CHOICES = [(group, name) for group, names in GROUPS.items() for name in sorted(names)]
ROOTS = {
    "train", "sync_weights", "join_rollout", "inspect", "verify", "plan", "doctor", "convert", "diff", "bisect",
    "benchmark",
}  # fmt: skip


def plain(run_dir: Path, *overrides: str) -> dict[str, Any]:
    typed = OmegaConf.merge(OmegaConf.structured(RunKeys), composed(run_dir, *overrides))
    run = OmegaConf.to_container(typed, resolve=True)
    assert isinstance(run, dict)
    leave_out_unset(run)
    return {str(key): value for key, value in run.items()}


def test_conf_holds_these_files_and_no_others() -> None:
    found = {str(path.relative_to(CONF)) for path in CONF.rglob("*.yaml") if path.parent.name != "local"}
    choices = [*CHOICES, *(("workload", name) for name in WORKLOADS), *(("engine", name) for name in ENGINES)]
    choices += [("hparams_search", "optuna")]  # composes with its package alone
    choices += [*(("measure", name) for name in MEASURED), *(("experiment", name) for name in EXPERIMENTS)]
    assert found == {f"{group}/{name}.yaml" for group, name in choices} | {f"{root}.yaml" for root in ROOTS}


@pytest.mark.parametrize(("group", "name"), CHOICES)
def test_every_choice_composes_and_binds_to_the_signatures_it_targets(group: str, name: str, tmp_path: Path) -> None:
    run = plain(tmp_path, f"{group}={name}")
    for node, given in AT_RUN_TIME.items():
        bind(run[node], node, given)


@pytest.mark.parametrize("word", ["experiment", "+experiment"])
@pytest.mark.parametrize(("name", "root"), EXPERIMENTS.items())
def test_a_named_run_is_a_run_of_its_command_however_it_is_typed(word: str, name: str, root: str, tmp_path: Path) -> None:
    typed = as_choices([f"{word}={name}"], CONF / f"{root}.yaml")
    run = composed(tmp_path, *typed, root=root)
    assert run.run_name == name
    assert (checked if root == "train" else checked_sync)(run)["run_name"] == name


@pytest.mark.parametrize("root", ["train", "plan", "sync_weights"])
@pytest.mark.parametrize(
    ("typed", "taken"),
    [
        (["optimizer.momentum=0.9", "model.chanels=4"], ["++optimizer.momentum=0.9", "++model.chanels=4"]),
        (["optimizer.lr=0.1", "parallel=ddp_tp", "parallel.plan._target_=a.b", "train.steps=3", "callbacks.x=1"], None),
        (["+optimizer.momentum=0.9", "~data.path", "components.model.x=1"], None),
        (["loss._target_=torch.nn.MSELoss", "loss.reduction=sum"], ["++loss._target_=torch.nn.MSELoss", "++loss.reduction=sum"]),
        (["save.keep_last_of.optimizer=1"], ["++save.keep_last_of.optimizer=1"]),
        (["save.keep_last=1", "+save.keep_last_of.optimizer=1"], None),
        (["loss.label_smoothing=0.1", "loss=cross_entropy"], None),
        (["optimizer.lr=0.1", "experiment=mine"], ["++optimizer.lr=0.1", "experiment=mine"]),
        (["loss=null", "logger=null", "device=null"], ["~loss", "~logger", "device=null"]),
    ],
)
def test_an_argument_of_a_target_needs_no_plus(typed: list[str], taken: list[str] | None, root: str) -> None:
    assert as_choices(typed, CONF / f"{root}.yaml") == (taken or typed)


@pytest.mark.parametrize("name", sorted(GROUPS["loss"]))
def test_a_loss_of_conf_is_a_function_of_output_and_target(name: str, tmp_path: Path) -> None:
    node = config(tmp_path, f"loss={name}")["loss"]
    target = torch.tensor([1, 0]) if name == "cross_entropy" else torch.rand(2, 3)
    assert loss_of(node)(torch.rand(2, 3), target).dim() == 0


@pytest.mark.parametrize("name", ["formats", "layouts"])
def test_a_named_sweep_has_jobs_that_compose(name: str, tmp_path: Path) -> None:
    found = OmegaConf.load(CONF / "experiment" / f"{name}.yaml")
    for key, values in found.hydra.sweeper.params.items():
        for value in values.split(","):
            checked(composed(tmp_path, f"experiment={name}", f"{key}={value}"))


@pytest.mark.parametrize(("group", "name"), [choice for choice in CHOICES if choice[0] in AT_RUN_TIME])
def test_no_file_leaves_a_key_of_its_target_unsaid(group: str, name: str, tmp_path: Path) -> None:
    """`--help` shows every key. Torch's own optimizers have options that a run does not need."""
    import inspect
    from importlib import import_module

    node = plain(tmp_path, f"{group}={name}")[group]
    module, _, attribute = node["_target_"].rpartition(".")
    if not module.startswith("torch"):
        keys = set(inspect.signature(getattr(import_module(module), attribute)).parameters)
        at_run_time = {*AT_RUN_TIME[group], *OFFERED.get(group, ())} & keys
        assert keys - FOR_CODE == {key for key in node if not key.startswith("_")} | at_run_time


def test_the_wiring_hands_each_choice_on_exactly_once() -> None:
    wiring = (CONF / "coordinator" / "default.yaml").read_text()
    assert [wiring.count(f"${{{node}}}") for node in ("ckpt", "strategy", "device")] == [1, 1, 1]


@pytest.mark.parametrize("name", sorted(GROUPS["sharing"]))
def test_a_sharing_file_writes_all_six_keys_of_all_five_components(name: str, tmp_path: Path) -> None:
    components = plain(tmp_path, f"sharing={name}")["components"]
    assert list(components) == ["model", "optimizer", "scheduler", "dataset", "rng"]
    keys = ["sharing_pattern", "process_group_name", "required", "validate_replication", "validation_level", "elastic"]
    assert all(list(component) == keys for component in components.values())


def test_the_run_folder_has_no_time_in_it_and_is_asked_for_once_by_each_run() -> None:
    """Ranks that start seconds apart must agree on it, and `${hydra:...}` does not resolve in tests."""
    text = {path: path.read_text() for path in CONF.rglob("*.yaml")}
    assert not [path for path, content in text.items() if "${now:" in content]
    asking = {path.name: content.count("${hydra:runtime.output_dir}") for path, content in text.items()}
    assert {name: count for name, count in asking.items() if count} == {
        "train.yaml": 1,
        "sync_weights.yaml": 1,
        "plan.yaml": 1,
        "ranks.yaml": 1,
        "sync.yaml": 1,
    }
