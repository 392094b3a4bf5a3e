"""torchtitan's trainer, and its parts, with our checkpoint manager. It needs older versions of what other tests need: `.ci/full` makes an
environment for it."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset

import ckpt
from ckpt.errors import CheckpointExistsError, ConfigurationError
from ckpt.format.places import place_of
from ckpt.ranks.topology import Topology
from ckpt.storage.checkpoint_files import names_below
from tests.e2e.test_examples import EXAMPLES, TORCHRUN, losses_of
from tests.support.object_server import ObjectServer
from tests.support.ranks import run_ranks

pytest.importorskip(
    "torchtitan", reason="torchtitan is not installed: pip install 'ckpt-coordinator[torchtitan]' triton"
)

from torchtitan.components.checkpointer import BaseCheckpointManager, CheckpointManager
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.config import Configurable, OverrideConfig, apply_overrides

from ckpt.integrations.torchtitan import CkptManager

pytestmark = pytest.mark.full
COPIES = ["step-1000", "step-2000", "step-3000"]
KEPT = {"last_save_model_only": False, "keep_latest_k": 2}


class Numbers(Dataset):
    def __len__(self) -> int:
        return 1000

    def __getitem__(self, position: int) -> torch.Tensor:
        return torch.full((7,), position / 1000)


@dataclass
class Adapter:
    """Hugging Face's names, as a model's adapter gives them to torchtitan: here with a prefix."""

    fqn_to_index_mapping: None = None

    def to_hf(self, state: dict[str, Any]) -> dict[str, Any]:
        return {f"hf.{key}": value for key, value in state.items()}

    def from_hf(self, state: dict[str, Any]) -> dict[str, Any]:
        return {key.removeprefix("hf."): value for key, value in state.items()}

    def get_hf_storage_reader(self, path: str, from_quantized: bool) -> HuggingFaceStorageReader:
        return HuggingFaceStorageReader(path)


@dataclass
class Training:
    """A small model in FSDP2 with torchtitan's own optimizers, schedules and data, as its trainer makes them."""

    topology: Topology
    folder: Path
    manager: type = CkptManager
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    extra: Any = 0

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        ranks, rank = self.topology.world_size, self.topology.rank
        self.model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.LayerNorm(5), torch.nn.Linear(5, 3))
        fully_shard(self.model, mesh=init_device_mesh("cpu", (ranks,)))
        self.optimizers = default_adamw(lr=0.1).build(model_parts=[self.model])
        schedule = LRSchedulersContainer.Config(warmup_steps=2)
        self.schedulers = schedule.build(optimizers=self.optimizers, training_steps=10)
        self.data = ParallelAwareDataloader(Numbers(), rank, ranks, batch_size=2)
        self.step = 0
        self.seen: dict[int, list[Any]] = {}
        self.checkpoints = self.manager.Config(**({"enable": True, "interval": 2} | self.options)).build(
            dataloader=self.data,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={"train_state": self},
            sd_adapter=Adapter(),
            base_folder=str(self.folder),
        )

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "extra": self.extra}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.extra = state["step"], state["extra"]

    @cached_property
    def batches(self) -> Iterator[torch.Tensor]:
        return iter(self.data)

    def train(self, until: int, *, is_end: bool = False) -> None:
        """As torchtitan's loop."""
        while self.step < until:
            self.step += 1
            self.optimizers.zero_grad()
            batch = next(self.batches)
            self.seen[self.step] = batch.tolist()
            (self.model(batch) - 1).square().sum().backward()
            self.optimizers.step()
            self.schedulers.step()
            self.checkpoints.save(self.step, last_step=is_end and self.step == until)

    def bits(self) -> dict[str, Any]:
        """All state but the data's position, tensors whole."""
        states = {name: one.state_dict() for name, one in self.checkpoints.states.items() if name != "dataloader"}
        return {f"{name}.{key}": whole(value) for name, one in states.items() for key, value in one.items()}


def whole(value: Any) -> Any:
    value = value.full_tensor() if isinstance(value, DTensor) else value
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def require_equal(a: Any, b: Any) -> None:
    """Every bit, and every type."""
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            require_equal(a[key], b[key])
    elif isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    else:
        assert a == b


