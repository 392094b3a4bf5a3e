"""The config of the weight sync recipe: every engine composes, and what is wrong is told before any rank starts."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir

from ckpt.engine import BroadcastCheckpointEngine, KimiCheckpointEngine, NaiveCheckpointEngine
from ckpt.errors import ConfigurationError
from recipes.support import CONF
from recipes.support.config import made
from recipes.training.sync_config import checked_join, checked_sync
from tests.conf.configs import composed
from tests.support.covering import sampled


def config(run_dir: Path, *overrides: str) -> dict[str, Any]:
    return checked_sync(composed(run_dir, *overrides, root="sync_weights"))


@pytest.mark.parametrize(
    ("engine", "kind"),
    [("kimi", KimiCheckpointEngine), ("broadcast", BroadcastCheckpointEngine), ("naive", NaiveCheckpointEngine)],
)
def test_each_engine_is_made_with_all_keys_of_its_file(engine: str, kind: type, tmp_path: Path) -> None:
    run = config(tmp_path, f"engine={engine}", "roles.colocated=true", "engine.bucket_mib=2", "engine.timeout_s=7")
    with made(run["engine"], colocated=True) as one:
        assert type(one) is kind
        assert (one.timeout_s, one.colocated) == (7.0, True)


def test_the_number_of_ranks_follows_from_the_roles(tmp_path: Path) -> None:
    assert config(tmp_path, "roles.trainer=2", "roles.rollout=3")["launch"]["nproc_per_node"] == 5
    colocated = config(tmp_path, "roles.trainer=2", "roles.rollout=2", "roles.colocated=true")
    assert colocated["launch"]["nproc_per_node"] == 2


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["roles.rollout=-1"], "roles.rollout=-1: expected at least 0"),
        (["roles.trainer=0"], "roles.trainer=0: expected at least 1"),
        (["roles.rollout=0", "roles.colocated=true"], "roles.colocated=true: each of the 1 trainers is a rollout"),
        (["resume=latest"], "resume=latest: this run has no checkpoints; give ckpt=kimi-engine, or another backend"),
        (["overwrite=true"], "overwrite=true: this run has no checkpoints"),
        (["publish=saved"], "publish=saved: this run has no checkpoints"),
        (["publish=saved", "ckpt=zarr"], "and the backend chosen with ckpt=, ZarrBackend, keeps none there"),
        (["publish=saved", "ckpt=tensorstore"], "publish=saved takes the weights of a save out of host memory"),
        (["publish=saved", "ckpt=kimi-engine", "ckpt.pool=false"], "give ckpt=kimi-engine with ckpt.pool=true, or publish=live"),
        (["ckpt=zarr", "save.when_busy=skip"], "saves.when_busy=skip has no effect with saves.mode=sync"),
        (["publish=perhaps"], "publish=perhaps: expected one of live, saved"),
        (["ckpt=zarr", "save.every=0"], "save.every=0: expected at least 1"),
        (["ckpt=zarr", "save.mode=perhaps"], "perhaps"),
        (["ckpt=zarr", "resume=latest", "overwrite=true"], "resume=latest goes on from the newest checkpoint, so overwrite=true"),
        (["ckpt=kimi-engine", "+ckpt.compressors=3"], "ckpt.compressors: ckpt.backends.kimi_engine.KimiEngineBackend takes no"),
        (["roles.trainer=2", "roles.colocated=true"], "roles.colocated=true: each of the 2 trainers is a rollout; give roles.rollout=2"),
        (["engine=naive"], "engine=naive has trainer and rollout in one process: give roles.colocated=true"),
        (["+engine.transport=update"], "engine.transport: ckpt.engine.kimi.KimiCheckpointEngine takes no transport"),
        (["engine.rollout_dtype=int8"], "rollout_dtype=int8: expected one of bfloat16, float16, float32, float64, or null"),
        (["engine.memory_fraction=1.5"], "memory_fraction=1.5: expected more than 0 and at most 1"),
        (["engine.timeout_s=0"], "timeout_s=0.0: expected more than 0 seconds"),
        (["engine.bucket_mib=0"], "a bucket of 0 bytes is too small"),
        (["+engine.bucket=3"], "engine.bucket: ckpt.engine.kimi.KimiCheckpointEngine takes no bucket; did you mean bucket_mib?"),
        (["engine=naive", "roles.colocated=true", "+engine.transport=update"], "takes no transport"),
        (["engine.staging=perhaps"], "engine.staging=perhaps"),
        (["roles.trainer=5"], "train.batch_size=12 does not divide into the 5 parts"),
        (["parallel=single", "roles.trainer=2"], "parallel=single"),
        (["agree.timeout_s=0"], "agree.timeout_s=0.0: expected more than 0 seconds"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_sentence(overrides: list[str], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as told:
        config(tmp_path, *overrides)
    assert said in str(told.value)
    assert "\n" not in str(told.value)


def test_kimi_without_its_package_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    _forget_kimi(monkeypatch)
    monkeypatch.setattr(metadata, "version", version)
    with pytest.raises(
        ConfigurationError, match="needs the package checkpoint-engine, which is not installed: pip install"
    ):
        config(tmp_path)
    assert config(tmp_path, "engine=broadcast")["engine"]["bucket_mib"] == 256


def test_kimi_with_another_version_of_its_package_says_which_it_wants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _forget_kimi(monkeypatch)
    monkeypatch.setattr(metadata, "version", lambda name: "0.5.1")
    with pytest.raises(
        ConfigurationError, match=r"checkpoint-engine 0.5.1 is installed, and 0.4.2 or later, before 0.5"
    ):
        config(tmp_path)


def _forget_kimi(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ckpt.engine.kimi", "ckpt.engine.parameter_server"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.parametrize("backend", ["kimi-engine", "zarr", "tensorstore"])
@sampled("strategy", ["direct", "two-stage"])
def test_trainers_save_by_every_backend_and_load_by_every_strategy(backend: str, strategy: str, tmp_path: Path) -> None:
    run = config(
        tmp_path, f"ckpt={backend}", f"strategy={strategy}", "roles.trainer=2", "parallel=fsdp", "agree.grace_s=7"
    )
    assert run["components"]["model"]["sharing_pattern"] == "sharded"
    assert run["launch"] == {"nproc_per_node": 3, "in_process_group": 2}
    assert (run["agree"]["grace_s"], run["save"]["grace_s"]) == (7.0, 7.0)
    assert run["coordinator"]["backend"] == run["ckpt"]
    assert run["checkpoint_root"] == str(tmp_path / "checkpoints")


def test_weights_are_published_out_of_the_memory_of_a_backend_that_keeps_saves(tmp_path: Path) -> None:
    assert config(tmp_path, "publish=saved", "ckpt=kimi-engine", "save.mode=async")["publish"] == "saved"


def test_without_a_backend_nothing_of_checkpoints_is_asked_for(tmp_path: Path) -> None:
    run = config(tmp_path)
    assert (run["ckpt"], run["components"]) == (None, {})


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["updates=0"], "updates=0: expected at least 1"),
        (["wait_s=-1"], "wait_s=-1.0: expected at least 0"),
        (["local_rank=-1"], "local_rank=-1: expected at least 0"),
        (["device=cuda", "+device.kind=3"], "device.kind"),
    ],
)
def test_a_mistake_of_a_rollout_that_comes_is_one_sentence(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigurationError) as told:
        joining(*overrides)
    assert said in str(told.value)


def test_a_rollout_that_comes_needs_to_know_of_what_run(tmp_path: Path) -> None:
    assert joining(f"run={tmp_path}")["run"] == str(tmp_path)


def joining(*overrides: str) -> dict[str, Any]:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        given = [] if any(one.startswith("run=") for one in overrides) else ["run=somewhere"]
        return checked_join(compose("join_rollout", [*given, *overrides]))
