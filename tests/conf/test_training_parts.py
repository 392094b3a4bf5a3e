from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt import CheckpointCoordinator
from ckpt.errors import CheckpointError, ConfigurationError, CorruptCheckpointError, RankAbsentError
from ckpt.memory.device import Device
from ckpt.ranks.topology import Topology
from ckpt.state.sharing import SharingPattern
from recipes.support.ranks import tracebacks_of_bugs
from recipes.training.schedule import learning_rate_factor
from recipes.training.training import Training
from tests.conf.configs import config


class Ema:
    """A component of the user's own, which decides its pattern itself."""

    sharing_pattern = "global"

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Undecided(Ema):
    sharing_pattern = None  # type: ignore[assignment]


def training(tmp_path: Path, *overrides: str) -> Training:
    cfg = config(tmp_path, "train.batch_size=2", *overrides)
    made = Training(cfg, Topology.alone(), Device(type="cpu", collectives="gloo"))
    made.join()
    return made


def ema(name: str) -> str:
    return f"+components.ema={{_target_: {__name__}.{name}, sharing_pattern: null}}"


def test_a_checkpoint_holds_the_configured_components_and_restores_the_generators_last(tmp_path: Path) -> None:
    run = training(tmp_path, ema("Ema"), "~components.scheduler", "components.model.validate_replication=true")
    components = run.components()
    assert [component.key for component in components] == ["model", "optimizer", "dataset", "ema", "rng"]
    assert [component.validate_replication for component in components] == [True, False, False, False, False]
    assert components[3].stateful.model is run.model  # type: ignore[attr-defined]


def test_the_data_and_added_objects_decide_their_pattern_at_run_time(tmp_path: Path) -> None:
    dispatched = training(tmp_path, ema("Ema")).components()
    own = training(tmp_path, "data.dispatch=false").components()
    assert [dispatched[3].pattern, dispatched[4].pattern] == [SharingPattern.GLOBAL, SharingPattern.GLOBAL]
    assert own[3].pattern is SharingPattern.PER_RANK


def test_an_object_that_does_not_decide_either_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError, match=r"components\.ema\.sharing_pattern=null .* Undecided has no attribute"
    ):
        training(tmp_path, ema("Undecided")).components()


class _OwnCoordinator(CheckpointCoordinator):
    def __init__(self, **named: Any) -> None:
        self.given = named


def test_a_coordinator_of_the_user_s_own_gets_its_arguments_by_name(tmp_path: Path) -> None:
    run = training(tmp_path)
    coordinator = run.coordinated(_OwnCoordinator)
    assert isinstance(coordinator, _OwnCoordinator)
    given = coordinator.given
    assert [component.key for component in given["state_components"]] == [one.key for one in run.components()]
    assert given["topology"] is run.topology and given["process_groups"] == run.layout.process_groups(run.topology)
    assert "steps" in given["config_text"] and len(given) == 4


def test_the_learning_rate_rises_and_falls_and_knows_no_last_step() -> None:
    factors = [learning_rate_factor(step) for step in range(1000)]
    peak = factors.index(max(factors))
    assert 0 < peak < 100 and max(factors) == 1.0
    assert factors[: peak + 1] == sorted(factors[: peak + 1]) and factors[peak:] == sorted(factors[peak:], reverse=True)
    assert factors[-1] > 0


def test_scrambling_leaves_no_tensor_as_it_was(tmp_path: Path) -> None:
    run = training(tmp_path)
    run.step()
    run.scramble()
    state = [value for values in run.optimizer.state.values() for value in values.values()]
    assert all(tensor.isnan().all() for tensor in [*run.model.state_dict().values(), *state])


def test_the_same_seed_makes_the_same_first_steps(tmp_path: Path) -> None:
    losses = [[run.step() for _ in range(2)] for run in (training(tmp_path) for _ in range(2))]
    assert losses[0] == losses[1]


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("agreed", "cause", "shown"),
    [
        (CheckpointError("save: KeyError: 'w'"), KeyError("w"), True),
        (CheckpointError("save: own: KeyError: 'w'"), caused(CheckpointError("KeyError: 'w'"), KeyError("w")), True),
        (CheckpointError("save: full"), OSError(28, "No space left on device"), False),
        (CheckpointError("save: no"), ConfigurationError("no"), False),
        (CheckpointError("load: no chunk"), caused(CorruptCheckpointError("no chunk"), zlib.error("-3")), False),
        (CorruptCheckpointError("no chunk"), zlib.error("-3"), False),
        (ConfigurationError("load: no", phase="apply"), KeyError("of another rank"), True),
        (RankAbsentError("save: rank 1 is gone"), RuntimeError("Connection reset by peer"), False),
    ],
)
def test_only_an_unforeseen_error_shows_where_it_came_from(
    capsys: pytest.CaptureFixture[str], agreed: CheckpointError, cause: Exception, shown: bool
) -> None:
    with pytest.raises(CheckpointError), tracebacks_of_bugs():
        raise agreed from cause
    assert (type(cause.__cause__ or cause).__name__ in capsys.readouterr().err) is shown


LAYOUTS = [
    ["parallel=accelerate"], ["parallel=ddp"], ["parallel=fsdp"], ["parallel=pipeline"], ["parallel=single"],
    ["parallel=ddp_pipeline", "parallel.pp=1"], ["parallel=ddp_tp", "parallel.tp=1"],
    ["parallel=hsdp", "parallel.fsdp=1"], ["parallel=tp_fsdp", "parallel.tp=1"],
]  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout[0])
def test_one_rank_of_any_layout_trains_without_a_process_group(tmp_path: Path, layout: list[str]) -> None:
    """And as the plain model does, to the bit."""
    assert training(tmp_path, "model.size=nano", *layout).step() == training(tmp_path, "model.size=nano").step()