def steps_in(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoint").iterdir() if not path.name.startswith("."))


# ---- torchtitan's trainer


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_trainer_goes_on_to_the_bit_after_a_kill(tmp_path: Path, ranks: int) -> None:
    command = [*TORCHRUN, str(ranks), str(EXAMPLES / "torchtitan_train.py"), "--steps", "70", "--folder"]
    straight = losses_of([*command, str(tmp_path / "straight")], tmp_path)
    before = losses_of([*command, str(tmp_path / "killed")], tmp_path, kill_at=random.randrange(21, 69))
    after = losses_of([*command, str(tmp_path / "killed")], tmp_path)
    assert 1 < min(after) <= max(before) + 1, "it went on, and did not begin anew"
    assert after == {step: straight[step] for step in range(min(after), 71)}
    ends = [ckpt.load(tmp_path / run / "checkpoint" / "step-70") for run in ("straight", "killed")]
    assert ends[0]["train_state"]["step"] == 70
    require_equal(*ends)


# ---- its parts


def _saves(topology: Topology, folder: Path, mode: str) -> dict[str, Any]:
    run = Training(topology, folder, options={"async_mode": mode, "format": "tensorstore", **KEPT})
    run.train(6)
    bits = run.bits()
    run.checkpoints.close()  # waits for the save in the background
    assert steps_in(folder) == (["step-4", "step-6"] if mode == "disabled" else ["step-2", "step-4", "step-6"])
    rest = Training(topology, folder, options=KEPT, seed=1)
    assert rest.checkpoints.load()
    assert rest.step == 6
    require_equal(rest.bits(), bits)
    run.checkpoints.load_only = True
    run.train(9)
    rest.train(9)
    require_equal(rest.bits(), run.bits())
    rest.checkpoints.close()
    return bits


def _goes_on_with_the_next_batch(topology: Topology, folder: Path) -> None:
    straight = Training(topology, folder / "straight", options=KEPT)
    straight.train(9)
    stopped = Training(topology, folder / "stopped", options=KEPT)
    stopped.train(7)
    resumed = Training(topology, folder / "stopped", options=KEPT, seed=1)
    assert resumed.checkpoints.load()
    resumed.train(9)
    assert resumed.seen == {step: straight.seen[step] for step in (7, 8, 9)}
    require_equal(resumed.bits(), straight.bits())
    for run in (straight, stopped, resumed):
        run.checkpoints.close()


def test_the_data_go_on_with_the_next_batch(tmp_path: Path) -> None:
    run_ranks(2, _goes_on_with_the_next_batch, tmp_path, process_group=True)


def _goes_on_with_one_rank(topology: Topology, folder: Path) -> dict[str, Any]:
    with pytest.raises(AssertionError, match="dataloader resharding is not supported"):
        Training(topology, folder, options={"load_only": True}).checkpoints.load(step=6)
    options = {"load_only": True, "exclude_from_loading": ["dataloader"], "load": "two-stage"}
    run = Training(topology, folder, options=options, seed=2)
    assert run.checkpoints.load(step=6)
    return run.bits()


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_every_state_comes_back_and_old_steps_go(tmp_path: Path, mode: str) -> None:
    saved = run_ranks(2, _saves, tmp_path, mode, process_group=True)[0]
    (loaded,) = run_ranks(1, _goes_on_with_one_rank, tmp_path, process_group=True)
    require_equal(loaded, saved)


def _leaves_dcp(topology: Topology, folder: Path) -> None:
    """A run that torchtitan itself has begun, by DCP."""
    theirs = Training(topology, folder, manager=CheckpointManager, options=KEPT)
    theirs.train(4)
    theirs.checkpoints.close()
    ours = Training(topology, folder, options=KEPT, seed=1)
    assert ours.checkpoints.load()
    require_equal(ours.bits(), theirs.bits())
    ours.checkpoints._save(6)
    theirs.train(5)
    ours.train(5)
    require_equal(ours.bits(), theirs.bits())
    ours.checkpoints.close()
    assert steps_in(folder) == ["step-4", "step-6"]
    of_dcp = _load_state_dict_from_keys(checkpoint_id=str(folder / "checkpoint" / "step-4"))
    require_equal(ckpt.load(folder / "checkpoint" / "step-6"), of_dcp)


def test_a_run_that_began_with_dcp_goes_on_here_with_the_same_bits(tmp_path: Path) -> None:
    run_ranks(2, _leaves_dcp, tmp_path, process_group=True)


def _last_steps(topology: Topology, folder: Path) -> None:
    run = Training(topology, folder / "a", options={"export_dtype": "bfloat16", "async_mode": "async"})
    run.train(3, is_end=True)
    run.checkpoints.close()
    model = run.bits()
    path = folder / "a" / "checkpoint" / "step-3"
    other = Training(topology, folder / "b", options={"initial_load_path": str(path)}, seed=1)
    assert other.checkpoints.load()
    assert other.step == 0
    for name, value in other.bits().items():
        if name.startswith("model."):
            require_equal(value, model[name].bfloat16().float())
    of_hf = {"last_save_in_hf": True, "enable_first_step_checkpoint": True}
    first = Training(topology, folder / "c", options=of_hf)
    first.train(3, is_end=True)
    first.checkpoints.close()
    assert steps_in(folder / "c") == ["step-1", "step-2", "step-3"]
    path = folder / "c" / "checkpoint" / "step-3"
    from_hf = {"initial_load_path": str(path), "initial_load_in_hf": True}
    second = Training(topology, folder / "d", options=from_hf, seed=1)
    assert second.checkpoints.load()
    want = {name: value for name, value in first.bits().items() if name.startswith("model.")}
    require_equal({name: value for name, value in second.bits().items() if name in want}, want)


def test_the_last_save_may_hold_the_model_alone_and_starts_another_run(tmp_path: Path) -> None:
    run_ranks(2, _last_steps, tmp_path, process_group=True)
    last = ckpt.load(tmp_path / "a" / "checkpoint" / "step-3")
    assert {value.dtype for value in last.values()} == {torch.bfloat16}
    assert (tmp_path / "c" / "checkpoint" / "step-3" / "model-00001-of-00001.safetensors").is_file()


def _seed(topology: Topology, folder: Path) -> dict[str, Any]:
    run = Training(topology, folder, options=KEPT)
    run.checkpoints.save(0, last_step=True)
    return run.bits()


def _goes_on_from_seed(topology: Topology, folder: Path) -> dict[str, Any]:
    run = Training(topology, folder, options=KEPT, seed=1)
    assert run.checkpoints.load()
    bits = run.bits()
    run.train(2)
    assert steps_in(folder) == ["step-0", "step-2"]
    return bits


def test_a_seed_checkpoint_starts_runs_of_any_number_of_ranks(tmp_path: Path) -> None:
    (seed,) = run_ranks(1, _seed, tmp_path, process_group=True)
    for started in run_ranks(2, _goes_on_from_seed, tmp_path, process_group=True):
        assert all(torch.equal(seed[name], value) for name, value in started.items() if name.startswith("model."))


def _saves_into_a_store(topology: Topology, folder: Path, at: str) -> None:
    options = KEPT | {"folder": f"{at}/run"}
    run = Training(topology, folder, options=options)
    assert not run.checkpoints.load()
    run.train(6)
    bits = run.bits()
    run.checkpoints.close()
    assert names_below(place_of(f"{at}/run")) == ["step-4", "step-6"]
    rest = Training(topology, folder, options=options, seed=1)
    assert rest.checkpoints.load()
    require_equal(rest.bits(), bits)
    with pytest.raises(CheckpointExistsError, match="step-6 is newer"):
        Training(topology, folder, options=options).checkpoints.load(4)
    begun = Training(topology, folder, options={"initial_load_path": f"{at}/run/step-6"}, seed=2)
    assert begun.checkpoints.load()
    require_equal(
        {name: value for name, value in begun.bits().items() if name.startswith("model.")},
        {name: value for name, value in bits.items() if name.startswith("model.")},
    )
    for one in (rest, begun):
        one.checkpoints.close()


def test_it_saves_into_an_object_store_and_goes_on_from_it(tmp_path: Path) -> None:
    with ObjectServer() as server:
        run_ranks(2, _saves_into_a_store, tmp_path, "s3://bucket", process_group=True, environment=server.environment)


def _fails(topology: Topology, folder: Path) -> None:
    bad = object() if topology.rank == 1 else 0
    run = Training(topology, folder / "sync", extra=bad, options=KEPT)
    with pytest.raises(CheckpointException, match="train_state.extra is a builtins.object"):
        run.train(2)
    run.extra = topology.rank  # DCP would silently keep that of rank 0
    with pytest.raises(CheckpointException, match="train_state.extra is 1 on rank 1 and 0 on rank 0"):
        run.train(4)
    run.extra = 0
    run.train(6)
    assert steps_in(folder / "sync") == ["step-6"]
    run = Training(topology, folder / "async", extra=bad, options={"async_mode": "async"})
    run.train(3)
    with pytest.raises(CheckpointException, match="train_state.extra is a builtins.object"):
        run.train(4)
    run.checkpoints.close()  # the error has been raised
    assert not list(folder.glob("async/checkpoint/*"))


def test_a_save_that_fails_on_one_rank_fails_on_all_and_leaves_no_step(tmp_path: Path) -> None:
    run_ranks(2, _fails, tmp_path, process_group=True)


def _refuses(topology: Topology, folder: Path) -> None:
    def refused(error: type[Exception], match: str, **options: Any) -> None:
        with pytest.raises(error, match=match):
            Training(topology, folder, options=KEPT | options).checkpoints.load(options.get("load_step", -1))

    refused(ConfigurationError, "async_with_pinned_mem .*; choose", async_mode="async_with_pinned_mem")
    refused(ConfigurationError, "checkpoint.folder is s4://b/c: ", folder="s4://b/c")
    refused(ConfigurationError, "expected one of zarr", format="nonesuch")
    refused(ConfigurationError, "expected one of direct, two-stage", load="nonesuch")
    refused(FileNotFoundError, "step=2 not found", load_step=2)
    run = Training(topology, folder, options=KEPT)
    assert not run.checkpoints.load()
    run.train(4)
    refused(CheckpointExistsError, "step-4 is newer than what is loaded, step 2, and saves replace", load_step=2)
    assert Training(topology, folder, options={"load_only": True}).checkpoints.load(2)
    assert not Training(topology, folder, options={"enable": False}).checkpoints.load()


def test_what_is_not_supported_is_refused_in_words(tmp_path: Path) -> None:
    run_ranks(2, _refuses, tmp_path, process_group=True)


def _meets_incomplete(topology: Topology, folder: Path) -> list[str]:
    run = Training(topology, folder, options=KEPT)
    run.train(4)
    if topology.is_lead:
        for left in ("step-6/sharded/shard-00001-model-00001-of-00001.safetensors", "step-8/__0_0.distcp"):
            (folder / "checkpoint" / left).parent.mkdir(parents=True)
            (folder / "checkpoint" / left).write_text("cut short")
    rest = Training(topology, folder, options=KEPT, seed=1)
    assert rest.checkpoints.load()
    require_equal(rest.bits(), run.bits())
    rest.train(6)
    rest.checkpoints.close()
    return steps_in(folder)


def test_what_a_killed_save_of_torchtitans_own_left_is_set_aside(tmp_path: Path) -> None:
    names = run_ranks(2, _meets_incomplete, tmp_path, process_group=True)[0]  # of the lead, which removes: rank 1 may look before
    assert [name.split("-")[:2] for name in names] == [
        ["step", "4"], ["step", "6"], ["step", "6.incomplete"], ["step", "8.incomplete"]
    ]  # fmt: skip
    (kept,) = tmp_path.glob("checkpoint/step-6.incomplete-*/sharded/*")
    assert kept.read_text() == "cut short"


def _passes_over_copies(topology: Topology, folder: Path) -> list[str]:
    run = Training(topology, folder, options=KEPT)
    run.train(4)
    if topology.is_lead:
        steps = folder / "checkpoint"
        shutil.copytree(steps / "step-2", steps / "step-1000")
        shutil.copytree(steps / "step-4", steps / "step-2000")
        (steps / "step-3000").symlink_to("step-4")
    run.train(6)
    run.checkpoints.close()
    assert not topology.is_lead or steps_in(folder) == sorted([*COPIES, "step-4", "step-6"])
    rest = Training(topology, folder, options=KEPT, seed=1)
    assert rest.checkpoints.load()
    require_equal(rest.bits(), run.bits())
    rest.train(8)
    rest.checkpoints.close()
    assert Training(topology, folder, options=KEPT, seed=2).checkpoints.load(8)
    return steps_in(folder)


def test_copies_and_links_of_users_take_no_place_of_the_runs_own_checkpoints(tmp_path: Path) -> None:
    for names in run_ranks(2, _passes_over_copies, tmp_path, process_group=True):
        assert names == sorted([*COPIES, "step-6", "step-8"])


@dataclass(kw_only=True, slots=True)
class Program(Configurable.Config):
    checkpoint: BaseCheckpointManager.Config


class OtherManager(CheckpointManager):
    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        pass


def test_one_word_of_the_command_line_changes_the_manager_and_no_option() -> None:
    program = Program(checkpoint=CheckpointManager.Config(enable=True, interval=7, async_mode="async"))
    word = "ckpt.integrations.torchtitan.ckpt_manager"
    apply_overrides(OverrideConfig(imports=[(word, {"format": "tensorstore"})]), program)
    assert program.checkpoint == CkptManager.Config(enable=True, interval=7, async_mode="async", format="tensorstore")
    with pytest.raises(ConfigurationError, match=r"OtherManager\.Config, with options of its own"):
        apply_overrides(OverrideConfig(imports=[word]), Program(checkpoint=OtherManager.Config()))
