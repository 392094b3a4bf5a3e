"""`Checkpointer` in one process: what it saves, when, what stays, what comes back, and what it refuses."""

from __future__ import annotations

import math
import random
import re
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from ckpt import Checkpointer, SharingPattern
from ckpt.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigurationError,
    MissingStateError,
)
from ckpt.format.places import step_of
from ckpt.ranks.topology import Topology
from ckpt.storage.stored import read_manifest
from tests.support.crafts import edit_manifest
from tests.support.ranks import run_ranks
from tests.support.states import same_bits

SIZE = 8


class Batches:
    """A stream of random batches that remembers its position."""

    def __init__(self) -> None:
        self.position = 0

    def next(self) -> torch.Tensor:
        self.position += 1
        return torch.arange(SIZE * SIZE, dtype=torch.float32).reshape(SIZE, SIZE).add(self.position).sin()

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.position = state_dict["position"]


class Loop:
    """A training run: the objects, and one step that draws random numbers from every generator."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(SIZE, SIZE), torch.nn.Dropout(0.5), torch.nn.Linear(SIZE, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=2)
        self.data = Batches()

    @property
    def objects(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler, "data": self.data}

    def step(self) -> float:
        self.optimizer.zero_grad()
        scale = 1 + random.random() + float(np.random.random())
        loss = self.model(self.data.next()).square().mean() * scale
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        return loss.item()

    def tensors(self) -> list[torch.Tensor]:
        moments = [one for state in self.optimizer.state.values() for one in state.values()]
        return [*self.model.state_dict().values(), *moments]


def steps_of(checkpoints: Checkpointer) -> list[int | None]:
    return [one.step for one in checkpoints.list()]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_loop_that_is_left_and_restored_goes_on_to_the_bit(tmp_path: Path, mode: str) -> None:
    straight = Loop()
    losses = [straight.step() for _ in range(7)]

    first = Loop()
    with Checkpointer(tmp_path / "run", **first.objects, every=2, mode=mode) as checkpoints:
        assert checkpoints.restore() == 0
        for step in range(1, 6):
            first.step()
            checkpoints.step(step, metadata={"tokens": 100 * step, "name": "día"})
    with pytest.raises(ZeroDivisionError), Checkpointer(tmp_path / "run", **first.objects) as checkpoints:
        checkpoints.restore()
        first.step()
        checkpoints.step(6)
        1 / 0  # noqa: B018  what is left by an error saves nothing

    second = Loop(seed=1)
    with Checkpointer(tmp_path / "run", **second.objects, every=2, mode=mode, save_at_end=False) as checkpoints:
        start = checkpoints.restore()
        assert start == 5, "the last step of a block is saved when it is left"
        assert start.metadata == {"tokens": 500, "name": "día"}
        assert start.path == tmp_path / "run" / "checkpoint-00000005"
        assert [one.key for one in start.components] == ["model", "optimizer", "scheduler", "data", "rng"]
        assert "model: restored, all 81 elements" in start.summary()
        assert [second.step() for _ in range(start + 1, 8)] == losses[5:]
    assert all(same_bits(a, b) for a, b in zip(second.tensors(), straight.tensors(), strict=True))
    assert steps_of(checkpoints) == [2, 4, 5]


def test_an_object_can_have_any_name_and_none_is_left_out(tmp_path: Path) -> None:
    actor, critic = torch.nn.Linear(2, 3), torch.nn.Linear(3, 1)
    made = {"actor": actor, "critic": critic, "critic_optimizer": torch.optim.SGD(critic.parameters(), lr=0.1)}
    with Checkpointer(tmp_path, **made, scaler=None, save_rng=False) as checkpoints:
        path = checkpoints.save(1)
    assert path is not None
    assert list(read_manifest(path).components) == ["actor", "critic", "critic_optimizer"]
    assert set(read_manifest(path).arrays) >= {"actor/weight", "critic/bias"}


def test_on_one_rank_everything_is_replicated_but_the_random_generators(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, **Loop().objects) as checkpoints:
        path = checkpoints.save(1)
    assert path is not None
    patterns = {key: one.sharing_pattern for key, one in read_manifest(path).components.items()}
    assert patterns == dict.fromkeys(("model", "optimizer", "scheduler", "data"), "replicated") | {"rng": "per_rank"}


@pytest.mark.parametrize(
    ("rules", "stay"),
    [
        ({}, [1, 2, 3, 4, 5, 6, 7]),
        ({"keep_last": 2}, [6, 7]),
        ({"keep_last": 20}, [1, 2, 3, 4, 5, 6, 7]),
        ({"keep_every": 3}, [3, 6, 7]),
        ({"keep_last": 2, "keep_every": 3}, [3, 6, 7]),
        ({"keep_best": 2, "metric": "loss"}, [2, 5, 7]),
        ({"keep_best": 1, "metric": "loss", "greater_is_better": True}, [4, 7]),
        ({"keep_last": 2, "keep_every": 4, "keep_best": 1, "metric": "loss"}, [4, 5, 6, 7]),
    ],
)
def test_what_stays(tmp_path: Path, rules: dict[str, Any], stay: list[int]) -> None:
    losses = {1: 5.0, 2: 2.0, 3: math.nan, 4: 9.0, 5: 1.0, 6: 4.0, 7: 3.0}
    with Checkpointer(tmp_path, model=torch.nn.Linear(2, 2), every=1, **rules) as checkpoints:
        for step, loss in losses.items():
            checkpoints.step(step, metrics={"loss": torch.tensor(loss)})
        assert steps_of(checkpoints) == stay


def test_rules_hold_for_the_checkpoints_from_before_a_restart_too(tmp_path: Path) -> None:
    for steps in ((1, 2, 3), (4, 5)):
        with Checkpointer(tmp_path, model=torch.nn.Linear(2, 2), keep_best=1, metric="loss") as checkpoints:
            checkpoints.restore()
            for step in steps:
                checkpoints.save(step, metrics={"loss": abs(step - 2)})
    assert steps_of(checkpoints) == [2, 5]


def _mistyped(topology: Topology, root: Path, mode: str) -> None:
    model = torch.nn.Linear(2, 2)
    with Checkpointer(
        root, model=model, topology=topology, mode=mode, every=1, keep_best=1, metric="loss", on_sigterm=False
    ) as checkpoints:
        checkpoints.step(1, metrics={"loss": 1.0})
        for step in (2, 3):
            with pytest.raises(ConfigurationError, match="holds 'los', without 'loss', .* Did you mean metric='los'"):
                checkpoints.step(step, metrics={"los": 0.5} if topology.is_lead else {"loss": 0.5})
        checkpoints.step(4, metrics={"loss": math.nan})
        assert steps_of(checkpoints) == [1, 4] or mode == "async"


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_mistyped_metric_is_refused_on_every_rank_and_removes_nothing(tmp_path: Path, mode: str) -> None:
    run_ranks(2, _mistyped, tmp_path, mode)
    assert sorted(path.name for path in tmp_path.glob("*")) == ["checkpoint-00000001", "checkpoint-00000004"]


def test_the_save_at_the_end_needs_no_metric_and_is_not_the_best(tmp_path: Path) -> None:
    with Checkpointer(
        tmp_path, model=torch.nn.Linear(2, 2), every=2, keep_best=1, metric="loss", on_sigterm=False
    ) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.step(step, metrics={"loss": 1.0} if step == 2 else None)
        with pytest.raises(ConfigurationError, match="metrics holds nothing, without 'loss'"):
            checkpoints.save(4)
    assert steps_of(checkpoints) == [2, 3]
    assert checkpoints.list()[-1].metrics == {"loss": None}


@pytest.mark.parametrize("bad", ["0.5", b"1", None, torch.ones(2), [1.0]])
def test_a_metric_that_is_no_number_is_refused(tmp_path: Path, bad: Any) -> None:
    with (
        Checkpointer(tmp_path, model=torch.nn.Linear(2, 2), metric="loss", on_sigterm=False) as checkpoints,
        pytest.raises(ConfigurationError, match=r"metrics\['loss'\] is .*; expected a number"),
    ):
        checkpoints.save(1, metrics={"loss": bad})
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == []


def test_the_best_checkpoint_is_restored_by_name(tmp_path: Path) -> None:
    model = torch.nn.Linear(1, 1)
    with Checkpointer(tmp_path, model=model, keep_best=1, metric="accuracy", greater_is_better=True) as checkpoints:
        for step, accuracy in ((1, 0.5), (2, 0.75), (3, 0.25)):
            model.weight.data.fill_(step)
            checkpoints.save(step, metrics={"accuracy": accuracy, "loss": 1 - accuracy})
        best = checkpoints.restore("best")
    assert best == 2
    assert model.weight.item() == 2.0
    assert best.metrics == {"accuracy": 0.75, "loss": 0.25}


def test_a_step_and_a_path_are_restored_and_what_is_not_there_is_said(tmp_path: Path) -> None:
    model = torch.nn.Linear(1, 1)
    with Checkpointer(tmp_path, model=model, save_rng=False) as checkpoints:
        for step in (1, 2):
            model.weight.data.fill_(step)
            checkpoints.save(step)
    with Checkpointer(tmp_path, model=model, save_rng=False) as checkpoints:
        assert checkpoints.restore(1) == model.weight.item() == 1
        assert checkpoints.restore(tmp_path / "checkpoint-00000002") == model.weight.item() == 2
        assert checkpoints.find_latest() == tmp_path / "checkpoint-00000002"
        with pytest.raises(
            CheckpointNotFoundError, match="it does not exist; .* holds checkpoint-00000002, checkpoint-0"
        ):
            checkpoints.restore(7)
        with pytest.raises(CheckpointNotFoundError, match=r'Did you mean restore\("latest"\)\?'):
            checkpoints.restore("lates")
        with pytest.raises(CheckpointNotFoundError, match="Give the folder of a committed checkpoint.$"):
            checkpoints.restore("elsewhere/checkpoint-00000001")
        with pytest.raises(ConfigurationError, match="goes by a metric"):
            checkpoints.restore("best")


def test_checkpoints_of_another_run_are_not_continued_by_accident(tmp_path: Path) -> None:
    model = torch.nn.Linear(1, 1)
    with Checkpointer(tmp_path, model=model) as checkpoints:
        checkpoints.save(5)
    with pytest.raises(CheckpointExistsError, match=r"up to checkpoint-00000005: call restore\(\) first"):
        Checkpointer(tmp_path, model=model).save(1)
    with Checkpointer(tmp_path, model=model, overwrite=True) as checkpoints:
        checkpoints.save(1)
    assert steps_of(checkpoints) == [1]


def test_a_step_that_is_saved_is_not_saved_again(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, model=torch.nn.Linear(1, 1), every=2) as checkpoints:
        for step in range(1, 5):
            checkpoints.save(step, metrics={"loss": step / 2})
            assert not checkpoints.step(step)
        assert [one.metrics for one in checkpoints.list()] == [{"loss": step / 2} for step in range(1, 5)]
        assert not checkpoints.step(5)
    assert steps_of(checkpoints) == [1, 2, 3, 4, 5], "the last step of the block"


@pytest.mark.parametrize("format", ["tensorstore", "kimi-engine"])
def test_other_formats_and_strategies_are_chosen_by_name(tmp_path: Path, format: str) -> None:
    model = torch.nn.Linear(3, 3)
    weight = model.weight.detach().clone()
    with Checkpointer(tmp_path, model=model, format=format, load="two-stage") as checkpoints:
        checkpoints.save(1)
    model.weight.data.zero_()
    with Checkpointer(tmp_path, model=model, format=format, load="two-stage") as checkpoints:
        assert checkpoints.restore() == 1
    assert torch.equal(model.weight.data, weight)


def test_to_go_on_from_an_older_checkpoint_newer_ones_are_set_aside(tmp_path: Path) -> None:
    model = torch.nn.Linear(1, 1)
    with Checkpointer(tmp_path, model=model) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step)
    with Checkpointer(tmp_path, model=model) as checkpoints:
        checkpoints.restore(2)
        with pytest.raises(CheckpointExistsError, match="holds newer checkpoints: checkpoint-00000003"):
            checkpoints.save(4)
    with Checkpointer(tmp_path, model=model, overwrite=True) as checkpoints:
        checkpoints.restore(2)
        checkpoints.save(4)
    assert steps_of(checkpoints) == [1, 2, 4]


def test_a_block_that_is_left_by_an_error_beside_a_save_leaves_no_handler_of_sigterm(tmp_path: Path) -> None:
    with pytest.raises(KeyError), Checkpointer(tmp_path, model=torch.nn.Linear(1, 1), mode="async") as checkpoints:
        checkpoints.save(1)
        raise KeyError
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert checkpoints.find_latest() is not None


def test_checkpoints_are_checked_before_the_first_save(tmp_path: Path) -> None:
    model = torch.nn.Linear(1, 1)
    with Checkpointer(tmp_path, model=model, save_at_end=False) as checkpoints:
        checkpoints.check_folder()
        checkpoints.save(1)
        checkpoints.save(2)
        checkpoints.check_folder()
    with Checkpointer(tmp_path, model=model, save_at_end=False) as checkpoints:
        with pytest.raises(CheckpointExistsError, match="call restore"):
            checkpoints.check_folder()
        checkpoints.restore(1)
        with pytest.raises(CheckpointExistsError, match="newer checkpoints: checkpoint-00000002"):
            checkpoints.check_folder()


def test_weights_from_elsewhere_do_not_make_the_folder_this_run_s(tmp_path: Path) -> None:
    model = torch.nn.Linear(1, 1)
    for folder in ("pretrained", "run"):
        with Checkpointer(tmp_path / folder, model=model) as checkpoints:
            checkpoints.save(3)
    with Checkpointer(tmp_path / "run", model=model) as checkpoints:
        assert checkpoints.restore(tmp_path / "pretrained" / "checkpoint-00000003") == 3
        with pytest.raises(CheckpointExistsError, match="holds the checkpoints of an earlier run"):
            checkpoints.save(4)


def test_a_damaged_checkpoint_is_not_listed_and_a_load_passes_over_it(tmp_path: Path) -> None:
    model = torch.nn.Linear(1, 1)
    with Checkpointer(tmp_path, model=model) as checkpoints:
        for step in (1, 2):
            path = checkpoints.save(step)
        assert path is not None
        manifest = path / "checkpoint_manifest.json"
        manifest.write_bytes(manifest.read_bytes().replace(b"replicated", b"replicateD"))
        assert steps_of(checkpoints) == [1]
        assert checkpoints.restore() == 1


def test_what_is_listed(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, model=torch.nn.Linear(2, 2), save_rng=False) as checkpoints:
        path = checkpoints.save(7, metrics={"loss": 1.5, "bad": math.inf}, metadata={"tokens": 3})
    (one,) = checkpoints.list()
    assert (one.step, one.path, one.bytes) == (7, path, 24)
    assert (one.metrics, one.metadata) == ({"loss": 1.5, "bad": None}, {"tokens": 3})
    assert one.time == read_manifest(one.path).timestamp


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"data": torch.utils.data.DataLoader([1, 2])}, "component data: DataLoader has no state_dict"),
        ({"every": 0}, "every is 0; expected a whole number of at least 1"),
        ({"keep_last": 0}, "keep_last is 0; expected a whole number of at least 1"),
        ({"keep_best": 1}, "keep_best=1 needs metric"),
        ({"save_rng": 1}, "save_rng is 1; expected True or False"),
        ({"backend": "zarr"}, "backend of CheckpointCoordinator is format of Checkpointer"),
        ({"format": "hdf5"}, "format is 'hdf5'; expected one of zarr, tensorstore, kimi-engine"),
        ({"load": "three-stage"}, "load is 'three-stage'; expected one of direct, two-stage"),
        ({"mode": "later"}, "mode is 'later'; expected one of sync, async"),
        ({"keepp_last": 3}, "keepp_last=3: Checkpointer has no such argument; did you mean keep_last?"),
        ({"verfy": True}, "verfy=True: Checkpointer has no such argument; did you mean verify?"),
        (
            {"weights": {}},
            "component weights: dict has no .* pair; give the module, the optimizer or another object that",
        ),
        ({"loader": DataLoader([1])}, "component loader: DataLoader has .* give torchdata's StatefulDataLoader, or an"),
        (
            {"sharing_patterns": {"modle": "sharded"}},
            "sharing_patterns: there is no object 'modle'; given were model, rng",
        ),
        ({"sharing_patterns": {"model": "shared"}}, "sharing_pattern=shared: expected one of global, .*, auto"),
    ],
)
def test_bad_arguments_are_refused_in_a_sentence(tmp_path: Path, arguments: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigurationError, match=error):
        Checkpointer(tmp_path / "run", model=torch.nn.Linear(1, 1), **arguments)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("notes", "error"),
    [
        ({"metrics": {"loss": "low"}}, r"metrics\['loss'\] is 'low'; expected a number"),
        ({"metrics": [1]}, "metrics is a list; expected a dictionary"),
        ({"metadata": {"a": object()}}, "metadata cannot be stored"),
        ({"metadata": {"a": (1, 2)}}, "metadata changes when stored as JSON"),
        ({"metadata": {"a": math.nan}}, "metadata cannot be stored"),
        ({"metrics": {1: 2}}, "metrics has the key 1; expected a dictionary: name"),
        ({"metadata": {1: "a"}}, "metadata has the key 1; expected a dictionary with strings as keys"),
        ({"metadata": {"a": "x" * (1 << 20)}}, "metadata takes 1,048,58. bytes as JSON"),
    ],
)
def test_notes_that_cannot_be_kept_are_refused_before_anything_is_written(
    tmp_path: Path, notes: dict[str, Any], error: str
) -> None:
    with Checkpointer(tmp_path / "run", model=torch.nn.Linear(1, 1)) as checkpoints:
        with pytest.raises(ConfigurationError, match=error):
            checkpoints.save(1, **notes)
        assert not list((tmp_path / "run").glob("*"))


@pytest.mark.parametrize("step", ["3", 2.5, True, -1, None])
def test_a_step_is_a_whole_number(tmp_path: Path, step: Any) -> None:
    with Checkpointer(tmp_path / "run", model=torch.nn.Linear(1, 1), every=1) as checkpoints:
        for call in (checkpoints.step, checkpoints.save):
            with pytest.raises(ConfigurationError, match=f"step is {step!r}; expected a whole number from 0 on"):
                call(step)
    assert not (tmp_path / "run").exists()


def test_a_pattern_that_is_given_is_used(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, model=torch.nn.Linear(1, 1), sharing_patterns={"model": "global"}) as checkpoints:
        path = checkpoints.save(1)
    assert path is not None
    assert read_manifest(path).components["model"].sharing_pattern == SharingPattern.GLOBAL.value


@pytest.mark.parametrize("id", ["9" * 5000, "9" * 19, "٣", "²", "1_0", "+1", ""])
def test_an_id_that_is_no_step_is_refused_in_one_sentence(tmp_path: Path, id: str) -> None:
    model = torch.nn.Linear(2, 2)
    with Checkpointer(tmp_path, model=model) as checkpoints:
        checkpoints.restore()
        checkpoints.save(1)
    edit_manifest(tmp_path / "checkpoint-00000001", lambda tree: tree.update(checkpoint_id=id))
    with Checkpointer(tmp_path, model=model) as checkpoints:
        with pytest.raises(CheckpointError, match="its id is no step|checkpoint_id"):
            checkpoints.restore(tmp_path / "checkpoint-00000001")
        assert checkpoints.restore() == 0, "a folder of another name than its checkpoint is the user's"
        assert all(one.step in (1, None) for one in checkpoints.list())
    assert step_of(id) is None


def test_an_object_that_is_forgotten_is_refused_and_none_leaves_it_out(tmp_path: Path) -> None:
    loop = Loop()
    with Checkpointer(tmp_path, **loop.objects) as checkpoints:
        loop.step()
        checkpoints.save(1)
    model = Loop(seed=1).model
    before = [one.clone() for one in model.state_dict().values()]
    with (
        Checkpointer(tmp_path, model=model) as checkpoints,
        pytest.raises(
            MissingStateError,
            match=r"only in the checkpoint: optimizer, scheduler, data; this run has model, rng\. Give each its object",
        ),
    ):
        checkpoints.restore()
    assert all(same_bits(*two) for two in zip(model.state_dict().values(), before, strict=True))
    for names in ({"save_rng": False}, {}):
        with Checkpointer(tmp_path, model=model, optimizer=None, scheduler=None, data=None, **names) as checkpoints:
            restored = checkpoints.restore()
        assert "optimizer" not in restored.summary()
    with Checkpointer(tmp_path, model=model) as checkpoints:
        assert "optimizer: skipped: only in the checkpoint" in checkpoints.restore(strict=False).summary()
    assert all(
        same_bits(*two) for two in zip(model.state_dict().values(), loop.model.state_dict().values(), strict=True)
    )


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_line_is_logged_for_each_committed_save_and_each_restore(
    tmp_path: Path, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "ckpt")
    loop = Loop()
    with Checkpointer(tmp_path, **loop.objects, mode=mode) as checkpoints:
        checkpoints.restore()
        for step in (1, 2):
            loop.step()
            checkpoints.save(step)
        checkpoints.wait()
        checkpoints.restore()
    said = [one.getMessage() for one in caplog.records if one.levelname == "INFO"]
    figures = r"\d\.\d{3} s, 0\.0 MB, \d\.\d\d GB/s"
    waited = "(, of which training waited .* s(; 0.0 MB could not be copied beside it)?)?" if mode == "async" else ""
    assert said.pop(0) == checkpoints.coordinator.memory
    assert said[0] == f"nothing is restored: there is no checkpoint in {tmp_path} yet"
    for line, step in zip(said[1:3], (1, 2), strict=True):
        assert re.match(rf"saved checkpoint-0000000{step}: {figures}{waited}$", line), line
    assert re.match(rf"restored {tmp_path}/checkpoint-00000002 at step 2: {figures}$", said[3])
    assert len(said) == 4


def test_one_that_was_asked_to_end_saves_and_ends_once_and_can_be_used_again(tmp_path: Path) -> None:
    """In a notebook, say: the block that is left next begins anew."""
    model = torch.nn.Linear(2, 2)
    checkpoints = Checkpointer(tmp_path, model=model, every=1000)
    with pytest.raises(SystemExit), checkpoints:
        checkpoints.end_after_this_step()
        checkpoints.step(1)
    with Checkpointer(tmp_path, model=model, every=1000) as again:
        assert again.restore() == 1
        assert not again.step(2)
    assert again.find_latest() == tmp_path / "checkpoint-00000002"


def test_without_on_sigterm_nobody_looks_for_the_end(tmp_path: Path) -> None:
    with (
        Checkpointer(tmp_path, model=torch.nn.Linear(2, 2), on_sigterm=False) as checkpoints,
        pytest.raises(ConfigurationError, match=r"end_after_this_step\(\) of a Checkpointer with on_sigterm=False"),
    ):
        checkpoints.end_after_this_step()
